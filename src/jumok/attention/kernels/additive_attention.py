"""Additive attention of many queries: projections, scores, softmax and mix as one autograd function.

PyTorch computes all but the scores. As separate autograd nodes these operations take the host longer than the
GPU, even in a batch of half a million pairs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention.kernels.additive import compute_scores_forward, compute_scores_gradient
from jumok.attention.kernels.common import disable_compile, forbid_double_backward, make_rows_contiguous


class _AdditiveAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_weight: Tensor,
        key_weight: Tensor | None,
        v: Tensor,
        blocked: Tensor | None,
    ) -> Tensor:
        q = F.linear(query, query_weight)
        k = make_rows_contiguous(key) if key_weight is None else F.linear(key, key_weight)
        scores, peaks = compute_scores_forward(q, k, v)
        if blocked is not None:
            scores.masked_fill_(blocked, -torch.inf)
        weights = scores.softmax(-1)
        rounded_weights = weights.to(query.dtype)
        ctx.save_for_backward(query, key, value, query_weight, key_weight, v, q, k, peaks, weights, rounded_weights)
        return torch.bmm(rounded_weights, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        query, key, value, query_weight, key_weight, v, q, k, peaks, weights, rounded_weights = ctx.saved_tensors
        for_query, for_key, for_value, for_query_weight, for_key_weight, for_v, _ = ctx.needs_input_grad
        d_query = d_key = d_value = d_query_weight = d_key_weight = d_v = None
        if for_value:
            d_value = torch.bmm(rounded_weights.transpose(1, 2), grad)
        for_q, for_k = for_query or for_query_weight, for_key or for_key_weight
        if for_q or for_k or for_v:
            d_weights = _multiply(grad, value.transpose(1, 2))
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, torch.float32)
        if for_q:
            d_q, d_v = compute_scores_gradient(q, k, v, d_scores.transpose(1, 2), peaks, with_dv=for_v and not for_k)
            d_query, d_query_weight = _project_back(d_q, query, query_weight, for_query, for_query_weight)
        if for_k or (for_v and not for_q):
            d_k, d_v = compute_scores_gradient(k, q, v, d_scores, peaks, with_dv=for_v)
            if key_weight is None:
                d_key = d_k if for_key else None
            else:
                d_key, d_key_weight = _project_back(d_k, key, key_weight, for_key, for_key_weight)
        return d_query, d_key, d_value, d_query_weight, d_key_weight, None if d_v is None else d_v.to(v.dtype), None


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a · b of batches of matrices, in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()


def _project_back(
    d_output: Tensor, x: Tensor, weight: Tensor, for_x: bool, for_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight of ``F.linear(x, weight)``."""
    d_rows = d_output.flatten(0, -2)
    d_x = torch.mm(d_rows, weight).view(x.shape) if for_x else None
    return d_x, torch.mm(d_rows.t(), x.flatten(0, -2)) if for_weight else None


@disable_compile
def fused_additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor | None,
    v: Tensor,
    blocked: Tensor | None = None,
) -> Tensor:
    """Return softmax(v · tanh(W query + U key)) value, ``(B, Q, Dv)``. No dimension is 0.

    Differentiable once. It takes the memory of the scores, never B×Q×K×H.

    Args:
        query: ``(B, Q, Dq)`` in bfloat16, float16 or float32.
        key: ``(B, K, Dk)``, or projected ``(B, K, H)`` if ``key_weight`` is None.
        value: ``(B, K, Dv)``.
        query_weight: W ``(H, Dq)``.
        key_weight: U ``(H, Dk)``.
        v: ``(H,)`` in the same type or float32.
        blocked: bool, broadcasts to ``(B, Q, K)``: True where a query may not attend. Each may attend to some key.
    """
    return cast(Tensor, _AdditiveAttentionFunction.apply(query, key, value, query_weight, key_weight, v, blocked))
