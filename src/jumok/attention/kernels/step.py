"""Additive attention of one query a row, at each step of a decoding loop, forward and backward.

    loop = Shared(weight, prepared_keys, v, value)      # once a sentence
    for t in range(T):
        context, weights = loop.step(query)             # query (B, Dq) → context (B, Dv), weights (B, K)

A step is one product with `weight` and one kernel; so is its backward. The programs of a kernel are B rows by
a few splits of the keys; the last program of a row to finish puts the row's parts together, so that no second
launch is needed. What all steps share (weight, keys, v, value) gets its gradients once, after the backward of
the last step, from what the steps wrote into a ledger: one large product instead of T small ones that each
read and write the whole gradient.

A step is so short that waiting is what costs. So each warp has keys of its own and needs no other while it
walks over them: it loads the next key and value while it works on these, sums within itself, and keeps its
part of the result in registers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from .additive import (
    dense_rows,
    launched,
    peaks_of,
    refuse_second_derivatives,
    scores_gradient,
    tanh,
    untraced,
)


class Blocks(NamedTuple):
    """How the work is cut up. A tile is some keys with all of their width; each warp has keys of its own."""

    keys: int = 4  # of a tile, for each warp, …
    elements: int = 64  # … unless that were more than so many for each thread
    warps: int = 1
    programs: int = 512  # rows are split until there are about this many: four for each processor of an H200
    splits: int = 64  # but never into more, for the last program of a row reads what all of them wrote


BLOCKS = Blocks()
WIDEST = 4096  # H and Dv: a warp holds a key and a value whole
LINE = 256  # columns that a warp reads at a time, 16 bytes a lane


# --- kernels ------------------------------------------------------------------------------------------------
#
# H, D and strides come in units of UNIT elements: the compiler then knows what they are multiples of, and
# reads 16 bytes at a time where it can. Left alone, it looks for multiples of 16 only, and H = 1000 is none.


# These differ from batch to batch, and a kernel compiled for each kind of number would be no faster.
ANY_SIZE = ["K", "share", "k_units_b", "value_units_b"]


@triton.jit
def _columns(LINES: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of a tile [keys, LINES, WIDTH], as [1, LINES, WIDTH].

    In this shape the compiler lays a warp's lanes along a line and the warps along the keys. So a sum over
    all columns stays within a warp, and the loops over the keys hardly need a barrier.
    """
    return (tl.arange(0, LINES) * WIDTH)[None, :, None] + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def _vector(ptr, columns, size):
    return tl.load(ptr + columns, mask=columns < size, other=0.0).to(tl.float32)


@triton.jit
def _rows_of(ptr, b, units_b, units_r, row, last, columns, size, UNIT: tl.constexpr):
    """Some rows of keys or values, [keys, lines, width]."""
    at = ptr + (b * units_b + row.to(tl.int64) * units_r)[:, None, None] * UNIT + columns
    return tl.load(at, mask=(row < last)[:, None, None] & (columns < size), other=0.0)


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


