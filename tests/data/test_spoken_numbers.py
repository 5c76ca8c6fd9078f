"""The built-in voices: the same bits from the same seed, and all that is told of them is true."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest

from jumok.data.builtin.spoken_numbers import (
    PRONUNCIATIONS,
    STYLES,
    number_to_words,
    synthesize_text,
    synthesize_utterance,
    synthesize_utterances,
)
from jumok.errors import InputError
from jumok.metrics.prosody import measure_prosody

TEXTS = ("forty two", "ninety one", "eleven")


def test_the_same_seed_gives_the_same_bits() -> None:
    ones, others = list(synthesize_utterances(3, 5)), list(synthesize_utterances(3, 5))
    for one, other in zip(ones, others, strict=True):
        assert one.waveform.dtype == np.float32
        np.testing.assert_array_equal(one.waveform, other.waveform)
        assert (one.text, one.style, one.start_times) == (other.text, other.style, other.start_times)
    np.testing.assert_array_equal(synthesize_utterance(3, 4).waveform, ones[4].waveform)  # which depends on no other
    assert len({one.waveform.tobytes() for one in [*ones, *synthesize_utterances(4, 5)]}) == 10


def test_every_number_can_be_said_and_spelled() -> None:
    for number in range(100):
        for word in number_to_words(number).split():
            letters = "".join(group.partition("/")[0] for group in PRONUNCIATIONS[word].split())
            assert letters == word


def test_the_times_of_the_characters_rise_and_cover_the_utterance() -> None:
    for one in synthesize_utterances(5, 12):
        assert len(one.start_times) == len(one.text)
        times = [*one.start_times, one.end_time]
        assert all(before < after for before, after in pairwise(times))
        assert times[0] < 0.06
        assert one.seconds - 0.06 < times[-1] < one.seconds
        # Nothing is heard before and behind, and something within.
        first, last = (int(at * one.sample_rate) for at in (times[0], times[-1]))
        assert np.abs(one.waveform[: first - 80]).max() < 0.02 * np.abs(one.waveform).max()
        assert np.abs(one.waveform[first:last]).max() == np.abs(one.waveform).max()


def test_which_character_sounds_when() -> None:
    one = synthesize_text("six")
    middles = [(begin + end) / 2 for begin, end in pairwise([*one.start_times, one.end_time])]
    assert one.character_indices(np.array([0.0, *middles, one.end_time + 0.01])).tolist() == [0, 0, 1, 2, 3]
    assert one.character_indices(np.array(one.start_times)).tolist() == [0, 1, 2]


def test_letters_sound_where_they_are_said_to() -> None:
    one = synthesize_text("six")  # s hisses, i does not
    begins = [int(at * one.sample_rate) for at in (*one.start_times, one.end_time)]

    def height(begin: int, end: int) -> float:
        """The middle of the spectrum, Hz."""
        power = np.abs(np.fft.rfft(one.waveform[begin:end])) ** 2
        return float((power * np.fft.rfftfreq(end - begin, 1 / one.sample_rate)).sum() / power.sum())

    s, i, x = (height(begin, end) for begin, end in pairwise(begins))
    assert s > 4000 > 1500 > i
    assert x > 2000


@pytest.mark.parametrize("rate", [16000, 8000])
def test_styles_have_their_pitch_and_speed_in_order(rate: int) -> None:
    pitch, seconds, energy = {}, {}, {}
    for style in STYLES:
        said = [synthesize_text(text, style, sample_rate=rate) for text in TEXTS]
        heard = [measure_prosody(one.waveform, rate) for one in said]
        for one, manner in zip(said, heard, strict=True):
            assert manner.pitch == pytest.approx(one.pitch, rel=0.08)
            assert one.pitch == pytest.approx(STYLES[style].pitch, rel=0.05)
        pitch[style] = np.mean([manner.pitch for manner in heard])
        seconds[style] = np.mean([manner.seconds for manner in heard])
        energy[style] = np.mean([manner.energy for manner in heard])
    assert sorted(pitch, key=pitch.__getitem__) == ["deep", "calm", "plain", "hurried", "bright"]
    assert sorted(seconds, key=seconds.__getitem__) == ["hurried", "bright", "plain", "deep", "calm"]
    assert energy["calm"] < energy["plain"] < energy["bright"]


def test_half_the_rate_is_the_same_speech() -> None:
    one, half = synthesize_text("thirty five"), synthesize_text("thirty five", sample_rate=8000)
    assert len(one.waveform) == pytest.approx(2 * len(half.waveform), abs=2)
    spectra = [np.abs(np.fft.rfft(x.waveform[: 8000 * x.sample_rate // 16000] * x.sample_rate)) for x in (one, half)]
    # Up to 2 kHz, where the voice is: in bands of 100 Hz.
    bands = [np.log(spectrum[:1000].reshape(20, 50).mean(1)) for spectrum in spectra]
    shift = (bands[0] - bands[1]).mean()  # what lies above 4 kHz had a share in the loudness
    assert np.abs(bands[0] - bands[1] - shift).max() < 0.1


def test_it_is_fast() -> None:
    began = time.process_time()
    seconds = sum(one.seconds for one in synthesize_utterances(7, 50))
    assert time.process_time() - began < 3  # of 1 s in a thousand, 20 s: here three times as much is let pass
    assert 35 < seconds < 65


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: synthesize_text("one hundred"), "contains 'hundred'"),
        (lambda: synthesize_text(" "), "the text is empty"),
        (lambda: synthesize_text("one", "shouting"), "expected one of deep, calm"),
        (lambda: synthesize_text("one", sample_rate=44100), "16000 or 8000"),
        (lambda: number_to_words(100), "0 to 99"),
        (lambda: synthesize_utterances(1, -1), "0 or more"),
    ],
)
def test_what_cannot_be_said(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
