"""Maps and statistics by Triton kernels, where supported. Row chunks in PyTorch are the general method."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jumok.attention.gpu_support import get_max_shared_memory, triton_unsupported_reason
from jumok.look.capture.captured_attention import AxisIndex, CapturedAttention
from jumok.look.views.row_chunks import count_indices

MIN_KERNEL_PAIRS = 1 << 24  # smaller maps take less time than the compilation of a kernel


def gpu_unsupported_reason(attention: CapturedAttention, num_pairs: int) -> str | None:
    """Return why the kernels do not support ``num_pairs`` query-key pairs; None if they do."""
    reason = triton_unsupported_reason(attention.query, uses_matmul=True)
    if reason is not None:
        return reason
    if attention.score_function is not None or attention.score_mod is not None or attention.softcap is not None:
        return "the scores are more than a scaled dot product"
    if attention.mask is not None and not _is_key_mask(attention.mask):
        return "the mask differs between heads or rows, or is additive"
    if attention.key.dtype != attention.query.dtype or attention.query.shape[-1] * attention.query.element_size() > 512:
        return "the heads are too wide, or queries and keys have different types"
    if num_pairs < MIN_KERNEL_PAIRS:
        return "the part is small"
    from jumok.attention.kernels.lse import MAX_SHARED_MEMORY_BYTES

    shared_memory = get_max_shared_memory(attention.query.device)
    if shared_memory < MAX_SHARED_MEMORY_BYTES:
        return f"the GPU has only {shared_memory} bytes of shared memory per program"
    return None


def pool_map_on_gpu(
    attention: CapturedAttention,
    batch: int,
    heads: AxisIndex,
    rows: slice,
    cols: slice,
    num_cells: tuple[int, int],
) -> Tensor:
    """Return the map ``(heads, *num_cells)`` of a rectangle; see :func:`.statistics.compute_pooled_map`."""
    from jumok.attention.kernels.pooled_maps import compute_pooled_maps

    inputs = _read_inputs(attention, batch, heads, rows)
    return compute_pooled_maps(
        inputs.query,
        inputs.key[:, cols],
        inputs.lse,
        scale=attention.scale,
        output_size=num_cells,
        diagonal=None if inputs.diagonal is None else inputs.diagonal - cols.start,
        window=attention.window,
        key_mask=None if inputs.key_mask is None else inputs.key_mask[cols],
    )


def compute_statistics_on_gpu(
    attention: CapturedAttention, batch: int, heads: AxisIndex, num_top: int
) -> dict[str, Tensor] | None:
    """Return all statistics of some heads, or None if the kernel does not support them.

    Distances are not divided by the number of queries. See :func:`.statistics.compute_statistics`.
    """
    _, _, num_queries, num_keys = attention.shape
    if gpu_unsupported_reason(attention, count_indices(heads) * num_queries * num_keys) is not None:
        return None
    from jumok.attention.kernels.statistics import MAX_TOP_KEYS, compute_attention_statistics

    if num_top > MAX_TOP_KEYS:
        return None
    inputs = _read_inputs(attention, batch, heads, slice(0, num_queries))
    return compute_attention_statistics(
        inputs.query,
        inputs.key,
        inputs.lse,
        scale=attention.scale,
        diagonal=inputs.diagonal,
        window=attention.window,
        key_mask=inputs.key_mask,
        num_top=num_top,
    )


class _KernelInputs(NamedTuple):
    """Some heads and rows of one sequence, as the kernels take them."""

    query: Tensor  # (H, R, D)
    key: Tensor  # (G, K, D)
    lse: Tensor  # (H, R) float32
    diagonal: int | None
    key_mask: Tensor | None  # (K,) bool


def _read_inputs(attention: CapturedAttention, batch: int, heads: AxisIndex, rows: slice) -> _KernelInputs:
    """Return the inputs of a kernel. If the row sums are unknown, they are computed, and stored."""
    from jumok.attention.kernels.lse import compute_row_lse

    has_all_heads = isinstance(heads, slice) and (heads.start, heads.stop) == (0, attention.shape[1])
    key = attention.key[batch] if has_all_heads else attention.select_keys(batch, heads)
    query = attention.query[batch][heads][:, rows]
    key_mask = None
    if attention.mask is not None:
        mask = attention.mask[(None,) * (4 - attention.mask.dim())]
        key_mask = mask[batch if len(mask) > 1 else 0, 0, 0].to(query.device).expand(attention.shape[3])
    diagonal = None if attention.diagonal is None else attention.diagonal + rows.start
    lse = attention.get_lse(batch, heads, rows)
    if lse is None:
        lse = compute_row_lse(
            query, key, scale=attention.scale, diagonal=diagonal, window=attention.window, key_mask=key_mask
        )
        attention.store_lse(batch, heads, rows, lse)
        lse = lse.where(lse.isfinite(), 0.0)
    return _KernelInputs(query, key, lse.float(), diagonal, key_mask)


def _is_key_mask(mask: Tensor) -> bool:
    """Return whether a mask depends on the key only: ``(…, 1, 1, K)`` bool."""
    return mask.dtype == torch.bool and all(n == 1 for n in mask.shape[-3:-1])
