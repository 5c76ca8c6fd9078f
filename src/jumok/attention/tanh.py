"""``v · tanh(query + key)`` for all pairs, the heart of the additive scores: by kernel, or in chunks."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from jumok.attention import chunks
from jumok.attention.capability import why_no_kernel


def tanh_scores(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    """``v · tanh(query + key)`` for all pairs: ``(…, Q, H)`` and ``(…, K, H)`` give ``(…, Q, K)``.

    The fused kernel where there is one; plain PyTorch, a few queries at a time, where not.
    """
    if why_no_kernel(query) is None:
        from jumok.attention.kernels.additive import additive_scores

        if query.dim() == 3 and query.shape[0] == keys.shape[0] and keys.dim() == 3:
            return additive_scores(query, keys, v)
        leading = torch.broadcast_shapes(query.shape[:-2], keys.shape[:-2])
        flat = [x.expand(*leading, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (query, keys)]
        return additive_scores(flat[0], flat[1], v).reshape(*leading, query.shape[-2], keys.shape[-2])

    if query.dtype != torch.float64:
        query, keys = query.float(), keys.float()  # the scores come in float32, as from the kernel

    def rows(part: slice) -> Tensor:
        pairs = query[..., part, None, :] + keys[..., None, :, :]  # (…, rows, K, H)
        with full_precision(pairs.device):
            return pairs.tanh() @ v.to(pairs.dtype)

    return chunks.by_rows(rows, query.shape[-2], elements_a_row(query, keys), (query, keys, v))


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Disable autocast, which would round the inputs and outputs of products."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def elements_a_row(query: Tensor, keys: Tensor) -> int:
    """How large the intermediate of plain PyTorch is for each query row: B·K·H."""
    leading = query.shape[:-2]
    if leading != keys.shape[:-2]:
        leading = torch.broadcast_shapes(leading, keys.shape[:-2])
    return leading.numel() * keys.shape[-2] * keys.shape[-1]
