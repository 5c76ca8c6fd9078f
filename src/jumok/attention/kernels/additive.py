"""Additive scores of many queries, score[i, j] = Σ_d v[d] · tanh(q[i, d] + k[j, d]), forward and backward.

The B×Q×K×H terms are never stored. Each program keeps its tile of the result in registers and loops over the
axis that is summed, so that threads never wait for each other.

    forward    a tile of scores [queries, keys], lanes along the keys; loop over d
    backward   a tile of dq (or dk) [rows, d], lanes along d; loop over the keys (or queries)

**Fewer special functions than elements.** The special function unit computes one tanh in the time of eight
multiply-adds, so a plain kernel waits for it. With a = exp(2q) and b = exp(2k), computed once per row,

    tanh(q + k) = 1 - 2 / (1 + a·b)      and      v/x + w/y = (v·y + w·x) / (x·y):

two elements share one reciprocal. The absolute error is that of float32 (about 1e-7), far below that of the
instruction `tanh.approx` (5e-4). The products are finite while max|q| + max|k| < 22. The kernels check this
on the device and otherwise compute a tanh for every element. Float32 input always uses an accurate tanh.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.kernels.common import (
    ON_GPU,
    disable_compile,
    divide_up,
    forbid_double_backward,
    launch_options,
    make_rows_contiguous,
    round_up,
)
from jumok.attention.kernels.launcher import launch

MAX_SAFE_SUM = tl.constexpr(21.8)  # above it, the product of two (1 + exp(2x)) may overflow float32
TWO_LOG2_E = tl.constexpr(2.8853900817779268)  # exp(2x) = exp2(TWO_LOG2_E · x)
SUM_RUN_LENGTH = tl.constexpr(32)  # float32 sums are split into runs of this length to limit rounding errors
NUM_SUM_PARTS = 64  # parts of the rows of partial sums that are summed in parallel
DEPTH_MULTIPLE = 16  # tiles of exponentials are padded to a multiple of this many d, so loops need no mask


class AdditiveForwardBlockSizes(NamedTuple):
    """Block sizes of the forward kernel. A thread has `queries` rows of `keys` / (32 · num_warps) columns."""

    queries: int = 16
    keys: int = 128
    num_warps: int = 4
    unroll: int = 4  # pairs of d per loop iteration


class AdditiveBackwardBlockSizes(NamedTuple):
    """Block sizes of the backward kernel. A thread has `rows` rows of `width` / (32 · num_warps) columns."""

    rows: int = 16
    width: int = 128
    num_warps: int = 4
    unroll: int = 2  # pairs of rows of the other side per loop iteration
    target_programs: int = 1024  # the loop is split until there are about this many programs


DEFAULT_FORWARD_BLOCKS = AdditiveForwardBlockSizes()
DEFAULT_BACKWARD_BLOCKS = AdditiveBackwardBlockSizes()


# --- device functions ---------------------------------------------------------------------------------------


@triton.jit
def accurate_tanh(x):
    """tanh to about one unit in the last place of float32."""
    abs_x = tl.abs(x)
    y = x * x
    # tanh(x)/x - 1 on |x| < 0.6, fitted for relative error (3e-9) by reweighted least squares
    small = -0.005895157648728946
    small = small * y + 0.02079597127233934
    small = small * y - 0.05378383015244251
    small = small * y + 0.13331924125058092
    small = small * y - 0.3333329800204292
    small = abs_x + abs_x * (y * small)
    large = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * abs_x))
    magnitude = tl.where(abs_x < 0.6, small, large)
    return tl.where(x < 0.0, -magnitude, magnitude)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """tanh of float32: accurate if EXACT, else one instruction (relative error 5e-4)."""
    if EXACT or not ON_GPU:
        y = accurate_tanh(x)
    else:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _reciprocal(x):
    """1 / x to about one unit in the last place."""
    if ON_GPU:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def unaligned_arange(SIZE: tl.constexpr):
    """0 … SIZE - 1, declared to be unaligned.

    Otherwise the compiler assigns several adjacent columns to each thread, for wide loads, and so only some
    of the rows of a tile. Values that all rows share would then be computed many times.
    """
    return tl.multiple_of(tl.arange(0, SIZE), 1)


@triton.jit
def _exponentials_fit(peaks_ptr):
    """Whether products of the exponentials are finite. False for NaN too."""
    return tl.load(peaks_ptr) + tl.load(peaks_ptr + 1) < MAX_SAFE_SUM


# --- exponentials -------------------------------------------------------------------------------------------


@triton.jit
def _store_exponential_tile(x_ptr, out_ptr, peak_ptr, tile, d0, R, H, stride_b, stride_r, depth,
                            BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    blocks = tl.cdiv(R, BR)
    b = (tile // blocks).to(tl.int64)
    row = (tile % blocks) * BR + tl.arange(0, BR)
    d = d0 + tl.arange(0, BD)
    inside = (row < R)[:, None] & (d < H)[None, :]
    offset = b * stride_b + row.to(tl.int64)[:, None] * stride_r + d[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_max(peak_ptr, tl.max(tl.max(tl.abs(x), axis=1), axis=0), sem="relaxed")
    out_offset = (tile.to(tl.int64) * depth + d)[:, None] * BR + tl.arange(0, BR)[None, :]
    tl.store(out_ptr + out_offset, tl.trans(tl.exp2(x * TWO_LOG2_E)), mask=(d < depth)[:, None])


@triton.jit
def _exponentials_kernel(
    q_ptr, k_ptr, exp_q_ptr, exp_k_ptr, peaks_ptr, Q, K, H, q_tiles, depth,
    q_stride_b, q_stride_r, k_stride_b, k_stride_r, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """exp(2x) of q and k in tiles [tile, d, row], as the scores kernel reads them, and max|q|, max|k|."""
    tile = tl.program_id(0)
    d0 = tl.program_id(1) * BD
    if tile < q_tiles:
        _store_exponential_tile(q_ptr, exp_q_ptr, peaks_ptr, tile, d0, Q, H, q_stride_b, q_stride_r, depth, BQ, BD)
    else:
        tile -= q_tiles
        _store_exponential_tile(k_ptr, exp_k_ptr, peaks_ptr + 1, tile, d0, K, H, k_stride_b, k_stride_r, depth, BK, BD)


# --- forward ------------------------------------------------------------------------------------------------


@triton.jit
def _compute_paired_scores(q_at, k_at, v_ptr, H, depth, BQ: tl.constexpr, BK: tl.constexpr, UNROLL: tl.constexpr):
    """Tile [BQ, BK] from tiles of exponentials [depth, BQ] and [depth, BK]: one reciprocal for two d."""
    halves = tl.zeros((BQ, BK), tl.float32)  # Σ v / (1 + a·b)
    total = 0.0  # Σ v
    for d in range(0, depth, 2 * UNROLL):
        for u in tl.static_range(0, 2 * UNROLL, 2):
            v0 = tl.load(v_ptr + d + u, mask=d + u < H, other=0.0).to(tl.float32)
            v1 = tl.load(v_ptr + d + u + 1, mask=d + u + 1 < H, other=0.0).to(tl.float32)
            x = 1.0 + tl.load(q_at + u * BQ)[:, None] * tl.load(k_at + u * BK)[None, :]
            y = 1.0 + tl.load(q_at + (u + 1) * BQ)[:, None] * tl.load(k_at + (u + 1) * BK)[None, :]
            halves += (v0 * y + v1 * x) * _reciprocal(x * y)
            total += v0 + v1
        q_at += 2 * UNROLL * BQ
        k_at += 2 * UNROLL * BK
    return total - 2.0 * halves


@triton.jit
def _compute_plain_scores(
    q_at, k_at, v_ptr, q_inside, k_inside, H, BQ: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr
):
    """Tile [BQ, BK] with a tanh for every element."""
    score = tl.zeros((BQ, BK), tl.float32)
    for d0 in range(0, H, SUM_RUN_LENGTH):
        part = tl.zeros((BQ, BK), tl.float32)
        for d in range(d0, tl.minimum(d0 + SUM_RUN_LENGTH, H)):
            v = tl.load(v_ptr + d).to(tl.float32)
            q = tl.load(q_at + d, mask=q_inside, other=0.0).to(tl.float32)
            k = tl.load(k_at + d, mask=k_inside, other=0.0).to(tl.float32)
            part += v * tanh(q[:, None] + k[None, :], EXACT)
        score += part
    return score


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, v_ptr, exp_q_ptr, exp_k_ptr, peaks_ptr, out_ptr, Q, K, H, depth,
    q_stride_b, q_stride_r, k_stride_b, k_stride_r,
    BQ: tl.constexpr, BK: tl.constexpr, UNROLL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    k_blocks = tl.cdiv(K, BK)
    q_blocks = tl.cdiv(Q, BQ)
    q_tile = (program // k_blocks).to(tl.int64)  # counts through the batch
    b = q_tile // q_blocks
    k_tile = b * k_blocks + program % k_blocks
    row = (q_tile % q_blocks) * BQ + tl.arange(0, BQ)
    column = (program % k_blocks).to(tl.int64) * BK + tl.arange(0, BK)

    score = tl.zeros((BQ, BK), tl.float32)
    fits = False
    if not EXACT:
        fits = _exponentials_fit(peaks_ptr)
    if fits:
        q_at = exp_q_ptr + q_tile * depth * BQ + tl.arange(0, BQ)
        k_at = exp_k_ptr + k_tile * depth * BK + unaligned_arange(BK)
        score = _compute_paired_scores(q_at, k_at, v_ptr, H, depth, BQ, BK, UNROLL)
    else:
        q_rows = q_ptr + b * q_stride_b + row * q_stride_r
        k_rows = k_ptr + b * k_stride_b + column * k_stride_r
        score = _compute_plain_scores(q_rows, k_rows, v_ptr, row < Q, column < K, H, BQ, BK, EXACT)

    offset = (b * Q + row)[:, None] * K + column[None, :]
    tl.store(out_ptr + offset, score, mask=(row < Q)[:, None] & (column < K)[None, :])


# --- backward -----------------------------------------------------------------------------------------------


@triton.jit
def _gradient_kernel(
    x_ptr, y_ptr, v_ptr, g_ptr, peaks_ptr, dx_ptr, dv_ptr, R, S, H, share, g_rows,
    x_stride_b, x_stride_r, y_stride_b, y_stride_r,
    BR: tl.constexpr, BD: tl.constexpr, UNROLL: tl.constexpr, EXACT: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """dx[i, d] = v[d] · Σ_j g[j, i] · (1 - t²), dv[d] = Σ_ij g[j, i] · t, with t = tanh(x[i, d] + y[j, d]).

    The score is symmetric in q and k, so the same kernel computes dq (y = k) and dk (y = q).
    x (B, R, H), y (B, S, H), g (B, splits · share, g_rows), zero beyond S and R. dx (splits, B, R, H) and
    dv (splits · B · row blocks, H) are partial sums over the `share` rows of y that a program loops over.
    """
    tile = tl.program_id(0)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    blocks = tl.cdiv(R, BR)
    batches = tl.num_programs(0) // blocks
    b = (tile // blocks).to(tl.int64)
    row = (tile % blocks).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.program_id(1) * BD + unaligned_arange(BD)
    inside = (row < R)[:, None] & (d < H)[None, :]

    x = tl.load(x_ptr + b * x_stride_b + row[:, None] * x_stride_r + d[None, :], mask=inside, other=0.0).to(tl.float32)
    first = split * share
    last = tl.minimum(first + share, S)
    y_at = y_ptr + b * y_stride_b + first.to(tl.int64) * y_stride_r + d
    g_at = g_ptr + (b * splits * share + first) * g_rows + row

    slope = tl.zeros((BR, BD), tl.float32)  # Σ_j g · (1 - t²)
    value = tl.zeros((BR, BD), tl.float32)  # Σ_j g · t
    fits = False
    if not EXACT:
        fits = _exponentials_fit(peaks_ptr)
    if fits:
        exp_x = tl.exp2(x * TWO_LOG2_E)
        for j in range(first, last, 2 * UNROLL):
            for u in tl.static_range(0, 2 * UNROLL, 2):
                g0 = tl.load(g_at + u * g_rows)[:, None]
                g1 = tl.load(g_at + (u + 1) * g_rows)[:, None]
                y0 = tl.load(y_at + u * y_stride_r, mask=d < tl.where(j + u < last, H, 0), other=0.0)
                y1 = tl.load(y_at + (u + 1) * y_stride_r, mask=d < tl.where(j + u + 1 < last, H, 0), other=0.0)
                p0 = 1.0 + exp_x * tl.exp2(y0.to(tl.float32) * TWO_LOG2_E)[None, :]
                p1 = 1.0 + exp_x * tl.exp2(y1.to(tl.float32) * TWO_LOG2_E)[None, :]
                r = _reciprocal(p0 * p1)
                t0 = 0.5 - p1 * r  # half a tanh; the missing factors are applied after the loop
                t1 = 0.5 - p0 * r
                slope += g0 * (0.25 - t0 * t0)
                slope += g1 * (0.25 - t1 * t1)
                if WITH_DV:
                    value += g0 * t0
                    value += g1 * t1
            g_at += 2 * UNROLL * g_rows
            y_at += 2 * UNROLL * y_stride_r
        slope *= 4.0
        value *= 2.0
    else:
        for j in range(first, last, SUM_RUN_LENGTH):
            slope_part = tl.zeros((BR, BD), tl.float32)
            value_part = tl.zeros((BR, BD), tl.float32)
            for _ in range(j, tl.minimum(j + SUM_RUN_LENGTH, last)):
                g = tl.load(g_at)[:, None]
                y = tl.load(y_at, mask=d < H, other=0.0).to(tl.float32)
                t = tanh(x + y[None, :], EXACT)
                slope_part += g * (1.0 - t * t)
                if WITH_DV:
                    value_part += g * t
                g_at += g_rows
                y_at += y_stride_r
            slope += slope_part
            value += value_part

    v = tl.load(v_ptr + d, mask=d < H, other=0.0).to(tl.float32)
    dx_offset = ((split * batches + b) * R + row)[:, None] * H + d[None, :]
    tl.store(dx_ptr + dx_offset, slope * v[None, :], mask=inside)
    if WITH_DV:
        dv_offset = (split * batches * blocks + tile).to(tl.int64) * H + d
        tl.store(dv_ptr + dv_offset, tl.sum(value, axis=0), mask=d < H)


# --- host ---------------------------------------------------------------------------------------------------


def compute_scores_forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: AdditiveForwardBlockSizes = DEFAULT_FORWARD_BLOCKS
) -> tuple[Tensor, Tensor]:
    """Return float32 scores (B, Q, K) of q (B, Q, H), k (B, K, H), v (H), and (max|q|, max|k|)."""
    B, Q, H = q.shape
    K = k.shape[1]
    exact = q.dtype == torch.float32
    scores = q.new_empty(B, Q, K, dtype=torch.float32)
    peaks = q.new_zeros(2, dtype=torch.float32)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    BQ, BK = blocks.queries, blocks.keys
    q_tiles, k_tiles = B * divide_up(Q, BQ), B * divide_up(K, BK)
    depth = round_up(H, max(DEPTH_MULTIPLE, 2 * blocks.unroll))
    exp_q = exp_k = peaks  # not read if exact
    if not exact:
        exp_q = q.new_empty(q_tiles, depth, BQ, dtype=torch.float32)
        exp_k = q.new_empty(k_tiles, depth, BK, dtype=torch.float32)
        grid = (q_tiles + k_tiles, divide_up(depth, 64))
        launch(
            _exponentials_kernel, grid, q, k, exp_q, exp_k, peaks, Q, K, H, q_tiles, depth, *strides,
            BQ=BQ, BK=BK, BD=64, **launch_options(4),
        )  # fmt: skip
    launch(
        _scores_kernel, (q_tiles * divide_up(K, BK),), q, k, v, exp_q, exp_k, peaks, scores, Q, K, H, depth, *strides,
        BQ=BQ, BK=BK, UNROLL=blocks.unroll, EXACT=exact, **launch_options(blocks.num_warps),
    )  # fmt: skip
    return scores, peaks


def compute_max_abs(q: Tensor, k: Tensor) -> Tensor:
    """Return (max|q|, max|k|) in float32, or NaN, as `compute_scores_forward` does."""
    peaks = q.new_empty(2, dtype=torch.float32)
    for x, peak in zip((q, k), peaks, strict=True):
        torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32, out=peak)
    return peaks


def compute_scores_gradient(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    grad: Tensor,
    peaks: Tensor,
    *,
    with_dv: bool,
    blocks: AdditiveBackwardBlockSizes = DEFAULT_BACKWARD_BLOCKS,
) -> tuple[Tensor, Tensor | None]:
    """Return dx (B, R, H) of x (B, R, H) against y (B, S, H), given grad (B, S, R), and dv (H) if `with_dv`.

    Deterministic: partial sums are stored and added in a fixed order.
    """
    B, R, H = x.shape
    S = y.shape[1]
    rows, columns = divide_up(R, blocks.rows), divide_up(H, blocks.width)
    splits = max(1, min(blocks.target_programs // (B * rows * columns), S // 32))
    share = round_up(divide_up(S, splits), 2 * blocks.unroll)
    splits = divide_up(S, share)
    g_rows, g_steps = rows * blocks.rows, splits * share
    if (g_rows, g_steps) != (R, S):
        grad = torch.nn.functional.pad(grad, (0, g_rows - R, 0, g_steps - S))
    dx = x.new_empty(splits, B, R, H, dtype=x.dtype if splits == 1 else torch.float32)
    dv = x.new_empty(splits * B * rows if with_dv else 0, H, dtype=torch.float32)
    launch(
        _gradient_kernel, (B * rows, columns, splits),
        x, y, v, grad.contiguous(), peaks, dx, dv, R, S, H, share, g_rows,
        x.stride(0), x.stride(1), y.stride(0), y.stride(1),
        BR=blocks.rows, BD=blocks.width, UNROLL=blocks.unroll,
        EXACT=x.dtype == torch.float32, WITH_DV=with_dv, **launch_options(blocks.num_warps),
    )  # fmt: skip
    return dx[0] if splits == 1 else dx.sum(0).to(x.dtype), _sum_rows(dv) if with_dv else None


def _sum_rows(x: Tensor) -> Tensor:
    """Return ``x.sum(0)`` in two steps. With many rows and few columns, one step underuses the GPU."""
    num_rows = len(x) // NUM_SUM_PARTS * NUM_SUM_PARTS
    if not num_rows:
        return x.sum(0)
    total: Tensor = x[:num_rows].unflatten(0, (NUM_SUM_PARTS, -1)).sum(1).sum(0)
    return total if num_rows == len(x) else total + x[num_rows:].sum(0)


class _AdditiveScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = make_rows_contiguous(q), make_rows_contiguous(k), v.contiguous()
        scores, peaks = compute_scores_forward(q, k, v)
        ctx.save_for_backward(q, k, v, peaks)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        forbid_double_backward()
        q, k, v, peaks = ctx.saved_tensors
        needs_dq, needs_dk, needs_dv = ctx.needs_input_grad
        dq = dk = dv = None
        if needs_dq:
            with_dv = needs_dv and not needs_dk
            dq, dv = compute_scores_gradient(q, k, v, grad.transpose(1, 2), peaks, with_dv=with_dv)
        if needs_dk or (needs_dv and not needs_dq):
            dk, dv = compute_scores_gradient(k, q, v, grad, peaks, with_dv=needs_dv)
        return dq, dk if needs_dk else None, None if dv is None else dv.to(v.dtype)


@disable_compile
def fused_additive_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return float32 scores (B, Q, K), score[b, i, j] = Σ_d v[d] · tanh(q[b, i, d] + k[b, j, d]).

    Differentiable once in all arguments. It takes the memory of the scores, never B×Q×K×H.

    Args:
        q: projected queries (B, Q, H) in bfloat16, float16 or float32.
        k: projected keys (B, K, H).
        v: (H) in the same type or float32.
    """
    if 0 in (*q.shape, *k.shape):
        zero = (q.sum() + k.sum() + v.sum()).float() * 0.0  # connects the inputs, whose gradients are zero
        return zero + q.new_zeros(q.shape[0], q.shape[1], k.shape[1], dtype=torch.float32)
    return cast(Tensor, _AdditiveScores.apply(q, k, v))
