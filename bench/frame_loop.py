"""Tacotron's decoder as it is usually written: a Python loop over all operations of a step.

A step is the GRUCell of the attention RNN, attention from separate PyTorch operations (projection of the
query, convolution over earlier weights, tanh, product with v, softmax, forward attention, weighted sum), the
GRUCells of the decoder RNNs, and the projections to frames and stop logits. The pre-net and the projection
of the keys are outside of the loop, since teacher forcing knows their inputs beforehand.

:func:`with_frame_loop` replaces the decoder of a :class:`~jumok.models.tacotron.Tacotron` by this loop, with
the same weights. Encoder, style tokens, post-net and loss are the same.

Shapes: ``B`` utterances, ``L`` symbols, ``S`` steps of ``r`` frames, ``M`` mels; widths: ``W`` of a GRU,
``D`` of a symbol's state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention.masks import Mask
from jumok.attention.scores import LocationSensitive
from jumok.models.tacotron import Tacotron
from jumok.models.tacotron_decoder import TacotronAttention, TacotronDecoder, TacotronDecoderOutput

MIN_TOTAL = 1e-30  # minimum of the normalizer of forward attention
Step = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class LoopMemory:
    """The encoder's output, as all steps attend to it."""

    states: Tensor  # (B, L, D)
    keys: Tensor  # (B, L, ·)
    padding: Tensor  # (B, L), True where there is no symbol


class LoopAttention(nn.Module):
    """Attention to the text, with the weights of ``ours``."""

    def __init__(self, ours: TacotronAttention) -> None:
        super().__init__()
        score = ours.score
        self.query, self.key = copy.deepcopy(score.query), copy.deepcopy(score.key)
        self.v = nn.Linear(len(score.v), 1, bias=False)
        with torch.no_grad():
            self.v.weight.copy_(score.v[None])
        self.is_location_sensitive = isinstance(score, LocationSensitive)
        if isinstance(score, LocationSensitive):
            self.convolution, self.location = copy.deepcopy(score.convolution), copy.deepcopy(score.location)
        self.uses_forward_attention = ours.uses_forward_attention

    def prepare(self, states: Tensor, mask: Mask | None) -> LoopMemory:
        rows, symbols = states.shape[:2]
        padding = torch.zeros(rows, symbols, dtype=torch.bool, device=states.device)
        if mask is not None:
            padding = ~mask.to_dense(1, symbols, states.device)[:, 0]
        return LoopMemory(states, self.key(states), padding)

    def forward(
        self, query: Tensor, memory: LoopMemory, last_weights: Tensor, cumulative_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Context ``(B, D)`` and weights ``(B, L)`` of a query ``(B, W)``."""
        inside = self.query(query)[:, None] + memory.keys
        if self.is_location_sensitive:
            features = self.convolution(torch.stack([last_weights, cumulative_weights], 1))
            inside = inside + self.location(features.transpose(1, 2))
        scores = self.v(torch.tanh(inside)).squeeze(-1)
        weights = torch.softmax(scores.masked_fill(memory.padding, -torch.inf), -1)
        if self.uses_forward_attention:
            weights = weights * (last_weights + F.pad(last_weights, (1, -1)))
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=MIN_TOTAL)
        context = torch.bmm(weights[:, None].to(memory.states.dtype), memory.states).squeeze(1)
        return context, weights


class FrameLoop(nn.Module):
    """Replaces :class:`~jumok.models.tacotron_decoder.TacotronDecoder`, with its weights.

    ``step`` is :meth:`FrameLoop.step`, or its compiled version.
    """

    def __init__(self, ours: TacotronDecoder, step: Step | None = None) -> None:
        super().__init__()
        self.run_step: Step = FrameLoop.step if step is None else step
        self.reduction_factor = ours.reduction_factor
        self.prenet, self.attention = copy.deepcopy(ours.prenet), LoopAttention(ours.attention)
        self.attention_cell = _build_cell(ours.attention_rnn)
        self.rnn_projection = copy.deepcopy(ours.rnn_projection)
        self.decoder_cells = nn.ModuleList(map(_build_cell, ours.decoder_rnns))
        self.mel_projection = copy.deepcopy(ours.mel_projection)
        self.stop_projection = copy.deepcopy(ours.stop_projection)

    def initial_state(self, memory: LoopMemory) -> LoopMemory:
        return memory

    def forward(self, frames: Tensor, memory: LoopMemory) -> tuple[TacotronDecoderOutput, LoopMemory]:
        """Run all steps, with the input frames ``(B, S, M)``."""
        rows, symbols, width = memory.states.shape
        hidden = memory.states.new_zeros(rows, self.attention_cell.hidden_size)
        context, decoder_hidden = memory.states.new_zeros(rows, width), (hidden,) * len(self.decoder_cells)
        last_weights = cumulative_weights = memory.states.new_zeros(rows, symbols, dtype=torch.float32)
        if self.attention.uses_forward_attention:
            first = torch.zeros(1, dtype=torch.long, device=last_weights.device)
            last_weights = last_weights.index_fill(1, first, 1.0)
        outputs: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for frame in self.prenet(frames).unbind(1):
            hidden, context, last_weights, mels, stops, *decoder_hidden = self.run_step(
                self, frame, hidden, context, last_weights, cumulative_weights, memory, *decoder_hidden
            )
            cumulative_weights = cumulative_weights + last_weights
            outputs.append((mels, stops, last_weights, hidden))
        all_mels, all_stops, weights, queries = (torch.stack(each, 1) for each in zip(*outputs, strict=True))
        mels = all_mels.float().unflatten(-1, (self.reduction_factor, -1)).flatten(1, 2)
        return TacotronDecoderOutput(mels, all_stops.float().flatten(1), weights, queries), memory

    def step(
        self,
        frame: Tensor,
        hidden: Tensor,
        context: Tensor,
        last_weights: Tensor,
        cumulative_weights: Tensor,
        memory: LoopMemory,
        *decoder_hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        """Hidden state, context, weights, mels, stop logits, and the states of the decoder RNNs."""
        hidden = self.attention_cell(torch.cat([frame, context], -1), hidden)
        context, weights = self.attention(hidden, memory, last_weights, cumulative_weights)
        x = self.rnn_projection(torch.cat([hidden, context], -1))
        new_hidden = []
        for cell, previous in zip(self.decoder_cells, decoder_hidden, strict=True):
            new_hidden.append(cell(x, previous))
            x = x + new_hidden[-1]
        x = torch.cat([x, context], -1)
        return hidden, context, weights, self.mel_projection(x), self.stop_projection(x), *new_hidden

    def weights(self, output: TacotronDecoderOutput, memory: LoopMemory) -> Tensor | None:
        return output.weights


def with_frame_loop(ours: Tacotron, step: Step | None = None) -> Tacotron:
    """A copy of the model with the loop as its decoder."""
    model: Any = copy.deepcopy(ours)
    device = next(ours.parameters()).device
    model.decoder = FrameLoop(ours.decoder, step).to(device).train(ours.training)
    return model  # type: ignore[no-any-return]


def _build_cell(rnn: Any) -> nn.GRUCell:
    cell = nn.GRUCell(rnn.input_size, rnn.hidden_size)
    with torch.no_grad():
        for name, parameter in cell.named_parameters():
            parameter.copy_(getattr(rnn, f"{name}_l0"))
    return cell
