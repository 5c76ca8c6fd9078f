"""Split the heads of a joint projection into queries, keys and values without copying their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from jumok.attention.caching import is_tracing


def split_qkv(x: Tensor, head_counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Return ``x.split(head_counts, dim=1)`` of ``(B, H, T, D)``. The backward pass copies only if it must.

    PyTorch's own split always copies the gradients of the parts into new memory. A kernel that computes all
    of them can write them next to each other (:mod:`jumok.attention.kernels.short_sequences` does).
    """
    plain = is_tracing() or torch._C._are_functorch_transforms_active()
    if plain or not (torch.is_grad_enabled() and x.requires_grad):
        return cast(tuple[Tensor, ...], x.split(list(head_counts), dim=1))
    return cast(tuple[Tensor, ...], _SplitQKV.apply(x, tuple(head_counts)))  # type: ignore[no-untyped-call]


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, head_counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], x.split(head_counts, dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # A double backward needs the graph of each part.
        joined = None if torch.is_grad_enabled() else _view_as_one(gradients)
        return torch.cat(gradients, dim=1) if joined is None else joined, None


def _view_as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return a view that joins these ``(B, ·, T, D)``, if they are adjacent in memory and in this order."""
    first, num_heads = parts[0], 0
    strides, offset, memory = first.stride(), first.storage_offset(), first.untyped_storage().data_ptr()
    for x in parts:
        same_strides = all(
            actual == expected for size, actual, expected in zip(x.shape, x.stride(), strides, strict=True) if size > 1
        )
        same_memory = x.untyped_storage().data_ptr() == memory and x.dtype == first.dtype
        if not (same_memory and same_strides and x.storage_offset() == offset + num_heads * strides[1]):
            return None
        num_heads += x.shape[1]
    batch, _, length, width = first.shape
    return first.as_strided((batch, num_heads, length, width), strides)
