"""Captions by a Transformer: its encoder reads the places of a picture as if they were words.

    places ─ linear ─ encoder ─┐
                               │
    words so far ─ decoder ────┴─ logits

All else is :mod:`jumok.models.transformer`.

Shapes: ``B`` pictures, ``P`` places, ``T`` words, ``H`` heads; widths: ``F`` of a place, ``D`` of the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from jumok.batches.images import CaptionBatch, features_as_tokens
from jumok.batches.tokens import LayerAttention, Loss, Tokens
from jumok.models.transformer import Transformer, TransformerConfig, TransformerState

__all__ = ["CaptionTransformer"]


class CaptionTransformer(nn.Module):
    """Says what is in a picture, given its places. What it can do is what a ``Captioner`` can.

    >>> config = TransformerConfig(width=8, heads=2, feed_forward=16)
    >>> model = CaptionTransformer(config, 13, features=5).eval()
    >>> batch = Captions.of(torch.randn(2, 6, 5), (2, 3), [[8], [9, 10, 11]])
    >>> model.loss(batch).count, model.maps(batch)[0].weights.shape
    (6, torch.Size([2, 2, 4, 6]))
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, feature_width: int) -> None:
        super().__init__()
        if config.tie_embeddings == "all":
            raise ValueError("tie='all' is for words on both sides, and pictures have none: use tie='target'")
        self.config = config
        self.transformer = Transformer(config, 1, vocab_size)
        entry = nn.Linear(feature_width, config.width)
        # As small as embeddings are: the Transformer multiplies both by √D.
        nn.init.normal_(entry.weight, std=(feature_width * config.width) ** -0.5)
        nn.init.zeros_(entry.bias)
        self.transformer.source_embedding = cast(Any, entry)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As that of a ``Transformer``."""
        self.transformer.compile(*args, **kwargs)

    def loss(self, batch: CaptionBatch) -> Loss:
        """Cross-entropy summed over the labels that count, smoothed in training; "nll" is the plain one."""
        return self.transformer.loss(self._cast_batch(batch).seq2seq_batch)

    def start(self, source: Tensor | Tokens) -> TransformerState:
        """Before the first word, of places ``(B, P, F)``, or these as a search has them (``features_as_tokens``)."""
        places = source.ids if isinstance(source, Tokens) else source
        return self.transformer.start(features_as_tokens(self._cast_features(places)))

    def step(self, state: TransformerState, ids: Tensor) -> tuple[Tensor, TransformerState]:
        """The logits ``(N, V)`` of the next words; ``ids`` ``(N,)`` are those said last, BOS at first."""
        return self.transformer.step(state, ids)

    def compute_attention_maps(self, batch: CaptionBatch) -> list[LayerAttention]:
        """Where each decoder layer looked for each word, ``(B, H, T, P)``."""
        found = self.transformer.compute_attention_maps(self._cast_batch(batch).seq2seq_batch)
        return [LayerAttention(f"transformer.{one.name}", one.weights) for one in found]

    def _cast_batch(self, batch: CaptionBatch) -> CaptionBatch:
        return replace(batch, features=self._cast_features(batch.features))

    def _cast_features(self, image_features: Tensor) -> Tensor:
        """In the type of the weights: features may be kept in a smaller one."""
        features = cast(nn.Linear, self.transformer.source_embedding).in_features
        if image_features.dim() != 3 or image_features.shape[-1] != features or 0 in image_features.shape:
            raise ValueError(
                f"places of shape {tuple(image_features.shape)} came; expected (pictures, places, {features}), at "
                "least one of each"
            )
        return image_features.to(self.transformer.target_embedding.weight.dtype)
