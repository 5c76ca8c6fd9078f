"""Split the product of a joint projection into queries, keys and values without copying its gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from jumok.attention.caching import is_tracing


def split_qkv(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Return ``x.split(widths, dim=-1)`` of ``(B, T, width)``. The backward pass copies only if it must.

    PyTorch's own split always copies the gradients of the parts into new memory. A kernel that computes all
    of them can write them next to each other (:mod:`jumok.attention.kernels.short_sequences` does).
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
        # A double backward needs the graph of each part.
        joined = None if torch.is_grad_enabled() else _view_as_one(gradients)
        return torch.cat(gradients, dim=-1) if joined is None else joined, None


def _view_as_one(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return a view that joins these ``(B, T, ·)``, if they are adjacent in memory and in this order."""
    first = gradients[0]
    (batch, length), widths = first.shape[:2], [x.shape[-1] for x in gradients]
    width = sum(widths)
    strides = (length * width, width, 1)
    offsets = itertools.accumulate(widths[:-1], initial=first.storage_offset())
    for x, offset in zip(gradients, offsets, strict=True):
        same_storage = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        same_strides = all(
            actual == expected for size, actual, expected in zip(x.shape, x.stride(), strides, strict=True) if size > 1
        )
        if not (same_storage and same_strides and x.storage_offset() == offset and x.dtype == first.dtype):
            return None
    return first.as_strided((batch, length, width), strides)
