"""Graphs of ``torch.export`` and ``torch.fx``, which call the operator of ``F.scaled_dot_product_attention``.

The module of an exported program runs as one function, without its submodules. The graph says in which of them
each operator was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from jumok.look.capture.adapters import sdpa
from jumok.look.capture.call_site import CallHints, provide_hints
from jumok.look.capture.observer import OBSERVERS
from jumok.look.capture.patching import AttributePatch, Function

SDPA_PACKET = torch.ops.aten.scaled_dot_product_attention
SDPA_OPERATOR = SDPA_PACKET.default
SDPA_TARGETS = (SDPA_OPERATOR, sdpa.SDPA_FUNCTION)  # in graphs of torch.export, and in those of torch.fx
# By graph: the name of the module of each attention.
_MODULE_NAMES: weakref.WeakKeyDictionary[fx.GraphModule, list[str]] = weakref.WeakKeyDictionary()


def list_patches(model: nn.Module) -> Iterator[AttributePatch]:
    """List the patches of what graphs call, and of their interpreter, if ``model`` contains a graph."""
    if any(isinstance(getattr(module, "graph", None), fx.Graph) for module in model.modules()):
        yield AttributePatch(SDPA_PACKET, "default", _wrap_target)
        yield AttributePatch(torch._C._nn, "scaled_dot_product_attention", _wrap_target)
        yield AttributePatch(fx.Interpreter, "call_function", _wrap_call_function)


def _wrap_target(target: Function) -> Function:
    attention = sdpa.wrap_sdpa(target)

    def watched_target(*args: Any, **options: Any) -> Any:
        module = None if torch.compiler.is_compiling() else _find_module()
        with provide_hints(CallHints(module=module)):
            return attention(*args, **options)

    return watched_target


def _wrap_call_function(call_function: Function) -> Function:
    wrappers = {target: sdpa.wrap_sdpa(target) for target in SDPA_TARGETS}

    def watched_call(self: Any, target: Any, *args: Any, **options: Any) -> Any:
        return call_function(self, wrappers.get(target, target), *args, **options)

    return watched_call


def _find_module() -> nn.Module | None:
    """Return the module of the next attention in the graph that is running; None if it is unknown."""
    module = None
    for observer in OBSERVERS.get():
        frame = observer.module_stack.current_frame
        if frame is None or not isinstance(frame.module, fx.GraphModule):
            continue
        names = _list_module_names(frame.module)
        if frame.num_operators < len(names):
            module = _get_submodule(frame.module, names[frame.num_operators])
        frame.num_operators += 1
    return module


def _list_module_names(module: fx.GraphModule) -> list[str]:
    """Return the name of the module of each attention, in the order in which they run."""
    if module not in _MODULE_NAMES:
        stacks = [node.meta.get("nn_module_stack") or {} for node in module.graph.nodes if node.target in SDPA_TARGETS]
        _MODULE_NAMES[module] = [str(list(stack.values())[-1][0]) if stack else "" for stack in stacks]
    return _MODULE_NAMES[module]


def _get_submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name) if name else None
    except AttributeError:  # a module without parameters, which the exported program does not have
        return None
