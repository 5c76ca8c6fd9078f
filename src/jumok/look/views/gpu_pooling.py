"""Pooled maps by our Triton kernel, where it serves. (Strips, in plain PyTorch, serve everywhere.)"""

from __future__ import annotations

import torch
from torch import Tensor

from jumok.attention.gpu_support import get_max_shared_memory, triton_unsupported_reason
from jumok.look.capture.captured_attention import AxisIndex, CapturedAttention

MIN_KERNEL_PAIRS = 1 << 24  # pairs; a smaller part is done before a kernel for its sizes would be compiled


def gpu_unsupported_reason(attention: CapturedAttention, num_pairs: int) -> str | None:
    """Why the kernel does not serve a map of so many pairs of query and key; None when it does."""
    reason = triton_unsupported_reason(attention.query, uses_matmul=True)
    if reason is not None:
        return reason
    if (
        attention.score_function is not None
        or attention.score_mod is not None
        or attention.softcap is not None
    ):
        return "the scores are more than a scaled dot product"
    if attention.mask is not None and not _is_key_mask(attention.mask):
        return "the mask differs from head to head or row to row, or holds numbers"
    if (
        attention.key.dtype != attention.query.dtype
        or attention.query.shape[-1] * attention.query.element_size() > 512
    ):
        return "the heads are too wide, or of two types"
    if num_pairs < MIN_KERNEL_PAIRS:
        return "the part is small"
    from jumok.attention.kernels.lse import MAX_SHARED_MEMORY_BYTES

    there = get_max_shared_memory(attention.query.device)
    return (
        None
        if there >= MAX_SHARED_MEMORY_BYTES
        else f"the GPU has only {there} bytes of shared memory a program"
    )


def pool_map_on_gpu(
    attention: CapturedAttention,
    batch: int,
    heads: AxisIndex,
    rows: slice,
    cols: slice,
    num_cells: tuple[int, int],
) -> Tensor:
    """The map ``(heads, *num_cells)`` of a rectangle; see :func:`jumok.look.views.map`."""
    from jumok.attention.kernels.lse import compute_row_lse
    from jumok.attention.kernels.pooled_maps import compute_pooled_maps

    all_heads = isinstance(heads, slice) and (heads.start, heads.stop) == (0, attention.shape[1])
    key = attention.key[batch] if all_heads else attention.select_keys(batch, heads)
    query = attention.query[batch][heads][:, rows]
    alive = None
    if attention.mask is not None:
        mask = attention.mask[(None,) * (4 - attention.mask.dim())]
        alive = mask[batch if len(mask) > 1 else 0, 0, 0].to(query.device).expand(attention.shape[3])
    diagonal = None if attention.diagonal is None else attention.diagonal + rows.start
    lse = attention.get_lse(batch, heads, rows)
    if lse is None:
        lse = compute_row_lse(
            query, key, scale=attention.scale, diagonal=diagonal, window=attention.window, key_mask=alive
        )
        attention.store_lse(batch, heads, rows, lse)
    return compute_pooled_maps(
        query,
        key[:, cols],
        lse.float(),
        scale=attention.scale,
        output_size=num_cells,
        diagonal=None if diagonal is None else diagonal - cols.start,
        window=attention.window,
        key_mask=None if alive is None else alive[cols],
    )


def _is_key_mask(mask: Tensor) -> bool:
    """Whether a mask says only which keys are there: ``(…, 1, 1, K)`` bool."""
    return mask.dtype == torch.bool and all(n == 1 for n in mask.shape[-3:-1])
