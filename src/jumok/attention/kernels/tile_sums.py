"""Sums of the attention weights of a tile, in registers, for the kernels that pool maps.

**Two ways to compute an exponential.** Per clock, the special function units of a multiprocessor compute 16
exponentials, and its tensor cores 32 scores of width 64: plain code waits for exponentials. So of four
exponentials, POLYNOMIALS are computed by multiplications and shifts instead (`_exp2_by_polynomial`). Float32
input always uses the accurate way.

**Sums per warp.** At the end of a cell, the warps of a program would have to synchronise to add their sums.
Instead, each warp can write its own part, and the parts are added afterwards. (Summing with the tensor cores
would save nothing: rounding two weights to float16 takes an instruction, and the last multiplication of a
polynomial could no longer include an addition.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from jumok.attention.kernels.common import ON_GPU

MIN_POLYNOMIAL_EXPONENT = tl.constexpr(257.0)  # the lowest exponent, plus 383, that a polynomial supports


@triton.jit
def _exp2_by_polynomial(y, one_bits, ANY: tl.constexpr):
    """2^(y - 383) without the special function unit, to a relative error of 7e-4, for y up to about 383.

    For y below 257, the result is about 0 if ANY, and undefined otherwise.

    Between 256 and 512, the last 15 bits of a float32 are its fraction, and the bits above them are its
    integer part. Shifted left by 8 bits, they become the fraction and the exponent of another number,
    -2^n · (1 + f), where y - 383 = n + f. This is 2^(n + f) except for a factor 2^f / (1 + f), which is
    approximated by a minimax polynomial in 1 + f. `one_bits`, the bits of 1.0, is an argument so that the two
    bit operations become one instruction, which supports only one constant.
    """
    bits = (tl.maximum(y, MIN_POLYNOMIAL_EXPONENT) if ANY else y).to(tl.int32, bitcast=True) << 8
    m = ((bits & 0x7FFFFF) | one_bits).to(tl.float32, bitcast=True)  # 1 + f
    factor = 0.10644569 * m - 0.70747582
    factor = factor * m + 1.37730763
    factor = factor * m - 1.77561476
    return bits.to(tl.float32, bitcast=True) * factor


@triton.jit
def split_into_quarters(x):
    """Split [rows, keys] into four of [rows, keys / 16, 4]. Free: a thread has all four in registers."""
    ROWS: tl.constexpr = x.shape[0]
    SIXTEENS: tl.constexpr = x.shape[1] // 16
    near, far = tl.split(tl.permute(tl.reshape(x, (ROWS, SIXTEENS, 2, 8)), (0, 1, 3, 2)))
    a, b = tl.split(tl.reshape(near, (ROWS, SIXTEENS, 4, 2)))
    c, d = tl.split(tl.reshape(far, (ROWS, SIXTEENS, 4, 2)))
    return a, b, c, d


@triton.jit
def compute_exponents(s, factor, shift, POLYNOMIALS: tl.constexpr):
    """s · factor + shift of a tile [rows, keys] as four of [rows, keys / 16, 4]."""
    a, b, c, d = split_into_quarters(s)
    shift = shift[:, None, None]
    b_shift = shift + 383.0 if POLYNOMIALS > 1 else shift
    d_shift = shift + 383.0 if POLYNOMIALS > 0 else shift
    return a * factor + shift, b * factor + b_shift, c * factor + shift, d * factor + d_shift


@triton.jit
def sum_unmasked_weights(a, b, c, d, one_bits, POLYNOMIALS: tl.constexpr, ANY: tl.constexpr):
    """2 to the power of the four `compute_exponents`, added: [rows, keys / 16, 4].

    If not ANY, `fits_polynomial_range` must hold.
    """
    p = tl.exp2(a) + tl.exp2(c)
    p += _exp2_by_polynomial(b, one_bits, ANY) if POLYNOMIALS > 1 else tl.exp2(b)
    p += _exp2_by_polynomial(d, one_bits, ANY) if POLYNOMIALS > 0 else tl.exp2(d)
    return p


@triton.jit
def fits_polynomial_range(q, valid, factor, shift, max_key_norm):
    """Whether all exponents of the rows of q [rows, d] are within the range of a polynomial.

    A score is never below -|q| |k|, and no |k| exceeds `max_key_norm`.
    """
    query_norm = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1))
    lowest = tl.min(tl.where(valid, shift - query_norm * max_key_norm * tl.abs(factor), 0.0), axis=0)
    fits = (lowest > MIN_POLYNOMIAL_EXPONENT - 383.0 + 6.0).to(tl.int32)  # 6 for rounding; False for NaN
    # All threads agree. The vote tells the compiler so, which then keeps the loop in the warp's registers.
    if ON_GPU:
        fits = tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.all.pred p, p, -1; selp.s32 $0, 1, 0, p;}",
            "=r,r", [fits], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return fits != 0


@triton.jit
def sum_masked_weights(s, factor, shift, allowed, FOURS: tl.constexpr):
    """The same for a tile in which only the pairs `allowed` count. If not FOURS, nothing is added."""
    p = tl.where(allowed, tl.exp2(s * factor + shift[:, None]), 0.0)
    if FOURS:
        a, b, c, d = split_into_quarters(p)
        p = (a + b) + (c + d)
    return p


@triton.jit
def sum_per_warp(sums, PARTS: tl.constexpr):
    """The sum of [rows, keys / 16, 4] in each of PARTS warps, [PARTS]: a warp has 16 rows of 64."""
    ROWS: tl.constexpr = sums.shape[0]
    COLUMNS: tl.constexpr = sums.shape[1] * sums.shape[2]
    by_warp = tl.reshape(sums, (ROWS // (16 * PARTS), PARTS, 16 * COLUMNS))
    return tl.sum(tl.reshape(tl.permute(by_warp, (1, 0, 2)), (PARTS, ROWS // PARTS * COLUMNS)), axis=1)
