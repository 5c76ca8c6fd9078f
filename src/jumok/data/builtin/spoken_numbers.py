"""Synthesized number words in several styles, generated from a seed: the built-in speech data set.

>>> for index in range(3):
...     utterance = synthesize_utterance(seed=4, index=index)
...     print(utterance.text, utterance.style, round(utterance.pitch), round(utterance.seconds, 1))
fourteen hurried 200 0.6
twenty seven bright 276 1.0
twenty deep 88 0.8
>>> [round(time, 1) for time in utterance.start_times]
[0.1, 0.2, 0.2, 0.4, 0.5, 0.6]

Each style has its own pitch and speed, which are not correlated, so that the styles of a model can be scored.
The start time of every character is known, so that alignments can be scored. The same seed gives the same
numbers, styles and samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jumok.data.builtin.formant_synthesizer import PHONES, SAMPLE_RATES, PhoneSegment, VoiceParameters, synthesize
from jumok.data.builtin.shapes import PortableGenerator
from jumok.data.tokenizers.speech_symbols import expand_numbers
from jumok.errors import InputError

LEAD_SECONDS = 0.05  # silence before the first sound


@dataclass(frozen=True)
class SpeakingStyle:
    """A speaking style: the voice, the speed (1 is normal), and the level in dB of full scale."""

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
    **{f"{stem}teen": f"{STEM_PRONUNCIATIONS[stem]} t ee/iy n" for stem in STEM_PRONUNCIATIONS if stem != "for"},
    **{f"{stem}ty": f"{STEM_PRONUNCIATIONS[stem]} t y/iy" for stem in STEM_PRONUNCIATIONS if stem != "four"},
}


@dataclass(frozen=True, eq=False)
class SyntheticUtterance:
    """A synthesized text, with its true style and timing."""

    waveform: NDArray[np.float32]  # (samples,)
    sample_rate: int  # samples per second
    text: str
    style: str
    pitch: float  # Hz, geometric mean
    speed: float  # 1 is normal, 2 is twice as fast
    start_times: tuple[float, ...]  # of each character of the text, in seconds
    end_time: float  # of the last character

    @property
    def seconds(self) -> float:
        return len(self.waveform) / self.sample_rate

    def character_indices(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """The index of the character spoken at each time, in seconds; afterwards, the index of ``</s>``.

        This is the index of the symbol that a model should attend to.
        """
        indices = np.searchsorted([*self.start_times, self.end_time], times, side="right") - 1
        return np.maximum(indices, 0).astype(np.int64)


def number_to_words(number: int) -> str:
    """The words of a number below 100.

    >>> number_to_words(42)
    'forty two'
    """
    if not 0 <= number < 100:
        raise InputError(f"number={number}: expected 0 to 99")
    return expand_numbers(str(number), "en")


def synthesize_utterance(seed: int, index: int, sample_rate: int = 16000) -> SyntheticUtterance:
    """Synthesize the utterance with this index, with a random text and style."""
    rng = PortableGenerator.from_key(f"{seed} {index}")
    return _synthesize(*_draw_text_and_style(rng), sample_rate, rng)


def choose_text_and_style(seed: int, index: int) -> tuple[str, str]:
    """The text and the style of the utterance with this index, without synthesizing it."""
    return _draw_text_and_style(PortableGenerator.from_key(f"{seed} {index}"))


def _draw_text_and_style(rng: PortableGenerator) -> tuple[str, str]:
    return number_to_words(rng.choice(range(100))), rng.choice(tuple(STYLES))


def synthesize_text(text: str, style: str = "plain", *, seed: int = 0, sample_rate: int = 16000) -> SyntheticUtterance:
    """Synthesize number words ("forty two", or several numbers) in one of the styles.

    The seed determines the random variation of pitch and speed, and the noise.
    """
    return _synthesize(
        " ".join(text.lower().split()), style, sample_rate, PortableGenerator.from_key(f"say {seed} {text} {style}")
    )


def _synthesize(text: str, style: str, sample_rate: int, rng: PortableGenerator) -> SyntheticUtterance:
    if style not in STYLES:
        raise InputError(f"style={style!r}: expected one of {', '.join(STYLES)}")
    if sample_rate not in SAMPLE_RATES:
        raise InputError(
            f"sample_rate={sample_rate}: expected {' or '.join(map(str, SAMPLE_RATES))} samples per second"
        )
    speaking_style = STYLES[style]
    pitch = speaking_style.pitch * rng.uniform(0.96, 1.04)
    speed = speaking_style.speed * rng.uniform(0.95, 1.05)
    formant_scale = speaking_style.voice.formant_scale * rng.uniform(0.985, 1.015)
    segments, groups = _find_segments(text)
    durations = np.array([segment.seconds for segment in segments]) / speed
    durations *= rng.uniform_array(0.92, 1.08, durations.shape)
    last_vowel = max(index for index, segment in enumerate(segments) if segment.voice >= 0.7)
    durations[last_vowel] *= 1.25  # it is lengthened at the end of an utterance
    starts = LEAD_SECONDS + np.concatenate([[0.0], np.cumsum(durations)])
    voice = replace(speaking_style.voice, pitch=pitch, formant_scale=formant_scale)
    waveform = synthesize(segments, starts, voice, sample_rate, rng)
    gain = 10 ** (speaking_style.level_db / 20) / np.sqrt(np.mean(waveform**2))
    waveform = waveform * min(gain, 0.99 / np.abs(waveform).max())
    return SyntheticUtterance(
        waveform.astype(np.float32),
        sample_rate,
        text,
        style,
        pitch,
        speed,
        _compute_character_times(groups, starts),
        float(starts[-1]),
    )


def _find_segments(text: str) -> tuple[list[PhoneSegment], list[tuple[int, int]]]:
    """The segments of a text, and the numbers of letters and segments of each group of letters."""
    segments: list[PhoneSegment] = []
    groups: list[tuple[int, int]] = []
    for word_index, word in enumerate(text.split()):
        if word not in PRONUNCIATIONS:
            raise InputError(f"the text contains {word!r}; expected number words from zero to ninety nine")
        letter_groups = [group.partition("/") for group in PRONUNCIATIONS[word].split()]
        for letters, _, phones in [(" ", "/", " "), *letter_groups] if word_index else letter_groups:
            phone_segments = [segment for phone in (phones or letters).split("+") for segment in PHONES[phone]]
            groups.append((len(letters), len(phone_segments)))
            segments += phone_segments
    if not segments:
        raise InputError("the text is empty; expected number words from zero to ninety nine")
    return segments, groups


def _compute_character_times(groups: list[tuple[int, int]], segment_starts: NDArray[np.float64]) -> tuple[float, ...]:
    """The start time of each character. Letters of the same group share its time evenly."""
    times: list[float] = []
    segment = 0
    for num_letters, num_segments in groups:
        start, end = segment_starts[segment], segment_starts[segment + num_segments]
        times += (start + (end - start) * np.arange(num_letters) / num_letters).tolist()
        segment += num_segments
    return tuple(times)
