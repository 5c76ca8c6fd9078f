"""Spoken numbers in a handful of styles, made on the spot from a seed: the built-in data set.

>>> for utterance in synthesize_utterances(seed=4, count=3):
...     print(utterance.text, utterance.style, round(utterance.pitch), round(utterance.seconds, 1))
fourteen hurried 200 0.6
twenty seven bright 276 1.0
twenty deep 88 0.8
>>> [round(time, 1) for time in utterance.start_times]
[0.1, 0.2, 0.2, 0.4, 0.5, 0.6]

A style has a pitch and a rate of its own, so that what a model learned of styles can be scored; no style's
order in pitch tells its order in rate. It is known when every character of the text begins to sound, so that
an alignment can be scored as well. The same seed gives the same numbers, styles and samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jumok.data.builtin.formant_synthesizer import (
    PHONES,
    SAMPLE_RATES,
    PhoneSegment,
    VoiceParameters,
    synthesize,
)
from jumok.data.builtin.shapes import PortableGenerator
from jumok.data.tokenizers.speech_symbols import expand_numbers
from jumok.errors import InputError

__all__ = [
    "STYLES",
    "SpeakingStyle",
    "SyntheticUtterance",
    "choose_text_and_style",
    "number_to_words",
    "synthesize_text",
    "synthesize_utterance",
    "synthesize_utterances",
]

LEAD_SECONDS = 0.05  # seconds before the first sound


@dataclass(frozen=True)
class SpeakingStyle:
    """A way to speak: who, how fast (1 is usual), how loud (dB of full scale)."""

    voice: VoiceParameters
    speed: float
    level_db: float

    @property
    def pitch(self) -> float:
        return self.voice.pitch


# By pitch, from the lowest, each a third above the last; by speed it is calm, deep, plain, bright, hurried.
STYLES: dict[str, SpeakingStyle] = {
    "deep": SpeakingStyle(VoiceParameters(85, 0.08, 0.94, breath=0.05), 0.85, -24),
    "calm": SpeakingStyle(VoiceParameters(113, 0.05, 1.0, breath=0.5, tilt=0.5), 0.70, -30),
    "plain": SpeakingStyle(VoiceParameters(150, 0.12), 1.0, -24),
    "hurried": SpeakingStyle(VoiceParameters(200, 0.18, 1.05), 1.40, -21),
    "bright": SpeakingStyle(VoiceParameters(266, 0.24, 1.14), 1.18, -20),
}

# A word as letters and the sounds that they stand for, where those are called otherwise: letters/sounds.
STEM_PRONUNCIATIONS = {
    "thir": "th ir/er",
    "four": "f ou/ao r",
    "for": "f o/ao r",
    "fif": "f i/ih f",
    "six": "s i/ih x/k+s",
    "seven": "s e/eh v e/ax n",
    "eigh": "eigh/ey",
    "nine": "n i/ay ne/n",
}
PRONUNCIATIONS = {
    "zero": "z e/ih r o/ow",
    "one": "o/w+ah ne/n",
    "two": "t wo/uw",
    "three": "th r ee/iy",
    "four": STEM_PRONUNCIATIONS["four"],
    "five": "f i/ay ve/v",
    "six": STEM_PRONUNCIATIONS["six"],
    "seven": STEM_PRONUNCIATIONS["seven"],
    "eight": STEM_PRONUNCIATIONS["eigh"] + " t",
    "nine": STEM_PRONUNCIATIONS["nine"],
    "ten": "t e/eh n",
    "eleven": "e/ih l e/eh v e/ax n",
    "twelve": "t w e/eh l ve/v",
    "twenty": "t w e/eh n t y/iy",
    **{
        f"{stem}teen": f"{STEM_PRONUNCIATIONS[stem]} t ee/iy n"
        for stem in STEM_PRONUNCIATIONS
        if stem != "for"
    },
    **{f"{stem}ty": f"{STEM_PRONUNCIATIONS[stem]} t y/iy" for stem in STEM_PRONUNCIATIONS if stem != "four"},
}


@dataclass(frozen=True, eq=False)
class SyntheticUtterance:
    """A text as it was said, and all that is known of it."""

    waveform: NDArray[np.float32]  # (samples,)
    sample_rate: int  # samples a second
    text: str
    style: str
    pitch: float  # Hz, the mean of the voice by its logarithm
    speed: float  # 1 is usual, 2 is twice as fast
    start_times: tuple[float, ...]  # seconds, when each character of the text begins to sound
    end_time: float  # when the last one ends

    @property
    def seconds(self) -> float:
        return len(self.waveform) / self.sample_rate

    def character_indices(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """The number of the character that sounds at each time, in seconds; behind the last, one more.

        So it is the number of the symbol that a model should look at: ``</s>`` when all has been said.
        """
        found = np.searchsorted([*self.start_times, self.end_time], times, side="right") - 1
        return np.maximum(found, 0).astype(np.int64)


def number_to_words(number: int) -> str:
    """A number below a hundred.

    >>> number_to_words(42)
    'forty two'
    """
    if not 0 <= number < 100:
        raise InputError(f"{number} came; voices know the numbers from 0 to 99")
    return expand_numbers(str(number), "en")


def synthesize_utterances(seed: int, count: int, sample_rate: int = 16000) -> Iterator[SyntheticUtterance]:
    """``count`` utterances, one by one."""
    if count < 0:
        raise InputError(f"count is {count}; it is a number of utterances, 0 or more")
    return (synthesize_utterance(seed, number, sample_rate) for number in range(count))


def synthesize_utterance(seed: int, index: int, sample_rate: int = 16000) -> SyntheticUtterance:
    """The utterance of this number, which depends on no other: what is said, and how, is up to chance."""
    chance = _make_generator(f"{seed} {index}")
    return _synthesize(*_draw_text_and_style(chance), sample_rate, chance)


def choose_text_and_style(seed: int, index: int) -> tuple[str, str]:
    """The text and the style of that utterance, without a sound."""
    return _draw_text_and_style(_make_generator(f"{seed} {index}"))


def _draw_text_and_style(rng: PortableGenerator) -> tuple[str, str]:
    return number_to_words(rng.choice(range(100))), rng.choice(tuple(STYLES))


def synthesize_text(
    text: str, style: str = "plain", *, seed: int = 0, sample_rate: int = 16000
) -> SyntheticUtterance:
    """Numbers in words, in one of the styles: "forty two", or several of them.

    The seed decides the little that is up to chance: how far pitch and speed are off the style's, and noise.
    """
    return _synthesize(
        " ".join(text.lower().split()), style, sample_rate, _make_generator(f"say {seed} {text} {style}")
    )


def _make_generator(key: str) -> PortableGenerator:
    """Of a digest, so that neighbouring seeds have nothing in common."""
    return PortableGenerator(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big"))


def _synthesize(text: str, style: str, sample_rate: int, rng: PortableGenerator) -> SyntheticUtterance:
    if style not in STYLES:
        raise InputError(f"style {style!r} came; known are: {', '.join(STYLES)}")
    if sample_rate not in SAMPLE_RATES:
        raise InputError(
            f"rate {sample_rate} came; voices speak at {' or '.join(map(str, SAMPLE_RATES))} samples a second"
        )
    manner = STYLES[style]
    pitch = manner.pitch * rng.uniform(0.96, 1.04)
    speed = manner.speed * rng.uniform(0.95, 1.05)
    stretch = manner.voice.formant_scale * rng.uniform(0.985, 1.015)
    segments, owners = _find_segments(text)
    lasts = np.array([one.seconds for one in segments]) / speed
    lasts *= rng.uniform_array(0.92, 1.08, lasts.shape)
    lasts[_find_last_vowel(segments)] *= 1.25
    begins = LEAD_SECONDS + np.concatenate([[0.0], np.cumsum(lasts)])
    throat = replace(manner.voice, pitch=pitch, formant_scale=stretch)
    wave = synthesize(segments, begins, throat, sample_rate, rng)
    loud = 10 ** (manner.level_db / 20) / np.sqrt(np.mean(wave**2))
    wave = wave * min(loud, 0.99 / np.abs(wave).max())
    return SyntheticUtterance(
        wave.astype(np.float32),
        sample_rate,
        text,
        style,
        pitch,
        speed,
        _compute_character_times(owners, begins),
        float(begins[-1]),
    )


def _find_segments(text: str) -> tuple[list[PhoneSegment], list[tuple[int, int]]]:
    """The sounds of a text; and for its groups of letters: how many letters, how many sounds."""
    segments: list[PhoneSegment] = []
    owners: list[tuple[int, int]] = []
    for number, word in enumerate(text.split()):
        if word not in PRONUNCIATIONS:
            raise InputError(f"{word!r} came; voices know the numbers from zero to ninety nine, in words")
        groups = [*([" / "] if number else []), *PRONUNCIATIONS[word].split()]
        for group in groups:
            letters, slash, sounds = group.partition("/") if group != " / " else (" ", "/", " ")
            found = [one for phone in (sounds if slash else letters).split("+") for one in PHONES[phone]]
            owners.append((len(letters), len(found)))
            segments += found
    if not segments:
        raise InputError("an empty text came; voices know the numbers from zero to ninety nine, in words")
    return segments, owners


def _find_last_vowel(segments: list[PhoneSegment]) -> int:
    """What is drawn out at the end of an utterance."""
    return max(number for number, one in enumerate(segments) if one.voice >= 0.7)


def _compute_character_times(
    groups: list[tuple[int, int]], segment_starts: NDArray[np.float64]
) -> tuple[float, ...]:
    """When each character begins; letters that share sounds share their time evenly."""
    found: list[float] = []
    place = 0
    for letters, sounds in groups:
        begin, end = segment_starts[place], segment_starts[place + sounds]
        found += (begin + (end - begin) * np.arange(letters) / letters).tolist()
        place += sounds
    return tuple(found)
