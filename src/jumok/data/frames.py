"""Spectra of recordings, on disk: no recording is decoded twice.

How they are kept, is told in ``kept.py``; there is a cache for each config of sound::

    cache = Frames.open(Path("cache"), Sound(SoundConfig.at(16000)))
    found = list(usable(cache.filled(recordings.find("speech/arctic", split="train")), "skip", skipped))
    cache[found[0].sound]    # (T, 80)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jumok.data.formats import Flaw
from jumok.data.kept import FORMAT, Kept, named
from jumok.data.recordings import Recording, RecordingFile, Said
from jumok.data.sound import LIMITS, Limits, Sound
from jumok.errors import InputError

__all__ = ["Frames"]

Heard = RecordingFile | Said


class Frames(Kept[Heard]):
    """Spectra of recordings by one config, on disk: a row is a frame."""

    whose: ClassVar[str] = "recordings"
    ragged: ClassVar[bool] = True

    def __init__(self, path: Path, made_by: dict[str, object], sound: Sound) -> None:
        self.sound = sound
        super().__init__(path, made_by)

    @classmethod
    def open(cls, folder: Path, sound: Sound) -> Frames:
        """The cache of one config, in a folder for those of many."""
        made_by: dict[str, object] = {"format": FORMAT, "sound": asdict(sound.config)}
        return cls(named(folder, f"sound-{sound.config.rate}-{sound.config.width}", made_by), made_by, sound)

    def __getitem__(self, source: Heard) -> NDArray[np.float16]:
        """Its spectra ``(T, width)``, a view of the memory map."""
        begin, end = self.span(source)
        spectra: NDArray[np.float16] = self.features[begin:end]
        return spectra

    def frames(self, source: Heard) -> int:
        """How many it has."""
        begin, end = self.span(source)
        return end - begin

    def filled(
        self, found: Iterable[Recording | Flaw], limits: Limits = LIMITS
    ) -> Iterator[Recording | Flaw]:
        """The same, one after the other, once their spectra are here; a flaw for what cannot be decoded."""

        def read(one: Recording) -> NDArray[Any] | Flaw:
            wave = one.sound.decode(self.sound, f"{one.where} {one.sound.name}", limits)
            return wave if isinstance(wave, Flaw) else self.sound.features(wave)

        return self._filled(found, lambda one: one.sound, read, self._add)

    def _add(self, sources: list[Heard], spectra: list[NDArray[Any]]) -> None:
        rows = np.concatenate(spectra)
        if self.shape not in (None, rows.shape[1:]):
            raise InputError(f"{self.path} has frames of {self.shape}, and {rows.shape[1:]} came; remove it")
        self._write(sources, self._rounded(rows, sources), [len(one) for one in spectra])
