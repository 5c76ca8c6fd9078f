"""Recurrent layers as ONNX operators, one per layer, which take the length of each sequence.

PyTorch packs sequences of different lengths, or pauses at their padding
(:mod:`jumok.models.layers.recurrent`). The operators ``LSTM`` and ``GRU`` of ONNX take the lengths as an
input. They also have another order of the gates,
which are blocks of rows of the weights::

    LSTM    PyTorch  input forget cell output        ONNX  input output forget cell
    GRU     PyTorch  reset update new                ONNX  update reset new
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from jumok.batches.tokens import Tokens
from jumok.models.layers.recurrent import HiddenState, RecurrentModule

LSTM_GATE_ORDER, GRU_GATE_ORDER = (0, 3, 1, 2), (1, 0, 2)  # index in PyTorch of each gate of ONNX
BUFFER_NAMES = ("onnx_w", "onnx_r", "onnx_b")  # weights in the gate order of ONNX


def run_rnn_on_tokens(rnn: RecurrentModule, x: Tensor, tokens: Tokens) -> tuple[Tensor, HiddenState]:
    """As :func:`jumok.models.layers.recurrent.run_rnn_on_tokens`, for tokens with ``device_lengths``."""
    return _run_layers(rnn, x, None, tokens.device_lengths)


def run_rnn(rnn: RecurrentModule, x: Tensor, hidden: HiddenState) -> tuple[Tensor, HiddenState]:
    """As :func:`jumok.models.layers.recurrent.run_rnn`."""
    return _run_layers(rnn, x, hidden, None)


def _run_layers(
    rnn: RecurrentModule, x: Tensor, hidden: HiddenState | None, lengths: Tensor | None
) -> tuple[Tensor, HiddenState]:
    """Return the outputs ``(B, T, directions · width)`` of the last layer, and the final hidden state."""
    num_directions = 1 + rnn.bidirectional
    x = x.transpose(0, 1)  # (T, B, inputs), the only layout of ONNX Runtime
    final_states: list[list[Tensor]] = []
    for layer in range(rnn.num_layers):
        rows = slice(layer * num_directions, (layer + 1) * num_directions)
        layer_hidden = None if hidden is None else [part[rows] for part in hidden]
        x, *states = _run_layer(rnn, layer, x, layer_hidden, lengths)
        final_states.append(states)
    return x.transpose(0, 1), tuple(torch.cat(parts) for parts in zip(*final_states, strict=True))


@contextlib.contextmanager
def use_onnx_gate_order(model: nn.Module) -> Iterator[None]:
    """Within this context, recurrent layers also have their weights in the gate order of ONNX, as buffers."""
    rnns = [module for module in model.modules() if isinstance(module, nn.GRU | nn.LSTM)]
    for rnn in rnns:
        for layer in range(rnn.num_layers):
            for name, weights in zip(BUFFER_NAMES, _reorder_gates(rnn, layer), strict=True):
                rnn.register_buffer(f"{name}{layer}", weights, persistent=False)
    try:
        yield
    finally:
        for rnn in rnns:
            for layer in range(rnn.num_layers):
                for name in BUFFER_NAMES:
                    delattr(rnn, f"{name}{layer}")


@torch.no_grad()
def _reorder_gates(rnn: RecurrentModule, layer: int) -> list[Tensor]:
    """Return W and R, ``(directions, gates · width, ·)``, and B, ``(directions, 2 · gates · width)``."""
    order = LSTM_GATE_ORDER if isinstance(rnn, nn.LSTM) else GRU_GATE_ORDER

    def reorder(name: str) -> Tensor:
        suffixes = ("", "_reverse")[: 1 + rnn.bidirectional]
        directions = [getattr(rnn, f"{name}_l{layer}{suffix}").chunk(len(order)) for suffix in suffixes]
        return torch.stack([torch.cat([gates[n] for n in order]) for gates in directions])

    return [reorder("weight_ih"), reorder("weight_hh"), torch.cat([reorder("bias_ih"), reorder("bias_hh")], 1)]


def _run_layer(
    rnn: RecurrentModule, layer: int, x: Tensor, hidden: list[Tensor] | None, lengths: Tensor | None
) -> list[Tensor]:
    """Map ``(T, B, inputs)`` to ``(T, B, directions · width)`` and the state ``(directions, B, width)``."""
    is_lstm, width, num_directions = isinstance(rnn, nn.LSTM), rnn.hidden_size, 1 + rnn.bidirectional
    attributes: dict[str, Any] = {
        "hidden_size": width,
        "direction": "bidirectional" if rnn.bidirectional else "forward",
    }
    if not is_lstm:
        attributes["linear_before_reset"] = 1  # as in cuDNN, the reset gate acts after the product
    inputs = [
        x,
        *(getattr(rnn, f"{name}{layer}") for name in BUFFER_NAMES),
        None if lengths is None else lengths.to(torch.int32),
        *(hidden or ()),
    ]
    state_shape = [num_directions, x.shape[1], width]
    num_states = 2 if is_lstm else 1
    outputs, *final_states = torch.onnx.ops.symbolic_multi_out(
        "LSTM" if is_lstm else "GRU",
        inputs,
        attributes,
        dtypes=[x.dtype] * (1 + num_states),
        shapes=[[x.shape[0], *state_shape], *[state_shape] * num_states],
    )
    return [outputs.transpose(1, 2).flatten(2), *final_states]  # from (T, directions, B, width)
