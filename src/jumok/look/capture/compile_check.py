"""Rejection of compiled modules, which run without Python, with a message that names the remedy."""

from __future__ import annotations

from torch import nn

from jumok.errors import InputError


def require_uncompiled(model: object, caller: str) -> nn.Module:
    """Return the model if it is a module and no part of it is compiled."""
    import torch._dynamo

    if not isinstance(model, nn.Module):
        has_inner = isinstance(getattr(model, "model", None), nn.Module)
        remedy = "; give its .model" if has_inner else ""
        raise InputError(f"{caller} takes an nn.Module, got {type(model).__name__}{remedy}")
    for name, module in model.named_modules():
        remedy = ""
        if isinstance(module, torch._dynamo.OptimizedModule):
            remedy = f"{caller} and call the module that it was made from: compiled._orig_mod"
        elif module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable"):
            if torch._dynamo.eval_frame._stance.stance == "force_eager":
                continue
            remedy = f'run it uncompiled for once: with torch.compiler.set_stance("force_eager"), jumok.{caller}(…): …'
        if remedy:
            raise InputError(
                f"{name or 'the model'} is compiled by torch.compile, and compiled code runs without Python: "
                f"nothing in it can be seen; {remedy}"
            )
    return model
