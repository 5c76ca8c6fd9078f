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

from jumok.attention.kernels.additive import (
    compute_max_abs,
    compute_scores_gradient,
    disable_compile,
    forbid_double_backward,
    launch_options,
    make_rows_contiguous,
)
from jumok.attention.kernels.additive_step_kernels import backward_kernel, forward_kernel


class AdditiveStepBlockSizes(NamedTuple):
    """How the work of a kernel is cut up.

    A tile is some keys with all of their width. Each warp has keys of its own, and each key some lanes: few
    lanes sum up in few shuffles, many have fewer columns to hold in registers.
    """

    columns_per_lane: int = 16  # of a key, for each of its lanes, unless that were more than 32 lanes
    keys_per_lane: int = 2  # that a lane has a piece of, unless these were more than ELEMENTS
    num_warps: int = 1
    target_programs: int = 1024  # rows are split until there are about this many
    num_stages: int = (
        1  # tiles in shared memory; 1: in registers, as is best unless a tile is one key of one warp
    )
    max_splits: int = 32  # but never into more, for the last program of a row reads what all of them wrote, …
    merge_elements_per_lane: int = 64  # … so many numbers a lane at a time


# A program is one warp: it meets nobody until the end. Narrow: seven of them keep a processor of an H200
# busy, and any more leave too many parts to put together. Of few rows, that would be too few programs: there
# four warps leave one part. Wide: a lane has its registers full with one key and one value, and each part is
# as wide as a value.
NARROW_BLOCKS = AdditiveStepBlockSizes()
NARROW_FEW_ROWS_BLOCKS = AdditiveStepBlockSizes(num_warps=4, target_programs=256, max_splits=64)
MAX_FEW_ROWS = 16  # rows
WIDE_BLOCKS = AdditiveStepBlockSizes(columns_per_lane=8, keys_per_lane=4, target_programs=512, max_splits=64)
MAX_NARROW_WIDTH = 512  # columns of the wider of key and value: 16 for each of 32 lanes
MAX_ELEMENTS_PER_LANE = 64  # of a key and of a value, for each lane
MAX_WIDTH = 4096  # H and Dv: a warp holds a key and a value whole


def choose_step_blocks(num_rows: int, width: int) -> tuple[AdditiveStepBlockSizes, AdditiveStepBlockSizes]:
    """The blocks of the forward and of the backward kernel, for keys and values so wide at most."""
    narrow = NARROW_BLOCKS if num_rows > MAX_FEW_ROWS else NARROW_FEW_ROWS_BLOCKS
    return (narrow, narrow) if width <= MAX_NARROW_WIDTH else (WIDE_BLOCKS, WIDE_BLOCKS)


class AdditiveStepLaunch(NamedTuple):
    """How a kernel is launched for certain sizes."""

    num_splits: int  # programs for each row of the batch
    keys_per_split: int  # keys for each of them
    constants: dict[str, Any]


def _next_power_of_2(size: int) -> int:
    return cast(int, triton.next_power_of_2(max(1, size)))


