"""Convolutional seq2seq (Gehring 2017): gated convolutions, and attention in every decoder layer.

A layer sees ``kernel_size`` neighbouring words, and a stack of layers sees more. All positions are computed
in parallel. With z the output of the encoder, and e and g the embeddings of source and target, a decoder
layer with input x is ::

    h       = GLU(convolution(x))                     of the word itself and those before it
    c       = √m · Σ_j a_j (z_j + e_j)                a = softmax_j((W h + b + g) · z_j)
    output  = √½ · (x + √½ · (h + U c))

Each sum of two terms is scaled by √½ to keep the variance. The variance of a mean over m source words falls
with m, so the mean is scaled by m √(1/m) = √m. m is the length of each sentence without padding.

Shapes: ``B`` sentences, ``S`` source and ``T`` target words, ``N`` rows while decoding, ``E`` width of the
embeddings and of attention, ``D`` width of the convolutions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from jumok.attention.core import attend, weights
from jumok.attention.mask_types import move_to_device
from jumok.attention.positions import LearnedPositions, PositionEmbedding, SinusoidalPositions
from jumok.attention.scores import Dot
from jumok.batches.tokens import LayerAttention, Loss, Seq2SeqBatch, Tokens
from jumok.config import Config
from jumok.models.layers.module_list import build_module_list
from jumok.models.layers.output_loss import linear_cross_entropy, select_labelled
from jumok.models.layers.source_sharing import reorder_sources

SQRT_HALF = math.sqrt(0.5)
EMBEDDING_STD = 0.1
DOT_SCORE = Dot()
LinearMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ConvolutionalConfig(Config):
    """Configuration of a :class:`ConvolutionalSeq2Seq`.

    ``position_encoding`` "learned" supports up to ``max_positions`` tokens; longer sentences are refused.
    "sinusoid" supports any length. ``tie_embeddings`` says which embeddings share one weight: "none",
    "target" (target embedding and output layer), or "all" (the source embedding too, which needs a joint
    vocabulary).
    """

    type: Literal["convolutional"] = "convolutional"
    embedding_width: int = 256  # E
    width: int = 256  # D
    kernel_size: int = 3
    encoder_layers: int = 4
    decoder_layers: int = 3
    position_encoding: Literal["learned", "sinusoid"] = "learned"
    max_positions: int = 1024
    tie_embeddings: Literal["none", "target", "all"] = "none"
    dropout: float = 0.1  # of embeddings, of the inputs of convolutions, and before the output layer
    label_smoothing: float = 0.1  # in training only

    def __post_init__(self) -> None:
        sizes = ("embedding_width", "width", "kernel_size", "encoder_layers", "decoder_layers")
        self.check_ranges(positive=(*sizes, "max_positions"), fraction=("dropout", "label_smoothing"))
        if self.kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size={self.kernel_size}: an odd number is expected, so that the encoder sees "
                "equally far to both sides"
            )


# --------------------------------------------------------------------------------------- layers


class ConvolutionalInputLayer(nn.Module):
    """Adds position embeddings to word embeddings ``(B, L, E)``."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        super().__init__()
        self.position: PositionEmbedding
        if config.position_encoding == "learned":
            self.position = LearnedPositions(config.max_positions, config.embedding_width)
            nn.init.normal_(self.position.table.weight, std=EMBEDDING_STD)
            self.scale = 1.0
        else:
            self.position = SinusoidalPositions(config.embedding_width)
            self.scale = EMBEDDING_STD / SQRT_HALF  # sinusoids have std √½; this gives that of the words
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embeddings: Tensor, offset: int = 0) -> Tensor:
        return self.dropout(embeddings + self.scale * self.position(embeddings, offset=offset))  # type: ignore[no-any-return]


