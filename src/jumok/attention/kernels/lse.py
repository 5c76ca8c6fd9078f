"""What exp(scores) sum up to in each row of dot-product attention, where no kernel told it.

Here is also what the pooling kernel shares: how the work is cut, Q Kᵀ of a tile, and which pairs count.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
MAX_SHARED_MEMORY_BYTES = 116 << 10  # bytes: no program needs more
ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)


class PoolingBlockSizes(NamedTuple):
    """How a kernel cuts its work. (From `unroll` on, but for `max_registers`, all is the pooling kernel's.)"""

    queries: int = 256  # of a tile; the more, the less often the keys are read
    keys: int = 64
    num_warps: int = 8
    num_stages: int = 3  # blocks of keys on their way, for each of `unroll`
    unroll: int = 2  # blocks of keys a turn of the loop, where a cell has so many
    max_registers: int = 128  # of a thread at most: so few that two programs share a multiprocessor
    num_polynomials: int = 1  # of four exponentials: 0, 1 or 2
    sum_per_warp: bool = False  # each warp writes sums of its own, where a tile lies in one cell: more memory
    target_programs: int = 2048  # the walk along the keys is split until there are about so many


def choose_lse_blocks(query: Tensor, num_slots: int) -> PoolingBlockSizes:
    """The blocks to take for queries ``(H, Q, D)`` in so many slots: as large as shared memory takes."""
    row = max(16, triton.next_power_of_2(query.shape[-1])) * query.element_size()  # bytes
    if query.dtype == torch.float32:
        if row <= 256 and num_slots > 64:
            return PoolingBlockSizes(queries=128, num_stages=2, unroll=1, num_polynomials=0)
        return PoolingBlockSizes(
            queries=64, keys=32, num_warps=4, num_stages=2, unroll=1, max_registers=255, num_polynomials=0
        )
    if row > 256:
        return PoolingBlockSizes(queries=64, num_warps=4, num_stages=2, unroll=1, max_registers=224)
    if num_slots <= 128:
        return PoolingBlockSizes(queries=64, num_warps=4, num_stages=2)
    return (
        PoolingBlockSizes()
        if row <= 128
        else PoolingBlockSizes(queries=128, num_warps=4, num_stages=2, max_registers=168)
    )


def choose_pooling_blocks(query: Tensor, num_slots: int) -> PoolingBlockSizes:
    """The same for the pooling kernel, which on large tiles is faster with few warps."""
    blocks = choose_lse_blocks(query, num_slots)
    large = PoolingBlockSizes(
        queries=128, keys=128, num_warps=4, unroll=1, max_registers=168, sum_per_warp=True
    )
    return large if blocks == PoolingBlockSizes() else blocks


def launch_options(blocks: PoolingBlockSizes) -> dict[str, Any]:
    """How a kernel is compiled: a product and a sum are one instruction, on which its speed rests."""
    limit = {} if triton.knobs.runtime.interpret else {"maxnreg": blocks.max_registers}
    return {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages, "enable_fp_fusion": True, **limit}


def make_rows_contiguous(x: Tensor) -> Tensor:
    """The kernels take any strides of head and row, and consecutive d."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def compute_qk(q, k):
    """Q Kᵀ of a tile; in float32, three products of tensor cores that together are nearly as exact."""
    if not ON_GPU:  # the interpreter takes bfloat16 for whole numbers here
        q, k = q.to(tl.float32), k.to(tl.float32)
    return tl.dot(q, tl.trans(k), input_precision="tf32x3")


@triton.jit
def compute_pair_mask(row, column, inside, alive_ptr, diagonal, window,
             CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, ALIVE: tl.constexpr):  # fmt: skip
    """Which pairs of a tile count, [rows, keys] or [1, keys]; `inside` says which columns there are."""
    if ALIVE:
        inside &= tl.load(alive_ptr + column, mask=inside, other=0) != 0
    keep = inside[None, :]
    if CAUSAL:
        keep &= column[None, :] <= row[:, None] + diagonal
    if WINDOWED:
        keep &= column[None, :] > row[:, None] + (diagonal - window)
    return keep


@triton.jit(do_not_specialize=["R", "C", "diagonal", "window"])
def _lse_kernel(
    q_ptr, k_ptr, alive_ptr, out_ptr, R, C, factor, diagonal, window, heads_a_key,
    q_stride_h, q_stride_r, k_stride_h, k_stride_r,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, ALIVE: tl.constexpr,
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
    k_ptr += h // heads_a_key * k_stride_h
    first, last, clear = 0, C, C // BK * BK  # up to `clear` no column needs a check
    if CAUSAL:
        last = tl.minimum(C, tl.maximum((block + 1) * BQ + diagonal, 0))
        clear = tl.minimum(clear, tl.maximum(block * BQ + diagonal + 1, 0) // BK * BK)
    if WINDOWED:
        first = tl.maximum(block * BQ + diagonal - window + 1, 0) // BK * BK
    if WINDOWED or ALIVE:
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
            s = compute_qk(q, k) * factor
            if part == 1:
                keep = compute_pair_mask(
                    row, column, inside, alive_ptr, diagonal, window, CAUSAL, WINDOWED, ALIVE
                )
                s = tl.where(keep, s, float("-inf"))
            larger = tl.maximum(largest, tl.max(s, axis=1))
            base = tl.where(larger == float("-inf"), 0.0, larger)  # nothing seen yet
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
    """log Σ exp(score) of each row, ``(H, Q)`` float32, -inf where no key is allowed: for `pooled_maps`."""
    (H, R, D), (G, C, _) = query.shape, key.shape
    out = query.new_full((H, R), float("-inf"), dtype=torch.float32)
    if 0 in (H, R, C):
        return out
    blocks = choose_lse_blocks(query, R)
    BQ = blocks.queries
    query, key = make_rows_contiguous(query), make_rows_contiguous(key)
    with torch.cuda.device_of(query):
        _lse_kernel[(triton.cdiv(R, BQ), H)](
            query, key, out if key_mask is None else key_mask.contiguous(), out, R, C, scale * LOG2_E,
            diagonal or 0, window or 0, H // G,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            D=D, BQ=BQ, BK=blocks.keys, BD=max(16, triton.next_power_of_2(D)), CAUSAL=diagonal is not None,
            WINDOWED=window is not None, ALIVE=key_mask is not None,
            **launch_options(blocks),
        )  # fmt: skip
    return out
