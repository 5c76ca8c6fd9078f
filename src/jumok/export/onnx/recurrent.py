"""Recurrent layers as ONNX has them: one node a layer, which knows how long each sequence is.

PyTorch reads sequences of unlike length packed, or pauses at their padding (:mod:`jumok.models.recurrent`);
ONNX's ``LSTM_GATE_ORDER`` and ``GRU_GATE_ORDER`` are told the lengths. What they have in another way than PyTorch is the order of
the gates, in which the rows of their weights lie::

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

__all__ = ["run_rnn", "run_rnn_on_tokens", "use_onnx_gate_order"]

LSTM_GATE_ORDER, GRU_GATE_ORDER = (0, 3, 1, 2), (1, 0, 2)  # where PyTorch has each gate of ONNX's
BUFFER_NAMES = ("onnx_w", "onnx_r", "onnx_b")  # of weights in ONNX's order


def run_rnn_on_tokens(rnn: RecurrentModule, x: Tensor, tokens: Tokens) -> tuple[Tensor, HiddenState]:
    """As :func:`jumok.models.recurrent.run_rnn_on_tokens`, of tokens that have ``counts``."""
    return _run_layers(rnn, x, None, tokens.device_lengths)


def run_rnn(rnn: RecurrentModule, x: Tensor, hidden: HiddenState) -> tuple[Tensor, HiddenState]:
    """As :func:`jumok.models.recurrent.run_rnn`."""
    return _run_layers(rnn, x, hidden, None)


def _run_layers(
    rnn: RecurrentModule, x: Tensor, hidden: HiddenState | None, lengths: Tensor | None
) -> tuple[Tensor, HiddenState]:
    """The states ``(B, T, directions · width)`` of the last layer, and the hidden state after them."""
    ways = 1 + rnn.bidirectional
    x = x.transpose(0, 1)  # (T, B, inputs): ORT has no other layout
    after: list[list[Tensor]] = []
    for layer in range(rnn.num_layers):
        first = slice(layer * ways, (layer + 1) * ways)
        x, *states = _run_layer(
            rnn, layer, x, None if hidden is None else [part[first] for part in hidden], lengths
        )
        after.append(states)
    return x.transpose(0, 1), tuple(torch.cat(parts) for parts in zip(*after, strict=True))


@contextlib.contextmanager
def use_onnx_gate_order(model: nn.Module) -> Iterator[None]:
    """While it lasts, recurrent layers have their weights in ONNX's order too: so none is sorted at work."""
    layers = [one for one in model.modules() if isinstance(one, nn.GRU | nn.LSTM)]
    for rnn in layers:
        for layer in range(rnn.num_layers):
            for name, weights in zip(BUFFER_NAMES, _reorder_gates(rnn, layer), strict=True):
                rnn.register_buffer(f"{name}{layer}", weights, persistent=False)
    try:
        yield
    finally:
        for rnn in layers:
            for layer in range(rnn.num_layers):
                for name in BUFFER_NAMES:
                    delattr(rnn, f"{name}{layer}")


@torch.no_grad()
def _reorder_gates(rnn: RecurrentModule, layer: int) -> list[Tensor]:
    """W and R, ``(directions, gates · width, ·)``, and B, ``(directions, 2 · gates · width)``."""
    order = LSTM_GATE_ORDER if isinstance(rnn, nn.LSTM) else GRU_GATE_ORDER

    def weights(name: str) -> Tensor:
        ends = ("", "_reverse")[: 1 + rnn.bidirectional]
        each = [getattr(rnn, f"{name}_l{layer}{end}").chunk(len(order)) for end in ends]
        return torch.stack([torch.cat([gates[n] for n in order]) for gates in each])

    return [
        weights("weight_ih"),
        weights("weight_hh"),
        torch.cat([weights("bias_ih"), weights("bias_hh")], 1),
    ]


def _run_layer(
    rnn: RecurrentModule, layer: int, x: Tensor, hidden: list[Tensor] | None, lengths: Tensor | None
) -> list[Tensor]:
    """``(T, B, inputs)`` to ``(T, B, directions · width)``, and the state ``(directions, B, width)``."""
    is_lstm, width, ways = isinstance(rnn, nn.LSTM), rnn.hidden_size, 1 + rnn.bidirectional
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
    one = [ways, x.shape[1], width]
    parts = 2 if is_lstm else 1
    states, *after = torch.onnx.ops.symbolic_multi_out(
        "LSTM" if is_lstm else "GRU",
        inputs,
        attributes,
        dtypes=[x.dtype] * (1 + parts),
        shapes=[[x.shape[0], *one], *[one] * parts],
    )
    return [states.transpose(1, 2).flatten(2), *after]  # from (T, directions, B, width)
