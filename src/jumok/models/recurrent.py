"""Recurrent layers, GRU and LSTM: over whole sentences, and one step at a time.

PyTorch's own layers hold the parameters and run whole sentences (cuDNN on a GPU). :class:`Steps` goes through
the same layers word by word, for decoders whose input depends on what they saw a step before.

A *hidden state* is a tuple, ``(h,)`` for a GRU and ``(h, c)`` for an LSTM, so that both are handled alike.
Each part is ``(layers, B, width)`` for a whole stack and ``(B, width)`` for one layer.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from jumok.attention.capability import why_no_kernel
from jumok.attention.kinds import moved
from jumok.batch import Tokens
from jumok.models.deferred import Deferred
from jumok.models.ragged import Packing

__all__ = ["Hidden", "Recurrent", "Steps", "read", "recurrent", "reversed_within", "run", "run_packed"]

Recurrent = nn.GRU | nn.LSTM
Hidden = tuple[Tensor, ...]
SURE = 100.0  # a gate with this input is open, with its negative closed, whatever else it is given
ALIGNED = 8


def recurrent(
    cell: Literal["gru", "lstm"],
    inputs: int,
    width: int,
    layers: int = 1,
    *,
    bidirectional: bool = False,
    dropout: float = 0.0,
) -> Recurrent:
    """Recurrent layers over ``(B, T, inputs)`` with dropout between them, ready to learn.

    Recurrent weights start orthogonal, so that a state keeps its length from step to step. Biases start at
    zero, but that of an LSTM's forget gate at one, so that it remembers until it learns to forget.
    """
    kind: type[Recurrent] = nn.GRU if cell == "gru" else nn.LSTM
    between = dropout if layers > 1 else 0.0
    rnn = kind(inputs, width, layers, batch_first=True, bidirectional=bidirectional, dropout=between)
    for name, parameter in rnn.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
            if cell == "lstm" and name.startswith("bias_ih"):
                nn.init.ones_(parameter[width : 2 * width])  # the gates' order is i, f, g, o
            continue
        fill = nn.init.orthogonal_ if name.startswith("weight_hh") else nn.init.xavier_uniform_
        for gate in parameter.split(width):
            fill(gate)
    return rnn


# -------------------------------------------------------------------------------- whole sentences


def run(rnn: Recurrent, x: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
    """The last layer's states at all steps of ``x`` ``(B, T, inputs)``, and the hidden state after them."""
    return _through(rnn, x, hidden if isinstance(rnn, nn.LSTM) else hidden[0])


def run_packed(rnn: Recurrent, x: Tensor, packing: Packing) -> Tensor:
    """The last layer's states, from zeros, of sentences without padding, the longest first.

    ``x`` ``(words, inputs)`` has all first words, then all second words, and so on. The states lie as ``x``
    does.

    On CUDA, a narrow GRU of one layer takes one kernel for all steps, where cuDNN launches several a step.
    (A GPU that the kernel does not run on takes cuDNN: see :mod:`jumok.attention.capability`.)
    """
    plain = isinstance(rnn, nn.GRU) and rnn.num_layers == 1 and rnn.bias
    if plain and why_no_kernel(x, products=True) is None:
        from jumok.models.kernels import gru

        if rnn.hidden_size <= gru.WIDEST:
            return gru.gru(x, [_weights(rnn, 0, way) for way in _ways(rnn)], packing)
    if torch.is_grad_enabled() and not (x.is_cuda and rnn.training):
        # Without cuDNN, PyTorch's gradient of each step would be as large as all of x.
        return _step_by_step(rnn, x, packing.sizes.tolist())
    states: PackedSequence = _through(rnn, PackedSequence(x, packing.sizes))[0]
    return states.data


def read(rnn: Recurrent, x: Tensor, tokens: Tokens) -> tuple[Tensor, Hidden]:
    """As :func:`run`, from zeros, of sentences that are padded at the right. States of padding are zero.

    The hidden state is that after each sentence's own last word; of the direction that reads backwards, after
    its first. ``tokens`` are those of which ``x`` ``(B, T, inputs)`` was made, at least one a sentence.
    """
    if tokens.mask is None:
        return _through(rnn, x)
    if tokens.counts is not None:
        return _pausing(rnn, x, tokens.counts)
    # Sorted here, and sorted back here: with enforce_sorted=False, PyTorch would wait for the GPU.
    descending, order = torch.tensor(tokens.lengths).sort(descending=True, stable=True)
    rows, back = moved(order, x.device), moved(order.argsort(), x.device)
    packed = pack_padded_sequence(x.index_select(0, rows), descending, batch_first=True)
    states, hidden = _through(rnn, packed)
    padded, _ = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
    return padded.index_select(0, back), tuple(part.index_select(1, back) for part in hidden)


