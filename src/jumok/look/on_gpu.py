"""Pooled maps by our Triton kernel, where it serves. (Strips, in plain PyTorch, serve everywhere.)"""

from __future__ import annotations

import torch
from torch import Tensor

from jumok.attention.capability import shared_memory, why_no_kernel
from jumok.look.kept import Kept, Part

WORTH_IT = 1 << 24  # pairs; a smaller part is done before a kernel for its sizes would be compiled


def why_not_on_gpu(kept: Kept, pairs: int) -> str | None:
    """Why the kernel does not serve a map of so many pairs of query and key; None when it does."""
    reason = why_no_kernel(kept.query, products=True)
    if reason is not None:
        return reason
    if kept.score is not None or kept.change is not None or kept.softcap is not None:
        return "the scores are more than a scaled dot product"
    if kept.mask is not None and not _is_of_keys(kept.mask):
        return "the mask differs from head to head or row to row, or holds numbers"
    if kept.key.dtype != kept.query.dtype or kept.query.shape[-1] * kept.query.element_size() > 512:
        return "the heads are too wide, or of two types"
    if pairs < WORTH_IT:
        return "the part is small"
    from jumok.attention.kernels.lse import SHARED_MEMORY

    there = shared_memory(kept.query.device)
    return None if there >= SHARED_MEMORY else f"the GPU has only {there} bytes of shared memory a program"


def pooled_on_gpu(
    kept: Kept, batch: int, heads: Part, rows: slice, cols: slice, cells: tuple[int, int]
) -> Tensor:
    """The map ``(heads, *cells)`` of a rectangle; see :func:`jumok.look.views.map`."""
    from jumok.attention.kernels.lse import row_lse
    from jumok.attention.kernels.pooled import pooled_maps

    all_heads = isinstance(heads, slice) and (heads.start, heads.stop) == (0, kept.shape[1])
    key = kept.key[batch] if all_heads else kept.keys_of(batch, heads)
    query = kept.query[batch][heads][:, rows]
    alive = None
    if kept.mask is not None:
        mask = kept.mask[(None,) * (4 - kept.mask.dim())]
        alive = mask[batch if len(mask) > 1 else 0, 0, 0].to(query.device).expand(kept.shape[3])
    diagonal = None if kept.diagonal is None else kept.diagonal + rows.start
    lse = kept.lse_of(batch, heads, rows)
    if lse is None:
        lse = row_lse(query, key, scale=kept.scale, diagonal=diagonal, window=kept.window, alive=alive)
        kept.learn_lse(batch, heads, rows, lse)
    return pooled_maps(
        query,
        key[:, cols],
        lse.float(),
        scale=kept.scale,
        cells=cells,
        diagonal=None if diagonal is None else diagonal - cols.start,
        window=kept.window,
        alive=None if alive is None else alive[cols],
    )


def _is_of_keys(mask: Tensor) -> bool:
    """Whether a mask says only which keys are there: ``(…, 1, 1, K)`` bool."""
    return mask.dtype == torch.bool and all(n == 1 for n in mask.shape[-3:-1])
