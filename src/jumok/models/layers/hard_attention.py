"""Hard attention (Xu 2015, 4.1): one place is looked at, drawn at random, and how to learn where.

What is made greater is the mean, over all ways s = s_1 … s_T to look, of how probable the caption is then::

    L = Σ_s p(s) log p(y | s)

    ∂L = E_s [ ∂ log p(y | s)  +  Σ_t (R_t − b_t) ∂ log p(s_t) ]         REINFORCE
    R_t = Σ_(u ≥ t) log p(y_u | s)                                       what came of looking there

Words that were said before step t owe nothing to s_t, so that R_t leaves them out (the paper has all words at
every step: the same on average, and noisier). The baseline b_t makes it less noisy still: it is how probable
the words from t on are as a rule, a moving average of log p of a word times the words that are left.

Shapes: ``B`` pictures, ``T`` steps, ``P`` places.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.models.layers.precision import upcast

__all__ = [
    "HardAttentionSampler",
    "WeightRecorder",
    "entropy",
    "one_hot_argmax",
    "reinforce_loss",
    "sample_positions",
]


def sample_positions(weights: Tensor) -> Tensor:
    """A place for each row of weights ``(…, P)``, drawn with these probabilities: ``(…)``.

    Of P exponential waiting times with these rates, the shortest. (``torch.multinomial`` waits for a GPU.)
    """
    rates = upcast(weights.detach())
    return (rates / torch.empty_like(rates).exponential_()).argmax(-1)


def one_hot_argmax(weights: Tensor) -> Tensor:
    """All weight to the place that has the most, ``(…, P)``.

    >>> most_probable(torch.tensor([[0.2, 0.5, 0.3]]))
    tensor([[0., 1., 0.]])
    """
    return _one_hot(weights.argmax(-1), weights)


class WeightRecorder:
    """Looks with the weights as they are, as soft attention does, and keeps them for what they cost."""

    def __init__(self) -> None:
        self._step_weights: list[Tensor] = []

    def __call__(self, weights: Tensor) -> Tensor:
        """From weights ``(B, 1, P)`` those to look with."""
        self._step_weights.append(weights)
        return weights

    @property
    def weights(self) -> Tensor:
        """Those of all steps, ``(B, T, P)``."""
        return torch.cat(self._step_weights, 1)


class HardAttentionSampler(WeightRecorder):
    """Looks at one place, which is drawn, in the rows ``sampled_rows`` ``(B,)``, and keeps what it drew.

    The other rows look at everything by its weight, which has a gradient and so less noise.
    """

    def __init__(self, sampled_rows: Tensor) -> None:
        super().__init__()
        self.sampled_rows = sampled_rows
        self._positions: list[Tensor] = []

    def __call__(self, weights: Tensor) -> Tensor:
        chosen = sample_positions(weights)
        self._positions.append(chosen)
        return torch.where(
            self.sampled_rows[:, None, None], _one_hot(chosen, weights), super().__call__(weights)
        )

    @property
    def position_log_probs(self) -> Tensor:
        """How probable what was drawn had been, ``(B, T)``; with a gradient."""
        chosen = torch.cat(self._positions, 1)
        return _safe_log(self.weights).take_along_dim(chosen[..., None], -1).squeeze(-1)


def reinforce_loss(
    position_log_probs: Tensor, word_log_probs: Tensor, valid_mask: Tensor, baseline: Tensor
) -> Tensor:
    """A zero whose gradient is that of REINFORCE, for what is to be made smaller.

    A value would mean nothing, and would hide what the loss is worth that it stands in.

    Args:
        log_chosen: ``(B, T)``, log p(s_t).
        log_words: ``(B, T)``, log p(y_t | s); a reward: no gradient goes there.
        counts: ``(B, T)``, True at steps that count.
        baseline: log p of a word, as a rule.

    >>> said = torch.tensor([[-1.0, -2.0]])
    >>> chosen = torch.zeros(1, 2, requires_grad=True)
    >>> surrogate(chosen, said, said < 0, torch.tensor(-1.0)).backward()
    >>> chosen.grad  # 1 + 2 − 2 · 1, and 2 − 1
    tensor([[1., 1.]])
    """
    better = torch.where(valid_mask, word_log_probs.detach() - baseline, 0.0)
    advantage = better.flip(1).cumsum(1).flip(1)
    learned = torch.where(valid_mask, advantage * position_log_probs, 0.0).sum()
    return learned.detach() - learned


def entropy(weights: Tensor) -> Tensor:
    """How undecided each row of weights ``(…, P)`` is: from 0, for a single place, to log P."""
    return -(upcast(weights) * _safe_log(weights)).sum(-1)


def _one_hot(positions: Tensor, weights: Tensor) -> Tensor:
    return F.one_hot(positions, weights.shape[-1]).to(weights.dtype)


def _safe_log(weights: Tensor) -> Tensor:
    weights = upcast(weights)
    return weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
