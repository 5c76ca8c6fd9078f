"""Attention of a decoder that speaks to the text: where it is, step by step.

::

    additive               e_n = v · tanh(W q + U h_n)                         looks anew at each step
    location-sensitive     e_n = v · tanh(W q + U h_n + F f_n + b)             f: where it has looked so far

    y = softmax(e)         or moved on from where it was (:func:`~jumok.models.monotone.forward_attention`)
    found = Σ_n y_n h_n

Shapes: ``B`` utterances, ``L`` symbols, ``S`` steps; widths: ``W`` of a query, ``D`` of a symbol's state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention import core
from jumok.attention.kinds import Mask, Span
from jumok.attention.prepared import Prepared
from jumok.attention.scores import Additive, LocationSensitive, Score
from jumok.models.deferred import Deferred
from jumok.models.labels import exact
from jumok.models.monotone import forward_attention

__all__ = ["Aligner", "Looked", "Text"]

KINDS = 2  # of weights that location-sensitive attention looks at: the last ones, and the sum of all


@dataclass(frozen=True, eq=False)
class Text:
    """What all steps of a decoder look at."""

    states: Tensor  # (B, L, D)
    keys: Prepared  # made of them, as the score wants them
    mask: Mask | None  # where there is no padding; None: nowhere is any
    taps: Deferred | None  # from windows of where it has looked to what they add to keys; None: nothing


@dataclass(frozen=True, eq=False)
class Looked:
    """Where a decoder has looked so far, in at least float32."""

    last: Tensor  # (B, L): at the last step
    total: Tensor  # (B, L): at all steps together


class Aligner(nn.Module):
    """What a decoder finds in a text, given a query a step.

    Args:
        width: of a query.
        states: their width.
        hidden: the width of what queries and states are compared by.
        location: how many filters look at the weights so far, and how wide they are; None: none, the score is
            additive.
        moves_on: whether it may only stay or go one symbol on: forward attention.

    >>> look = Aligner(width=3, states=5, hidden=7, location=(2, 3))
    >>> text = look.prepare(torch.ones(2, 4, 5), None)
    >>> found, looked = look(torch.ones(2, 3), text, look.start(text))
    >>> found.shape, looked.last.shape
    (torch.Size([2, 5]), torch.Size([2, 4]))
    """

    def __init__(
        self,
        width: int,
        states: int,
        hidden: int,
        *,
        location: tuple[int, int] | None = None,
        moves_on: bool = False,
    ) -> None:
        super().__init__()
        self.moves_on = moves_on
        self.score: Additive | LocationSensitive
        if location is None:
            self.score = Additive(width, states, hidden)
        else:
            filters, kernel = location
            self.score = LocationSensitive(
                width, states, hidden, filters=filters, kernel=kernel, channels=KINDS
            )

    def prepare(self, states: Tensor, mask: Mask | None) -> Text:
        """What all steps share, of the states ``(B, L, D)`` of symbols."""
        keys = self.score.prepare(states)
        # Under autocast the keys have its type. The states get it here rather than at every step, and so it
        # is with the zeros at padding, where else each step would have to see to it that nothing spreads.
        states = states.to(keys.keys.dtype)
        if isinstance(mask, Span):
            real = mask.dense(1, states.shape[1], states.device).transpose(1, 2)  # (B, L, 1)
            states, keys = states.where(real, 0.0), replace(keys, keys=keys.keys.where(real, 0.0))
            mask = replace(mask, clean=True)
        taps = None
        if isinstance(self.score, LocationSensitive):
            # With a tap of zero behind the last, there is an even number: GPUs are slow with odd ones.
            taps = Deferred(F.pad(self.score.taps.unflatten(1, (KINDS, -1)), (0, 1)).flatten(1))
        return Text(states, keys, mask, taps)

    def start(self, text: Text) -> Looked | None:
        """Before the first step; None: where it has looked makes no difference."""
        if isinstance(self.score, Additive) and not self.moves_on:
            return None
        nowhere = exact(text.states.new_zeros(text.states.shape[:2]))
        if not self.moves_on:
            return Looked(nowhere, nowhere)
        at_first = (torch.arange(nowhere.shape[1], device=nowhere.device) == 0).to(nowhere.dtype)
        return Looked(at_first.expand_as(nowhere), nowhere)

    def forward(self, query: Tensor, text: Text, before: Looked | None) -> tuple[Tensor, Looked | None]:
        """What a step finds, ``(B, D)``, with its query ``(B, W)``; and where it has looked then."""
        asked = query[:, None]
        if before is None:
            found = core.attend(asked, text.keys, text.states, score=self.score, mask=text.mask)
            return found.squeeze(1), None
        kind, score = text.states.dtype, cast(Score, self.score)
        if isinstance(score, LocationSensitive):
            looked = torch.stack([before.last, before.total], 1).to(kind)
            score = score.after(looked, added=_added(looked, text))
        weights = core.weights(asked, text.keys, score=score, mask=text.mask).squeeze(1)
        weights = forward_attention(weights, before.last) if self.moves_on else exact(weights)
        found = core.mix(weights[:, None].to(kind), text.states, finite=True).squeeze(1)
        return found, Looked(weights, before.total + weights)

    def weights(self, queries: Tensor, text: Text) -> Tensor:
        """Where steps with queries ``(B, S, W)`` look, ``(B, S, L)``, if each looks anew."""
        return core.weights(queries, text.keys, score=self.score, mask=text.mask)


def _added(looked: Tensor, text: Text) -> Tensor:
    """What the weights so far, ``(B, 2, L)``, add to keys, ``(B, L, hidden)``.

    A product of windows, rather than a convolution and a product: a step has fewer kernels so, and gradients
    of both weights are computed once, after all steps.
    """
    assert text.taps is not None
    taps = text.taps.weight.shape[1] // KINDS
    windows = F.pad(looked, (taps // 2 - 1, taps // 2)).unfold(2, taps, 1)  # (B, 2, L, taps)
    return text.taps(windows.transpose(1, 2).flatten(2))
