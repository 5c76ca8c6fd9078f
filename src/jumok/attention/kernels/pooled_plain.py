"""Pooled maps where nothing is masked and every cell is whole tiles: two blocks of queries a program.

What :mod:`.pooled` does, but keys that were read serve two tiles instead of one, one after the other. So half
as many are read, and a tile has half as many instructions beside its arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jumok.attention.kernels.lse import products
from jumok.attention.kernels.mass import by_warp, clear_mass, exponents


@triton.jit
def _weighed(q, k, factor, shift, one, POLYNOMIALS: tl.constexpr, PARTS: tl.constexpr):
    """What each warp has of the weights of a tile, [PARTS]."""
    w, x, y, z = exponents(products(q, k), factor, shift, POLYNOMIALS)
    return by_warp(clear_mass(w, x, y, z, one, POLYNOMIALS), PARTS)


@triton.jit(do_not_specialize=["R", "col_cells", "out_rows", "one", "wide", "share"])
def plain_kernel(
    q_ptr, k_ptr, lse_ptr, out_ptr, R, col_cells, out_rows, factor, one, heads_a_key, wide, share,
    q_stride_h, q_stride_r, k_stride_h, k_stride_r: tl.constexpr,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    ONE_TURN: tl.constexpr, POLYNOMIALS: tl.constexpr, POLYNOMIALS_BELOW: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[h, block · PARTS + warp, column cell] = Σ of weights; a cell has `wide` tiles across.

    A program has two blocks of queries, and walks along the tiles of `share` cells. In the second one, other
    exponentials may be polynomials: so their share is finer than quarters.
    """
    h = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * 2
    row = block * BQ + tl.arange(0, BQ)
    d = tl.arange(0, BD)
    inside = (d < D)[None, :]
    q_at = q_ptr + h * q_stride_h + row.to(tl.int64)[:, None] * q_stride_r + d[None, :]
    q = tl.load(q_at, mask=inside, other=0.0)
    q_below = tl.load(q_at + BQ * q_stride_r, mask=inside, other=0.0)
    lse_at = lse_ptr + h * R + row
    shift = -1.4426950408889634 * tl.load(lse_at)
    shift_below = -1.4426950408889634 * tl.load(lse_at + BQ)
    tile_at = k_ptr + h // heads_a_key * k_stride_h + d[None, :] + tl.arange(0, BK)[:, None] * k_stride_r

    cell = tl.program_id(2) * share
    last = tl.minimum(cell + share, col_cells)
    lane = tl.arange(0, 32)[None, :]  # of which one writes, without a branch
    out_row = h * out_rows + block * PARTS + tl.arange(0, PARTS)
    out_at = out_ptr + out_row[:, None] * col_cells + lane
    total = tl.zeros((PARTS,), tl.float32)
    total_below = tl.zeros((PARTS,), tl.float32)
    turn = 0
    for tile in range(cell * wide, last * wide):
        k = tl.load(tile_at + tl.cast(tile, tl.int64) * (BK * k_stride_r), mask=inside, other=0.0)
        total += _weighed(q, k, factor, shift, one, POLYNOMIALS, PARTS)
        total_below += _weighed(q_below, k, factor, shift_below, one, POLYNOMIALS_BELOW, PARTS)
        here = lane == 0
        if not ONE_TURN:
            turn += 1
            done = turn == wide
            here = tl.where(done, lane, 1) == 0  # &: in Triton 3.9's interpreter, no truth value
        tl.store(out_at + cell, tl.broadcast_to(total[:, None], (PARTS, 32)), mask=here)
        below_at = out_at + cell + PARTS * col_cells
        tl.store(below_at, tl.broadcast_to(total_below[:, None], (PARTS, 32)), mask=here)
        if ONE_TURN:
            total = tl.zeros((PARTS,), tl.float32)
            total_below = tl.zeros((PARTS,), tl.float32)
            cell += 1
        else:
            total = tl.where(done, 0.0, total)
            total_below = tl.where(done, 0.0, total_below)
            turn = tl.where(done, 0, turn)
            cell += tl.where(done, 1, 0)
