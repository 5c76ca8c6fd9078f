"""Recurrent layers, GRU and LSTM: over whole sentences, and one step at a time.

PyTorch's own layers hold the parameters and run whole sentences (cuDNN on a GPU). :class:`RecurrentStepper` goes through
the same layers word by word, for decoders whose input depends on what they saw a step before.

A *hidden state* is a tuple, ``(h,)`` for a GRU and ``(h, c)`` for an LSTM, so that both are handled alike.
Each part is ``(num_layers, B, width)`` for a whole stack and ``(B, width)`` for one layer.
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

from jumok.attention.gpu_support import triton_unsupported_reason
from jumok.attention.mask_types import move_to_device
from jumok.batches.tokens import Tokens
from jumok.models.layers.deferred_linear import DeferredLinear
from jumok.models.layers.ragged_layout import PackedSteps

__all__ = [
    "HiddenState",
    "RecurrentModule",
    "RecurrentStepper",
    "build_rnn",
    "reverse_sequences",
    "run_packed_rnn",
    "run_rnn",
    "run_rnn_on_tokens",
]

RecurrentModule = nn.GRU | nn.LSTM
HiddenState = tuple[Tensor, ...]
SATURATED_GATE = 100.0  # a gate with this input is open, with its negative closed, whatever else it is given
INPUT_ALIGNMENT = 8


def build_rnn(
    cell: Literal["gru", "lstm"],
    input_width: int,
    width: int,
    num_layers: int = 1,
    *,
    bidirectional: bool = False,
    dropout: float = 0.0,
) -> RecurrentModule:
    """Recurrent layers over ``(B, T, input_width)`` with dropout between them, ready to learn.

    Recurrent weights start orthogonal, so that a state keeps its length from step to step. Biases start at
    zero, but that of an LSTM's forget gate at one, so that it remembers until it learns to forget.
    """
    kind: type[RecurrentModule] = nn.GRU if cell == "gru" else nn.LSTM
    between = dropout if num_layers > 1 else 0.0
    rnn = kind(input_width, width, num_layers, batch_first=True, bidirectional=bidirectional, dropout=between)
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


def run_rnn(rnn: RecurrentModule, x: Tensor, hidden: HiddenState) -> tuple[Tensor, HiddenState]:
    """The last layer's states at all steps of ``x`` ``(B, T, input_width)``, and the hidden state after them."""
    return _call_rnn(rnn, x, hidden if isinstance(rnn, nn.LSTM) else hidden[0])


def run_packed_rnn(rnn: RecurrentModule, x: Tensor, packed_steps: PackedSteps) -> Tensor:
    """The last layer's states, from zeros, of sentences without padding, the longest first.

    ``x`` ``(words, input_width)`` has all first words, then all second words, and so on. The states lie as ``x``
    does.

    On CUDA, a narrow GRU of one layer takes one kernel for all steps, where cuDNN launches several a step.
    (A GPU that the kernel does not run on takes cuDNN: see :mod:`jumok.attention.capability`.)
    """
    plain = isinstance(rnn, nn.GRU) and rnn.num_layers == 1 and rnn.bias
    if plain and triton_unsupported_reason(x, uses_matmul=True) is None:
        from jumok.models.kernels import gru

        if rnn.hidden_size <= gru.MAX_WIDTH:
            return gru.run_fused_gru(
                x, [_get_layer_weights(rnn, 0, way) for way in _get_direction_suffixes(rnn)], packed_steps
            )
    if torch.is_grad_enabled() and not (x.is_cuda and rnn.training):
        # Without cuDNN, PyTorch's gradient of each step would be as large as all of x.
        return _run_packed_stepwise(rnn, x, packed_steps.batch_sizes.tolist())
    states: PackedSequence = _call_rnn(rnn, PackedSequence(x, packed_steps.batch_sizes))[0]
    return states.data


def run_rnn_on_tokens(rnn: RecurrentModule, x: Tensor, tokens: Tokens) -> tuple[Tensor, HiddenState]:
    """As :func:`run_rnn`, from zeros, of sentences that are padded at the right. States of padding are zero.

    The hidden state is that after each sentence's own last word; of the direction that reads backwards, after
    its first. ``tokens`` are those of which ``x`` ``(B, T, input_width)`` was made, at least one a sentence.
    """
    if tokens.mask is None:
        return _call_rnn(rnn, x)
    if tokens.device_lengths is not None:
        return _run_pausing_at_padding(rnn, x, tokens.device_lengths)
    # Sorted here, and sorted back here: with enforce_sorted=False, PyTorch would wait for the GPU.
    descending, order = torch.tensor(tokens.lengths).sort(descending=True, stable=True)
    rows, back = move_to_device(order, x.device), move_to_device(order.argsort(), x.device)
    packed = pack_padded_sequence(x.index_select(0, rows), descending, batch_first=True)
    states, hidden = _call_rnn(rnn, packed)
    padded, _ = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
    return padded.index_select(0, back), tuple(part.index_select(1, back) for part in hidden)


