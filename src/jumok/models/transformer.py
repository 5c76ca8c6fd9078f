"""The Transformer (Vaswani 2017): attention and feed-forward layers, in an encoder and a decoder.

::

    source ─ embed ─┬─ attend to all ─ feed forward ─┬─ encoded
                    └────────── × layers ────────────┘     │
                                                           │
    target ─ embed ─┬─ attend to the past ─ attend to the source ─ feed forward ─┬─ logits
                    └───────────────────── × layers ─────────────────────────────┘

Around each of these steps there is a residual connection with a layer norm (:class:`ResidualNorm`). Training,
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

from jumok.attention.heads import MultiHead
from jumok.attention.kv_cache import KVCache
from jumok.attention.positions import SinusoidalPositions
from jumok.batches.tokens import LayerAttention, Loss, Seq2SeqBatch, Tokens
from jumok.models.layers.output_loss import linear_cross_entropy, select_labelled
from jumok.models.layers.residual import (
    CompiledBlock,
    FeedForward,
    ResidualNorm,
    ResidualStream,
    Sublayer,
    TransformerEncoderLayer,
    build_module_list,
    compile_blocks,
    get_positions,
    to_autocast_dtype,
)
from jumok.models.layers.source_sharing import reorder_sources

__all__ = ["Transformer", "TransformerConfig", "TransformerState"]


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes of a :class:`Transformer` and how it learns.

    ``norm`` says where the layer norms stand: "post", after each residual sum as in the paper, or "pre",
    before each sublayer, which lets deep models train without warm-up. ``tie_embeddings`` says which embeddings are one:
    "none", "target" (target words and output layer), or "all" (source words too, with a joint vocabulary).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    type: Literal["transformer"] = "transformer"
    width: int = 256
    num_heads: int = 4
    feed_forward_width: int = 1024
    encoder_layers: int = 4
    decoder_layers: int = 4
    activation: Literal["relu", "gelu", "swish"] = "relu"
    norm: Literal["post", "pre"] = "post"
    tie_embeddings: Literal["none", "target", "all"] = "target"
    dropout: float = 0.1  # of what a sublayer gives, and of the embeddings
    attention_dropout: float = 0.0  # of attention weights; slow in packed sentences of over 128 tokens
    activation_dropout: float = 0.0  # inside feed-forward
    label_smoothing: float = 0.1  # of the labels, in training
    layer_norm_eps: ClassVar[float] = 1e-5  # of the layer norms

    def __post_init__(self) -> None:
        for name in ("width", "heads", "feed_forward", "encoder_layers", "decoder_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        if self.width % self.num_heads:
            raise ValueError(f"width={self.width} does not divide into heads={self.num_heads}; change one")
        for name in ("dropout", "attention_dropout", "activation_dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")


# --------------------------------------------------------------------------------------- layers


class TransformerInputLayer(CompiledBlock):
    """Words with their positions: the residual stream x, and what the first sublayer is given."""

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


class TransformerDecoderLayer(nn.Module):
    """Attention to the past, attention to the source, then feed-forward. The caller says how to attend."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, heads, dropout = config.width, config.num_heads, config.attention_dropout
        self.self_attention = MultiHead(width, heads, dropout=dropout)
        self.self_attention_residual = ResidualNorm(config)
        self.cross_attention = MultiHead(width, heads, key_width=width, dropout=dropout)
        self.feed_forward = FeedForward(config)

    def forward(
        self, x: Tensor, normed: Tensor, self_attend: Sublayer, cross_attend: Sublayer
    ) -> ResidualStream:
        x, normed = self.self_attention_residual(x, self_attend(normed))
        return self.feed_forward(x, cross_attend(normed))  # type: ignore[no-any-return]


