"""Pairs of texts in token ids, each read by itself, with one label, as batches.

All of it is held in memory, 4 bytes a token: data that people have labelled is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from jumok.annotated import LabelledPairs, counts
from jumok.batch import IGNORE, PAD, UNK, Tokens
from jumok.data.batches import Batches, Lengths, Numbers, batches, divide, fingerprint, in_rows, stepped
from jumok.errors import InputError

__all__ = ["Paired"]


class Paired:
    """Two texts and a label each, the number of a class or any number: what the training loop asks for.

    ``tokens`` is how many places a batch has at most on either side, padding included, unless a single text
    is longer. A text without a token gets an unknown one. Batches may be *alike*, as in
    :class:`~jumok.data.batches.PairData`.

    >>> data = Paired([[7, 8], [5]], [[4], [6, 9]], labels=[1, 0], tokens=100, seed=1)
    >>> batch = data.collate([1, 0])
    >>> batch.tokens.ids.tolist(), batch.seconds.ids.tolist(), batch.labels.tolist()
    ([[5, 0], [7, 8]], [[6, 9], [4, 0]], [0, 1])
    """

    unit = LabelledPairs.unit

    def __init__(
        self,
        firsts: Sequence[Sequence[int]],
        seconds: Sequence[Sequence[int]],
        labels: Sequence[int] | Sequence[float],
        *,
        tokens: int,
        seed: int,
        alike: bool = False,
    ) -> None:
        if not firsts:
            raise InputError("there is nothing to learn from: no pair is left")
        if not len(firsts) == len(seconds) == len(labels):
            raise InputError(
                f"{len(firsts)} first texts, {len(seconds)} second ones and {len(labels)} labels came; "
                "they must be as many"
            )
        self.tokens, self.seed, self.alike = tokens, seed, alike
        self.sides = _Side(firsts), _Side(seconds)
        given = np.asarray(labels)
        self.labels = given.astype(np.float32 if given.dtype.kind == "f" else np.int64)
        self._latest: tuple[int, Batches] | None = None  # asked for again, the same need not be made again

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """Another one for other texts, or for other labels."""
        return fingerprint(self.labels, *(x for side in self.sides for x in (side.lengths, side.ids)))

    def batches(self, epoch: int) -> Batches:
        """The batches of an epoch, in order."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            first, second = (stepped(side.lengths) if self.alike else side.lengths for side in self.sides)
            made = batches(first, second, tokens=self.tokens, seed=self.seed, epoch=epoch)
            latest = self._latest = (epoch, made)
        return latest[1]

    def divide(self, index: Numbers, parts: int) -> list[Numbers]:
        """A batch in parts of like work."""
        return divide(index, self.sides[0].lengths, self.sides[1].lengths, parts)

    def collate(self, index: Sequence[int] | Numbers) -> LabelledPairs:
        """The pairs of these numbers as a model takes them."""
        numbers = np.asarray(index, np.int64)
        widths = [int(side.lengths[numbers].max()) for side in self.sides]
        rows = len(numbers)
        if self.alike:
            widths = [int(stepped(np.array(width))) for width in widths]
            rows = max(rows, self.tokens // max(widths))
        first, second = (
            side.taken(numbers, (rows, width)) for side, width in zip(self.sides, widths, strict=True)
        )
        labels = np.full(rows, np.nan if self.labels.dtype == np.float32 else IGNORE, self.labels.dtype)
        labels[: len(numbers)] = self.labels[numbers]
        counted = torch.from_numpy(labels)
        made = LabelledPairs(
            tokens=first,
            seconds=second,
            segments=torch.zeros_like(first.ids),
            labels=counted,
            count=int(counts(counted).sum()),
            index=tuple(numbers.tolist()),
        )
        return made.alike() if self.alike else made


class _Side:
    """One text of every pair."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        every = [text if len(text) else (UNK,) for text in texts]
        self.lengths: Lengths = np.fromiter(map(len, every), np.int32)
        self.ids = np.fromiter(chain.from_iterable(every), np.int32)
        self.begins = np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def taken(self, numbers: Numbers, shape: tuple[int, int]) -> Tokens:
        lengths = self.lengths[numbers].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(self.begins[numbers] - before, lengths)
        return in_rows(self.ids[places].astype(np.int64), lengths, shape, PAD, PAD)
