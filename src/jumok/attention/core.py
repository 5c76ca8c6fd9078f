"""Attention: softmax(score(Q, K)) V. The only place where it happens.

Shapes: ``…`` any leading dimensions (batch, heads), ``Q`` queries, ``K`` keys, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from jumok.attention import chunking, dispatch, plan_cache
from jumok.attention.additive import count_elements_per_row, disable_autocast
from jumok.attention.arguments import (
    AttentionCall,
    build_attention_call,
    check_mix_arguments,
    is_known_finite,
)
from jumok.attention.dispatch import PathExplanation
from jumok.attention.gpu_support import triton_unsupported_reason
from jumok.attention.mask_types import Mask
from jumok.attention.paths.varlen import HALF_DTYPES
from jumok.attention.prepared_keys import KeyLike, PreparedKeys
from jumok.attention.scores import Score, TanhScore
from jumok.errors import InputError


def attend(
    query: Tensor,
    key: KeyLike,
    value: Tensor,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """For every query, the mean of the values weighted by how well the query fits their keys.

    Equal to ``mix(weights(query, key, …), value)``, on the fastest path there is for the arguments;
    :func:`explain` says which. A query that may attend to nothing gets zeros.

    Coming from ``F.scaled_dot_product_attention``: ``attn_mask=t`` is ``mask=jumok.masks.tensor(t)`` (a float
    one ``bias=t``), ``is_causal=True`` is ``mask=jumok.masks.causal(0)``, ``dropout_p`` is ``dropout``, and
    grouped queries need no flag.

    Args:
        query: ``(…, Q, Dq)``.
        key: ``(…, K, Dk)``, or what ``score.prepare(keys)`` gave.
        value: ``(…, K, Dv)``. With four dimensions ``(B, H, ·, ·)``, query heads may be a multiple of
            the heads of key and value (grouped queries).
        score: one of :mod:`jumok.scores`; None is scaled dot-product.
        mask: one of :mod:`jumok.masks`; True means "may attend".
        bias: added to the scores, broadcasts to ``(…, Q, K)``; -inf counts as masked.
        scale: the factor on the scores; None is 1/√D for scaled dot-product and 1 for the others.
        softcap: ``softcap · tanh(score / softcap)``, before the bias.
        dropout: the share of the weights that is dropped, always: ``dropout=p if self.training else 0.0``.

    Returns:
        ``(…, Q, Dv)``

    >>> import jumok, torch
    >>> query, key, value = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 3)
    >>> jumok.attend(query, key, value, mask=jumok.masks.padding([4, 7])).shape
    torch.Size([2, 5, 3])
    """
    kind = plan = None
    if not torch.compiler.is_compiling() and _compute_output is _UNOBSERVED:
        kind = plan_cache.make_plan_key(query, key, value, score, mask, bias, scale, softcap, dropout)
        plan = None if kind is None else plan_cache.find_plan(kind, mask)
        if plan is not None:
            out = plan(query, key, value, score, mask)
            if out is not None:
                return out
    call = build_attention_call(query, key, _require_value(value), score, mask, bias, scale, softcap, dropout)
    out = _compute_output(call)
    if kind is not None and plan is None:
        plan_cache.store_plan(kind, call, _path)
    return out


def weights(
    query: Tensor,
    key: KeyLike,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """How much each query attends to each key, ``(…, Q, K)``: rows sum to one, or to zero with none allowed.

    The arguments are those of :func:`attend`.

    >>> import jumok, torch
    >>> query, key = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> jumok.weights(query, key, score=jumok.scores.Dot(), mask=jumok.masks.padding(2))
    tensor([[0.2689, 0.7311, 0.0000]])
    """
    return _compute_weights(build_attention_call(query, key, None, score, mask, bias, scale, softcap, 0.0))


def mix(weights: Tensor, value: Tensor, *, assume_finite: bool = False) -> Tensor:
    """The values ``(…, K, Dv)`` mixed by the weights ``(…, Q, K)``: ``(…, Q, Dv)``.

    A value that no query gives any weight never reaches the result, whatever it holds. ``assume_finite``: it is
    known that all of them are finite, and need not be looked at; a loop over the same values is faster so.

    >>> import jumok, torch
    >>> jumok.mix(torch.tensor([[0.25, 0.75, 0.0]]), torch.tensor([[4.0], [8.0], [float("nan")]]))
    tensor([[7.]])
    """
    group = check_mix_arguments(weights, value)
    if group > 1:
        value = value.repeat_interleave(group, dim=1)
    if assume_finite or is_known_finite(value):
        return weights @ value
    used = (weights.detach() != 0).any(-2)  # (…, K)
    # A finite value stays even if unused: the gradient of a weight that is 0 (hard attention) depends on it.
    return weights @ value.where(used[..., None] | value.isfinite(), 0)


def explain(
    query: Tensor,
    key: KeyLike,
    value: Tensor,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> PathExplanation:
    """Which path :func:`attend` takes for these arguments, and why not a faster one.

    >>> import jumok, torch
    >>> q = torch.randn(1, 2, 3, 8)
    >>> print(jumok.explain(q, q, q, mask=jumok.masks.causal()))
    sdpa: PyTorch's scaled_dot_product_attention, causal by flag
    """
    return dispatch.choose_path(
        build_attention_call(query, key, _require_value(value), score, mask, bias, scale, softcap, dropout)
    )


def _require_value(value: Tensor | None) -> Tensor:
    if value is None:
        raise InputError("value is None; give the values (…, K, Dv), or use weights() for the weights alone")
    return value


# ------------------------------------------- every call, once checked: whoever watches, watches these


def _compute_output(call: AttentionCall) -> Tensor:
    return _path(call)(call)


_UNOBSERVED = (
    _compute_output  # watch and export replace the name _attended; plans are used only while nobody does
)


def _path(call: AttentionCall) -> Callable[[AttentionCall], Tensor]:
    path = dispatch.choose_path(call).path
    return _compute_reference if path is None else path.run


def _compute_weights(call: AttentionCall) -> Tensor:
    return _compute_row_weights(call, call.repeat_kv(call.prepare_keys()), slice(0, call.shape.num_queries))


# --------------------------------------------------------------------------------- the reference


def _compute_reference(call: AttentionCall) -> Tensor:
    """softmax(score(Q, K)) V in plain PyTorch, some queries at a time so that memory stays bounded."""
    keys, value = (call.repeat_kv(x) for x in (call.prepare_keys(), call.prepare_value()))

    def rows(part: slice) -> Tensor:
        weights = _compute_row_weights(call, keys, part)
        if call.dropout:
            weights = torch.nn.functional.dropout(weights, call.dropout)
        return weights @ value

    each = call.leading_shape.numel() * call.shape.num_keys
    if isinstance(call.score, TanhScore) and triton_unsupported_reason(call.query) is not None:
        each = count_elements_per_row(call.query, keys)
    uses = tuple(x for x in (call.query, keys, value, call.bias) if x is not None)
    return chunking.map_row_chunks(rows, call.shape.num_queries, each, uses)


def _compute_row_weights(call: AttentionCall, keys: Tensor, rows: slice) -> Tensor:
    """The weights of some rows, ``(…, rows, K)``; ``keys`` for every head. Softmax in at least float32."""
    scores = _compute_row_scores(call, keys, rows)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    allowed = None if call.mask is None else call.mask.to_dense_rows(call.shape, rows)
    if call.bias is not None:
        bias = call.bias[..., rows, :] if call.bias.dim() > 1 and call.bias.shape[-2] > 1 else call.bias
        scores = scores + bias
        finite = bias != -torch.inf
        allowed = finite if allowed is None else allowed & finite
    if allowed is None:
        return scores.softmax(-1).to(call.query.dtype)
    if call.bias is None and cast(Mask, call.mask).has_no_empty_rows(call.shape):
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1).to(call.query.dtype)
    # A row with nothing allowed is given equal scores, which have a softmax and a gradient, and zeroed after.
    alive = allowed.any(-1, keepdim=True)
    blocked = torch.where(alive, -torch.inf, 0.0).to(scores.dtype)
    weights = torch.where(allowed, scores, blocked).softmax(-1)
    return weights.masked_fill(~alive, 0.0).to(call.query.dtype)


def _compute_row_scores(call: AttentionCall, keys: Tensor, rows: slice) -> Tensor:
    """Scaled scores of some rows, in at least float32."""
    query = call.query[..., rows, :]
    if call.dot_score is not None:
        with disable_autocast(query.device):
            if query.dtype in HALF_DTYPES and not dispatch.is_wide_decoder_step(call):
                # Rounded to the query's type, scores of 16 and more would be 0.06 off in bfloat16.
                query, keys = query.float(), keys.float()
            scores = (query * call.dot_scale()) @ keys.transpose(-1, -2)
    else:
        scores = call.score(query, PreparedKeys(keys, call.score.name))
        if call.scale is not None:
            scores = scores * call.scale
    return scores.float() if scores.dtype in HALF_DTYPES else scores
