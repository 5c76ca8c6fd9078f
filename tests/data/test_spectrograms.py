"""The cache of spectra: no recording is decoded twice, none is lost after a kill, none is stale."""

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


class Counting(AudioProcessor):
    """Sound that notes how often something was made."""

    def __init__(self, config: AudioConfig = CONFIG) -> None:
        super().__init__(config)
        self.made = 0

    def extract_features(self, waveform: Any) -> Any:
        self.made += 1
        return super().extract_features(waveform)


def opened(folder: Path, sound: AudioProcessor | None = None) -> SpectrogramCache:
    return SpectrogramCache.open(folder / "cache", sound or Counting())


def recorded(folder: Path, count: int) -> list[SpeechExample]:
    """Noises, each 50 ms longer than the one before."""
    chance = np.random.default_rng(7)
    found = []
    for number in range(count):
        path = folder / f"{number}.wav"
        save_audio(path, chance.normal(size=400 * (number + 1)) / 8, 8000)
        found.append(SpeechExample(AudioFile.from_path(path), f"noise {number}", f"my.tsv:{number}"))
    return found


def made(cache: SpectrogramCache, found: list[SpeechExample]) -> int:
    """How many had to be computed; and then all of them are there, and right."""
    before = cache.processor.made  # type: ignore[attr-defined]
    assert list(cache.fill(found)) == found
    count = cache.processor.made - before  # type: ignore[attr-defined]
    for one in found:
        wave = one.audio.decode(AudioProcessor(CONFIG))
        assert not isinstance(wave, InvalidExample)
        expected = AudioProcessor(CONFIG).extract_features(wave)
        assert cache.num_frames(one.audio) == len(expected) == 1 + len(wave) // 100
        np.testing.assert_allclose(cache[one.audio], expected, atol=1e-3)
    return int(count)


@pytest.fixture(autouse=True)
def _a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCES_PER_CHUNK", 3)


def test_nothing_is_decoded_twice(tmp_path: Path) -> None:
    found = recorded(tmp_path, 7)
    cache = opened(tmp_path)
    assert made(cache, found[:4]) == 4
    assert made(cache, found) == 3
    assert made(opened(tmp_path), found[::-1]) == 0
    assert len(cache) == 7
    assert cache.features.dtype == np.float16
    assert not cache[found[0].audio].flags.writeable
    assert len(cache.features) == sum(cache.num_frames(one.audio) for one in found)


def test_a_recording_that_has_changed_and_another_config(tmp_path: Path) -> None:
    found = recorded(tmp_path, 3)
    made(opened(tmp_path), found)
    path = found[1].audio.path  # type: ignore[union-attr]
    os.utime(path, ns=(0, 12345))
    again = [found[0], SpeechExample(AudioFile.from_path(path), "changed", "my.tsv:1"), found[2]]
    assert made(opened(tmp_path), again) == 1
    other = opened(tmp_path, Counting(AudioConfig.for_sample_rate(8000, n_mels=29)))
    assert len(other) == 0
    assert other.path != opened(tmp_path).path


@pytest.mark.parametrize("name", ["features.f16", "recordings.key"])
def test_a_kill_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = recorded(tmp_path, 6)
    made(opened(tmp_path), found[:2])
    whole = module._append_bytes

    def half(path: Path, end: int, data: bytes) -> None:
        if path.name == name:
            whole(path, end, data[: len(data) // 2 + 1])
            raise KeyboardInterrupt
        whole(path, end, data)

    monkeypatch.setattr(module, "_append_bytes", half)
    with pytest.raises(KeyboardInterrupt):
        list(opened(tmp_path).fill(found))
    monkeypatch.setattr(module, "_append_bytes", whole)
    assert len(opened(tmp_path)) in (2, 3)  # of three records, half and a bit hold one
    assert made(opened(tmp_path), found) in (3, 4)


def test_flaws_go_through(tmp_path: Path) -> None:
    found: list[Any] = recorded(tmp_path, 4)
    (tmp_path / "1.wav").write_bytes(b"no sound")
    flaw = InvalidExample("my.tsv:9", "an empty text")
    one, bad, two, again, three = opened(tmp_path).fill([found[0], found[1], flaw, found[2], found[3]])
    assert (one, two, again, three) == (found[0], flaw, found[2], found[3])
    assert str(bad).startswith("my.tsv:1 1.wav: not a recording in WAV, FLAC or OGG")
    with pytest.raises(InputError, match=r"no features of .*1.wav; fill it first"):
        opened(tmp_path)[found[1].audio]


def test_built_in_voices_are_kept_too(tmp_path: Path) -> None:
    found = list(make_builtin_examples(1, 3, sample_rate=8000))
    cache = opened(tmp_path)
    assert made(cache, found) == 3
    assert made(cache, found) == 0
    with pytest.raises(InputError, match="voices:99"):
        cache[BuiltinUtterance(1, 99, 8000)]


def test_mel_and_linear_together(tmp_path: Path) -> None:
    config = AudioConfig(8000, 512, 100, 400, 23, linear_spectrogram=True)
    found = recorded(tmp_path, 1)
    cache = opened(tmp_path, Counting(config))
    list(cache.fill(found))
    assert cache[found[0].audio].shape == (5, 23 + 257)
