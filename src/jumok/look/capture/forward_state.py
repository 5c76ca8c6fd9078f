"""A forward pass without side effects: its inputs are copies, and what it changes in the model is restored."""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from jumok.errors import InputError

IMMUTABLE_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type, nn.Module, torch.Size),
    *(torch.dtype, torch.device, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)


def copy_inputs(inputs: Any) -> Any:
    """Return a copy of the arguments of a forward: tensors, containers and other objects, such as caches."""
    return pytree.tree_map(_copy_input, inputs)


def _copy_input(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if isinstance(x, IMMUTABLE_TYPES):
        return x
    try:
        return copy.deepcopy(x)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InputError(
            f"watch runs a compiled model a second time, on a copy of its inputs, but a {type(x).__name__} cannot be "
            f"copied ({error}); run the model uncompiled: "
            'with torch.compiler.set_stance("force_eager"), jumok.watch(…): …'
        ) from error


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore the attributes and buffers of all modules of ``model``, and the random state, at exit."""
    modules = list(model.modules())
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({x.device.index or 0 for x in tensors if x.device.type == "cuda"})
    snapshots = [_ModuleSnapshot(module) for module in modules]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for snapshot in snapshots:
            snapshot.restore()


class _ModuleSnapshot:
    """The attributes of one module: tensors other than parameters by value, lists and dicts by their items."""

    def __init__(self, module: nn.Module) -> None:
        self.names = vars(module)
        self.values = dict(self.names)
        self.lists = [(value, list(value)) for value in self.values.values() if type(value) is list]
        # Includes the buffers.
        self.dicts = [(value, dict(value)) for value in self.values.values() if isinstance(value, dict)]
        candidates = [*self.values.values(), *(x for _, items in self.lists for x in items)]
        candidates += [x for _, items in self.dicts for x in items.values()]
        self.tensors = [
            (x, x.detach().clone())
            for x in candidates
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and not x.is_inference()
        ]

    def restore(self) -> None:
        for mapping, entries in [(self.names, self.values), *self.dicts]:
            if mapping.keys() != entries.keys() or any(mapping[name] is not x for name, x in entries.items()):
                mapping.clear()
                mapping.update(entries)
        for current, items in self.lists:
            if len(current) != len(items) or any(x is not y for x, y in zip(current, items, strict=True)):
                current[:] = items
        for tensor, value in self.tensors:
            # The statistics of batch norm are written without a new version.
            if not torch.equal(tensor, value):
                with torch.no_grad():
                    tensor.copy_(value)