def plan_launch(
    blocks: AdditiveStepBlockSizes, keys: Tensor, value: Tensor, part_width: int
) -> AdditiveStepLaunch:
    """For keys (B, K, H) and value (B, K, Dv); each program leaves a part of so many columns."""
    B, K, H = keys.shape
    D = value.shape[-1]
    widest = _next_power_of_2(max(H, D))
    lanes = min(32, max(1, widest // blocks.columns_per_lane))
    rows = (
        max(1, min(blocks.keys_per_lane, MAX_ELEMENTS_PER_LANE * lanes // widest))
        * (32 // lanes)
        * blocks.num_warps
    )
    rows = min(rows, _next_power_of_2(K))
    tiles = triton.cdiv(K, rows)
    tiles_each = max(1, round(tiles * B / blocks.target_programs), triton.cdiv(tiles, blocks.max_splits))
    share = tiles_each * rows
    splits = triton.cdiv(K, share)
    width = min(widest, lanes * 16 // keys.element_size())  # a lane loads 16 bytes at a time
    lines = [_next_power_of_2(triton.cdiv(size, width)) for size in (H, D)]
    parts = _next_power_of_2(splits)
    at_once = min(
        _next_power_of_2(part_width), max(32, 32 * blocks.merge_elements_per_lane // parts) * blocks.num_warps
    )  # columns of all parts
    constants = {"SPLITS": splits, "PARTS": parts, "ROWS": rows, "HL": lines[0], "DL": lines[1]}
    vector = min(4, max(1, at_once // (32 * blocks.num_warps)))
    constants |= {"WIDTH": width, "STAGES": blocks.num_stages, "PW": at_once, "VECTOR": vector}
    return AdditiveStepLaunch(splits, share, constants | launch_options(blocks.num_warps))


def compute_weights_from_lse(scores: Tensor, lse: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """softmax of scores (…, K), given their log Σ exp (…), in this type; 0 where a score is -inf."""
    return torch.exp(scores - lse[..., None], out=torch.empty_like(scores, dtype=dtype))


# --- gradients of what the steps share ----------------------------------------------------------------------


class _AdditiveStepGradients(NamedTuple):
    """What the backward of one step leaves for the gradients of what the steps share. Without any graph."""

    query: Tensor  # (B, Dq)
    q: Tensor  # (B, H) projected
    scores: Tensor  # (B, K)
    lse: Tensor  # (B,) log Σ exp of the scores
    ds: Tensor  # (B, K)
    dq: Tensor  # (B, H)
    d_context: Tensor  # (B, Dv)


class _AdditiveStepGradientBuffer:
    """The entries of one backward pass.

    A pass that asked for other gradients only may have left some: they carry its number, and are dropped.
    """

    def __init__(self) -> None:
        self._entries: list[_AdditiveStepGradients] = []
        self._graph_task_id = -1
        self.is_consumed = False  # a backward pass took the entries, and with that perhaps freed the graph

    def add(self, entry: _AdditiveStepGradients) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._graph_task_id:
            self._entries, self._graph_task_id = [], task
        self._entries.append(entry)

    def take(self) -> list[_AdditiveStepGradients]:
        entries, self._entries = self._entries, []
        self.is_consumed = True
        return entries if self._graph_task_id == torch._C._current_graph_task_id() else []


class _DeferredSharedGradients(torch.autograd.Function):
    """(weight, keys, v, value) → token. Every step takes the token: autograd comes here after all of them."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        keys: Tensor,
        v: Tensor,
        value: Tensor,
        gradient_buffer: _AdditiveStepGradientBuffer,
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # the steps send no gradient through the token
        ctx.save_for_backward(weight, keys, v, value)
        ctx.gradient_buffer = gradient_buffer
        return keys.new_empty(1, dtype=torch.float32)  # nobody looks at what it holds

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        entries = ctx.gradient_buffer.take()
        if not entries:
            return (None,) * 5
        weight, keys, v, value = ctx.saved_tensors
        for_weight, for_keys, for_v, for_value, _ = ctx.needs_input_grad
        steps = _AdditiveStepGradients(
            *(torch.stack(same, dim=1) for same in zip(*entries, strict=True))
        )  # (B, T, …)
        d_weight = d_keys = dv = d_value = None
        if for_weight:
            dq, query = steps.dq.flatten(0, 1), steps.query.flatten(0, 1)
            d_weight = (dq.t() @ query.to(dq.dtype)).to(weight.dtype)
        if for_keys or for_v:
            # A key whose scores have no gradient has none itself, whatever it holds.
            used = steps.ds.any(dim=1)
            seen = torch.where(used[:, :, None], make_rows_contiguous(keys), 0)
            peaks = compute_max_abs(steps.q, seen)
            d_keys, dv = compute_scores_gradient(
                seen, steps.q, v.contiguous(), steps.ds, peaks, with_dv=for_v
            )
        if for_value:
            weights = compute_weights_from_lse(steps.scores, steps.lse, steps.d_context.dtype)
            d_value = torch.bmm(weights.transpose(1, 2), steps.d_context).to(value.dtype)
        return d_weight, d_keys if for_keys else None, None if dv is None else dv.to(v.dtype), d_value, None


# --- a step -------------------------------------------------------------------------------------------------


class _AdditiveStepForwardResult(NamedTuple):
    """What the forward of a step leaves for its backward."""

    q: Tensor  # (B, H)
    scores: Tensor  # (B, K)
    lse: Tensor  # (B,)
    context: Tensor  # (B, Dv) as precise as there is
    masked: bool


class _AdditiveStepFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        token: Tensor | None,
        loop: AdditiveStepLoop,
        allowed: Tensor | None,
        with_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q = torch.nn.functional.linear(query, loop.weight)
        context, precise, scores, lse = loop.launch_forward(q, allowed, any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, q, scores, lse, precise, loop.weight, loop.keys, loop.v, loop.value)
        ctx.loop, ctx.masked = loop, allowed is not None
        return context, compute_weights_from_lse(scores, lse) if with_weights else None

    @staticmethod
    def backward(
        ctx: Any, d_context: Tensor | None, d_weights: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        forbid_double_backward()
        # All are unpacked, so that autograd complains if one was changed in place.
        query, q, scores, lse, context, weight, _keys, _v, value = ctx.saved_tensors
        if d_context is None and d_weights is None:
            return None, None, None, None, None
        if d_context is None:
            d_context = torch.zeros_like(context, dtype=value.dtype)
        d_context = d_context.contiguous()
        d_weights = None if d_weights is None else d_weights.contiguous()
        made = _AdditiveStepForwardResult(q, scores, lse, context, ctx.masked)
        ds, dq = ctx.loop.launch_backward(made, d_context, d_weights)
        if ctx.needs_input_grad[1] and scores.numel():
            ctx.loop.gradient_buffer.add(
                _AdditiveStepGradients(query.detach(), q, scores, lse, ds, dq, d_context)
            )
        d_query = (dq.to(weight.dtype) @ weight).to(query.dtype) if ctx.needs_input_grad[0] else None
        return d_query, None, None, None, None


class AdditiveStepLoop:
    """Everything that a loop over decoding steps shares.

    weight (H, Dq) projects the queries; keys (B, K, H) are prepared (projected already); v (H); value
    (B, K, Dv). All on one GPU, in bfloat16, float16 or float32. Differentiable once in all of them. Can be
    captured in a CUDA graph. The steps of one `AdditiveStepLoop` must run on one stream: they share scratch memory.
    blocks: of the forward and of the backward kernel.
    """

    def __init__(
        self,
        weight: Tensor,
        keys: Tensor,
        v: Tensor,
        value: Tensor,
        blocks: tuple[AdditiveStepBlockSizes, AdditiveStepBlockSizes] | None = None,
    ) -> None:
        self.gradient_buffer = _AdditiveStepGradientBuffer()
        self.token: Tensor | None = None
        if torch.is_grad_enabled() and any(x.requires_grad for x in (weight, keys, v, value)):
            self.token = cast(
                Tensor, _DeferredSharedGradients.apply(weight, keys, v, value, self.gradient_buffer)
            )
        self.weight, self.v = weight.detach(), v.detach().contiguous()
        self.keys, self.value = make_rows_contiguous(keys.detach()), make_rows_contiguous(value.detach())

        B, _, H = keys.shape
        D = value.shape[-1]
        if _next_power_of_2(max(H, D)) > MAX_WIDTH:
            raise ValueError(f"the step kernels take {MAX_WIDTH} columns at most, and H is {H}, Dv is {D}")
        strides = (*self.keys.stride()[:2], *self.value.stride()[:2])
        unit = math.gcd(H, D, *strides, 8)
        self.size_units = [size // unit for size in (H, D, *strides)]
        loaded = (self.keys, self.value)
        pairs = unit % 2 == 0 and all(x.element_size() == 2 and x.data_ptr() % 4 == 0 for x in loaded)
        self.kernel_constants = {"UNIT": unit, "PAIRS": pairs, "EXACT": keys.dtype == torch.float32}
        forward, backward = blocks or choose_step_blocks(len(keys), max(H, D))
        self.forward_launch = plan_launch(forward, keys, value, D)
        self.backward_launch = plan_launch(backward, keys, value, H)
        # Only the last program of a row reads the scratch, before the next launch writes it.
        parts = max(
            (
                0,
                *(
                    splits
                    for splits in (self.forward_launch.num_splits, self.backward_launch.num_splits)
                    if splits > 1
                ),
            )
        )
        self.partial_outputs = keys.new_empty(B * parts * max(H, D), dtype=torch.float32)
        self.partial_sums = keys.new_empty(B * parts * 2, dtype=torch.float32)
        self.counter = keys.new_zeros(B if parts else 0, dtype=torch.int32)

    @property
    def is_consumed(self) -> bool:
        """Whether a backward pass went through all of it: further steps need another `AdditiveStepLoop`."""
        return self.gradient_buffer.is_consumed

    @disable_compile
    def step(self, query: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """context (B, Dv) and weights (B, K) float32 of query (B, Dq), both differentiable.

        allowed (B, K) bool, True = may attend. What is not allowed never reaches the result, NaN included;
        a row with nothing allowed gives zero weights, a zero context and zero gradients.
        """
        with torch.cuda.device_of(query):
            return cast(
                tuple[Tensor, Tensor], _AdditiveStepFunction.apply(query, self.token, self, allowed, True)
            )

    @disable_compile
    def compute_context(self, query: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The same without the weights, which takes less time."""
        with torch.cuda.device_of(query):
            context, _ = _AdditiveStepFunction.apply(query, self.token, self, allowed, False)
        return cast(Tensor, context)

    def launch_forward(
        self, q: Tensor, allowed: Tensor | None, keep_float32: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """context (B, Dv), the same in float32 if `keep_float32`, scores (B, K) and their log Σ exp (B,).

        q (B, H) is projected. Scores are -inf where not allowed; of these alone, log Σ exp is said to be 0.
        """
        B, K, D = self.value.shape
        scores, lse = (q.new_empty(shape, dtype=torch.float32) for shape in ((B, K), (B,)))
        context = precise = self.value.new_empty(B, D)
        if keep_float32 and context.dtype != torch.float32:
            precise = torch.empty_like(context, dtype=torch.float32)
        if 0 in (B, K):
            return context.zero_(), precise.zero_(), scores, lse.zero_()
        mask = scores if allowed is None else allowed.contiguous()
        splits, share, constants = self.forward_launch
        forward_kernel[(B, splits)](
            q, self.keys, self.v, self.value, mask, scores, lse, context, precise,
            self.partial_outputs, self.partial_sums, self.counter, K, share, *self.size_units,
            MASKED=allowed is not None, PRECISE=precise is not context, **self.kernel_constants, **constants,
        )  # fmt: skip
        return context, precise, scores, lse

    def launch_backward(
        self, forward_result: _AdditiveStepForwardResult, d_context: Tensor, d_weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """ds (B, K) float32, the gradient of the scores, and dq (B, H), that of the projected query."""
        B, K = forward_result.scores.shape
        ds, dq = torch.empty_like(forward_result.scores), torch.empty_like(forward_result.q)
        if 0 in (B, K):
            return ds, dq.zero_()
        more = ds if d_weights is None else d_weights
        splits, share, constants = self.backward_launch
        backward_kernel[(B, splits)](
            forward_result.q, self.keys, self.v, self.value, forward_result.scores, forward_result.lse, forward_result.context, d_context, more,
            ds, dq, self.partial_outputs, self.counter, K, share, *self.size_units,
            MASKED=forward_result.masked, WITH_D_WEIGHTS=d_weights is not None, **self.kernel_constants, **constants,
        )  # fmt: skip
        return ds, dq