def _pausing(rnn: Recurrent, x: Tensor, counts: Tensor) -> tuple[Tensor, Hidden]:
    """The same, where the host does not know the lengths ``counts`` ``(B,)``: cells pause at padding.

    A further input says where padding is, and its fixed weights are so large that they alone decide: a GRU
    keeps its state (z = 1), an LSTM its memory (f = 1, i = 0). So the direction that reads backwards comes to
    a sentence's last word with the zeros it began with, and the other ends with what it knew there.
    """
    is_lstm, layers = isinstance(rnn, nn.LSTM), rnn.num_layers
    padding = torch.arange(x.shape[1], device=x.device) >= counts[:, None]
    paused = F.pad(padding[..., None].to(x.dtype), (0, ALIGNED - 1))  # tensor cores want whole eights
    width = rnn.hidden_size
    decided = x.new_zeros((4 if is_lstm else 3) * width, ALIGNED)  # gates i, f, g, o, or r, z, n
    decided[width : 2 * width, 0] = SURE
    if is_lstm:
        decided[:width, 0] = -SURE
    after: list[Hidden] = []
    for layer in range(layers):
        if layer and rnn.dropout and rnn.training:
            x = F.dropout(x, rnn.dropout)
        weights: list[Tensor] = []
        for way in _ways(rnn):
            from_input, *others = _weights(rnn, layer, way)
            weights += [torch.cat([from_input, decided.to(from_input.dtype)], 1), *others]
        x, hidden = _layer(rnn, torch.cat([x, paused], -1), weights)
        x = x.masked_fill(padding[..., None], 0.0)
        if is_lstm:  # its memory was kept, but what it makes of it depends on the word
            last = (counts - 1)[:, None, None].expand(-1, 1, width)
            forwards = x[..., :width].gather(1, last)[:, 0]
            hidden = torch.stack([forwards, *hidden[0][1:]]), hidden[1]
        after.append(hidden)
    return x, tuple(torch.cat(parts) for parts in zip(*after, strict=True))


def _step_by_step(rnn: Recurrent, x: Tensor, sizes: list[int]) -> Tensor:
    """:func:`run_packed`, a step at a time."""
    cell = lstm_cell if isinstance(rnn, nn.LSTM) else gru_cell
    for layer in range(rnn.num_layers):
        if layer and rnn.dropout and rnn.training:
            x = F.dropout(x, rnn.dropout)
        ways: list[Tensor] = []
        for way in _ways(rnn):
            from_input, from_state, bias, bias_of_state = _weights(rnn, layer, way)
            gates, product = F.linear(x, from_input, bias).split(sizes), Deferred(from_state, bias_of_state)
            hidden: Hidden = (x.new_zeros(0, rnn.hidden_size),) * (1 + isinstance(rnn, nn.LSTM))
            states: list[Tensor] = []
            for size, given in zip(*(reversed(of) if way else of for of in (sizes, gates)), strict=True):
                # Sentences that are over are left out, and those that begin here begin with zeros.
                more = size - len(hidden[0])
                hidden = tuple(F.pad(part, (0, 0, 0, more)) if more else part for part in hidden)
                hidden = cell(given, product(hidden[0]), hidden)
                states.append(hidden[0])
            ways.append(torch.cat(states[::-1] if way else states))
        x = torch.cat(ways, -1)
    return x


def _ways(rnn: Recurrent) -> tuple[str, ...]:
    """How the names of its parameters end: those that read on, and perhaps those that read backwards."""
    return ("", "_reverse") if rnn.bidirectional else ("",)


