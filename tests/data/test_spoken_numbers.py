"""Synthesized number words: reproducible, with correct styles, pitch and timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from jumok.data.builtin.spoken_numbers import (
    PRONUNCIATIONS,
    STYLES,
    SyntheticUtterance,
    number_to_words,
    synthesize_text,
    synthesize_utterance,
)
from jumok.errors import InputError
from jumok.metrics.prosody import measure_prosody

TEXTS = ("forty two", "ninety one", "eleven")


def synthesize_utterances(seed: int, count: int) -> list[SyntheticUtterance]:
    return [synthesize_utterance(seed, index) for index in range(count)]


def list_times(utterance: SyntheticUtterance) -> list[float]:
    return [*utterance.start_times, utterance.end_time]


def test_the_same_seed_gives_the_same_samples() -> None:
    first, second = synthesize_utterances(3, 5), synthesize_utterances(3, 5)
    for a, b in zip(first, second, strict=True):
        assert a.waveform.dtype == np.float32
        np.testing.assert_array_equal(a.waveform, b.waveform)
        assert (a.text, a.style, a.start_times) == (b.text, b.style, b.start_times)
    assert len({utterance.waveform.tobytes() for utterance in [*first, *synthesize_utterances(4, 5)]}) == 10


def test_every_number_has_a_pronunciation_with_its_letters() -> None:
    for word in {word for number in range(100) for word in number_to_words(number).split()}:
        assert "".join(group.partition("/")[0] for group in PRONUNCIATIONS[word].split()) == word


def test_times_of_characters_increase_and_cover_the_sound() -> None:
    for utterance in synthesize_utterances(5, 12):
        assert len(utterance.start_times) == len(utterance.text)
        times = list_times(utterance)
        assert all(before < after for before, after in pairwise(times))
        assert times[0] < 0.06
        assert utterance.seconds - 0.06 < times[-1] < utterance.seconds
        first, last = (int(at * utterance.sample_rate) for at in (times[0], times[-1]))
        amplitudes = np.abs(utterance.waveform)
        assert amplitudes[: first - 80].max() < 0.02 * amplitudes.max()
        assert amplitudes[first:last].max() == amplitudes.max()


def test_character_indices() -> None:
    utterance = synthesize_text("six")
    middles = [(start + end) / 2 for start, end in pairwise(list_times(utterance))]
    times = np.array([0.0, *middles, utterance.end_time + 0.01])
    assert utterance.character_indices(times).tolist() == [0, 0, 1, 2, 3]
    assert utterance.character_indices(np.array(utterance.start_times)).tolist() == [0, 1, 2]


def test_letters_have_their_sound_at_their_time() -> None:
    utterance = synthesize_text("six")

    def mean_frequency(start: int, end: int) -> float:
        power = np.abs(np.fft.rfft(utterance.waveform[start:end])) ** 2
        return float((power * np.fft.rfftfreq(end - start, 1 / utterance.sample_rate)).sum() / power.sum())

    samples = [int(at * utterance.sample_rate) for at in list_times(utterance)]
    s, i, x = (mean_frequency(start, end) for start, end in pairwise(samples))
    assert s > 4000 > 1500 > i  # s is a hiss, i is not
    assert x > 2000


@pytest.mark.parametrize("sample_rate", [16000, 8000])
def test_styles_are_ordered_by_pitch_and_speed(sample_rate: int) -> None:
    pitch, seconds, energy = {}, {}, {}
    for style in STYLES:
        utterances = [synthesize_text(text, style, sample_rate=sample_rate) for text in TEXTS]
        prosodies = [measure_prosody(utterance.waveform, sample_rate) for utterance in utterances]
        for utterance, prosody in zip(utterances, prosodies, strict=True):
            assert prosody.pitch == pytest.approx(utterance.pitch, rel=0.08)
            assert utterance.pitch == pytest.approx(STYLES[style].pitch, rel=0.05)
        pitch[style] = np.mean([prosody.pitch for prosody in prosodies])
        seconds[style] = np.mean([prosody.seconds for prosody in prosodies])
        energy[style] = np.mean([prosody.energy for prosody in prosodies])
    assert sorted(pitch, key=pitch.__getitem__) == ["deep", "calm", "plain", "hurried", "bright"]
    assert sorted(seconds, key=seconds.__getitem__) == ["hurried", "bright", "plain", "deep", "calm"]
    assert energy["calm"] < energy["plain"] < energy["bright"]


def test_half_the_sample_rate_is_the_same_speech() -> None:
    full, half = synthesize_text("thirty five"), synthesize_text("thirty five", sample_rate=8000)
    assert len(full.waveform) == pytest.approx(2 * len(half.waveform), abs=2)
    spectra = [np.abs(np.fft.rfft(x.waveform[: 8000 * x.sample_rate // 16000] * x.sample_rate)) for x in (full, half)]
    # Up to 2 kHz, where the voice is, in bands of 100 Hz.
    bands = [np.log(spectrum[:1000].reshape(20, 50).mean(1)) for spectrum in spectra]
    shift = (bands[0] - bands[1]).mean()  # frequencies above 4 kHz contribute to the loudness
    assert np.abs(bands[0] - bands[1] - shift).max() < 0.1


def test_synthesis_is_fast() -> None:
    start = time.process_time()
    utterances = synthesize_utterances(7, 50)
    assert time.process_time() - start < 3  # three times the target of 20 s for 1000 utterances
    assert 35 < sum(utterance.seconds for utterance in utterances) < 65


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: synthesize_text("one hundred"), "contains 'hundred'"),
        (lambda: synthesize_text(" "), "the text is empty"),
        (lambda: synthesize_text("one", "shouting"), "expected one of deep, calm"),
        (lambda: synthesize_text("one", sample_rate=44100), "16000 or 8000"),
        (lambda: number_to_words(100), "0 to 99"),
    ],
)
def test_invalid_arguments_are_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
