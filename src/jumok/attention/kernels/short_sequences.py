"""Attention within packed sequences so short that one program holds a whole one, forward and backward.

    out = short_attention(q, k, v, packing, scale, dropout)      # all (L, H, D), sequences end to end

A program has one sequence and one head. All keys are in one tile, so the softmax of a query is worked out at
once: forward keeps nothing but its result, and backward makes the same weights again, with the same function.
Backward is one kernel too, and each gradient is written once: the same input gives the same bits.

**Tiles by length.** A kernel is compiled for the longest sequence, and most are shorter. So it has tiles of
several sizes, and each sequence takes the smallest that it fits into: half the side is a quarter of the work.
Backward's largest tile needs so many registers that few programs run side by side. So it is a launch of its
own, and a long sequence here and there does not slow down the others. A launch passes over the sequences that
are not its own, at the price of a look at their edges.

**Dropout.** Forward and backward work out for themselves which weights to drop, from one random number on the
device and from where a weight stands. So nothing is kept of that, and the blocks do not change it.

**Places without a sequence.** Behind the last sequence there may be more places. One more program a head
writes zeros there, so that no buffer has to be filled with them before.
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
from jumok.attention.kernels.additive import disable_compile, forbid_double_backward
from jumok.attention.kernels.lse import LOG2_E, make_rows_contiguous

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)

# These differ from call to call, and a kernel compiled for each kind of number would be no faster: all that
# there is to know of the strides, UNIT says.
UNSPECIALIZED_ARGUMENTS = ["sequences", "q_places", "k_places", "dropped"]
UNSPECIALIZED_ARGUMENTS += [
    f"{x}_{stride}" for x in ("q", "k", "v", "out", "do", "dq", "dk", "dv") for stride in "lh"
]

DROPOUT_RESOLUTION = 1 << 16  # a weight's chances are counted in these: it has 16 random bits
PHILOX_ROUNDS = tl.constexpr(
    7
)  # of Philox: the fewest that pass every test of randomness, as in FlashAttention


class ShortKernelBlockSizes(NamedTuple):
    """How a kernel cuts its work."""

    queries: int  # of a tile; forward walks over them where a sequence has more
    keys: int  # of a tile: as many as the longest sequence has, or more
    num_warps: int
    max_registers: int  # of a thread at most: the fewer, the more programs share a multiprocessor
    min_tile_side: int = 32  # the side of the smallest tile
    longer_than: int = 0  # longer sequences only: another launch has the others

    @property
    def num_tiers(self) -> int:
        """How many tiles there are to choose from, each of twice the side of the one before."""
        return max(1, max(self.queries, self.keys) // self.min_tile_side).bit_length()


def choose_forward_blocks(max_seqlen_q: int, max_seqlen_k: int, width: int) -> ShortKernelBlockSizes:
    """The blocks to take where no sequence is longer than this."""
    queries, keys = min(64, _tile_side(max_seqlen_q)), _tile_side(max_seqlen_k)
    largest = max(queries, keys)
    registers = 168 if width > 64 else 96 if largest == 64 else 128
    return ShortKernelBlockSizes(queries, keys, min(4, largest // 16), registers)


def choose_backward_blocks(
    max_seqlen_q: int, max_seqlen_k: int, width: int
) -> tuple[ShortKernelBlockSizes, ...]:
    """The blocks to take where no sequence is longer than this, of each launch."""
    queries, keys = _tile_side(max_seqlen_q), _tile_side(max_seqlen_k)
    largest = max(queries, keys)
    if largest <= 64:
        return (
            ShortKernelBlockSizes(
                queries, keys, largest // 16, 128 if largest == 64 and width <= 64 else 255
            ),
        )
    shorter = choose_backward_blocks(min(64, max_seqlen_q), min(64, max_seqlen_k), width)
    return *shorter, ShortKernelBlockSizes(
        queries, keys, largest // 16, 255, min_tile_side=largest, longer_than=64
    )


def fits_shared_memory(device: torch.device, max_seqlen_q: int, max_seqlen_k: int, width: int) -> bool:
    """Whether a program's shared memory takes what backward has there: q, k, v, dO, and the weights."""
    queries, keys = _tile_side(max_seqlen_q), _tile_side(max_seqlen_k)
    return 2 * (2 * (queries + keys) * _padded_width(width) + queries * keys) <= get_max_shared_memory(device)


