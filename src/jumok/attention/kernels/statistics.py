"""Statistics of dot-product attention in one pass of Q Kᵀ, given log Σ exp(score) of each row.

One kernel computes, for the weights w of each head,

    received weight   Σ over the queries of w, for each key
    entropy           -Σ over the keys of w log w, for each query
    distance profile  Σ of w over the pairs at each distance |query - key|
    block maxima      the largest weight of each query on each block of keys

and a second one finds the largest weights of each query in the blocks with the largest maxima.

**Diagonals of tiles.** A program computes the tiles along a diagonal: if it starts with query block r and key
block c, then (r + 1, c + 1) follows, and so on (or (r + 1, c + 2), if a block has twice as many queries as keys).
A position in the tile has the same distance in all of them. So the tiles are added up position by position, and
each sum is added to its distance once, at the end. ::

    c 0 1 2 3
  r   ┌─┬─┬─┬─┐
  0   │a│b│c│d│       four programs with the tiles a, b, c and d; with a causal mask, b, c and d do not exist
  1   │e│a│b│c│
  2   │f│e│a│b│
      └─┴─┴─┴─┘

**Sums of integers.** Programs add to the same results. Integer sums do not depend on the order, so the same
input gives bitwise identical results: sums of a tile are rounded to multiples of 2^-40 before they are added.
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
    next_power_of_2,
    pad_width,
)
from jumok.attention.kernels.launcher import launch
from jumok.attention.kernels.lse import compute_pair_mask

FIXED_POINT_BITS = 40  # 2^23 queries and keys fit in 64 bits
MAX_TOP_KEYS = 32
MAX_BLOCK_MAXIMA = 1 << 28  # 1 GiB; more heads are processed one after the other
TARGET_PROGRAMS = 2048


class StatisticsBlockSizes(NamedTuple):
    """Block sizes of :func:`compute_attention_statistics`."""

    queries: int = 128  # of a tile
    keys: int = 64  # of a tile; divides the number of queries
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None


@triton.jit
def _to_fixed_point(x, SCALE: tl.constexpr):
    return (x * SCALE).to(tl.int64)


@triton.jit(do_not_specialize=["R", "C", "diagonal", "window", "offset", "first_diagonal", "share", "key_blocks"])
def _statistics_kernel(
    q_ptr, k_ptr, lse_ptr, key_mask_ptr, received_ptr, entropy_ptr, distance_ptr, maximum_ptr,
    R, C, factor, diagonal, window, offset, first_diagonal, share, key_blocks, num_distances, heads_per_key,
    q_stride_h, q_stride_r, k_stride_h, k_stride_r,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, SCALE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_MAXIMA: tl.constexpr,
):  # fmt: skip
    """Add the tiles of a part of a diagonal to the statistics. See the module docstring."""
    h = tl.program_id(1).to(tl.int64)
    shift = first_diagonal + tl.program_id(0)  # the key block of query block 0
    STEP: tl.constexpr = BQ // BK
    row_blocks = (R + BQ - 1) // BQ
    begin = tl.maximum(0, (-shift + STEP - 1) // STEP) + tl.program_id(2) * share
    end = tl.minimum(tl.minimum(row_blocks, (key_blocks - shift + STEP - 1) // STEP), begin + share)
    # The tiles before `clear` need no mask: whole blocks, and all pairs visible.
    clear = tl.minimum(tl.minimum(end, R // BQ), (C // BK - shift + STEP - 1) // STEP)
    if CAUSAL:
        clear = tl.where(shift * BK + BK - 1 <= diagonal, clear, begin)
    if WINDOWED:
        clear = tl.where(shift * BK > BQ - 1 + diagonal - window, clear, begin)
    if HAS_KEY_MASK:
        clear = begin
    clear = tl.maximum(clear, begin)

    query_position, key_position = tl.arange(0, BQ), tl.arange(0, BK)
    d = tl.arange(0, BD)
    q_ptr += h * q_stride_h
    k_ptr += h // heads_per_key * k_stride_h
    tile_sums = tl.zeros((BQ, BK), tl.float32)
    for part in tl.static_range(2):
        for block in range(begin if part == 0 else clear, clear if part == 0 else end):
            key_block = block * STEP + shift
            row = block * BQ + query_position
            column = key_block * BK + key_position
            valid, inside = row < R, column < C
            q_at = q_ptr + row.to(tl.int64)[:, None] * q_stride_r + d[None, :]
            k_at = k_ptr + column.to(tl.int64)[:, None] * k_stride_r + d[None, :]
            if part == 0:
                q = tl.load(q_at, mask=(d < D)[None, :], other=0.0)
                k = tl.load(k_at, mask=(d < D)[None, :], other=0.0)
                lse = tl.load(lse_ptr + h * R + row)
            else:
                q = tl.load(q_at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
                k = tl.load(k_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
                lse = tl.load(lse_ptr + h * R + row, mask=valid, other=0.0)
            exponent = matmul(q, tl.trans(k)) * factor - (lse * 1.4426950408889634)[:, None]
            if part == 1:
                allowed = valid[:, None] & compute_pair_mask(
                    row, column, inside, key_mask_ptr, diagonal, window, CAUSAL, WINDOWED, HAS_KEY_MASK
                )
                exponent = tl.where(allowed, exponent, -1e6)  # 2^-1e6 is 0, and so is its share of the entropy
            weights = tl.exp2(exponent)
            tile_sums += weights
            entropy = tl.sum(weights * exponent, axis=1) * -0.6931471805599453
            received = tl.sum(weights, axis=0)
            tl.atomic_add(entropy_ptr + h * R + row, _to_fixed_point(entropy, SCALE), mask=valid, sem="relaxed")
            tl.atomic_add(received_ptr + h * C + column, _to_fixed_point(received, SCALE), mask=inside, sem="relaxed")
            if HAS_MAXIMA:
                maximum = tl.exp2(tl.max(exponent, axis=1))
                tl.store(maximum_ptr + (h * R + row) * key_blocks + key_block, maximum, mask=valid)
    distance = tl.abs(query_position[:, None] - key_position[None, :] + offset - shift * BK)
    distance_at = distance_ptr + h * num_distances + distance
    tl.atomic_add(
        distance_at, _to_fixed_point(tile_sums, SCALE), mask=(distance < num_distances) & (tile_sums > 0), sem="relaxed"
    )


@triton.jit(do_not_specialize=["R", "C", "diagonal", "window", "key_blocks"])
def _top_kernel(
    q_ptr, k_ptr, lse_ptr, key_mask_ptr, maximum_ptr, weight_ptr, index_ptr,
    R, C, factor, diagonal, window, key_blocks, heads_per_key,
    q_stride_h, q_stride_r, k_stride_h, k_stride_r,
    D: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
):  # fmt: skip
    """Find the K largest weights of a query, which are in the K blocks with the largest maxima."""
    h = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0)
    d = tl.arange(0, BD)
    q = tl.load(q_ptr + h * q_stride_h + row.to(tl.int64) * q_stride_r + d, mask=d < D, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + h * R + row) * 1.4426950408889634
    k_ptr += h // heads_per_key * k_stride_h
    block = tl.arange(0, PADDED_BLOCKS)
    maxima = tl.load(maximum_ptr + (h * R + row) * key_blocks + block, mask=block < key_blocks, other=-1.0)
    position = tl.arange(0, BK)
    slot = tl.arange(0, PADDED_K)
    weights = tl.full((PADDED_K, BK), -1.0, tl.float32)
    starts = tl.zeros((PADDED_K,), tl.int32)
    for n in range(K):
        best = tl.argmax(maxima, axis=0)
        num_columns = tl.where(tl.max(maxima, axis=0) > 0, C, 0)
        maxima = tl.where(block == best, -1.0, maxima)
        column = best * BK + position
        inside = column < num_columns
        k_at = k_ptr + column.to(tl.int64)[:, None] * k_stride_r + d[None, :]
        k = tl.load(k_at, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        exponent = tl.sum(k * q[None, :], axis=1) * factor - lse
        allowed = compute_pair_mask(
            tl.full((1,), row, tl.int32), column, inside, key_mask_ptr, diagonal, window, CAUSAL, WINDOWED, HAS_KEY_MASK
        )
        block_weights = tl.where(allowed, tl.exp2(exponent)[None, :], -1.0)
        weights = tl.where(slot[:, None] == n, block_weights, weights)
        starts = tl.where(slot == n, best * BK, starts)
    weights = tl.reshape(weights, (PADDED_K * BK,))
    column = tl.reshape(starts[:, None] + position[None, :], (PADDED_K * BK,))
    at = (h * R + row) * K
    for n in range(K):
        best = tl.argmax(weights, axis=0)
        weight = tl.max(weights, axis=0)
        is_best = tl.arange(0, PADDED_K * BK) == best
        index = tl.sum(tl.where(is_best, column, 0), axis=0)
        tl.store(weight_ptr + at + n, tl.maximum(weight, 0.0))
        tl.store(index_ptr + at + n, tl.where(weight > 0, index, -1).to(tl.int64))
        weights = tl.where(is_best, -1.0, weights)


def compute_attention_statistics(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
    diagonal: int | None = None,
    window: int | None = None,
    key_mask: Tensor | None = None,
    num_top: int = 0,
    blocks: StatisticsBlockSizes | None = None,
) -> dict[str, Tensor]:
    """Return statistics of the weights of queries ``(H, Q, D)`` on keys ``(G, K, D)``.

    They are ``received_weight`` (H, K), ``entropy`` (H, Q) in nats, ``distance_profile`` (H, n), which is not
    divided by the number of queries, and if ``num_top`` is given, ``top_weights`` and ``top_keys`` (H, Q, k),
    largest first, where keys of weight 0 are -1.

    The arguments are those of :func:`jumok.attention.kernels.pooled_maps.compute_pooled_maps`, except

    Args:
        num_top: how many of the largest weights of each query to find, at most 32. Default: none.
        blocks: block sizes. Default: chosen for the input.
    """
    (H, R, D), (G, C, _) = query.shape, key.shape
    offset = diagonal or 0
    num_distances = max(abs(R - 1 + offset), abs(C - 1 - offset), abs(offset)) + 1
    blocks = choose_statistics_blocks(query) if blocks is None else blocks
    key_blocks = divide_up(C, blocks.keys)
    if num_top and H * R * key_blocks > MAX_BLOCK_MAXIMA and H > 1:
        heads = max(1, H // G)  # the heads of a key head stay together
        heads *= max(1, MAX_BLOCK_MAXIMA // (heads * R * key_blocks))
        if heads < H:
            parts = [
                compute_attention_statistics(
                    query[h : h + heads], key[h * G // H : (h + heads) * G // H], lse[h : h + heads],
                    scale=scale, diagonal=diagonal, window=window, key_mask=key_mask, num_top=num_top, blocks=blocks,
                )
                for h in range(0, H, heads)
            ]  # fmt: skip
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    query, key, lse = make_rows_contiguous(query), make_rows_contiguous(key), lse.contiguous()
    received, entropy, distances = (
        torch.zeros(H, size, dtype=torch.int64, device=query.device) for size in (C, R, num_distances)
    )
    maxima = query.new_zeros(H, R, key_blocks, dtype=torch.float32) if num_top else lse
    num_top = min(num_top, C)
    common = (R, C, scale * LOG2_E, diagonal or 0, window or 0)
    strides = (query.stride(0), query.stride(1), key.stride(0), key.stride(1))
    constants = {"D": D, "BK": blocks.keys, "BD": pad_width(D), "CAUSAL": diagonal is not None}
    constants |= {"WINDOWED": window is not None, "HAS_KEY_MASK": key_mask is not None}
    mask = lse if key_mask is None else key_mask.contiguous()
    first, last = _find_visible_diagonals(R, C, blocks, diagonal, window)
    if H and first <= last:
        longest = min(divide_up(R, blocks.queries), divide_up(C, blocks.queries) + 1)  # tiles on a diagonal, at most
        num_splits = min(longest, divide_up(TARGET_PROGRAMS, H * (last - first + 1)))
        share = divide_up(longest, num_splits)
        launch(
            _statistics_kernel, (last - first + 1, H, divide_up(longest, share)),
            query, key, lse, mask, received, entropy, distances, maxima,
            *common, offset, first, share, key_blocks, num_distances, H // G, *strides,
            BQ=blocks.queries, SCALE=float(1 << FIXED_POINT_BITS), HAS_MAXIMA=num_top > 0, **constants,
            **launch_options(blocks.num_warps, blocks.num_stages, blocks.max_registers),
        )  # fmt: skip
    sums = {"received_weight": received, "entropy": entropy, "distance_profile": distances}
    fields = {name: (x.double() * 2.0**-FIXED_POINT_BITS).float() for name, x in sums.items()}
    if num_top:
        fields["top_weights"] = query.new_zeros(H, R, num_top, dtype=torch.float32)
        fields["top_keys"] = torch.full((H, R, num_top), -1, device=query.device)
        launch(
            _top_kernel, (R, H), query, key, lse, mask, maxima, fields["top_weights"], fields["top_keys"],
            *common, key_blocks, H // G, *strides,
            K=num_top, PADDED_K=next_power_of_2(num_top), PADDED_BLOCKS=next_power_of_2(key_blocks),
            **constants, **launch_options(1 if num_top <= 8 else 4),
        )  # fmt: skip
    return fields


def choose_statistics_blocks(query: Tensor) -> StatisticsBlockSizes:
    """Return block sizes for queries ``(H, Q, D)``, as large as registers and shared memory allow."""
    row_bytes = pad_width(query.shape[-1]) * query.element_size()
    if row_bytes <= 256 and query.dtype != torch.float32:
        return StatisticsBlockSizes()
    return StatisticsBlockSizes(queries=64, keys=64 if row_bytes <= 256 else 32)


def _find_visible_diagonals(
    num_queries: int, num_keys: int, blocks: StatisticsBlockSizes, diagonal: int | None, window: int | None
) -> tuple[int, int]:
    """Return the first and the last diagonal of tiles that has a visible pair, by the key block of query block 0."""
    step = blocks.queries // blocks.keys
    first, last = -step * (divide_up(num_queries, blocks.queries) - 1), divide_up(num_keys, blocks.keys) - 1
    if diagonal is not None:
        last = min(last, (blocks.queries - 1 + diagonal) // blocks.keys)
        if window is not None:
            first = max(first, divide_up(diagonal - window + 2 - blocks.keys, blocks.keys))
    return first, last
