"""Recurrent layers, GRU and LSTM: over whole sentences, and one step at a time.

PyTorch's layers hold the parameters. There are several ways to run them::

    run_rnn              sentences without padding
    run_rnn_on_tokens    padded sentences, with lengths on the host (packed) or on the device (paused)
    run_packed_rnn       packed sentences, sorted by length (see ragged_layout)
    RecurrentStepper     one step at a time, for decoders whose input depends on the previous step

A *hidden state* is a tuple, ``(h,)`` for a GRU and ``(h, c)`` for an LSTM. Each tensor is
``(num_layers, B, width)`` for a whole stack and ``(B, width)`` for one layer.
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

RecurrentModule = nn.GRU | nn.LSTM
HiddenState = tuple[Tensor, ...]
SATURATED_GATE = 100.0  # added to a gate's input, it opens the gate; its negative closes it
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
    """Build recurrent layers over ``(B, T, input_width)`` with dropout between them.

    Recurrent weights are initialized orthogonal, which preserves the norm of states. Biases are zero, except
    that of an LSTM's forget gate, which is one.
    """
    rnn_class: type[RecurrentModule] = nn.GRU if cell == "gru" else nn.LSTM
    dropout = dropout if num_layers > 1 else 0.0  # PyTorch warns about dropout in a single layer
    rnn = rnn_class(input_width, width, num_layers, batch_first=True, bidirectional=bidirectional, dropout=dropout)
    for name, parameter in rnn.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
            if cell == "lstm" and name.startswith("bias_ih"):
                nn.init.ones_(parameter[width : 2 * width])  # the gates' order is i, f, g, o
            continue
        init_ = nn.init.orthogonal_ if name.startswith("weight_hh") else nn.init.xavier_uniform_
        for gate in parameter.split(width):
            init_(gate)
    return rnn


# -------------------------------------------------------------------------------- whole sentences


def run_rnn(rnn: RecurrentModule, x: Tensor, hidden: HiddenState) -> tuple[Tensor, HiddenState]:
    """Return the last layer's states for ``x`` ``(B, T, input_width)``, and the final hidden state."""
    return _call_rnn(rnn, x, hidden if isinstance(rnn, nn.LSTM) else hidden[0])


def run_packed_rnn(rnn: RecurrentModule, x: Tensor, packed_steps: PackedSteps) -> Tensor:
    """Return the last layer's states, from zeros, of packed sentences that are sorted by falling length.

    ``x`` ``(words, input_width)`` holds all first words, then all second words, and so on. The states have
    the same order.

    On CUDA, a narrow GRU of one layer uses one kernel for all steps, where cuDNN launches several per step.
    If the GPU does not support the kernel, cuDNN is used (see :mod:`jumok.attention.gpu_support`).
    """
    is_simple = isinstance(rnn, nn.GRU) and rnn.num_layers == 1 and rnn.bias
    if is_simple and triton_unsupported_reason(x, uses_matmul=True) is None:
        from jumok.models.kernels import gru

        if rnn.hidden_size <= gru.MAX_WIDTH:
            weights = [get_layer_weights(rnn, 0, suffix) for suffix in _get_direction_suffixes(rnn)]
            return gru.run_fused_gru(x, weights, packed_steps)
    if torch.is_grad_enabled() and not (x.is_cuda and rnn.training):
        # Without cuDNN, PyTorch's gradient of each step is as large as that of all of x.
        return _run_packed_stepwise(rnn, x, packed_steps.batch_sizes.tolist())
    states: PackedSequence = _call_rnn(rnn, PackedSequence(x, packed_steps.batch_sizes))[0]
    return states.data


