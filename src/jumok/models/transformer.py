"""The Transformer (Vaswani 2017): an encoder and a decoder of attention and feed-forward sublayers.

::

    source ─ embed ─┬─ self-attention ─ feed-forward ─┬─ memory
                    └─────────── × layers ────────────┘    │
                                                           │
    target ─ embed ─┬─ causal self-attention ─ cross-attention ─ feed-forward ─┬─ logits
                    └────────────────────── × layers ──────────────────────────┘

Each sublayer has a residual connection and a layer norm::

    post-norm    x = norm(x + dropout(sublayer(x)))        as in the paper
    pre-norm     x = x + dropout(sublayer(norm(x)))        with one more norm after the last layer

In the code both read ``x, normed = residual(x, sublayer(normed))``, where ``normed`` is the input of the next
sublayer (see :class:`ResidualNorm`). This way ``torch.compile`` fuses each sum with the norm that follows,
and all that lies between two attentions is one compiled block.

Shapes: ``B`` sequences (1 if packed), ``L`` tokens, ``N`` rows while decoding, ``D`` width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention.compiled_block import CompiledBlock, compile_blocks
from jumok.attention.heads import MultiHead
from jumok.attention.kv_cache import KVCache
from jumok.attention.masks import Mask
from jumok.attention.positions import SinusoidalPositions
from jumok.batches.tokens import LayerAttention, Loss, Seq2SeqBatch, Tokens
from jumok.config import Config
from jumok.models.layers.module_list import build_module_list
from jumok.models.layers.output_loss import linear_cross_entropy, select_labelled
from jumok.models.layers.precision import to_autocast_dtype
from jumok.models.layers.source_sharing import reorder_sources
from jumok.models.layers.weight_casting import CastingLayer
from jumok.models.transformer_step import SourceMemory, StackedKVCache, TransformerStep


@dataclass(frozen=True)
class TransformerConfig(Config):
    """Configuration of a :class:`Transformer`.

    ``norm`` is the position of the layer norms: "post", after each residual sum as in the paper, or "pre",
    before each sublayer, which lets deep models train without warm-up. ``tie_embeddings`` says which
    embeddings share one weight: "none", "target" (target embedding and output layer), or "all" (the source
    embedding too, which needs a joint vocabulary).
    """

    type: Literal["transformer"] = "transformer"
    width: int = 256
    num_heads: int = 4
    feed_forward_width: int = 1024
    encoder_layers: int = 4
    decoder_layers: int = 4
    activation: Literal["relu", "gelu", "swish"] = "relu"
    norm: Literal["post", "pre"] = "post"
    tie_embeddings: Literal["none", "target", "all"] = "target"
    dropout: float = 0.1  # of sublayer outputs and embeddings
    attention_dropout: float = 0.0  # of attention weights; slow for packed sequences of over 128 tokens
    activation_dropout: float = 0.0  # of the hidden units of feed-forward layers
    label_smoothing: float = 0.1  # in training only
    layer_norm_eps: ClassVar[float] = 1e-5

    def __post_init__(self) -> None:
        self.check_ranges(
            positive=("width", "num_heads", "feed_forward_width", "encoder_layers", "decoder_layers"),
            fraction=("dropout", "attention_dropout", "activation_dropout", "label_smoothing"),
        )
        self.check_divisible("width", "num_heads")


# ---------------------------------------------------------------------------- layers, shared with BERT


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "swish": F.silu,
}

ResidualStream = tuple[Tensor, Tensor]  # x, and normed: the input of the next sublayer; both (B, L, D)


class TransformerLayerConfig(Protocol):
    """The fields of a model's config that its layers read."""

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
        """The position of the layer norms, "post" or "pre"; see :class:`ResidualNorm`."""

    @property
    def layer_norm_eps(self) -> float:
        """The number added to the variance in a layer norm."""

    @property
    def dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def activation_dropout(self) -> float: ...


