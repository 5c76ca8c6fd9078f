"""Speech of a text: its segments, its waveform and its style."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from jumok.data.audio import Waveform
from jumok.data.tokenizers.speech_symbols import compose_hangul
from jumok.errors import InputError
from jumok.metrics.alignment_health import AlignmentHealth, measure_alignment_health
from jumok.tasks.base import Prediction

MAX_STYLE_WEIGHT = 10  # of a style token; the weights of a recording add up to 1
MAX_SKIPPED_FRACTION = 0.5  # of the symbols of a text; if more are skipped, there is a warning


@dataclass(frozen=True, eq=False)
class SpeechSegment:
    """Speech that was synthesized at once."""

    symbols: tuple[str, ...]  # the last one is the end symbol
    mel: NDArray[np.float32]  # (T, M)
    alignment: Tensor  # (steps, symbols)
    is_truncated: bool  # cut off at the length limit
    make_waveform: Callable[[], Waveform]  # computes the waveform, which takes a while

    @property
    def text(self) -> str:
        return compose_hangul("".join(self.symbols[:-1]))

    @functools.cached_property
    def waveform(self) -> Waveform:
        return self.make_waveform()

    @functools.cached_property
    def health(self) -> AlignmentHealth:
        return measure_alignment_health(self.alignment, has_end_symbol=True)


@dataclass(frozen=True, eq=False)
class SpeechPrediction(Prediction):
    """A text and its speech."""

    segments: tuple[SpeechSegment, ...] = ()
    waveform: Waveform = field(default_factory=lambda: np.zeros(0, np.float32))  # of all segments
    sample_rate: int = 16000
    head_style_weights: Tensor | None = None  # (1, H, N): weights of the style tokens, by head
    file: Path | None = None  # the file that it was written to
    unknown_characters: tuple[str, ...] = ()  # signs that were left out, except those of pauses

    @property
    def duration_seconds(self) -> float:
        return len(self.waveform) / self.sample_rate

    @property
    def style_weights(self) -> tuple[float, ...]:
        """The weights of the style tokens, averaged over heads."""
        return () if self.head_style_weights is None else tuple(self.head_style_weights[0].mean(0).tolist())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Also warn if most of the text was skipped."""
        num_skipped = sum(len(segment.health.skipped) for segment in self.segments)
        num_symbols = sum(len(segment.symbols) - 1 for segment in self.segments)
        if num_skipped <= MAX_SKIPPED_FRACTION * num_symbols:
            return super().warnings
        return (
            *super().warnings,
            f"{num_skipped} of {num_symbols} symbols were skipped, so it is unintelligible; is the voice "
            "trained enough, and do its recordings have this style?",
        )

    def format_lines(self, *, n_best: bool) -> Iterator[str]:
        """The file, a tab and the text."""
        yield f"{self.file}\t{self.input}"

    def to_dict(self, *, n_best: bool = False) -> dict[str, Any]:
        return {
            "file": None if self.file is None else str(self.file),
            "duration_seconds": round(self.duration_seconds, 4),
            "sample_rate": self.sample_rate,
            "finished": self.finished,
            "style_weights": [round(x, 4) for x in self.style_weights],
            "segments": [segment.text for segment in self.segments],
            "unknown_characters": list(self.unknown_characters),
            "diagonality": [round(segment.health.diagonality, 4) for segment in self.segments],
            "skipped_symbols": [x.symbols[i] for x in self.segments for i in x.health.skipped],
            "repeated_symbols": [x.symbols[i] for x in self.segments for i in x.health.repeated],
        }


def parse_style_weights(text: str, num_tokens: int) -> list[float]:
    """Parse weights of style tokens, which are numbered from 1. Tokens that are not listed have weight 0.

    >>> parse_style_weights("3=0.4, 1=-0.5", 4)
    [-0.5, 0.0, 0.4, 0.0]
    """
    weights = [0.0] * num_tokens
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            number, weight = int(name), float(value or 1.0)
        except ValueError:
            number, weight = 0, math.nan
        if not 1 <= number <= num_tokens or not abs(weight) <= MAX_STYLE_WEIGHT:
            raise InputError(
                f"--style-weights {text}: {item.strip()!r} is invalid; expected a token from 1 to {num_tokens} and its "
                f"weight from -{MAX_STYLE_WEIGHT} to {MAX_STYLE_WEIGHT}, as in 3=0.4,5=0.3"
            )
        if weights[number - 1]:
            raise InputError(f"--style-weights {text}: token {number} is given twice")
        weights[number - 1] = weight
    return weights


def split_sentence(text: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """Split a sentence into parts that fit, after a comma if there is one, else at a space.

    >>> list(split_sentence("one two, three four five", lambda part: len(part) < 15))
    ['one two,', 'three four', 'five']
    """
    words = [part for word in text.split() for part in _split_word(word, fits)]
    start = 0
    while start < len(words):
        end = start + 1
        while end < len(words) and fits(" ".join(words[start : end + 1])):
            end += 1
        if end < len(words):
            end = next((n for n in range(end, start, -1) if words[n - 1][-1] in ",;:-"), end)
        yield " ".join(words[start:end])
        start = end


def _split_word(word: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """Split a word that is too long anywhere."""
    if fits(word) or len(word) == 1:
        yield word
    else:
        yield from _split_word(word[: len(word) // 2], fits)
        yield from _split_word(word[len(word) // 2 :], fits)
