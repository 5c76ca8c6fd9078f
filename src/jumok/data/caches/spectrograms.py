"""Disk cache of spectrograms.

There is one cache for each audio config; for its format see ``feature_cache.py``::

    cache = SpectrogramCache.open(Path("cache"), AudioProcessor(AudioConfig.for_sample_rate(16000)))
    filled = cache.fill(read_speech_examples("speech/arctic", split="train"))
    examples = list(skip_invalid(filled, "skip", skipped))
    cache[examples[0].audio]    # (T, 80)
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
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.speech import AudioFile, BuiltinUtterance, SpeechExample
from jumok.errors import InputError

AudioSource = AudioFile | BuiltinUtterance


class SpectrogramCache(FeatureCache[AudioSource]):
    """Spectrograms of recordings on disk, for one audio config. A row is a frame."""

    source_name: ClassVar[str] = "recordings"
    has_variable_rows: ClassVar[bool] = True

    def __init__(self, path: Path, provenance: dict[str, object], processor: AudioProcessor) -> None:
        self.processor = processor
        super().__init__(path, provenance)

    @classmethod
    def open(cls, folder: Path, processor: AudioProcessor) -> SpectrogramCache:
        """Open the cache of one audio config, in a folder of caches."""
        provenance: dict[str, object] = {"format": FORMAT_VERSION, "sound": asdict(processor.config)}
        return cls(
            cache_path(folder, f"sound-{processor.config.sample_rate}-{processor.config.num_features}", provenance),
            provenance,
            processor,
        )

    def __getitem__(self, source: AudioSource) -> NDArray[np.float16]:
        """The spectrogram ``(T, num_features)``, a view of the memory map."""
        start, end = self.span(source)
        spectrogram: NDArray[np.float16] = self.features[start:end]
        return spectrogram

    def num_frames(self, source: AudioSource) -> int:
        """The number of frames of a recording."""
        start, end = self.span(source)
        return end - start

    def fill(
        self, examples: Iterable[SpeechExample | InvalidExample], limits: AudioLimits = AUDIO_LIMITS
    ) -> Iterator[SpeechExample | InvalidExample]:
        """Yield the same examples once their spectrograms are cached, and invalid ones if decoding fails."""

        def read(example: SpeechExample) -> NDArray[Any] | InvalidExample:
            waveform = example.audio.decode(self.processor, f"{example.location} {example.audio.name}", limits)
            return waveform if isinstance(waveform, InvalidExample) else self.processor.extract_features(waveform)

        return self._fill_examples(examples, lambda example: example.audio, read, self._add_spectrograms)

    def _add_spectrograms(self, sources: list[AudioSource], spectrograms: list[NDArray[Any]]) -> None:
        rows = np.concatenate(spectrograms)
        if self.shape not in (None, rows.shape[1:]):
            raise InputError(
                f"{self.path} has frames of shape {self.shape}, but new ones have {rows.shape[1:]}; remove this folder"
            )
        self._append_rows(
            sources, self._to_storage_type(rows, sources), [len(spectrogram) for spectrogram in spectrograms]
        )
