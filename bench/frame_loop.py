"""Tacotron's decoder as it is usually written: a Python loop, and in it all that a step does.

A step is a GRUCell that asks, attention from separate calls of PyTorch (a product with the query, a
convolution over where it has looked, tanh, a product with v, softmax, forward attention, a weighted sum),
GRUCells that speak, and two products that give frames and say whether they are the last. Only the pre-net and
the product with the keys are outside of the loop, for teacher forcing knows what goes into them beforehand.

:func:`looped` puts it in the place of the decoder of a :class:`~jumok.models.tacotron.Tacotron`, with the
weights that are there. So both have one encoder, one style, one refinement and one loss.

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

TINY = 1e-30  # what is divided by is never less
Step = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Memory:
    """What all steps look at."""

    states: Tensor  # (B, L, D)
    keys: Tensor  # (B, L, ·)
    padding: Tensor  # (B, L), True where there is no symbol


class Attention(nn.Module):
    """Begins with the weights of ``ours``."""

    def __init__(self, ours: TacotronAttention) -> None:
        super().__init__()
        score = ours.score
        self.query, self.key = copy.deepcopy(score.query), copy.deepcopy(score.key)
        self.v = nn.Linear(len(score.v), 1, bias=False)
        with torch.no_grad():
            self.v.weight.copy_(score.v[None])
        self.sees_location = isinstance(score, LocationSensitive)
        if isinstance(score, LocationSensitive):
            self.convolution, self.location = copy.deepcopy(score.convolution), copy.deepcopy(score.location)
        self.moves_on = ours.uses_forward_attention

    def prepare(self, states: Tensor, mask: Mask | None) -> Memory:
        rows, symbols = states.shape[:2]
        padding = torch.zeros(rows, symbols, dtype=torch.bool, device=states.device)
        if mask is not None:
            padding = ~mask.to_dense(1, symbols, states.device)[:, 0]
        return Memory(states, self.key(states), padding)

    def forward(self, query: Tensor, memory: Memory, last: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """What is found, ``(B, D)``, and where, ``(B, L)``."""
        inside = self.query(query)[:, None] + memory.keys
        if self.sees_location:
            looked = self.convolution(torch.stack([last, total], 1))
            inside = inside + self.location(looked.transpose(1, 2))
        scores = self.v(torch.tanh(inside)).squeeze(-1)
        weights = torch.softmax(scores.masked_fill(memory.padding, -torch.inf), -1)
        if self.moves_on:
            weights = weights * (last + F.pad(last, (1, -1)))
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=TINY)
        found = torch.bmm(weights[:, None].to(memory.states.dtype), memory.states).squeeze(1)
        return found, weights


class FrameLoop(nn.Module):
    """In the place of :class:`~jumok.models.frame_decoder.TacotronDecoder`, with its weights.

    ``step`` is :meth:`FrameLoop.step`, or that compiled.
    """

    def __init__(self, ours: TacotronDecoder, step: Step | None = None) -> None:
        super().__init__()
        self.take: Step = FrameLoop.step if step is None else step
        self.reduction = ours.reduction_factor
        self.prenet, self.attention = copy.deepcopy(ours.prenet), Attention(ours.attention)
        self.asking = _cell(ours.attention_rnn)
        self.join = copy.deepcopy(ours.rnn_projection)
        self.speaking = nn.ModuleList(map(_cell, ours.decoder_rnns))
        self.mels, self.stop = copy.deepcopy(ours.mel_projection), copy.deepcopy(ours.stop_projection)

    def start(self, text: Memory) -> Memory:
        return text

    def forward(self, frames: Tensor, text: Memory) -> tuple[TacotronDecoderOutput, Memory]:
        """All steps, which are given ``frames`` ``(B, S, M)``."""
        rows, symbols, width = text.states.shape
        state = text.states.new_zeros(rows, self.asking.hidden_size)
        found, speaking = text.states.new_zeros(rows, width), (state,) * len(self.speaking)
        last = total = text.states.new_zeros(rows, symbols, dtype=torch.float32)
        if self.attention.moves_on:
            last = last.index_fill(1, torch.zeros(1, dtype=torch.long, device=last.device), 1.0)
        said: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for given in self.prenet(frames).unbind(1):
            state, found, last, mels, stops, *speaking = self.take(
                self, given, state, found, last, total, text, *speaking
            )
            total = total + last
            said.append((mels, stops, last, state))
        all_mels, all_stops, weights, queries = (torch.stack(each, 1) for each in zip(*said, strict=True))
        mels = all_mels.float().unflatten(-1, (self.reduction, -1)).flatten(1, 2)
        return TacotronDecoderOutput(mels, all_stops.float().flatten(1), weights, queries), text

    def step(
        self, given: Tensor, state: Tensor, found: Tensor, last: Tensor, total: Tensor, text: Memory,
        *speaking: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """State, what is found and where, mels, whether they are the last, and the states that speak."""
        state = self.asking(torch.cat([given, found], -1), state)
        found, weights = self.attention(state, text, last, total)
        x = self.join(torch.cat([state, found], -1))
        after = []
        for cell, before in zip(self.speaking, speaking, strict=True):
            after.append(cell(x, before))
            x = x + after[-1]
        x = torch.cat([x, found], -1)
        return state, found, weights, self.mels(x), self.stop(x), *after

    def weights(self, spoken: TacotronDecoderOutput, text: Memory) -> Tensor | None:
        return spoken.weights


def looped(ours: Tacotron, step: Step | None = None) -> Tacotron:
    """A copy whose decoder is the loop."""
    model: Any = copy.deepcopy(ours)
    device = next(ours.parameters()).device
    model.decoder = FrameLoop(ours.decoder, step).to(device).train(ours.training)
    return model  # type: ignore[no-any-return]


def _cell(rnn: Any) -> nn.GRUCell:
    cell = nn.GRUCell(rnn.input_size, rnn.hidden_size)
    with torch.no_grad():
        for name, parameter in cell.named_parameters():
            parameter.copy_(getattr(rnn, f"{name}_l0"))
    return cell
