"""Additive attention of one query a row, at each step of a decoding loop, forward and backward.

    loop = Shared(weight, prepared_keys, v, value)      # once a sentence
    for t in range(T):
        context = loop.context(query)                   # query (B, Dq) → context (B, Dv)
        context, weights = loop.step(query)             # the same, and weights (B, K), made only if asked for

A step is one product with `weight` and one kernel; so is its backward (the kernels: :mod:`.step_kernels`).
The programs of a kernel are B rows by a few splits of the keys. What all steps share (weight, keys, v, value)
gets its gradients once, after the backward of the last step, from what the steps wrote into a ledger: one
large product instead of T small ones that each read and write the whole gradient.

The forward keeps the scores and their log Σ exp rather than the weights: these are exp(score - log Σ exp),
and whoever needs some works them out. To write them, a row would have to wait for its last score.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor

from .additive import dense_rows, launched, peaks_of, refuse_second_derivatives, scores_gradient, untraced
from .step_kernels import backward_kernel, forward_kernel


class Blocks(NamedTuple):
    """How the work of a kernel is cut up.

    A tile is some keys with all of their width. Each warp has keys of its own, and each key some lanes: few
    lanes sum up in few shuffles, many have fewer columns to hold in registers.
    """

    columns: int = 16  # of a key, for each of its lanes, unless that were more than 32 lanes
    keys: int = 2  # that a lane has a piece of, unless these were more than ELEMENTS
    warps: int = 1
    programs: int = 1024  # rows are split until there are about this many
    stages: int = (
        1  # tiles in shared memory; 1: in registers, as is best unless a tile is one key of one warp
    )
    splits: int = 32  # but never into more, for the last program of a row reads what all of them wrote, …
    together: int = 64  # … so many numbers a lane at a time


# A program is one warp: it meets nobody until the end. Narrow: seven of them keep a processor of an H200
# busy, and any more leave too many parts to put together. Of few rows, that would be too few programs: there
# four warps leave one part. Wide: a lane has its registers full with one key and one value, and each part is
# as wide as a value.
NARROW = Blocks()
NARROW_FEW = Blocks(warps=4, programs=256, splits=64)
FEW = 16  # rows
WIDE = Blocks(columns=8, keys=4, programs=512, splits=64)
WIDEST_NARROW = 512  # columns of the wider of key and value: 16 for each of 32 lanes
ELEMENTS = 64  # of a key and of a value, for each lane
WIDEST = 4096  # H and Dv: a warp holds a key and a value whole


def blocks_for(rows: int, width: int) -> tuple[Blocks, Blocks]:
    """The blocks of the forward and of the backward kernel, for keys and values so wide at most."""
    narrow = NARROW if rows > FEW else NARROW_FEW
    return (narrow, narrow) if width <= WIDEST_NARROW else (WIDE, WIDE)


class Cut(NamedTuple):
    """How a kernel is launched for certain sizes."""

    splits: int  # programs for each row of the batch
    share: int  # keys for each of them
    constants: dict[str, Any]


def _power_of_2(size: int) -> int:
    return cast(int, triton.next_power_of_2(max(1, size)))


def cut(blocks: Blocks, keys: Tensor, value: Tensor, part: int) -> Cut:
    """For keys (B, K, H) and value (B, K, Dv); each program leaves a part of so many columns."""
    B, K, H = keys.shape
    D = value.shape[-1]
    widest = _power_of_2(max(H, D))
    lanes = min(32, max(1, widest // blocks.columns))
    rows = max(1, min(blocks.keys, ELEMENTS * lanes // widest)) * (32 // lanes) * blocks.warps
    rows = min(rows, _power_of_2(K))
    tiles = triton.cdiv(K, rows)
    tiles_each = max(1, round(tiles * B / blocks.programs), triton.cdiv(tiles, blocks.splits))
    share = tiles_each * rows
    splits = triton.cdiv(K, share)
    width = min(widest, lanes * 16 // keys.element_size())  # a lane loads 16 bytes at a time
    lines = [_power_of_2(triton.cdiv(size, width)) for size in (H, D)]
    parts = _power_of_2(splits)
    at_once = min(
        _power_of_2(part), max(32, 32 * blocks.together // parts) * blocks.warps
    )  # columns of all parts
    constants = {"SPLITS": splits, "PARTS": parts, "ROWS": rows, "HL": lines[0], "DL": lines[1]}
    vector = min(4, max(1, at_once // (32 * blocks.warps)))
    constants |= {"WIDTH": width, "STAGES": blocks.stages, "PW": at_once, "VECTOR": vector}
    return Cut(splits, share, constants | launched(blocks.warps))


def weights_of(scores: Tensor, lse: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """softmax of scores (…, K), given their log Σ exp (…), in this type; 0 where a score is -inf."""
    return torch.exp(scores - lse[..., None], out=torch.empty_like(scores, dtype=dtype))


# --- gradients of what the steps share ----------------------------------------------------------------------


class _Entry(NamedTuple):
    """What the backward of one step leaves for the gradients of what the steps share. Without any graph."""

    query: Tensor  # (B, Dq)
    q: Tensor  # (B, H) projected
    scores: Tensor  # (B, K)
    lse: Tensor  # (B,) log Σ exp of the scores
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
            # A key whose scores have no gradient has none itself, whatever it holds.
            used = steps.ds.any(dim=1)
            seen = torch.where(used[:, :, None], dense_rows(keys), 0)
            peaks = peaks_of(steps.q, seen)
            d_keys, dv = scores_gradient(seen, steps.q, v.contiguous(), steps.ds, peaks, with_dv=for_v)
        if for_value:
            weights = weights_of(steps.scores, steps.lse, steps.d_context.dtype)
            d_value = torch.bmm(weights.transpose(1, 2), steps.d_context).to(value.dtype)
        return d_weight, d_keys if for_keys else None, None if dv is None else dv.to(v.dtype), d_value, None


# --- a step -------------------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """What the forward of a step leaves for its backward."""

    q: Tensor  # (B, H)
    scores: Tensor  # (B, K)
    lse: Tensor  # (B,)
    context: Tensor  # (B, Dv) as precise as there is
    masked: bool


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        token: Tensor | None,
        shared: Shared,
        allowed: Tensor | None,
        with_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q = torch.nn.functional.linear(query, shared.weight)
        context, precise, scores, lse = shared.launch_forward(q, allowed, any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            query, q, scores, lse, precise, shared.weight, shared.keys, shared.v, shared.value
        )
        ctx.shared, ctx.masked = shared, allowed is not None
        return context, weights_of(scores, lse) if with_weights else None

    @staticmethod
    def backward(
        ctx: Any, d_context: Tensor | None, d_weights: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        refuse_second_derivatives()
        # All are unpacked, so that autograd complains if one was changed in place.
        query, q, scores, lse, context, weight, _keys, _v, value = ctx.saved_tensors
        if d_context is None and d_weights is None:
            return None, None, None, None, None
        if d_context is None:
            d_context = torch.zeros_like(context, dtype=value.dtype)
        d_context = d_context.contiguous()
        d_weights = None if d_weights is None else d_weights.contiguous()
        made = _Made(q, scores, lse, context, ctx.masked)
        ds, dq = ctx.shared.launch_backward(made, d_context, d_weights)
        if ctx.needs_input_grad[1] and scores.numel():
            ctx.shared.ledger.add(_Entry(query.detach(), q, scores, lse, ds, dq, d_context))
        d_query = (dq.to(weight.dtype) @ weight).to(query.dtype) if ctx.needs_input_grad[0] else None
        return d_query, None, None, None, None


class Shared:
    """Everything that a loop over decoding steps shares.

    weight (H, Dq) projects the queries; keys (B, K, H) are prepared (projected already); v (H); value
    (B, K, Dv). All on one GPU, in bfloat16, float16 or float32. Differentiable once in all of them. Can be
    captured in a CUDA graph. The steps of one `Shared` must run on one stream: they share scratch memory.
    blocks: of the forward and of the backward kernel.
    """

    def __init__(
        self,
        weight: Tensor,
        keys: Tensor,
        v: Tensor,
        value: Tensor,
        blocks: tuple[Blocks, Blocks] | None = None,
    ) -> None:
        self.ledger = _Ledger()
        self.token: Tensor | None = None
        if torch.is_grad_enabled() and any(x.requires_grad for x in (weight, keys, v, value)):
            self.token = cast(Tensor, _Deferred.apply(weight, keys, v, value, self.ledger))
        self.weight, self.v = weight.detach(), v.detach().contiguous()
        self.keys, self.value = dense_rows(keys.detach()), dense_rows(value.detach())

        B, _, H = keys.shape
        D = value.shape[-1]
        if _power_of_2(max(H, D)) > WIDEST:
            raise ValueError(f"the step kernels take {WIDEST} columns at most, and H is {H}, Dv is {D}")
        strides = (*self.keys.stride()[:2], *self.value.stride()[:2])
        unit = math.gcd(H, D, *strides, 8)
        self.units = [size // unit for size in (H, D, *strides)]
        loaded = (self.keys, self.value)
        pairs = unit % 2 == 0 and all(x.element_size() == 2 and x.data_ptr() % 4 == 0 for x in loaded)
        self.constants = {"UNIT": unit, "PAIRS": pairs, "EXACT": keys.dtype == torch.float32}
        forward, backward = blocks or blocks_for(len(keys), max(H, D))
        self.forward = cut(forward, keys, value, D)
        self.backward = cut(backward, keys, value, H)
        # Only the last program of a row reads the scratch, before the next launch writes it.
        parts = max((0, *(splits for splits in (self.forward.splits, self.backward.splits) if splits > 1)))
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
            return cast(tuple[Tensor, Tensor], _Step.apply(query, self.token, self, allowed, True))

    @untraced
    def context(self, query: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The same without the weights, which takes less time."""
        with torch.cuda.device_of(query):
            context, _ = _Step.apply(query, self.token, self, allowed, False)
        return cast(Tensor, context)

    def launch_forward(
        self, q: Tensor, allowed: Tensor | None, precisely: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """context (B, Dv), the same in float32 if `precisely`, scores (B, K) and their log Σ exp (B,).

        q (B, H) is projected. Scores are -inf where not allowed; of these alone, log Σ exp is said to be 0.
        """
        B, K, D = self.value.shape
        scores, lse = (q.new_empty(shape, dtype=torch.float32) for shape in ((B, K), (B,)))
        context = precise = self.value.new_empty(B, D)
        if precisely and context.dtype != torch.float32:
            precise = torch.empty_like(context, dtype=torch.float32)
        if 0 in (B, K):
            return context.zero_(), precise.zero_(), scores, lse.zero_()
        mask = scores if allowed is None else allowed.contiguous()
        splits, share, constants = self.forward
        forward_kernel[(B, splits)](
            q, self.keys, self.v, self.value, mask, scores, lse, context, precise,
            self.parts, self.sums, self.counter, K, share, *self.units,
            MASKED=allowed is not None, PRECISE=precise is not context, **self.constants, **constants,
        )  # fmt: skip
        return context, precise, scores, lse

    def launch_backward(
        self, made: _Made, d_context: Tensor, d_weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """ds (B, K) float32, the gradient of the scores, and dq (B, H), that of the projected query."""
        B, K = made.scores.shape
        ds, dq = torch.empty_like(made.scores), torch.empty_like(made.q)
        if 0 in (B, K):
            return ds, dq.zero_()
        more = ds if d_weights is None else d_weights
        splits, share, constants = self.backward
        backward_kernel[(B, splits)](
            made.q, self.keys, self.v, self.value, made.scores, made.lse, made.context, d_context, more,
            ds, dq, self.parts, self.counter, K, share, *self.units,
            MASKED=made.masked, WITH_D_WEIGHTS=d_weights is not None, **self.constants, **constants,
        )  # fmt: skip
        return ds, dq
