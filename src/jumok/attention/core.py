"""Attention: softmax(score(Q, K)) V.

The formula itself is in :mod:`jumok.attention.paths.reference`. Faster paths compute the same result.

Shapes: ``…`` any leading dimensions (batch, heads), ``Q`` queries, ``K`` keys, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from jumok.attention import dispatch, plan_cache
from jumok.attention.arguments import (
    AttentionCall,
    build_attention_call,
    check_mix_arguments,
    is_known_finite,
)
from jumok.attention.dispatch import PathExplanation
from jumok.attention.mask_types import Mask
from jumok.attention.paths.reference import compute_row_weights
from jumok.attention.prepared_keys import KeyLike
from jumok.attention.scores import Score
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
    """Return for every query the mean of the values, weighted by the softmax of the scores.

    Equal to ``mix(weights(query, key, …), value)``, computed on the fastest path that supports the arguments.
    :func:`explain` names it. A query that may attend to nothing gets zeros.

    The arguments of ``F.scaled_dot_product_attention`` translate as follows: ``attn_mask=t`` is
    ``mask=jumok.masks.tensor(t)`` (``bias=t`` if it is a float), ``is_causal=True`` is
    ``mask=jumok.masks.causal(0)``, and ``dropout_p`` is ``dropout``. Grouped queries need no flag.

    Args:
        query: ``(…, Q, Dq)``.
        key: ``(…, K, Dk)``, or the result of ``score.prepare(keys)``.
        value: ``(…, K, Dv)``. With four dimensions ``(B, H, ·, ·)``, the number of query heads may be a
            multiple of the number of key and value heads (grouped queries).
        score: one of :mod:`jumok.scores`. Default: scaled dot product.
        mask: one of :mod:`jumok.masks`, where True means "may attend". Default: every query sees every key.
        bias: added to the scores. It broadcasts to ``(…, Q, K)``; -inf counts as masked.
        scale: factor on the scores. Default: 1/√D for the scaled dot product, 1 for other scores.
        softcap: if given, ``softcap · tanh(score / softcap)`` replaces the scores, before the bias is added.
        dropout: probability with which a weight is dropped. It applies in evaluation mode too:
            pass ``dropout=p if self.training else 0.0``.

    Returns:
        ``(…, Q, Dv)``

    >>> import jumok, torch
    >>> query, key, value = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 3)
    >>> jumok.attend(query, key, value, mask=jumok.masks.padding([4, 7])).shape
    torch.Size([2, 5, 3])
    """
    plan_key = plan = None
    if not is_observed():
        plan_key = plan_cache.make_plan_key(query, key, value, score, mask, bias, scale, softcap, dropout)
        plan = None if plan_key is None else plan_cache.find_plan(plan_key, mask)
        if plan is not None:
            out = plan(query, key, value, score, mask)
            if out is not None:
                return out
    call = build_attention_call(query, key, _require_value(value), score, mask, bias, scale, softcap, dropout)
    out = _compute_output(call)
    if plan_key is not None and plan is None:
        plan_cache.store_plan(plan_key, call, _choose_function)
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
    """Return the attention weights, ``(…, Q, K)``. A row sums to one, or to zero if no key is allowed.

    The arguments are those of :func:`attend`.

    >>> import jumok, torch
    >>> query, key = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> jumok.weights(query, key, score=jumok.scores.Dot(), mask=jumok.masks.padding(2))
    tensor([[0.2689, 0.7311, 0.0000]])
    """
    return _compute_weights(build_attention_call(query, key, None, score, mask, bias, scale, softcap, 0.0))


def mix(weights: Tensor, value: Tensor, *, assume_finite: bool = False) -> Tensor:
    """Return ``weights @ value``, ``(…, Q, Dv)``, where values without any weight never affect the result.

    Args:
        weights: ``(…, Q, K)``.
        value: ``(…, K, Dv)``. A value that gets no weight from any query may be NaN or infinite.
        assume_finite: skip the check whether all values are finite. This makes a loop over the same values
            faster.

    >>> import jumok, torch
    >>> jumok.mix(torch.tensor([[0.25, 0.75, 0.0]]), torch.tensor([[4.0], [8.0], [float("nan")]]))
    tensor([[7.]])
    """
    group_size = check_mix_arguments(weights, value)
    if group_size > 1:
        value = value.repeat_interleave(group_size, dim=1)
    if assume_finite or is_known_finite(value):
        return weights @ value
    used = (weights.detach() != 0).any(-2)  # (…, K)
    # An unused finite value stays: the gradient of a weight that is 0 (hard attention) depends on it.
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
    """Return which path :func:`attend` takes for these arguments, and why faster paths do not serve them.

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


# ---------------------------------- every checked call passes through these; observers replace them


def _compute_output(call: AttentionCall) -> Tensor:
    return _choose_function(call)(call)


# `jumok.watch` and the ONNX export replace _compute_output.
_UNPATCHED_COMPUTE_OUTPUT = _compute_output


def is_observed() -> bool:
    """Return whether something must see each attention call: ``jumok.watch``, an export, or a trace."""
    return _compute_output is not _UNPATCHED_COMPUTE_OUTPUT or plan_cache.needs_full_path()


def _choose_function(call: AttentionCall) -> Callable[[AttentionCall], Tensor]:
    return dispatch.choose_path(call).path.run


def _compute_weights(call: AttentionCall) -> Tensor:
    return compute_row_weights(call, call.repeat_kv(call.prepare_keys()), slice(0, call.shape.num_queries))
