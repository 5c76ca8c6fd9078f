"""Under autocast on a GPU, convert the weights of a whole layer at once.

Autocast converts each weight and each bias by an operation of its own, and the backward pass converts each of
their gradients back. A decoder layer has 14 of them, and on a GPU launching these 28 kernels takes longer than
launching its matrix products. Here one operation converts all of them, in each direction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jumok.attention.caching import is_tracing
from jumok.attention.compiled_block import CompiledBlock

# The type of devices where one operation copies many tensors. A CPU copies one after another.
FOREACH_DEVICE = "cuda"


class CastingLayer(nn.Module):
    """A layer of sublayers. Under autocast on a GPU, the weights of their linear layers are converted at once.

    During the call the linear layers hold the converted weights, so autocast has nothing left to convert. The
    result is the same, bit for bit.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        uncast = _find_uncast_weights(self)
        if not uncast:
            return super().__call__(*args, **kwargs)
        weights = [weight for _, _, weight in uncast]
        converted = _CastFunction.apply(torch.get_autocast_dtype(FOREACH_DEVICE), *weights)  # type: ignore[no-untyped-call]
        try:
            for (parameters, name, _), x in zip(uncast, converted, strict=True):
                parameters[name] = x
            return super().__call__(*args, **kwargs)
        finally:
            for parameters, name, weight in uncast:
                parameters[name] = weight


def _find_uncast_weights(layer: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return the weights and biases of linear layers that autocast would convert in a training step.

    Each comes with its place: the parameters of its linear layer, and its name there. The list is empty if the
    sublayers are compiled, because compiled code needs no launches for conversions. Weights that are not plain
    parameters, for example sharded ones, are left to autocast.
    """
    if not (torch.is_grad_enabled() and torch.is_autocast_enabled(FOREACH_DEVICE)):
        return []
    if is_tracing() or torch._C._are_functorch_transforms_active():
        return []
    uncast: list[tuple[dict[str, Any], str, Tensor]] = []
    for sublayer in layer._modules.values():
        if sublayer is None:
            continue
        if isinstance(sublayer, CompiledBlock) and sublayer._compiled_call_impl is not None:
            return []
        for module in sublayer._modules.values():
            if isinstance(module, nn.Linear):
                for name, x in module._parameters.items():
                    if type(x) is nn.Parameter and x.dtype is torch.float32 and x.device.type == FOREACH_DEVICE:
                        uncast.append((module._parameters, name, x))
    return uncast


class _CastFunction(torch.autograd.Function):
    """Converts tensors to a dtype, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = weights[0].dtype
        return tuple(_cast_all(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a double backward needs the graph of each conversion
            return None, *[None if x is None else x.to(ctx.dtype) for x in gradients]
        converted = iter(_cast_all([x for x in gradients if x is not None], ctx.dtype))
        return None, *[None if x is None else next(converted) for x in gradients]


def _cast_all(tensors: tuple[Tensor, ...] | list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    converted = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(converted, tensors)
    return converted
