"""Batches of captions with their images.

An example is one caption with its image, so an image with five captions comes five times per epoch. The
captions are held in memory, at 8 bytes per token; the images are not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from jumok.batches.images import CaptionBatch
from jumok.batches.tokens import BOS, EOS, IGNORE
from jumok.data.batching.length_batching import (
    EPOCH_STRIDE,
    ConcatenatedSequences,
    EpochLengths,
    IndexArray,
    IntArray,
    LengthArray,
    LengthBatcher,
    SequenceLayout,
    fingerprint_arrays,
)
from jumok.data.counter_rng import CounterRng
from jumok.data.image_inputs import ImageInputs
from jumok.errors import InputError


class CaptionBatcher(LengthBatcher[CaptionBatch]):
    """Captions with their images, in batches of up to ``max_tokens`` words.

    The captions of a batch have similar lengths, so that there is little padding. With ``mix_lengths`` they
    have any length. Use it to train an image encoder with batch normalization: the other images of a batch
    must not reveal the length of a caption. With ``fixed_shapes``, batches are filled up with empty captions.

    The index of an example is epoch · EPOCH_STRIDE + its number if images are augmented, otherwise its
    number.

    >>> batcher = CaptionBatcher(inputs, [[[7, 8], [9]], [[7]]], max_tokens=64, seed=1)  # doctest: +SKIP
    >>> batcher.collate([0, 2]).labels  # doctest: +SKIP
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
        """``captions``: the captions of each image. ``image_names``: part of the fingerprint."""
        self.image_inputs, self.image_names = image_inputs, tuple(image_names)
        self.image_indices: IntArray = np.repeat(np.arange(len(captions)), list(map(len, captions)))
        if not len(self.image_indices):
            raise InputError("there are no captions to train on")
        flat = [caption for image_captions in captions for caption in image_captions]
        self.captions = ConcatenatedSequences(flat, np.int64, np.int64)
        self.lengths: LengthArray = (self.captions.lengths + 1).astype(np.int32)  # with BOS or EOS
        super().__init__(SequenceLayout(max_tokens, fixed_shapes=fixed_shapes), self.lengths, seed=seed)
        self.mean_length = math.ceil(self.lengths.mean()) if mix_lengths else None

    @property
    def fingerprint(self) -> str:
        """Identifies the captions and the names of the images."""
        names = hashlib.sha256("\n".join(self.image_names).encode()).digest()
        return fingerprint_arrays(
            self.captions.ids, self.captions.lengths, self.image_indices, np.frombuffer(names, np.uint8)
        )

    def epoch_lengths(self, epoch: int) -> EpochLengths:
        lengths = self.layout.round_up(self.lengths)
        if self.mean_length is not None:  # equal lengths leave the order random
            lengths = np.full_like(self.lengths, self.mean_length)
        offset = epoch * EPOCH_STRIDE if self.image_inputs.varies_by_epoch else 0
        return EpochLengths(lengths, lengths, np.arange(len(self), dtype=np.int64) + offset)

    def example_lengths(self, index: IndexArray) -> tuple[LengthArray, LengthArray]:
        return super().example_lengths(index % EPOCH_STRIDE)

    def collate(self, index: Sequence[int] | IndexArray) -> CaptionBatch:
        epoch_indices = np.asarray(index, np.int64)
        rng = CounterRng(self.seed, int(epoch_indices[0]) // EPOCH_STRIDE)
        indices = epoch_indices % EPOCH_STRIDE
        ids, num_words = self.captions.take(indices)
        lengths, ends = num_words + 1, np.cumsum(num_words)
        width = self.layout.width(lengths)
        num_rows = self.layout.num_rows(len(indices), self.mean_length or width)
        target = self.layout.arrange(np.insert(ids, ends - num_words, BOS), lengths, (num_rows, width), filler_id=BOS)
        row_indices = np.resize(indices, num_rows)  # fillers need an image, too
        batch = CaptionBatch(
            features=self.image_inputs(self.image_indices[row_indices], row_indices, rng),
            grid=self.image_inputs.grid,
            target=target,
            labels=self.layout.arrange_like(target, np.insert(ids, ends, EOS), lengths, IGNORE),
            count=int(lengths.sum()),
            example_indices=tuple(epoch_indices.tolist()),
            feature_table=self.image_inputs.feature_table,
        )
        return batch.with_static_shapes() if self.layout.fixed_shapes else batch
