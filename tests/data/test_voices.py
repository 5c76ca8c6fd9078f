"""The built-in voices: the same bits from the same seed, and all that is told of them is true."""

from __future__ import annotations

import doctest
import time
from itertools import pairwise

import numpy as np
import pytest

from jumok.data import voices as module
from jumok.data.voices import STYLES, WORDS, in_words, say, voice, voices
from jumok.errors import InputError
from jumok.metrics.pitch import prosody

TEXTS = ("forty two", "ninety one", "eleven")


def test_the_same_seed_gives_the_same_bits() -> None:
    ones, others = list(voices(3, 5)), list(voices(3, 5))
    for one, other in zip(ones, others, strict=True):
        assert one.wave.dtype == np.float32
        np.testing.assert_array_equal(one.wave, other.wave)
        assert (one.text, one.style, one.begins) == (other.text, other.style, other.begins)
    np.testing.assert_array_equal(voice(3, 4).wave, ones[4].wave)  # which depends on no other
    assert len({one.wave.tobytes() for one in [*ones, *voices(4, 5)]}) == 10


def test_every_number_can_be_said_and_spelled() -> None:
    for number in range(100):
        for word in in_words(number).split():
            letters = "".join(group.partition("/")[0] for group in WORDS[word].split())
            assert letters == word


def test_the_times_of_the_characters_rise_and_cover_the_utterance() -> None:
    for one in voices(5, 12):
        assert len(one.begins) == len(one.text)
        times = [*one.begins, one.end]
        assert all(before < after for before, after in pairwise(times))
        assert times[0] < 0.06
        assert one.seconds - 0.06 < times[-1] < one.seconds
        # Nothing is heard before and behind, and something within.
        first, last = (int(at * one.rate) for at in (times[0], times[-1]))
        assert np.abs(one.wave[: first - 80]).max() < 0.02 * np.abs(one.wave).max()
        assert np.abs(one.wave[first:last]).max() == np.abs(one.wave).max()


def test_which_character_sounds_when() -> None:
    one = say("six")
    middles = [(begin + end) / 2 for begin, end in pairwise([*one.begins, one.end])]
    assert one.sounding(np.array([0.0, *middles, one.end + 0.01])).tolist() == [0, 0, 1, 2, 3]
    assert one.sounding(np.array(one.begins)).tolist() == [0, 1, 2]


def test_letters_sound_where_they_are_said_to() -> None:
    one = say("six")  # s hisses, i does not
    begins = [int(at * one.rate) for at in (*one.begins, one.end)]

    def height(begin: int, end: int) -> float:
        """The middle of the spectrum, Hz."""
        power = np.abs(np.fft.rfft(one.wave[begin:end])) ** 2
        return float((power * np.fft.rfftfreq(end - begin, 1 / one.rate)).sum() / power.sum())

    s, i, x = (height(begin, end) for begin, end in pairwise(begins))
    assert s > 4000 > 1500 > i
    assert x > 2000


@pytest.mark.parametrize("rate", [16000, 8000])
def test_styles_have_their_pitch_and_speed_in_order(rate: int) -> None:
    pitch, seconds, energy = {}, {}, {}
    for style in STYLES:
        said = [say(text, style, rate=rate) for text in TEXTS]
        heard = [prosody(one.wave, rate) for one in said]
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
    one, half = say("thirty five"), say("thirty five", rate=8000)
    assert len(one.wave) == pytest.approx(2 * len(half.wave), abs=2)
    spectra = [np.abs(np.fft.rfft(x.wave[: 8000 * x.rate // 16000] * x.rate)) for x in (one, half)]
    # Up to 2 kHz, where the voice is: in bands of 100 Hz.
    bands = [np.log(spectrum[:1000].reshape(20, 50).mean(1)) for spectrum in spectra]
    shift = (bands[0] - bands[1]).mean()  # what lies above 4 kHz had a share in the loudness
    assert np.abs(bands[0] - bands[1] - shift).max() < 0.1


def test_it_is_fast() -> None:
    began = time.process_time()
    seconds = sum(one.seconds for one in voices(7, 50))
    assert time.process_time() - began < 3  # of 1 s in a thousand, 20 s: here three times as much is let pass
    assert 35 < seconds < 65


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: say("one hundred"), "'hundred' came"),
        (lambda: say(" "), "an empty text"),
        (lambda: say("one", "shouting"), "known are: deep, calm"),
        (lambda: say("one", rate=44100), "16000 or 8000"),
        (lambda: in_words(100), "0 to 99"),
        (lambda: voices(1, -1), "0 or more"),
    ],
)
def test_what_cannot_be_said(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module).failed == 0
