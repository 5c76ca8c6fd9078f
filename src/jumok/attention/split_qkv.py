"""Queries, keys and values from one product, and the gradient of that product from theirs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from jumok.attention.caching import is_tracing


def split_qkv(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """``x.split(widths, dim=-1)`` of ``(B, T, width)``; its gradient is not copied if it need not be.

    PyTorch's own always puts the gradients of the parts together in new memory. A kernel that makes them all
    can write them side by side from the start (:mod:`jumok.attention.kernels.short` does).
    """
    plain = is_tracing() or torch._C._are_functorch_transforms_active()
    if plain or not (torch.is_grad_enabled() and x.requires_grad):
        return cast(tuple[Tensor, ...], x.split(list(widths), dim=-1))
    return cast(tuple[Tensor, ...], _SplitQKV.apply(x, tuple(widths)))  # type: ignore[no-untyped-call]


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], x.split(widths, dim=-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Where this is differentiated once more, each part must be seen.
        whole = None if torch.is_grad_enabled() else _view_as_one(gradients)
        return torch.cat(gradients, dim=-1) if whole is None else whole, None


def _view_as_one(gradients: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose parts these ``(B, T, ·)`` are, if they lie side by side in memory, in this order."""
    first = gradients[0]
    (batch, length), widths = first.shape[:2], [x.shape[-1] for x in gradients]
    width = sum(widths)
    dense = (length * width, width, 1)
    begins = itertools.accumulate(widths[:-1], initial=first.storage_offset())
    for x, begin in zip(gradients, begins, strict=True):
        there = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        steps = all(step == want for n, step, want in zip(x.shape, x.stride(), dense, strict=True) if n > 1)
        if not (there and steps and x.storage_offset() == begin and x.dtype == first.dtype):
            return None
    return first.as_strided((batch, length, width), dense)
