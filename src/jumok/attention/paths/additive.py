"""Additive attention of many queries per row, with scores by Triton kernels."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from jumok.attention import chunking
from jumok.attention.arguments import AttentionCall
from jumok.attention.gpu_support import triton_unsupported_reason
from jumok.attention.paths import NO_KEYS_REASON, NOT_APPLICABLE
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import TanhScore


def additive_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the fused computation does not serve the call, or None if it does."""
    reason = plain_additive_unsupported_reason(call)
    if reason is not None:
        return reason
    if call.shape.num_queries == 0:
        return "there are no queries"
    if call.mask is not None and not call.mask.has_no_empty_rows(call.shape):
        return "a query may have no allowed key"
    num_elements = call.leading_shape.numel() * call.shape.num_keys
    if chunking.rows_per_chunk(call.shape.num_queries, num_elements) < call.shape.num_queries:
        return "the scores are so many that they are computed in chunks of queries"
    return None


def plain_additive_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why Triton kernels for v · tanh(W s + U h), its softmax and mix do not serve the call, or None."""
    if not isinstance(call.score, TanhScore):
        return NOT_APPLICABLE
    if not call.score.uses_standard_formula:
        return "it serves Additive and Concat as they are"
    reason = triton_unsupported_reason(call.query)
    if reason is not None:
        return reason
    if call.shape.num_keys == 0 or 0 in call.leading_shape:
        return NO_KEYS_REASON
    for name in ("bias", "scale", "softcap"):
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.dropout:
        return "it has no dropout"
    key = call.key.keys if isinstance(call.key, PreparedKeys) else call.key
    value = cast(Tensor, call.value)
    if not call.leading_shape == key.shape[:-2] == value.shape[:-2] == call.query.shape[:-2]:
        return "query, key and value must have equal leading dimensions"
    return None


def run_additive(call: AttentionCall) -> Tensor:
    """Compute the projections, scores, softmax and mix in one autograd function."""
    from jumok.attention.kernels.additive_attention import fused_additive_attention

    score, query, value = cast(TanhScore, call.score), call.query, call.prepare_value()
    if isinstance(call.key, PreparedKeys) or score.key_bias is not None:
        key, key_weight = call.prepare_keys(), None
    else:
        key, key_weight = call.zero_hidden_keys(call.key), score.key_weight.to(query.dtype)
    blocked = _find_blocked(call)
    if query.dim() != 3:
        query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    # Under autocast the weights are still float32.
    output = fused_additive_attention(
        query, key, value, score.query_weight.to(query.dtype), key_weight, score.v, blocked
    )
    return output if output.dim() == call.query.dim() else output.reshape(*call.query.shape[:-1], -1)


def _find_blocked(call: AttentionCall) -> Tensor | None:
    """Return the pairs that the mask blocks, of the shape that the scores of flattened batches broadcast with."""
    mask = call.mask
    if mask is None:
        return None

    def compute() -> Tensor:
        allowed = mask.to_dense_rows(call.shape, slice(0, call.shape.num_queries))
        if len(call.leading_shape) != 1:
            allowed = allowed.expand(*call.leading_shape, *allowed.shape[-2:]).flatten(0, -3)
        return ~allowed

    # Pairs of a mask that differs between queries take much memory, and are not kept.
    if not mask.is_query_independent():
        return compute()
    return mask.get_or_compute(("additive", call.shape, call.leading_shape), compute)