def _weights(rnn: Recurrent, layer: int, way: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight_ih, weight_hh, bias_ih and bias_hh."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    from_input, from_state, bias, bias_of_state = (getattr(rnn, f"{name}_l{layer}{way}") for name in names)
    return from_input, from_state, bias, bias_of_state


def _layer(rnn: Recurrent, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Hidden]:
    """One layer of the kind of ``rnn`` with other weights, from zeros."""
    directions = 1 + rnn.bidirectional
    zeros = x.new_zeros(directions, x.shape[0], rnn.hidden_size)
    rest = (weights, True, 1, 0.0, rnn.training, rnn.bidirectional, True)
    with warnings.catch_warnings(), _differentiable(rnn):
        # cuDNN likes weights that lie end to end. These are new each time, so they are copied anyway.
        warnings.filterwarnings("ignore", message="RNN module weights are not part")
        if isinstance(rnn, nn.LSTM):
            states, h, c = torch.lstm(x, (zeros, zeros), *rest)
            return states, (h, c)
        states, h = torch.gru(x, zeros, *rest)
        return states, (h,)


def _through(rnn: Recurrent, *given: Any) -> tuple[Any, Hidden]:
    with _differentiable(rnn):
        states, hidden = rnn(*given)
    return states, (hidden,) if isinstance(hidden, Tensor) else hidden


def _differentiable(rnn: Recurrent) -> contextlib.AbstractContextManager[None]:
    # cuDNN keeps what gradients need only in training. Those of a model at rest are for who looks into it.
    at_rest = torch.is_grad_enabled() and not rnn.training
    return torch.backends.cudnn.flags(enabled=False) if at_rest else contextlib.nullcontext()


def reversed_within(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The rows of ``x`` ``(B, T, D)`` from last word to first; padding stays at the right.

    ``lengths`` ``(B,)`` are on the device; None: all rows are full.
    """
    if lengths is None:
        return x.flip(1)
    place = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths[:, None] - 1 - place
    return x.gather(1, torch.where(mirrored >= 0, mirrored, place)[..., None].expand_as(x))


# ----------------------------------------------------------------------------------- step by step


class Steps:
    """The layers of ``rnn`` (of one direction) one step at a time, for one loop.

    The first layer's input is ``[known; fed]``. Its first ``known`` numbers are there for all steps before
    the loop, and :meth:`prepare` multiplies them by the weights; the rest is ``fed`` step by step.
    """

    def __init__(self, rnn: Recurrent, known: int) -> None:
        def of_layers(name: str) -> list[Tensor]:
            return [getattr(rnn, f"{name}_l{layer}") for layer in range(rnn.num_layers)]

        weights, biases = of_layers("weight_ih"), of_layers("bias_ih")
        self.known = weights[0][:, :known], biases[0]
        self.from_below = [Deferred(weights[0][:, known:]), *map(Deferred, weights[1:], biases[1:])]
        self.from_before = list(map(Deferred, of_layers("weight_hh"), of_layers("bias_hh")))
        self.cell = lstm_cell if isinstance(rnn, nn.LSTM) else gru_cell
        self.dropout = rnn.dropout if rnn.training else 0.0

    def prepare(self, x: Tensor) -> Tensor:
        """What the known inputs ``(B, T, known)`` give the first layer's gates, ``(B, T, gates)``."""
        return F.linear(x, *self.known)

    def __call__(self, prepared: Tensor, fed: Tensor, hidden: Sequence[Hidden]) -> list[Hidden]:
        """The hidden state of each layer after a step, from those before it.

        ``prepared`` ``(B, gates)`` is this step's part of what :meth:`prepare` gave.
        """
        gates = self.from_below[0](fed, plus=prepared)
        after: list[Hidden] = []
        for layer, before in enumerate(hidden):
            if layer:
                below = after[-1][0]
                gates = self.from_below[layer](F.dropout(below, self.dropout) if self.dropout else below)
            after.append(self.cell(gates, self.from_before[layer](before[0]), before))
        return after


def gru_cell(from_input: Tensor, from_state: Tensor, hidden: Hidden) -> Hidden:
    """A GRU's step, given what its input and its state give the gates r, z and n, each ``(B, 3 · width)``.

    ::

        r = σ(W_r x + U_r h)    z = σ(W_z x + U_z h)    n = tanh(W_n x + r ∘ (U_n h))
        h' = (1 − z) ∘ n + z ∘ h

    As in cuDNN, the reset gate acts after the product with U_n (in Cho's and Bahdanau's papers before it,
    which would need a second product after the first).
    """
    (h,) = hidden
    h = h.to(from_input.dtype)
    if from_input.is_cuda:  # the same in one kernel
        return (torch.ops.aten._thnn_fused_gru_cell(from_input, from_state, h)[0],)
    width = h.shape[-1]
    (rz, n), (rz_of_state, n_of_state) = (x.split((2 * width, width), -1) for x in (from_input, from_state))
    r, z = torch.sigmoid(rz + rz_of_state).chunk(2, -1)
    return (torch.lerp(torch.tanh(torch.addcmul(n, r, n_of_state)), h, z),)


def lstm_cell(from_input: Tensor, from_state: Tensor, hidden: Hidden) -> Hidden:
    """An LSTM's step, given what its input and its state give the gates i, f, g, o, each ``(B, 4 · width)``.

    ::

        i, f, o = σ(W x + U h) of each    g = tanh(W_g x + U_g h)
        c' = f ∘ c + i ∘ g    h' = o ∘ tanh(c')
    """
    c = hidden[1].to(from_input.dtype)
    if from_input.is_cuda:  # the same in one kernel
        h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(from_input, from_state, c)
        return h, c
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    c = torch.addcmul(torch.sigmoid(f) * c, torch.sigmoid(i), torch.tanh(g))
    return torch.sigmoid(o) * torch.tanh(c), c
