"""Additive attention of one query a row, at each step of a decoding loop, forward and backward.

    loop = Shared(weight, prepared_keys, v, value)      # once a sentence
    for t in range(T):
        context, weights = loop.step(query)             # query (B, Dq) → context (B, Dv), weights (B, K)

A step is one product with `weight` and one kernel; so is its backward. The programs of a kernel are B rows by
a few splits of the keys; the last program of a row to finish puts the row's parts together, so that no second
launch is needed. What all steps share (weight, keys, v, value) gets its gradients once, after the backward of
the last step, from what the steps wrote into a ledger: one large product instead of T small ones that each
read and write the whole gradient.

Each kernel walks over the keys of its split twice: once to sum along the width (scores; or dw), once to sum
along the keys (context; or dq). What goes from the first walk to the second passes through global memory; a
barrier makes it visible within the program.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from .additive import dense_rows, peaks_of, refuse_second_derivatives, scores_gradient, tanh, untraced


class Blocks(NamedTuple):
    """Tiles are [keys, width], as wide as there is something to read, up to the widths given here."""

    reduce_width: int = 512  # of the first walk, which sums along the width
    reduce_tile: int = 4096  # elements
    mix_width: int = 2048  # of the second walk, which sums along the keys
    mix_tile: int = 8192
    warps: int = 8
    programs: int = 264  # rows are split until there are about this many: twice the processors of an H200
    splits: int = 64  # but never into more, for the last program reads them all


BLOCKS = Blocks()


# --- kernels ------------------------------------------------------------------------------------------------
#
# H, D and strides come in units of UNIT elements: the compiler then knows what they are multiples of, and
# reads 16 bytes at a time where it can. Left alone, it looks for multiples of 16 only, and H = 1000 is none.


@triton.jit
def _in_every_row(ptr, d, size, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A vector, repeated in every row of a tile.

    Each thread loads what it needs itself: handing the vector from thread to thread would cost two barriers.
    """
    pointers = tl.broadcast_to((ptr + d)[None, :], (ROWS, WIDTH))
    inside = tl.broadcast_to((d < size)[None, :], (ROWS, WIDTH))
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _is_last(counter_ptr, b, SPLITS: tl.constexpr):
    """Is this the last of the row's programs to get here? It then sees what the others wrote.

    The counter is left as it was found, for the next launch.
    """
    tl.debug_barrier()  # all threads of this program have written
    last = tl.atomic_add(counter_ptr + b, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        tl.store(counter_ptr + b, 0)
    return last


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, value_ptr, allowed_ptr, weights_ptr, context_ptr, precise_ptr,
    parts_ptr, sums_ptr, counter_ptr,
    K, share, h_units, d_units, k_units_b, k_units_r, value_units_b, value_units_r,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, EXACT: tl.constexpr,
    MASKED: tl.constexpr, PRECISE: tl.constexpr,
    RK: tl.constexpr, RW: tl.constexpr, MK: tl.constexpr, MW: tl.constexpr, CW: tl.constexpr,
):  # fmt: skip
    """softmax(Σ v · tanh(q + k)) and its mix of the values, in tiles [RK, RW] and [MK, MW].

    The context is written once more, in float32, for the backward (PRECISE): rounded, it would push the
    gradients of all scores of a row to the same side.
    parts (B, SPLITS, D) and sums (B, SPLITS, 2: largest score, Σ exp) float32 are scratch.
    """
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    first = split * share
    last = tl.minimum(first + share, K)
    H = h_units * UNIT
    D = d_units * UNIT
    k_at = k_ptr + b * k_units_b * UNIT
    value_at = value_ptr + b * value_units_b * UNIT
    weights_at = weights_ptr + b * K

    # Scores, kept in the place of the weights.
    peak = -float("inf")
    for k0 in range(first, last, RK):
        row = k0 + tl.arange(0, RK)
        there = row < last
        if MASKED:
            there = tl.load(allowed_ptr + b * K + row, mask=there, other=0) != 0
        k_rows = k_at + (row.to(tl.int64) * k_units_r * UNIT)[:, None]
        sums = tl.zeros((RK, RW), tl.float32)
        for w in range(0, H, RW):
            d = w + tl.arange(0, RW)
            k = tl.load(k_rows + d[None, :], mask=there[:, None] & (d < H)[None, :], other=0.0).to(tl.float32)
            q = _in_every_row(q_ptr + b * H, d, H, RK, RW)
            v = _in_every_row(v_ptr, d, H, RK, RW)
            sums += v * tanh(q + k, EXACT)
        score = tl.where(there, tl.sum(sums, axis=1), -float("inf"))
        tl.store(weights_at + row, score, mask=row < last)
        peak = tl.maximum(peak, tl.max(score, axis=0))
    peak = tl.where(peak == -float("inf"), 0.0, peak)  # nothing allowed: exp gives zeros, not NaN
    tl.debug_barrier()

    total = 0.0
    for k0 in range(first, last, RK):
        row = k0 + tl.arange(0, RK)
        score = tl.load(weights_at + row, mask=row < last, other=-float("inf"))
        total += tl.sum(tl.exp(score - peak), axis=0)
    scale = 1.0
    if SPLITS == 1:
        scale = 1.0 / tl.where(total == 0.0, 1.0, total)

    # The mix of this split's values.
    for w in range(0, D, MW):
        d = w + tl.arange(0, MW)
        mixed = tl.zeros((MK, MW), tl.float32)
        for k0 in range(first, last, MK):
            row = k0 + tl.arange(0, MK)
            score = tl.load(weights_at + row, mask=row < last, other=-float("inf"))
            inside = (score != -float("inf"))[:, None] & (d < D)[None, :]
            value_rows = value_at + (row.to(tl.int64) * value_units_r * UNIT)[:, None]
            value = tl.load(value_rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
            mixed += tl.exp(score - peak)[:, None] * value
        mix = tl.sum(mixed, axis=0) * scale
        if SPLITS == 1:
            tl.store(context_ptr + b * D + d, mix, mask=d < D)
            if PRECISE:
                tl.store(precise_ptr + b * D + d, mix, mask=d < D)
        else:
            tl.store(parts_ptr + (b * SPLITS + split) * D + d, mix, mask=d < D)

    if SPLITS == 1:
        for k0 in range(0, K, RW):
            row = k0 + tl.arange(0, RW)
            score = tl.load(weights_at + row, mask=row < K, other=-float("inf"))
            tl.debug_barrier()  # nobody reads the scores any more
            tl.store(weights_at + row, tl.exp(score - peak) * scale, mask=row < K)
    else:
        tl.store(sums_ptr + (b * SPLITS + split) * 2, peak)
        tl.store(sums_ptr + (b * SPLITS + split) * 2 + 1, total)
        if _is_last(counter_ptr, b, SPLITS):
            lane = tl.arange(0, LANES)
            sums_at = sums_ptr + (b * SPLITS + lane) * 2
            peaks = tl.load(sums_at, mask=lane < SPLITS, other=0.0, cache_modifier=".cg")
            totals = tl.load(sums_at + 1, mask=lane < SPLITS, other=0.0, cache_modifier=".cg")
            peaks = tl.where(totals == 0.0, -float("inf"), peaks)  # nothing allowed there
            row_peak = tl.max(peaks, axis=0)
            row_peak = tl.where(row_peak == -float("inf"), 0.0, row_peak)
            factors = tl.exp(peaks - row_peak)
            row_total = tl.sum(totals * factors, axis=0)
            row_scale = 1.0 / tl.where(row_total == 0.0, 1.0, row_total)
            factors *= row_scale
            for w in range(0, D, CW):
                d = w + tl.arange(0, CW)
                parts_at = parts_ptr + (b * SPLITS + lane)[:, None] * D + d[None, :]
                inside = (lane < SPLITS)[:, None] & (d < D)[None, :]
                parts = tl.load(parts_at, mask=inside, other=0.0, cache_modifier=".cg")
                mix = tl.sum(parts * factors[:, None], axis=0)
                tl.store(context_ptr + b * D + d, mix, mask=d < D)
                if PRECISE:
                    tl.store(precise_ptr + b * D + d, mix, mask=d < D)
            for k0 in range(0, K, RW):
                row = k0 + tl.arange(0, RW)
                score = tl.load(weights_at + row, mask=row < K, other=-float("inf"), cache_modifier=".cg")
                tl.store(weights_at + row, tl.exp(score - row_peak) * row_scale, mask=row < K)


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, value_ptr, weights_ptr, context_ptr, d_context_ptr, d_weights_ptr, ds_ptr, dq_ptr,
    parts_ptr, counter_ptr, K, share, h_units, d_units, k_units_b, k_units_r, value_units_b, value_units_r,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, EXACT: tl.constexpr,
    WITH_D_WEIGHTS: tl.constexpr,
    RK: tl.constexpr, RW: tl.constexpr, MK: tl.constexpr, MW: tl.constexpr, CW: tl.constexpr,
):  # fmt: skip
    """ds = w · (dw - Σ w · dw) with dw = dc · value, and dq = v · Σ_k ds · (1 - tanh²(q + k)).

    Σ w · dw needs no walk over all keys: it is dc · context. parts (B, SPLITS, H) float32 is scratch.
    """
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    first = split * share
    last = tl.minimum(first + share, K)
    H = h_units * UNIT
    D = d_units * UNIT
    k_at = k_ptr + b * k_units_b * UNIT
    value_at = value_ptr + b * value_units_b * UNIT

    product = tl.zeros((RW,), tl.float32)
    for w in range(0, D, RW):
        d = w + tl.arange(0, RW)
        dc = tl.load(d_context_ptr + b * D + d, mask=d < D, other=0.0).to(tl.float32)
        product += dc * tl.load(context_ptr + b * D + d, mask=d < D, other=0.0).to(tl.float32)
    if WITH_D_WEIGHTS:
        for k0 in range(0, K, RW):
            row = k0 + tl.arange(0, RW)
            weight = tl.load(weights_ptr + b * K + row, mask=row < K, other=0.0)
            product += weight * tl.load(d_weights_ptr + b * K + row, mask=row < K, other=0.0)
    mean = tl.sum(product, axis=0)

    # The gradient of the scores.
    for k0 in range(first, last, RK):
        row = k0 + tl.arange(0, RK)
        weight = tl.load(weights_ptr + b * K + row, mask=row < last, other=0.0)
        there = weight != 0.0  # what was not allowed has no weight
        value_rows = value_at + (row.to(tl.int64) * value_units_r * UNIT)[:, None]
        sums = tl.zeros((RK, RW), tl.float32)
        for w in range(0, D, RW):
            d = w + tl.arange(0, RW)
            inside = there[:, None] & (d < D)[None, :]
            value = tl.load(value_rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
            sums += _in_every_row(d_context_ptr + b * D, d, D, RK, RW) * value
        dw = tl.sum(sums, axis=1)
        if WITH_D_WEIGHTS:
            dw += tl.load(d_weights_ptr + b * K + row, mask=row < last, other=0.0)
        tl.store(ds_ptr + b * K + row, tl.where(there, weight * (dw - mean), 0.0), mask=row < last)
    tl.debug_barrier()

    # The gradient of the query, from this split's keys.
    for w in range(0, H, MW):
        d = w + tl.arange(0, MW)
        q = tl.load(q_ptr + b * H + d, mask=d < H, other=0.0).to(tl.float32)[None, :]
        slopes = tl.zeros((MK, MW), tl.float32)
        for k0 in range(first, last, MK):
            row = k0 + tl.arange(0, MK)
            ds = tl.load(ds_ptr + b * K + row, mask=row < last, other=0.0)
            k_rows = k_at + (row.to(tl.int64) * k_units_r * UNIT)[:, None]
            inside = (ds != 0.0)[:, None] & (d < H)[None, :]
            t = tanh(q + tl.load(k_rows + d[None, :], mask=inside, other=0.0).to(tl.float32), EXACT)
            slopes += ds[:, None] * (1.0 - t * t)
        dq = tl.sum(slopes, axis=0) * tl.load(v_ptr + d, mask=d < H, other=0.0).to(tl.float32)
        if SPLITS == 1:
            tl.store(dq_ptr + b * H + d, dq, mask=d < H)
        else:
            tl.store(parts_ptr + (b * SPLITS + split) * H + d, dq, mask=d < H)

    if SPLITS > 1:  # noqa: SIM102 (known when compiling: without splits the rest must not be there)
        if _is_last(counter_ptr, b, SPLITS):
            lane = tl.arange(0, LANES)
            for w in range(0, H, CW):
                d = w + tl.arange(0, CW)
                parts_at = parts_ptr + (b * SPLITS + lane)[:, None] * H + d[None, :]
                inside = (lane < SPLITS)[:, None] & (d < H)[None, :]
                parts = tl.load(parts_at, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(dq_ptr + b * H + d, tl.sum(parts, axis=0), mask=d < H)


# --- gradients of what the steps share ----------------------------------------------------------------------


class _Entry(NamedTuple):
    """What the backward of one step leaves for the gradients of what the steps share. Without any graph."""

    query: Tensor  # (B, Dq)
    q: Tensor  # (B, H) projected
    weights: Tensor  # (B, K)
    ds: Tensor  # (B, K)
    dq: Tensor  # (B, H)
    d_context: Tensor  # (B, Dv)


class _Ledger:
    """The entries of one backward pass.

    A pass that asked for other gradients only may have left some: they carry its number, and are dropped.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._task = -1

    def add(self, entry: _Entry) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._entries, self._task = [], task
        self._entries.append(entry)

    def take(self) -> list[_Entry]:
        entries, self._entries = self._entries, []
        return entries if self._task == torch._C._current_graph_task_id() else []


class _Deferred(torch.autograd.Function):
    """(weight, keys, v, value) → token. Every step takes the token: autograd comes here after all of them."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, keys: Tensor, v: Tensor, value: Tensor, ledger: _Ledger) -> Tensor:
        ctx.set_materialize_grads(False)  # the steps send no gradient through the token
        ctx.save_for_backward(weight, keys, v, value)
        ctx.ledger = ledger
        return keys.new_empty(1, dtype=torch.float32)  # nobody looks at what it holds

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        entries = ctx.ledger.take()
        if not entries:
            return (None,) * 5
        weight, keys, v, value = ctx.saved_tensors
        for_weight, for_keys, for_v, for_value, _ = ctx.needs_input_grad
        steps = _Entry(*(torch.stack(same, dim=1) for same in zip(*entries, strict=True)))  # (B, T, …)
        d_weight = d_keys = dv = d_value = None
        if for_weight:
            dq, query = steps.dq.flatten(0, 1), steps.query.flatten(0, 1)
            d_weight = (dq.t() @ query.to(dq.dtype)).to(weight.dtype)
        if for_keys or for_v:
            # A key that never had weight has no gradient, whatever it holds.
            used = (steps.weights != 0).any(dim=1)
            seen = torch.where(used[:, :, None], dense_rows(keys), 0)
            peaks = peaks_of(steps.q, seen)
            d_keys, dv = scores_gradient(seen, steps.q, v.contiguous(), steps.ds, peaks, with_dv=for_v)
        if for_value:
            weights = steps.weights.to(steps.d_context.dtype)
            d_value = torch.bmm(weights.transpose(1, 2), steps.d_context).to(value.dtype)
        return d_weight, d_keys if for_keys else None, None if dv is None else dv.to(v.dtype), d_value, None


# --- a step -------------------------------------------------------------------------------------------------


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, token: Tensor | None, shared: Shared, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q = torch.nn.functional.linear(query, shared.weight)
        context, precise, weights = shared.launch_forward(q, allowed, precisely=any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, q, weights, precise, shared.weight, shared.keys, shared.v, shared.value)
        ctx.shared = shared
        return context, weights

    @staticmethod
    def backward(
        ctx: Any, d_context: Tensor | None, d_weights: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        refuse_second_derivatives()
        # All are unpacked, so that autograd complains if one was changed in place.
        query, q, weights, context, weight, _keys, _v, value = ctx.saved_tensors
        if d_context is None and d_weights is None:
            return None, None, None, None
        if d_context is None:
            d_context = torch.zeros_like(context, dtype=value.dtype)
        d_context = d_context.contiguous()
        d_weights = None if d_weights is None else d_weights.contiguous()
        ds, dq = ctx.shared.launch_backward(q, weights, context, d_context, d_weights)
        if ctx.needs_input_grad[1] and weights.numel():
            ctx.shared.ledger.add(_Entry(query.detach(), q, weights.detach(), ds, dq, d_context))
        d_query = (dq.to(weight.dtype) @ weight).to(query.dtype) if ctx.needs_input_grad[0] else None
        return d_query, None, None, None


def _tiles(blocks: Blocks, share: int, reduced: int, mixed: int) -> dict[str, int]:
    """Tiles [RK, RW] and [MK, MW] of the two walks over `share` keys, of widths `reduced` and `mixed`."""
    keys = triton.next_power_of_2(share)
    rw = min(blocks.reduce_width, triton.next_power_of_2(max(reduced, 1)))
    mw = min(blocks.mix_width, triton.next_power_of_2(max(mixed, 1)))
    rk, mk = min(keys, blocks.reduce_tile // rw), min(keys, blocks.mix_tile // mw)
    return {"RK": rk, "RW": rw, "MK": mk, "MW": mw}


class Shared:
    """Everything that a loop over decoding steps shares.

    weight (H, Dq) projects the queries; keys (B, K, H) are prepared (projected already); v (H); value
    (B, K, Dv). All on one GPU, in bfloat16, float16 or float32. Differentiable once in all of them. Can be
    captured in a CUDA graph. The steps of one `Shared` must run on one stream: they share scratch memory.
    """

    def __init__(
        self, weight: Tensor, keys: Tensor, v: Tensor, value: Tensor, blocks: Blocks = BLOCKS
    ) -> None:
        self.ledger = _Ledger()
        self.token: Tensor | None = None
        if torch.is_grad_enabled() and any(x.requires_grad for x in (weight, keys, v, value)):
            self.token = cast(Tensor, _Deferred.apply(weight, keys, v, value, self.ledger))
        self.weight, self.v = weight.detach(), v.detach().contiguous()
        self.keys, self.value = dense_rows(keys.detach()), dense_rows(value.detach())

        B, K, H = keys.shape
        D = value.shape[-1]
        splits = min(triton.cdiv(blocks.programs, max(B, 1)), blocks.splits, triton.cdiv(K, 8))
        share = max(1, triton.cdiv(K, max(splits, 1)))
        self.splits = triton.cdiv(K, share)
        strides = (*self.keys.stride()[:2], *self.value.stride()[:2])
        unit = math.gcd(H, D, *strides, 8)
        self.sizes = (K, share, *(size // unit for size in (H, D, *strides)))
        lanes = triton.next_power_of_2(max(self.splits, 1))
        constants = {
            "UNIT": unit,
            "SPLITS": self.splits,
            "LANES": lanes,
            "EXACT": keys.dtype == torch.float32,
        }
        constants |= {"CW": max(blocks.mix_tile // lanes // 4, 32), "num_warps": blocks.warps}
        self.forward_constants = constants | _tiles(blocks, share, H, D)
        self.backward_constants = constants | _tiles(blocks, share, D, H)
        # Only the last program of a row reads the scratch, before the next launch writes it.
        parts = self.splits if self.splits > 1 else 0
        self.parts = keys.new_empty(B * parts * max(H, D), dtype=torch.float32)
        self.sums = keys.new_empty(B * parts * 2, dtype=torch.float32)
        self.counter = keys.new_zeros(B if parts else 0, dtype=torch.int32)

    @untraced
    def step(self, query: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """context (B, Dv) and weights (B, K) float32 of query (B, Dq), both differentiable.

        allowed (B, K) bool, True = may attend. What is not allowed never reaches the result, NaN included;
        a row with nothing allowed gives zero weights, a zero context and zero gradients.
        """
        with torch.cuda.device_of(query):
            return cast(tuple[Tensor, Tensor], _Step.apply(query, self.token, self, allowed))

    def launch_forward(
        self, q: Tensor, allowed: Tensor | None, *, precisely: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """context (B, Dv), the same in float32 if `precisely`, and weights (B, K), of projected q (B, H)."""
        B, K, D = self.value.shape
        weights = q.new_empty(B, K, dtype=torch.float32)
        context = precise = self.value.new_empty(B, D)
        if precisely and context.dtype != torch.float32:
            precise = torch.empty_like(context, dtype=torch.float32)
        if 0 in (B, K):
            return context.zero_(), precise.zero_(), weights
        mask = weights if allowed is None else allowed.contiguous()
        _forward_kernel[(B, self.splits)](
            q, self.keys, self.v, self.value, mask, weights, context, precise,
            self.parts, self.sums, self.counter, *self.sizes,
            MASKED=allowed is not None, PRECISE=precise is not context, **self.forward_constants,
        )  # fmt: skip
        return context, precise, weights

    def launch_backward(
        self, q: Tensor, weights: Tensor, context: Tensor, d_context: Tensor, d_weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """ds (B, K) float32, the gradient of the scores, and dq (B, H), that of the projected query."""
        B, K = weights.shape
        ds, dq = torch.empty_like(weights), torch.empty_like(q)
        if 0 in (B, K):
            return ds, dq.zero_()
        more = weights if d_weights is None else d_weights
        _backward_kernel[(B, self.splits)](
            q, self.keys, self.v, self.value, weights, context, d_context, more, ds, dq,
            self.parts, self.counter, *self.sizes,
            WITH_D_WEIGHTS=d_weights is not None, **self.backward_constants,
        )  # fmt: skip
        return ds, dq
