"""Additive scores ``v · tanh(query + key)`` of all pairs, by a Triton kernel or in chunks of rows."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from jumok.attention import chunking
from jumok.attention.gpu_support import triton_unsupported_reason


def compute_additive_scores(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    """Return ``v · tanh(query + key)`` of all pairs, ``(…, Q, K)``.

    The fused kernel computes them where it is supported. Elsewhere, plain PyTorch processes the queries in
    chunks. The scores are at least float32.

    Args:
        query: projected queries, ``(…, Q, H)``.
        keys: projected keys, ``(…, K, H)``.
        v: ``(H,)``.
    """
    if triton_unsupported_reason(query) is None:
        from jumok.attention.kernels.additive import fused_additive_scores

        if query.dim() == 3 and query.shape[0] == keys.shape[0] and keys.dim() == 3:
            return fused_additive_scores(query, keys, v)
        leading = torch.broadcast_shapes(query.shape[:-2], keys.shape[:-2])
        flat = [x.expand(*leading, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (query, keys)]
        return fused_additive_scores(flat[0], flat[1], v).reshape(*leading, query.shape[-2], keys.shape[-2])

    if query.dtype != torch.float64:
        query, keys = query.float(), keys.float()  # the kernel returns float32 as well

    def compute_rows(rows: slice) -> Tensor:
        pairs = query[..., rows, None, :] + keys[..., None, :, :]  # (…, rows, K, H)
        with disable_autocast(pairs.device):
            return pairs.tanh() @ v.to(pairs.dtype)

    return chunking.map_row_chunks(compute_rows, query.shape[-2], count_elements_per_row(query, keys), (query, keys, v))


def count_elements_per_row(query: Tensor, keys: Tensor) -> int:
    """Return the elements of plain PyTorch's intermediate for each query row: B·K·H."""
    leading = query.shape[:-2]
    if leading != keys.shape[:-2]:
        leading = torch.broadcast_shapes(leading, keys.shape[:-2])
    return leading.numel() * keys.shape[-2] * keys.shape[-1]


def is_autocast_enabled(device: torch.device) -> bool:
    """Return whether autocast is active for a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def disable_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Disable autocast, which would round the inputs and outputs of matrix products."""
    if is_autocast_enabled(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