class ResidualNorm(CompiledBlock):
    """Adds a sublayer's output to the residual stream, and normalizes the sum for the next sublayer.

    With post-norm the stream continues from the norm. With pre-norm it continues from the sum. ::

        post   x ──┬──────────── + ─ norm ─┬─ x          pre   x ──┬──────────── + ──┬── x
                   └─ sublayer ──┘         └─ normed               └─ sublayer ──┘   └─ norm ─ normed
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
    """The residual connection of the attention before it, and the feed-forward sublayer with its own.

    The sublayer is ``narrow(dropout(activation(widen(x))))``, applied to each token separately.
    """

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
        x, normed = self.attention_residual(x, attention_output)
        hidden = self.dropout(self.activation(self.widen(normed)))
        return self.residual(x, self.narrow(hidden))  # type: ignore[no-any-return]


class TransformerEncoderLayer(CastingLayer):
    """Self-attention, then feed-forward."""

    def __init__(self, config: TransformerLayerConfig) -> None:
        super().__init__()
        self.attention = MultiHead(config.width, config.num_heads, dropout=config.attention_dropout)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, normed: Tensor, mask: Mask | None) -> ResidualStream:
        attended = self.attention(normed, mask=mask)
        return self.feed_forward(x, attended)  # type: ignore[no-any-return]


def get_positions(tokens: Tokens) -> Tensor:
    """Position of each token in its sequence, ``(L,)`` or, if packed, ``(1, L)``."""
    if tokens.positions is not None:
        return tokens.positions
    return torch.arange(tokens.ids.shape[1], device=tokens.ids.device)


# ---------------------------------------------------------------------- layers of the Transformer only


class TransformerInputLayer(CompiledBlock):
    """``dropout(√D · embedding + position)``, with a norm for the first sublayer if norms are "pre"."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.scale = math.sqrt(config.width)
        self.position = SinusoidalPositions(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width) if config.norm == "pre" else None

    def forward(self, embeddings: Tensor, positions: Tensor) -> ResidualStream:
        x = embeddings * self.scale
        x = self.dropout(x + self.position.embed(positions).to(x.dtype))
        return x, to_autocast_dtype(x if self.norm is None else self.norm(x))


