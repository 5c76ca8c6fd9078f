"""Batches of texts with recordings: the input of text-to-speech models.

A recording is a sequence of frames. A frame holds the energy at M mel frequencies (log-mel), or at F linear
frequencies (log-magnitude), in a short interval::

    text      d  o  g  </s>                  (B, L)
    mels      ▂ ▃ ▅ ▇ ▇ ▆ ▅ ▅ ▃ ▂ ▁          (B, T, M)

Shapes: ``B`` utterances, ``L`` symbols of the longest text, ``T`` frames of the longest recording.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from jumok.batches.tokens import TensorGroup, Tokens


@dataclass(frozen=True, eq=False)
class SpeechBatch(TensorGroup):
    """The symbols and the frames of utterances, padded on the right. Padding does not count."""

    text: Tokens
    mels: Tensor  # (B, T, M)
    mel_lengths: tuple[int, ...]  # valid frames of each utterance, on the host
    count: int  # number of valid frames
    device_mel_lengths: Tensor | None = None  # (B,): the lengths on the device, for static shapes (see Tokens)
    linear_spectrograms: Tensor | None = None  # (B, T, F); None if waveforms are generated from mels
    example_indices: tuple[int, ...] = ()  # indices of the examples in their data set
    style_reference: Tensor | None = None  # (B,): row whose recording gives the style; None: the same row
    alignment: Tensor | None = None  # (B, T): index of the symbol spoken in each frame, -1 at padding

    def __post_init__(self) -> None:
        if self.mels.dim() != 3 or not len(self.mels) == len(self.mel_lengths) == len(self.text.lengths):
            raise ValueError(
                f"mels have shape {tuple(self.mels.shape)}, and there are {len(self.mel_lengths)} "
                f"mel_lengths and {len(self.text.lengths)} texts; expected mels (utterances, frames, mels), "
                "with one length and one text per utterance"
            )
        if not all(1 <= length <= self.mels.shape[1] for length in self.mel_lengths):
            raise ValueError(
                f"mel_lengths={list(self.mel_lengths)}, but mels have shape {tuple(self.mels.shape)}; "
                f"expected lengths from 1 to {self.mels.shape[1]}"
            )
        if self.linear_spectrograms is not None and self.linear_spectrograms.shape[:2] != self.mels.shape[:2]:
            raise ValueError(
                f"linear_spectrograms have shape {tuple(self.linear_spectrograms.shape)}, but mels have "
                f"shape {tuple(self.mels.shape)}; expected the same number of utterances and frames"
            )
        if self.alignment is not None and self.alignment.shape != self.mels.shape[:2]:
            raise ValueError(
                f"alignment has shape {tuple(self.alignment.shape)}, but mels have shape "
                f"{tuple(self.mels.shape)}; expected one symbol index per frame"
            )

    @classmethod
    def from_sequences(
        cls,
        text: Sequence[Sequence[int]],
        mels: Sequence[Tensor],
        linear_spectrograms: Sequence[Tensor] | None = None,
        example_indices: Sequence[int] = (),
        *,
        min_lengths: tuple[int, int] = (0, 0),
    ) -> SpeechBatch:
        """Build a batch from symbols, mels ``(T, M)`` and linear spectra ``(T, F)`` of utterances.

        ``min_lengths``: pad texts and frames at least to these lengths.

        >>> batch = SpeechBatch.from_sequences([[7, 8, 3], [9, 3]], [torch.ones(4, 5), torch.ones(2, 5)])
        >>> batch.text.ids.shape, batch.mels.shape, batch.mel_lengths, batch.count
        (torch.Size([2, 3]), torch.Size([2, 4, 5]), (4, 2), 6)
        """
        lengths = tuple(map(len, mels))
        return cls(
            text=Tokens.pad(text, min_lengths[0]),
            mels=_pad_spectra(mels, min_lengths[1]),
            mel_lengths=lengths,
            count=sum(lengths),
            linear_spectrograms=None
            if linear_spectrograms is None
            else _pad_spectra(linear_spectrograms, min_lengths[1]),
            example_indices=tuple(example_indices),
        )

    @functools.cached_property
    def mel_tokens(self) -> Tokens:
        """The mels as sequences of frames with their masks: see :func:`frames_as_tokens`."""
        return frames_as_tokens(self.mels, self.mel_lengths, self.device_mel_lengths)

    @property
    def graph_key(self) -> Hashable | None:
        """See :attr:`jumok.batches.tokens.Tokens.graph_key`. This has those of texts and frames."""
        keys = self.text.graph_key, self.mel_tokens.graph_key
        linear = None if self.linear_spectrograms is None else self.linear_spectrograms.shape
        return None if None in keys else (*keys, linear, self.style_reference is None, self.alignment is None)

    def with_static_shapes(self) -> Self:
        device_lengths = self.mel_tokens.with_static_shapes().device_lengths
        return replace(super().with_static_shapes(), device_mel_lengths=device_lengths)


def frames_as_tokens(x: Tensor, lengths: Sequence[int], device_lengths: Tensor | None = None) -> Tokens:
    """Wrap frames ``(B, T, …)`` as padded sequences of these lengths; their ``valid_mask`` is ``(B, T)``.

    >>> frames_as_tokens(torch.zeros(2, 3, 5), (3, 1)).valid_mask
    tensor([[ True,  True,  True],
            [ True, False, False]])
    """
    return Tokens(x, tuple(lengths), device_lengths=device_lengths)


def _pad_spectra(spectra: Sequence[Tensor], min_length: int) -> Tensor:
    """Pad spectra ``(T, M)`` with zeros to one tensor ``(B, T, M)``."""
    length = max(min_length, *map(len, spectra), 0)
    padded = torch.zeros(len(spectra), length, spectra[0].shape[-1])
    for row, spectrum in zip(padded, spectra, strict=True):
        row[: len(spectrum)] = torch.as_tensor(spectrum)
    return padded
