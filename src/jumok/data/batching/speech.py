"""Texts in symbols with the spectra of their sound, as batches: what a voice learns from.

The symbols are held in memory; the spectra are views, of a memory map say, and are copied when a batch needs
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import EOS, PAD
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

__all__ = ["SpeechBatcher"]


class SpeechBatcher:
    """Utterances as batches of up to ``max_frames`` frames, padding among them: what the training loop asks for.

    ``spectrograms`` has ``(T, num_features)`` of each, of which the first ``n_mels`` columns are mel bands, and the others,
    if there are any, the linear spectrum. To be ``fixed_shapes``, batches have one of a few lengths, and are filled
    up with utterances of no symbol but ``</s>`` and a single silent frame, which counts like any other.

    ``style_groups`` tell which utterances are spoken alike. Then each has its style from the next one in its batch
    that is spoken as it is, and a style can only be what they share.

    ``frame_symbols`` has ``(T,)`` of each: the number of the symbol that each frame is of.

    >>> spectra = [np.full((frames, 5), 0.5, np.float16) for frames in (7, 3, 2)]
    >>> data = SpeechBatcher([[8, 9, 3], [8, 3], [3]], spectra, max_frames=14, seed=1)
    >>> batch = data.collate([1, 0])
    >>> batch.text.ids, batch.mels.shape, batch.mel_lengths, batch.count
    (tensor([[8, 3, 0],
            [8, 9, 3]]), torch.Size([2, 7, 5]), (3, 7), 10)
    """

    unit = "frames"

    def __init__(
        self,
        symbols: Sequence[Sequence[int]],
        spectrograms: Sequence[NDArray[Any]],
        *,
        max_frames: int,
        seed: int,
        n_mels: int | None = None,
        fixed_shapes: bool = False,
        audio_names: Sequence[str] = (),
        style_groups: Sequence[str] | None = None,
        frame_symbols: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        """``audio_names`` of recordings tell data from other data of the same texts and lengths."""
        if not len(symbols):
            raise InputError("there is nothing to learn from: no utterance is left")
        if len(symbols) != len(spectrograms):
            raise InputError(f"{len(symbols)} texts came with {len(spectrograms)} spectra; each text has one")
        if max_frames < 1:
            raise InputError(f"frames={max_frames}: a batch needs a budget of at least one frame")
        width = spectrograms[0].shape[-1]
        for number, (text, one) in enumerate(zip(symbols, spectrograms, strict=True)):
            if not len(text) or not len(one) or one.shape[1:] != (width,):
                raise InputError(
                    f"utterance {number} has {len(text)} symbols and spectra of shape {one.shape}; expected "
                    f"one or more, and (frames, {width}), as the first has"
                )
        if style_groups is not None and len(style_groups) != len(symbols):
            raise InputError(f"{len(symbols)} texts came with {len(style_groups)} manners; each text has one")
        if frame_symbols is not None and [len(one) for one in frame_symbols] != [
            len(one) for one in spectrograms
        ]:
            raise InputError("places are expected for each frame of each utterance")
        self.frame_symbols = frame_symbols
        self.style_groups = (
            None if style_groups is None else np.unique(list(style_groups), return_inverse=True)[1]
        )
        self.n_mels = width if n_mels is None else n_mels
        if not 0 < self.n_mels <= width:
            raise InputError(f"mels={n_mels} of spectra with {width} columns")
        self.spectrograms, self.max_frames, self.seed, self.fixed_shapes = (
            spectrograms,
            max_frames,
            seed,
            fixed_shapes,
        )
        self.num_features, self.audio_names = width, tuple(audio_names)
        self.symbol_counts = np.array([len(one) for one in symbols], np.int64)
        self.offsets = np.cumsum(self.symbol_counts) - self.symbol_counts
        self.ids = np.concatenate([np.asarray(one, np.int64) for one in symbols])
        self.lengths: LengthArray = np.array([len(one) for one in spectrograms], np.int32)
        self._latest_epoch: tuple[int, BatchPlan] | None = (
            None  # asked for again, the same need not be made again
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Another one for other texts, other lengths or other recordings."""
        told = hashlib.sha256("\n".join(self.audio_names).encode()).digest()
        shape = np.array([self.num_features, self.n_mels])
        return fingerprint_arrays(
            self.ids, self.symbol_counts, self.lengths, shape, np.frombuffer(told, np.uint8)
        )

    def batches(self, epoch: int) -> BatchPlan:
        """The batches of an epoch, in order: each of utterances of like length."""
        latest = self._latest_epoch
        if latest is None or latest[0] != epoch:
            frames = round_up_lengths(self.lengths) if self.fixed_shapes else self.lengths
            text = np.minimum(self.symbol_counts, frames).astype(np.int32)  # the budget is one of frames
            made = plan_batches(text, frames, max_tokens=self.max_frames, seed=self.seed, epoch=epoch)
            latest = self._latest_epoch = (epoch, made)
        return latest[1]

    def divide(self, index: IndexArray, num_parts: int) -> list[IndexArray]:
        """A batch in parts of like work."""
        return divide_batch(index, self.lengths, self.lengths, num_parts)

    def collate(self, index: Sequence[int] | IndexArray) -> SpeechBatch:
        """The utterances of these numbers as a model takes them."""
        numbers = np.asarray(index, np.int64)
        sizes, lengths = self.symbol_counts[numbers], self.lengths[numbers].astype(np.int64)
        before = np.cumsum(sizes) - sizes
        ids = self.ids[np.arange(sizes.sum()) + np.repeat(self.offsets[numbers] - before, sizes)]
        rows, columns, longest = len(numbers), int(sizes.max()), int(lengths.max())
        if self.fixed_shapes:
            columns, longest = (
                int(round_up_lengths(np.array(columns))),
                int(round_up_lengths(np.array(longest))),
            )
            rows = max(rows, self.max_frames // longest)
        spectra = torch.zeros(rows, longest, self.num_features)
        for row, number in zip(spectra.numpy(), numbers, strict=False):  # the others stay silent
            row[: self.lengths[number]] = self.spectrograms[number]
        frames = (*lengths.tolist(), *[1] * (rows - len(numbers)))
        batch = SpeechBatch(
            text=pad_sequences(ids, sizes, (rows, columns), PAD, EOS),
            mels=spectra[:, :, : self.n_mels].contiguous(),
            mel_lengths=frames,
            count=sum(frames),
            linear_spectrograms=spectra[:, :, self.n_mels :].contiguous()
            if self.n_mels < self.num_features
            else None,
            example_indices=tuple(numbers.tolist()),
            style_reference=None
            if self.style_groups is None
            else _next_with_same_style(self.style_groups[numbers], rows),
            alignment=None
            if self.frame_symbols is None
            else self._collate_frame_symbols(numbers, (rows, longest)),
        )
        return batch.with_static_shapes() if self.fixed_shapes else batch

    def _collate_frame_symbols(self, indices: IndexArray, shape: tuple[int, int]) -> torch.Tensor:
        assert self.frame_symbols is not None
        places = torch.full(shape, -1)
        for row, number in zip(places.numpy(), indices, strict=False):
            row[: self.lengths[number]] = self.frame_symbols[number]
        return places


def _next_with_same_style(style_groups: NDArray[np.int64], num_rows: int) -> torch.Tensor:
    """For each row the next that is spoken alike, after the last the first; of one alone, and of any row more
    than there are utterances, itself.

    >>> _next_with_same_style(np.array([4, 2, 4, 4, 1]), 6)
    tensor([2, 1, 3, 0, 4, 5])
    """
    found = torch.arange(num_rows)
    order = np.argsort(style_groups, kind="stable")
    for alike in np.split(order, np.flatnonzero(np.diff(style_groups[order])) + 1):
        found[alike] = torch.from_numpy(np.roll(alike, -1))
    return found