class TransformerDecoderLayer(CastingLayer):
    """Causal self-attention, cross-attention to the memory, then feed-forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, heads, dropout = config.width, config.num_heads, config.attention_dropout
        self.self_attention = MultiHead(width, heads, dropout=dropout)
        self.self_attention_residual = ResidualNorm(config)
        self.cross_attention = MultiHead(width, heads, key_width=width, dropout=dropout)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        memory: Tensor | KVCache,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        cache: KVCache | None = None,
        rows_per_source: int = 1,
    ) -> tuple[Tensor, Tensor, KVCache | None]:
        """Return the residual stream after the layer, and the cache with the new tokens.

        Args:
            x: The residual stream ``(B, L, D)``.
            normed: The input of self-attention ``(B, L, D)``.
            memory: The encoder's output ``(B, S, D)``, or its keys and values from
                ``cross_attention.prepare``.
            mask: Mask of self-attention. With a cache, causal by default.
            memory_mask: Mask of cross-attention.
            cache: Keys and values of earlier tokens. None if ``x`` holds whole sequences.
            rows_per_source: The number of neighbouring rows of ``x`` that share a row of the memory.
        """
        if cache is None:
            attended = self.self_attention(normed, mask=mask)
        else:
            attended, cache = self.self_attention.step(normed, cache, mask=mask)
        x, normed = self.self_attention_residual(x, attended)
        if rows_per_source == 1:
            attended = self.cross_attention(normed, memory, mask=memory_mask)
        else:  # rows that share a source are several queries to it
            queries = normed.view(-1, rows_per_source * normed.shape[1], normed.shape[2])
            attended = self.cross_attention(queries, memory, mask=memory_mask).view_as(normed)
        x, normed = self.feed_forward(x, attended)

        return x, normed, cache


class TransformerOutputLayer(CompiledBlock):
    """Logits over the target vocabulary, and their loss."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight  # (V, D), a parameter

    def logits(self, hidden: Tensor) -> Tensor:
        """``(N, D)`` to ``(N, V)``"""
        return F.linear(hidden, self.weight)

    def forward(self, hidden: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(hidden, self.weight, labels, smoothing)


# ------------------------------------------------------------------------------------- decoding


@dataclass(frozen=True, eq=False)
class TransformerState:
    """Decoding state of N rows.

    Neighbouring rows that continue the same source share its keys and values: ``source`` has
    N / ``rows_per_source`` rows (see :mod:`jumok.models.layers.source_sharing`).
    """

    past: StackedKVCache  # keys and values of the target so far
    source: SourceMemory  # keys and values of the source
    rows_per_source: int = 1
    bound_step: TransformerStep | None = None  # the decoder bound to its weights, from the first step on

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> TransformerState:
        """Return the state of the rows ``index``, in that order. Rows may be repeated or left out.

        ``sources``: the sources that remain, with equally many neighbouring rows each. If they are given, the
        source memory is copied only if the sources change, without waiting for a GPU. Otherwise each row
        gets its own source.
        """
        source = self.source
        source_rows, rows_per_source = reorder_sources(index, sources, self.rows_per_source)
        if source_rows != list(range(len(source.lengths))):
            source = source.reorder(source_rows)
        elif rows_per_source == self.rows_per_source == 1:
            return self  # no row moves
        return TransformerState(self.past.reorder(index), source, rows_per_source, self.bound_step)


# ------------------------------------------------------------------------------------ the model


class Transformer(nn.Module):
    """Transformer for translation. Batches may be padded or packed.

    >>> config = TransformerConfig(width=8, num_heads=2, feed_forward_width=16)
    >>> model = Transformer(config, source_vocab_size=11, target_vocab_size=13).eval()
    >>> batch = Seq2SeqBatch.from_sequences([[5, 6], [7]], [[8], [9, 10, 11]])
    >>> model.loss(batch).count
    6
    >>> state = model.start(batch.source)
    >>> logits, state = model.step(state, torch.tensor([BOS, BOS]))
    >>> logits.shape
    torch.Size([2, 13])
    """

    encoder: Sequence[TransformerEncoderLayer]
    decoder: Sequence[TransformerDecoderLayer]

    def __init__(self, config: TransformerConfig, source_vocab_size: int, target_vocab_size: int) -> None:
        super().__init__()
        if config.tie_embeddings == "all" and source_vocab_size != target_vocab_size:
            raise ValueError(
                f"tie_embeddings='all' needs a joint vocabulary, but there are {source_vocab_size} source "
                f"words and {target_vocab_size} target words; build a joint one, or use "
                "tie_embeddings='target'"
            )
        self.config = config
        tie, width = config.tie_embeddings, config.width
        self.target_embedding = _build_embedding(target_vocab_size, width)
        self.source_embedding = self.target_embedding if tie == "all" else _build_embedding(source_vocab_size, width)
        self.source_input_layer = TransformerInputLayer(config)
        self.target_input_layer = TransformerInputLayer(config)
        self.encoder = build_module_list(TransformerEncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = build_module_list(TransformerDecoderLayer(config) for _ in range(config.decoder_layers))
        output_embedding = self.target_embedding if tie != "none" else _build_embedding(target_vocab_size, width)
        self.output = TransformerOutputLayer(output_embedding.weight)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Apply ``torch.compile`` to all that lies between the attentions: see :func:`compile_blocks`."""
        compile_blocks(self, *args, **kwargs)

    def encode(self, source: Tokens) -> Tensor:
        """Encode the source as the decoder's memory ``(B, S, D)``."""
        x, normed = self.source_input_layer(self.source_embedding(source.ids), get_positions(source))
        for layer in self.encoder:
            x, normed = layer(x, normed, source.mask)
        return normed  # type: ignore[no-any-return]

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        memory: Tensor | Sequence[KVCache],
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        caches: Sequence[KVCache] | None = None,
        rows_per_source: int = 1,
    ) -> tuple[Tensor, tuple[KVCache, ...]]:
        """Return the input ``(B, L, D)`` of the output layer for target tokens, and the caches with them.

        Args:
            ids: Target tokens ``(B, L)``.
            positions: Their positions, broadcast to ``(B, L)``.
            memory: The encoder's output ``(B, S, D)``, or its keys and values for each layer.
            mask: Mask of self-attention. With caches, causal by default.
            memory_mask: Mask of cross-attention.
            caches: For each layer, keys and values of earlier tokens. None if ``ids`` are whole sequences.
            rows_per_source: The number of neighbouring rows that share a row of the memory.
        """
        x, normed = self.target_input_layer(self.target_embedding(ids), positions)
        new_caches = []
        for number, layer in enumerate(self.decoder):
            x, normed, cache = layer(
                x,
                normed,
                memory if isinstance(memory, Tensor) else memory[number],
                mask=mask,
                memory_mask=memory_mask,
                cache=None if caches is None else caches[number],
                rows_per_source=rows_per_source,
            )
            if cache is not None:
                new_caches.append(cache)
        return normed, tuple(new_caches)

    def loss(self, batch: Seq2SeqBatch) -> Loss:
        """Cross-entropy summed over the labels, smoothed in training. "nll" is the one without smoothing."""
        target = batch.target
        hidden, _ = self.decode(
            target.ids,
            get_positions(target),
            self.encode(batch.source),
            mask=target.causal_mask,
            memory_mask=batch.source.cross_attention_mask(target),
        )
        hidden, labels = select_labelled(hidden, batch)
        smoothing = self.config.label_smoothing if self.training else 0.0
        total, nll = self.output(hidden, labels, smoothing)
        return Loss(total, batch.count, {"nll": nll})

    def start(self, source: Tokens) -> TransformerState:
        """Encode the padded source, and compute its keys and values once for all steps."""
        _check_padded("start", source)
        memory = self.encode(source)
        source_caches = (layer.cross_attention.prepare(memory, source.lengths) for layer in self.decoder)
        return TransformerState(StackedKVCache(), SourceMemory(tuple(source_caches)))

    def step(self, state: TransformerState, ids: Tensor) -> tuple[Tensor, TransformerState]:
        """Return the logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, which are BOS at first."""
        past, source, rows_per_source = state.past, state.source, state.rows_per_source
        if not torch.is_grad_enabled():
            past = past.extend(len(self.decoder), len(ids), like=source.caches[0].key)
        bound_step = TransformerStep.bind(self, source, state.bound_step)
        if bound_step is not None:
            logits = bound_step(ids, past, source, rows_per_source)
        else:
            length = state.past.length
            hidden, caches = self.decode(
                ids[:, None],
                torch.full((1,), length, device=ids.device),
                source.caches,
                caches=past.to_layer_caches(len(self.decoder), length),
                rows_per_source=rows_per_source,
            )
            if torch.is_grad_enabled():
                past = StackedKVCache.from_layer_caches(caches)
            logits = self.output.logits(hidden[:, 0])
        return logits, TransformerState(past, source, rows_per_source, bound_step)

    @torch.no_grad()
    def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
        """Cross-attention weights ``(B, H, target, source)`` of each layer, for a padded batch."""
        source, target = batch.source, batch.target
        _check_padded("compute_attention_maps", source, target)
        memory = self.encode(source)
        x, normed = self.target_input_layer(self.target_embedding(target.ids), get_positions(target))
        maps = []
        for number, layer in enumerate(self.decoder):
            attended = layer.self_attention(normed, mask=target.causal_mask)
            x, normed = layer.self_attention_residual(x, attended)
            weights = layer.cross_attention.weights(normed, memory, mask=source.mask)
            maps.append(LayerAttention(f"decoder.{number}.cross_attention", weights))
            attended = layer.cross_attention(normed, memory, mask=source.mask)
            x, normed = layer.feed_forward(x, attended)
        return maps


def _build_embedding(vocab_size: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(vocab_size, width)
    nn.init.normal_(embedding.weight, std=width**-0.5)
    return embedding


def _check_padded(method_name: str, *sides: Tokens) -> None:
    if any(tokens.packed for tokens in sides):
        raise ValueError(
            f"Transformer.{method_name} needs padded tokens, but these are packed; build them with Tokens.pad"
        )