class TransformerOutputLayer(CompiledBlock):
    """Logits over the target's words, and their loss."""

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
    """How far decoding has come, for N rows.

    Neighbouring rows that continue the same source share its keys and values: ``source`` has N / ``rows_per_source``
    rows (see :mod:`jumok.models.sharing`).
    """

    self_caches: tuple[KVCache, ...]  # keys and values of the words so far, for each layer
    source_caches: tuple[KVCache, ...]  # those of the source
    rows_per_source: int = 1

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> TransformerState:
        """The rows ``index``, in that order; a row may come twice or never.

        ``sources``: the sources that go on, equally many rows of each, side by side. Then the source's keys
        are copied only if these change, and no GPU is waited for. Without, each row gets its own.
        """
        said, source = self.self_caches, self.source_caches
        rows, shared = reorder_sources(index, sources, self.rows_per_source)
        if rows != list(range(len(source[0].lengths))):
            source = tuple(cache.reorder(torch.tensor(rows, dtype=torch.long)) for cache in source)
        elif shared == self.rows_per_source == 1:
            return self  # each row stays where it is
        if said[0].buffer is not None:  # before the first step, nothing was said
            index = index.to(said[0].key.device)
            said = tuple(cache.reorder(index) for cache in said)
        return TransformerState(said, source, shared)


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

    encoder: Sequence[TransformerEncoderLayer]
    decoder: Sequence[TransformerDecoderLayer]

    def __init__(self, config: TransformerConfig, source_vocab_size: int, target_vocab_size: int) -> None:
        super().__init__()
        if config.tie_embeddings == "all" and source_vocab_size != target_vocab_size:
            raise ValueError(
                f"tie='all' needs one vocabulary for both sides, and there are {source_vocab_size} source "
                f"words and {target_vocab_size} target words; make a joint one, or use tie='target'"
            )
        self.config = config
        width = config.width
        self.target_embedding = _build_embedding(target_vocab_size, width)
        self.source_embedding = (
            self.target_embedding
            if config.tie_embeddings == "all"
            else _build_embedding(source_vocab_size, width)
        )
        self.source_input_layer, self.target_input_layer = (
            TransformerInputLayer(config),
            TransformerInputLayer(config),
        )
        self.encoder = build_module_list(
            TransformerEncoderLayer(config) for _ in range(config.encoder_layers)
        )
        self.decoder = build_module_list(
            TransformerDecoderLayer(config) for _ in range(config.decoder_layers)
        )
        tied = (
            self.target_embedding
            if config.tie_embeddings != "none"
            else _build_embedding(target_vocab_size, width)
        )
        self.output = TransformerOutputLayer(tied.weight)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``torch.compile`` all that lies between the attentions: see :func:`compile_blocks`."""
        compile_blocks(self, *args, **kwargs)

    # ------------------------------------------------------------------------------- training

    def loss(self, batch: Seq2SeqBatch) -> Loss:
        """Cross-entropy summed over the labels that count, smoothed in training; "nll" is the plain one."""
        encoded, mask = self.encode(batch.source), batch.source.cross_attention_mask(batch.target)

        def to_source(layer: TransformerDecoderLayer) -> Sublayer:
            return functools.partial(layer.cross_attention, source=encoded, mask=mask)

        hidden, labels = select_labelled(self._decode_target(batch.target, to_source), batch)
        total, plain = self.output(hidden, labels, self.config.label_smoothing if self.training else 0.0)
        return Loss(total, batch.count, {"nll": plain})

    def encode(self, source: Tokens) -> Tensor:
        """``(B, L, D)``"""
        x, given = self.source_input_layer(self.source_embedding(source.ids), get_positions(source))
        for layer in self.encoder:
            x, given = layer(x, given, source.mask)
        return given  # type: ignore[no-any-return]

    def _decode_target(
        self, target: Tokens, build_cross_attend: Callable[[TransformerDecoderLayer], Sublayer]
    ) -> Tensor:
        """``(B, L, D)``: the decoder's output if it is told the target."""
        to_past = (functools.partial(layer.self_attention, mask=target.causal_mask) for layer in self.decoder)
        return self.decode(target.ids, get_positions(target), to_past, map(build_cross_attend, self.decoder))

    # ------------------------------------------------------------------------------- decoding

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        self_attentions: Iterable[Sublayer],
        cross_attentions: Iterable[Sublayer],
    ) -> Tensor:
        """``(B, L, D)``: for each of the tokens ``(B, L)``, what the output layer says the next word from.

        ``positions`` are their positions; ``to_past`` and ``to_source`` say for each layer how it attends.
        """
        x, given = self.target_input_layer(self.target_embedding(ids), positions)
        for layer, past, source in zip(self.decoder, self_attentions, cross_attentions, strict=True):
            x, given = layer(x, given, past, source)
        return given  # type: ignore[no-any-return]

    def start(self, source: Tokens) -> TransformerState:
        """Encode the source, padded, and work out its keys and values once for all steps."""
        _check_padded("start", source)
        encoded = self.encode(source)
        prepared = (layer.cross_attention.prepare(encoded, source.lengths) for layer in self.decoder)
        return TransformerState((KVCache(),) * len(self.decoder), tuple(prepared))

    def step(self, state: TransformerState, ids: Tensor) -> tuple[Tensor, TransformerState]:
        """The logits ``(N, V)`` of the next words; ``ids`` ``(N,)`` are those said last, BOS at first."""
        place = torch.full((1,), state.self_caches[0].max_length, device=ids.device)
        past = [
            _CachedSelfAttention(layer.self_attention, cache)
            for layer, cache in zip(self.decoder, state.self_caches, strict=True)
        ]
        to_source = (
            functools.partial(_attend_shared_source, layer.cross_attention, source, state.rows_per_source)
            for layer, source in zip(self.decoder, state.source_caches, strict=True)
        )
        given = self.decode(ids[:, None], place, past, to_source)
        said = tuple(one.cache for one in past)
        return self.output.logits(given[:, 0]), TransformerState(
            said, state.source_caches, state.rows_per_source
        )

    @torch.no_grad()
    def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
        """Where each decoder layer looks in the source, ``(B, H, target, source)``. The batch is padded."""
        _check_padded("maps", batch.source, batch.target)
        encoded, mask = self.encode(batch.source), batch.source.mask
        seen: list[Tensor] = []

        def to_source(layer: TransformerDecoderLayer) -> Sublayer:
            def look(x: Tensor) -> Tensor:
                seen.append(layer.cross_attention.weights(x, encoded, mask=mask))
                return layer.cross_attention(x, encoded, mask=mask)  # type: ignore[no-any-return]

            return look

        self._decode_target(batch.target, to_source)
        return [
            LayerAttention(f"decoder.{number}.source_attention", found) for number, found in enumerate(seen)
        ]


class _CachedSelfAttention:
    """Attention of one new word to those before it; afterwards ``cache`` holds it too."""

    def __init__(self, attention: MultiHead, cache: KVCache) -> None:
        self.attention, self.cache = attention, cache

    def __call__(self, x: Tensor) -> Tensor:
        out, self.cache = self.attention.step(x, self.cache)
        return out


def _attend_shared_source(
    attention: MultiHead, source_cache: KVCache, rows_per_source: int, x: Tensor
) -> Tensor:
    """Attention to the source: rows that share one are so many queries to it."""
    return attention(x.view(-1, rows_per_source, x.shape[-1]), source_cache).view_as(x)  # type: ignore[no-any-return]


def _build_embedding(vocab_size: int, width: int) -> nn.Embedding:
    table = nn.Embedding(vocab_size, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


def _check_padded(method_name: str, *tokens: Tokens) -> None:
    if any(one.packed for one in tokens):
        raise ValueError(
            f"Transformer.{method_name} takes padded tokens, and packed ones came; see Tokens.padded"
        )
