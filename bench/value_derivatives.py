"""An oracle for attention whose weights are never laid out as queries × keys: chunks, blocks, buckets, samples.

The weight of a query on a key is the derivative of the output with respect to the value, by autograd. The values and
outputs of a module are found by the names of its parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VALUES = re.compile(r"v|(.*_)?values?(_.*)?|v_proj")  # parts that compute values
OUTPUTS = re.compile(r"o|proj|post|out(put)?(_.*)?_proj|out_proj")  # parts that take the output
VALUE_ARGUMENTS = ("encoder_hidden_states",)  # if no part computes values
MAX_QUERIES = 24  # rows that are compared


class ModuleCall(NamedTuple):
    """A call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def record_calls(model: nn.Module, names: Sequence[str], call: Any) -> list[ModuleCall]:
    """Run ``call()`` and return the calls of the modules with these names."""
    calls: list[ModuleCall] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ModuleCall(module, *(torch.utils._pytree.tree_map_only(Tensor, torch.clone, (args, kwargs)))))

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name) if name != type(model).__name__ else model
            stack.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        call()
    return calls


def compute_difference(call: ModuleCall, weights: Tensor) -> float:
    """Return the smallest difference of weights ``(B, H, Q, K)`` from derivatives of this module."""
    try:
        values, outputs = _run(call)
    except (RuntimeError, TypeError, ValueError, AssertionError, IndexError):
        return math.inf
    differences = [math.inf]
    batch, num_heads, num_queries, num_keys = weights.shape
    rows = torch.linspace(0, num_queries - 1, min(num_queries, MAX_QUERIES)).long().unique()
    for out in _list_outputs(outputs, values[0].shape[-1], num_queries):
        derivatives = [x.narrow(0, 0, batch) for x in _differentiate(out, values, rows, batch, num_heads)]
        for expected in _list_sources(derivatives, num_keys):
            differences.append(float((weights[:, :, rows] - expected).abs().max()))
    return min(differences)


def _run(call: ModuleCall) -> tuple[list[Tensor], list[Tensor]]:
    """Run a module again: its values, as leaves of the graph, and its outputs."""
    leaves: list[Tensor] = []
    outputs: list[Tensor] = []
    arguments = {name: x for name, x in call.kwargs.items() if name in VALUE_ARGUMENTS and isinstance(x, Tensor)}

    def make_leaf(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        leaves.append(out.detach().clone().requires_grad_())
        return leaves[-1] + 0

    with ExitStack() as stack, torch.enable_grad():
        children = dict(call.module.named_children())
        value_parts = [x for name, x in children.items() if VALUES.fullmatch(name)]
        for part in value_parts:
            stack.callback(part.register_forward_hook(make_leaf).remove)
        for name, part in children.items():
            if OUTPUTS.fullmatch(name):
                hook = part.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
                stack.callback(hook.remove)
        kwargs = dict(call.kwargs)
        if not value_parts:
            for name, x in arguments.items():
                leaves.append(x.detach().clone().requires_grad_())
                kwargs[name] = leaves[-1] + 0
        torch.manual_seed(3)
        result = call.module(*call.args, **kwargs)
    if not leaves:
        raise ValueError("no values")
    return leaves, outputs or [result if isinstance(result, Tensor) else result[0]]


def _list_outputs(outputs: Sequence[Tensor], width: int, num_queries: int) -> Iterator[Tensor]:
    """List the outputs, and these one after the other, that have so many queries: ``(B, Q, C)``."""
    rows = [(x if x.shape[-1] == width else x.flatten(-2)).flatten(1, -2) for x in outputs]
    for parts in (*([x] for x in rows), rows, rows[::-1]):
        out = torch.cat(parts, 1) if len({x.shape[0] for x in parts}) == 1 else parts[0]
        if out.shape[1] == num_queries:
            yield out


def _differentiate(out: Tensor, values: Sequence[Tensor], rows: Tensor, batch: int, num_heads: int) -> Iterator[Tensor]:
    """Return ∂ out / ∂ values ``(B, H, rows, K)`` of the first feature of each head, for each source."""
    step = out.shape[-1] // num_heads
    gradients = [
        torch.autograd.grad(out[:, row, ::step].sum(), values, retain_graph=True, materialize_grads=True)
        for row in rows.tolist()
    ]
    for parts in zip(*gradients, strict=True):
        first = [x if x.shape[0] == batch else x.transpose(0, 1) for x in parts]  # some have the batch second
        yield torch.stack([x[..., ::step] for x in first], dim=2).permute(0, 3, 2, 1)


def _list_sources(derivatives: Sequence[Tensor], num_keys: int) -> Iterator[Tensor]:
    """List the derivatives by one source of values, by all one after the other, and by all at the same positions."""
    candidates = [*derivatives, torch.cat(list(derivatives), dim=-1)]
    if len({x.shape for x in derivatives}) == 1:
        candidates.append(torch.stack(list(derivatives)).sum(0))
    yield from (x for x in candidates if x.shape[-1] == num_keys)
