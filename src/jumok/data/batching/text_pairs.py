"""Pairs of texts in token ids, each read by itself, with one label, as batches.

All of it is held in memory, 4 bytes a token: data that people have labelled is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from jumok.batches.text import TextPairBatch, label_mask
from jumok.batches.tokens import IGNORE, PAD, UNK, Tokens
from jumok.data.batching.length_batching import (
    BatchPlan,
    IndexArray,
    LengthArray,
    divide_batch,
    fingerprint_arrays,
    pad_sequences,
    plan_batches,
    round_up_lengths,
)
from jumok.errors import InputError

__all__ = ["TextPairBatcher"]


class TextPairBatcher:
    """Two texts and a label each, the number of a class or any number: what the training loop asks for.

    ``max_tokens`` is how many places a batch has at most on either side, padding included, unless a single text
    is longer. A text without a token gets an unknown one. Batches may be *alike*, as in
    :class:`~jumok.data.plan_batches.PairData`.

    >>> data = TextPairBatcher([[7, 8], [5]], [[4], [6, 9]], labels=[1, 0], max_tokens=100, seed=1)
    >>> batch = data.collate([1, 0])
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
            raise InputError("there is nothing to learn from: no pair is left")
        if not len(first_texts) == len(second_texts) == len(labels):
            raise InputError(
                f"{len(first_texts)} first texts, {len(second_texts)} second ones and {len(labels)} labels came; "
                "they must be as many"
            )
        self.max_tokens, self.seed, self.fixed_shapes = max_tokens, seed, fixed_shapes
        self.sides = _TextPairSide(first_texts), _TextPairSide(second_texts)
        given = np.asarray(labels)
        self.labels = given.astype(np.float32 if given.dtype.kind == "f" else np.int64)
        self._latest_epoch: tuple[int, BatchPlan] | None = (
            None  # asked for again, the same need not be made again
        )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """Another one for other texts, or for other labels."""
        return fingerprint_arrays(self.labels, *(x for side in self.sides for x in (side.lengths, side.ids)))

    def batches(self, epoch: int) -> BatchPlan:
        """The batches of an epoch, in order."""
        latest = self._latest_epoch
        if latest is None or latest[0] != epoch:
            first, second = (
                round_up_lengths(side.lengths) if self.fixed_shapes else side.lengths for side in self.sides
            )
            made = plan_batches(first, second, max_tokens=self.max_tokens, seed=self.seed, epoch=epoch)
            latest = self._latest_epoch = (epoch, made)
        return latest[1]

    def divide(self, index: IndexArray, num_parts: int) -> list[IndexArray]:
        """A batch in parts of like work."""
        return divide_batch(index, self.sides[0].lengths, self.sides[1].lengths, num_parts)

    def collate(self, index: Sequence[int] | IndexArray) -> TextPairBatch:
        """The pairs of these numbers as a model takes them."""
        numbers = np.asarray(index, np.int64)
        widths = [int(side.lengths[numbers].max()) for side in self.sides]
        rows = len(numbers)
        if self.fixed_shapes:
            widths = [int(round_up_lengths(np.array(width))) for width in widths]
            rows = max(rows, self.max_tokens // max(widths))
        first, second = (
            side.pad_batch(numbers, (rows, width)) for side, width in zip(self.sides, widths, strict=True)
        )
        labels = np.full(rows, np.nan if self.labels.dtype == np.float32 else IGNORE, self.labels.dtype)
        labels[: len(numbers)] = self.labels[numbers]
        counted = torch.from_numpy(labels)
        made = TextPairBatch(
            tokens=first,
            second_tokens=second,
            segments=torch.zeros_like(first.ids),
            labels=counted,
            count=int(label_mask(counted).sum()),
            example_indices=tuple(numbers.tolist()),
        )
        return made.with_static_shapes() if self.fixed_shapes else made


class _TextPairSide:
    """One text of every pair."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        every = [text if len(text) else (UNK,) for text in texts]
        self.lengths: LengthArray = np.fromiter(map(len, every), np.int32)
        self.ids = np.fromiter(chain.from_iterable(every), np.int32)
        self.offsets = np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def pad_batch(self, indices: IndexArray, shape: tuple[int, int]) -> Tokens:
        lengths = self.lengths[indices].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(self.offsets[indices] - before, lengths)
        return pad_sequences(self.ids[places].astype(np.int64), lengths, shape, PAD, PAD)
