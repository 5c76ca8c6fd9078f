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

from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import HiddenState, RecurrentModule, RecurrentStepper, build_rnn, run_rnn
from jumok.models.layers.module_list import build_module_list as in_order
from jumok.models.layers.tacotron_attention import TacotronAlignment, TacotronAttention, TacotronMemory

__all__ = ["PreNet", "TacotronDecoder", "TacotronDecoderOutput", "TacotronDecoderState"]


@dataclass(frozen=True, eq=False)
class TacotronDecoderState:
    """How far a decoder has come."""

    memory: TacotronMemory
    attention_hidden: HiddenState  # of the GRU that asks
    context: Tensor  # (B, D): what was found last
    alignment: TacotronAlignment | None
    decoder_hidden: tuple[HiddenState, ...]  # of each GRU behind attention


@dataclass(frozen=True, eq=False)
class TacotronDecoderOutput:
    """What S steps of a decoder said."""

    mels: Tensor  # (B, S r, M)
    stop_logits: Tensor  # (B, S r): logits that a frame is the last
    weights: Tensor | None  # (B, S, L); None: attention looks anew each time, so they follow from the queries
    queries: Tensor  # (B, S, W)


class PreNet(nn.Module):
    """Two layers that drop much of what they are given, so that the text has to be looked at."""

    def __init__(
        self, input_width: int, widths: tuple[int, int], dropout: float, *, dropout_at_inference: bool
    ) -> None:
        super().__init__()
        self.width = widths[1]
        self.layers = in_order(nn.Linear(*sizes) for sizes in ((input_width, widths[0]), widths))
        self.dropout, self.dropout_at_inference = dropout, dropout_at_inference

    def forward(self, x: Tensor) -> Tensor:
        drops = self.training or self.dropout_at_inference
        for layer in self.layers:
            x = F.dropout(layer(x).relu(), self.dropout, training=drops)
        return x


class TacotronDecoder(nn.Module):
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
        attention: TacotronAttention,
        *,
        width: int,
        memory_width: int,
        num_layers: int,
        output_shape: tuple[int, int],
    ) -> None:
        super().__init__()
        self.prenet, self.attention = prenet, attention
        self.reduction_factor, mels = output_shape
        self.attention_rnn = build_rnn("gru", prenet.width + memory_width, width)
        self.rnn_projection = nn.Linear(width + memory_width, width)
        self.decoder_rnns: list[RecurrentModule] = in_order(
            build_rnn("gru", width, width) for _ in range(num_layers)
        )
        self.mel_projection = nn.Linear(width + memory_width, self.reduction_factor * mels)
        self.stop_projection = nn.Linear(width + memory_width, self.reduction_factor)

    def initial_state(self, memory: TacotronMemory) -> TacotronDecoderState:
        """Before the first step."""
        zeros = memory.states.new_zeros(len(memory.states), self.attention_rnn.hidden_size)
        found = memory.states.new_zeros(len(memory.states), memory.states.shape[2])
        speaking = tuple((zeros[None],) for _ in self.decoder_rnns)
        return TacotronDecoderState(
            memory, (zeros,), found, self.attention.initial_alignment(memory), speaking
        )

    def forward(
        self, frames: Tensor, state: TacotronDecoderState
    ) -> tuple[TacotronDecoderOutput, TacotronDecoderState]:
        """Go on for S steps that are given ``output_shape`` ``(B, S, M)``, each the last one before its step."""
        cell = RecurrentStepper(self.attention_rnn, known_width=self.prenet.width)
        asking, found, looked = state.attention_hidden, state.context, state.alignment
        queries: list[Tensor] = []
        founds: list[Tensor] = []
        weights: list[Tensor] = []
        for gates in cell.prepare(self.prenet(frames)).unbind(1):
            (asking,) = cell(gates, found, [asking])
            found, looked = self.attention(asking[0], state.memory, looked)
            queries.append(asking[0])
            founds.append(found)
            if looked is not None:
                weights.append(looked.last)
        all_queries, all_found = torch.stack(queries, 1), torch.stack(founds, 1)

        x = self.rnn_projection(torch.cat([all_queries, all_found], -1))
        speaking: list[HiddenState] = []
        for rnn, hidden in zip(self.decoder_rnns, state.decoder_hidden, strict=True):
            made, after = run_rnn(rnn, x, tuple(part.to(x.dtype) for part in hidden))
            x = x + made
            speaking.append(after)
        x = torch.cat([x, all_found], -1)
        spoken = TacotronDecoderOutput(
            mels=upcast(self.mel_projection(x)).unflatten(-1, (self.reduction_factor, -1)).flatten(1, 2),
            stop_logits=upcast(self.stop_projection(x)).flatten(1),
            weights=torch.stack(weights, 1) if weights else None,
            queries=all_queries,
        )
        return spoken, TacotronDecoderState(state.memory, asking, found, looked, tuple(speaking))

    def weights(self, output: TacotronDecoderOutput, memory: TacotronMemory) -> Tensor:
        """Where each step looked, ``(B, S, L)``."""
        return self.attention.weights(output.queries, memory) if output.weights is None else output.weights
