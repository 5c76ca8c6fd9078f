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

from jumok.attention.capability import why_no_kernel
from jumok.models.labels import exact

__all__ = ["forward_attention", "guided_cost"]

STEEPEST = 1e4  # no slope of what is within reach is larger
LEAST = 1e-20  # of it, that its slope is divided by


def forward_attention(weights: Tensor, before: Tensor) -> Tensor:
    """The weights ``(B, N)``, of those that are at most one symbol on from the step ``before`` ``(B, N)``.

    Before the first step, all weight is on the first symbol. They are in at least float32, as ``before`` is.

    Where next to nothing of the weights is within reach, to have a little more of what is not would change
    everything, after a few steps beyond all numbers. So slopes are bounded: by ``STEEPEST``.

    >>> forward_attention(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[1.0, 0.0, 0.0]]))
    tensor([[0.6667, 0.3333, 0.0000]])
    """
    if why_no_kernel(weights) is None and before.dtype == torch.float32 and weights.numel():
        from jumok.models.kernels import forward

        if weights.shape[1] <= forward.WIDEST:
            return forward.moved_on(weights, before)
    reached = (before + F.pad(before, (1, -1))) * exact(weights)
    # If a softmax gave nothing to any symbol within reach, it stays where it is: else it would be nowhere.
    total = reached.sum(-1, keepdim=True)
    lost = total < torch.finfo(reached.dtype).tiny
    whole = (reached / total.masked_fill(lost, 1.0)).detach()
    if reached.requires_grad:
        reached.register_hook(lambda slope: slope.clamp(-STEEPEST, STEEPEST))
        total = reached.sum(-1, keepdim=True)
        whole = whole + (reached - whole * total) / total.detach().clamp(min=LEAST)  # 0, with a gradient
    return torch.where(lost, before, whole)


def guided_cost(weights: Tensor, steps: Tensor, symbols: Tensor, width: float) -> Tensor:
    """What the weights ``(B, T, N)`` cost at each step, ``(B, T)``: from 0 to 1. ``width`` is g.

    ``steps`` and ``symbols`` ``(B,)`` say how many are real. Steps that are not cost nothing.

    >>> far = guided_cost(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]), torch.tensor([2]), torch.tensor([2]), 0.5)
    >>> far  # 1 − exp(−½), and 0 on the diagonal
    tensor([[0.3935, 0.0000]])
    """
    weights = exact(weights)
    step, symbol = (torch.arange(size, device=weights.device).to(weights.dtype) for size in weights.shape[1:])
    through_sound = step / steps[:, None]  # (B, T)
    through_text = symbol / symbols[:, None]  # (B, N)
    apart = through_sound[:, :, None] - through_text[:, None]
    cost = (weights * -torch.expm1(-apart.square() / (2 * width**2))).sum(-1)
    return cost.where(step < steps[:, None], 0.0)
