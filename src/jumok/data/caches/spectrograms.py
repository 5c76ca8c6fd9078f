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

from jumok.data.audio import AUDIO_LIMITS, AudioLimits, AudioProcessor
from jumok.data.caches.feature_cache import FORMAT_VERSION, FeatureCache, cache_path
from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.speech import AudioFile, BuiltinUtterance, SpeechExample
from jumok.errors import InputError

__all__ = ["SpectrogramCache"]

AudioSource = AudioFile | BuiltinUtterance


class SpectrogramCache(FeatureCache[AudioSource]):
    """Spectra of recordings by one config, on disk: a row is a frame."""

    source_name: ClassVar[str] = "recordings"
    has_variable_rows: ClassVar[bool] = True

    def __init__(self, path: Path, provenance: dict[str, object], processor: AudioProcessor) -> None:
        self.processor = processor
        super().__init__(path, provenance)

    @classmethod
    def open(cls, folder: Path, processor: AudioProcessor) -> SpectrogramCache:
        """The cache of one config, in a folder for those of many."""
        made_by: dict[str, object] = {"format": FORMAT_VERSION, "sound": asdict(processor.config)}
        return cls(
            cache_path(
                folder, f"sound-{processor.config.sample_rate}-{processor.config.num_features}", made_by
            ),
            made_by,
            processor,
        )

    def __getitem__(self, source: AudioSource) -> NDArray[np.float16]:
        """Its spectra ``(T, width)``, a view of the memory map."""
        begin, end = self.span(source)
        spectra: NDArray[np.float16] = self.features[begin:end]
        return spectra

    def num_frames(self, source: AudioSource) -> int:
        """How many it has."""
        begin, end = self.span(source)
        return end - begin

    def fill(
        self, examples: Iterable[SpeechExample | InvalidExample], limits: AudioLimits = AUDIO_LIMITS
    ) -> Iterator[SpeechExample | InvalidExample]:
        """The same, one after the other, once their spectra are here; a flaw for what cannot be decoded."""

        def read(one: SpeechExample) -> NDArray[Any] | InvalidExample:
            wave = one.audio.decode(self.processor, f"{one.location} {one.audio.name}", limits)
            return wave if isinstance(wave, InvalidExample) else self.processor.extract_features(wave)

        return self._fill_examples(examples, lambda one: one.audio, read, self._add_spectrograms)

    def _add_spectrograms(self, sources: list[AudioSource], spectrograms: list[NDArray[Any]]) -> None:
        rows = np.concatenate(spectrograms)
        if self.shape not in (None, rows.shape[1:]):
            raise InputError(f"{self.path} has frames of {self.shape}, and {rows.shape[1:]} came; remove it")
        self._append_rows(sources, self._to_storage_type(rows, sources), [len(one) for one in spectrograms])
