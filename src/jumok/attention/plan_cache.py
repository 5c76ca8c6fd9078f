"""Plan cache: the checks and the choice of a path are made once for a kind of call and then reused.

The first call of a kind runs every check, chooses a path and stores a plan. A later call with equal shapes,
dtypes, devices and options runs the plan directly. A plan never holds arguments of a call. Plans of calls
with a mask are stored on the mask, which is immutable, and hold its additive form. All caches are bounded.

A plan may decline a call by returning None, for example when the padding holds NaN. The call then takes the
full path, so results and errors are always those of the full path. Calls that are traced, transformed
(``torch.func``), autocast, checkpointed, or made with tensor subclasses never use a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as nn_module

from jumok.attention import chunking, dispatch
from jumok.attention.arguments import DEFAULT_SCORE, AttentionCall
from jumok.attention.caching import BoundedCache
from jumok.attention.mask_types import AndMask, KeyMask, Mask, NotMask, OrMask, PaddingMask, WindowMask
from jumok.attention.packed_masks import DocumentMask, PackedMask
from jumok.attention.prepared_keys import KeyLike, PreparedKeys
from jumok.attention.scores import Additive, Concat, Dot, General, ScaledDot, Score

__all__ = ["AttentionPlan", "build_plan", "find_plan", "make_plan_key", "store_plan"]

# Called with query, key, value, score and mask. None: the full path must serve this call.
AttentionPlan = Callable[[Tensor, Any, Tensor, Score | None, Mask | None], Tensor | None]

ComputeAttention = Callable[[AttentionCall], Tensor]  # computes a checked call

MAX_PLANS = 1024  # plans of calls without a mask
MAX_PLANS_PER_MASK = 8
MAX_MASK_ELEMENTS = 1 << 16  # largest additive mask that a plan holds, unless it has a single row

_PLAIN = frozenset({Tensor, nn.Parameter})  # tensor types without behavior of their own
_SCORES = frozenset({type(None), ScaledDot, Dot, General, Additive, Concat})
_MASKS = frozenset({PaddingMask, KeyMask, WindowMask, AndMask, OrMask, NotMask, DocumentMask, PackedMask})
_NUMBERS = frozenset({type(None), float, int})  # not bool: True == 1, but True is refused

_PATHS = dispatch.PATHS
_unmasked_plans = BoundedCache(MAX_PLANS)

_in_transform = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_in_function_mode = torch._C._is_torch_function_mode_enabled
_in_autocast = torch._C._is_any_autocast_enabled
_jit_trace = torch._C._get_tracing_state
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_norm = torch.linalg.vector_norm


# ---------------------------------------------------------------------------------------- the cache


def make_plan_key(
    query: Tensor,
    key: KeyLike,
    value: Tensor,
    score: Score | None,
    mask: Mask | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
) -> Hashable | None:
    """The kind of a call: everything that the checks and the choice of a path depend on, except the mask.

    None if the call must take the full path. Never called while ``torch.compile`` traces.
    """
    if bias is not None or softcap is not None:
        return None
    prepared = type(key) is PreparedKeys
    keys: Any = key.keys if prepared else key  # type: ignore[union-attr]
    kind = type(score)
    if not (
        type(query) in _PLAIN
        and type(keys) in _PLAIN
        and type(value) in _PLAIN
        and kind in _SCORES
        and type(scale) in _NUMBERS
        and type(dropout) in _NUMBERS
        and (mask is None or type(mask) in _MASKS)
        and dispatch.PATHS is _PATHS  # else somebody restricts the choice
    ):
        return None
    if (
        _in_transform()
        or _dispatch_modes()
        or _in_function_mode()
        or _in_autocast()
        or _jit_trace() is not None
        or _saved_tensor_hooks(False) is not None  # a checkpoint records the same operations in both runs
    ):
        return None
    return (
        query.shape,
        keys.shape,
        value.shape,
        query.dtype,
        keys.dtype,
        value.dtype,
        query.device,
        keys.device,
        value.device,
        kind,
        prepared,
        scale,
        dropout,
    )


def find_plan(key: Hashable, mask: Mask | None) -> AttentionPlan | None:
    """The stored plan for calls of this kind with this mask."""
    plans = _unmasked_plans if mask is None else mask.__dict__.get("_plans")
    return None if plans is None else cast(AttentionPlan | None, plans.get(key))


def store_plan(key: Hashable, call: AttentionCall, path: Callable[[AttentionCall], ComputeAttention]) -> None:
    """Store a plan for calls such as ``call``, which was served. ``path`` chooses the function that did so.

    With a mask, the plan is built on the second call: many masks serve one call only.
    """
    if call.mask is None:
        _unmasked_plans.get_or_compute(key, lambda: build_plan(call, path(call)))
        return
    plans: BoundedCache = call.mask.__dict__.setdefault("_plans", BoundedCache(MAX_PLANS_PER_MASK))
    if plans.contains(key):
        plans.replace(key, build_plan(call, path(call)))
    else:
        plans.get_or_compute(key, lambda: None)


def build_plan(call: AttentionCall, run: ComputeAttention) -> AttentionPlan:
    """The plan with the least work for a call that the path ``run`` serves."""
    if run is dispatch._run_sdpa and call.shape.device.type in ("cpu", "cuda"):
        plan = _build_sdpa_plan(call)
    elif type(call.score) is Additive and all(run is not path.run for path in _PATHS):
        plan = _build_additive_step_plan(call)
    else:
        plan = None
    return plan or _build_checked_plan(call, run)


# ---------------------------------------------------------------------------------------- the plans


def _build_checked_plan(call: AttentionCall, run: ComputeAttention) -> AttentionPlan:
    """Reuse what was derived from shapes and run the path. Serves every call."""
    derived = {**vars(call), **dict.fromkeys(("query", "key", "value", "score", "mask", "visible"))}
    plain = _is_plain(call.score)
    unchecked = type(call.score) in (ScaledDot, Dot) and not isinstance(call.key, PreparedKeys)

    def plan(query: Tensor, key: Any, value: Tensor, score: Score | None, mask: Mask | None) -> Tensor | None:
        score = DEFAULT_SCORE if score is None else score
        if not unchecked:
            score.check_inputs(query, key)
            if _is_plain(score) != plain:
                return None
        again = object.__new__(AttentionCall)
        again.__dict__.update(derived, query=query, key=key, value=value, score=score)
        again.__dict__.update(mask=mask, visible=mask)
        return run(again)

    return plan


def _is_plain(score: Score) -> object:
    """What the choice of a path depends on besides the type of a score."""
    return (score.uses_standard_formula, len(score.v)) if isinstance(score, Additive | Concat) else None


def _build_sdpa_plan(call: AttentionCall) -> AttentionPlan | None:
    """One call of PyTorch's SDPA, with the mask as a flag or as a tensor that is ready."""
    value = cast(Tensor, call.value)
    dims = call.shape.num_leading_dims
    tensors = (call.query, call.key, value)
    if type(call.score) is General or isinstance(call.key, PreparedKeys) or dims not in (1, 2):
        return None
    if call.group_size == 1 and any(cast(Tensor, x).shape[:-2] != call.leading_shape for x in tensors):
        return None
    if call.group_size > 1 and any(cast(Tensor, x).shape[0] != call.leading_shape[0] for x in tensors):
        return None
    scale, dropout, grouped = call.dot_scale(), float(call.dropout), call.group_size > 1
    flag = dispatch._get_causal_kwargs(call)
    if call.mask is None or flag is not None:
        if call.mask is not None and _has_dead_keys(call):
            return None
        causal = bool(flag and flag["is_causal"])

        if dims == 2:

            def unmasked(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor:
                return F.scaled_dot_product_attention(
                    query, key, value, None, dropout, causal, scale=scale, enable_gqa=grouped
                )
        else:

            def unmasked(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor:
                query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
                out = F.scaled_dot_product_attention(query, key, value, None, dropout, causal, scale=scale)
                return out.squeeze(0)

        return unmasked
    if call.shape.device.type != "cpu":
        return None  # there, keys and values are cleaned without looking at them
    ready = _build_additive_mask(call)
    if ready is None:
        return None
    added, alive = ready
    dead = _has_dead_keys(call)

    def masked(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor | None:
        if dead and not _are_finite(key, value):
            return None
        if dims == 1:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        out = F.scaled_dot_product_attention(
            query, key, value, added, dropout, False, scale=scale, enable_gqa=grouped
        )
        if dims == 1:
            out = out.squeeze(0)
        return out if alive is None else out.where(alive, 0)

    return masked


def _build_additive_mask(call: AttentionCall) -> tuple[Tensor, Tensor | None] | None:
    """The mask as SDPA adds it to the scores, and the rows that may attend to anything (None: all of them).

    None if it is too large to keep. SDPA would convert a boolean mask to this tensor at every call.
    """
    mask, at = cast(Mask, call.mask), call.shape
    one_row = mask.is_query_independent()
    if not one_row:
        sample = mask.to_dense_rows(at, slice(0, 1))
        if sample.numel() * at.num_queries > MAX_MASK_ELEMENTS:
            return None
        if chunking.rows_per_chunk(at.num_queries, call.leading_shape.numel() * at.num_keys) < at.num_queries:
            return None
    with torch.inference_mode(False), torch.no_grad():
        allowed, alive, _ = dispatch._build_allowed_rows(call, slice(0, at.num_queries))
        allowed = allowed if alive is None else allowed | ~alive
        added = torch.zeros(allowed.shape, dtype=call.query.dtype).masked_fill_(~allowed, -torch.inf)
        return (added if at.num_leading_dims == 2 else added.unsqueeze(0)), alive


def _build_additive_step_plan(call: AttentionCall) -> AttentionPlan | None:
    """Additive attention of one query a row over prepared keys, on the CPU."""
    score, value = call.score, cast(Tensor, call.value)
    assert isinstance(score, Additive)
    equal = isinstance(call.key, PreparedKeys) and (
        call.query.shape[:-2] == call.key.keys.shape[:-2] == value.shape[:-2] == call.leading_shape
    )
    if call.shape.device.type != "cpu":
        return None
    if (
        not equal
        or call.shape.num_leading_dims != 1
        or call.shape.num_queries != 1
        or call.shape.num_keys == 0
        or call.dropout
    ):
        return None
    if call.scale is not None or call.query.dtype not in (torch.float32, torch.float64):
        return None
    blocked, dead = None, False
    if call.mask is not None:
        if not (call.mask.is_query_independent() and call.mask.has_no_empty_rows(call.shape)):
            return None
        dead = _has_dead_keys(call)
        with torch.inference_mode(False):
            blocked = ~call.mask.to_dense_rows(call.shape, slice(0, 1)).squeeze(-2)  # (B or 1, K)
    dtype, device = call.query.dtype, call.query.device
    shapes = score.query_weight.shape, score.key_weight.shape, score.v.shape

    def step(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor | None:
        modules, keys = score._modules, key.keys
        linear, key_linear = modules.get("query"), modules.get("key")
        if type(linear) is not nn.Linear or type(key_linear) is not nn.Linear or _has_hooks(score):
            return None
        w: Any = linear._parameters.get("weight")
        u: Any = key_linear._parameters.get("weight")
        v: Any = score._parameters.get("v")
        if not (type(w) in _PLAIN and type(u) in _PLAIN and type(v) in _PLAIN):
            return None
        same = (w.shape, u.shape, v.shape) == shapes and v.dtype is dtype and v.device == device
        if not same or key.maker is not score or key.made_by != "Additive":
            return None
        if key.made_at < 0 or u.is_inference() or key.made_at != u._version:
            return None
        if dead and not _are_finite(keys, value):
            return None
        scores = (F.linear(query, w) + keys).tanh() @ v  # (B, K)
        if blocked is not None:
            scores = scores.masked_fill(blocked, -torch.inf)
        return torch.bmm(scores.softmax(-1).unsqueeze(1), value)

    return step


def _has_dead_keys(call: AttentionCall) -> bool:
    """Whether there may be keys that no query sees, whose content must not spread."""
    return not cast(Mask, call.mask).has_no_hidden_keys(call.shape)


def _are_finite(key: Tensor, value: Tensor) -> bool:
    """As ``call.known_finite`` of both, on the CPU. Else those that nobody sees must be replaced by zeros."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # costs less than detaching both
    try:
        return math.isfinite(_norm(key).item()) and math.isfinite(_norm(value).item())
    finally:
        torch._C._set_grad_enabled(before)


def _has_hooks(score: Any) -> bool:
    """Whether calling the module does more than its ``forward``."""
    return bool(
        score._forward_hooks
        or score._forward_pre_hooks
        or score._backward_hooks
        or score._backward_pre_hooks
        or score._compiled_call_impl is not None
        or "forward" in score.__dict__
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )
