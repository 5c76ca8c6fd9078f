"""The layers that the Transformer and BERT share: attention and feed-forward, joined to a residual stream.

Shapes: ``B`` sequences (1 if packed), ``L`` tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention.compiled_block import CompiledBlock, compile_blocks
from jumok.attention.heads import MultiHead
from jumok.attention.masks import Mask
from jumok.batches.tokens import Tokens

__all__ = [
    "ACTIVATIONS",
    "CompiledBlock",
    "FeedForward",
    "ResidualNorm",
    "ResidualStream",
    "Sublayer",
    "TransformerEncoderLayer",
    "TransformerLayerConfig",
    "build_module_list",
    "compile_blocks",
    "get_positions",
    "to_autocast_dtype",
]

Sublayer = Callable[[Tensor], Tensor]  # (B, L, D) to (B, L, D)
ResidualStream = tuple[Tensor, Tensor]  # the residual stream, and what the next sublayer is given of it


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Sublayer] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "swish": F.silu,
}


class TransformerLayerConfig(Protocol):
    """What a model's config says of its layers."""

    @property
    def width(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def feed_forward_width(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def norm(self) -> str:
        """Where the layer norms stand, "post" or "pre"; see :class:`ResidualNorm`."""

    @property
    def layer_norm_eps(self) -> float:
        """What is added to the variance in a layer norm."""

    @property
    def dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def activation_dropout(self) -> float: ...


def to_autocast_dtype(x: Tensor) -> Tensor:
    """In autocast's type, if it is on: a product would take it so, and here it costs no pass of its own."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class ResidualNorm(CompiledBlock):
    """Adds what a sublayer made to the residual stream: the new stream, and its norm for the next sublayer.

    With norms "post", the stream goes on from the norm. With "pre", it goes on from the sum, and the norm is
    for the next sublayer alone. ::

        post   x ──┬──────────── + ─ norm ─┬─ x          pre   x ──┬──────────── + ──┬── x
                   └─ sublayer ──┘         └─ given                └─ sublayer ──┘   └─ norm ─ given
    """

    def __init__(self, config: TransformerLayerConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.is_pre_norm = config.norm == "pre"

    def forward(self, x: Tensor, sublayer_output: Tensor) -> ResidualStream:
        total = x + self.dropout(sublayer_output)
        normed = self.norm(total)
        return total if self.is_pre_norm else normed, to_autocast_dtype(normed)


class FeedForward(CompiledBlock):
    """What follows the last attention of a layer: two linear maps, for each token on its own."""

    def __init__(self, config: TransformerLayerConfig) -> None:
        super().__init__()
        self.attention_residual = ResidualNorm(config)
        self.widen = nn.Linear(config.width, config.feed_forward_width)
        self.dropout = nn.Dropout(config.activation_dropout)
        self.narrow = nn.Linear(config.feed_forward_width, config.width)
        self.residual = ResidualNorm(config)
        self.activation = ACTIVATIONS[config.activation]
        for layer in (self.widen, self.narrow):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, attention_output: Tensor) -> ResidualStream:
        x, given = self.attention_residual(x, attention_output)
        wide = self.dropout(self.activation(self.widen(given)))
        return self.residual(x, self.narrow(wide))  # type: ignore[no-any-return]


class TransformerEncoderLayer(nn.Module):
    """Attention of a text to itself, then feed-forward."""

    def __init__(self, config: TransformerLayerConfig) -> None:
        super().__init__()
        self.attention = MultiHead(config.width, config.num_heads, dropout=config.attention_dropout)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, normed: Tensor, mask: Mask | None) -> ResidualStream:
        return self.feed_forward(x, self.attention(normed, mask=mask))  # type: ignore[no-any-return]


def get_positions(tokens: Tokens) -> Tensor:
    """Where each token stands in its sequence, ``(L,)`` or, if packed, ``(1, L)``."""
    if tokens.positions is not None:
        return tokens.positions
    return torch.arange(tokens.ids.shape[1], device=tokens.ids.device)


def build_module_list(modules: Iterable[nn.Module]) -> Any:
    """A ``ModuleList`` that may be given the type of its layers, which it would forget."""
    return nn.ModuleList(modules)