def _run_pausing_at_padding(rnn: RecurrentModule, x: Tensor, lengths: Tensor) -> tuple[Tensor, HiddenState]:
    """The same, where the host does not know the lengths ``lengths`` ``(B,)``: cells pause at padding.

    A further input says where padding is, and its fixed weights are so large that they alone decide: a GRU
    keeps its state (z = 1), an LSTM its memory (f = 1, i = 0). So the direction that reads backwards comes to
    a sentence's last word with the zeros it began with, and the other ends with what it knew there.
    """
    is_lstm, layers = isinstance(rnn, nn.LSTM), rnn.num_layers
    padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    paused = F.pad(padding[..., None].to(x.dtype), (0, INPUT_ALIGNMENT - 1))  # tensor cores want whole eights
    width = rnn.hidden_size
    decided = x.new_zeros((4 if is_lstm else 3) * width, INPUT_ALIGNMENT)  # gates i, f, g, o, or r, z, n
    decided[width : 2 * width, 0] = SATURATED_GATE
    if is_lstm:
        decided[:width, 0] = -SATURATED_GATE
    after: list[HiddenState] = []
    for layer in range(layers):
        if layer and rnn.dropout and rnn.training:
            x = F.dropout(x, rnn.dropout)
        weights: list[Tensor] = []
        for way in _get_direction_suffixes(rnn):
            from_input, *others = _get_layer_weights(rnn, layer, way)
            weights += [torch.cat([from_input, decided.to(from_input.dtype)], 1), *others]
        x, hidden = _run_layer(rnn, torch.cat([x, paused], -1), weights)
        x = x.masked_fill(padding[..., None], 0.0)
        if is_lstm:  # its memory was kept, but what it makes of it depends on the word
            last = (lengths - 1)[:, None, None].expand(-1, 1, width)
            forwards = x[..., :width].gather(1, last)[:, 0]
            hidden = torch.stack([forwards, *hidden[0][1:]]), hidden[1]
        after.append(hidden)
    return x, tuple(torch.cat(parts) for parts in zip(*after, strict=True))


def _run_packed_stepwise(rnn: RecurrentModule, x: Tensor, batch_sizes: list[int]) -> Tensor:
    """:func:`run_packed_rnn`, a step at a time."""
    cell = lstm_cell if isinstance(rnn, nn.LSTM) else gru_cell
    for layer in range(rnn.num_layers):
        if layer and rnn.dropout and rnn.training:
            x = F.dropout(x, rnn.dropout)
        ways: list[Tensor] = []
        for way in _get_direction_suffixes(rnn):
            from_input, from_state, bias, bias_of_state = _get_layer_weights(rnn, layer, way)
            gates, product = (
                F.linear(x, from_input, bias).split(batch_sizes),
                DeferredLinear(from_state, bias_of_state),
            )
            hidden: HiddenState = (x.new_zeros(0, rnn.hidden_size),) * (1 + isinstance(rnn, nn.LSTM))
            states: list[Tensor] = []
            for size, given in zip(
                *(reversed(of) if way else of for of in (batch_sizes, gates)), strict=True
            ):
                # Sentences that are over are left out, and those that begin here begin with zeros.
                more = size - len(hidden[0])
                hidden = tuple(F.pad(part, (0, 0, 0, more)) if more else part for part in hidden)
                hidden = cell(given, product(hidden[0]), hidden)
                states.append(hidden[0])
            ways.append(torch.cat(states[::-1] if way else states))
        x = torch.cat(ways, -1)
    return x


def _get_direction_suffixes(rnn: RecurrentModule) -> tuple[str, ...]:
    """How the names of its parameters end: those that read on, and perhaps those that read backwards."""
    return ("", "_reverse") if rnn.bidirectional else ("",)


