"""Texts with the sound of them, to learn from: the batch that models take that speak.

A sound is a row of *frames*, a short stretch of time each, and a frame is what sounds in it: so much at each
of M pitches (log-mel), or at each of F frequencies (log-magnitude)::

    text      d  o  g  </s>                  (B, L)
    mels      ▂ ▃ ▅ ▇ ▇ ▆ ▅ ▅ ▃ ▂ ▁          (B, T, M)

Shapes: ``B`` utterances, ``L`` symbols of the longest text, ``T`` frames of the longest sound.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jumok.batches.tokens import Tokens

__all__ = ["SpeechBatch", "frames_as_tokens"]


@dataclass(frozen=True, eq=False)
class SpeechBatch:
    """Utterances: the symbols of each, and its frames, padded at the right. No frame of padding counts."""

    text: Tokens
    mels: Tensor  # (B, T, M)
    mel_lengths: tuple[int, ...]  # how many of them are real, of each utterance; on the host
    count: int  # frames that count
    device_mel_lengths: Tensor | None = (
        None  # (B,): the same numbers on the device, where batches are alike (see Tokens)
    )
    linear_spectrograms: Tensor | None = None  # (B, T, F); None: waveforms are made of mels
    example_indices: tuple[int, ...] = ()  # the numbers of the examples in their data set
    style_reference: Tensor | None = None  # (B,): the row whose sound each has its style from; None: its own
    alignment: Tensor | None = None  # (B, T): the number of the symbol that each frame is of, -1 at padding

    def __post_init__(self) -> None:
        if self.mels.dim() != 3 or not len(self.mels) == len(self.mel_lengths) == len(self.text.lengths):
            raise ValueError(
                f"mels of shape {tuple(self.mels.shape)} came with {len(self.mel_lengths)} numbers of frames and "
                f"{len(self.text.lengths)} texts; expected (utterances, frames, mels), and one of each for "
                "every utterance"
            )
        if not all(1 <= frames <= self.mels.shape[1] for frames in self.mel_lengths):
            raise ValueError(
                f"frames={list(self.mel_lengths)} came for mels of shape {tuple(self.mels.shape)}; each is "
                f"expected to be from 1 to {self.mels.shape[1]}"
            )
        if self.linear_spectrograms is not None and self.linear_spectrograms.shape[:2] != self.mels.shape[:2]:
            raise ValueError(
                f"linear spectra of shape {tuple(self.linear_spectrograms.shape)} came with mels "
                f"{tuple(self.mels.shape)}; as many utterances and frames of both are expected"
            )
        if self.alignment is not None and self.alignment.shape != self.mels.shape[:2]:
            raise ValueError(
                f"places of shape {tuple(self.alignment.shape)} came with mels {tuple(self.mels.shape)}; one "
                "for every frame is expected"
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
        """From the symbols of each utterance, its mels ``(T, M)`` and its linear spectra ``(T, F)``.

        ``to``: how many symbols, and frames, to fill up to at least.

        >>> batch = Speech.of([[7, 8, 3], [9, 3]], [torch.ones(4, 5), torch.ones(2, 5)])
        >>> batch.text.ids.shape, batch.mels.shape, batch.frames, batch.count
        (torch.Size([2, 3]), torch.Size([2, 4, 5]), (4, 2), 6)
        """
        frames = tuple(map(len, mels))
        return cls(
            text=Tokens.pad(text, min_lengths[0]),
            mels=_pad_spectra(mels, min_lengths[1]),
            mel_lengths=frames,
            count=sum(frames),
            linear_spectrograms=None
            if linear_spectrograms is None
            else _pad_spectra(linear_spectrograms, min_lengths[1]),
            example_indices=tuple(example_indices),
        )

    @functools.cached_property
    def mel_tokens(self) -> Tokens:
        """The mels as "sequences" of frames, which know where padding is: see :func:`frames_as_tokens`."""
        return frames_as_tokens(self.mels, self.mel_lengths, self.device_mel_lengths)

    @property
    def graph_key(self) -> Hashable | None:
        """As that of :class:`~jumok.batch.Tokens`, of text and sound."""
        forms = self.text.graph_key, self.mel_tokens.graph_key
        linear = None if self.linear_spectrograms is None else self.linear_spectrograms.shape
        return (
            None if None in forms else (*forms, linear, self.style_reference is None, self.alignment is None)
        )

    def with_static_shapes(self) -> SpeechBatch:
        """The same batch with a :attr:`graph_key`."""
        return replace(
            self,
            text=self.text.with_static_shapes(),
            device_mel_lengths=self.mel_tokens.with_static_shapes().device_lengths,
        )

    def to(self, device: torch.device | str) -> SpeechBatch:
        on_gpu = torch.device(device).type == "cuda"
        names = ("mels", "counts", "linear", "reference", "places")
        tensors = {name: x for name in names if (x := getattr(self, name)) is not None}
        moved = {name: x.to(device, non_blocking=on_gpu) for name, x in tensors.items()}
        return replace(self, text=self.text.to(device), **moved)


def frames_as_tokens(x: Tensor, lengths: Sequence[int], device_lengths: Tensor | None = None) -> Tokens:
    """Frames ``(B, T, …)`` as padded "sequences" of which so many are real: their ``real`` is ``(B, T)``.

    >>> frames_of(torch.zeros(2, 3, 5), (3, 1)).real
    tensor([[ True,  True,  True],
            [ True, False, False]])
    """
    return Tokens(x, tuple(lengths), device_lengths=device_lengths)


def _pad_spectra(spectra: Sequence[Tensor], min_length: int) -> Tensor:
    """Spectra ``(T, M)`` of several lengths as ``(B, T, M)``, filled up with zeros."""
    longest = max(min_length, *map(len, spectra), 0)
    filled = torch.zeros(len(spectra), longest, spectra[0].shape[-1])
    for row, spectrum in zip(filled, spectra, strict=True):
        row[: len(spectrum)] = torch.as_tensor(spectrum)
    return filled
