"""Plans: how attention calls of one kind are computed once their arguments are known to be valid.

A plan holds what follows from the shapes, dtypes, options and mask of a call, but none of its tensors. The
cache of plans is :mod:`jumok.attention.plan_cache`. There are three kinds, and :func:`build_plan` chooses:

- the SDPA plan: a single call of ``F.scaled_dot_product_attention``, with the mask as a flag or in the additive
  form that SDPA needs. (SDPA would convert a boolean mask at every call.)
- the additive step plan: the four operations of additive attention of one query per row over prepared keys, on
  the CPU, as in a recurrent decoder
- the general plan, for all other calls: the path runs as usual, and only the checks are saved
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention import chunking
from jumok.attention.arguments import DEFAULT_SCORE, AttentionCall
from jumok.attention.compiled_block import has_hooks
from jumok.attention.mask_types import Mask
from jumok.attention.paths.reference import run_reference
from jumok.attention.paths.sdpa import build_allowed_rows, get_causal_kwargs, run_sdpa
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import Additive, Concat, Dot, General, ScaledDot, Score

# Called with query, key, value, score and mask. It returns None if the full path must serve the call.
AttentionPlan = Callable[[Tensor, Any, Tensor, Any, Any], Tensor | None]
ComputeAttention = Callable[[AttentionCall], Tensor]  # computes a checked call

MAX_MASK_ELEMENTS = 1 << 16  # largest additive mask that a plan holds, unless it has a single row

_norm = torch.linalg.vector_norm


def build_plan(call: AttentionCall, run: ComputeAttention) -> AttentionPlan:
    """Return the plan with the least overhead for calls such as this one, which ``run`` computes."""
    plan = None
    if run is run_sdpa:
        plan = _build_sdpa_plan(call)
    elif run is run_reference and type(call.score) is Additive:
        plan = _build_additive_step_plan(call)
    return plan or _build_general_plan(call, run)


def _build_general_plan(call: AttentionCall, run: ComputeAttention) -> AttentionPlan:
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


# ----------------------------------------------------------------------------------------------- SDPA


def _build_sdpa_plan(call: AttentionCall) -> AttentionPlan | None:
    """Return a plan that calls SDPA once, or None if more is needed."""
    on_cpu, num_dims = call.shape.device.type == "cpu", call.shape.num_leading_dims
    if type(call.score) is General or isinstance(call.key, PreparedKeys) or num_dims not in (1, 2):
        return None
    if not (on_cpu or call.shape.device.type == "cuda"):
        return None
    leading = call.leading_shape[:1] if call.group_size > 1 else call.leading_shape
    if any(x.shape[:-2][: len(leading)] != leading for x in (call.query, call.key, cast(Tensor, call.value))):
        return None  # the inputs broadcast
    attn_mask = is_nonempty = None
    causal_kwargs = get_causal_kwargs(call)
    if call.mask is not None and causal_kwargs is None:
        additive_mask = _build_additive_mask(call) if on_cpu else None
        if additive_mask is None:
            return None
        attn_mask, is_nonempty = additive_mask
    may_have_hidden_keys = _may_have_hidden_keys(call)
    if may_have_hidden_keys and not on_cpu:
        return None  # on a GPU, hidden keys and values are replaced without checking them
    is_3d, is_causal = num_dims == 1, bool(causal_kwargs and causal_kwargs["is_causal"])
    scale, dropout, enable_gqa = call.dot_scale(), float(call.dropout), call.group_size > 1

    def plan(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor | None:
        if may_have_hidden_keys and not _are_finite(key, value):
            return None
        if is_3d:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if is_3d:
            out = out.squeeze(0)
        return out if is_nonempty is None else out.where(is_nonempty, 0)

    return plan


def _build_additive_mask(call: AttentionCall) -> tuple[Tensor, Tensor | None] | None:
    """Return the mask as SDPA adds it to the scores, and which rows see any key (None if all do).

    None if it is too large to store.
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


# -------------------------------------------------------------------------- one step of additive attention


def _build_additive_step_plan(call: AttentionCall) -> AttentionPlan | None:
    """Return a plan for additive attention of one query per row over prepared keys, on the CPU, or None."""
    value = cast(Tensor, call.value)
    if not (
        call.shape.device.type == "cpu"
        and isinstance(call.key, PreparedKeys)
        and call.query.shape[:-2] == call.key.keys.shape[:-2] == value.shape[:-2] == call.leading_shape
        and call.shape.num_leading_dims == call.shape.num_queries == 1
        and call.shape.num_keys > 0
        and call.scale is None
        and not call.dropout
        and call.query.dtype in (torch.float32, torch.float64)
    ):
        return None
    blocked, may_have_hidden_keys = None, _may_have_hidden_keys(call)
    if call.mask is not None:
        if not (call.mask.is_query_independent() and call.mask.has_no_empty_rows(call.shape)):
            return None
        with torch.inference_mode(False):
            blocked = ~call.mask.to_dense_rows(call.shape, slice(0, 1)).squeeze(-2)  # (B or 1, K)
    score = cast(Additive, call.score)
    weight_shapes = score.query_weight.shape, score.key_weight.shape, score.v.shape
    dtype = call.query.dtype

    def plan(query: Tensor, key: Any, value: Tensor, score: Any, mask: Any) -> Tensor | None:
        weights = _read_plain_weights(score)
        if weights is None or has_hooks(score):
            return None
        w, u, v = weights
        if (w.shape, u.shape, v.shape) != weight_shapes or v.dtype is not dtype or v.device != query.device:
            return None
        if key.owner is not score or key.score_name != "Additive":
            return None
        if key.owner_version < 0 or u.is_inference() or key.owner_version != u._version:
            return None
        if may_have_hidden_keys and not _are_finite(key.keys, value):
            return None
        scores = (F.linear(query, w) + key.keys).tanh() @ v  # (B, K)
        if blocked is not None:
            scores = scores.masked_fill(blocked, -torch.inf)
        return torch.bmm(scores.softmax(-1).unsqueeze(1), value)

    return plan


def _read_plain_weights(score: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return W, U and v of an ``Additive`` score, or None if any of them is parametrized or wrapped."""
    query, key, v = score._modules.get("query"), score._modules.get("key"), score._parameters.get("v")
    if type(query) is not nn.Linear or type(key) is not nn.Linear:
        return None
    w, u = query._parameters.get("weight"), key._parameters.get("weight")
    if type(w) is nn.Parameter and type(u) is nn.Parameter and type(v) is nn.Parameter:
        return w, u, v
    return None


# ------------------------------------------------------------------------------------------ hidden keys


def _may_have_hidden_keys(call: AttentionCall) -> bool:
    """Return whether there may be keys that no query sees, which must not affect the result."""
    return call.mask is not None and not call.mask.has_no_hidden_keys(call.shape)


def _are_finite(key: Tensor, value: Tensor) -> bool:
    """Return ``is_known_finite`` of both, on the CPU. If False, hidden keys must be replaced by zeros."""
    grad_was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # faster than detaching both
    try:
        return math.isfinite(_norm(key).item()) and math.isfinite(_norm(value).item())
    finally:
        torch._C._set_grad_enabled(grad_was_enabled)