def _get_layer_weights(
    rnn: RecurrentModule, layer: int, suffix: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight_ih, weight_hh, bias_ih and bias_hh."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    from_input, from_state, bias, bias_of_state = (getattr(rnn, f"{name}_l{layer}{suffix}") for name in names)
    return from_input, from_state, bias, bias_of_state


def _run_layer(rnn: RecurrentModule, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, HiddenState]:
    """One layer of the kind of ``rnn`` with other weights, from zeros."""
    directions = 1 + rnn.bidirectional
    zeros = x.new_zeros(directions, x.shape[0], rnn.hidden_size)
    rest = (weights, True, 1, 0.0, rnn.training, rnn.bidirectional, True)
    with warnings.catch_warnings(), _allow_gradients(rnn):
        # cuDNN likes weights that lie end to end. These are new each time, so they are copied anyway.
        warnings.filterwarnings("ignore", message="RNN module weights are not part")
        if isinstance(rnn, nn.LSTM):
            states, h, c = torch.lstm(x, (zeros, zeros), *rest)
            return states, (h, c)
        states, h = torch.gru(x, zeros, *rest)
        return states, (h,)


def _call_rnn(rnn: RecurrentModule, *inputs: Any) -> tuple[Any, HiddenState]:
    with _allow_gradients(rnn):
        states, hidden = rnn(*inputs)
    return states, (hidden,) if isinstance(hidden, Tensor) else hidden


def _allow_gradients(rnn: RecurrentModule) -> contextlib.AbstractContextManager[None]:
    # cuDNN keeps what gradients need only in training. Those of a model at rest are for who looks into it.
    at_rest = torch.is_grad_enabled() and not rnn.training
    return torch.backends.cudnn.flags(enabled=False) if at_rest else contextlib.nullcontext()


def reverse_sequences(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The rows of ``x`` ``(B, T, D)`` from last word to first; padding stays at the right.

    ``lengths`` ``(B,)`` are on the device; None: all rows are full.
    """
    if lengths is None:
        return x.flip(1)
    place = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths[:, None] - 1 - place
    return x.gather(1, torch.where(mirrored >= 0, mirrored, place)[..., None].expand_as(x))


# ----------------------------------------------------------------------------------- step by step


class RecurrentStepper:
    """The layers of ``rnn`` (of one direction) one step at a time, for one loop.

    The first layer's input is ``[known; feed]``. Its first ``known`` numbers are there for all steps before
    the loop, and :meth:`prepare` multiplies them by the weights; the rest is ``feed`` step by step.
    """

    def __init__(self, rnn: RecurrentModule, known_width: int) -> None:
        def of_layers(name: str) -> list[Tensor]:
            return [getattr(rnn, f"{name}_l{layer}") for layer in range(rnn.num_layers)]

        weights, biases = of_layers("weight_ih"), of_layers("bias_ih")
        self.known_projection = weights[0][:, :known_width], biases[0]
        self.input_linears = [
            DeferredLinear(weights[0][:, known_width:]),
            *map(DeferredLinear, weights[1:], biases[1:]),
        ]
        self.recurrent_linears = list(map(DeferredLinear, of_layers("weight_hh"), of_layers("bias_hh")))
        self.cell = lstm_cell if isinstance(rnn, nn.LSTM) else gru_cell
        self.dropout = rnn.dropout if rnn.training else 0.0

    def prepare(self, x: Tensor) -> Tensor:
        """What the known inputs ``(B, T, known)`` give the first layer's gates, ``(B, T, gates)``."""
        return F.linear(x, *self.known_projection)

    def __call__(self, known_gates: Tensor, feed: Tensor, hidden: Sequence[HiddenState]) -> list[HiddenState]:
        """The hidden state of each layer after a step, from those before it.

        ``known_gates`` ``(B, gates)`` is this step's part of what :meth:`prepare` gave.
        """
        gates = self.input_linears[0](feed, addend=known_gates)
        after: list[HiddenState] = []
        for layer, before in enumerate(hidden):
            if layer:
                below = after[-1][0]
                gates = self.input_linears[layer](F.dropout(below, self.dropout) if self.dropout else below)
            after.append(self.cell(gates, self.recurrent_linears[layer](before[0]), before))
        return after


def gru_cell(input_gates: Tensor, state_gates: Tensor, hidden: HiddenState) -> HiddenState:
    """A GRU's step, given what its input and its state give the gates r, z and n, each ``(B, 3 · width)``.

    ::

        r = σ(W_r x + U_r h)    z = σ(W_z x + U_z h)    n = tanh(W_n x + r ∘ (U_n h))
        h' = (1 − z) ∘ n + z ∘ h

    As in cuDNN, the reset gate acts after the product with U_n (in Cho's and Bahdanau's papers before it,
    which would need a second product after the first).
    """
    (h,) = hidden
    h = h.to(input_gates.dtype)
    if input_gates.is_cuda:  # the same in one kernel
        return (torch.ops.aten._thnn_fused_gru_cell(input_gates, state_gates, h)[0],)
    width = h.shape[-1]
    (rz, n), (rz_of_state, n_of_state) = (x.split((2 * width, width), -1) for x in (input_gates, state_gates))
    r, z = torch.sigmoid(rz + rz_of_state).chunk(2, -1)
    return (torch.lerp(torch.tanh(torch.addcmul(n, r, n_of_state)), h, z),)


def lstm_cell(input_gates: Tensor, state_gates: Tensor, hidden: HiddenState) -> HiddenState:
    """An LSTM's step, given what its input and its state give the gates i, f, g, o, each ``(B, 4 · width)``.

    ::

        i, f, o = σ(W x + U h) of each    g = tanh(W_g x + U_g h)
        c' = f ∘ c + i ∘ g    h' = o ∘ tanh(c')
    """
    c = hidden[1].to(input_gates.dtype)
    if input_gates.is_cuda:  # the same in one kernel
        h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(input_gates, state_gates, c)
        return h, c
    i, f, g, o = (input_gates + state_gates).chunk(4, -1)
    c = torch.addcmul(torch.sigmoid(f) * c, torch.sigmoid(i), torch.tanh(g))
    return torch.sigmoid(o) * torch.tanh(c), c
