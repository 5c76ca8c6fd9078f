"""``v · tanh(query + key)`` for all pairs, the heart of the additive scores: by kernel, or in chunks."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from jumok.attention import chunking
from jumok.attention.gpu_support import triton_unsupported_reason


def compute_additive_scores(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    """``v · tanh(query + key)`` for all pairs: ``(…, Q, H)`` and ``(…, K, H)`` give ``(…, Q, K)``.

    The fused kernel where there is one; plain PyTorch, a few queries at a time, where not.
    """
    if triton_unsupported_reason(query) is None:
        from jumok.attention.kernels.additive import fused_additive_scores

        if query.dim() == 3 and query.shape[0] == keys.shape[0] and keys.dim() == 3:
            return fused_additive_scores(query, keys, v)
        leading = torch.broadcast_shapes(query.shape[:-2], keys.shape[:-2])
        flat = [x.expand(*leading, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (query, keys)]
        return fused_additive_scores(flat[0], flat[1], v).reshape(*leading, query.shape[-2], keys.shape[-2])

    if query.dtype != torch.float64:
        query, keys = query.float(), keys.float()  # the scores come in float32, as from the kernel

    def rows(part: slice) -> Tensor:
        pairs = query[..., part, None, :] + keys[..., None, :, :]  # (…, rows, K, H)
        with disable_autocast(pairs.device):
            return pairs.tanh() @ v.to(pairs.dtype)

    return chunking.map_row_chunks(
        rows, query.shape[-2], count_elements_per_row(query, keys), (query, keys, v)
    )


def disable_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Disable autocast, which would round the inputs and outputs of products."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def count_elements_per_row(query: Tensor, keys: Tensor) -> int:
    """How large the intermediate of plain PyTorch is for each query row: B·K·H."""
    leading = query.shape[:-2]
    if leading != keys.shape[:-2]:
        leading = torch.broadcast_shapes(leading, keys.shape[:-2])
    return leading.numel() * keys.shape[-2] * keys.shape[-1]
