"""Batches of text pairs with one label each. The two texts of a pair are encoded separately.

All examples are held in memory, at 4 bytes per token: labelled data is small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from jumok.batches.text import TextPairBatch, label_mask
from jumok.batches.tokens import UNK
from jumok.data.batching.length_batching import (
    ConcatenatedSequences,
    IndexArray,
    LengthBatcher,
    SequenceLayout,
    convert_labels,
    fingerprint_arrays,
    pad_labels,
)
from jumok.errors import InputError


class TextPairBatcher(LengthBatcher[TextPairBatch]):
    """Text pairs with a label each, a class index or a number.

    ``max_tokens`` limits the tokens of either side, padding included, unless a single text is longer. An
    empty text becomes one unknown token. See :class:`~jumok.data.batching.length_batching.SequenceLayout` for
    ``fixed_shapes``.

    >>> batcher = TextPairBatcher([[7, 8], [5]], [[4], [6, 9]], labels=[1, 0], max_tokens=100, seed=1)
    >>> batch = batcher.collate([1, 0])
    >>> batch.tokens.ids.tolist(), batch.second_tokens.ids.tolist(), batch.labels.tolist()
    ([[5, 0], [7, 8]], [[6, 9], [4, 0]], [0, 1])
    """

    unit = TextPairBatch.unit

    def __init__(
        self,
        first_texts: Sequence[Sequence[int]],
        second_texts: Sequence[Sequence[int]],
        labels: Sequence[int] | Sequence[float],
        *,
        max_tokens: int,
        seed: int,
        fixed_shapes: bool = False,
    ) -> None:
        if not first_texts:
            raise InputError("there are no pairs to train on")
        if not len(first_texts) == len(second_texts) == len(labels):
            raise InputError(
                f"there are {len(first_texts)} first texts, {len(second_texts)} second texts and "
                f"{len(labels)} labels; expected the same number of each"
            )
        self.sides = tuple(
            ConcatenatedSequences([text if len(text) else (UNK,) for text in texts], np.int32)
            for texts in (first_texts, second_texts)
        )
        layout = SequenceLayout(max_tokens, fixed_shapes=fixed_shapes)
        super().__init__(layout, *(side.lengths for side in self.sides), seed=seed)
        self.labels = convert_labels(labels)

    @property
    def fingerprint(self) -> str:
        """Identifies the texts and the labels."""
        return fingerprint_arrays(self.labels, *(x for side in self.sides for x in (side.lengths, side.ids)))

    def collate(self, index: Sequence[int] | IndexArray) -> TextPairBatch:
        indices = np.asarray(index, np.int64)
        sides = [side.take(indices) for side in self.sides]
        widths = [self.layout.width(lengths) for _, lengths in sides]
        num_rows = self.layout.num_rows(len(indices), max(widths))
        first, second = (
            self.layout.arrange(ids, lengths, (num_rows, width))
            for (ids, lengths), width in zip(sides, widths, strict=True)
        )
        labels = pad_labels(self.labels[indices], num_rows)
        return TextPairBatch(
            tokens=first,
            second_tokens=second,
            segments=torch.zeros_like(first.ids),
            labels=labels,
            count=int(label_mask(labels).sum()),
            example_indices=tuple(indices.tolist()),
        )
