"""Pictures with captions in token ids, as batches: what captioning learns from.

An example is a picture with one of its captions; a picture with five of them comes five times an epoch, each
time among others. All captions are held in memory, 8 bytes a token; pictures are not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jumok.batch import BOS, EOS, IGNORE, PAD
from jumok.data.batches import Batches, Lengths, Numbers, batches, divide, fingerprint, in_rows, stepped
from jumok.data.masking import EPOCH, Chance
from jumok.data.views import Given
from jumok.errors import InputError
from jumok.pictures import Captions

__all__ = ["Described"]

Ints = NDArray[np.int64]


class Described:
    """Captions, with the pictures that they are of, as batches of up to ``tokens`` words.

    A batch has captions of like length, and so little padding; or, if they are ``mixed``, of any: where an
    encoder with batch norms learns, the other pictures of a batch must not tell how long a caption will be.
    To be ``alike``, batches are filled up with captions without words.

    The number of an example in a batch is epoch · EPOCH + its number in the data where pictures look other at
    every epoch, and else just the latter.

    >>> data = Described(given, [[[7, 8], [9]], [[7]]], tokens=64, seed=1)  # doctest: +SKIP
    >>> data.collate([0, 2]).labels  # doctest: +SKIP
    tensor([[   7,    8,    3],
            [   7,    3, -100]])
    """

    unit = "words"

    def __init__(
        self,
        given: Given,
        captions: Sequence[Sequence[Sequence[int]]],
        *,
        tokens: int,
        seed: int,
        mixed: bool = False,
        alike: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        """``captions`` has those of each picture; ``names`` of pictures tell data from other data."""
        self.given, self.tokens, self.seed, self.alike = given, tokens, seed, alike
        self.picture: Ints = np.repeat(np.arange(len(captions)), [len(some) for some in captions])
        if not len(self.picture):
            raise InputError("there is nothing to learn from: no caption is left")
        flat = [caption for some in captions for caption in some]
        self.sizes: Ints = np.array([len(caption) for caption in flat], np.int64)
        self.begins = np.cumsum(self.sizes) - self.sizes
        self.ids = np.concatenate([np.asarray(caption, np.int64) for caption in flat])
        self.lengths: Lengths = (self.sizes + 1).astype(np.int32)  # with <s>, or </s>
        self.usual = math.ceil(self.lengths.mean()) if mixed else None
        self.names = tuple(names)
        self._latest: tuple[int, _Epoch] | None = None  # asked for again, the same need not be made again

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def fingerprint(self) -> str:
        """Another one for other captions, or other pictures."""
        told = hashlib.sha256("\n".join(self.names).encode()).digest()
        return fingerprint(self.ids, self.sizes, self.picture, np.frombuffer(told, np.uint8))

    def batches(self, epoch: int) -> _Epoch:
        """The batches of an epoch, in order."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            lengths = stepped(self.lengths) if self.alike else self.lengths
            if self.usual is not None:  # all count the same, and stay in the order of chance
                lengths = np.full_like(self.lengths, self.usual)
            made = batches(lengths, lengths, tokens=self.tokens, seed=self.seed, epoch=epoch)
            latest = self._latest = (epoch, _Epoch(made, epoch * EPOCH if self.given.anew else 0))
        return latest[1]

    def divide(self, index: Numbers, parts: int) -> list[Numbers]:
        """A batch in parts of like work."""
        lengths = self.lengths[index % EPOCH]
        return [index[part] for part in divide(np.arange(len(index)), lengths, lengths, parts)]

    def collate(self, index: Sequence[int] | Numbers) -> Captions:
        """The examples of these numbers as a model takes them."""
        told_of: Ints = np.asarray(index, np.int64)
        chance = Chance(self.seed, int(told_of[0]) // EPOCH)
        numbers = told_of % EPOCH
        sizes = self.sizes[numbers]
        before = np.cumsum(sizes) - sizes
        ids = self.ids[np.arange(sizes.sum()) + np.repeat(self.begins[numbers] - before, sizes)]
        rows, width = len(numbers), int(sizes.max()) + 1
        if self.alike:
            width = int(stepped(np.array(width)))
            rows = max(rows, self.tokens // (self.usual or width))
        told = in_rows(np.insert(ids, before, BOS), sizes + 1, (rows, width), PAD, BOS)
        ended = np.insert(ids, np.cumsum(sizes), EOS), sizes + 1
        labels = in_rows(*ended, (rows, width), IGNORE, IGNORE).ids
        filled = np.resize(numbers, rows)  # what fills up needs some picture
        places = self.given(self.picture[filled], filled, chance)
        batch = Captions(
            places=places,
            grid=self.given.grid,
            told=told,
            labels=labels,
            count=int(sizes.sum()) + len(sizes),
            index=tuple(told_of.tolist()),
            known=self.given.known,
        )
        return batch.alike() if self.alike else batch


class _Epoch(Sequence[Numbers]):
    """The batches of one epoch, in the numbers that say it."""

    def __init__(self, made: Batches, first: int) -> None:
        self.made, self.first = made, first

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, number: int) -> Numbers:  # type: ignore[override]  # no slices
        return self.made[number].astype(np.int64) + self.first
