"""Additive attention of one query per row, for the steps of a decoding loop, forward and backward.

    loop = AdditiveStepLoop(weight, prepared_keys, v, value)    # once per sentence
    for t in range(T):
        context = loop.compute_context(query)                   # query (B, Dq) → context (B, Dv)

A step is one product with `weight` and one kernel, and so is its backward pass (the kernels are in
:mod:`.additive_step_kernels`). The programs of a kernel are B rows times a few splits of the keys. The
tensors that all steps share (weight, keys, v, value) get their gradients once, after the backward pass of the
last step, from what the steps have stored in a buffer: one large product instead of T small ones that each
read and write the whole gradient.

The forward pass stores the scores and their log Σ exp, not the weights, which are exp(score - log Σ exp). To
write the weights, a row would have to wait for its last score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from jumok.attention.kernels.additive import compute_max_abs, compute_scores_gradient
from jumok.attention.kernels.additive_step_kernels import backward_kernel, forward_kernel
from jumok.attention.kernels.common import (
    disable_compile,
    divide_up,
    forbid_double_backward,
    launch_options,
    make_rows_contiguous,
    next_power_of_2,
)
from jumok.attention.kernels.launcher import launch


class AdditiveStepBlockSizes(NamedTuple):
    """Block sizes of a step kernel.

    A tile is some keys with their whole width. Each warp has its own keys, and each key some lanes: few lanes
    need few shuffles to sum, many lanes have fewer columns to hold in registers.
    """

    columns_per_lane: int = 16  # of a key, unless that requires more than 32 lanes
    keys_per_lane: int = 2  # keys of which a lane has a part, unless these exceed MAX_ELEMENTS_PER_LANE
    num_warps: int = 1
    target_programs: int = 1024  # rows are split until there are about this many programs
    num_stages: int = 1  # tiles in shared memory; 1 (registers) is best unless a tile is one key of one warp
    max_splits: int = 32  # of a row: the last program of a row reads the results of all of them
    merge_elements_per_lane: int = 64  # numbers that a lane of the last program reads at a time


# A program is one warp, which waits for no other until the end. Narrow: seven programs keep a multiprocessor
# of an H200 busy, and more leave too many parts to combine. With few rows, there would be too few programs,
# so four warps share one part. Wide: one key and one value fill the registers of a lane, and each part is as
# wide as a value.
NARROW_BLOCKS = AdditiveStepBlockSizes()
NARROW_FEW_ROWS_BLOCKS = AdditiveStepBlockSizes(num_warps=4, target_programs=256, max_splits=64)
MAX_FEW_ROWS = 16
WIDE_BLOCKS = AdditiveStepBlockSizes(columns_per_lane=8, keys_per_lane=4, target_programs=512, max_splits=64)
MAX_NARROW_WIDTH = 512  # columns of the wider of key and value: 16 for each of 32 lanes
MAX_ELEMENTS_PER_LANE = 64  # of a key and of a value
MAX_WIDTH = 4096  # H and Dv: a warp holds a whole key and a whole value


def choose_step_blocks(num_rows: int, width: int) -> tuple[AdditiveStepBlockSizes, AdditiveStepBlockSizes]:
    """Return the block sizes of the forward and of the backward kernel, for keys and values of this width."""
    narrow = NARROW_BLOCKS if num_rows > MAX_FEW_ROWS else NARROW_FEW_ROWS_BLOCKS
    return (narrow, narrow) if width <= MAX_NARROW_WIDTH else (WIDE_BLOCKS, WIDE_BLOCKS)


class AdditiveStepLaunch(NamedTuple):
    """The launch parameters of a kernel for certain sizes."""

    num_splits: int  # programs per row of the batch
    keys_per_split: int  # keys per program
    constants: dict[str, Any]


def plan_launch(blocks: AdditiveStepBlockSizes, keys: Tensor, value: Tensor, part_width: int) -> AdditiveStepLaunch:
    """Return the launch parameters for keys (B, K, H) and value (B, K, Dv).

    Each program writes a partial result of `part_width` columns.
    """
    B, K, H = keys.shape
    D = value.shape[-1]
    max_width = next_power_of_2(max(H, D))
    lanes_per_key = min(32, max(1, max_width // blocks.columns_per_lane))
    keys_per_lane = max(1, min(blocks.keys_per_lane, MAX_ELEMENTS_PER_LANE * lanes_per_key // max_width))
    keys_per_tile = min(keys_per_lane * (32 // lanes_per_key) * blocks.num_warps, next_power_of_2(K))
    num_tiles = divide_up(K, keys_per_tile)
    tiles_per_split = max(1, round(num_tiles * B / blocks.target_programs), divide_up(num_tiles, blocks.max_splits))
    keys_per_split = tiles_per_split * keys_per_tile
    num_splits = divide_up(K, keys_per_split)
    line_width = min(max_width, lanes_per_key * 16 // keys.element_size())  # a lane loads 16 bytes at a time
    key_lines, value_lines = (next_power_of_2(divide_up(size, line_width)) for size in (H, D))
    num_parts = next_power_of_2(num_splits)
    merge_width = min(  # columns of all parts that the last program reads at a time
        next_power_of_2(part_width),
        max(32, 32 * blocks.merge_elements_per_lane // num_parts) * blocks.num_warps,
    )
    constants = {
        "SPLITS": num_splits,
        "PARTS": num_parts,
        "ROWS": keys_per_tile,
        "HL": key_lines,
        "DL": value_lines,
        "WIDTH": line_width,
        "STAGES": blocks.num_stages,
        "PW": merge_width,
        "VECTOR": min(4, max(1, merge_width // (32 * blocks.num_warps))),
    }
    return AdditiveStepLaunch(num_splits, keys_per_split, constants | launch_options(blocks.num_warps))


def compute_weights_from_lse(scores: Tensor, lse: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the softmax of scores (…, K), given their log Σ exp (…). It is 0 where a score is -inf."""
    return torch.exp(scores - lse[..., None], out=torch.empty_like(scores, dtype=dtype))


