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
from jumok.attention.mask_types import Mask, PaddingMask
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import Additive, LocationSensitive, Score
from jumok.models.layers.deferred_linear import DeferredLinear
from jumok.models.layers.precision import upcast
from jumok.models.layers.monotonic_attention import forward_attention

__all__ = ["TacotronAlignment", "TacotronAttention", "TacotronMemory"]

LOCATION_CHANNELS = (
    2  # of weights that location-sensitive attention looks at: the last ones, and the sum of all
)


@dataclass(frozen=True, eq=False)
class TacotronMemory:
    """What all steps of a decoder look at."""

    states: Tensor  # (B, L, D)
    keys: PreparedKeys  # made of them, as the score wants them
    mask: Mask | None  # where there is no padding; None: nowhere is any
    location_layer: (
        DeferredLinear | None
    )  # from windows of where it has looked to what they add to keys; None: nothing


@dataclass(frozen=True, eq=False)
class TacotronAlignment:
    """Where a decoder has looked so far, in at least float32."""

    last_weights: Tensor  # (B, L): at the last step
    cumulative_weights: Tensor  # (B, L): at all steps together


class TacotronAttention(nn.Module):
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
        memory_width: int,
        hidden_width: int,
        *,
        location_filters: tuple[int, int] | None = None,
        use_forward_attention: bool = False,
    ) -> None:
        super().__init__()
        self.uses_forward_attention = use_forward_attention
        self.score: Additive | LocationSensitive
        if location_filters is None:
            self.score = Additive(width, memory_width, hidden_width)
        else:
            filters, kernel = location_filters
            self.score = LocationSensitive(
                width,
                memory_width,
                hidden_width,
                num_filters=filters,
                kernel_size=kernel,
                num_channels=LOCATION_CHANNELS,
            )

    def prepare(self, states: Tensor, mask: Mask | None) -> TacotronMemory:
        """What all steps share, of the states ``(B, L, D)`` of symbols."""
        keys = self.score.prepare(states)
        # Under autocast the keys have its type. The states get it here rather than at every step, and so it
        # is with the zeros at padding, where else each step would have to see to it that nothing spreads.
        states = states.to(keys.keys.dtype)
        if isinstance(mask, PaddingMask):
            real = mask.to_dense(1, states.shape[1], states.device).transpose(1, 2)  # (B, L, 1)
            states, keys = states.where(real, 0.0), replace(keys, keys=keys.keys.where(real, 0.0))
            mask = replace(mask, padding_is_zero=True)
        taps = None
        if isinstance(self.score, LocationSensitive):
            # With a tap of zero behind the last, there is an even number: GPUs are slow with odd ones.
            taps = DeferredLinear(
                F.pad(self.score.fused_location_weight.unflatten(1, (LOCATION_CHANNELS, -1)), (0, 1)).flatten(
                    1
                )
            )
        return TacotronMemory(states, keys, mask, taps)

    def initial_alignment(self, memory: TacotronMemory) -> TacotronAlignment | None:
        """Before the first step; None: where it has looked makes no difference."""
        if isinstance(self.score, Additive) and not self.uses_forward_attention:
            return None
        nowhere = upcast(memory.states.new_zeros(memory.states.shape[:2]))
        if not self.uses_forward_attention:
            return TacotronAlignment(nowhere, nowhere)
        at_first = (torch.arange(nowhere.shape[1], device=nowhere.device) == 0).to(nowhere.dtype)
        return TacotronAlignment(at_first.expand_as(nowhere), nowhere)

    def forward(
        self, query: Tensor, memory: TacotronMemory, alignment: TacotronAlignment | None
    ) -> tuple[Tensor, TacotronAlignment | None]:
        """What a step finds, ``(B, D)``, with its query ``(B, W)``; and where it has looked then."""
        asked = query[:, None]
        if alignment is None:
            found = core.attend(asked, memory.keys, memory.states, score=self.score, mask=memory.mask)
            return found.squeeze(1), None
        kind, score = memory.states.dtype, cast(Score, self.score)
        if isinstance(score, LocationSensitive):
            looked = torch.stack([alignment.last_weights, alignment.cumulative_weights], 1).to(kind)
            score = score.with_previous(looked, location_term=_compute_location_term(looked, memory))
        weights = core.weights(asked, memory.keys, score=score, mask=memory.mask).squeeze(1)
        weights = (
            forward_attention(weights, alignment.last_weights)
            if self.uses_forward_attention
            else upcast(weights)
        )
        found = core.mix(weights[:, None].to(kind), memory.states, assume_finite=True).squeeze(1)
        return found, TacotronAlignment(weights, alignment.cumulative_weights + weights)

    def weights(self, queries: Tensor, memory: TacotronMemory) -> Tensor:
        """Where steps with queries ``(B, S, W)`` look, ``(B, S, L)``, if each looks anew."""
        return core.weights(queries, memory.keys, score=self.score, mask=memory.mask)


def _compute_location_term(previous_weights: Tensor, memory: TacotronMemory) -> Tensor:
    """What the weights so far, ``(B, 2, L)``, add to keys, ``(B, L, hidden_width)``.

    A product of windows, rather than a convolution and a product: a step has fewer kernels so, and gradients
    of both weights are computed once, after all steps.
    """
    assert memory.location_layer is not None
    taps = memory.location_layer.weight.shape[1] // LOCATION_CHANNELS
    windows = F.pad(previous_weights, (taps // 2 - 1, taps // 2)).unfold(2, taps, 1)  # (B, 2, L, taps)
    return memory.location_layer(windows.transpose(1, 2).flatten(2))