def _padded_width(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _tile_side(max_seqlen: int) -> int:
    return max(16, 1 << max(0, max_seqlen - 1).bit_length())


# --- kernels ------------------------------------------------------------------------------------------------
#
# Strides come in units of UNIT elements: the compiler then knows what they are multiples of, and reads 16
# bytes at a time where it can. Left alone, it looks for multiples of 16 only, and 72 is none.


@triton.jit
def _matmul(a, b):
    if not ON_GPU:  # the interpreter takes bfloat16 for whole numbers here
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _load_rows(ptr, row, count, units, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Rows of a sequence, [rows, BD], zeros beyond its `count` rows and its D columns."""
    d = tl.arange(0, BD)
    at = ptr + row[:, None] * (units * UNIT) + d[None, :]
    return tl.load(at, mask=(row < count)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_rows(ptr, x, row, count, units, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    at = ptr + row[:, None] * (units * UNIT) + d[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(row < count)[:, None] & (d < D)[None, :])


@triton.jit
def _get_sequence_pointer(ptr, first, head, units_l, units_h, UNIT: tl.constexpr):
    """Where a sequence begins, of one head."""
    return ptr + (first * units_l + head * units_h) * UNIT


@triton.jit
def _fill_zeros(
    ptr, first, places, head, units_l, units_h, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """Zeros in all places from `first` on."""
    ROWS: tl.constexpr = 16
    ptr = _get_sequence_pointer(ptr, first, head, units_l, units_h, UNIT)
    for begin in range(0, (places - first).to(tl.int32), ROWS):
        row = begin + tl.arange(0, ROWS)
        at = ptr + row.to(tl.int64)[:, None] * (units_l * UNIT) + tl.arange(0, BD)[None, :]
        inside = (row < places - first)[:, None] & (tl.arange(0, BD) < D)[None, :]
        tl.store(at, tl.zeros((ROWS, BD), ptr.dtype.element_ty), mask=inside)


@triton.jit
def _compute_exponentials(q, k, query, key, k_count, factor, CAUSAL: tl.constexpr):
    """The weights before they are divided by their sums, [queries, keys], and by what to multiply each row.

    A row with nothing allowed has zeros. Forward and backward both take the weights from here.
    """
    keep = (key < k_count)[None, :]
    if CAUSAL:
        keep = keep & (key[None, :] <= query[:, None])
    s = tl.where(keep, _matmul(q, tl.trans(k)) * factor, -float("inf"))
    peak = tl.max(s, axis=1)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    e = tl.exp2(s - peak[:, None])
    total = tl.sum(e, axis=1)
    return e, 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _philox(seed, counter, stream):
    """Four random numbers of 32 bits, which the seed, a counter and another number decide: Philox4x32.

    As `tl.philox`, but with products of 64 bits, each one instruction where that one takes two.
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
    """Which weights dropout keeps, [queries, keys]: by the seed, the program, the query and the key.

    A call of Philox is for eight keys, 16 bits each. These are keys that one thread has of a row, as tensor
    cores leave a product: two neighbours, and those 8, 16 and 24 further on. So no bit has to change threads,
    and the compiler finds that of a thread's calls every eighth differs.
    """
    key = tl.broadcast_to(key[None, :], (query.shape[0], key.shape[0]))
    group = query[:, None] * 32 + key // 32 * 4 + key % 8 // 2
    a, b, c, d = _philox(tl.load(seed_ptr), group, tl.program_id(0))
    part = key // 8 % 4
    bits = tl.where(part < 2, tl.where(part == 0, a, b), tl.where(part == 2, c, d))
    return tl.where(key % 2 == 0, bits << 16, bits) >= dropped.to(tl.uint32) << 16  # of the upper 16 bits


@triton.jit
def _zero_dropped(p, seed_ptr):
    """The weights without those that dropout took, which are below zero."""
    if seed_ptr is not None:
        p = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return p


@triton.jit
def _fits_tier(longer, LEAST: tl.constexpr, ABOVE: tl.constexpr, tier: tl.constexpr):
    """Does a sequence take the tile of side LEAST · 2^tier? `longer` is the length of its longer side."""
    return (longer > (ABOVE if tier == 0 else LEAST << (tier - 1))) & (longer <= (LEAST << tier))


@triton.jit
def _attend_sequence(
    q_ptr, k_ptr, v_ptr, out_ptr, q_count, k_count, factor, q_units, k_units, v_units, out_units,
    seed_ptr, dropped, boost,
    UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Forward of one sequence and head."""
    key = tl.arange(0, BK)
    k = _load_rows(k_ptr, key, k_count, k_units, UNIT, D, BD)
    v = _load_rows(v_ptr, key, k_count, v_units, UNIT, D, BD)
    for begin in range(0, q_count, BQ):
        query = begin + tl.arange(0, BQ)
        q = _load_rows(q_ptr, query, q_count, q_units, UNIT, D, BD)
        e, share = _compute_exponentials(q, k, query, key, k_count, factor, CAUSAL)
        if seed_ptr is not None:
            e = tl.where(_compute_dropout_mask(seed_ptr, dropped, query, key), e, 0.0)
            share *= boost
        out = _matmul(e.to(v.dtype), v) * share[:, None]
        _store_rows(out_ptr, out, query, q_count, out_units, UNIT, D, BD)


@triton.jit
def _backpropagate_sequence(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, q_count, k_count, factor, scale,
    q_units, k_units, v_units, do_units, dq_units, dk_units, dv_units,
    seed_ptr, dropped, boost,
    UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Backward of one sequence and head. The tile has all queries.

    Each gradient is stored as soon as it is known, so that its registers are free for the next. A weight that
    dropout took is written as its negative: so which ones it took needs no registers beside the weights.
    """
    key = tl.arange(0, BK)
    query = tl.arange(0, BQ)
    q = _load_rows(q_ptr, query, q_count, q_units, UNIT, D, BD)
    k = _load_rows(k_ptr, key, k_count, k_units, UNIT, D, BD)
    do = _load_rows(do_ptr, query, q_count, do_units, UNIT, D, BD)
    v = _load_rows(v_ptr, key, k_count, v_units, UNIT, D, BD)
    e, share = _compute_exponentials(q, k, query, key, k_count, factor, CAUSAL)
    if seed_ptr is not None:
        e = tl.where(_compute_dropout_mask(seed_ptr, dropped, query, key), e, -e)
        share *= boost
    p = e * share[:, None]
    dv = _matmul(tl.trans(_zero_dropped(p, seed_ptr).to(v.dtype)), do)
    _store_rows(dv_ptr, dv, key, k_count, dv_units, UNIT, D, BD)
    dp = _matmul(do, tl.trans(v))
    if seed_ptr is None:
        ds = (p * (dp - tl.sum(p * dp, axis=1)[:, None])).to(v.dtype)
    else:
        dp *= _zero_dropped(p, seed_ptr)
        ds = (dp - tl.abs(p) * (tl.sum(dp, axis=1) / boost)[:, None]).to(v.dtype)
    dk = _matmul(tl.trans(ds), q) * scale
    _store_rows(dk_ptr, dk, key, k_count, dk_units, UNIT, D, BD)
    dq = _matmul(ds, k) * scale
    _store_rows(dq_ptr, dq, query, q_count, dq_units, UNIT, D, BD)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_edges_ptr, k_edges_ptr, seed_ptr, dropped, boost,
    sequences, q_places, factor,
    q_l, q_h, k_l, k_h, v_l, v_h, out_l, out_h,
    H: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, LEAST: tl.constexpr, TIERS: tl.constexpr, ABOVE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs have the heads of one sequence, which lie side by side in memory.
    head = tl.program_id(0) % H
    sequence = tl.program_id(0) // H
    q_first = tl.load(q_edges_ptr + sequence).to(tl.int64)
    out_start = _get_sequence_pointer(out_ptr, q_first, head, out_l, out_h, UNIT)
    if sequence == sequences:
        _fill_zeros(out_ptr, q_first, q_places, head, out_l, out_h, UNIT, D, BD)
    else:
        k_first = tl.load(k_edges_ptr + sequence).to(tl.int64)
        q_count = (tl.load(q_edges_ptr + sequence + 1) - q_first).to(tl.int32)
        k_count = (tl.load(k_edges_ptr + sequence + 1) - k_first).to(tl.int32)
        q_start = _get_sequence_pointer(q_ptr, q_first, head, q_l, q_h, UNIT)
        k_start = _get_sequence_pointer(k_ptr, k_first, head, k_l, k_h, UNIT)
        v_start = _get_sequence_pointer(v_ptr, k_first, head, v_l, v_h, UNIT)
        longer = tl.minimum(tl.maximum(q_count, k_count), LEAST << (TIERS - 1))  # it walks over more queries
        for tier in tl.static_range(TIERS):
            if _fits_tier(longer, LEAST, ABOVE, tier):
                _attend_sequence(q_start, k_start, v_start, out_start, q_count, k_count, factor, q_l, k_l, v_l, out_l,
                     seed_ptr, dropped, boost,
                     UNIT, D, BD, min(LEAST << tier, BQ), min(LEAST << tier, BK), CAUSAL)  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, q_edges_ptr, k_edges_ptr,
    seed_ptr, dropped, boost, sequences, q_places, k_places, factor, scale,
    q_l, q_h, k_l, k_h, v_l, v_h, do_l, do_h, dq_l, dq_h, dk_l, dk_h, dv_l, dv_h,
    H: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, LEAST: tl.constexpr, TIERS: tl.constexpr, ABOVE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    sequence = tl.program_id(0) // H
    q_first = tl.load(q_edges_ptr + sequence).to(tl.int64)
    k_first = tl.load(k_edges_ptr + sequence).to(tl.int64)
    if sequence == sequences:
        if ABOVE == 0:
            _fill_zeros(dq_ptr, q_first, q_places, head, dq_l, dq_h, UNIT, D, BD)
            _fill_zeros(dk_ptr, k_first, k_places, head, dk_l, dk_h, UNIT, D, BD)
            _fill_zeros(dv_ptr, k_first, k_places, head, dv_l, dv_h, UNIT, D, BD)
    else:
        q_count = (tl.load(q_edges_ptr + sequence + 1) - q_first).to(tl.int32)
        k_count = (tl.load(k_edges_ptr + sequence + 1) - k_first).to(tl.int32)
        q_start = _get_sequence_pointer(q_ptr, q_first, head, q_l, q_h, UNIT)
        k_start = _get_sequence_pointer(k_ptr, k_first, head, k_l, k_h, UNIT)
        v_start = _get_sequence_pointer(v_ptr, k_first, head, v_l, v_h, UNIT)
        do_start = _get_sequence_pointer(do_ptr, q_first, head, do_l, do_h, UNIT)
        dq_start = _get_sequence_pointer(dq_ptr, q_first, head, dq_l, dq_h, UNIT)
        dk_start = _get_sequence_pointer(dk_ptr, k_first, head, dk_l, dk_h, UNIT)
        dv_start = _get_sequence_pointer(dv_ptr, k_first, head, dv_l, dv_h, UNIT)
        for tier in tl.static_range(TIERS):
            if _fits_tier(tl.maximum(q_count, k_count), LEAST, ABOVE, tier):
                _backpropagate_sequence(q_start, k_start, v_start, do_start, dq_start, dk_start, dv_start, q_count, k_count,
                       factor, scale, q_l, k_l, v_l, do_l, dq_l, dk_l, dv_l,
                       seed_ptr, dropped, boost,
                       UNIT, D, BD, min(LEAST << tier, BQ), min(LEAST << tier, BK), CAUSAL)  # fmt: skip


# --- host ---------------------------------------------------------------------------------------------------


class ShortSequenceLayout(NamedTuple):
    """What lies where: the edges of the sequences (S + 1,) on the device, and what the host knows."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool


class ShortKernelDropout(NamedTuple):
    """What decides which weights are dropped."""

    seed: Tensor  # (1,) int64 on the device
    num_dropped: int  # of every CHANCES weights

    @classmethod
    def from_probability(cls, probability: float, device: torch.device) -> ShortKernelDropout | None:
        """With a seed from PyTorch's generator of the device. A share that rounds to nothing is none."""
        # What stays is divided by its share, which must remain a number in float16.
        dropped = min(round(probability * DROPOUT_RESOLUTION), DROPOUT_RESOLUTION - 2)
        if not dropped:
            return None
        return cls(torch.randint(torch.iinfo(torch.int64).max, (1,), device=device), dropped)

    @property
    def keep_scale(self) -> float:
        """By what the others are multiplied, so that the mean stays."""
        return DROPOUT_RESOLUTION / (DROPOUT_RESOLUTION - self.num_dropped)


def launch_options(blocks: ShortKernelBlockSizes) -> dict[str, Any]:
    """How a kernel is compiled: a product and a sum are one instruction, on which its speed rests."""
    limit = {} if triton.knobs.runtime.interpret else {"maxnreg": blocks.max_registers}
    return {"num_warps": blocks.num_warps, "num_stages": 1, "enable_fp_fusion": True, **limit}


def _get_stride_units(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """The strides of places and heads, in units, and the unit."""
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
    """One program for each sequence and head, and one for each head to fill up the rest."""
    (_, H, D), sequences = tensors[0].shape, len(layout.cu_seqlens_q) - 1
    strides, unit = _get_stride_units(tensors)
    dropping = (None, 0, 1.0) if dropout is None else (*dropout, dropout.keep_scale)
    with torch.cuda.device_of(tensors[0]):
        kernel[(H * (sequences + 1),)](
            *tensors, layout.cu_seqlens_q, layout.cu_seqlens_k, *dropping, sequences, *scalars, *strides,
            H=H, UNIT=unit, D=D, BD=_padded_width(D), BQ=blocks.queries, BK=blocks.keys,
            LEAST=max(blocks.queries, blocks.keys) >> (blocks.num_tiers - 1), TIERS=blocks.num_tiers,
            ABOVE=blocks.longer_than, CAUSAL=layout.causal, **launch_options(blocks),
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
    """The result (L, H, D), dense, of q (L, H, D) and k, v (M, H, D) with consecutive D and any strides."""
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
    """The gradients of q, k and v."""
    dq, dk, dv = _allocate_gradients(q, k, v)
    tensors = q, k, v, d_out, dq, dk, dv
    numbers = len(q), len(k), scale * LOG2_E, scale
    for each in blocks or choose_backward_blocks(layout.max_seqlen_q, layout.max_seqlen_k, q.shape[-1]):
        _launch(_backward_kernel, tensors, layout, each, dropout, *numbers)
    return dq, dk, dv


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients: what shares its memory there shares it here, in the same order.

    So whoever made q, k and v by one product finds the gradient of that product already put together.
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
        q, k, v = make_rows_contiguous(q), make_rows_contiguous(k), make_rows_contiguous(v)
        seed = None if dropout is None else dropout.seed
        ctx.save_for_backward(q, k, v, layout.cu_seqlens_q, layout.cu_seqlens_k, seed)
        ctx.layout, ctx.scale, ctx.dropout = layout, scale, dropout
        return compute_short_forward(q, k, v, layout, scale, dropout)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        q, k, v, cu_seqlens_q, cu_seqlens_k, seed = ctx.saved_tensors
        layout = ctx.layout._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        dropout = None if seed is None else ctx.dropout._replace(seed=seed)
        gradients = compute_short_backward(q, k, v, make_rows_contiguous(d_out), layout, ctx.scale, dropout)
        asked = (x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False))
        return *asked, None, None, None


@disable_compile
def attend_short_sequences(
    q: Tensor, k: Tensor, v: Tensor, layout: ShortSequenceLayout, scale: float, dropout: float = 0.0
) -> Tensor:
    """softmax(scale · q kᵀ) v within each of the packed sequences, (L, H, D).

    q (L, H, D), k and v (M, H, D) in bfloat16 or float16; D at most 128, and no sequence is longer. The edges
    begin at 0. A query whose sequence has no keys, or that is in none, gets zeros. Differentiable once.

    `dropout` is the share of the weights to drop, rounded to a multiple of 2⁻¹⁶: which ones, a number from
    PyTorch's generator of the device decides. The others are divided by what stays on average.
    """
    drawn = ShortKernelDropout.from_probability(dropout, q.device) if dropout else None
    return cast(Tensor, _ShortAttention.apply(q, k, v, layout, scale, drawn))
