"""Spoken numbers in a handful of styles, made on the spot from a seed: the built-in data set.

>>> for one in voices(seed=4, count=3):
...     print(one.text, one.style, round(one.pitch), round(one.seconds, 1))
fourteen hurried 200 0.6
twenty seven bright 276 1.0
twenty deep 88 0.8
>>> [round(begin, 1) for begin in one.begins]
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

from jumok.data.formants import PHONES, RATES, Segment, Throat, synthesised
from jumok.data.shapes import Chance
from jumok.data.spoken import read_out
from jumok.errors import InputError

__all__ = ["STYLES", "Style", "Utterance", "in_words", "say", "told", "voice", "voices"]

LEAD = 0.05  # seconds before the first sound


@dataclass(frozen=True)
class Style:
    """A way to speak: who, how fast (1 is usual), how loud (dB of full scale)."""

    throat: Throat
    speed: float
    level: float

    @property
    def pitch(self) -> float:
        return self.throat.pitch


# By pitch, from the lowest, each a third above the last; by speed it is calm, deep, plain, bright, hurried.
STYLES: dict[str, Style] = {
    "deep": Style(Throat(85, 0.08, 0.94, breath=0.05), 0.85, -24),
    "calm": Style(Throat(113, 0.05, 1.0, breath=0.5, tilt=0.5), 0.70, -30),
    "plain": Style(Throat(150, 0.12), 1.0, -24),
    "hurried": Style(Throat(200, 0.18, 1.05), 1.40, -21),
    "bright": Style(Throat(266, 0.24, 1.14), 1.18, -20),
}

# A word as letters and the sounds that they stand for, where those are called otherwise: letters/sounds.
STEMS = {
    "thir": "th ir/er",
    "four": "f ou/ao r",
    "for": "f o/ao r",
    "fif": "f i/ih f",
    "six": "s i/ih x/k+s",
    "seven": "s e/eh v e/ax n",
    "eigh": "eigh/ey",
    "nine": "n i/ay ne/n",
}
WORDS = {
    "zero": "z e/ih r o/ow",
    "one": "o/w+ah ne/n",
    "two": "t wo/uw",
    "three": "th r ee/iy",
    "four": STEMS["four"],
    "five": "f i/ay ve/v",
    "six": STEMS["six"],
    "seven": STEMS["seven"],
    "eight": STEMS["eigh"] + " t",
    "nine": STEMS["nine"],
    "ten": "t e/eh n",
    "eleven": "e/ih l e/eh v e/ax n",
    "twelve": "t w e/eh l ve/v",
    "twenty": "t w e/eh n t y/iy",
    **{f"{stem}teen": f"{STEMS[stem]} t ee/iy n" for stem in STEMS if stem != "for"},
    **{f"{stem}ty": f"{STEMS[stem]} t y/iy" for stem in STEMS if stem != "four"},
}


@dataclass(frozen=True, eq=False)
class Utterance:
    """A text as it was said, and all that is known of it."""

    wave: NDArray[np.float32]  # (samples,)
    rate: int  # samples a second
    text: str
    style: str
    pitch: float  # Hz, the mean of the voice by its logarithm
    speed: float  # 1 is usual, 2 is twice as fast
    begins: tuple[float, ...]  # seconds, when each character of the text begins to sound
    end: float  # when the last one ends

    @property
    def seconds(self) -> float:
        return len(self.wave) / self.rate

    def sounding(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """The number of the character that sounds at each time, in seconds; behind the last, one more.

        So it is the number of the symbol that a model should look at: ``</s>`` when all has been said.
        """
        found = np.searchsorted([*self.begins, self.end], times, side="right") - 1
        return np.maximum(found, 0).astype(np.int64)


def in_words(number: int) -> str:
    """A number below a hundred.

    >>> in_words(42)
    'forty two'
    """
    if not 0 <= number < 100:
        raise InputError(f"{number} came; voices know the numbers from 0 to 99")
    return read_out(str(number), "en")


def voices(seed: int, count: int, rate: int = 16000) -> Iterator[Utterance]:
    """``count`` utterances, one by one."""
    if count < 0:
        raise InputError(f"count is {count}; it is a number of utterances, 0 or more")
    return (voice(seed, number, rate) for number in range(count))


def voice(seed: int, number: int, rate: int = 16000) -> Utterance:
    """The utterance of this number, which depends on no other: what is said, and how, is up to chance."""
    chance = _chance(f"{seed} {number}")
    return _said(*_chosen(chance), rate, chance)


def told(seed: int, number: int) -> tuple[str, str]:
    """The text and the style of that utterance, without a sound."""
    return _chosen(_chance(f"{seed} {number}"))


def _chosen(chance: Chance) -> tuple[str, str]:
    return in_words(chance.pick(range(100))), chance.pick(tuple(STYLES))


def say(text: str, style: str = "plain", *, seed: int = 0, rate: int = 16000) -> Utterance:
    """Numbers in words, in one of the styles: "forty two", or several of them.

    The seed decides the little that is up to chance: how far pitch and speed are off the style's, and noise.
    """
    return _said(" ".join(text.lower().split()), style, rate, _chance(f"say {seed} {text} {style}"))


def _chance(told: str) -> Chance:
    """Of a digest, so that neighbouring seeds have nothing in common."""
    return Chance(int.from_bytes(hashlib.sha256(told.encode()).digest()[:16], "big"))


def _said(text: str, style: str, rate: int, chance: Chance) -> Utterance:
    if style not in STYLES:
        raise InputError(f"style {style!r} came; known are: {', '.join(STYLES)}")
    if rate not in RATES:
        raise InputError(f"rate {rate} came; voices speak at {' or '.join(map(str, RATES))} samples a second")
    manner = STYLES[style]
    pitch = manner.pitch * chance.number(0.96, 1.04)
    speed = manner.speed * chance.number(0.95, 1.05)
    stretch = manner.throat.stretch * chance.number(0.985, 1.015)
    segments, owners = _segments(text)
    lasts = np.array([one.seconds for one in segments]) / speed
    lasts *= chance.numbers(0.92, 1.08, lasts.shape)
    lasts[_last_vowel(segments)] *= 1.25
    begins = LEAD + np.concatenate([[0.0], np.cumsum(lasts)])
    throat = replace(manner.throat, pitch=pitch, stretch=stretch)
    wave = synthesised(segments, begins, throat, rate, chance)
    loud = 10 ** (manner.level / 20) / np.sqrt(np.mean(wave**2))
    wave = wave * min(loud, 0.99 / np.abs(wave).max())
    return Utterance(
        wave.astype(np.float32),
        rate,
        text,
        style,
        pitch,
        speed,
        _character_times(owners, begins),
        float(begins[-1]),
    )


def _segments(text: str) -> tuple[list[Segment], list[tuple[int, int]]]:
    """The sounds of a text; and for its groups of letters: how many letters, how many sounds."""
    segments: list[Segment] = []
    owners: list[tuple[int, int]] = []
    for number, word in enumerate(text.split()):
        if word not in WORDS:
            raise InputError(f"{word!r} came; voices know the numbers from zero to ninety nine, in words")
        groups = [*([" / "] if number else []), *WORDS[word].split()]
        for group in groups:
            letters, slash, sounds = group.partition("/") if group != " / " else (" ", "/", " ")
            found = [one for phone in (sounds if slash else letters).split("+") for one in PHONES[phone]]
            owners.append((len(letters), len(found)))
            segments += found
    if not segments:
        raise InputError("an empty text came; voices know the numbers from zero to ninety nine, in words")
    return segments, owners


def _last_vowel(segments: list[Segment]) -> int:
    """What is drawn out at the end of an utterance."""
    return max(number for number, one in enumerate(segments) if one.voice >= 0.7)


def _character_times(owners: list[tuple[int, int]], begins: NDArray[np.float64]) -> tuple[float, ...]:
    """When each character begins; letters that share sounds share their time evenly."""
    found: list[float] = []
    place = 0
    for letters, sounds in owners:
        begin, end = begins[place], begins[place + sounds]
        found += (begin + (end - begin) * np.arange(letters) / letters).tolist()
        place += sounds
    return tuple(found)
