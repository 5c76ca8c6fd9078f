"""Attention within packed sequences that are so short that one program holds a whole one.

    out = attend_short_sequences(q, k, v, layout, scale, dropout)   # all (1, H, L, D), sequences concatenated

A program computes one sequence and one head. All keys are in one tile, so the softmax of a query needs one
pass. The forward pass stores only its result, and the backward pass computes the same weights again, with the
same function. The backward pass is one kernel too, and each gradient is written once: the same input gives
bitwise identical results.

**Tiles by length.** A kernel is compiled for the longest sequence, and most sequences are shorter. So it has
tiles of several sizes, and each sequence takes the smallest that it fits into: half the side is a quarter of
the work. The largest tile of the backward pass needs so many registers that few programs run concurrently. So
it has its own launch, and a few long sequences do not slow down the others. A launch skips the sequences of
the other launch, after reading their boundaries.

**Dropout.** The forward and the backward pass compute which weights to drop from one random number on the
device and from the position of a weight. So no mask is stored, and the result does not depend on block sizes.

**Positions without a sequence.** There may be positions after the last sequence. One more program per head
writes zeros there, so that the output need not be initialised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.gpu_support import get_max_shared_memory
from jumok.attention.kernels.common import (
    LOG2_E,
    disable_compile,
    forbid_double_backward,
    launch_options,
    make_rows_contiguous,
    matmul,
    pad_width,
)
from jumok.attention.kernels.launcher import launch

# These change from call to call, and specialising the kernel on them would not make it faster: UNIT is all
# that the compiler needs to know about the strides.
UNSPECIALIZED_ARGUMENTS = ["sequences", "q_length", "k_length", "dropped"]
UNSPECIALIZED_ARGUMENTS += [f"{x}_stride_{dim}" for x in ("q", "k", "v", "out", "do", "dq", "dk", "dv") for dim in "lh"]

DROPOUT_RESOLUTION = 1 << 16  # dropout probabilities are multiples of 1 / this: a weight has 16 random bits
PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass all tests of randomness, as in FlashAttention


class ShortKernelBlockSizes(NamedTuple):
    """Block sizes of a kernel."""

    queries: int  # of a tile; the forward kernel loops over them if a sequence has more
    keys: int  # of a tile: at least as many as the longest sequence has
    num_warps: int
    max_registers: int  # per thread at most: the fewer, the more programs share a multiprocessor
    min_tile_side: int = 32  # the side of the smallest tile
    longer_than: int = 0  # skip sequences up to this length: another launch computes them

    @property
    def num_tiers(self) -> int:
        """The number of tile sizes, each with twice the side of the previous one."""
        return max(1, max(self.queries, self.keys) // self.min_tile_side).bit_length()


def choose_forward_blocks(max_seqlen_q: int, max_seqlen_k: int, width: int) -> ShortKernelBlockSizes:
    """Return the block sizes if no sequence is longer than this."""
    queries, keys = min(64, _tile_side(max_seqlen_q)), _tile_side(max_seqlen_k)
    largest = max(queries, keys)
    registers = 168 if width > 64 else 96 if largest == 64 else 128
    return ShortKernelBlockSizes(queries, keys, min(4, largest // 16), registers)


def choose_backward_blocks(max_seqlen_q: int, max_seqlen_k: int, width: int) -> tuple[ShortKernelBlockSizes, ...]:
    """Return the block sizes of each launch if no sequence is longer than this."""
    queries, keys = _tile_side(max_seqlen_q), _tile_side(max_seqlen_k)
    largest = max(queries, keys)
    if largest <= 64:
        max_registers = 128 if largest == 64 and width <= 64 else 255
        return (ShortKernelBlockSizes(queries, keys, largest // 16, max_registers),)
    shorter = choose_backward_blocks(min(64, max_seqlen_q), min(64, max_seqlen_k), width)
    longer = ShortKernelBlockSizes(queries, keys, largest // 16, 255, min_tile_side=largest, longer_than=64)
    return *shorter, longer


def fits_shared_memory(device: torch.device, max_seqlen_q: int, max_seqlen_k: int, width: int) -> bool:
    """Return whether q, k, v, dO and the weights of the backward kernel fit into shared memory."""
    queries, keys = _tile_side(max_seqlen_q), _tile_side(max_seqlen_k)
    return 2 * (2 * (queries + keys) * pad_width(width) + queries * keys) <= get_max_shared_memory(device)


def _tile_side(max_seqlen: int) -> int:
    return pad_width(max(1, max_seqlen))


# --- kernels ------------------------------------------------------------------------------------------------
#
# Strides are in units of UNIT elements, so that the compiler knows what they are multiples of and loads 16
# bytes at a time if possible. By itself, it only checks for multiples of 16, and 72 is not one.


@triton.jit
def _load_rows(ptr, row, count, stride, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a sequence, [rows, BD], zeros beyond its `count` rows and its D columns."""
    d = tl.arange(0, BD)
    at = ptr + row[:, None] * (stride * UNIT) + d[None, :]
    return tl.load(at, mask=(row < count)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_rows(ptr, x, row, count, stride, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    at = ptr + row[:, None] * (stride * UNIT) + d[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(row < count)[:, None] & (d < D)[None, :])


@triton.jit
def _get_sequence_pointer(ptr, first, head, stride_l, stride_h, UNIT: tl.constexpr):
    """The pointer to the first position of a sequence, of one head."""
    return ptr + (first * stride_l + head * stride_h) * UNIT


@triton.jit
def _fill_zeros(ptr, first, length, head, stride_l, stride_h, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Zeros at all positions from `first` on."""
    ROWS: tl.constexpr = 16
    ptr = _get_sequence_pointer(ptr, first, head, stride_l, stride_h, UNIT)
    for begin in range(0, (length - first).to(tl.int32), ROWS):
        row = begin + tl.arange(0, ROWS)
        at = ptr + row.to(tl.int64)[:, None] * (stride_l * UNIT) + tl.arange(0, BD)[None, :]
        inside = (row < length - first)[:, None] & (tl.arange(0, BD) < D)[None, :]
        tl.store(at, tl.zeros((ROWS, BD), ptr.dtype.element_ty), mask=inside)


@triton.jit
def _compute_exponentials(q, k, query, key, k_count, factor, CAUSAL: tl.constexpr):
    """The weights before normalisation, [queries, keys], and the factor that normalises each row.

    A row without any allowed key has zeros. The forward and the backward kernel both use this function.
    """
    allowed = (key < k_count)[None, :]
    if CAUSAL:
        allowed = allowed & (key[None, :] <= query[:, None])
    s = tl.where(allowed, matmul(q, tl.trans(k)) * factor, -float("inf"))
    peak = tl.max(s, axis=1)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    e = tl.exp2(s - peak[:, None])
    total = tl.sum(e, axis=1)
    return e, 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _philox(seed, counter, stream):
    """Four random 32-bit numbers, determined by the seed, a counter and a stream number: Philox4x32.

    Like `tl.philox`, but with 64-bit multiplications, each one instruction where `tl.philox` takes two.
    """
    a, b = counter.to(tl.uint32), stream.to(tl.uint32)
    c, d = tl.zeros_like(a), tl.zeros_like(a)
    key, other = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        x, y = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, b = (y >> 32).to(tl.uint32) ^ b ^ key, y.to(tl.uint32)
        c, d = (x >> 32).to(tl.uint32) ^ d ^ other, x.to(tl.uint32)
        key += 0x9E3779B9
        other += 0xBB67AE85
    return a, b, c, d


@triton.jit
def _compute_dropout_mask(seed_ptr, dropped, query, key):
    """Which weights dropout keeps, [queries, keys], by the seed, the program, the query and the key.

    A call of Philox serves eight keys, with 16 bits each. These are keys that one thread has of a row in the
    tensor-core layout of a product: two adjacent keys, and those 8, 16 and 24 further. So no bits are
    exchanged between threads, and the compiler finds that only every eighth call of a thread differs.
    """
    key = tl.broadcast_to(key[None, :], (query.shape[0], key.shape[0]))
    group = query[:, None] * 32 + key // 32 * 4 + key % 8 // 2
    a, b, c, d = _philox(tl.load(seed_ptr), group, tl.program_id(0))
    part = key // 8 % 4
    bits = tl.where(part < 2, tl.where(part == 0, a, b), tl.where(part == 2, c, d))
    return tl.where(key % 2 == 0, bits << 16, bits) >= dropped.to(tl.uint32) << 16  # of the upper 16 bits


@triton.jit
def _zero_dropped(p, seed_ptr):
    """The weights with zeros for dropped ones, which are marked by a negative sign."""
    if seed_ptr is not None:
        p = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return p


@triton.jit
def _fits_tier(longer, MIN_TILE: tl.constexpr, LONGER_THAN: tl.constexpr, tier: tl.constexpr):
    """Whether a sequence takes the tile of side MIN_TILE · 2^tier. `longer` is its longer side's length."""
    return (longer > (LONGER_THAN if tier == 0 else MIN_TILE << (tier - 1))) & (longer <= (MIN_TILE << tier))


@triton.jit
def _attend_sequence(
    q_ptr, k_ptr, v_ptr, out_ptr, q_count, k_count, factor, q_stride, k_stride, v_stride, out_stride,
    seed_ptr, dropped, keep_scale,
    UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Forward of one sequence and head."""
    key = tl.arange(0, BK)
    k = _load_rows(k_ptr, key, k_count, k_stride, UNIT, D, BD)
    v = _load_rows(v_ptr, key, k_count, v_stride, UNIT, D, BD)
    for begin in range(0, q_count, BQ):
        query = begin + tl.arange(0, BQ)
        q = _load_rows(q_ptr, query, q_count, q_stride, UNIT, D, BD)
        e, norm = _compute_exponentials(q, k, query, key, k_count, factor, CAUSAL)
        if seed_ptr is not None:
            e = tl.where(_compute_dropout_mask(seed_ptr, dropped, query, key), e, 0.0)
            norm *= keep_scale
        out = matmul(e.to(v.dtype), v) * norm[:, None]
        _store_rows(out_ptr, out, query, q_count, out_stride, UNIT, D, BD)


@triton.jit
def _backpropagate_sequence(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, q_count, k_count, factor, scale,
    q_stride, k_stride, v_stride, do_stride, dq_stride, dk_stride, dv_stride,
    seed_ptr, dropped, keep_scale,
    UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Backward of one sequence and head. The tile contains all queries.

    Each gradient is stored as soon as it is known, so that its registers are free for the next. A dropped
    weight is represented by its negative, so that the dropout mask needs no additional registers.
    """
    key = tl.arange(0, BK)
    query = tl.arange(0, BQ)
    q = _load_rows(q_ptr, query, q_count, q_stride, UNIT, D, BD)
    k = _load_rows(k_ptr, key, k_count, k_stride, UNIT, D, BD)
    do = _load_rows(do_ptr, query, q_count, do_stride, UNIT, D, BD)
    v = _load_rows(v_ptr, key, k_count, v_stride, UNIT, D, BD)
    e, norm = _compute_exponentials(q, k, query, key, k_count, factor, CAUSAL)
    if seed_ptr is not None:
        e = tl.where(_compute_dropout_mask(seed_ptr, dropped, query, key), e, -e)
        norm *= keep_scale
    p = e * norm[:, None]
    dv = matmul(tl.trans(_zero_dropped(p, seed_ptr).to(v.dtype)), do)
    _store_rows(dv_ptr, dv, key, k_count, dv_stride, UNIT, D, BD)
    dp = matmul(do, tl.trans(v))
    if seed_ptr is None:
        ds = (p * (dp - tl.sum(p * dp, axis=1)[:, None])).to(v.dtype)
    else:
        dp *= _zero_dropped(p, seed_ptr)
        ds = (dp - tl.abs(p) * (tl.sum(dp, axis=1) / keep_scale)[:, None]).to(v.dtype)
    dk = matmul(tl.trans(ds), q) * scale
    _store_rows(dk_ptr, dk, key, k_count, dk_stride, UNIT, D, BD)
    dq = matmul(ds, k) * scale
    _store_rows(dq_ptr, dq, query, q_count, dq_stride, UNIT, D, BD)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seed_ptr, dropped, keep_scale,
    sequences, q_length, factor,
    q_stride_l, q_stride_h, k_stride_l, k_stride_h, v_stride_l, v_stride_h, out_stride_l, out_stride_h,
    H: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, MIN_TILE: tl.constexpr, NUM_TIERS: tl.constexpr, LONGER_THAN: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    # Adjacent programs have the heads of one sequence, which are adjacent in memory.
    head = tl.program_id(0) % H
    sequence = tl.program_id(0) // H
    q_first = tl.load(cu_seqlens_q_ptr + sequence).to(tl.int64)
    out_start = _get_sequence_pointer(out_ptr, q_first, head, out_stride_l, out_stride_h, UNIT)
    if sequence == sequences:
        _fill_zeros(out_ptr, q_first, q_length, head, out_stride_l, out_stride_h, UNIT, D, BD)
    else:
        k_first = tl.load(cu_seqlens_k_ptr + sequence).to(tl.int64)
        q_count = (tl.load(cu_seqlens_q_ptr + sequence + 1) - q_first).to(tl.int32)
        k_count = (tl.load(cu_seqlens_k_ptr + sequence + 1) - k_first).to(tl.int32)
        q_start = _get_sequence_pointer(q_ptr, q_first, head, q_stride_l, q_stride_h, UNIT)
        k_start = _get_sequence_pointer(k_ptr, k_first, head, k_stride_l, k_stride_h, UNIT)
        v_start = _get_sequence_pointer(v_ptr, k_first, head, v_stride_l, v_stride_h, UNIT)
        longer = tl.minimum(tl.maximum(q_count, k_count), MIN_TILE << (NUM_TIERS - 1))  # it loops over more queries
        for tier in tl.static_range(NUM_TIERS):
            if _fits_tier(longer, MIN_TILE, LONGER_THAN, tier):
                _attend_sequence(
                    q_start, k_start, v_start, out_start, q_count, k_count, factor,
                    q_stride_l, k_stride_l, v_stride_l, out_stride_l, seed_ptr, dropped, keep_scale,
                    UNIT, D, BD, min(MIN_TILE << tier, BQ), min(MIN_TILE << tier, BK), CAUSAL,
                )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    seed_ptr, dropped, keep_scale, sequences, q_length, k_length, factor, scale,
    q_stride_l, q_stride_h, k_stride_l, k_stride_h, v_stride_l, v_stride_h, do_stride_l, do_stride_h,
    dq_stride_l, dq_stride_h, dk_stride_l, dk_stride_h, dv_stride_l, dv_stride_h,
    H: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, MIN_TILE: tl.constexpr, NUM_TIERS: tl.constexpr, LONGER_THAN: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    sequence = tl.program_id(0) // H
    q_first = tl.load(cu_seqlens_q_ptr + sequence).to(tl.int64)
    k_first = tl.load(cu_seqlens_k_ptr + sequence).to(tl.int64)
    if sequence == sequences:
        if LONGER_THAN == 0:
            _fill_zeros(dq_ptr, q_first, q_length, head, dq_stride_l, dq_stride_h, UNIT, D, BD)
            _fill_zeros(dk_ptr, k_first, k_length, head, dk_stride_l, dk_stride_h, UNIT, D, BD)
            _fill_zeros(dv_ptr, k_first, k_length, head, dv_stride_l, dv_stride_h, UNIT, D, BD)
    else:
        q_count = (tl.load(cu_seqlens_q_ptr + sequence + 1) - q_first).to(tl.int32)
        k_count = (tl.load(cu_seqlens_k_ptr + sequence + 1) - k_first).to(tl.int32)
        q_start = _get_sequence_pointer(q_ptr, q_first, head, q_stride_l, q_stride_h, UNIT)
        k_start = _get_sequence_pointer(k_ptr, k_first, head, k_stride_l, k_stride_h, UNIT)
        v_start = _get_sequence_pointer(v_ptr, k_first, head, v_stride_l, v_stride_h, UNIT)
        do_start = _get_sequence_pointer(do_ptr, q_first, head, do_stride_l, do_stride_h, UNIT)
        dq_start = _get_sequence_pointer(dq_ptr, q_first, head, dq_stride_l, dq_stride_h, UNIT)
        dk_start = _get_sequence_pointer(dk_ptr, k_first, head, dk_stride_l, dk_stride_h, UNIT)
        dv_start = _get_sequence_pointer(dv_ptr, k_first, head, dv_stride_l, dv_stride_h, UNIT)
        for tier in tl.static_range(NUM_TIERS):
            if _fits_tier(tl.maximum(q_count, k_count), MIN_TILE, LONGER_THAN, tier):
                _backpropagate_sequence(
                    q_start, k_start, v_start, do_start, dq_start, dk_start, dv_start, q_count, k_count,
                    factor, scale, q_stride_l, k_stride_l, v_stride_l, do_stride_l, dq_stride_l, dk_stride_l,
                    dv_stride_l, seed_ptr, dropped, keep_scale,
                    UNIT, D, BD, min(MIN_TILE << tier, BQ), min(MIN_TILE << tier, BK), CAUSAL,
                )  # fmt: skip


# --- host ---------------------------------------------------------------------------------------------------


class ShortSequenceLayout(NamedTuple):
    """The boundaries of the sequences (S + 1,) on the device, and the values that are known on the host."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool


class ShortKernelDropout(NamedTuple):
    """What determines which weights are dropped."""

    seed: Tensor  # (1,) int64 on the device
    num_dropped: int  # of every DROPOUT_RESOLUTION weights

    @classmethod
    def from_probability(cls, probability: float, device: torch.device) -> ShortKernelDropout | None:
        """Draw a seed from PyTorch's generator of the device. None if the probability rounds to 0."""
        # The remaining weights are divided by 1 - probability, which must be representable in float16.
        num_dropped = min(round(probability * DROPOUT_RESOLUTION), DROPOUT_RESOLUTION - 2)
        if not num_dropped:
            return None
        return cls(torch.randint(torch.iinfo(torch.int64).max, (1,), device=device), num_dropped)

    @property
    def keep_scale(self) -> float:
        """The factor on the remaining weights, which preserves the mean."""
        return DROPOUT_RESOLUTION / (DROPOUT_RESOLUTION - self.num_dropped)


def _get_stride_units(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the strides of positions and heads in units, and the unit."""
    strides = [stride for x in tensors for stride in x.stride()[:2]]
    unit = math.gcd(*strides, 8)
    return [stride // unit for stride in strides], unit


def _launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    layout: ShortSequenceLayout,
    blocks: ShortKernelBlockSizes,
    dropout: ShortKernelDropout | None,
    *scalars: float,
) -> None:
    """Launch one program per sequence and head, and one per head for positions without a sequence."""
    (_, H, D), num_sequences = tensors[0].shape, len(layout.cu_seqlens_q) - 1
    strides, unit = _get_stride_units(tensors)
    dropout_arguments = (None, 0, 1.0) if dropout is None else (*dropout, dropout.keep_scale)
    launch(
        kernel, (H * (num_sequences + 1),), *tensors, layout.cu_seqlens_q, layout.cu_seqlens_k,
        *dropout_arguments, num_sequences, *scalars, *strides,
        H=H, UNIT=unit, D=D, BD=pad_width(D), BQ=blocks.queries, BK=blocks.keys,
        MIN_TILE=max(blocks.queries, blocks.keys) >> (blocks.num_tiers - 1), NUM_TIERS=blocks.num_tiers,
        LONGER_THAN=blocks.longer_than, CAUSAL=layout.causal,
        **launch_options(blocks.num_warps, 1, blocks.max_registers),
    )  # fmt: skip


def compute_short_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: ShortSequenceLayout,
    scale: float,
    dropout: ShortKernelDropout | None = None,
    blocks: ShortKernelBlockSizes | None = None,
) -> Tensor:
    """Return the contiguous result (L, H, D) of q (L, H, D) and k, v (M, H, D) with contiguous D."""
    if blocks is None:
        blocks = choose_forward_blocks(layout.max_seqlen_q, layout.max_seqlen_k, q.shape[-1])
    out = q.new_empty(q.shape)
    _launch(_forward_kernel, (q, k, v, out), layout, blocks, dropout, len(q), scale * LOG2_E)
    return out


def compute_short_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    layout: ShortSequenceLayout,
    scale: float,
    dropout: ShortKernelDropout | None = None,
    blocks: Sequence[ShortKernelBlockSizes] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    dq, dk, dv = _allocate_gradients(q, k, v)
    tensors = q, k, v, d_out, dq, dk, dv
    scalars = len(q), len(k), scale * LOG2_E, scale
    blocks = blocks or choose_backward_blocks(layout.max_seqlen_q, layout.max_seqlen_k, q.shape[-1])
    for launch_blocks in blocks:
        _launch(_backward_kernel, tensors, layout, launch_blocks, dropout, *scalars)
    return dq, dk, dv


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients. Those of inputs that share memory share memory, in the same order.

    So if one product computed q, k and v, the gradient of that product needs no copy.
    """
    memory = [x.untyped_storage().data_ptr() for x in (q, k, v)]
    if memory[0] == memory[1] == memory[2] and q.shape == k.shape == v.shape:
        dq, dk, dv = q.new_empty(len(q), 3, *q.shape[1:]).unbind(1)
        return dq, dk, dv
    if memory[1] == memory[2] and k.shape == v.shape:
        dk, dv = k.new_empty(len(k), 2, *k.shape[1:]).unbind(1)
        return q.new_empty(q.shape), dk, dv
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _ShortAttention(torch.autograd.Function):
    # The layout changes in here, because outside of it each view would be a node of autograd.
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: ShortSequenceLayout,
        scale: float,
        dropout: ShortKernelDropout | None,
    ) -> Tensor:
        q, k, v = _to_kernel_layout(q), _to_kernel_layout(k), _to_kernel_layout(v)
        seed = None if dropout is None else dropout.seed
        ctx.save_for_backward(q, k, v, layout.cu_seqlens_q, layout.cu_seqlens_k, seed)
        ctx.layout, ctx.scale, ctx.dropout = layout, scale, dropout
        return _from_kernel_layout(compute_short_forward(q, k, v, layout, scale, dropout))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        q, k, v, cu_seqlens_q, cu_seqlens_k, seed = ctx.saved_tensors
        layout = ctx.layout._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        dropout = None if seed is None else ctx.dropout._replace(seed=seed)
        gradients = compute_short_backward(q, k, v, _to_kernel_layout(d_out), layout, ctx.scale, dropout)
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *[_from_kernel_layout(x) if needs else None for x, needs in needed], None, None, None


def _to_kernel_layout(x: Tensor) -> Tensor:
    """(1, H, L, D) to (L, H, D) with contiguous D."""
    return make_rows_contiguous(x.squeeze(0).transpose(0, 1))


def _from_kernel_layout(x: Tensor) -> Tensor:
    """(L, H, D) to (1, H, L, D)."""
    return x.transpose(0, 1).unsqueeze(0)


@disable_compile
def attend_short_sequences(
    q: Tensor, k: Tensor, v: Tensor, layout: ShortSequenceLayout, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return softmax(scale · q kᵀ) v within each of the packed sequences, (1, H, L, D).

    A query whose sequence has no keys, or that is in no sequence, gets zeros. Differentiable once.

    Args:
        q: (1, H, L, D) in bfloat16 or float16, with D at most 128.
        k: (1, H, M, D).
        v: (1, H, M, D).
        layout: the sequences, of at most 128 tokens, which start at 0.
        scale: the factor on the scores.
        dropout: the probability with which a weight is dropped, rounded to a multiple of 2⁻¹⁶. PyTorch's
            generator of the device determines which. The others are divided by 1 - dropout.
    """
    drawn_dropout = ShortKernelDropout.from_probability(dropout, q.device) if dropout else None
    return cast(Tensor, _ShortAttention.apply(q, k, v, layout, scale, drawn_dropout))
