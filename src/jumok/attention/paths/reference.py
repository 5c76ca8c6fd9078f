"""The reference path: softmax(score(Q, K)) V in plain PyTorch. It computes every call."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention import chunking
from jumok.attention.additive import count_elements_per_row, disable_autocast
from jumok.attention.arguments import AttentionCall
from jumok.attention.gpu_support import HALF_DTYPES, triton_unsupported_reason
from jumok.attention.mask_types import Mask
from jumok.attention.paths.sdpa import is_wide_decoder_step
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import TanhScore


def describe_reference(call: AttentionCall) -> str:
    """Describe how the reference path computes the call."""
    if _uses_fused_scores(call):
        return "scores by our fused Triton kernel, then softmax and mix in PyTorch"
    return "plain PyTorch, in chunks of queries"


def run_reference(call: AttentionCall) -> Tensor:
    """Compute the output ``(…, Q, Dv)`` in chunks of queries, so that memory stays bounded."""
    keys, value = (call.repeat_kv(x) for x in (call.prepare_keys(), call.prepare_value()))

    def compute_rows(rows: slice) -> Tensor:
        weights = compute_row_weights(call, keys, rows)
        if call.dropout:
            weights = F.dropout(weights, call.dropout)
        return weights @ value

    elements_per_row = call.leading_shape.numel() * call.shape.num_keys
    if isinstance(call.score, TanhScore) and not _uses_fused_scores(call):
        elements_per_row = count_elements_per_row(call.query, keys)
    inputs = tuple(x for x in (call.query, keys, value, call.bias) if x is not None)
    return chunking.map_row_chunks(compute_rows, call.shape.num_queries, elements_per_row, inputs)


def compute_row_weights(call: AttentionCall, keys: Tensor, rows: slice) -> Tensor:
    """Compute the weights of some rows, ``(…, rows, K)``, with a softmax in at least float32.

    ``keys`` are the prepared keys, one head for every query head.
    """
    scores = _compute_row_scores(call, keys, rows)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    allowed = None if call.mask is None else call.mask.to_dense_rows(call.shape, rows)
    bias = call.slice_bias(rows)
    if bias is not None:
        scores = scores + bias
        unblocked = bias != -torch.inf
        allowed = unblocked if allowed is None else allowed & unblocked
    if allowed is None:
        return scores.softmax(-1).to(call.query.dtype)
    if bias is None and cast(Mask, call.mask).has_no_empty_rows(call.shape):
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1).to(call.query.dtype)
    # A row without any key gets equal scores, whose softmax and gradient are finite. Then it is zeroed.
    is_nonempty = allowed.any(-1, keepdim=True)
    masked_score = torch.where(is_nonempty, -torch.inf, 0.0).to(scores.dtype)
    weights = torch.where(allowed, scores, masked_score).softmax(-1)
    return weights.masked_fill(~is_nonempty, 0.0).to(call.query.dtype)


def _compute_row_scores(call: AttentionCall, keys: Tensor, rows: slice) -> Tensor:
    """Compute the scaled scores of some rows, in at least float32."""
    query = call.query[..., rows, :]
    if call.dot_score is not None:
        with disable_autocast(query.device):
            if query.dtype in HALF_DTYPES and not is_wide_decoder_step(call):
                # In bfloat16, scores of 16 and more would have a rounding error of 0.06.
                query, keys = query.float(), keys.float()
            scores = (query * call.dot_scale()) @ keys.transpose(-1, -2)
    else:
        scores = call.score(query, PreparedKeys(keys, call.score.name))
        if call.scale is not None:
            scores = scores * call.scale
    return scores.float() if scores.dtype in HALF_DTYPES else scores


def _uses_fused_scores(call: AttentionCall) -> bool:
    return isinstance(call.score, TanhScore) and triton_unsupported_reason(call.query) is None
