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

from jumok.batches.images import CaptionBatch
from jumok.batches.tokens import BOS, EOS, IGNORE, PAD
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
from jumok.data.batching.pretraining import EPOCH_STRIDE, CounterRng
from jumok.data.image_inputs import ImageInputs
from jumok.errors import InputError

__all__ = ["CaptionBatcher"]

IntArray = NDArray[np.int64]


class CaptionBatcher:
    """Captions, with the pictures that they are of, as batches of up to ``max_tokens`` words.

    A batch has captions of like length, and so little padding; or, if they are ``mix_lengths``, of any: where an
    encoder with batch norms learns, the other pictures of a batch must not tell how long a caption will be.
    To be ``fixed_shapes``, batches are filled up with captions without words.

    The number of an example in a batch is epoch · EPOCH + its number in the data where pictures look other at
    every epoch, and else just the latter.

    >>> data = CaptionBatcher(given, [[[7, 8], [9]], [[7]]], max_tokens=64, seed=1)  # doctest: +SKIP
    >>> data.collate([0, 2]).labels  # doctest: +SKIP
    tensor([[   7,    8,    3],
            [   7,    3, -100]])
    """

    unit = "words"

    def __init__(
        self,
        image_inputs: ImageInputs,
        captions: Sequence[Sequence[Sequence[int]]],
        *,
        max_tokens: int,
        seed: int,
        mix_lengths: bool = False,
        fixed_shapes: bool = False,
        image_names: Sequence[str] = (),
    ) -> None:
        """``captions`` has those of each picture; ``image_names`` of pictures tell data from other data."""
        self.image_inputs, self.max_tokens, self.seed, self.fixed_shapes = (
            image_inputs,
            max_tokens,
            seed,
            fixed_shapes,
        )
        self.image_indices: IntArray = np.repeat(np.arange(len(captions)), [len(some) for some in captions])
        if not len(self.image_indices):
            raise InputError("there is nothing to learn from: no caption is left")
        flat = [caption for some in captions for caption in some]
        self.caption_lengths: IntArray = np.array([len(caption) for caption in flat], np.int64)
        self.offsets = np.cumsum(self.caption_lengths) - self.caption_lengths
        self.ids = np.concatenate([np.asarray(caption, np.int64) for caption in flat])
        self.lengths: LengthArray = (self.caption_lengths + 1).astype(np.int32)  # with <s>, or </s>
        self.mean_length = math.ceil(self.lengths.mean()) if mix_lengths else None
        self.image_names = tuple(image_names)
        self._latest_epoch: tuple[int, _CaptionEpochBatches] | None = (
            None  # asked for again, the same need not be made again
        )

    def __len__(self) -> int:
        return len(self.caption_lengths)

    @property
    def fingerprint(self) -> str:
        """Another one for other captions, or other pictures."""
        told = hashlib.sha256("\n".join(self.image_names).encode()).digest()
        return fingerprint_arrays(
            self.ids, self.caption_lengths, self.image_indices, np.frombuffer(told, np.uint8)
        )

    def batches(self, epoch: int) -> _CaptionEpochBatches:
        """The batches of an epoch, in order."""
        latest = self._latest_epoch
        if latest is None or latest[0] != epoch:
            lengths = round_up_lengths(self.lengths) if self.fixed_shapes else self.lengths
            if self.mean_length is not None:  # all count the same, and stay in the order of chance
                lengths = np.full_like(self.lengths, self.mean_length)
            made = plan_batches(lengths, lengths, max_tokens=self.max_tokens, seed=self.seed, epoch=epoch)
            latest = self._latest_epoch = (
                epoch,
                _CaptionEpochBatches(made, epoch * EPOCH_STRIDE if self.image_inputs.varies_by_epoch else 0),
            )
        return latest[1]

    def divide(self, index: IndexArray, num_parts: int) -> list[IndexArray]:
        """A batch in parts of like work."""
        lengths = self.lengths[index % EPOCH_STRIDE]
        return [index[part] for part in divide_batch(np.arange(len(index)), lengths, lengths, num_parts)]

    def collate(self, index: Sequence[int] | IndexArray) -> CaptionBatch:
        """The examples of these numbers as a model takes them."""
        told_of: IntArray = np.asarray(index, np.int64)
        chance = CounterRng(self.seed, int(told_of[0]) // EPOCH_STRIDE)
        numbers = told_of % EPOCH_STRIDE
        sizes = self.caption_lengths[numbers]
        before = np.cumsum(sizes) - sizes
        ids = self.ids[np.arange(sizes.sum()) + np.repeat(self.offsets[numbers] - before, sizes)]
        rows, width = len(numbers), int(sizes.max()) + 1
        if self.fixed_shapes:
            width = int(round_up_lengths(np.array(width)))
            rows = max(rows, self.max_tokens // (self.mean_length or width))
        told = pad_sequences(np.insert(ids, before, BOS), sizes + 1, (rows, width), PAD, BOS)
        ended = np.insert(ids, np.cumsum(sizes), EOS), sizes + 1
        labels = pad_sequences(*ended, (rows, width), IGNORE, IGNORE).ids
        filled = np.resize(numbers, rows)  # what fills up needs some picture
        places = self.image_inputs(self.image_indices[filled], filled, chance)
        batch = CaptionBatch(
            features=places,
            grid=self.image_inputs.grid,
            target=told,
            labels=labels,
            count=int(sizes.sum()) + len(sizes),
            example_indices=tuple(told_of.tolist()),
            feature_table=self.image_inputs.feature_table,
        )
        return batch.with_static_shapes() if self.fixed_shapes else batch


class _CaptionEpochBatches(Sequence[IndexArray]):
    """The batches of one epoch, in the numbers that say it."""

    def __init__(self, plan: BatchPlan, offset: int) -> None:
        self.plan, self.offset = plan, offset

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, position: int) -> IndexArray:  # type: ignore[override]  # no slices
        return self.plan[position].astype(np.int64) + self.offset
