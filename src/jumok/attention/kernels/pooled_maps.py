"""Pooled maps of dot-product attention: what the queries of a cell give to its keys, for many heads at once.

One pass of Q Kᵀ, given what exp(scores) sum up to in each row (`row_lse` is a pass that finds that out). A
program keeps a block of queries and walks along the keys; what a tile holds is summed in registers, and each
cell is written once. Nothing is added up by atomics: the same input gives the same bits.

**Cells in slots.** The sides of a tile are powers of two, and a cell has any size. So a cell is given a slot,
a power of two of places, or whole blocks; where the cell is smaller, the last places stay empty. EVEN says
that none does, across: then tiles need no check, but for those at the diagonal of a causal mask.

**Two kinds of units at once.** A warp waits for its products before it makes weights of them, and only other
warps keep the tensor cores busy meanwhile. So with PARTS, warps do not wait for each other (:mod:`.mass`),
which changes only the order of sums. What was measured and did not help: to ask for the products of the next
tile first, and to have keys that were read serve two tiles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.kernels.lse import (
    LOG2_E,
    PoolingBlockSizes,
    choose_pooling_blocks,
    compute_pair_mask,
    compute_qk,
    launch_options,
    make_rows_contiguous,
)
from jumok.attention.kernels.tile_sums import (
    compute_exponents,
    fits_polynomial_range,
    sum_masked_weights,
    sum_per_warp,
    sum_unmasked_weights,
)

# Whatever these are, the same compiled kernel serves: a rectangle is of any size.
UNSPECIALIZED_ARGUMENTS = [
    "R",
    "C",
    "row_cells",
    "col_cells",
    "out_rows",
    "one",
    "diagonal",
    "window",
    "tall",
    "wide",
    "share",
]


@triton.jit
def _find_cell(place, places, cells):
    """The cell that a place lies in."""
    return (((place + 1).to(tl.int64) * cells - 1) // places).to(tl.int32)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _pooled_kernel(
    q_ptr, k_ptr, lse_ptr, longest_ptr, alive_ptr, row_starts_ptr, col_starts_ptr, out_ptr,
    R, C, row_cells, col_cells, out_rows, factor, one, diagonal, window, heads_a_key, tall, wide, share,
    q_stride_h, q_stride_r, k_stride_h, k_stride_r: tl.constexpr,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr, ONE_TURN: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, ALIVE: tl.constexpr,
    POLYNOMIALS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[h, row slot, column cell] = Σ of weights, where a row cell has `tall` · PARTS row slots.

    Rows: a cell has HEIGHT places of a block, or `tall` blocks. Columns: WIDTH places, or `wide` blocks. The
    walk goes by groups: the BK / WIDTH cells of a block, or the one cell of `wide` blocks. A program walks
    along `share` of them. PARTS is 1, or where a tile lies in one cell, how many warps there are.
    """
    DOWN: tl.constexpr = BQ // HEIGHT  # cells of a tile
    ACROSS: tl.constexpr = BK // WIDTH
    CLEAR: tl.constexpr = EVEN and not ALIVE  # only tiles at the diagonal are checked; else all are
    EDGES: tl.constexpr = CAUSAL and CLEAR
    FOURS: tl.constexpr = WIDTH >= 16
    SOME: tl.constexpr = WIDTH // 4 if FOURS else WIDTH
    FIRST: tl.constexpr = ONE_TURN or PARTS > 1  # a turn begins with nothing
    QUICK: tl.constexpr = CLEAR and FOURS and POLYNOMIALS > 0
    h = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # the longest walks first
    slot = tl.arange(0, BQ)
    cell = block // tall * DOWN + slot // HEIGHT
    there = cell < row_cells
    row = tl.load(row_starts_ptr + cell, mask=there, other=R) + (block % tall) * BQ + slot % HEIGHT
    there &= row < tl.load(row_starts_ptr + cell + 1, mask=there, other=0)
    d = tl.arange(0, BD)
    q_at = q_ptr + h * q_stride_h + row.to(tl.int64)[:, None] * q_stride_r + d[None, :]
    q = tl.load(q_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    shift = -1.4426950408889634 * tl.load(lse_ptr + h * R + row, mask=there, other=float("inf"))
    place = tl.arange(0, BK)
    k_at = k_ptr + h // heads_a_key * k_stride_h + d[None, :]
    tile_at = k_at + place[:, None] * k_stride_r  # within a tile 32 bits do: see `compute_pooled_maps`

    # The groups that this program walks along; of these, the ones from `inner` to `outer` need no check.
    first = tl.program_id(2) * share
    groups = tl.cdiv(col_cells, ACROSS)
    last = tl.minimum(first + share, groups)
    if CAUSAL:
        top = tl.min(tl.where(there, row, R))
        bottom = tl.max(tl.where(there, row, -1))
        seen = tl.minimum(bottom + diagonal + 1, C)  # so many columns are seen by any row
        last = tl.minimum(last, tl.where(seen > 0, _find_cell(seen - 1, C, col_cells) // ACROSS + 1, 0))
        if WINDOWED:
            hidden = tl.minimum(tl.maximum(top + diagonal - window + 1, 0), C - 1)
            first = tl.maximum(first, _find_cell(hidden, C, col_cells) // ACROSS)
    inner, outer = first, last
    if EDGES:
        columns = WIDTH * wide * ACROSS  # of a group
        outer = tl.minimum(last, tl.maximum(top + diagonal + 1, 0) // columns)
        if WINDOWED:
            inner = tl.maximum(first, tl.cdiv(tl.maximum(bottom + diagonal - window + 1, 0), columns))
            inner = tl.minimum(inner, last)
        outer = tl.maximum(outer, inner)

    # Where no score can be too low for a polynomial, none is asked whether it is: that saves an instruction.
    middle = inner
    if QUICK:
        longest = tl.load(longest_ptr + h // heads_a_key)
        middle = tl.where(fits_polynomial_range(q, there, factor, shift, longest), outer, inner)

    for part in tl.static_range(0 if EDGES and WINDOWED else 1 if QUICK else 2, 4 if EDGES else 3):
        if part == 0:
            begin, end = first, inner
        elif part == 1:
            begin, end = inner, middle
        elif part == 2:
            begin, end = middle, outer
        else:
            begin, end = outer, last
        mass = tl.zeros((BQ, BK // 16, 4) if FOURS else (BQ, BK), tl.float32)
        total = tl.zeros((PARTS,), tl.float32)
        group = begin
        turn = 0
        tile = begin * wide
        for _ in range((end - begin) * (wide // UNROLL)):
            for u in tl.static_range(UNROLL):
                if EVEN:
                    now_at = tile_at + tile.to(tl.int64) * (BK * k_stride_r)
                    s = compute_qk(q, tl.load(now_at, mask=(d < D)[None, :], other=0.0))
                    column = tile * BK + place
                    inside = column < C
                else:
                    at = group if ACROSS == 1 else group * ACROSS + place // WIDTH
                    known = at < col_cells
                    column = tl.load(col_starts_ptr + at, mask=known, other=C)
                    column += (turn * UNROLL + u) * BK + place % WIDTH
                    inside = column < tl.load(col_starts_ptr + at + 1, mask=known, other=0)
                    now_at = k_at + column.to(tl.int64)[:, None] * k_stride_r
                    s = compute_qk(q, tl.load(now_at, mask=inside[:, None] & (d < D)[None, :], other=0.0))
                if (part == 1 or part == 2) and CLEAR and FOURS:
                    w, x, y, z = compute_exponents(s, factor, shift, POLYNOMIALS)
                    found = sum_unmasked_weights(w, x, y, z, one, POLYNOMIALS, ANY=part == 2)
                else:
                    keep = compute_pair_mask(
                        row, column, inside, alive_ptr, diagonal, window, CAUSAL, WINDOWED, ALIVE
                    )
                    found = sum_masked_weights(s, factor, shift, keep, FOURS)
                mass = found if FIRST and u == 0 else mass + found
                tile += 1
            turn += 1
            if PARTS > 1:
                # No branch and no barrier: the warps need not wait for each other.
                total += sum_per_warp(mass, PARTS)
                lane = tl.arange(0, 32)[None, :]
                here = lane == 0
                if not ONE_TURN:
                    done = turn * UNROLL == wide
                    here = tl.where(done, lane, 1) == 0  # &: in Triton 3.9's interpreter, no truth value
                out_row = h * out_rows + block * PARTS + tl.arange(0, PARTS)
                out_at = out_ptr + out_row[:, None] * col_cells + group + lane
                tl.store(out_at, tl.broadcast_to(total[:, None], (PARTS, 32)), mask=here)
                if ONE_TURN:
                    total = tl.zeros(total.shape, tl.float32)
                    turn = 0
                    group += 1
                else:
                    total = tl.where(done, 0.0, total)
                    turn = tl.where(done, 0, turn)
                    group += tl.where(done, 1, 0)
            elif ONE_TURN or turn * UNROLL == wide:
                out_row = h * out_rows + block * DOWN + tl.arange(0, DOWN)
                out_at = out_ptr + out_row * col_cells + group * ACROSS
                if ACROSS == 1:
                    tl.store(out_at, tl.sum(tl.reshape(mass, (DOWN, HEIGHT * SOME)), axis=1))
                else:
                    across = tl.arange(0, ACROSS)[None, :]
                    by_row = tl.sum(tl.reshape(mass, (BQ, ACROSS, SOME)), axis=2)
                    cells = tl.sum(tl.reshape(by_row, (DOWN, HEIGHT, ACROSS)), axis=1)
                    tl.store(out_at[:, None] + across, cells, mask=group * ACROSS + across < col_cells)
                mass = tl.zeros(mass.shape, tl.float32)
                turn = 0
                group += 1


# --- host ---------------------------------------------------------------------------------------------------


class _CellSlots(NamedTuple):
    """How cells lie in blocks: `slot_size` places of a block for each, or `blocks_per_cell` whole blocks."""

    slot_size: int
    blocks_per_cell: int
    is_even: bool  # no place stays empty

    @classmethod
    def from_sizes(cls, num_positions: int, num_cells: int, block_size: int) -> _CellSlots:
        widest = -(-num_positions // num_cells)
        size = min(triton.next_power_of_2(widest), block_size)
        blocks = -(-widest // size)
        return cls(
            size, blocks, size * blocks * num_cells == num_positions and num_positions % block_size == 0
        )

    def count_blocks(self, num_cells: int, block_size: int) -> int:
        """How many blocks all cells take."""
        return (
            num_cells * self.blocks_per_cell
            if self.blocks_per_cell > 1
            else -(-num_cells * self.slot_size // block_size)
        )


def compute_pooled_maps(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
    output_size: tuple[int, int],
    diagonal: int | None = None,
    window: int | None = None,
    key_mask: Tensor | None = None,
    blocks: PoolingBlockSizes | None = None,
) -> Tensor:
    """The weights of queries ``(H, Q, D)`` on keys ``(G, K, D)``, pooled to ``(H, *cells)`` float32.

    A cell holds what its queries give to its keys together, on average over the queries. Cells are as even as
    whole numbers allow: of n places, cell i begins at i·n // cells. At most as many cells as places.

    Args:
        query: in bfloat16, float16 or float32; H a multiple of G, as with grouped queries.
        key: the keys that are looked at; they may be a part of those that were attended to.
        lse: ``(H, Q)`` float32, the natural logarithm of what exp(scores) sums up to in each row.
        scale: the factor on the scores.
        cells: how many cells down and across.
        diagonal: query i sees key j only if j <= i + diagonal; None: all.
        window: and only if j > i + diagonal - window.
        alive: ``(K,)`` bool, which keys are there at all; None: all.
        blocks: how to cut the work; None chooses.
    """
    (H, R, D), (G, C, _), (down, across) = query.shape, key.shape, output_size
    if 0 in (H, R, C):
        return query.new_zeros(H, down, across, dtype=torch.float32)
    if blocks is None:
        blocks = choose_pooling_blocks(query, triton.next_power_of_2(-(-R // down)) * down)
    rows, cols = _CellSlots.from_sizes(R, down, blocks.queries), _CellSlots.from_sizes(C, across, blocks.keys)
    row_blocks, groups = (
        rows.count_blocks(down, blocks.queries),
        -(-cols.count_blocks(across, blocks.keys) // cols.blocks_per_cell),
    )
    splits = min(groups, max(1, blocks.target_programs // (H * row_blocks)))
    share = -(-groups // splits)
    unroll = math.gcd(cols.blocks_per_cell, blocks.unroll)
    whole = (rows.slot_size, cols.slot_size) == (blocks.queries, blocks.keys)  # a tile lies in one cell
    parts = (
        blocks.num_warps
        if blocks.sum_per_warp and whole and blocks.queries % (16 * blocks.num_warps) == 0
        else 1
    )
    slots = row_blocks * (blocks.queries // rows.slot_size) * parts
    sums = query.new_zeros(H, slots, across, dtype=torch.float32)
    query, key, lse = make_rows_contiguous(query), make_rows_contiguous(key), lse.contiguous()
    if key.stride(1) * blocks.keys >= 1 << 31:
        key = key.contiguous()
    longest = lse
    if blocks.num_polynomials and cols.is_even and key_mask is None:
        longest = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32).amax(-1)  # of each head's keys
    starts = [_compute_cell_starts(R, down, query.device), _compute_cell_starts(C, across, query.device)]
    strides = (query.stride(0), query.stride(1), key.stride(0), key.stride(1))
    sizes = {"D": D, "BQ": blocks.queries, "BK": blocks.keys, "BD": max(16, triton.next_power_of_2(D))}
    sizes |= {"POLYNOMIALS": blocks.num_polynomials, "PARTS": parts, **launch_options(blocks)}
    with torch.cuda.device_of(query):
        _pooled_kernel[(row_blocks, H, -(-groups // share))](
            query, key, lse, longest, lse if key_mask is None else key_mask.contiguous(), *starts, sums,
            R, C, down, across, sums.shape[1], scale * LOG2_E, 0x3F800000, diagonal or 0, window or 0,
            H // G, rows.blocks_per_cell, cols.blocks_per_cell, share, *strides,
            HEIGHT=rows.slot_size, WIDTH=cols.slot_size, UNROLL=unroll, ONE_TURN=unroll == cols.blocks_per_cell,
            EVEN=cols.is_even, CAUSAL=diagonal is not None, WINDOWED=window is not None, ALIVE=key_mask is not None,
            **sizes,
        )  # fmt: skip
    if rows.blocks_per_cell * parts > 1:
        sums = sums.unflatten(1, (down, rows.blocks_per_cell * parts)).sum(2)
    return sums[:, :down] / starts[0].diff()[:, None]


def _compute_cell_starts(num_positions: int, num_cells: int, device: torch.device) -> Tensor:
    """Where each cell begins, and where the last one ends."""
    return (torch.arange(num_cells + 1, device=device) * num_positions // num_cells).int()
