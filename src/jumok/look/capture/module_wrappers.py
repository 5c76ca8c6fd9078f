"""Modules that are compiled by ``torch.compile`` or wrapped: which they are, and the original inside."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from jumok.errors import InputError

# Attributes by which wrappers hold the module that they wrap: of torch.compile, of FSDP, of checkpoints.
WRAPPER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
PARALLEL_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def require_module(model: object, caller: str) -> nn.Module:
    """Return the module inside its wrappers, whose names are those of the original."""
    if not isinstance(model, nn.Module):
        has_inner = isinstance(getattr(model, "model", None), nn.Module)
        remedy = "; give its .model" if has_inner else ""
        raise InputError(f"{caller} takes an nn.Module, got {type(model).__name__}{remedy}")
    inner = get_wrapped_module(model)
    return model if inner is None else require_module(inner, caller)


def require_uncompiled(model: object, caller: str) -> nn.Module:
    """Return the module inside its wrappers if no part of it is compiled."""
    module = require_module(model, caller)
    compiled = [model] if isinstance(model, get_dynamo().OptimizedModule) else []
    compiled += [part for part in module.modules() if is_compiled(part)]
    if not compiled or is_forced_eager():
        return module
    names = {id(part): name for name, part in module.named_modules() if name}
    raise InputError(
        f"{names.get(id(compiled[0]), 'the model')} is compiled by torch.compile, and compiled code runs without "
        f"Python: {caller} does not reach it; run it uncompiled for once: "
        f'with torch.compiler.set_stance("force_eager"), jumok.{caller}(…): …'
    )


def get_dynamo() -> Any:
    """Return ``torch._dynamo``, whose import takes time."""
    return importlib.import_module("torch._dynamo")


def is_forced_eager() -> bool:
    """Return whether ``torch.compiler.set_stance`` makes compiled code run as the original."""
    return bool(get_dynamo().eval_frame._stance.stance == "force_eager")


def get_wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper wraps, or None."""
    if isinstance(module, PARALLEL_WRAPPERS):
        inner = module.module
        return inner if isinstance(inner, nn.Module) else None
    if isinstance(module, torch.jit.ScriptModule):
        return None
    children = module._modules
    return next((inner for name in WRAPPER_ATTRIBUTES if (inner := children.get(name)) is not None), None)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of the module run compiled code."""
    return isinstance(module, get_dynamo().OptimizedModule) or find_compiled_attribute(module) is not None


def find_compiled_attribute(module: nn.Module) -> str | None:
    """Return the name of the attribute of the module that holds compiled code, or None."""
    if isinstance(module, get_dynamo().OptimizedModule):
        return None  # its own attributes are those of the original
    if module._compiled_call_impl is not None:
        return "_compiled_call_impl"
    return "forward" if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable") else None
