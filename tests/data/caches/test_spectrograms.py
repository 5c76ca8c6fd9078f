"""The cache of spectrograms: reuse, changed recordings and kills."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.data.audio import AudioConfig, AudioProcessor, save_audio
from jumok.data.caches import feature_cache as module
from jumok.data.caches.spectrograms import SpectrogramCache
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.speech import AudioFile, BuiltinUtterance, SpeechExample, make_builtin_examples
from jumok.errors import InputError

pytest.importorskip("librosa")

CONFIG = AudioConfig.for_sample_rate(8000, n_mels=23)


class CountingProcessor(AudioProcessor):
    """Sound that notes how often something was made."""

    def __init__(self, config: AudioConfig = CONFIG) -> None:
        super().__init__(config)
        self.made = 0

    def extract_features(self, waveform: Any) -> Any:
        self.made += 1
        return super().extract_features(waveform)


def open_cache(folder: Path, processor: AudioProcessor | None = None) -> SpectrogramCache:
    return SpectrogramCache.open(folder / "cache", processor or CountingProcessor())


def write_recordings(folder: Path, count: int) -> list[SpeechExample]:
    """Noises, each 50 ms longer than the one before."""
    rng = np.random.default_rng(7)
    examples = []
    for number in range(count):
        path = folder / f"{number}.wav"
        save_audio(path, rng.normal(size=400 * (number + 1)) / 8, 8000)
        examples.append(SpeechExample(AudioFile.from_path(path), f"noise {number}", f"my.tsv:{number}"))
    return examples


def made(cache: SpectrogramCache, examples: list[SpeechExample]) -> int:
    """How many had to be computed; and then all of them are there, and right."""
    before = cache.processor.made  # type: ignore[attr-defined]
    assert list(cache.fill(examples)) == examples
    count = cache.processor.made - before  # type: ignore[attr-defined]
    for first in examples:
        waveform = first.audio.decode(AudioProcessor(CONFIG))
        assert not isinstance(waveform, InvalidExample)
        expected = AudioProcessor(CONFIG).extract_features(waveform)
        assert cache.num_frames(first.audio) == len(expected) == 1 + len(waveform) // 100
        np.testing.assert_allclose(cache[first.audio], expected, atol=1e-3)
    return int(count)


@pytest.fixture(autouse=True)
def _a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCES_PER_CHUNK", 3)


def test_recordings_are_decoded_once(tmp_path: Path) -> None:
    examples = write_recordings(tmp_path, 7)
    cache = open_cache(tmp_path)
    assert made(cache, examples[:4]) == 4
    assert made(cache, examples) == 3
    assert made(open_cache(tmp_path), examples[::-1]) == 0
    assert len(cache) == 7
    assert cache.features.dtype == np.float16
    assert not cache[examples[0].audio].flags.writeable
    assert len(cache.features) == sum(cache.num_frames(first.audio) for first in examples)


def test_changed_recording_and_changed_config(tmp_path: Path) -> None:
    examples = write_recordings(tmp_path, 3)
    made(open_cache(tmp_path), examples)
    path = examples[1].audio.path  # type: ignore[union-attr]
    os.utime(path, ns=(0, 12345))
    third = [examples[0], SpeechExample(AudioFile.from_path(path), "changed", "my.tsv:1"), examples[2]]
    assert made(open_cache(tmp_path), third) == 1
    other = open_cache(tmp_path, CountingProcessor(AudioConfig.for_sample_rate(8000, n_mels=29)))
    assert len(other) == 0
    assert other.path != open_cache(tmp_path).path


@pytest.mark.parametrize("name", ["features.f16", "recordings.key"])
def test_kill_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    examples = write_recordings(tmp_path, 6)
    made(open_cache(tmp_path), examples[:2])
    append_bytes = module._append_bytes

    def append_half(path: Path, end: int, data: bytes) -> None:
        if path.name == name:
            append_bytes(path, end, data[: len(data) // 2 + 1])
            raise KeyboardInterrupt
        append_bytes(path, end, data)

    monkeypatch.setattr(module, "_append_bytes", append_half)
    with pytest.raises(KeyboardInterrupt):
        list(open_cache(tmp_path).fill(examples))
    monkeypatch.setattr(module, "_append_bytes", append_bytes)
    assert len(open_cache(tmp_path)) in (2, 3)  # of three records, half and a bit hold one
    assert made(open_cache(tmp_path), examples) in (3, 4)


def test_invalid_examples_are_yielded(tmp_path: Path) -> None:
    examples: list[Any] = write_recordings(tmp_path, 4)
    (tmp_path / "1.wav").write_bytes(b"no sound")
    invalid = InvalidExample("my.tsv:9", "an empty text")
    first, damaged, second, third, fourth = open_cache(tmp_path).fill(
        [examples[0], examples[1], invalid, examples[2], examples[3]]
    )
    assert (first, second, third, fourth) == (examples[0], invalid, examples[2], examples[3])
    assert str(damaged).startswith("my.tsv:1 1.wav: not a recording in WAV, FLAC or OGG")
    with pytest.raises(InputError, match=r"no features of .*1.wav; fill it first"):
        open_cache(tmp_path)[examples[1].audio]


def test_builtin_utterances_are_cached(tmp_path: Path) -> None:
    examples = list(make_builtin_examples(1, 3, sample_rate=8000))
    cache = open_cache(tmp_path)
    assert made(cache, examples) == 3
    assert made(cache, examples) == 0
    with pytest.raises(InputError, match="voices:99"):
        cache[BuiltinUtterance(1, 99, 8000)]


def test_mel_and_linear_spectrogram(tmp_path: Path) -> None:
    config = AudioConfig(8000, 512, 100, 400, 23, linear_spectrogram=True)
    examples = write_recordings(tmp_path, 1)
    cache = open_cache(tmp_path, CountingProcessor(config))
    list(cache.fill(examples))
    assert cache[examples[0].audio].shape == (5, 23 + 257)
