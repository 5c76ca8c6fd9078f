"""Attention of a recurrent decoder to its source: to all words, or to those near one place (Luong 2015).

::

    global     a_j = softmax(score(q, h̄_j))                        over all words j of the source
    local-m    a_j = softmax(score(q, h̄_j))                        over the words |j − p| ≤ D
    local-p    a_j = softmax(score(q, h̄_j)) exp(−(j − p)² / 2σ²)   over the words |j − p| ≤ D,  σ = D/2

    local-m    p = t, the number of the step: words keep their order
    local-p    p = S · sigmoid(v · tanh(W q)): where to look is learned, through the bell around p

    c = Σ_j a_j h̄_j

The bell takes weight away and gives none back: local-p's weights add up to less than one, as in the paper.
Steps and places count from 0. A target longer than its source goes on looking at the source's end.

Shapes: ``N`` rows, ``Q`` steps at once, ``S`` source words; widths: ``W`` of a query, ``M`` of an annotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from jumok.attention import core, masks
from jumok.attention.masks import Mask
from jumok.attention.prepared import Prepared
from jumok.attention.scores import Additive, Concat, Dot, General, ScaledDot, Score

__all__ = ["Lookup", "Reach", "ScoreName", "Source"]

Reach = Literal["global", "local-m", "local-p"]
ScoreName = Literal["dot", "scaled-dot", "general", "additive", "concat"]


@dataclass(frozen=True, eq=False)
class Source:
    """What all steps of a decoder look at."""

    annotations: Tensor  # (N, S, M)
    keys: Prepared  # made of them, as the score wants them
    mask: Mask | None  # where there is no padding; None, as lengths: nowhere is any
    lengths: Tensor | None  # (N,) on the device

    def reorder(self, index: Tensor) -> Source:
        """The rows ``index``, in that order; a row may come twice or never."""
        annotations, keys = self.annotations.index_select(0, index), self.keys.reorder(index)
        if self.lengths is None:
            return Source(annotations, keys, None, None)
        lengths = self.lengths.index_select(0, index)
        real = torch.arange(annotations.shape[1], device=lengths.device) < lengths[:, None]
        return Source(annotations, keys, masks.tensor(real[:, None]), lengths)


class Lookup(nn.Module):
    """Where a decoder looks in the source, and what it finds there.

    "scaled-dot" compares learned projections, ``(W_q q) · (W_k h̄) / √W``, and "general" is ``q · W h̄ / √W``;
    the other scores are those of :mod:`jumok.attention.scores`.

    >>> look = Lookup("local-m", "general", width=3, annotation=5, window=1)
    >>> source = look.prepare(torch.zeros(2, 7, 5))
    >>> look(torch.ones(2, 4, 3), source).shape
    torch.Size([2, 4, 5])
    >>> look.weights(torch.ones(2, 1, 3), source, step=3)[0].detach()
    tensor([[0.0000, 0.0000, 0.3333, 0.3333, 0.3333, 0.0000, 0.0000]])
    """

    def __init__(self, reach: Reach, score: ScoreName, width: int, annotation: int, window: int) -> None:
        super().__init__()
        self.reach, self.window = reach, window
        self.score = _score(score, width, annotation)
        # W of q · W h̄ could hold this factor itself. But Adam moves each of its numbers by the learning rate,
        # whatever their size, and the scores with all of them: soon only one word would be looked at.
        self.scale = width**-0.5 if score == "general" else None
        self.projected = score == "scaled-dot"
        if self.projected:
            self.query = nn.Linear(width, width, bias=False)
            self.key = nn.Linear(annotation, width, bias=False)
        if reach == "local-p":
            self.place = nn.Sequential(  # v · tanh(W q)
                nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, 1, bias=False)
            )

    def prepare(self, annotations: Tensor, mask: Mask | None = None, lengths: Tensor | None = None) -> Source:
        """What all steps share, from annotations ``(N, S, M)`` whose padding is zero."""
        keys = annotations
        if self.projected:
            # (W_q q) · (W_k h̄) = q · (W_qᵀ W_k h̄): so both projections are done once, none at the steps.
            keys = self.key(annotations) @ self.query.weight
        prepared = self.score.prepare(keys)
        # Under autocast the keys have its type. The annotations get it here rather than at every step.
        return Source(annotations.to(prepared.keys.dtype), prepared, mask, lengths)

    def forward(self, query: Tensor, source: Source, step: int = 0) -> Tensor:
        """The contexts ``(N, Q, M)`` of Q steps from number ``step`` on, for their queries ``(N, Q, W)``."""
        if self.reach == "local-p":
            return core.mix(self.weights(query, source, step), source.annotations)
        mask = self._visible(source, self._centre(query, source, step))
        return core.attend(
            query, source.keys, source.annotations, score=self.score, mask=mask, scale=self.scale
        )

    def weights(self, query: Tensor, source: Source, step: int = 0) -> Tensor:
        """How much each step looks at each word, ``(N, Q, S)``; the arguments are those of ``forward``."""
        centre = self._centre(query, source, step)
        mask = self._visible(source, centre)
        weights = core.weights(query, source.keys, score=self.score, mask=mask, scale=self.scale)
        if self.reach != "local-p" or centre is None:
            return weights
        sigma = self.window / 2
        bell = torch.exp(-(_distances(source, centre) ** 2) / (2 * sigma**2))
        return weights * bell.to(weights.dtype)

    def _centre(self, query: Tensor, source: Source, step: int) -> Tensor | None:
        """p for each query, ``(N, Q)`` or ``(1, Q)``; None: there is none, the whole source is seen."""
        if self.reach == "global":
            return None
        longest = source.annotations.shape[1]
        if self.reach == "local-m":
            steps = step + torch.arange(query.shape[1], device=query.device)[None]
            steps = steps.clamp(max=longest - 1)
            return steps if source.lengths is None else torch.minimum(steps, source.lengths[:, None] - 1)
        place: Tensor = self.place(query).squeeze(-1)
        # At least float32: near word 50, the next number of bfloat16 is a quarter of a word away.
        place = torch.sigmoid(place.to(torch.promote_types(place.dtype, torch.float32)))
        return place * (longest if source.lengths is None else source.lengths[:, None])

    def _visible(self, source: Source, centre: Tensor | None) -> Mask | None:
        if centre is None:
            return source.mask
        near = masks.tensor(_distances(source, centre).abs() <= self.window)
        return near if source.mask is None else near & source.mask


def _distances(source: Source, centre: Tensor) -> Tensor:
    """j − p, ``(N, Q, S)`` or ``(1, Q, S)``."""
    return torch.arange(source.annotations.shape[1], device=centre.device) - centre[..., None]


def _score(name: ScoreName, query: int, key: int) -> Score:
    match name:
        case "dot":
            return Dot()
        case "scaled-dot":
            return ScaledDot()
        case "general":
            return General(query, key)
        case "additive":
            return Additive(query, key, hidden=query)
        case "concat":
            return Concat(query, key, hidden=query)
