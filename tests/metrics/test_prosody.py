"""Pitch, energy and duration, of sounds whose pitch, energy and duration are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jumok.errors import InputError
from jumok.metrics.prosody import measure_prosody, track_pitch


def sine(pitch: float, rate: int, seconds: float = 1.0) -> np.ndarray:
    return np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("pitch", [67, 113, 223, 337, 449])
def test_pitch_of_sine_waves(pitch: int, rate: int) -> None:
    manner = measure_prosody(0.5 * sine(pitch, rate), rate)
    assert manner.pitch == pytest.approx(pitch, rel=0.002)
    assert manner.energy == pytest.approx(20 * math.log10(0.5 / math.sqrt(2)), abs=0.1)
    assert manner.seconds == pytest.approx(1, abs=0.011)
    assert manner.voiced_share > 0.95


def test_pitch_of_tones_with_overtones() -> None:
    for strengths in ([1, 1, 1, 1, 1], [0.1, 1, 0.3, 0.9, 0.2], [0, 1, 1, 1, 1]):
        wave = sum(s * sine(131 * (n + 1), 16000) for n, s in enumerate(strengths))
        assert measure_prosody(wave, 16000).pitch == pytest.approx(131, rel=0.01)


def test_pitch_of_a_glide() -> None:
    seconds = np.arange(16000) / 16000
    glide = 110 * 2**seconds
    wave = np.sin(2 * np.pi * np.cumsum(glide) / 16000)
    estimate = track_pitch(wave, 16000)
    assert len(estimate) == 100
    expected = 110 * 2 ** (np.arange(100) * 0.01 + 0.005)
    np.testing.assert_allclose(estimate[5:-5], expected[5:-5], rtol=0.01)


def test_silence_is_trimmed_and_noise_has_no_pitch() -> None:
    quiet = np.zeros(4800)
    manner = measure_prosody(np.concatenate([quiet, sine(200, 16000, 0.5), quiet]), 16000)
    assert manner.seconds == pytest.approx(0.5, abs=0.021)
    assert manner.pitch == pytest.approx(200, rel=0.005)
    noise = np.random.default_rng(3).normal(size=16000)
    assert measure_prosody(noise, 16000).voiced_share < 0.02
    assert np.isnan(track_pitch(quiet, 16000)).all()


def test_silent_signals() -> None:
    nothing = measure_prosody(np.zeros(1600), 16000)
    assert math.isnan(nothing.pitch)
    assert (nothing.energy, nothing.seconds, nothing.voiced_share) == (-math.inf, 0, 0)
    assert measure_prosody(np.ones(1), 16000).seconds > 0  # a single sample
    for wave in (np.zeros(0), np.zeros((2, 5)), np.array([math.nan])):
        with pytest.raises(InputError, match="waveform has shape"):
            measure_prosody(wave, 16000)
    with pytest.raises(InputError, match="sample_rate=100"):
        measure_prosody(np.ones(100), 100)
