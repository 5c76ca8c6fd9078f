"""Convolutional seq2seq (Gehring 2017): gated convolutions, and attention in every decoder layer.

A layer looks at ``kernel_size`` neighbouring words, and a stack of them at ever more; no word waits for another,
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
from jumok.attention.mask_types import move_to_device
from jumok.attention.positions import LearnedPositions, PositionEmbedding, SinusoidalPositions
from jumok.attention.scores import Dot
from jumok.batches.tokens import LayerAttention, Loss, Seq2SeqBatch, Tokens
from jumok.models.layers.output_loss import linear_cross_entropy, select_labelled
from jumok.models.layers.source_sharing import reorder_sources

__all__ = ["ConvolutionalConfig", "ConvolutionalSeq2Seq", "ConvolutionalState"]

SQRT_HALF = math.sqrt(0.5)
EMBEDDING_STD = 0.1
DOT_SCORE = Dot()
LinearMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ConvolutionalConfig:
    """The sizes of a :class:`ConvolutionalSeq2Seq` model and how it learns.

    ``position_encoding`` "learned" are for sentences of up to ``longest`` tokens, and longer ones are refused;
    "sinusoid" are for any length. ``tie_embeddings`` says which embeddings are one: "none", "target" (target words and
    output layer), or "all" (source words too, with a joint vocabulary).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    type: Literal["convolutional"] = "convolutional"
    embedding_width: int = 256  # E
    width: int = 256  # D
    kernel_size: int = 3
    encoder_layers: int = 4
    decoder_layers: int = 3
    position_encoding: Literal["learned", "sinusoid"] = "learned"
    max_positions: int = 1024
    tie_embeddings: Literal["none", "target", "all"] = "none"
    dropout: float = 0.1  # of the embeddings, of what goes into a convolution, and before the output layer
    label_smoothing: float = 0.1  # of the labels, in training

    def __post_init__(self) -> None:
        for name in ("embedding", "width", "kernel", "encoder_layers", "decoder_layers", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.kernel_size % 2 == 0:
            raise ValueError(
                f"kernel={self.kernel_size}: an odd number is expected, so that the encoder sees equally far to "
                "both sides"
            )
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")


# --------------------------------------------------------------------------------------- layers


class ConvolutionalInputLayer(nn.Module):
    """Words ``(B, L, E)`` with their positions."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        super().__init__()
        self.position: PositionEmbedding
        if config.position_encoding == "learned":
            self.position = LearnedPositions(config.max_positions, config.embedding_width)
            nn.init.normal_(self.position.table.weight, std=EMBEDDING_STD)
            self.scale = 1.0
        else:
            self.position = SinusoidalPositions(config.embedding_width)
            self.scale = EMBEDDING_STD / SQRT_HALF  # waves deviate by √½: so by as much as the words do
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embeddings: Tensor, offset: int = 0) -> Tensor:
        return self.dropout(embeddings + self.scale * self.position(embeddings, offset=offset))  # type: ignore[no-any-return]


class ConvolutionalEncoderLayer(nn.Module):
    """A gated convolution over the words to both sides, in a residual connection."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        super().__init__()
        self.kernel_size = config.kernel_size
        self.dropout = nn.Dropout(config.dropout)
        self.convolution = _build_convolution(config)

    def forward(self, x: Tensor, valid_mask: Tensor | None) -> Tensor:
        given = self.dropout(x)
        if valid_mask is not None:  # beyond its end a sentence sees zeros, as if it were alone
            given = given.where(valid_mask, 0)
        side = self.kernel_size // 2
        return SQRT_HALF * (
            x + _apply_gated_convolution(self.convolution, F.pad(given, (0, 0, side, side)), self.kernel_size)
        )


class ConvolutionalLayerMaps(NamedTuple):
    """The linear maps of a decoder layer, their weights normalised once for all steps."""

    convolution: LinearMap
    query_projection: LinearMap
    context_projection: LinearMap


class ConvolutionalDecoderLayer(nn.Module):
    """A gated convolution over the words so far, then attention to the source, in a residual connection."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        super().__init__()
        self.kernel_size = config.kernel_size
        self.dropout = nn.Dropout(config.dropout)
        self.convolution = _build_convolution(config)
        self.query_projection = _build_linear(config.width, config.embedding_width)
        self.context_projection = _build_linear(config.embedding_width, config.width)

    def prepare_maps(self) -> ConvolutionalLayerMaps:
        """The layer's maps as functions, with their weights worked out."""
        maps = (self.convolution, self.query_projection, self.context_projection)
        return ConvolutionalLayerMaps(
            *(functools.partial(F.linear, weight=one.weight, bias=one.bias) for one in maps)
        )

    def forward(
        self,
        x: Tensor,
        embeddings: Tensor,
        attend_source: LinearMap,
        maps: ConvolutionalLayerMaps | None = None,
    ) -> Tensor:
        """``x`` ``(B, kernel_size − 1 + T, D)`` begins before the ``words`` ``(B, T, E)``; gives ``(B, T, D)``.

        ``attend_source`` makes contexts of queries; ``compute_attention_maps`` are the layer's own, if they are prepared.
        """
        maps = maps or self.prepare_maps()
        h = _apply_gated_convolution(maps.convolution, self.dropout(x), self.kernel_size)
        context = maps.context_projection(attend_source(maps.query_projection(h) + embeddings))
        return SQRT_HALF * (x[:, self.kernel_size - 1 :] + SQRT_HALF * (h + context))


def _apply_gated_convolution(convolution: LinearMap, x: Tensor, kernel_size: int) -> Tensor:
    """``(B, kernel_size − 1 + L, D)`` to ``(B, L, D)``: a convolution is a linear map of so many neighbours."""
    length = x.shape[1] - kernel_size + 1
    neighbours = torch.cat([x[:, first : first + length] for first in range(kernel_size)], dim=-1)
    return F.glu(convolution(neighbours))


def _build_linear(in_features: int, out_features: int, gain: float = 1.0) -> nn.Linear:
    """Under weight normalisation; at first it scales the variance of its input by ``gain`` (section 3.5)."""
    layer = nn.Linear(in_features, out_features)
    nn.init.normal_(layer.weight, std=math.sqrt(gain / in_features))
    nn.init.zeros_(layer.bias)
    return cast(nn.Linear, weight_norm(layer))


def _build_convolution(config: ConvolutionalConfig) -> nn.Linear:
    # A gate passes a quarter of the variance; dropout scales it up by what it keeps.
    return _build_linear(config.kernel_size * config.width, 2 * config.width, gain=4 * (1 - config.dropout))


# ------------------------------------------------------------------------------------- decoding


@dataclass(frozen=True, eq=False)
class ConvolutionalMemory:
    """What the encoder made of B sentences."""

    keys: Tensor  # z, (B, S, E)
    values: Tensor  # z + e
    tokens: Tokens  # of which only the lengths matter from here on

    @functools.cached_property
    def scale(self) -> Tensor:
        """m √(1/m) for the m words of each sentence, ``(B, 1, 1)``."""
        return self.tokens.lengths_tensor.to(self.values.dtype).sqrt()[:, None, None]

    def attend_source(self, query: Tensor) -> Tensor:
        """The context ``(N, T, E)`` of queries of this shape; N / B neighbouring rows share a sentence."""
        sentences = self.keys.shape[0]
        asked = query.reshape(sentences, query.shape[0] * query.shape[1] // max(1, sentences), query.shape[2])
        found = attend(asked, self.keys, self.values, score=DOT_SCORE, mask=self.tokens.mask)
        return (self.scale * found).reshape(query.shape)

    def reorder(self, indices: Sequence[int]) -> ConvolutionalMemory:
        index = move_to_device(torch.tensor(indices, dtype=torch.long), self.keys.device)
        keys, values, ids = (x.index_select(0, index) for x in (self.keys, self.values, self.tokens.ids))
        return ConvolutionalMemory(
            keys, values, Tokens(ids, tuple(self.tokens.lengths[row] for row in indices))
        )


@dataclass(frozen=True, eq=False)
class ConvolutionalState:
    """How far decoding has come, for N rows; ``rows_per_source`` neighbouring ones continue the same source."""

    memory: ConvolutionalMemory
    maps: tuple[ConvolutionalLayerMaps, ...]
    past_inputs: tuple[Tensor, ...]  # for each layer, its last inputs, (N, kernel − 1, D)
    num_steps: int = 0
    rows_per_source: int = 1

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> ConvolutionalState:
        """The rows ``index``, in that order; a row may come twice or never.

        ``sources``: the sources that go on, equally many rows of each, side by side. Then the source is
        copied only if these change, and no GPU is waited for. Without, each row gets its own.
        """
        rows, shared = reorder_sources(index, sources, self.rows_per_source)
        source = self.memory
        if rows != list(range(len(source.tokens.lengths))):
            source = source.reorder(rows)
        elif shared == self.rows_per_source == 1:
            return self  # each row stays where it is
        index = move_to_device(index, source.keys.device)
        past = tuple(x.index_select(0, index) for x in self.past_inputs)
        return replace(self, memory=source, past_inputs=past, rows_per_source=shared)


# ------------------------------------------------------------------------------------ the model


class ConvolutionalSeq2Seq(nn.Module):
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

    supports_compile = (
        False  # the numbers inside a mask differ with every batch, and compiled code would be for one
    )
    encoder: Sequence[ConvolutionalEncoderLayer]
    decoder: Sequence[ConvolutionalDecoderLayer]

    @property
    def max_length(self) -> int | None:
        """The most tokens of a sentence, the special one included; None: any number."""
        return self.config.max_positions if self.config.position_encoding == "learned" else None

    def __init__(self, config: ConvolutionalConfig, source_vocab_size: int, target_vocab_size: int) -> None:
        super().__init__()
        if config.tie_embeddings == "all" and source_vocab_size != target_vocab_size:
            raise ValueError(
                f"tie='all' needs one vocabulary for both sides, and there are {source_vocab_size} source "
                f"words and {target_vocab_size} target words; make a joint one, or use tie='target'"
            )
        self.config = config
        narrow, wide, kept = config.embedding_width, config.width, 1 - config.dropout
        self.target_embedding = _build_embedding(target_vocab_size, narrow)
        self.source_embedding = (
            self.target_embedding
            if config.tie_embeddings == "all"
            else _build_embedding(source_vocab_size, narrow)
        )
        self.source_input_layer, self.target_input_layer = (
            ConvolutionalInputLayer(config),
            ConvolutionalInputLayer(config),
        )
        self.widen_source, self.widen_target = (_build_linear(narrow, wide, gain=kept) for _ in range(2))
        self.encoder = _build_module_list(
            ConvolutionalEncoderLayer(config) for _ in range(config.encoder_layers)
        )
        self.decoder = _build_module_list(
            ConvolutionalDecoderLayer(config) for _ in range(config.decoder_layers)
        )
        self.narrow_source, self.narrow_target = (_build_linear(wide, narrow) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)
        self.output = _build_linear(narrow, target_vocab_size, gain=kept)
        if config.tie_embeddings != "none":
            self.output = nn.Linear(narrow, target_vocab_size)
            self.output.weight = self.target_embedding.weight
            nn.init.zeros_(self.output.bias)

    # ------------------------------------------------------------------------------- training

    def loss(self, batch: Seq2SeqBatch) -> Loss:
        """Cross-entropy summed over the labels that count, smoothed in training; "nll" is the plain one."""
        _check_padded("loss", batch.source, batch.target)
        source = self.encode(batch.source)
        hidden, labels = select_labelled(self._decode(batch.target, source.attend_source), batch)
        smoothing = self.config.label_smoothing if self.training else 0.0
        total, plain = linear_cross_entropy(hidden, self.output.weight, labels, smoothing, self.output.bias)
        return Loss(total, batch.count, {"nll": plain})

    def encode(self, source: Tokens) -> ConvolutionalMemory:
        """What decoding looks at, from padded tokens."""
        words = self.source_input_layer(self.source_embedding(source.ids))
        x = self.widen_source(words)
        real = None if source.mask is None else source.valid_mask[..., None]
        for layer in self.encoder:
            x = layer(x, real)
        z = self.narrow_source(x)
        # Every decoder layer sends a gradient back: the encoder gets their mean, the embeddings their sum.
        z = torch.lerp(z.detach(), z, 1 / len(self.decoder))
        return ConvolutionalMemory(z, z + words, source)

    def _decode(self, target: Tokens, attend_source: LinearMap) -> Tensor:
        """``(B, T, E)``: for each token of the target, what the output layer says the next word from."""
        words = self.target_input_layer(self.target_embedding(target.ids))
        x = self.widen_target(words)
        for layer in self.decoder:
            before = F.pad(x, (0, 0, self.config.kernel_size - 1, 0))
            x = layer(before, words, attend_source)
        return self.dropout(self.narrow_target(x))  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------- decoding

    def start(self, source: Tokens) -> ConvolutionalState:
        """Encode the source, padded, and normalise the decoder's weights once for all steps."""
        _check_padded("start", source)
        encoded = self.encode(source)
        nothing = encoded.keys.new_zeros(len(source.lengths), self.config.kernel_size - 1, self.config.width)
        maps = tuple(layer.prepare_maps() for layer in self.decoder)
        return ConvolutionalState(encoded, maps, past_inputs=(nothing,) * len(maps))

    def step(self, state: ConvolutionalState, ids: Tensor) -> tuple[Tensor, ConvolutionalState]:
        """The logits ``(N, V)`` of the next words; ``ids`` ``(N,)`` are those said last, BOS at first."""
        words = self.target_input_layer(self.target_embedding(ids[:, None]), offset=state.num_steps)
        x = self.widen_target(words)
        past = []
        for layer, before, maps in zip(self.decoder, state.past_inputs, state.maps, strict=True):
            window = torch.cat([before, x], dim=1)
            past.append(window[:, 1:])
            x = layer(window, words, state.memory.attend_source, maps)
        logits = self.output(self.dropout(self.narrow_target(x[:, 0])))
        return logits, replace(state, past_inputs=tuple(past), num_steps=state.num_steps + 1)

    @torch.no_grad()
    def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
        """Where each decoder layer looks in the source, ``(B, 1, target, memory)``. The batch is padded."""
        _check_padded("maps", batch.source, batch.target)
        source = self.encode(batch.source)
        seen: list[Tensor] = []

        def look(query: Tensor) -> Tensor:
            seen.append(weights(query, source.keys, score=DOT_SCORE, mask=source.tokens.mask))
            return source.attend_source(query)

        self._decode(batch.target, look)
        return [LayerAttention(f"decoder.{number}", found[:, None]) for number, found in enumerate(seen)]


def _build_module_list(modules: Iterable[nn.Module]) -> Any:
    # So that the types of the layers are known: a ModuleList forgets them.
    return nn.ModuleList(modules)


def _build_embedding(vocab_size: int, width: int) -> nn.Embedding:
    table = nn.Embedding(vocab_size, width)
    nn.init.normal_(table.weight, std=EMBEDDING_STD)
    return table


def _check_padded(method_name: str, *tokens: Tokens) -> None:
    if any(one.packed for one in tokens):
        raise ValueError(
            f"Convolutional.{method_name} takes padded tokens, and packed ones came, whose sentences a convolution "
            "would run together; see Tokens.padded"
        )
