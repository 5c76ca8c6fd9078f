"""Pooled maps of dot-product attention: the weights between the queries and the keys of a cell, summed.

One pass of Q Kᵀ, given log Σ exp(score) of each row (`compute_row_lse` computes it in another pass). A
program holds a block of queries and loops over the keys. The weights of a tile are summed in registers, and
each cell is written once. No atomics are used: the same input gives bitwise identical results.

**Cells in slots.** The sides of a tile are powers of two, and a cell has any size. So each cell gets a slot,
a power of two of positions, or several whole blocks. If the cell is smaller, the last positions of the slot
stay empty. EVEN means that no column position does: then tiles need no mask, except at the diagonal of a
causal mask.

**Tensor cores and exponentials overlap.** A warp waits for its matrix products before it computes weights,
and only other warps keep the tensor cores busy in the meantime. So with PARTS, warps do not wait for each
other (:mod:`.tile_sums`), which only changes the order of summation. Two things were measured and did not
help: starting the matrix products of the next tile first, and using the keys of one load for two tiles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.kernels.common import (
    LOG2_E,
    launch_options,
    make_rows_contiguous,
    matmul,
    pad_width,
)
from jumok.attention.kernels.launcher import launch
from jumok.attention.kernels.lse import (
    PoolingBlockSizes,
    choose_pooling_blocks,
    compute_pair_mask,
)
from jumok.attention.kernels.tile_sums import (
    compute_exponents,
    fits_polynomial_range,
    sum_masked_weights,
    sum_per_warp,
    sum_unmasked_weights,
)

# One compiled kernel serves all values of these arguments: a rectangle may have any size.
UNSPECIALIZED_ARGUMENTS = [
    "R",
    "C",
    "row_cells",
    "col_cells",
    "out_rows",
    "one_bits",
    "diagonal",
    "window",
    "blocks_down",
    "blocks_across",
    "share",
]


@triton.jit
def _find_cell(position, num_positions, num_cells):
    """The cell that contains a position."""
    return (((position + 1).to(tl.int64) * num_cells - 1) // num_positions).to(tl.int32)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _pooled_kernel(
    q_ptr, k_ptr, lse_ptr, max_key_norm_ptr, key_mask_ptr, row_starts_ptr, col_starts_ptr, out_ptr,
    R, C, row_cells, col_cells, out_rows, factor, one_bits, diagonal, window, heads_per_key,
    blocks_down, blocks_across, share,
    q_stride_h, q_stride_r, k_stride_h, k_stride_r: tl.constexpr,
    D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr, ONE_TURN: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    POLYNOMIALS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[h, row slot, column cell] = Σ of weights. A row cell has `blocks_down` · PARTS row slots.

    A program computes a block of BQ rows: BQ / HEIGHT cells of up to HEIGHT rows, or one of the `blocks_down` blocks
    of a cell. It loops over `share` groups of keys. A group is a block of BK keys, with BK / WIDTH cells of up to
    WIDTH keys, or the `blocks_across` blocks of one cell. An iteration computes UNROLL blocks; with ONE_TURN, these
    are a group. PARTS is 1 or, if a tile is in one cell, the number of warps: each writes its own sums.

    The groups go through up to four stages, so that most need neither a mask nor a clamp:

    0. groups in which the window hides keys from some rows,
    1. groups that all rows see, and whose exponents are within the range of a polynomial,
    2. groups that all rows see, whose exponents may be below it,
    3. groups in which the diagonal hides keys from some rows.

    If cells have empty positions or keys are masked, all groups are in stage 2, with a mask.
    """
    CELLS_DOWN: tl.constexpr = BQ // HEIGHT  # cells of a tile
    CELLS_ACROSS: tl.constexpr = BK // WIDTH
    UNMASKED: tl.constexpr = EVEN and not HAS_KEY_MASK  # if True, only tiles at the diagonal are masked
    HAS_EDGES: tl.constexpr = CAUSAL and UNMASKED
    QUARTERS: tl.constexpr = WIDTH >= 16  # four partial sums for 16 keys, else the weights themselves
    SUMS_PER_ROW: tl.constexpr = WIDTH // 4 if QUARTERS else WIDTH
    FRESH_SUMS: tl.constexpr = ONE_TURN or PARTS > 1  # an iteration starts from zero
    MAY_SKIP_CLAMP: tl.constexpr = UNMASKED and QUARTERS and POLYNOMIALS > 0
    h = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # the longest loops first
    position = tl.arange(0, BQ)
    cell = block // blocks_down * CELLS_DOWN + position // HEIGHT
    valid = cell < row_cells
    row = tl.load(row_starts_ptr + cell, mask=valid, other=R) + (block % blocks_down) * BQ + position % HEIGHT
    valid &= row < tl.load(row_starts_ptr + cell + 1, mask=valid, other=0)
    d = tl.arange(0, BD)
    q_at = q_ptr + h * q_stride_h + row.to(tl.int64)[:, None] * q_stride_r + d[None, :]
    q = tl.load(q_at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    shift = -1.4426950408889634 * tl.load(lse_ptr + h * R + row, mask=valid, other=float("inf"))
    tile_column = tl.arange(0, BK)
    k_at = k_ptr + h // heads_per_key * k_stride_h + d[None, :]
    tile_at = k_at + tile_column[:, None] * k_stride_r  # 32 bits suffice: see `compute_pooled_maps`

    # The groups of this program. Those from `unmasked_start` to `unmasked_end` need no mask.
    first = tl.program_id(2) * share
    num_groups = tl.cdiv(col_cells, CELLS_ACROSS)
    last = tl.minimum(first + share, num_groups)
    if CAUSAL:
        first_row = tl.min(tl.where(valid, row, R))
        last_row = tl.max(tl.where(valid, row, -1))
        num_seen = tl.minimum(last_row + diagonal + 1, C)  # the number of keys that any row sees
        last = tl.minimum(last, tl.where(num_seen > 0, _find_cell(num_seen - 1, C, col_cells) // CELLS_ACROSS + 1, 0))
        if WINDOWED:
            first_seen = tl.minimum(tl.maximum(first_row + diagonal - window + 1, 0), C - 1)
            first = tl.maximum(first, _find_cell(first_seen, C, col_cells) // CELLS_ACROSS)
    unmasked_start, unmasked_end = first, last
    if HAS_EDGES:
        group_width = WIDTH * blocks_across * CELLS_ACROSS  # keys
        unmasked_end = tl.minimum(last, tl.maximum(first_row + diagonal + 1, 0) // group_width)
        if WINDOWED:
            unmasked_start = tl.maximum(first, tl.cdiv(tl.maximum(last_row + diagonal - window + 1, 0), group_width))
            unmasked_start = tl.minimum(unmasked_start, last)
        unmasked_end = tl.maximum(unmasked_end, unmasked_start)

    # If no score can be below the range of a polynomial, it is not clamped, which saves an instruction.
    unclamped_end = unmasked_start
    if MAY_SKIP_CLAMP:
        max_key_norm = tl.load(max_key_norm_ptr + h // heads_per_key)
        unclamped_end = tl.where(
            fits_polynomial_range(q, valid, factor, shift, max_key_norm), unmasked_end, unmasked_start
        )

    for stage in tl.static_range(0 if HAS_EDGES and WINDOWED else 1 if MAY_SKIP_CLAMP else 2, 4 if HAS_EDGES else 3):
        if stage == 0:
            begin, end = first, unmasked_start
        elif stage == 1:
            begin, end = unmasked_start, unclamped_end
        elif stage == 2:
            begin, end = unclamped_end, unmasked_end
        else:
            begin, end = unmasked_end, last
        sums = tl.zeros((BQ, BK // 16, 4) if QUARTERS else (BQ, BK), tl.float32)
        part_sums = tl.zeros((PARTS,), tl.float32)
        group = begin
        turn = 0
        tile = begin * blocks_across
        for _ in range((end - begin) * (blocks_across // UNROLL)):
            for u in tl.static_range(UNROLL):
                if EVEN:
                    keys_at = tile_at + tile.to(tl.int64) * (BK * k_stride_r)
                    k = tl.load(keys_at, mask=(d < D)[None, :], other=0.0)
                    scores = matmul(q, tl.trans(k))
                    column = tile * BK + tile_column
                    inside = column < C
                else:
                    col_cell = group if CELLS_ACROSS == 1 else group * CELLS_ACROSS + tile_column // WIDTH
                    is_cell = col_cell < col_cells
                    column = tl.load(col_starts_ptr + col_cell, mask=is_cell, other=C)
                    column += (turn * UNROLL + u) * BK + tile_column % WIDTH
                    inside = column < tl.load(col_starts_ptr + col_cell + 1, mask=is_cell, other=0)
                    keys_at = k_at + column.to(tl.int64)[:, None] * k_stride_r
                    k = tl.load(keys_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
                    scores = matmul(q, tl.trans(k))
                if (stage == 1 or stage == 2) and UNMASKED and QUARTERS:
                    e0, e1, e2, e3 = compute_exponents(scores, factor, shift, POLYNOMIALS)
                    tile_sums = sum_unmasked_weights(e0, e1, e2, e3, one_bits, POLYNOMIALS, ANY=stage == 2)
                else:
                    allowed = compute_pair_mask(
                        row, column, inside, key_mask_ptr, diagonal, window, CAUSAL, WINDOWED, HAS_KEY_MASK
                    )
                    tile_sums = sum_masked_weights(scores, factor, shift, allowed, QUARTERS)
                sums = tile_sums if FRESH_SUMS and u == 0 else sums + tile_sums
                tile += 1
            turn += 1
            if PARTS > 1:
                # No branch and no barrier, so the warps do not wait for each other.
                part_sums += sum_per_warp(sums, PARTS)
                lane = tl.arange(0, 32)[None, :]
                is_written = lane == 0
                if not ONE_TURN:
                    done = turn * UNROLL == blocks_across
                    # Not &: in Triton 3.9's interpreter, its result has no truth value.
                    is_written = tl.where(done, lane, 1) == 0
                out_row = h * out_rows + block * PARTS + tl.arange(0, PARTS)
                out_at = out_ptr + out_row[:, None] * col_cells + group + lane
                tl.store(out_at, tl.broadcast_to(part_sums[:, None], (PARTS, 32)), mask=is_written)
                if ONE_TURN:
                    part_sums = tl.zeros(part_sums.shape, tl.float32)
                    turn = 0
                    group += 1
                else:
                    part_sums = tl.where(done, 0.0, part_sums)
                    turn = tl.where(done, 0, turn)
                    group += tl.where(done, 1, 0)
            elif ONE_TURN or turn * UNROLL == blocks_across:
                out_row = h * out_rows + block * CELLS_DOWN + tl.arange(0, CELLS_DOWN)
                out_at = out_ptr + out_row * col_cells + group * CELLS_ACROSS
                if CELLS_ACROSS == 1:
                    tl.store(out_at, tl.sum(tl.reshape(sums, (CELLS_DOWN, HEIGHT * SUMS_PER_ROW)), axis=1))
                else:
                    across = tl.arange(0, CELLS_ACROSS)[None, :]
                    by_row = tl.sum(tl.reshape(sums, (BQ, CELLS_ACROSS, SUMS_PER_ROW)), axis=2)
                    cells = tl.sum(tl.reshape(by_row, (CELLS_DOWN, HEIGHT, CELLS_ACROSS)), axis=1)
                    tl.store(out_at[:, None] + across, cells, mask=group * CELLS_ACROSS + across < col_cells)
                sums = tl.zeros(sums.shape, tl.float32)
                turn = 0
                group += 1


# --- host ---------------------------------------------------------------------------------------------------


class _CellSlots(NamedTuple):
    """The layout of cells in blocks: a cell has `slot_size` positions of a block, or whole blocks."""

    slot_size: int
    blocks_per_cell: int
    is_even: bool  # no position stays empty

    @classmethod
    def from_sizes(cls, num_positions: int, num_cells: int, block_size: int) -> _CellSlots:
        largest_cell = -(-num_positions // num_cells)
        slot_size = min(triton.next_power_of_2(largest_cell), block_size)
        num_blocks = -(-largest_cell // slot_size)
        is_even = slot_size * num_blocks * num_cells == num_positions and num_positions % block_size == 0
        return cls(slot_size, num_blocks, is_even)

    def count_blocks(self, num_cells: int, block_size: int) -> int:
        """Return the number of blocks of all cells."""
        if self.blocks_per_cell > 1:
            return num_cells * self.blocks_per_cell
        return -(-num_cells * self.slot_size // block_size)


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
    """Return the weights of queries ``(H, Q, D)`` on keys ``(G, K, D)``, pooled to ``(H, *output_size)``.

    A cell is the sum over its keys of the weights, averaged over its queries. Cells are as even as possible:
    of n positions, cell i starts at i·n // cells. There are at most as many cells as positions.

    Args:
        query: in bfloat16, float16 or float32; H is a multiple of G, as with grouped queries.
        key: the keys of the map, which may be a part of the keys that were attended to.
        lse: ``(H, Q)`` float32, the natural logarithm of Σ exp(score) of each row.
        scale: the factor on the scores.
        output_size: the number of cells down and across.
        diagonal: query i sees key j only if j <= i + diagonal. Default: all keys.
        window: query i sees key j only if j > i + diagonal - window.
        key_mask: ``(K,)`` bool, which keys exist. Default: all keys.
        blocks: block sizes. Default: chosen for the input.
    """
    (H, R, D), (G, C, _), (down, across) = query.shape, key.shape, output_size
    if 0 in (H, R, C):
        return query.new_zeros(H, down, across, dtype=torch.float32)
    if blocks is None:
        blocks = choose_pooling_blocks(query, triton.next_power_of_2(-(-R // down)) * down)
    rows, cols = _CellSlots.from_sizes(R, down, blocks.queries), _CellSlots.from_sizes(C, across, blocks.keys)
    num_row_blocks = rows.count_blocks(down, blocks.queries)
    num_groups = -(-cols.count_blocks(across, blocks.keys) // cols.blocks_per_cell)
    num_splits = min(num_groups, max(1, blocks.target_programs // (H * num_row_blocks)))
    share = -(-num_groups // num_splits)
    unroll = math.gcd(cols.blocks_per_cell, blocks.unroll)
    has_whole_tiles = (rows.slot_size, cols.slot_size) == (blocks.queries, blocks.keys)  # each in one cell
    num_parts = 1
    if blocks.sum_per_warp and has_whole_tiles and blocks.queries % (16 * blocks.num_warps) == 0:
        num_parts = blocks.num_warps
    num_slots = num_row_blocks * (blocks.queries // rows.slot_size) * num_parts
    cell_sums = query.new_zeros(H, num_slots, across, dtype=torch.float32)
    query, key, lse = make_rows_contiguous(query), make_rows_contiguous(key), lse.contiguous()
    if key.stride(1) * blocks.keys >= 1 << 31:
        key = key.contiguous()
    max_key_norm = lse  # not read
    if blocks.num_polynomials and cols.is_even and key_mask is None:
        max_key_norm = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32).amax(-1)  # (G,)
    starts = [_compute_cell_starts(R, down, query.device), _compute_cell_starts(C, across, query.device)]
    strides = (query.stride(0), query.stride(1), key.stride(0))
    constants = {"k_stride_r": key.stride(1), "D": D, "BQ": blocks.queries, "BK": blocks.keys, "BD": pad_width(D)}
    constants |= {"POLYNOMIALS": blocks.num_polynomials, "PARTS": num_parts}
    launch(
        _pooled_kernel, (num_row_blocks, H, -(-num_groups // share)),
        query, key, lse, max_key_norm, lse if key_mask is None else key_mask.contiguous(),
        *starts, cell_sums, R, C, down, across, num_slots, scale * LOG2_E, 0x3F800000,
        diagonal or 0, window or 0, H // G, rows.blocks_per_cell, cols.blocks_per_cell, share, *strides,
        HEIGHT=rows.slot_size, WIDTH=cols.slot_size, UNROLL=unroll,
        ONE_TURN=unroll == cols.blocks_per_cell, EVEN=cols.is_even, CAUSAL=diagonal is not None,
        WINDOWED=window is not None, HAS_KEY_MASK=key_mask is not None, **constants,
        **launch_options(blocks.num_warps, blocks.num_stages, blocks.max_registers),
    )  # fmt: skip
    if rows.blocks_per_cell * num_parts > 1:
        cell_sums = cell_sums.unflatten(1, (down, rows.blocks_per_cell * num_parts)).sum(2)
    return cell_sums[:, :down] / starts[0].diff()[:, None]


def _compute_cell_starts(num_positions: int, num_cells: int, device: torch.device) -> Tensor:
    """Return where each cell starts, and the end of the last."""
    return (torch.arange(num_cells + 1, device=device) * num_positions // num_cells).int()