class ConvolutionalEncoderLayer(nn.Module):
    """A gated convolution with a residual connection."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        super().__init__()
        self.kernel_size = config.kernel_size
        self.dropout = nn.Dropout(config.dropout)
        self.convolution = _build_convolution(config)

    def forward(self, x: Tensor, valid_mask: Tensor | None) -> Tensor:
        dropped = self.dropout(x)
        if valid_mask is not None:  # padding is zero, as beyond the end of a single sentence
            dropped = dropped.where(valid_mask, 0)
        side = self.kernel_size // 2
        h = _apply_gated_convolution(self.convolution, F.pad(dropped, (0, 0, side, side)), self.kernel_size)
        return SQRT_HALF * (x + h)


class ConvolutionalLayerMaps(NamedTuple):
    """The linear maps of a decoder layer, with weights normalized once for all decoding steps."""

    convolution: LinearMap
    query_projection: LinearMap
    context_projection: LinearMap


class ConvolutionalDecoderLayer(nn.Module):
    """A gated causal convolution, then attention to the source, with a residual connection."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        super().__init__()
        self.kernel_size = config.kernel_size
        self.dropout = nn.Dropout(config.dropout)
        self.convolution = _build_convolution(config)
        self.query_projection = _build_linear(config.width, config.embedding_width)
        self.context_projection = _build_linear(config.embedding_width, config.width)

    def prepare_maps(self) -> ConvolutionalLayerMaps:
        """The layer's linear maps as functions of their normalized weights."""
        layers = (self.convolution, self.query_projection, self.context_projection)
        return ConvolutionalLayerMaps(
            *(functools.partial(F.linear, weight=layer.weight, bias=layer.bias) for layer in layers)
        )

    def forward(
        self,
        x: Tensor,
        embeddings: Tensor,
        attend_source: LinearMap,
        maps: ConvolutionalLayerMaps | None = None,
    ) -> Tensor:
        """Return the layer's output ``(B, T, D)``.

        Args:
            x: Input ``(B, kernel_size − 1 + T, D)``, which begins ``kernel_size − 1`` positions earlier.
            embeddings: Target embeddings g, ``(B, T, E)``.
            attend_source: Maps queries ``(B, T, E)`` to contexts c, such as
                ``ConvolutionalMemory.attend_source``.
            maps: The layer's prepared maps. They are computed if None.
        """
        maps = maps or self.prepare_maps()
        h = _apply_gated_convolution(maps.convolution, self.dropout(x), self.kernel_size)
        query = maps.query_projection(h) + embeddings  # W h + b + g
        context = maps.context_projection(attend_source(query))  # U c
        return SQRT_HALF * (x[:, self.kernel_size - 1 :] + SQRT_HALF * (h + context))


def _apply_gated_convolution(convolution: LinearMap, x: Tensor, kernel_size: int) -> Tensor:
    """``GLU(convolution(x))``, from ``(B, kernel_size − 1 + L, D)`` to ``(B, L, D)``.

    The convolution is a linear map of ``kernel_size`` concatenated neighbours.
    """
    length = x.shape[1] - kernel_size + 1
    neighbours = torch.cat([x[:, first : first + length] for first in range(kernel_size)], dim=-1)
    return F.glu(convolution(neighbours))


def _build_linear(in_features: int, out_features: int, gain: float = 1.0) -> nn.Linear:
    """A weight-normalized linear layer that initially scales the variance by ``gain`` (section 3.5)."""
    layer = nn.Linear(in_features, out_features)
    nn.init.normal_(layer.weight, std=math.sqrt(gain / in_features))
    nn.init.zeros_(layer.bias)
    return cast(nn.Linear, weight_norm(layer))


def _build_convolution(config: ConvolutionalConfig) -> nn.Linear:
    # A GLU reduces the variance to a quarter, and dropout increases it by 1 / (1 − dropout).
    return _build_linear(config.kernel_size * config.width, 2 * config.width, gain=4 * (1 - config.dropout))


# ------------------------------------------------------------------------------------- decoding


