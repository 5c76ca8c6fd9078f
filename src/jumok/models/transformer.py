"""The Transformer (Vaswani 2017): attention and feed-forward layers, in an encoder and a decoder.

::

    source ─ embed ─┬─ attend to all ─ feed forward ─┬─ encoded
                    └────────── × layers ────────────┘     │
                                                           │
    target ─ embed ─┬─ attend to the past ─ attend to the source ─ feed forward ─┬─ logits
                    └───────────────────── × layers ─────────────────────────────┘

Around each of these steps there is a residual connection with a layer norm (:class:`Join`). Training,
decoding and maps walk through the same layers; they differ only in how the layers' attention is called.

Shapes: ``B`` sequences (1 if packed), ``L`` tokens, ``N`` rows while decoding, ``D`` width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention.cache import Cache
from jumok.attention.heads import MultiHead
from jumok.attention.positions import Sinusoid
from jumok.batch import Loss, Map, Pairs, Tokens
from jumok.models.layers import (
    EncoderLayer,
    FeedForward,
    Join,
    Region,
    Stream,
    Sublayer,
    compile_regions,
    layers,
    lowered,
    places_of,
)
from jumok.models.output import counted, smoothed_loss
from jumok.models.sharing import sources_after

__all__ = ["State", "Transformer", "TransformerConfig"]


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes of a :class:`Transformer` and how it learns.

    ``norm`` says where the layer norms stand: "post", after each residual sum as in the paper, or "pre",
    before each sublayer, which lets deep models train without warm-up. ``tie`` says which embeddings are one:
    "none", "target" (target words and output layer), or "all" (source words too, with a joint vocabulary).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["transformer"] = "transformer"
    width: int = 256
    heads: int = 4
    feed_forward: int = 1024
    encoder_layers: int = 4
    decoder_layers: int = 4
    activation: Literal["relu", "gelu", "swish"] = "relu"
    norm: Literal["post", "pre"] = "post"
    tie: Literal["none", "target", "all"] = "target"
    dropout: float = 0.1  # of what a sublayer gives, and of the embeddings
    attention_dropout: float = 0.0  # of attention weights; slow in packed sentences of over 128 tokens
    activation_dropout: float = 0.0  # inside feed-forward
    smoothing: float = 0.1  # of the labels, in training
    eps: ClassVar[float] = 1e-5  # of the layer norms

    def __post_init__(self) -> None:
        for name in ("width", "heads", "feed_forward", "encoder_layers", "decoder_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} does not divide into heads={self.heads}; change one")
        for name in ("dropout", "attention_dropout", "activation_dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")


# --------------------------------------------------------------------------------------- layers


class Entry(Region):
    """Words with their positions: the residual stream x, and what the first sublayer is given."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.scale = math.sqrt(config.width)
        self.position = Sinusoid(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width) if config.norm == "pre" else None

    def forward(self, words: Tensor, places: Tensor) -> Stream:
        x = words * self.scale
        x = self.dropout(x + self.position.vectors(places).to(x.dtype))
        return x, lowered(x if self.norm is None else self.norm(x))


class DecoderLayer(nn.Module):
    """Attention to the past, attention to the source, then feed-forward. The caller says how to attend."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, heads, dropout = config.width, config.heads, config.attention_dropout
        self.attention = MultiHead(width, heads, dropout=dropout)
        self.join = Join(config)
        self.source_attention = MultiHead(width, heads, key_width=width, dropout=dropout)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, given: Tensor, to_past: Sublayer, to_source: Sublayer) -> Stream:
        x, given = self.join(x, to_past(given))
        return self.feed_forward(x, to_source(given))  # type: ignore[no-any-return]


class Output(Region):
    """Logits over the target's words, and their loss."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight  # (V, D), a parameter

    def logits(self, hidden: Tensor) -> Tensor:
        """``(N, D)`` to ``(N, V)``"""
        return F.linear(hidden, self.weight)

    def forward(self, hidden: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        return smoothed_loss(hidden, self.weight, labels, smoothing)


# ------------------------------------------------------------------------------------- decoding


@dataclass(frozen=True, eq=False)
class State:
    """How far decoding has come, for N rows.

    Neighbouring rows that continue the same source share its keys and values: ``source`` has N / ``shared``
    rows (see :mod:`jumok.models.sharing`).
    """

    said: tuple[Cache, ...]  # keys and values of the words so far, for each layer
    source: tuple[Cache, ...]  # those of the source
    shared: int = 1

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> State:
        """The rows ``index``, in that order; a row may come twice or never.

        ``sources``: the sources that go on, equally many rows of each, side by side. Then the source's keys
        are copied only if these change, and no GPU is waited for. Without, each row gets its own.
        """
        said, source = self.said, self.source
        rows, shared = sources_after(index, sources, self.shared)
        if rows != list(range(len(source[0].lengths))):
            source = tuple(cache.reorder(torch.tensor(rows, dtype=torch.long)) for cache in source)
        elif shared == self.shared == 1:
            return self  # each row stays where it is
        if said[0].room is not None:  # before the first step, nothing was said
            index = index.to(said[0].key.device)
            said = tuple(cache.reorder(index) for cache in said)
        return State(said, source, shared)


# ------------------------------------------------------------------------------------ the model


class Transformer(nn.Module):
    """Translates by attention alone. Batches may be padded or packed.

    >>> model = Transformer(TransformerConfig(width=8, heads=2, feed_forward=16), 11, 13).eval()
    >>> batch = Pairs.of([[5, 6], [7]], [[8], [9, 10, 11]])
    >>> model.loss(batch).count
    6
    >>> state = model.start(batch.source)
    >>> logits, state = model.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    encoder: Sequence[EncoderLayer]
    decoder: Sequence[DecoderLayer]

    def __init__(self, config: TransformerConfig, source_vocabulary: int, target_vocabulary: int) -> None:
        super().__init__()
        if config.tie == "all" and source_vocabulary != target_vocabulary:
            raise ValueError(
                f"tie='all' needs one vocabulary for both sides, and there are {source_vocabulary} source "
                f"words and {target_vocabulary} target words; make a joint one, or use tie='target'"
            )
        self.config = config
        width = config.width
        self.target_embedding = _embedding(target_vocabulary, width)
        self.source_embedding = (
            self.target_embedding if config.tie == "all" else _embedding(source_vocabulary, width)
        )
        self.source_entry, self.target_entry = Entry(config), Entry(config)
        self.encoder = layers(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = layers(DecoderLayer(config) for _ in range(config.decoder_layers))
        tied = self.target_embedding if config.tie != "none" else _embedding(target_vocabulary, width)
        self.output = Output(tied.weight)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``torch.compile`` all that lies between the attentions: see :func:`compile_regions`."""
        compile_regions(self, *args, **kwargs)

    # ------------------------------------------------------------------------------- training

    def loss(self, batch: Pairs) -> Loss:
        """Cross-entropy summed over the labels that count, smoothed in training; "nll" is the plain one."""
        encoded, mask = self.encode(batch.source), batch.source.seen_from(batch.target)

        def to_source(layer: DecoderLayer) -> Sublayer:
            return functools.partial(layer.source_attention, source=encoded, mask=mask)

        hidden, labels = counted(self._told(batch.target, to_source), batch)
        total, plain = self.output(hidden, labels, self.config.smoothing if self.training else 0.0)
        return Loss(total, batch.count, {"nll": plain})

    def encode(self, source: Tokens) -> Tensor:
        """``(B, L, D)``"""
        x, given = self.source_entry(self.source_embedding(source.ids), places_of(source))
        for layer in self.encoder:
            x, given = layer(x, given, source.mask)
        return given  # type: ignore[no-any-return]

    def _told(self, target: Tokens, to_source: Callable[[DecoderLayer], Sublayer]) -> Tensor:
        """``(B, L, D)``: the decoder's output if it is told the target."""
        to_past = (functools.partial(layer.attention, mask=target.causal) for layer in self.decoder)
        return self.decode(target.ids, places_of(target), to_past, map(to_source, self.decoder))

    # ------------------------------------------------------------------------------- decoding

    def decode(
        self, ids: Tensor, places: Tensor, to_past: Iterable[Sublayer], to_source: Iterable[Sublayer]
    ) -> Tensor:
        """``(B, L, D)``: for each of the tokens ``(B, L)``, what the output layer says the next word from.

        ``places`` are their positions; ``to_past`` and ``to_source`` say for each layer how it attends.
        """
        x, given = self.target_entry(self.target_embedding(ids), places)
        for layer, past, source in zip(self.decoder, to_past, to_source, strict=True):
            x, given = layer(x, given, past, source)
        return given  # type: ignore[no-any-return]

    def start(self, source: Tokens) -> State:
        """Encode the source, padded, and work out its keys and values once for all steps."""
        _check_padded("start", source)
        encoded = self.encode(source)
        prepared = (layer.source_attention.prepare(encoded, source.lengths) for layer in self.decoder)
        return State((Cache(),) * len(self.decoder), tuple(prepared))

    def step(self, state: State, ids: Tensor) -> tuple[Tensor, State]:
        """The logits ``(N, V)`` of the next words; ``ids`` ``(N,)`` are those said last, BOS at first."""
        place = torch.full((1,), state.said[0].longest, device=ids.device)
        past = [_Past(layer.attention, cache) for layer, cache in zip(self.decoder, state.said, strict=True)]
        to_source = (
            functools.partial(_from_rows, layer.source_attention, source, state.shared)
            for layer, source in zip(self.decoder, state.source, strict=True)
        )
        given = self.decode(ids[:, None], place, past, to_source)
        said = tuple(one.cache for one in past)
        return self.output.logits(given[:, 0]), State(said, state.source, state.shared)

    @torch.no_grad()
    def maps(self, batch: Pairs) -> list[Map]:
        """Where each decoder layer looks in the source, ``(B, H, target, source)``. The batch is padded."""
        _check_padded("maps", batch.source, batch.target)
        encoded, mask = self.encode(batch.source), batch.source.mask
        seen: list[Tensor] = []

        def to_source(layer: DecoderLayer) -> Sublayer:
            def look(x: Tensor) -> Tensor:
                seen.append(layer.source_attention.weights(x, encoded, mask=mask))
                return layer.source_attention(x, encoded, mask=mask)  # type: ignore[no-any-return]

            return look

        self._told(batch.target, to_source)
        return [Map(f"decoder.{number}.source_attention", found) for number, found in enumerate(seen)]


class _Past:
    """Attention of one new word to those before it; afterwards ``cache`` holds it too."""

    def __init__(self, attention: MultiHead, cache: Cache) -> None:
        self.attention, self.cache = attention, cache

    def __call__(self, x: Tensor) -> Tensor:
        out, self.cache = self.attention.step(x, self.cache)
        return out


def _from_rows(attention: MultiHead, source: Cache, shared: int, x: Tensor) -> Tensor:
    """Attention to the source: rows that share one are so many queries to it."""
    return attention(x.view(-1, shared, x.shape[-1]), source).view_as(x)  # type: ignore[no-any-return]


def _embedding(words: int, width: int) -> nn.Embedding:
    table = nn.Embedding(words, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


def _check_padded(name: str, *tokens: Tokens) -> None:
    if any(one.packed for one in tokens):
        raise ValueError(f"Transformer.{name} takes padded tokens, and packed ones came; see Tokens.padded")
