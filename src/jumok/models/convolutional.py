"""Convolutional seq2seq (Gehring 2017): gated convolutions, and attention in every decoder layer.

A layer looks at ``kernel`` neighbouring words, and a stack of them at ever more; no word waits for another,
so that all are worked on at once. With z the output of the encoder, e and g the embeddings of source and
target, a decoder layer with input x is ::

    h       = GLU(convolution(x))                     the word itself and what came before
    c       = √m · Σ_j a_j (z_j + e_j)                a = softmax_j((W h + b + g) · z_j)
    output  = √½ · (x + √½ · (h + U c))

Each sum of two is scaled by √½, so that its variance stays theirs. The mean over the m source words, whose
variance would fall with m, is scaled by m √(1/m); m counts the words of each sentence, without padding.

Shapes: ``B`` sentences, ``S`` source and ``T`` target words, ``N`` rows while decoding, ``E`` width of the
embeddings and of attention, ``D`` width of the convolutions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from jumok.attention.core import attend, weights
from jumok.attention.kinds import moved
from jumok.attention.positions import Learned, Position, Sinusoid
from jumok.attention.scores import Dot
from jumok.batch import Loss, Map, Pairs, Tokens
from jumok.models.output import counted, smoothed_loss
from jumok.models.sharing import sources_after

__all__ = ["Convolutional", "ConvolutionalConfig", "State"]

HALF = math.sqrt(0.5)
EMBEDDING_STD = 0.1
DOT = Dot()
Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ConvolutionalConfig:
    """The sizes of a :class:`Convolutional` model and how it learns.

    ``positions`` "learned" are for sentences of up to ``longest`` tokens, and longer ones are refused;
    "sinusoid" are for any length. ``tie`` says which embeddings are one: "none", "target" (target words and
    output layer), or "all" (source words too, with a joint vocabulary).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["convolutional"] = "convolutional"
    embedding: int = 256  # E
    width: int = 256  # D
    kernel: int = 3
    encoder_layers: int = 4
    decoder_layers: int = 3
    positions: Literal["learned", "sinusoid"] = "learned"
    longest: int = 1024
    tie: Literal["none", "target", "all"] = "none"
    dropout: float = 0.1  # of the embeddings, of what goes into a convolution, and before the output layer
    smoothing: float = 0.1  # of the labels, in training

    def __post_init__(self) -> None:
        for name in ("embedding", "width", "kernel", "encoder_layers", "decoder_layers", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.kernel % 2 == 0:
            raise ValueError(
                f"kernel={self.kernel}: an odd number is expected, so that the encoder sees equally far to "
                "both sides"
            )
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")


# --------------------------------------------------------------------------------------- layers


class Entry(nn.Module):
    """Words ``(B, L, E)`` with their positions."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        super().__init__()
        self.position: Position
        if config.positions == "learned":
            self.position = Learned(config.longest, config.embedding)
            nn.init.normal_(self.position.table.weight, std=EMBEDDING_STD)
            self.scale = 1.0
        else:
            self.position = Sinusoid(config.embedding)
            self.scale = EMBEDDING_STD / HALF  # waves deviate by √½: so by as much as the words do
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, words: Tensor, offset: int = 0) -> Tensor:
        return self.dropout(words + self.scale * self.position(words, offset=offset))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """A gated convolution over the words to both sides, in a residual connection."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        super().__init__()
        self.kernel = config.kernel
        self.dropout = nn.Dropout(config.dropout)
        self.convolve = _convolution(config)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        given = self.dropout(x)
        if real is not None:  # beyond its end a sentence sees zeros, as if it were alone
            given = given.where(real, 0)
        side = self.kernel // 2
        return HALF * (x + _gated(self.convolve, F.pad(given, (0, 0, side, side)), self.kernel))


class Prepared(NamedTuple):
    """The linear maps of a decoder layer, their weights normalised once for all steps."""

    convolve: Linear
    ask: Linear
    take: Linear


class DecoderLayer(nn.Module):
    """A gated convolution over the words so far, then attention to the source, in a residual connection."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        super().__init__()
        self.kernel = config.kernel
        self.dropout = nn.Dropout(config.dropout)
        self.convolve = _convolution(config)
        self.ask = _linear(config.width, config.embedding)
        self.take = _linear(config.embedding, config.width)

    def prepare(self) -> Prepared:
        """The layer's maps as functions, with their weights worked out."""
        maps = (self.convolve, self.ask, self.take)
        return Prepared(*(functools.partial(F.linear, weight=one.weight, bias=one.bias) for one in maps))

    def forward(self, x: Tensor, words: Tensor, look: Linear, maps: Prepared | None = None) -> Tensor:
        """``x`` ``(B, kernel − 1 + T, D)`` begins before the ``words`` ``(B, T, E)``; gives ``(B, T, D)``.

        ``look`` makes contexts of queries; ``maps`` are the layer's own, if they are prepared.
        """
        maps = maps or self.prepare()
        h = _gated(maps.convolve, self.dropout(x), self.kernel)
        context = maps.take(look(maps.ask(h) + words))
        return HALF * (x[:, self.kernel - 1 :] + HALF * (h + context))


def _gated(convolve: Linear, x: Tensor, kernel: int) -> Tensor:
    """``(B, kernel − 1 + L, D)`` to ``(B, L, D)``: a convolution is a linear map of so many neighbours."""
    length = x.shape[1] - kernel + 1
    neighbours = torch.cat([x[:, first : first + length] for first in range(kernel)], dim=-1)
    return F.glu(convolve(neighbours))


def _linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """Under weight normalisation; at first it scales the variance of its input by ``gain`` (section 3.5)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=math.sqrt(gain / inputs))
    nn.init.zeros_(layer.bias)
    return cast(nn.Linear, weight_norm(layer))


def _convolution(config: ConvolutionalConfig) -> nn.Linear:
    # A gate passes a quarter of the variance; dropout scales it up by what it keeps.
    return _linear(config.kernel * config.width, 2 * config.width, gain=4 * (1 - config.dropout))


# ------------------------------------------------------------------------------------- decoding


@dataclass(frozen=True, eq=False)
class Source:
    """What the encoder made of B sentences."""

    keys: Tensor  # z, (B, S, E)
    values: Tensor  # z + e
    tokens: Tokens  # of which only the lengths matter from here on

    @functools.cached_property
    def scale(self) -> Tensor:
        """m √(1/m) for the m words of each sentence, ``(B, 1, 1)``."""
        return self.tokens.sizes.to(self.values.dtype).sqrt()[:, None, None]

    def look(self, query: Tensor) -> Tensor:
        """The context ``(N, T, E)`` of queries of this shape; N / B neighbouring rows share a sentence."""
        sentences = self.keys.shape[0]
        asked = query.reshape(sentences, query.shape[0] * query.shape[1] // max(1, sentences), query.shape[2])
        found = attend(asked, self.keys, self.values, score=DOT, mask=self.tokens.mask)
        return (self.scale * found).reshape(query.shape)

    def reorder(self, rows: Sequence[int]) -> Source:
        index = moved(torch.tensor(rows, dtype=torch.long), self.keys.device)
        keys, values, ids = (x.index_select(0, index) for x in (self.keys, self.values, self.tokens.ids))
        return Source(keys, values, Tokens(ids, tuple(self.tokens.lengths[row] for row in rows)))


@dataclass(frozen=True, eq=False)
class State:
    """How far decoding has come, for N rows; ``shared`` neighbouring ones continue the same source."""

    source: Source
    maps: tuple[Prepared, ...]
    past: tuple[Tensor, ...]  # for each layer, its last inputs, (N, kernel − 1, D)
    said: int = 0
    shared: int = 1

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> State:
        """The rows ``index``, in that order; a row may come twice or never.

        ``sources``: the sources that go on, equally many rows of each, side by side. Then the source is
        copied only if these change, and no GPU is waited for. Without, each row gets its own.
        """
        rows, shared = sources_after(index, sources, self.shared)
        source = self.source
        if rows != list(range(len(source.tokens.lengths))):
            source = source.reorder(rows)
        elif shared == self.shared == 1:
            return self  # each row stays where it is
        index = moved(index, source.keys.device)
        past = tuple(x.index_select(0, index) for x in self.past)
        return replace(self, source=source, past=past, shared=shared)


# ------------------------------------------------------------------------------------ the model


class Convolutional(nn.Module):
    """Translates by gated convolutions with attention. Batches are padded.

    >>> model = Convolutional(ConvolutionalConfig(embedding=8, width=16), 11, 13).eval()
    >>> batch = Pairs.of([[5, 6], [7]], [[8], [9, 10, 11]])
    >>> model.loss(batch).count
    6
    >>> state = model.start(batch.source)
    >>> logits, state = model.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    compiles = False  # the numbers inside a mask differ with every batch, and compiled code would be for one
    encoder: Sequence[EncoderLayer]
    decoder: Sequence[DecoderLayer]

    @property
    def longest(self) -> int | None:
        """The most tokens of a sentence, the special one included; None: any number."""
        return self.config.longest if self.config.positions == "learned" else None

    def __init__(self, config: ConvolutionalConfig, source_vocabulary: int, target_vocabulary: int) -> None:
        super().__init__()
        if config.tie == "all" and source_vocabulary != target_vocabulary:
            raise ValueError(
                f"tie='all' needs one vocabulary for both sides, and there are {source_vocabulary} source "
                f"words and {target_vocabulary} target words; make a joint one, or use tie='target'"
            )
        self.config = config
        narrow, wide, kept = config.embedding, config.width, 1 - config.dropout
        self.target_embedding = _embedding(target_vocabulary, narrow)
        self.source_embedding = (
            self.target_embedding if config.tie == "all" else _embedding(source_vocabulary, narrow)
        )
        self.source_entry, self.target_entry = Entry(config), Entry(config)
        self.widen_source, self.widen_target = (_linear(narrow, wide, gain=kept) for _ in range(2))
        self.encoder = _layers(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = _layers(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.narrow_source, self.narrow_target = (_linear(wide, narrow) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)
        self.output = _linear(narrow, target_vocabulary, gain=kept)
        if config.tie != "none":
            self.output = nn.Linear(narrow, target_vocabulary)
            self.output.weight = self.target_embedding.weight
            nn.init.zeros_(self.output.bias)

    # ------------------------------------------------------------------------------- training

    def loss(self, batch: Pairs) -> Loss:
        """Cross-entropy summed over the labels that count, smoothed in training; "nll" is the plain one."""
        _check_padded("loss", batch.source, batch.target)
        source = self.encode(batch.source)
        hidden, labels = counted(self._decode(batch.target, source.look), batch)
        smoothing = self.config.smoothing if self.training else 0.0
        total, plain = smoothed_loss(hidden, self.output.weight, labels, smoothing, self.output.bias)
        return Loss(total, batch.count, {"nll": plain})

    def encode(self, source: Tokens) -> Source:
        """What decoding looks at, from padded tokens."""
        words = self.source_entry(self.source_embedding(source.ids))
        x = self.widen_source(words)
        real = None if source.mask is None else source.real[..., None]
        for layer in self.encoder:
            x = layer(x, real)
        z = self.narrow_source(x)
        # Every decoder layer sends a gradient back: the encoder gets their mean, the embeddings their sum.
        z = torch.lerp(z.detach(), z, 1 / len(self.decoder))
        return Source(z, z + words, source)

    def _decode(self, target: Tokens, look: Linear) -> Tensor:
        """``(B, T, E)``: for each token of the target, what the output layer says the next word from."""
        words = self.target_entry(self.target_embedding(target.ids))
        x = self.widen_target(words)
        for layer in self.decoder:
            before = F.pad(x, (0, 0, self.config.kernel - 1, 0))
            x = layer(before, words, look)
        return self.dropout(self.narrow_target(x))  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------- decoding

    def start(self, source: Tokens) -> State:
        """Encode the source, padded, and normalise the decoder's weights once for all steps."""
        _check_padded("start", source)
        encoded = self.encode(source)
        nothing = encoded.keys.new_zeros(len(source.lengths), self.config.kernel - 1, self.config.width)
        maps = tuple(layer.prepare() for layer in self.decoder)
        return State(encoded, maps, past=(nothing,) * len(maps))

    def step(self, state: State, ids: Tensor) -> tuple[Tensor, State]:
        """The logits ``(N, V)`` of the next words; ``ids`` ``(N,)`` are those said last, BOS at first."""
        words = self.target_entry(self.target_embedding(ids[:, None]), offset=state.said)
        x = self.widen_target(words)
        past = []
        for layer, before, maps in zip(self.decoder, state.past, state.maps, strict=True):
            window = torch.cat([before, x], dim=1)
            past.append(window[:, 1:])
            x = layer(window, words, state.source.look, maps)
        logits = self.output(self.dropout(self.narrow_target(x[:, 0])))
        return logits, replace(state, past=tuple(past), said=state.said + 1)

    @torch.no_grad()
    def maps(self, batch: Pairs) -> list[Map]:
        """Where each decoder layer looks in the source, ``(B, 1, target, source)``. The batch is padded."""
        _check_padded("maps", batch.source, batch.target)
        source = self.encode(batch.source)
        seen: list[Tensor] = []

        def look(query: Tensor) -> Tensor:
            seen.append(weights(query, source.keys, score=DOT, mask=source.tokens.mask))
            return source.look(query)

        self._decode(batch.target, look)
        return [Map(f"decoder.{number}", found[:, None]) for number, found in enumerate(seen)]


def _layers(layers: Iterable[nn.Module]) -> Any:
    # So that the types of the layers are known: a ModuleList forgets them.
    return nn.ModuleList(layers)


def _embedding(words: int, width: int) -> nn.Embedding:
    table = nn.Embedding(words, width)
    nn.init.normal_(table.weight, std=EMBEDDING_STD)
    return table


def _check_padded(name: str, *tokens: Tokens) -> None:
    if any(one.packed for one in tokens):
        raise ValueError(
            f"Convolutional.{name} takes padded tokens, and packed ones came, whose sentences a convolution "
            "would run together; see Tokens.padded"
        )
