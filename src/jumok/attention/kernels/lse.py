"""log Σ exp(score) of each row of dot-product attention, if no attention kernel returned it.

It also contains what the pooling kernel shares: block sizes and the mask of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.kernels.common import (
    LOG2_E,
    divide_up,
    launch_options,
    make_rows_contiguous,
    matmul,
    pad_width,
)
from jumok.attention.kernels.launcher import launch

MAX_SHARED_MEMORY_BYTES = 116 << 10  # no program needs more


class PoolingBlockSizes(NamedTuple):
    """Block sizes of the lse and the pooling kernel. From `unroll` on, the pooling kernel's only, except
    `max_registers`.
    """

    queries: int = 256  # of a tile; the more, the less often the keys are read
    keys: int = 64  # of a tile
    num_warps: int = 8
    num_stages: int = 3  # blocks of keys loaded ahead, for each of `unroll`
    unroll: int = 2  # blocks of keys per loop iteration, if a cell has that many
    max_registers: int = 128  # per thread at most: few enough that two programs share a multiprocessor
    num_polynomials: int = 1  # of four exponentials: 0, 1 or 2
    sum_per_warp: bool = False  # each warp writes its own sums if a tile is in one cell; takes more memory
    target_programs: int = 2048  # the loop over the keys is split until there are about this many programs


def choose_lse_blocks(query: Tensor, num_slots: int) -> PoolingBlockSizes:
    """Return block sizes for queries ``(H, Q, D)`` in this many slots, as large as shared memory allows."""
    row_bytes = pad_width(query.shape[-1]) * query.element_size()
    if query.dtype == torch.float32:
        if row_bytes <= 256 and num_slots > 64:
            return PoolingBlockSizes(queries=128, num_stages=2, unroll=1, num_polynomials=0)
        return PoolingBlockSizes(
            queries=64, keys=32, num_warps=4, num_stages=2, unroll=1, max_registers=255, num_polynomials=0
        )
    if row_bytes > 256:
        return PoolingBlockSizes(queries=64, num_warps=4, num_stages=2, unroll=1, max_registers=224)
    if num_slots <= 128:
        return PoolingBlockSizes(queries=64, num_warps=4, num_stages=2)
    return (
        PoolingBlockSizes()
        if row_bytes <= 128
        else PoolingBlockSizes(queries=128, num_warps=4, num_stages=2, max_registers=168)
    )


def choose_pooling_blocks(query: Tensor, num_slots: int) -> PoolingBlockSizes:
    """Return the same for the pooling kernel, which is faster with few warps on large tiles."""
    blocks = choose_lse_blocks(query, num_slots)
    large = PoolingBlockSizes(queries=128, keys=128, num_warps=4, unroll=1, max_registers=168, sum_per_warp=True)
    return large if blocks == PoolingBlockSizes() else blocks


@triton.jit
def compute_pair_mask(row, column, inside, key_mask_ptr, diagonal, window,
                      CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_KEY_MASK: tl.constexpr):  # fmt: skip
    """Which pairs of a tile count, [rows, keys] or [1, keys]. `inside` marks the existing columns."""
    if HAS_KEY_MASK:
        inside &= tl.load(key_mask_ptr + column, mask=inside, other=0) != 0
    allowed = inside[None, :]
    if CAUSAL:
        allowed &= column[None, :] <= row[:, None] + diagonal
    if WINDOWED:
        allowed &= column[None, :] > row[:, None] + (diagonal - window)
    return allowed


@triton.jit(do_not_specialize=["R", "C", "diagonal", "window"])
def _lse_kernel(
    q_ptr, k_ptr, key_mask_ptr, out_ptr, R, C, factor, diagonal, window, heads_per_key,
    q_stride_h, q_stride_r, k_stride_h, k_stride_r,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
):  # fmt: skip
    """out[h, row] = log Σ exp(score), -inf where no key is allowed."""
    h = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block
    row = block * BQ + tl.arange(0, BQ)
    d = tl.arange(0, BD)
    q_at = q_ptr + h * q_stride_h + row.to(tl.int64)[:, None] * q_stride_r + d[None, :]
    q = tl.load(q_at, mask=(row < R)[:, None] & (d < D)[None, :], other=0.0)
    k_ptr += h // heads_per_key * k_stride_h
    first, last, clear = 0, C, C // BK * BK  # before `clear`, no column is masked
    if CAUSAL:
        last = tl.minimum(C, tl.maximum((block + 1) * BQ + diagonal, 0))
        clear = tl.minimum(clear, tl.maximum(block * BQ + diagonal + 1, 0) // BK * BK)
    if WINDOWED:
        first = tl.maximum(block * BQ + diagonal - window + 1, 0) // BK * BK
    if WINDOWED or HAS_KEY_MASK:
        clear = first
    largest = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    for part in tl.static_range(2):
        for begin in range(first if part == 0 else clear, clear if part == 0 else last, BK):
            column = begin + tl.arange(0, BK)
            inside = column < C
            k_at = k_ptr + column.to(tl.int64)[:, None] * k_stride_r + d[None, :]
            if part == 0 and BD == D:
                k = tl.load(k_at)
            else:
                k = tl.load(k_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
            s = matmul(q, tl.trans(k)) * factor
            if part == 1:
                allowed = compute_pair_mask(
                    row, column, inside, key_mask_ptr, diagonal, window, CAUSAL, WINDOWED, HAS_KEY_MASK
                )
                s = tl.where(allowed, s, float("-inf"))
            larger = tl.maximum(largest, tl.max(s, axis=1))
            base = tl.where(larger == float("-inf"), 0.0, larger)  # no key so far
            total = total * tl.exp2(largest - base) + tl.sum(tl.exp2(s - base[:, None]), axis=1)
            largest = larger
    lse = (largest + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453
    tl.store(out_ptr + h * R + row, lse, mask=row < R)


def compute_row_lse(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    diagonal: int | None = None,
    window: int | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Return log Σ exp(score) of each row, ``(H, Q)`` float32, -inf if no key is allowed.

    The arguments are those of :func:`jumok.attention.kernels.pooled_maps.compute_pooled_maps`.
    """
    (H, R, D), (G, C, _) = query.shape, key.shape
    out = query.new_full((H, R), float("-inf"), dtype=torch.float32)
    if 0 in (H, R, C):
        return out
    blocks = choose_lse_blocks(query, R)
    BQ = blocks.queries
    query, key = make_rows_contiguous(query), make_rows_contiguous(key)
    launch(
        _lse_kernel, (divide_up(R, BQ), H), query, key, out if key_mask is None else key_mask.contiguous(), out,
        R, C, scale * LOG2_E, diagonal or 0, window or 0, H // G,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        D=D, BQ=BQ, BK=blocks.keys, BD=pad_width(D), CAUSAL=diagonal is not None,
        WINDOWED=window is not None, HAS_KEY_MASK=key_mask is not None,
        **launch_options(blocks.num_warps, blocks.num_stages, blocks.max_registers),
    )  # fmt: skip
    return out
