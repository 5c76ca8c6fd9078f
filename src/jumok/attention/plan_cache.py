"""Plan cache: the checks and the choice of a path are made once for a kind of call and then reused.

The first two calls of a kind run every check and choose a path; the second stores a plan. A later call with
equal shapes, dtypes, devices and options runs the plan directly. A plan never holds arguments of a call.
Plans of calls with a mask are stored on the mask, which is immutable, and hold its additive form. All caches
are bounded.

A plan may decline a call by returning None, for example when the padding holds NaN. The call then takes the
full path, so results and errors are always those of the full path. Calls that are traced, transformed
(``torch.func``), checkpointed, converted by autocast, or made with tensor subclasses never use a plan.
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
from jumok.attention.arguments import DEFAULT_SCORE, AttentionCall, get_autocast_dtype
from jumok.attention.caching import BoundedCache
from jumok.attention.compiled_block import CompiledBlock
from jumok.attention.mask_types import AndMask, KeyMask, Mask, NotMask, OrMask, PaddingMask, WindowMask
from jumok.attention.packed_masks import DocumentMask, PackedMask
from jumok.attention.paths.reference import run_reference
from jumok.attention.paths.sdpa import build_allowed_rows, get_causal_kwargs, run_sdpa
from jumok.attention.prepared_keys import KeyLike, PreparedKeys
from jumok.attention.scores import Additive, Concat, Dot, General, ScaledDot, Score

# Called with query, key, value, score and mask. It returns None if the full path must serve the call.
AttentionPlan = Callable[[Tensor, Any, Tensor, Score | None, Mask | None], Tensor | None]

ComputeAttention = Callable[[AttentionCall], Tensor]  # computes a checked call

MAX_PLANS = 1024  # plans of calls without a mask
MAX_PLANS_PER_MASK = 8
MAX_MASK_ELEMENTS = 1 << 16  # largest additive mask that a plan holds, unless it has a single row

_PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})  # tensor types without behavior of their own
_SCORES = frozenset({type(None), ScaledDot, Dot, General, Additive, Concat})
_MASKS = frozenset({PaddingMask, KeyMask, WindowMask, AndMask, OrMask, NotMask, DocumentMask, PackedMask})
_NUMBERS = frozenset({type(None), float, int})  # not bool: True == 1, but True is an error

_PATHS = dispatch.PATHS
_unmasked_plans = BoundedCache(MAX_PLANS)

_in_transform = torch._C._are_functorch_transforms_active
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_in_function_mode = torch._C._is_torch_function_mode_enabled
_in_autocast = torch._C._is_any_autocast_enabled
_get_jit_trace = torch._C._get_tracing_state
_get_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_norm = torch.linalg.vector_norm


# -------------------------------------------------------------------------------------- the cache


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
    """Return everything that the checks and the choice of a path depend on, except the mask.

    None if the call must take the full path. Not called if :func:`needs_full_path`.
    """
    if bias is not None or softcap is not None:
        return None
    is_prepared = type(key) is PreparedKeys
    keys: Any = key.keys if is_prepared else key  # type: ignore[union-attr]
    score_type = type(score)
    if not (
        type(query) in _PLAIN_TENSORS
        and type(keys) in _PLAIN_TENSORS
        and type(value) in _PLAIN_TENSORS
        and score_type in _SCORES
        and type(scale) in _NUMBERS
        and type(dropout) in _NUMBERS
        and (mask is None or type(mask) in _MASKS)
    ):
        return None
    autocast_dtype = None
    if _in_autocast():
        autocast_dtype = get_autocast_dtype(query.device)
        if autocast_dtype is not None and not {query.dtype, keys.dtype, value.dtype} <= {autocast_dtype, torch.float64}:
            return None  # the full path converts these inputs
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
        score_type,
        is_prepared,
        scale,
        dropout,
        autocast_dtype,
    )


def needs_full_path() -> bool:
    """Return whether something must see each check and operation of a call, such as a trace."""
    return (
        torch.compiler.is_compiling()
        or dispatch.PATHS is not _PATHS  # a test or a benchmark restricts the choice
        or _in_transform()
        or _num_dispatch_modes() > 0
        or _in_function_mode()
        or _get_jit_trace() is not None
        or _get_saved_tensor_hooks(False) is not None  # a checkpoint needs the same operations in both runs
    )


def find_plan(key: Hashable, mask: Mask | None) -> AttentionPlan | None:
    """Return the stored plan for calls of this kind with this mask, or None."""
    plans = _unmasked_plans if mask is None else mask.__dict__.get("_plans")
    return None if plans is None else cast(AttentionPlan | None, plans.get(key))


def store_plan(
    key: Hashable, call: AttentionCall, choose_function: Callable[[AttentionCall], ComputeAttention]
) -> None:
    """Store a plan for calls such as ``call``, whose result is known.

    ``choose_function`` returns the function that computed it. The plan is built on the second call of a kind:
    many masks and lengths serve one call only.
    """
    plans = _unmasked_plans
    if call.mask is not None:
        plans = call.mask.__dict__.get("_plans") or call.mask.__dict__.setdefault(
            "_plans", BoundedCache(MAX_PLANS_PER_MASK)
        )
    plans.replace(key, build_plan(call, choose_function(call)) if key in plans else None)


def build_plan(call: AttentionCall, run: ComputeAttention) -> AttentionPlan:
    """Return the plan with the least overhead for a call that ``run`` computes."""
    if run is run_sdpa and call.shape.device.type in ("cpu", "cuda"):
        plan = _build_sdpa_plan(call)
    elif type(call.score) is Additive and run is run_reference:
        plan = _build_additive_step_plan(call)
    else:
        plan = None
    return plan or _build_checked_plan(call, run)


# -------------------------------------------------------------------------------------- the plans


def _build_checked_plan(call: AttentionCall, run: ComputeAttention) -> AttentionPlan:
    """Return a plan that reuses the values derived from shapes and runs the path. Serves every call."""
    arguments = ("query", "key", "value", "score", "mask", "effective_mask")
    derived_values = {**vars(call), **dict.fromkeys(arguments)}
    score_state = _get_score_state(call.score)
    needs_no_check = type(call.score) in (ScaledDot, Dot) and not isinstance(call.key, PreparedKeys)

    def plan(query: Tensor, key: Any, value: Tensor, score: Score | None, mask: Mask | None) -> Tensor | None:
        score = DEFAULT_SCORE if score is None else score
        if not needs_no_check:
            score.check_inputs(query, key)
            if _get_score_state(score) != score_state:
                return None
        new_call = object.__new__(AttentionCall)
        new_call.__dict__.update(derived_values, query=query, key=key, value=value, score=score)
        new_call.__dict__.update(mask=mask, effective_mask=mask)
        return run(new_call)

    return plan


def _get_score_state(score: Score) -> object:
    """Return what the choice of a path depends on besides the type of a score."""
    return (score.uses_standard_formula, len(score.v)) if isinstance(score, Additive | Concat) else None


def _build_sdpa_plan(call: AttentionCall) -> AttentionPlan | None:
    """Return a plan that calls SDPA once, with the mask as a flag or as a precomputed tensor."""
    value = cast(Tensor, call.value)
    num_dims = call.shape.num_leading_dims
    tensors = (call.query, call.key, value)
    if type(call.score) is General or isinstance(call.key, PreparedKeys) or num_dims not in (1, 2):
        return None
    if call.group_size == 1 and any(cast(Tensor, x).shape[:-2] != call.leading_shape for x in tensors):
        return None
    if call.group_size > 1 and any(cast(Tensor, x).shape[0] != call.leading_shape[0] for x in tensors):
        return None
    scale, dropout, enable_gqa = call.dot_scale(), float(call.dropout), call.group_size > 1
    causal_kwargs = get_causal_kwargs(call)
    if call.mask is None or causal_kwargs is not None:
        if call.mask is not None and _may_have_hidden_keys(call):
            return None
        is_causal = bool(causal_kwargs and causal_kwargs["is_causal"])

        if num_dims == 2:

            def run_unmasked(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor:
                return F.scaled_dot_product_attention(
                    query, key, value, None, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
                )
        else:

            def run_unmasked(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor:
                query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
                out = F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal, scale=scale)
                return out.squeeze(0)

        return run_unmasked
    if call.shape.device.type != "cpu":
        return None  # on a GPU, hidden keys and values are replaced without checking them
    prepared_mask = _build_additive_mask(call)
    if prepared_mask is None:
        return None
    attn_mask, is_nonempty = prepared_mask
    may_have_hidden_keys = _may_have_hidden_keys(call)

    def run_masked(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor | None:
        if may_have_hidden_keys and not _are_finite(key, value):
            return None
        if num_dims == 1:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, False, scale=scale, enable_gqa=enable_gqa
        )
        if num_dims == 1:
            out = out.squeeze(0)
        return out if is_nonempty is None else out.where(is_nonempty, 0)

    return run_masked


def _build_additive_mask(call: AttentionCall) -> tuple[Tensor, Tensor | None] | None:
    """Return the mask as SDPA adds it to the scores, and which rows see any key (None if all do).

    None if it is too large to store. SDPA would convert a boolean mask to this tensor at every call.
    """
    mask, shape = cast(Mask, call.mask), call.shape
    if not mask.is_query_independent():
        first_row = mask.to_dense_rows(shape, slice(0, 1))
        if first_row.numel() * shape.num_queries > MAX_MASK_ELEMENTS:
            return None
        elements_per_row = call.leading_shape.numel() * shape.num_keys
        if chunking.rows_per_chunk(shape.num_queries, elements_per_row) < shape.num_queries:
            return None
    with torch.inference_mode(False), torch.no_grad():
        allowed, is_nonempty, _ = build_allowed_rows(call, slice(0, shape.num_queries))
        allowed = allowed if is_nonempty is None else allowed | ~is_nonempty
        attn_mask = torch.zeros(allowed.shape, dtype=call.query.dtype).masked_fill_(~allowed, -torch.inf)
        return (attn_mask if shape.num_leading_dims == 2 else attn_mask.unsqueeze(0)), is_nonempty


def _build_additive_step_plan(call: AttentionCall) -> AttentionPlan | None:
    """Return a plan for additive attention of one query per row over prepared keys, on the CPU."""
    score, value = call.score, cast(Tensor, call.value)
    assert isinstance(score, Additive)
    has_equal_shapes = isinstance(call.key, PreparedKeys) and (
        call.query.shape[:-2] == call.key.keys.shape[:-2] == value.shape[:-2] == call.leading_shape
    )
    if call.shape.device.type != "cpu":
        return None
    if (
        not has_equal_shapes
        or call.shape.num_leading_dims != 1
        or call.shape.num_queries != 1
        or call.shape.num_keys == 0
        or call.dropout
    ):
        return None
    if call.scale is not None or call.query.dtype not in (torch.float32, torch.float64):
        return None
    blocked, may_have_hidden_keys = None, False
    if call.mask is not None:
        if not (call.mask.is_query_independent() and call.mask.has_no_empty_rows(call.shape)):
            return None
        may_have_hidden_keys = _may_have_hidden_keys(call)
        with torch.inference_mode(False):
            blocked = ~call.mask.to_dense_rows(call.shape, slice(0, 1)).squeeze(-2)  # (B or 1, K)
    dtype, device = call.query.dtype, call.query.device
    weight_shapes = score.query_weight.shape, score.key_weight.shape, score.v.shape

    def run_step(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor | None:
        modules, keys = score._modules, key.keys
        query_linear, key_linear = modules.get("query"), modules.get("key")
        if type(query_linear) is not nn.Linear or type(key_linear) is not nn.Linear or has_hooks(score):
            return None
        w: Any = query_linear._parameters.get("weight")
        u: Any = key_linear._parameters.get("weight")
        v: Any = score._parameters.get("v")
        if not (type(w) in _PLAIN_TENSORS and type(u) in _PLAIN_TENSORS and type(v) in _PLAIN_TENSORS):
            return None
        if (w.shape, u.shape, v.shape) != weight_shapes or v.dtype is not dtype or v.device != device:
            return None
        if key.owner is not score or key.score_name != "Additive":
            return None
        if key.owner_version < 0 or u.is_inference() or key.owner_version != u._version:
            return None
        if may_have_hidden_keys and not _are_finite(keys, value):
            return None
        scores = (F.linear(query, w) + keys).tanh() @ v  # (B, K)
        if blocked is not None:
            scores = scores.masked_fill(blocked, -torch.inf)
        return torch.bmm(scores.softmax(-1).unsqueeze(1), value)

    return run_step


def _may_have_hidden_keys(call: AttentionCall) -> bool:
    """Return whether there may be keys that no query sees, which must not affect the result."""
    return not cast(Mask, call.mask).has_no_hidden_keys(call.shape)


def _are_finite(key: Tensor, value: Tensor) -> bool:
    """Return ``is_known_finite`` of both, on the CPU. If False, hidden keys must be replaced by zeros."""
    grad_was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # faster than detaching both
    try:
        return math.isfinite(_norm(key).item()) and math.isfinite(_norm(value).item())
    finally:
        torch._C._set_grad_enabled(grad_was_enabled)


def has_hooks(module: Any) -> bool:
    """Return whether calling the module does more than the ``forward`` of its class."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or (module._compiled_call_impl is not None and not isinstance(module, CompiledBlock))
        or "forward" in module.__dict__
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )
