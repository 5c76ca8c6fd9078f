"""Image captioning by a Transformer. Its encoder reads projected image features instead of word embeddings.

::

    features ─ linear ─ encoder ─┐
                                 │
    words so far ─ decoder ──────┴─ logits

Everything else is :mod:`jumok.models.transformer`.

Shapes: ``B`` images, ``P`` grid positions, ``T`` words, ``H`` heads; widths: ``F`` of a feature vector, ``D``
of the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from jumok.batches.images import CaptionBatch, features_as_tokens
from jumok.batches.tokens import LayerAttention, Loss, Tokens
from jumok.models.transformer import Transformer, TransformerConfig, TransformerState


class CaptionTransformer(nn.Module):
    """Generates captions from image features, with the interface of a ``Captioner``.

    >>> config = TransformerConfig(width=8, num_heads=2, feed_forward_width=16)
    >>> model = CaptionTransformer(config, vocab_size=13, feature_width=5).eval()
    >>> batch = CaptionBatch.from_sequences(torch.randn(2, 6, 5), (2, 3), [[8], [9, 10, 11]])
    >>> model.loss(batch).count, model.compute_attention_maps(batch)[0].weights.shape
    (6, torch.Size([2, 2, 4, 6]))
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, feature_width: int) -> None:
        super().__init__()
        if config.tie_embeddings == "all":
            raise ValueError(
                "tie_embeddings='all' needs words on both sides, and images have none: use tie_embeddings='target'"
            )
        self.config = config
        self.transformer = Transformer(config, 1, vocab_size)
        feature_projection = nn.Linear(feature_width, config.width)
        # The same scale as embeddings, because the Transformer multiplies both by √D.
        nn.init.normal_(feature_projection.weight, std=(feature_width * config.width) ** -0.5)
        nn.init.zeros_(feature_projection.bias)
        self.transformer.source_embedding = cast(Any, feature_projection)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`Transformer.compile`."""
        self.transformer.compile(*args, **kwargs)

    def loss(self, batch: CaptionBatch) -> Loss:
        """Cross-entropy summed over the labels, smoothed in training. "nll" is the one without smoothing."""
        return self.transformer.loss(self._cast_batch(batch).seq2seq_batch)

    def start(self, source: Tensor | Tokens) -> TransformerState:
        """Return the initial state for features ``(B, P, F)``, or for these as tokens."""
        features = source.ids if isinstance(source, Tokens) else source
        return self.transformer.start(features_as_tokens(self._cast_features(features)))

    def step(self, state: TransformerState, ids: Tensor) -> tuple[Tensor, TransformerState]:
        """Return the logits ``(N, V)`` of the next words after ``ids`` ``(N,)``, which are BOS at first."""
        return self.transformer.step(state, ids)

    def compute_attention_maps(self, batch: CaptionBatch) -> list[LayerAttention]:
        """Cross-attention weights ``(B, H, T, P)`` of each decoder layer."""
        maps = self.transformer.compute_attention_maps(self._cast_batch(batch).seq2seq_batch)
        return [LayerAttention(f"transformer.{layer.name}", layer.weights) for layer in maps]

    def _cast_batch(self, batch: CaptionBatch) -> CaptionBatch:
        return replace(batch, features=self._cast_features(batch.features))

    def _cast_features(self, image_features: Tensor) -> Tensor:
        """Convert features to the dtype of the weights. They may be stored in a smaller one."""
        width = cast(nn.Linear, self.transformer.source_embedding).in_features
        if image_features.dim() != 3 or image_features.shape[-1] != width or 0 in image_features.shape:
            raise ValueError(
                f"features have shape {tuple(image_features.shape)}; expected (images, positions, {width}), "
                "at least one of each"
            )

        return image_features.to(self.transformer.target_embedding.weight.dtype)
