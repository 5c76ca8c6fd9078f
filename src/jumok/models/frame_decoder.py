"""From frames to frames: a recurrent decoder that speaks, and looks in a text for what to say.

::

    given ─ pre-net ─ GRU ── query ─── attention ── found ─┬─ GRUs ─┬─ r mel frames
                       ↑                                   │        └─ r times: was that the last?
                       └──────── at the next step ─────────┘

Only what stands in the circle goes step by step: the first GRU and attention. If what all steps are given is
known beforehand, as in training, all before and behind it runs over all steps at once.

Shapes: ``B`` utterances, ``L`` symbols, ``S`` steps of ``r`` frames, ``M`` mels; widths: ``W`` of a GRU,
``D`` of a symbol's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.models.aligner import Aligner, Looked, Text
from jumok.models.labels import exact
from jumok.models.layers import layers as in_order
from jumok.models.recurrent import Hidden, Recurrent, Steps, recurrent, run

__all__ = ["FrameDecoder", "PreNet", "Spoken", "State"]


@dataclass(frozen=True, eq=False)
class State:
    """How far a decoder has come."""

    text: Text
    asking: Hidden  # of the GRU that asks
    found: Tensor  # (B, D): what was found last
    looked: Looked | None
    speaking: tuple[Hidden, ...]  # of each GRU behind attention


@dataclass(frozen=True, eq=False)
class Spoken:
    """What S steps of a decoder said."""

    mels: Tensor  # (B, S r, M)
    stops: Tensor  # (B, S r): logits that a frame is the last
    weights: Tensor | None  # (B, S, L); None: attention looks anew each time, so they follow from the queries
    queries: Tensor  # (B, S, W)


class PreNet(nn.Module):
    """Two layers that drop much of what they are given, so that the text has to be looked at."""

    def __init__(self, inputs: int, widths: tuple[int, int], dropout: float, *, drops_at_rest: bool) -> None:
        super().__init__()
        self.width = widths[1]
        self.layers = in_order(nn.Linear(*sizes) for sizes in ((inputs, widths[0]), widths))
        self.dropout, self.drops_at_rest = dropout, drops_at_rest

    def forward(self, x: Tensor) -> Tensor:
        drops = self.training or self.drops_at_rest
        for layer in self.layers:
            x = F.dropout(layer(x).relu(), self.dropout, training=drops)
        return x


class FrameDecoder(nn.Module):
    """Says mel frames, r a step, and looks in the text at each.

    Args:
        prenet: what each step is given goes through it first.
        attention: where it looks.
        width: of its GRUs.
        states: the width of a symbol's state.
        layers: how many GRUs stand behind attention.
        frames: r, and how many mels a frame has.

    >>> prenet = PreNet(5, (4, 3), dropout=0.5, drops_at_rest=False)
    >>> decoder = FrameDecoder(prenet, Aligner(8, 6, 7), width=8, states=6, layers=1, frames=(2, 5))
    >>> state = decoder.start(decoder.attention.prepare(torch.ones(1, 4, 6), None))
    >>> spoken, state = decoder(torch.ones(1, 3, 5), state)
    >>> spoken.mels.shape, spoken.stops.shape
    (torch.Size([1, 6, 5]), torch.Size([1, 6]))
    """

    def __init__(
        self,
        prenet: PreNet,
        attention: Aligner,
        *,
        width: int,
        states: int,
        layers: int,
        frames: tuple[int, int],
    ) -> None:
        super().__init__()
        self.prenet, self.attention = prenet, attention
        self.reduction, mels = frames
        self.asking = recurrent("gru", prenet.width + states, width)
        self.join = nn.Linear(width + states, width)
        self.speaking: list[Recurrent] = in_order(recurrent("gru", width, width) for _ in range(layers))
        self.mels = nn.Linear(width + states, self.reduction * mels)
        self.stop = nn.Linear(width + states, self.reduction)

    def start(self, text: Text) -> State:
        """Before the first step."""
        zeros = text.states.new_zeros(len(text.states), self.asking.hidden_size)
        found = text.states.new_zeros(len(text.states), text.states.shape[2])
        speaking = tuple((zeros[None],) for _ in self.speaking)
        return State(text, (zeros,), found, self.attention.start(text), speaking)

    def forward(self, frames: Tensor, state: State) -> tuple[Spoken, State]:
        """Go on for S steps that are given ``frames`` ``(B, S, M)``, each the last one before its step."""
        cell = Steps(self.asking, known=self.prenet.width)
        asking, found, looked = state.asking, state.found, state.looked
        queries: list[Tensor] = []
        founds: list[Tensor] = []
        weights: list[Tensor] = []
        for gates in cell.prepare(self.prenet(frames)).unbind(1):
            (asking,) = cell(gates, found, [asking])
            found, looked = self.attention(asking[0], state.text, looked)
            queries.append(asking[0])
            founds.append(found)
            if looked is not None:
                weights.append(looked.last)
        all_queries, all_found = torch.stack(queries, 1), torch.stack(founds, 1)

        x = self.join(torch.cat([all_queries, all_found], -1))
        speaking: list[Hidden] = []
        for rnn, hidden in zip(self.speaking, state.speaking, strict=True):
            made, after = run(rnn, x, tuple(part.to(x.dtype) for part in hidden))
            x = x + made
            speaking.append(after)
        x = torch.cat([x, all_found], -1)
        spoken = Spoken(
            mels=exact(self.mels(x)).unflatten(-1, (self.reduction, -1)).flatten(1, 2),
            stops=exact(self.stop(x)).flatten(1),
            weights=torch.stack(weights, 1) if weights else None,
            queries=all_queries,
        )
        return spoken, State(state.text, asking, found, looked, tuple(speaking))

    def weights(self, spoken: Spoken, text: Text) -> Tensor:
        """Where each step looked, ``(B, S, L)``."""
        return self.attention.weights(spoken.queries, text) if spoken.weights is None else spoken.weights
