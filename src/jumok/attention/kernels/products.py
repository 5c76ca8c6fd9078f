"""The products around a decoding step: few rows times a square of weights, as links of a chain of kernels.

cuBLAS multiplies no slower, but its kernels know of no chain: the kernels before and after would wait for
each other's launch. See :mod:`.chain`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .additive import ON_GPU, launched
from .chain import linked, wait_for_earlier

HALF = (torch.float16, torch.bfloat16)


class Tile(NamedTuple):
    """What a program works out, `depth` of the sum at a time, and `stages` of these on their way."""

    rows: int = 32
    columns: int = 32
    depth: int = 128
    warps: int = 4
    stages: int = 4
    programs: int = 64  # the tile is halved both ways where there would be fewer


TILE = Tile()


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    left_ptr, weight_ptr, out_ptr, rows, columns_units, depth_units, left_units, weight_units,
    UNIT: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """out = left @ weight, or left @ weight^T where TRANSPOSED. Units are UNIT elements, as in the step."""
    wait_for_earlier(CHAINED)
    columns = columns_units * UNIT
    depth = depth_units * UNIT
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    left_at = left_ptr + (row * left_units)[:, None] * UNIT
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        d = start + tl.arange(0, DEPTH)
        left = tl.load(left_at + d[None, :], mask=(row < rows)[:, None] & (d < depth)[None, :], other=0.0)
        if TRANSPOSED:
            weight_at = weight_ptr + (column.to(tl.int64) * weight_units)[:, None] * UNIT + d[None, :]
            inside = (column < columns)[:, None] & (d < depth)[None, :]
            weight = tl.trans(tl.load(weight_at, mask=inside, other=0.0))
        else:
            weight_at = weight_ptr + (d.to(tl.int64) * weight_units)[:, None] * UNIT + column[None, :]
            inside = (d < depth)[:, None] & (column < columns)[None, :]
            weight = tl.load(weight_at, mask=inside, other=0.0)
        left = left.to(weight.dtype)
        if not ON_GPU:  # the interpreter takes bfloat16 for whole numbers here
            left, weight = left.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(left, weight, total)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_ptr + row[:, None] * columns + column[None, :], total, mask=inside)


def product(
    left: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    chained: bool = False,
    tile: Tile = TILE,
) -> Tensor:
    """left (B, D) @ weight (D, N), or @ weight (N, D)^T where `transposed`: (B, N) of `dtype`.

    weight is bfloat16 or float16, and left is rounded to that; sums in float32. Rows of both are dense.
    """
    rows, depth = left.shape
    columns, expected = weight.shape if transposed else weight.shape[::-1]
    if depth != expected:
        raise ValueError(
            f"rows of {depth} numbers came, and the weight {tuple(weight.shape)} takes {expected}"
        )
    out = left.new_empty(rows, columns, dtype=dtype)
    if 0 in (rows, columns):
        return out
    strides = (left.stride(0), weight.stride(0))
    unit = math.gcd(columns, depth, *strides, 8)
    high, wide = tile.rows, tile.columns
    if triton.cdiv(rows, high) * triton.cdiv(columns, wide) < tile.programs:
        high, wide = max(16, high // 2), max(16, wide // 2)
    _product_kernel[(triton.cdiv(columns, wide), triton.cdiv(rows, high))](
        left, weight, out, rows, *(size // unit for size in (columns, depth, *strides)),
        UNIT=unit, TRANSPOSED=transposed, ROWS=high, COLUMNS=wide, DEPTH=tile.depth,
        num_stages=tile.stages, **launched(tile.warps), **linked(chained),
    )  # fmt: skip
    return out
