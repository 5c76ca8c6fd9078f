"""Mel-cepstral distortion: nothing between a sound and itself, more the more its formants are shifted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jumok.data.audio import AudioProcessor
from jumok.data.builtin.formant_synthesizer import PHONES, PhoneSegment, VoiceParameters, synthesize
from jumok.data.builtin.shapes import PortableGenerator
from jumok.errors import InputError
from jumok.metrics.cepstral_distortion import mel_cepstra, mel_cepstral_distortion

pytest.importorskip("librosa")


def spoken(stretch: float, slow: float = 1.0) -> np.ndarray:
    """Some sounds from a mouth of this size."""
    segments: list[PhoneSegment] = [one for name in ("ao", "n", "iy", "s", "ah") for one in PHONES[name]]
    begins = np.concatenate([[0.0], np.cumsum([one.seconds * slow for one in segments])])
    wave = synthesize(
        segments, begins, VoiceParameters(120, formant_scale=stretch, jitter=0), 16000, PortableGenerator(1)
    )
    return AudioProcessor().mel_spectrogram(wave.astype(np.float32))


def test_a_signal_has_zero_distance_to_itself() -> None:
    mel = spoken(1.0)
    distortion = mel_cepstral_distortion(mel, mel)
    assert distortion.decibels == 0
    assert distortion.path.tolist() == [[n, n] for n in range(len(mel))]


def test_distortion_grows_with_formant_shifts_only() -> None:
    mel = spoken(1.0)
    far = [mel_cepstral_distortion(mel, spoken(stretch)).decibels for stretch in (1.03, 1.1, 1.2, 1.35)]
    assert far == sorted(far)
    assert far[-1] > 3 * far[0] > 0.5
    slow = mel_cepstral_distortion(mel, spoken(1.0, slow=1.7))
    assert slow.decibels < far[1]
    assert slow.path[0].tolist() == [0, 0]
    assert (np.diff(slow.path, axis=0) >= 0).all()
    assert mel_cepstral_distortion(mel, mel + 0.1).decibels == pytest.approx(0, abs=1e-6)  # all bands 10 dB louder


def test_distortion_equals_its_formula() -> None:
    """From the formula: cepstra c of ln |X| = Σ c cos, and (10 / ln 10) √(2 Σ Δc²)."""
    chance = np.random.default_rng(5)
    bands, coefficients = 23, 13
    differ = chance.normal(size=coefficients)
    angles = np.outer(np.arange(bands) + 0.5, np.arange(1, coefficients + 1)) * math.pi / bands
    one = chance.normal(size=bands)
    other = one + np.cos(angles) @ differ  # ln
    decibels = [20 / math.log(10) * x[None] for x in (one, other)]
    expected = 10 / math.log(10) * math.sqrt(2 * np.square(differ).sum())
    assert mel_cepstral_distortion(*decibels, range_db=1).decibels == pytest.approx(expected)
    assert mel_cepstral_distortion(*(x / 80 for x in decibels), range_db=80).decibels == pytest.approx(expected)


def test_invalid_inputs_raise() -> None:
    with pytest.raises(InputError, match="expected the same mel bands"):
        mel_cepstral_distortion(np.zeros((3, 20)), np.zeros((3, 21)))
    with pytest.raises(InputError, match="expected \\(frames, mel bands\\)"):
        mel_cepstral_distortion(np.zeros((0, 20)), np.zeros((3, 20)))
    with pytest.raises(InputError, match="expected 1 to 12"):
        mel_cepstra(np.zeros((3, 13)))
