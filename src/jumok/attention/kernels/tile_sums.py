"""What weighs in a tile of attention, summed in registers: for the kernels that pool maps.

**Two ways to an exponential.** The special function units of a multiprocessor make 16 a clock, and its tensor
cores 32 scores of width 64: plain code waits for exponentials. So of four, POLYNOMIALS are made of
multiplications and shifts instead (`_exp2_by_polynomial`). Float32 input always takes the accurate way.

**Sums by warps.** At the end of a cell the warps of a program would meet to add up what they have. Instead
each may write a part of its own, and these are added afterwards: no warp waits for another. (Sums by the
tensor cores would save nothing: to round two weights to float16 takes an instruction, and the last product of
a polynomial could no longer add.)
"""

from __future__ import annotations

import triton
import triton.language as tl

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)
MIN_POLYNOMIAL_EXPONENT = tl.constexpr(257.0)  # the exponent, plus 383, that a polynomial still serves


@triton.jit
def _exp2_by_polynomial(y, one, ANY: tl.constexpr):
    """2^(y - 383) without the special function unit, to a relative error of 7e-4, for y up to about 383.

    Of less than 257 it gives about 0 if ANY y may come, and anything if not.

    Between 256 and 512 the last 15 bits of a float32 are its fraction, and the bits above them count the
    whole numbers. Moved up by 8 places, they become the fraction and the exponent of another number: of
    -2^n · (1 + f), where y - 383 = n + f. That is 2^(n + f) but for a factor 2^f / (1 + f), for which there
    is a polynomial in 1 + f (the one with the smallest largest error). `one`, the bits of 1.0, comes as an
    argument so that the two operations on bits become one instruction, which takes one constant only.
    """
    bits = (tl.maximum(y, MIN_POLYNOMIAL_EXPONENT) if ANY else y).to(tl.int32, bitcast=True) << 8
    m = ((bits & 0x7FFFFF) | one).to(tl.float32, bitcast=True)  # 1 + f
    factor = 0.10644569 * m - 0.70747582
    factor = factor * m + 1.37730763
    factor = factor * m - 1.77561476
    return bits.to(tl.float32, bitcast=True) * factor


@triton.jit
def split_into_quarters(x):
    """[rows, keys] as four of [rows, keys / 16, 4]. A thread has all four in its registers: this is free."""
    ROWS: tl.constexpr = x.shape[0]
    SIXTEENS: tl.constexpr = x.shape[1] // 16
    near, far = tl.split(tl.permute(tl.reshape(x, (ROWS, SIXTEENS, 2, 8)), (0, 1, 3, 2)))
    a, b = tl.split(tl.reshape(near, (ROWS, SIXTEENS, 4, 2)))
    c, d = tl.split(tl.reshape(far, (ROWS, SIXTEENS, 4, 2)))
    return a, b, c, d


@triton.jit
def compute_exponents(s, factor, shift, POLYNOMIALS: tl.constexpr):
    """s · factor + shift of a tile [rows, keys] as four of [rows, keys / 16, 4], for `sum_unmasked_weights`."""
    a, b, c, d = split_into_quarters(s)
    shift = shift[:, None, None]
    b_shift = shift + 383.0 if POLYNOMIALS > 1 else shift
    d_shift = shift + 383.0 if POLYNOMIALS > 0 else shift
    return a * factor + shift, b * factor + b_shift, c * factor + shift, d * factor + d_shift


@triton.jit
def sum_unmasked_weights(a, b, c, d, one, POLYNOMIALS: tl.constexpr, ANY: tl.constexpr):
    """2 to the power of `compute_exponents`, summed by fours: [rows, keys / 16, 4]. If not ANY, `fits_polynomial_range`."""
    p = tl.exp2(a) + tl.exp2(c)
    p += _exp2_by_polynomial(b, one, ANY) if POLYNOMIALS > 1 else tl.exp2(b)
    p += _exp2_by_polynomial(d, one, ANY) if POLYNOMIALS > 0 else tl.exp2(d)
    return p


@triton.jit
def fits_polynomial_range(q, there, factor, shift, longest):
    """Whether no exponent of these rows [rows, d] can be so low that a polynomial must be told.

    A score is never below -|q| |k|, and no key is longer than `longest`.
    """
    length = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1))
    lowest = tl.min(tl.where(there, shift - length * longest * tl.abs(factor), 0.0), axis=0)
    found = (lowest > MIN_POLYNOMIAL_EXPONENT - 383.0 + 6.0).to(tl.int32)  # 6 for rounding; NaN is too low
    # All threads agree. Only if they vote does the compiler know, and keeps the loop in the warp's registers.
    if ON_GPU:
        found = tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.all.pred p, p, -1; selp.s32 $0, 1, 0, p;}",
            "=r,r", [found], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return found != 0


@triton.jit
def sum_masked_weights(s, factor, shift, keep, FOURS: tl.constexpr):
    """The same where not all pairs count; if not FOURS, nothing is summed."""
    p = tl.where(keep, tl.exp2(s * factor + shift[:, None]), 0.0)
    if FOURS:
        a, b, c, d = split_into_quarters(p)
        p = (a + b) + (c + d)
    return p


@triton.jit
def sum_per_warp(mass, PARTS: tl.constexpr):
    """What each of PARTS warps has of [rows, keys / 16, 4], [PARTS]: a warp has 16 rows of 64."""
    ROWS: tl.constexpr = mass.shape[0]
    SOME: tl.constexpr = mass.shape[1] * mass.shape[2]
    whole = tl.reshape(mass, (ROWS // (16 * PARTS), PARTS, 16 * SOME))
    return tl.sum(tl.reshape(tl.permute(whole, (1, 0, 2)), (PARTS, ROWS // PARTS * SOME)), axis=1)