# --- without autograd ---------------------------------------------------------------------------------------


class AdditiveStepForwardResult(NamedTuple):
    """What the forward pass of a step saves for its backward pass."""

    q: Tensor  # (B, H) projected
    scores: Tensor  # (B, K)
    lse: Tensor  # (B,) log Σ exp of the scores
    context: Tensor  # (B, Dv) in the highest precision available
    masked: bool


class AdditiveStepGradients(NamedTuple):
    """What the backward pass of a step stores for the gradients of the shared tensors."""

    q: Tensor  # (B, H) projected
    scores: Tensor  # (B, K)
    lse: Tensor  # (B,) log Σ exp of the scores
    ds: Tensor  # (B, K)
    d_context: Tensor  # (B, Dv)


class AdditiveStepKernels:
    """Launches the kernels of the steps over the same keys, and holds their scratch memory.

    All steps must run on one stream, because they share scratch memory.

    Args:
        keys: projected keys (B, K, H), in bfloat16, float16 or float32.
        v: (H).
        value: (B, K, Dv).
        blocks: block sizes of the forward and of the backward kernel. Default: chosen for the input.
    """

    def __init__(
        self,
        keys: Tensor,
        v: Tensor,
        value: Tensor,
        blocks: tuple[AdditiveStepBlockSizes, AdditiveStepBlockSizes] | None = None,
    ) -> None:
        self.v = v.detach().contiguous()
        self.keys, self.value = make_rows_contiguous(keys.detach()), make_rows_contiguous(value.detach())

        B, _, H = keys.shape
        D = value.shape[-1]
        if next_power_of_2(max(H, D)) > MAX_WIDTH:
            raise ValueError(f"the step kernels support {MAX_WIDTH} columns at most, but H is {H} and Dv is {D}")
        strides = (*self.keys.stride()[:2], *self.value.stride()[:2])
        unit = math.gcd(H, D, *strides, 8)
        self.size_units = [size // unit for size in (H, D, *strides)]
        loads_pairs = unit % 2 == 0 and all(
            x.element_size() == 2 and x.data_ptr() % 4 == 0 for x in (self.keys, self.value)
        )
        self.kernel_constants = {"UNIT": unit, "PAIRS": loads_pairs, "EXACT": keys.dtype == torch.float32}
        forward_blocks, backward_blocks = blocks or choose_step_blocks(len(keys), max(H, D))
        self.forward_launch = plan_launch(forward_blocks, keys, value, D)
        self.backward_launch = plan_launch(backward_blocks, keys, value, H)
        # Only the last program of a row reads the scratch memory, before the next launch writes it.
        num_splits = max(self.forward_launch.num_splits, self.backward_launch.num_splits)
        num_parts = num_splits if num_splits > 1 else 0
        self.partial_outputs = keys.new_empty(B * num_parts * max(H, D), dtype=torch.float32)
        self.partial_sums = keys.new_empty(B * num_parts * 2, dtype=torch.float32)
        self.counter = keys.new_zeros(B if num_parts else 0, dtype=torch.int32)

    def launch_forward(
        self, q: Tensor, allowed: Tensor | None, keep_float32: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return context (B, Dv), also in float32 if `keep_float32`, scores (B, K) and log Σ exp (B,).

        q (B, H) is the projected query. Scores are -inf where not allowed. In a row without any allowed key,
        log Σ exp is 0.
        """
        B, K, D = self.value.shape
        scores, lse = (q.new_empty(shape, dtype=torch.float32) for shape in ((B, K), (B,)))
        context = precise = self.value.new_empty(B, D)
        if keep_float32 and context.dtype != torch.float32:
            precise = torch.empty_like(context, dtype=torch.float32)
        if 0 in (B, K):
            return context.zero_(), precise.zero_(), scores, lse.zero_()
        mask = scores if allowed is None else allowed.contiguous()
        num_splits, keys_per_split, constants = self.forward_launch
        launch(
            forward_kernel, (B, num_splits), q, self.keys, self.v, self.value, mask, scores, lse, context, precise,
            self.partial_outputs, self.partial_sums, self.counter, K, keys_per_split, *self.size_units,
            MASKED=allowed is not None, PRECISE=precise is not context, **self.kernel_constants, **constants,
        )  # fmt: skip
        return context, precise, scores, lse

    def launch_backward(self, forward_result: AdditiveStepForwardResult, d_context: Tensor) -> tuple[Tensor, Tensor]:
        """Return ds (B, K) float32, the gradient of the scores, and dq (B, H), of the projected query."""
        q, scores, lse, context, is_masked = forward_result
        B, K = scores.shape
        ds, dq = torch.empty_like(scores), torch.empty_like(q)
        if 0 in (B, K):
            return ds, dq.zero_()
        num_splits, keys_per_split, constants = self.backward_launch
        launch(
            backward_kernel, (B, num_splits), q, self.keys, self.v, self.value, scores, lse, context, d_context, ds, dq,
            self.partial_outputs, self.counter, K, keys_per_split, *self.size_units,
            MASKED=is_masked, **self.kernel_constants, **constants,
        )  # fmt: skip
        return ds, dq

    def compute_shared_gradients(
        self, steps: Sequence[AdditiveStepGradients], needs_gradient: tuple[bool, bool, bool] = (True, True, True)
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of keys, v and value, from what the backward passes of all steps have stored.

        Those that are not needed are None.
        """
        needs_d_keys, needs_dv, needs_d_value = needs_gradient
        stacked = AdditiveStepGradients(*(torch.stack(field, dim=1) for field in zip(*steps, strict=True)))  # (B, T, …)
        d_keys = dv = d_value = None
        if needs_d_keys or needs_dv:
            # A key whose scores have no gradient has no gradient itself, even if it is NaN.
            is_used = stacked.ds.any(dim=1)
            used_keys = torch.where(is_used[:, :, None], self.keys, 0)
            peaks = compute_max_abs(stacked.q, used_keys)
            d_keys, dv = compute_scores_gradient(used_keys, stacked.q, self.v, stacked.ds, peaks, with_dv=needs_dv)
            dv = None if dv is None else dv.to(self.v.dtype)
        if needs_d_value:
            weights = compute_weights_from_lse(stacked.scores, stacked.lse, stacked.d_context.dtype)
            d_value = torch.bmm(weights.transpose(1, 2), stacked.d_context).to(self.value.dtype)
        return d_keys if needs_d_keys else None, dv, d_value


# --- with autograd ------------------------------------------------------------------------------------------


class _AdditiveStepGradientBuffer:
    """What the steps of one backward pass have stored: query (B, Dq), its dq (B, H), and the gradients.

    A pass that did not need the shared gradients may have left entries. They have another graph task id and
    are dropped.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Tensor, Tensor, AdditiveStepGradients]] = []
        self._graph_task_id = -1
        self.is_consumed = False  # a backward pass has taken the entries and may have freed the graph

    def add(self, query: Tensor, dq: Tensor, gradients: AdditiveStepGradients) -> None:
        task_id = torch._C._current_graph_task_id()
        if task_id != self._graph_task_id:
            self._entries, self._graph_task_id = [], task_id
        self._entries.append((query, dq, gradients))

    def take(self) -> list[tuple[Tensor, Tensor, AdditiveStepGradients]]:
        entries, self._entries = self._entries, []
        self.is_consumed = True
        return entries if self._graph_task_id == torch._C._current_graph_task_id() else []


class _DeferredSharedGradients(torch.autograd.Function):
    """(weight, keys, v, value) → token. Every step takes the token, so this backward runs after theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        keys: Tensor,
        v: Tensor,
        value: Tensor,
        kernels: AdditiveStepKernels,
        gradient_buffer: _AdditiveStepGradientBuffer,
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # the steps send no gradient through the token
        ctx.save_for_backward(weight, keys, v, value)
        ctx.kernels, ctx.gradient_buffer = kernels, gradient_buffer
        return keys.new_empty(1, dtype=torch.float32)  # its value is never read

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        entries = ctx.gradient_buffer.take()
        if not entries:
            return (None,) * 6
        weight, *_others = ctx.saved_tensors  # all are unpacked, see below
        queries, dqs, steps = zip(*entries, strict=True)
        needs_d_weight, *needs_gradient = ctx.needs_input_grad[:4]
        d_weight = None
        if needs_d_weight:
            dq, query = (torch.stack(x, dim=1).flatten(0, 1) for x in (dqs, queries))
            d_weight = (dq.t() @ query.to(dq.dtype)).to(weight.dtype)
        return d_weight, *ctx.kernels.compute_shared_gradients(steps, needs_gradient), None, None


class _AdditiveStepFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, token: Tensor | None, loop: AdditiveStepLoop, allowed: Tensor | None
    ) -> Tensor:
        kernels = loop.kernels
        q = torch.nn.functional.linear(query, loop.weight)
        context, precise, scores, lse = kernels.launch_forward(q, allowed, any(ctx.needs_input_grad))
        ctx.save_for_backward(query, q, scores, lse, precise, loop.weight, kernels.keys, kernels.v, kernels.value)
        ctx.loop, ctx.masked = loop, allowed is not None
        return context

    @staticmethod
    def backward(ctx: Any, d_context: Tensor) -> tuple[Tensor | None, None, None, None]:
        forbid_double_backward()
        # All are unpacked, so that autograd raises an error if one was modified in place.
        query, q, scores, lse, context, weight, _keys, _v, _value = ctx.saved_tensors
        d_context = d_context.contiguous()
        forward_result = AdditiveStepForwardResult(q, scores, lse, context, ctx.masked)
        ds, dq = ctx.loop.kernels.launch_backward(forward_result, d_context)
        if ctx.needs_input_grad[1] and scores.numel():
            gradients = AdditiveStepGradients(q, scores, lse, ds, d_context)
            ctx.loop.gradient_buffer.add(query.detach(), dq, gradients)
        d_query = (dq.to(weight.dtype) @ weight).to(query.dtype) if ctx.needs_input_grad[0] else None
        return d_query, None, None, None


class AdditiveStepLoop:
    """The tensors and the scratch memory that the steps of a decoding loop share.

    Differentiable once in all tensors. It can be captured in a CUDA graph.

    Args:
        weight: (H, Dq), projects the queries.
        keys, v, value, blocks: those of :class:`AdditiveStepKernels`.
    """

    def __init__(
        self,
        weight: Tensor,
        keys: Tensor,
        v: Tensor,
        value: Tensor,
        blocks: tuple[AdditiveStepBlockSizes, AdditiveStepBlockSizes] | None = None,
    ) -> None:
        self.weight = weight.detach()
        self.kernels = AdditiveStepKernels(keys, v, value, blocks)
        self.gradient_buffer = _AdditiveStepGradientBuffer()
        self.token: Tensor | None = None
        if torch.is_grad_enabled() and any(x.requires_grad for x in (weight, keys, v, value)):
            token = _DeferredSharedGradients.apply(weight, keys, v, value, self.kernels, self.gradient_buffer)
            self.token = cast(Tensor, token)

    @property
    def is_consumed(self) -> bool:
        """Whether a backward pass has used it up. Further steps need another `AdditiveStepLoop`."""
        return self.gradient_buffer.is_consumed

    @disable_compile
    def compute_context(self, query: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the context (B, Dv) of a query (B, Dq).

        ``allowed`` (B, K) bool is True where a query may attend. Blocked keys and values never affect the
        result, even if they are NaN. A row without any allowed key has a zero context and zero gradients.
        """
        return cast(Tensor, _AdditiveStepFunction.apply(query, self.token, self, allowed))
