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
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import Additive, Concat, Dot, General, ScaledDot, Score

__all__ = ["AttentionScope", "DecoderAttention", "ScoreName", "Seq2SeqMemory"]

AttentionScope = Literal["global", "local-m", "local-p"]
ScoreName = Literal["dot", "scaled-dot", "general", "additive", "concat"]


@dataclass(frozen=True, eq=False)
class Seq2SeqMemory:
    """What all steps of a decoder look at."""

    annotations: Tensor  # (N, S, M)
    keys: PreparedKeys  # made of them, as the score wants them
    mask: Mask | None  # where there is no padding; None, as lengths: nowhere is any
    lengths: Tensor | None  # (N,) on the device

    def reorder(self, index: Tensor) -> Seq2SeqMemory:
        """The rows ``index``, in that order; a row may come twice or never."""
        annotations, keys = self.annotations.index_select(0, index), self.keys.reorder(index)
        if self.lengths is None:
            return Seq2SeqMemory(annotations, keys, None, None)
        lengths = self.lengths.index_select(0, index)
        real = torch.arange(annotations.shape[1], device=lengths.device) < lengths[:, None]
        return Seq2SeqMemory(annotations, keys, masks.tensor(real[:, None]), lengths)


class DecoderAttention(nn.Module):
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

    def __init__(
        self,
        scope: AttentionScope,
        score_name: ScoreName,
        query_width: int,
        annotation_width: int,
        window: int,
    ) -> None:
        super().__init__()
        self.scope, self.window = scope, window
        self.score = _build_score(score_name, query_width, annotation_width)
        # W of q · W h̄ could hold this factor itself. But Adam moves each of its numbers by the learning rate,
        # whatever their size, and the scores with all of them: soon only one word would be looked at.
        self.scale = query_width**-0.5 if score_name == "general" else None
        self.has_projections = score_name == "scaled-dot"
        if self.has_projections:
            self.query_projection = nn.Linear(query_width, query_width, bias=False)
            self.key_projection = nn.Linear(annotation_width, query_width, bias=False)
        if scope == "local-p":
            self.position_predictor = nn.Sequential(  # v · tanh(W q)
                nn.Linear(query_width, query_width, bias=False),
                nn.Tanh(),
                nn.Linear(query_width, 1, bias=False),
            )

    def prepare(
        self, annotations: Tensor, mask: Mask | None = None, lengths: Tensor | None = None
    ) -> Seq2SeqMemory:
        """What all steps share, from annotations ``(N, S, M)`` whose padding is zero."""
        keys = annotations
        if self.has_projections:
            # (W_q q) · (W_k h̄) = q · (W_qᵀ W_k h̄): so both projections are done once, none at the steps.
            keys = self.key_projection(annotations) @ self.query_projection.weight
        prepared = self.score.prepare(keys)
        # Under autocast the keys have its type. The annotations get it here rather than at every step.
        return Seq2SeqMemory(annotations.to(prepared.keys.dtype), prepared, mask, lengths)

    def forward(self, query: Tensor, memory: Seq2SeqMemory, step: int = 0) -> Tensor:
        """The contexts ``(N, Q, M)`` of Q steps from number ``step`` on, for their queries ``(N, Q, W)``."""
        if self.scope == "local-p":
            return core.mix(self.weights(query, memory, step), memory.annotations)
        mask = self._build_mask(memory, self._compute_center(query, memory, step))
        return core.attend(
            query, memory.keys, memory.annotations, score=self.score, mask=mask, scale=self.scale
        )

    def weights(self, query: Tensor, memory: Seq2SeqMemory, step: int = 0) -> Tensor:
        """How much each step looks at each word, ``(N, Q, S)``; the arguments are those of ``forward``."""
        centre = self._compute_center(query, memory, step)
        mask = self._build_mask(memory, centre)
        weights = core.weights(query, memory.keys, score=self.score, mask=mask, scale=self.scale)
        if self.scope != "local-p" or centre is None:
            return weights
        sigma = self.window / 2
        bell = torch.exp(-(_compute_distances(memory, centre) ** 2) / (2 * sigma**2))
        return weights * bell.to(weights.dtype)

    def _compute_center(self, query: Tensor, memory: Seq2SeqMemory, step: int) -> Tensor | None:
        """p for each query, ``(N, Q)`` or ``(1, Q)``; None: there is none, the whole source is seen."""
        if self.scope == "global":
            return None
        longest = memory.annotations.shape[1]
        if self.scope == "local-m":
            steps = step + torch.arange(query.shape[1], device=query.device)[None]
            steps = steps.clamp(max=longest - 1)
            return steps if memory.lengths is None else torch.minimum(steps, memory.lengths[:, None] - 1)
        place: Tensor = self.position_predictor(query).squeeze(-1)
        # At least float32: near word 50, the next number of bfloat16 is a quarter of a word away.
        place = torch.sigmoid(place.to(torch.promote_types(place.dtype, torch.float32)))
        return place * (longest if memory.lengths is None else memory.lengths[:, None])

    def _build_mask(self, memory: Seq2SeqMemory, center: Tensor | None) -> Mask | None:
        if center is None:
            return memory.mask
        near = masks.tensor(_compute_distances(memory, center).abs() <= self.window)
        return near if memory.mask is None else near & memory.mask


def _compute_distances(memory: Seq2SeqMemory, center: Tensor) -> Tensor:
    """j − p, ``(N, Q, S)`` or ``(1, Q, S)``."""
    return torch.arange(memory.annotations.shape[1], device=center.device) - center[..., None]


def _build_score(name: ScoreName, query_width: int, key_width: int) -> Score:
    match name:
        case "dot":
            return Dot()
        case "scaled-dot":
            return ScaledDot()
        case "general":
            return General(query_width, key_width)
        case "additive":
            return Additive(query_width, key_width, hidden=query_width)
        case "concat":
            return Concat(query_width, key_width, hidden=query_width)
