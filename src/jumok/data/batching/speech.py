"""Batches of symbol sequences with spectrograms, for text-to-speech.

The symbols are held in memory. The spectrograms may be views of a memory map; they are copied into the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import EOS
from jumok.data.batching.length_batching import (
    ConcatenatedSequences,
    EpochLengths,
    IndexArray,
    LengthArray,
    LengthBatcher,
    SequenceLayout,
    fingerprint_arrays,
)
from jumok.errors import InputError


class SpeechBatcher(LengthBatcher[SpeechBatch]):
    """Utterances in batches of up to ``max_frames`` frames, padding included.

    >>> spectrograms = [np.full((frames, 5), 0.5, np.float16) for frames in (7, 3, 2)]
    >>> batcher = SpeechBatcher([[8, 9, 3], [8, 3], [3]], spectrograms, max_frames=14, seed=1)
    >>> batch = batcher.collate([1, 0])
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
        """Check and concatenate the examples.

        Args:
            symbols: The symbol ids of each utterance.
            spectrograms: One ``(T, num_features)`` per utterance. The first ``n_mels`` columns are mel bands,
                and the others, if any, the linear spectrogram.
            max_frames: Budget of a batch.
            seed: Seed of the order.
            n_mels: Defaults to all columns.
            fixed_shapes: Make the same few shapes recur. Batches are filled up with utterances of a single
                ``</s>`` and a single silent frame, which counts like any other.
            audio_names: Names of the recordings. They are part of the fingerprint.
            style_groups: One name per utterance. The style reference of an utterance is then the next one of
                the same group in the batch, so that a style can only express what the group has in common.
            frame_symbols: One ``(T,)`` per utterance: the index of the symbol spoken in each frame.
        """
        if not len(symbols):
            raise InputError("there are no utterances to train on")
        if len(symbols) != len(spectrograms):
            raise InputError(
                f"there are {len(symbols)} texts and {len(spectrograms)} spectrograms; expected one per text"
            )
        if max_frames < 1:
            raise InputError(f"max_frames={max_frames}: a batch needs a budget of at least one frame")
        num_features = spectrograms[0].shape[-1]
        for number, (text, spectrogram) in enumerate(zip(symbols, spectrograms, strict=True)):
            if not len(text) or not len(spectrogram) or spectrogram.shape[1:] != (num_features,):
                raise InputError(
                    f"utterance {number} has {len(text)} symbols and a spectrogram of shape "
                    f"{spectrogram.shape}; expected one or more symbols and (frames, {num_features}), like "
                    "the first"
                )
        if style_groups is not None and len(style_groups) != len(symbols):
            raise InputError(
                f"there are {len(symbols)} texts and {len(style_groups)} style_groups; expected one per text"
            )
        if frame_symbols is not None and list(map(len, frame_symbols)) != list(map(len, spectrograms)):
            raise InputError("frame_symbols: expected one symbol index for each frame of each utterance")
        if n_mels is not None and not 0 < n_mels <= num_features:
            raise InputError(f"n_mels={n_mels}: expected 1 to {num_features}, the columns of the spectrograms")
        self.lengths: LengthArray = np.array([len(spectrogram) for spectrogram in spectrograms], np.int32)
        super().__init__(SequenceLayout(max_frames, fixed_shapes=fixed_shapes), self.lengths, seed=seed)
        self.frame_symbols = frame_symbols
        self.style_groups = None if style_groups is None else np.unique(list(style_groups), return_inverse=True)[1]
        self.n_mels = num_features if n_mels is None else n_mels
        self.spectrograms, self.num_features, self.audio_names = spectrograms, num_features, tuple(audio_names)
        self.symbols = ConcatenatedSequences(symbols, np.int64, np.int64)

    @property
    def fingerprint(self) -> str:
        """Identifies the texts, the lengths and the names of the recordings."""
        names = hashlib.sha256("\n".join(self.audio_names).encode()).digest()
        shape = np.array([self.num_features, self.n_mels])
        return fingerprint_arrays(
            self.symbols.ids, self.symbols.lengths, self.lengths, shape, np.frombuffer(names, np.uint8)
        )

    def epoch_lengths(self, epoch: int) -> EpochLengths:
        frames = self.layout.round_up(self.lengths)
        symbols = np.minimum(self.symbols.lengths, frames).astype(np.int32)  # only frames have a budget
        return EpochLengths(symbols, frames)

    def collate(self, index: Sequence[int] | IndexArray) -> SpeechBatch:
        indices = np.asarray(index, np.int64)
        ids, symbol_counts = self.symbols.take(indices)
        lengths = self.lengths[indices].astype(np.int64)
        num_frames = self.layout.width(lengths)
        num_rows = self.layout.num_rows(len(indices), num_frames)
        spectrograms = torch.zeros(num_rows, num_frames, self.num_features)
        for row, number in zip(spectrograms.numpy(), indices, strict=False):  # fillers stay silent
            row[: self.lengths[number]] = self.spectrograms[number]
        mel_lengths = (*lengths.tolist(), *[1] * (num_rows - len(indices)))
        has_linear = self.n_mels < self.num_features
        batch = SpeechBatch(
            text=self.layout.arrange(ids, symbol_counts, (num_rows, self.layout.width(symbol_counts)), filler_id=EOS),
            mels=spectrograms[:, :, : self.n_mels].contiguous(),
            mel_lengths=mel_lengths,
            count=sum(mel_lengths),
            linear_spectrograms=spectrograms[:, :, self.n_mels :].contiguous() if has_linear else None,
            example_indices=tuple(indices.tolist()),
            style_reference=None
            if self.style_groups is None
            else _next_with_same_style(self.style_groups[indices], num_rows),
            alignment=None
            if self.frame_symbols is None
            else self._collate_frame_symbols(indices, (num_rows, num_frames)),
        )
        return batch.with_static_shapes() if self.layout.fixed_shapes else batch

    def _collate_frame_symbols(self, indices: IndexArray, shape: tuple[int, int]) -> torch.Tensor:
        assert self.frame_symbols is not None
        padded = torch.full(shape, -1)
        for row, number in zip(padded.numpy(), indices, strict=False):
            row[: self.lengths[number]] = self.frame_symbols[number]
        return padded


def _next_with_same_style(style_groups: NDArray[np.int64], num_rows: int) -> torch.Tensor:
    """The next row of the same group; the first one after the last.

    The only row of a group refers to itself, and so does each filler.

    >>> _next_with_same_style(np.array([4, 2, 4, 4, 1]), 6)
    tensor([2, 1, 3, 0, 4, 5])
    """
    references = torch.arange(num_rows)
    order = np.argsort(style_groups, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(style_groups[order])) + 1):
        references[group] = torch.from_numpy(np.roll(group, -1))
    return references
