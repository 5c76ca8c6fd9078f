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

from jumok.batch import Loss, Map, Tokens
from jumok.models.transformer import State, Transformer, TransformerConfig
from jumok.pictures import Captions, source_of

__all__ = ["CaptionTransformer"]


class CaptionTransformer(nn.Module):
    """Says what is in a picture, given its places. What it can do is what a ``Captioner`` can.

    >>> config = TransformerConfig(width=8, heads=2, feed_forward=16)
    >>> model = CaptionTransformer(config, 13, features=5).eval()
    >>> batch = Captions.of(torch.randn(2, 6, 5), (2, 3), [[8], [9, 10, 11]])
    >>> model.loss(batch).count, model.maps(batch)[0].weights.shape
    (6, torch.Size([2, 2, 4, 6]))
    """

    def __init__(self, config: TransformerConfig, vocabulary: int, features: int) -> None:
        super().__init__()
        if config.tie == "all":
            raise ValueError("tie='all' is for words on both sides, and pictures have none: use tie='target'")
        self.config = config
        self.transformer = Transformer(config, 1, vocabulary)
        entry = nn.Linear(features, config.width)
        # As small as embeddings are: the Transformer multiplies both by √D.
        nn.init.normal_(entry.weight, std=(features * config.width) ** -0.5)
        nn.init.zeros_(entry.bias)
        self.transformer.source_embedding = cast(Any, entry)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As that of a ``Transformer``."""
        self.transformer.compile(*args, **kwargs)

    def loss(self, batch: Captions) -> Loss:
        """Cross-entropy summed over the labels that count, smoothed in training; "nll" is the plain one."""
        return self.transformer.loss(self._real(batch).pairs)

    def start(self, source: Tensor | Tokens) -> State:
        """Before the first word, of places ``(B, P, F)``, or these as a search has them (``source_of``)."""
        places = source.ids if isinstance(source, Tokens) else source
        return self.transformer.start(source_of(self._as_weights(places)))

    def step(self, state: State, ids: Tensor) -> tuple[Tensor, State]:
        """The logits ``(N, V)`` of the next words; ``ids`` ``(N,)`` are those said last, BOS at first."""
        return self.transformer.step(state, ids)

    def maps(self, batch: Captions) -> list[Map]:
        """Where each decoder layer looked for each word, ``(B, H, T, P)``."""
        found = self.transformer.maps(self._real(batch).pairs)
        return [Map(f"transformer.{one.name}", one.weights) for one in found]

    def _real(self, batch: Captions) -> Captions:
        return replace(batch, places=self._as_weights(batch.places))

    def _as_weights(self, places: Tensor) -> Tensor:
        """In the type of the weights: features may be kept in a smaller one."""
        features = cast(nn.Linear, self.transformer.source_embedding).in_features
        if places.dim() != 3 or places.shape[-1] != features or 0 in places.shape:
            raise ValueError(
                f"places of shape {tuple(places.shape)} came; expected (pictures, places, {features}), at "
                "least one of each"
            )
        return places.to(self.transformer.target_embedding.weight.dtype)