def run_rnn_on_tokens(rnn: RecurrentModule, x: Tensor, tokens: Tokens) -> tuple[Tensor, HiddenState]:
    """Like :func:`run_rnn`, from zeros, for sentences padded on the right. States at padding are zero.

    The hidden state is that after the last word of each sentence, or for the backward direction after its
    first word. ``tokens`` are those that ``x`` ``(B, T, input_width)`` was computed from, at least one per
    sentence.
    """
    if tokens.mask is None:
        return _call_rnn(rnn, x)
    if tokens.device_lengths is not None:
        return _run_pausing_at_padding(rnn, x, tokens.device_lengths)
    # Sorted here, because with enforce_sorted=False PyTorch would wait for the GPU.
    lengths, order = torch.tensor(tokens.lengths).sort(descending=True, stable=True)
    rows, inverse = move_to_device(order, x.device), move_to_device(order.argsort(), x.device)
    packed = pack_padded_sequence(x.index_select(0, rows), lengths, batch_first=True)
    states, hidden = _call_rnn(rnn, packed)
    padded, _ = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
    return padded.index_select(0, inverse), tuple(part.index_select(1, inverse) for part in hidden)


def _run_pausing_at_padding(rnn: RecurrentModule, x: Tensor, lengths: Tensor) -> tuple[Tensor, HiddenState]:
    """Implement :func:`run_rnn_on_tokens` for lengths ``(B,)`` on the device: cells pause at padding.

    An additional input marks padding. Its fixed weights are so large that they saturate the gates: a GRU
    keeps its state (z = 1), and an LSTM its memory (f = 1, i = 0). So the backward direction reaches the last
    word of a sentence with its initial zeros, and the forward direction ends with its state after the last
    word.
    """
    is_lstm, layers = isinstance(rnn, nn.LSTM), rnn.num_layers
    padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    # Tensor cores need a multiple of 8 inputs.
    pause_input = F.pad(padding[..., None].to(x.dtype), (0, INPUT_ALIGNMENT - 1))
    width = rnn.hidden_size
    pause_weight = x.new_zeros((4 if is_lstm else 3) * width, INPUT_ALIGNMENT)  # gates i, f, g, o, or r, z, n
    pause_weight[width : 2 * width, 0] = SATURATED_GATE
    if is_lstm:
        pause_weight[:width, 0] = -SATURATED_GATE
    final_hidden: list[HiddenState] = []
    for layer in range(layers):
        if layer and rnn.dropout and rnn.training:
            x = F.dropout(x, rnn.dropout)
        weights: list[Tensor] = []
        for suffix in _get_direction_suffixes(rnn):
            weight_ih, *others = get_layer_weights(rnn, layer, suffix)
            weights += [torch.cat([weight_ih, pause_weight.to(weight_ih.dtype)], 1), *others]
        x, hidden = _run_layer(rnn, torch.cat([x, pause_input], -1), weights)
        x = x.masked_fill(padding[..., None], 0.0)
        if is_lstm:  # c was kept, but h = o ∘ tanh(c) depends on the input: take h at the last word
            last = (lengths - 1)[:, None, None].expand(-1, 1, width)
            forward_h = x[..., :width].gather(1, last)[:, 0]
            hidden = torch.stack([forward_h, *hidden[0][1:]]), hidden[1]
        final_hidden.append(hidden)
    return x, tuple(torch.cat(parts) for parts in zip(*final_hidden, strict=True))


def _run_packed_stepwise(rnn: RecurrentModule, x: Tensor, batch_sizes: list[int]) -> Tensor:
    """Implement :func:`run_packed_rnn` one step at a time."""
    cell = lstm_cell if isinstance(rnn, nn.LSTM) else gru_cell
    for layer in range(rnn.num_layers):
        if layer and rnn.dropout and rnn.training:
            x = F.dropout(x, rnn.dropout)
        directions: list[Tensor] = []
        for suffix in _get_direction_suffixes(rnn):
            weight_ih, weight_hh, bias_ih, bias_hh = get_layer_weights(rnn, layer, suffix)
            input_gates = F.linear(x, weight_ih, bias_ih).split(batch_sizes)
            recurrent_linear = DeferredLinear(weight_hh, bias_hh)
            hidden: HiddenState = (x.new_zeros(0, rnn.hidden_size),) * (1 + isinstance(rnn, nn.LSTM))
            states: list[Tensor] = []
            steps = list(zip(batch_sizes, input_gates, strict=True))
            for size, gates in reversed(steps) if suffix else steps:
                # A negative pad drops finished sentences. Sentences that begin here start from zeros.
                change = size - len(hidden[0])
                hidden = tuple(F.pad(part, (0, 0, 0, change)) if change else part for part in hidden)
                hidden = cell(gates, recurrent_linear(hidden[0]), hidden)
                states.append(hidden[0])
            directions.append(torch.cat(states[::-1] if suffix else states))
        x = torch.cat(directions, -1)
    return x


