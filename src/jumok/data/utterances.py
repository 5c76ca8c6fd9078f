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

from jumok.batch import EOS, PAD
from jumok.data.batches import Batches, Lengths, Numbers, batches, divide, fingerprint, in_rows, stepped
from jumok.errors import InputError
from jumok.speech import Speech

__all__ = ["Utterances"]


class Utterances:
    """Utterances as batches of up to ``frames`` frames, padding among them: what the training loop asks for.

    ``spectra`` has ``(T, width)`` of each, of which the first ``mels`` columns are mel bands, and the others,
    if there are any, the linear spectrum. To be ``alike``, batches have one of a few lengths, and are filled
    up with utterances of no symbol but ``</s>`` and a single silent frame, which counts like any other.

    ``manners`` tell which utterances are spoken alike. Then each has its style from the next one in its batch
    that is spoken as it is, and a style can only be what they share.

    ``places`` has ``(T,)`` of each: the number of the symbol that each frame is of.

    >>> spectra = [np.full((frames, 5), 0.5, np.float16) for frames in (7, 3, 2)]
    >>> data = Utterances([[8, 9, 3], [8, 3], [3]], spectra, frames=14, seed=1)
    >>> batch = data.collate([1, 0])
    >>> batch.text.ids, batch.mels.shape, batch.frames, batch.count
    (tensor([[8, 3, 0],
            [8, 9, 3]]), torch.Size([2, 7, 5]), (3, 7), 10)
    """

    unit = "frames"

    def __init__(
        self,
        symbols: Sequence[Sequence[int]],
        spectra: Sequence[NDArray[Any]],
        *,
        frames: int,
        seed: int,
        mels: int | None = None,
        alike: bool = False,
        names: Sequence[str] = (),
        manners: Sequence[str] | None = None,
        places: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        """``names`` of recordings tell data from other data of the same texts and lengths."""
        if not len(symbols):
            raise InputError("there is nothing to learn from: no utterance is left")
        if len(symbols) != len(spectra):
            raise InputError(f"{len(symbols)} texts came with {len(spectra)} spectra; each text has one")
        if frames < 1:
            raise InputError(f"frames={frames}: a batch needs a budget of at least one frame")
        width = spectra[0].shape[-1]
        for number, (text, one) in enumerate(zip(symbols, spectra, strict=True)):
            if not len(text) or not len(one) or one.shape[1:] != (width,):
                raise InputError(
                    f"utterance {number} has {len(text)} symbols and spectra of shape {one.shape}; expected "
                    f"one or more, and (frames, {width}), as the first has"
                )
        if manners is not None and len(manners) != len(symbols):
            raise InputError(f"{len(symbols)} texts came with {len(manners)} manners; each text has one")
        if places is not None and [len(one) for one in places] != [len(one) for one in spectra]:
            raise InputError("places are expected for each frame of each utterance")
        self.places = places
        self.manners = None if manners is None else np.unique(list(manners), return_inverse=True)[1]
        self.mels = width if mels is None else mels
        if not 0 < self.mels <= width:
            raise InputError(f"mels={mels} of spectra with {width} columns")
        self.spectra, self.frames, self.seed, self.alike = spectra, frames, seed, alike
        self.width, self.names = width, tuple(names)
        self.sizes = np.array([len(one) for one in symbols], np.int64)
        self.begins = np.cumsum(self.sizes) - self.sizes
        self.ids = np.concatenate([np.asarray(one, np.int64) for one in symbols])
        self.lengths: Lengths = np.array([len(one) for one in spectra], np.int32)
        self._latest: tuple[int, Batches] | None = None  # asked for again, the same need not be made again

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Another one for other texts, other lengths or other recordings."""
        told = hashlib.sha256("\n".join(self.names).encode()).digest()
        shape = np.array([self.width, self.mels])
        return fingerprint(self.ids, self.sizes, self.lengths, shape, np.frombuffer(told, np.uint8))

    def batches(self, epoch: int) -> Batches:
        """The batches of an epoch, in order: each of utterances of like length."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            frames = stepped(self.lengths) if self.alike else self.lengths
            text = np.minimum(self.sizes, frames).astype(np.int32)  # the budget is one of frames
            made = batches(text, frames, tokens=self.frames, seed=self.seed, epoch=epoch)
            latest = self._latest = (epoch, made)
        return latest[1]

    def divide(self, index: Numbers, parts: int) -> list[Numbers]:
        """A batch in parts of like work."""
        return divide(index, self.lengths, self.lengths, parts)

    def collate(self, index: Sequence[int] | Numbers) -> Speech:
        """The utterances of these numbers as a model takes them."""
        numbers = np.asarray(index, np.int64)
        sizes, lengths = self.sizes[numbers], self.lengths[numbers].astype(np.int64)
        before = np.cumsum(sizes) - sizes
        ids = self.ids[np.arange(sizes.sum()) + np.repeat(self.begins[numbers] - before, sizes)]
        rows, columns, longest = len(numbers), int(sizes.max()), int(lengths.max())
        if self.alike:
            columns, longest = int(stepped(np.array(columns))), int(stepped(np.array(longest)))
            rows = max(rows, self.frames // longest)
        spectra = torch.zeros(rows, longest, self.width)
        for row, number in zip(spectra.numpy(), numbers, strict=False):  # the others stay silent
            row[: self.lengths[number]] = self.spectra[number]
        frames = (*lengths.tolist(), *[1] * (rows - len(numbers)))
        batch = Speech(
            text=in_rows(ids, sizes, (rows, columns), PAD, EOS),
            mels=spectra[:, :, : self.mels].contiguous(),
            frames=frames,
            count=sum(frames),
            linear=spectra[:, :, self.mels :].contiguous() if self.mels < self.width else None,
            index=tuple(numbers.tolist()),
            reference=None if self.manners is None else _next_alike(self.manners[numbers], rows),
            places=None if self.places is None else self._places(numbers, (rows, longest)),
        )
        return batch.alike() if self.alike else batch

    def _places(self, numbers: Numbers, shape: tuple[int, int]) -> torch.Tensor:
        assert self.places is not None
        places = torch.full(shape, -1)
        for row, number in zip(places.numpy(), numbers, strict=False):
            row[: self.lengths[number]] = self.places[number]
        return places


def _next_alike(manners: NDArray[np.int64], rows: int) -> torch.Tensor:
    """For each row the next that is spoken alike, after the last the first; of one alone, and of any row more
    than there are utterances, itself.

    >>> _next_alike(np.array([4, 2, 4, 4, 1]), 6)
    tensor([2, 1, 3, 0, 4, 5])
    """
    found = torch.arange(rows)
    order = np.argsort(manners, kind="stable")
    for alike in np.split(order, np.flatnonzero(np.diff(manners[order])) + 1):
        found[alike] = torch.from_numpy(np.roll(alike, -1))
    return found