@dataclass(frozen=True, eq=False)
class ConvolutionalMemory:
    """The encoder's output for B sentences."""

    keys: Tensor  # z, (B, S, E)
    values: Tensor  # z + e
    tokens: Tokens  # only their lengths and mask are used

    @functools.cached_property
    def scale(self) -> Tensor:
        """√m for the length m of each sentence, ``(B, 1, 1)``."""
        return self.tokens.lengths_tensor.to(self.values.dtype).sqrt()[:, None, None]

    def attend_source(self, query: Tensor) -> Tensor:
        """Contexts ``(N, T, E)`` of queries ``(N, T, E)``. N / B neighbouring rows share a sentence."""
        sentences, rows, steps = self.keys.shape[0], query.shape[0], query.shape[1]
        queries = query.reshape(sentences, rows * steps // max(1, sentences), query.shape[2])
        context = attend(queries, self.keys, self.values, score=DOT_SCORE, mask=self.tokens.mask)
        return (self.scale * context).reshape(query.shape)

    def reorder(self, indices: Sequence[int]) -> ConvolutionalMemory:
        index = move_to_device(torch.tensor(indices, dtype=torch.long), self.keys.device)
        keys, values, ids = (x.index_select(0, index) for x in (self.keys, self.values, self.tokens.ids))
        return ConvolutionalMemory(keys, values, Tokens(ids, tuple(self.tokens.lengths[row] for row in indices)))


@dataclass(frozen=True, eq=False)
class ConvolutionalState:
    """Decoding state of N rows. ``rows_per_source`` neighbouring rows continue the same source."""

    memory: ConvolutionalMemory
    maps: tuple[ConvolutionalLayerMaps, ...]
    past_inputs: tuple[Tensor, ...]  # for each layer, its last inputs, (N, kernel_size − 1, D)
    num_steps: int = 0
    rows_per_source: int = 1

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> ConvolutionalState:
        """See :class:`~jumok.decoding.protocol.DecoderState`. The memory is copied only if the sources change."""
        source_rows, rows_per_source = reorder_sources(index, sources, self.rows_per_source)
        memory = self.memory
        if source_rows != list(range(len(memory.tokens.lengths))):
            memory = memory.reorder(source_rows)
        elif rows_per_source == self.rows_per_source == 1:
            return self  # no row moves
        index = move_to_device(index, memory.keys.device)
        past_inputs = tuple(x.index_select(0, index) for x in self.past_inputs)
        return replace(self, memory=memory, past_inputs=past_inputs, rows_per_source=rows_per_source)


# ------------------------------------------------------------------------------------ the model


class ConvolutionalSeq2Seq(nn.Module):
    """Gated convolutions with attention for translation. Batches must be padded.

    >>> model = ConvolutionalSeq2Seq(ConvolutionalConfig(embedding_width=8, width=16), 11, 13).eval()
    >>> batch = Seq2SeqBatch.from_sequences([[5, 6], [7]], [[8], [9, 10, 11]])
    >>> model.loss(batch).count
    6
    >>> state = model.start(batch.source)
    >>> logits, state = model.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    supports_compile = False  # masks hold other numbers in every batch, and each would be compiled anew
    encoder: Sequence[ConvolutionalEncoderLayer]
    decoder: Sequence[ConvolutionalDecoderLayer]

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a sentence, including the special one. None if there is no limit."""
        return self.config.max_positions if self.config.position_encoding == "learned" else None

    def __init__(self, config: ConvolutionalConfig, source_vocab_size: int, target_vocab_size: int) -> None:
        super().__init__()
        if config.tie_embeddings == "all" and source_vocab_size != target_vocab_size:
            raise ValueError(
                f"tie_embeddings='all' needs a joint vocabulary, but there are {source_vocab_size} source "
                f"words and {target_vocab_size} target words; build a joint one, or use "
                "tie_embeddings='target'"
            )
        self.config = config
        narrow, wide, keep_probability = config.embedding_width, config.width, 1 - config.dropout
        self.target_embedding = _build_embedding(target_vocab_size, narrow)
        self.source_embedding = (
            self.target_embedding if config.tie_embeddings == "all" else _build_embedding(source_vocab_size, narrow)
        )
        self.source_input_layer = ConvolutionalInputLayer(config)
        self.target_input_layer = ConvolutionalInputLayer(config)
        self.widen_source = _build_linear(narrow, wide, gain=keep_probability)
        self.widen_target = _build_linear(narrow, wide, gain=keep_probability)
        self.encoder = build_module_list(ConvolutionalEncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = build_module_list(ConvolutionalDecoderLayer(config) for _ in range(config.decoder_layers))
        self.narrow_source = _build_linear(wide, narrow)
        self.narrow_target = _build_linear(wide, narrow)
        self.dropout = nn.Dropout(config.dropout)
        self.output = _build_linear(narrow, target_vocab_size, gain=keep_probability)
        if config.tie_embeddings != "none":
            self.output = nn.Linear(narrow, target_vocab_size)
            self.output.weight = self.target_embedding.weight
            nn.init.zeros_(self.output.bias)

    # ------------------------------------------------------------------------------- training

    def loss(self, batch: Seq2SeqBatch) -> Loss:
        """Cross-entropy summed over the labels, smoothed in training. "nll" is the one without smoothing."""
        _check_padded("loss", batch.source, batch.target)
        memory = self.encode(batch.source)
        hidden, labels = select_labelled(self._decode(batch.target, memory.attend_source), batch)
        smoothing = self.config.label_smoothing if self.training else 0.0
        total, nll = linear_cross_entropy(hidden, self.output.weight, labels, smoothing, self.output.bias)
        return Loss(total, batch.count, {"nll": nll})

    def encode(self, source: Tokens) -> ConvolutionalMemory:
        """Encode padded tokens as the decoder's memory."""
        embeddings = self.source_input_layer(self.source_embedding(source.ids))  # e
        x = self.widen_source(embeddings)
        valid_mask = None if source.mask is None else source.valid_mask[..., None]
        for layer in self.encoder:
            x = layer(x, valid_mask)
        z = self.narrow_source(x)
        # Every decoder layer sends a gradient. The encoder gets their mean, the embeddings their sum.
        z = torch.lerp(z.detach(), z, 1 / len(self.decoder))
        return ConvolutionalMemory(z, z + embeddings, source)

    def _decode(self, target: Tokens, attend_source: LinearMap) -> Tensor:
        """Inputs ``(B, T, E)`` of the output layer for whole target sentences."""
        embeddings = self.target_input_layer(self.target_embedding(target.ids))  # g
        x = self.widen_target(embeddings)
        for layer in self.decoder:
            padded = F.pad(x, (0, 0, self.config.kernel_size - 1, 0))
            x = layer(padded, embeddings, attend_source)
        return self.dropout(self.narrow_target(x))  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------- decoding

    def start(self, source: Tokens) -> ConvolutionalState:
        """Encode the padded source, and normalize the decoder's weights once for all steps."""
        _check_padded("start", source)
        memory = self.encode(source)
        zeros = memory.keys.new_zeros(len(source.lengths), self.config.kernel_size - 1, self.config.width)
        maps = tuple(layer.prepare_maps() for layer in self.decoder)
        return ConvolutionalState(memory, maps, past_inputs=(zeros,) * len(maps))

    def step(self, state: ConvolutionalState, ids: Tensor) -> tuple[Tensor, ConvolutionalState]:
        """Return the logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, which are BOS at first."""
        embeddings = self.target_input_layer(self.target_embedding(ids[:, None]), offset=state.num_steps)
        x = self.widen_target(embeddings)
        past_inputs = []
        for layer, past, maps in zip(self.decoder, state.past_inputs, state.maps, strict=True):
            window = torch.cat([past, x], dim=1)
            past_inputs.append(window[:, 1:])
            x = layer(window, embeddings, state.memory.attend_source, maps)
        logits = self.output(self.dropout(self.narrow_target(x[:, 0])))
        return logits, replace(state, past_inputs=tuple(past_inputs), num_steps=state.num_steps + 1)

    @torch.no_grad()
    def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
        """Attention weights ``(B, 1, target, source)`` of each decoder layer, for a padded batch."""
        _check_padded("compute_attention_maps", batch.source, batch.target)
        memory = self.encode(batch.source)
        maps: list[Tensor] = []

        def record_and_attend(query: Tensor) -> Tensor:
            maps.append(weights(query, memory.keys, score=DOT_SCORE, mask=memory.tokens.mask))
            return memory.attend_source(query)

        self._decode(batch.target, record_and_attend)
        return [LayerAttention(f"decoder.{number}", x[:, None]) for number, x in enumerate(maps)]


def _build_embedding(vocab_size: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(vocab_size, width)
    nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
    return embedding


def _check_padded(method_name: str, *sides: Tokens) -> None:
    if any(tokens.packed for tokens in sides):
        raise ValueError(
            f"ConvolutionalSeq2Seq.{method_name} needs padded tokens, but these are packed, and a "
            "convolution would mix their sentences; build them with Tokens.pad"
        )
