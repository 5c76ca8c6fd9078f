"""The layers that the Transformer and BERT share: attention and feed-forward, joined to a residual stream.

Shapes: ``B`` sequences (1 if packed), ``L`` tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention.heads import MultiHead
from jumok.attention.masks import Mask
from jumok.attention.regions import Region, compile_regions
from jumok.batch import Tokens

__all__ = [
    "ACTIVATIONS",
    "EncoderLayer",
    "FeedForward",
    "Join",
    "LayerConfig",
    "Region",
    "Stream",
    "Sublayer",
    "compile_regions",
    "layers",
    "lowered",
    "places_of",
]

Sublayer = Callable[[Tensor], Tensor]  # (B, L, D) to (B, L, D)
Stream = tuple[Tensor, Tensor]  # the residual stream, and what the next sublayer is given of it


def _gelu_by_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Sublayer] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_by_tanh,
    "swish": F.silu,
}


class LayerConfig(Protocol):
    """What a model's config says of its layers."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def feed_forward(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def norm(self) -> str:
        """Where the layer norms stand, "post" or "pre"; see :class:`Join`."""

    @property
    def eps(self) -> float:
        """What is added to the variance in a layer norm."""

    @property
    def dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def activation_dropout(self) -> float: ...


def lowered(x: Tensor) -> Tensor:
    """In autocast's type, if it is on: a product would take it so, and here it costs no pass of its own."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class Join(Region):
    """Adds what a sublayer made to the residual stream: the new stream, and its norm for the next sublayer.

    With norms "post", the stream goes on from the norm. With "pre", it goes on from the sum, and the norm is
    for the next sublayer alone. ::

        post   x ──┬──────────── + ─ norm ─┬─ x          pre   x ──┬──────────── + ──┬── x
                   └─ sublayer ──┘         └─ given                └─ sublayer ──┘   └─ norm ─ given
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.is_pre = config.norm == "pre"

    def forward(self, x: Tensor, made: Tensor) -> Stream:
        total = x + self.dropout(made)
        normed = self.norm(total)
        return total if self.is_pre else normed, lowered(normed)


class FeedForward(Region):
    """What follows the last attention of a layer: two linear maps, for each token on its own."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.join_attention = Join(config)
        self.widen = nn.Linear(config.width, config.feed_forward)
        self.dropout = nn.Dropout(config.activation_dropout)
        self.narrow = nn.Linear(config.feed_forward, config.width)
        self.join = Join(config)
        self.activation = ACTIVATIONS[config.activation]
        for layer in (self.widen, self.narrow):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, attended: Tensor) -> Stream:
        x, given = self.join_attention(x, attended)
        wide = self.dropout(self.activation(self.widen(given)))
        return self.join(x, self.narrow(wide))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Attention of a text to itself, then feed-forward."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.attention = MultiHead(config.width, config.heads, dropout=config.attention_dropout)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, given: Tensor, mask: Mask | None) -> Stream:
        return self.feed_forward(x, self.attention(given, mask=mask))  # type: ignore[no-any-return]


def places_of(tokens: Tokens) -> Tensor:
    """Where each token stands in its sequence, ``(L,)`` or, if packed, ``(1, L)``."""
    if tokens.positions is not None:
        return tokens.positions
    return torch.arange(tokens.ids.shape[1], device=tokens.ids.device)


def layers(made: Iterable[nn.Module]) -> Any:
    """A ``ModuleList`` that may be given the type of its layers, which it would forget."""
    return nn.ModuleList(made)