def _get_direction_suffixes(rnn: RecurrentModule) -> tuple[str, ...]:
    """Suffixes of the parameter names of each direction."""
    return ("", "_reverse") if rnn.bidirectional else ("",)


def get_layer_weights(rnn: RecurrentModule, layer: int = 0, suffix: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weight_ih, weight_hh, bias_ih and bias_hh of a layer in one direction."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    weight_ih, weight_hh, bias_ih, bias_hh = (getattr(rnn, f"{name}_l{layer}{suffix}") for name in names)
    return weight_ih, weight_hh, bias_ih, bias_hh


def _run_layer(rnn: RecurrentModule, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, HiddenState]:
    """Run one layer of the type of ``rnn`` with other weights, from zeros."""
    directions = 1 + rnn.bidirectional
    zeros = x.new_zeros(directions, x.shape[0], rnn.hidden_size)
    arguments = (weights, True, 1, 0.0, rnn.training, rnn.bidirectional, True)
    with warnings.catch_warnings(), _allow_gradients(rnn):
        # cuDNN prefers weights in one piece of memory. These are new each time and copied anyway.
        warnings.filterwarnings("ignore", message="RNN module weights are not part")
        if isinstance(rnn, nn.LSTM):
            states, h, c = torch.lstm(x, (zeros, zeros), *arguments)
            return states, (h, c)
        states, h = torch.gru(x, zeros, *arguments)
        return states, (h,)


def _call_rnn(rnn: RecurrentModule, *inputs: Any) -> tuple[Any, HiddenState]:
    with _allow_gradients(rnn):
        states, hidden = rnn(*inputs)
    return states, (hidden,) if isinstance(hidden, Tensor) else hidden


def _allow_gradients(rnn: RecurrentModule) -> contextlib.AbstractContextManager[None]:
    # cuDNN supports gradients in training mode only. In eval mode they may be needed for attributions.
    needs_workaround = torch.is_grad_enabled() and not rnn.training
    return torch.backends.cudnn.flags(enabled=False) if needs_workaround else contextlib.nullcontext()


def reverse_sequences(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse the sequences ``x`` ``(B, T, D)``. Padding stays on the right.

    ``lengths`` ``(B,)`` are on the device. None means that there is no padding.
    """
    if lengths is None:
        return x.flip(1)
    positions = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths[:, None] - 1 - positions
    return x.gather(1, torch.where(mirrored >= 0, mirrored, positions)[..., None].expand_as(x))


# ----------------------------------------------------------------------------------- step by step


class RecurrentStepper:
    """Runs the layers of a unidirectional ``rnn`` one step at a time, in one loop.

    The first layer's input is ``[known; feed]``. The first ``known_width`` numbers are known for all steps
    before the loop, and :meth:`prepare` multiplies them by the weights. The rest, ``feed``, is passed at each
    step.
    """

    def __init__(self, rnn: RecurrentModule, known_width: int) -> None:
        def get_parameters(name: str) -> list[Tensor]:
            return [getattr(rnn, f"{name}_l{layer}") for layer in range(rnn.num_layers)]

        weights, biases = get_parameters("weight_ih"), get_parameters("bias_ih")
        self.known_projection = weights[0][:, :known_width], biases[0]
        self.input_linears = [
            DeferredLinear(weights[0][:, known_width:]),
            *map(DeferredLinear, weights[1:], biases[1:]),
        ]
        self.recurrent_linears = list(map(DeferredLinear, get_parameters("weight_hh"), get_parameters("bias_hh")))
        self.cell = lstm_cell if isinstance(rnn, nn.LSTM) else gru_cell
        self.dropout = rnn.dropout if rnn.training else 0.0

    def prepare(self, x: Tensor) -> Tensor:
        """Contribution ``(B, T, gates)`` of known inputs ``(B, T, known_width)`` to the first gates."""
        return F.linear(x, *self.known_projection)

    def __call__(self, known_gates: Tensor, feed: Tensor, hidden: Sequence[HiddenState]) -> list[HiddenState]:
        """Return the hidden state of each layer after a step.

        ``known_gates`` ``(B, gates)`` is this step's part of the output of :meth:`prepare`, and ``hidden``
        has the states of each layer before the step.
        """
        gates = self.input_linears[0](feed, addend=known_gates)
        new_hidden: list[HiddenState] = []
        for layer, old in enumerate(hidden):
            if layer:
                x = new_hidden[-1][0]
                gates = self.input_linears[layer](F.dropout(x, self.dropout) if self.dropout else x)
            new_hidden.append(self.cell(gates, self.recurrent_linears[layer](old[0]), old))
        return new_hidden


def gru_cell(input_gates: Tensor, state_gates: Tensor, hidden: HiddenState) -> HiddenState:
    """One step of a GRU, from the contributions of input and state to its gates, ``(B, 3 · width)``.

    ::

        r = σ(W_r x + U_r h)    z = σ(W_z x + U_z h)    n = tanh(W_n x + r ∘ (U_n h))
        h' = (1 − z) ∘ n + z ∘ h

    As in cuDNN, the reset gate is applied after the product with U_n. (In Cho's and Bahdanau's papers it is
    applied before, which needs a second product.)
    """
    return (gru_step(input_gates, state_gates, hidden[0].to(input_gates.dtype))[0],)


def gru_step(input_gates: Tensor, state_gates: Tensor, h: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the state after a step of a GRU, and what :func:`gru_step_backward` needs."""
    if input_gates.is_cuda:  # one kernel
        new_h, workspace = torch.ops.aten._thnn_fused_gru_cell(input_gates, state_gates, h)
        return new_h, (workspace,)
    widths = 2 * h.shape[-1], h.shape[-1]
    (rz, n), (state_rz, state_n) = input_gates.split(widths, -1), state_gates.split(widths, -1)
    rz = torch.sigmoid(rz + state_rz)
    r, z = rz.chunk(2, -1)
    n = torch.tanh(torch.addcmul(n, r, state_n))
    return torch.lerp(n, h, z), (rz, n, state_n, h)


def gru_step_backward(d_h: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input's gates, of the state's gates, and of the state before a GRU step."""
    if d_h.is_cuda:  # one kernel
        gradients: tuple[Tensor, ...] = torch.ops.aten._thnn_fused_gru_cell_backward(d_h, *saved, False)
        return gradients[0], gradients[1], gradients[2]
    rz, n, state_n, h = saved
    r, z = rz.chunk(2, -1)
    d_old_h = d_h * z
    d_n = torch.ops.aten.tanh_backward(d_h - d_old_h, n)
    d_rz = torch.ops.aten.sigmoid_backward(torch.cat([d_n * state_n, d_h * (h - n)], -1), rz)
    return torch.cat([d_rz, d_n], -1), torch.cat([d_rz, d_n * r], -1), d_old_h


def lstm_cell(input_gates: Tensor, state_gates: Tensor, hidden: HiddenState) -> HiddenState:
    """One step of an LSTM, from the contributions of input and state to its gates, ``(B, 4 · width)``.

    ::

        i, f, o = σ(W x + U h) of each    g = tanh(W_g x + U_g h)
        c' = f ∘ c + i ∘ g    h' = o ∘ tanh(c')
    """
    c = hidden[1].to(input_gates.dtype)
    if input_gates.is_cuda:  # one kernel
        h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(input_gates, state_gates, c)
        return h, c
    i, f, g, o = (input_gates + state_gates).chunk(4, -1)
    c = torch.addcmul(torch.sigmoid(f) * c, torch.sigmoid(i), torch.tanh(g))
    return torch.sigmoid(o) * torch.tanh(c), c
