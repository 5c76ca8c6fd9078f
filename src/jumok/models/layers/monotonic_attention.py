"""Speech goes through its text from the first symbol to the last: two ways to teach attention just that.

*Forward attention* (Zhang, Ling and Dai 2018) lets it stay where it is or go one symbol on, nothing else::

    α_t(n)  ∝  (α_(t−1)(n) + α_(t−1)(n−1)) · y_t(n)          y_t what attention would be by itself

*Guided attention* (Tachibana 2017) lets it look anywhere, and costs the more the further from the diagonal::

    cost of a weight at step t of T and symbol n of N  =  1 − exp(−(n/N − t/T)² / 2g²)

                 n                 n
                 ■ ■ · · ·         0 ▪ ■ ■ ■
             t   · ■ ■ · ·     t   ▪ 0 ▪ ■ ■
                 · · ■ ■ ·         ■ ▪ 0 ▪ ■
             may be at t + 1       what a weight costs

Shapes: ``B`` utterances, ``T`` steps, ``N`` symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention.gpu_support import triton_unsupported_reason
from jumok.models.layers.precision import upcast

__all__ = ["forward_attention", "guided_attention_loss"]

MAX_GRADIENT = 1e4  # no slope of what is within reach is larger
MIN_TOTAL = 1e-20  # of it, that its slope is divided by


def forward_attention(weights: Tensor, previous_weights: Tensor) -> Tensor:
    """The weights ``(B, N)``, of those that are at most one symbol on from the step ``previous_weights`` ``(B, N)``.

    Before the first step, all weight is on the first symbol. They are in at least float32, as ``previous_weights`` is.

    Where next to nothing of the weights is within reach, to have a little more of what is not would change
    everything, after a few steps beyond all numbers. So slopes are bounded: by ``MAX_GRADIENT``.

    >>> forward_attention(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[0.6667, 0.3333, 0.0000]])
    """
    if (
        triton_unsupported_reason(weights) is None
        and previous_weights.dtype == torch.float32
        and weights.numel()
    ):
        from jumok.models.kernels import forward_attention_step

        if weights.shape[1] <= forward_attention_step.MAX_SYMBOLS:
            return forward_attention_step.fused_forward_attention(weights, previous_weights)
    reached = (previous_weights + F.pad(previous_weights, (1, -1))) * upcast(weights)
    # If a softmax gave nothing to any symbol within reach, it stays where it is: else it would be nowhere.
    total = reached.sum(-1, keepdim=True)
    lost = total < torch.finfo(reached.dtype).tiny
    whole = (reached / total.masked_fill(lost, 1.0)).detach()
    if reached.requires_grad:
        reached.register_hook(lambda slope: slope.clamp(-MAX_GRADIENT, MAX_GRADIENT))
        total = reached.sum(-1, keepdim=True)
        whole = whole + (reached - whole * total) / total.detach().clamp(min=MIN_TOTAL)  # 0, with a gradient
    return torch.where(lost, previous_weights, whole)


def guided_attention_loss(
    weights: Tensor, step_lengths: Tensor, symbol_lengths: Tensor, sigma: float
) -> Tensor:
    """What the weights ``(B, T, N)`` cost at each step, ``(B, T)``: from 0 to 1. ``sigma`` is g.

    ``step_lengths`` and ``symbol_lengths`` ``(B,)`` say how many are real. Steps that are not cost nothing.

    >>> far = guided_cost(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]), torch.tensor([2]), torch.tensor([2]), 0.5)
    >>> far  # 1 − exp(−½), and 0 on the diagonal
    tensor([[0.3935, 0.0000]])
    """
    weights = upcast(weights)
    step, symbol = (torch.arange(size, device=weights.device).to(weights.dtype) for size in weights.shape[1:])
    through_sound = step / step_lengths[:, None]  # (B, T)
    through_text = symbol / symbol_lengths[:, None]  # (B, N)
    apart = through_sound[:, :, None] - through_text[:, None]
    cost = (weights * -torch.expm1(-apart.square() / (2 * sigma**2))).sum(-1)
    return cost.where(step < step_lengths[:, None], 0.0)