@triton.jit(do_not_specialize=ANY_SIZE)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, value_ptr, allowed_ptr, weights_ptr, context_ptr, precise_ptr, parts_ptr, sums_ptr,
    counter_ptr, K, share, h_units, d_units, k_units_b, k_units_r, value_units_b, value_units_r,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
    PRECISE: tl.constexpr, ROWS: tl.constexpr, HL: tl.constexpr, HW: tl.constexpr, DL: tl.constexpr,
    DW: tl.constexpr, CW: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """softmax(Σ v · tanh(q + k)) and its mix of the values, in tiles of ROWS keys.

    Each of the ROWS places of the tile has a softmax of its own over the keys that pass through it; they are
    put together after the loop. parts (B, SPLITS, D) and sums (B, SPLITS, 2: largest score, Σ exp) float32
    are scratch.
    """
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    first = split * share
    last = tl.minimum(first + share, K)
    H = h_units * UNIT
    D = d_units * UNIT
    h = _columns(HL, HW)
    d = _columns(DL, DW)
    q = _vector(q_ptr + b * H, h, H)
    v = _vector(v_ptr, h, H)
    weights_at = weights_ptr + b * K

    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, DL, DW), tl.float32)
    row = first + tl.arange(0, ROWS)
    k_next = _rows_of(k_ptr, b, k_units_b, k_units_r, row, last, h, H, UNIT)
    value_next = _rows_of(value_ptr, b, value_units_b, value_units_r, row, last, d, D, UNIT)
    for k0 in range(first, last, ROWS):
        # The next keys and values are on their way while these are worked on. What is not allowed is loaded
        # too, and dropped after that: so no load waits for the mask.
        row = k0 + tl.arange(0, ROWS)
        there = row < last
        if MASKED:
            there = tl.load(allowed_ptr + b * K + row, mask=there, other=0) != 0
        k, value = k_next, value_next
        k_next = _rows_of(k_ptr, b, k_units_b, k_units_r, row + ROWS, last, h, H, UNIT)
        value_next = _rows_of(value_ptr, b, value_units_b, value_units_r, row + ROWS, last, d, D, UNIT)

        score = tl.sum(tl.sum(v * tanh(q + k.to(tl.float32), EXACT), axis=1), axis=1)
        score = tl.where(there, score, -float("inf"))
        tl.store(
            weights_at + row, score, mask=row < last
        )  # in the place of the weights, until the sum is known
        new_peak = tl.maximum(peak, score)
        level = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # nothing allowed: exp gives 0, not NaN
        shrink = tl.exp(peak - level)
        part = tl.exp(score - level)
        total = total * shrink + part
        value = value.to(tl.float32)
        if MASKED:
            value = tl.where(there[:, None, None], value, 0.0)
        mix = mix * shrink[:, None, None] + part[:, None, None] * value
        peak = new_peak
    highest = tl.max(peak, axis=0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    factor = tl.exp(peak - highest)
    row_total = tl.sum(total * factor, axis=0)
    row_mix = tl.expand_dims(tl.sum(mix * factor[:, None, None], axis=0), 0)  # [1, DL, DW]

    if SPLITS == 1:
        scale = 1.0 / tl.where(row_total == 0.0, 1.0, row_total)
        tl.store(context_ptr + b * D + d, row_mix * scale, mask=d < D)
        if PRECISE:
            tl.store(precise_ptr + b * D + d, row_mix * scale, mask=d < D)
        tl.debug_barrier()  # all scores are written
        for k0 in range(0, K, CW):
            key = k0 + tl.arange(0, CW)
            score = tl.load(weights_at + key, mask=key < K, other=-float("inf"))
            tl.debug_barrier()  # nobody reads these scores any more
            tl.store(weights_at + key, tl.exp(score - highest) * scale, mask=key < K)
    else:
        tl.store(parts_ptr + (b * SPLITS + split) * D + d, row_mix, mask=d < D)
        tl.store(sums_ptr + (b * SPLITS + split) * 2, highest)
        tl.store(sums_ptr + (b * SPLITS + split) * 2 + 1, row_total)
        if _is_last(counter_ptr, b, SPLITS):
            # Loads first, stores last: a load behind a store would wait for it.
            key = tl.arange(0, CW)
            score = tl.load(weights_at + key, mask=key < K, other=-float("inf"), cache_modifier=".cg")
            lane = tl.arange(0, LANES)
            sums_at = sums_ptr + (b * SPLITS + lane) * 2
            peaks = tl.load(sums_at, mask=lane < SPLITS, other=0.0, cache_modifier=".cg")
            totals = tl.load(sums_at + 1, mask=lane < SPLITS, other=0.0, cache_modifier=".cg")
            peaks = tl.where(totals == 0.0, -float("inf"), peaks)  # nothing allowed there
            highest = tl.max(peaks, axis=0)
            highest = tl.where(highest == -float("inf"), 0.0, highest)
            factors = tl.exp(peaks - highest)
            all_total = tl.sum(totals * factors, axis=0)
            row_scale = 1.0 / tl.where(all_total == 0.0, 1.0, all_total)
            factors *= row_scale
            for w in range(0, D, PW):
                c = w + tl.arange(0, PW)
                parts_at = parts_ptr + (b * SPLITS + lane)[:, None] * D + c[None, :]
                inside = (lane < SPLITS)[:, None] & (c < D)[None, :]
                parts = tl.load(parts_at, mask=inside, other=0.0, cache_modifier=".cg")
                mixed = tl.sum(parts * factors[:, None], axis=0)
                tl.store(context_ptr + b * D + c, mixed, mask=c < D)
                if PRECISE:
                    tl.store(precise_ptr + b * D + c, mixed, mask=c < D)
            tl.store(weights_at + key, tl.exp(score - highest) * row_scale, mask=key < K)
            for k0 in range(CW, K, CW):
                more = k0 + tl.arange(0, CW)
                rest = tl.load(weights_at + more, mask=more < K, other=-float("inf"), cache_modifier=".cg")
                tl.store(weights_at + more, tl.exp(rest - highest) * row_scale, mask=more < K)


@triton.jit(do_not_specialize=ANY_SIZE)
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, value_ptr, weights_ptr, context_ptr, d_context_ptr, d_weights_ptr, ds_ptr, dq_ptr,
    parts_ptr, counter_ptr, K, share, h_units, d_units, k_units_b, k_units_r, value_units_b, value_units_r,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, EXACT: tl.constexpr,
    WITH_D_WEIGHTS: tl.constexpr, ROWS: tl.constexpr, HL: tl.constexpr, HW: tl.constexpr, DL: tl.constexpr,
    DW: tl.constexpr, CW: tl.constexpr, PW: tl.constexpr,
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
    h = _columns(HL, HW)
    d = _columns(DL, DW)
    q = _vector(q_ptr + b * H, h, H)
    dc = _vector(d_context_ptr + b * D, d, D)
    # Every warp works this out for itself, which saves the barriers.
    each = tl.sum(
        tl.sum(tl.broadcast_to(dc * _vector(context_ptr + b * D, d, D), (ROWS, DL, DW)), axis=1), axis=1
    )
    if WITH_D_WEIGHTS:
        mean = 0.0
        for k0 in range(0, K, CW):
            key = k0 + tl.arange(0, CW)
            weight = tl.load(weights_ptr + b * K + key, mask=key < K, other=0.0)
            mean += tl.sum(weight * tl.load(d_weights_ptr + b * K + key, mask=key < K, other=0.0), axis=0)
        each += mean

    slopes = tl.zeros((ROWS, HL, HW), tl.float32)
    row = first + tl.arange(0, ROWS)
    k_next = _rows_of(k_ptr, b, k_units_b, k_units_r, row, last, h, H, UNIT)
    value_next = _rows_of(value_ptr, b, value_units_b, value_units_r, row, last, d, D, UNIT)
    for k0 in range(first, last, ROWS):
        row = k0 + tl.arange(0, ROWS)
        there = row < last
        weight = tl.load(weights_ptr + b * K + row, mask=there, other=0.0)
        k, value = k_next, value_next
        k_next = _rows_of(k_ptr, b, k_units_b, k_units_r, row + ROWS, last, h, H, UNIT)
        value_next = _rows_of(value_ptr, b, value_units_b, value_units_r, row + ROWS, last, d, D, UNIT)
        dw = tl.sum(tl.sum(dc * value.to(tl.float32), axis=1), axis=1)
        if WITH_D_WEIGHTS:
            dw += tl.load(d_weights_ptr + b * K + row, mask=there, other=0.0)
        used = weight != 0.0  # what was not allowed has no weight, and may hold anything
        ds = tl.where(used, weight * (dw - each), 0.0)
        tl.store(ds_ptr + b * K + row, ds, mask=there)
        t = tanh(q + tl.where(used[:, None, None], k.to(tl.float32), 0.0), EXACT)
        slopes += ds[:, None, None] * (1.0 - t * t)
    dq = tl.expand_dims(tl.sum(slopes, axis=0), 0) * _vector(v_ptr, h, H)  # [1, HL, HW]

    if SPLITS == 1:
        tl.store(dq_ptr + b * H + h, dq, mask=h < H)
    else:
        tl.store(parts_ptr + (b * SPLITS + split) * H + h, dq, mask=h < H)
        if _is_last(counter_ptr, b, SPLITS):
            lane = tl.arange(0, LANES)
            for w in range(0, H, PW):
                c = w + tl.arange(0, PW)
                parts_at = parts_ptr + (b * SPLITS + lane)[:, None] * H + c[None, :]
                inside = (lane < SPLITS)[:, None] & (c < H)[None, :]
                parts = tl.load(parts_at, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(dq_ptr + b * H + c, tl.sum(parts, axis=0), mask=c < H)


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
        self.spent = False  # a backward pass took the entries, and with that perhaps freed the graph

    def add(self, entry: _Entry) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._entries, self._task = [], task
        self._entries.append(entry)

    def take(self) -> list[_Entry]:
        entries, self._entries = self._entries, []
        self.spent = True
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


def _lines(columns: int) -> tuple[int, int]:
    """In how many lines of what width a row of so many columns is read; both powers of two."""
    width = min(LINE, triton.next_power_of_2(max(columns, 1)))
    return triton.next_power_of_2(max(1, triton.cdiv(columns, width))), width


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
        HL, HW = _lines(H)
        DL, DW = _lines(D)
        if max(HL * HW, DL * DW) > WIDEST:
            raise ValueError(f"the step kernels take {WIDEST} columns at most, and H is {H}, Dv is {D}")
        most = triton.next_power_of_2(max(K, 1))
        rows = min(blocks.keys, max(1, 32 * blocks.elements // max(HL * HW, DL * DW))) * blocks.warps
        rows = min(rows, most)
        splits = max(1, min(triton.cdiv(blocks.programs, max(B, 1)), blocks.splits, triton.cdiv(K, rows)))
        share = max(1, triton.cdiv(K, splits))
        self.splits = triton.cdiv(K, share)
        strides = (*self.keys.stride()[:2], *self.value.stride()[:2])
        unit = math.gcd(H, D, *strides, 8)
        self.sizes = (K, share, *(size // unit for size in (H, D, *strides)))
        lanes = triton.next_power_of_2(max(self.splits, 1))
        self.constants = {"UNIT": unit, "SPLITS": self.splits, "EXACT": keys.dtype == torch.float32}
        self.constants |= {"ROWS": rows, "HL": HL, "HW": HW, "DL": DL, "DW": DW, "CW": 2 * LINE}
        self.constants |= {"LANES": lanes, "PW": max(32, blocks.warps * 4096 // lanes)}
        self.constants |= launched(blocks.warps)
        # Only the last program of a row reads the scratch, before the next launch writes it.
        parts = self.splits if self.splits > 1 else 0
        self.parts = keys.new_empty(B * parts * max(H, D), dtype=torch.float32)
        self.sums = keys.new_empty(B * parts * 2, dtype=torch.float32)
        self.counter = keys.new_zeros(B if parts else 0, dtype=torch.int32)

    @property
    def spent(self) -> bool:
        """Whether a backward pass went through all of it: further steps need another `Shared`."""
        return self.ledger.spent

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
            MASKED=allowed is not None, PRECISE=precise is not context,
            **self.constants,
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
            WITH_D_WEIGHTS=d_weights is not None, **self.constants,
        )  # fmt: skip
        return ds, dq
