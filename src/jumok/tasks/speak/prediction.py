"""What a voice said, and what it was given to say: in parts, with a style."""

from __future__ import annotations

import functools
import json
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
from jumok.tasks.predictors import Prediction

__all__ = ["MAX_STYLE_WEIGHT", "SpeechPrediction", "SpeechSegment", "parse_style_weights", "split_sentence"]

MAX_STYLE_WEIGHT = 10  # of a style token; styles of recordings have 1 in all
MAX_SKIPPED_FRACTION = 0.5  # of the symbols of a text: if more are skipped, that is told


@dataclass(frozen=True, eq=False)
class SpeechSegment:
    """What was said in one go."""

    symbols: tuple[str, ...]  # the last is the end
    mel: NDArray[np.float32]  # (T, M)
    alignment: Tensor  # (steps, symbols)
    is_truncated: bool  # it would have gone on
    make_waveform: Callable[[], Waveform]  # makes the waveform, which takes a while

    @property
    def text(self) -> str:
        """As it was said."""
        return compose_hangul("".join(self.symbols[:-1]))

    @functools.cached_property
    def waveform(self) -> Waveform:
        return self.make_waveform()

    @functools.cached_property
    def health(self) -> AlignmentHealth:
        return measure_alignment_health(self.alignment, has_end_symbol=True)


@dataclass(frozen=True, eq=False)
class SpeechPrediction(Prediction):
    """A text and the sound of it."""

    segments: tuple[SpeechSegment, ...] = ()
    waveform: Waveform = field(default_factory=lambda: np.zeros(0, np.float32))  # of all pieces
    sample_rate: int = 16000
    head_style_weights: Tensor | None = None  # (1, H, N): how much of each style token is in it, by head
    file: Path | None = None  # where it was written
    unknown_characters: tuple[str, ...] = ()  # signs that the voice does not know, but for those of pauses

    @property
    def finished(self) -> bool:
        return not any(one.is_truncated for one in self.segments)

    @property
    def duration_seconds(self) -> float:
        return len(self.waveform) / self.sample_rate

    @property
    def style_weights(self) -> tuple[float, ...]:
        """How much of each style token is in it, in the mean of the heads."""
        return () if self.head_style_weights is None else tuple(self.head_style_weights[0].mean(0).tolist())

    @property
    def warning(self) -> str | None:
        """What to tell if most of the text cannot be heard in it."""
        skipped = sum(len(one.health.skipped) for one in self.segments)
        symbols = sum(len(one.symbols) - 1 for one in self.segments)
        if skipped <= MAX_SKIPPED_FRACTION * symbols:
            return None
        return (
            f"{skipped} of {symbols} symbols were skipped, so it cannot be understood; has the voice learned "
            "enough, and is the style one that its recordings have?"
        )

    def format_lines(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        """The file, a tab and the text."""
        if not as_json:
            yield f"{self.file}\t{self.input}"
            return
        health = [one.health for one in self.segments]
        known: dict[str, Any] = {"line": self.index, "text": self.input}
        known |= {
            "file": None if self.file is None else str(self.file),
            "duration_seconds": round(self.duration_seconds, 4),
        }
        known |= {
            "sample_rate": self.sample_rate,
            "finished": self.finished,
            "style_weights": [round(x, 4) for x in self.style_weights],
        }
        known["segments"] = [one.text for one in self.segments]
        known["unknown_characters"] = list(self.unknown_characters)
        known["diagonality"] = [round(one.diagonality, 4) for one in health]
        for name in ("skipped", "repeated"):
            known[f"{name}_symbols"] = [
                piece.symbols[at]
                for piece, one in zip(self.segments, health, strict=True)
                for at in getattr(one, name)
            ]
        yield json.dumps(known, ensure_ascii=False)


def parse_style_weights(text: str, num_tokens: int) -> list[float]:
    """The weights of so many style tokens, of which some are told: those that are not are 0.

    >>> parse_style_weights("3=0.4, 1=-0.5", 4)
    [-0.5, 0.0, 0.4, 0.0]
    """
    weights = [0.0] * num_tokens
    for one in text.split(","):
        name, _, told = one.partition("=")
        try:
            number, weight = int(name), float(told or 1.0)
        except ValueError:
            number, weight = 0, math.nan
        if not 1 <= number <= num_tokens or not abs(weight) <= MAX_STYLE_WEIGHT:
            raise InputError(
                f"--style-weights {text}: {one.strip()!r} came; expected a number from 1 to {num_tokens} and how much of "
                f"that token, from -{MAX_STYLE_WEIGHT} to {MAX_STYLE_WEIGHT}, as in 3=0.4,5=0.3"
            )
        if weights[number - 1]:
            raise InputError(f"--style-weights {text}: token {number} came twice")
        weights[number - 1] = weight
    return weights


def split_sentence(text: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """A sentence in parts that fit, cut behind a comma if there is one, else at a space.

    >>> list(split_sentence("one two, three four five", lambda part: len(part) < 15))
    ['one two,', 'three four', 'five']
    """
    words = [part for word in text.split() for part in _split_word(word, fits)]
    begin = 0
    while begin < len(words):
        end = begin + 1
        while end < len(words) and fits(" ".join(words[begin : end + 1])):
            end += 1
        if end < len(words):
            end = next((n for n in range(end, begin, -1) if words[n - 1][-1] in ",;:-"), end)
        yield " ".join(words[begin:end])
        begin = end


def _split_word(word: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """A word that is too long to be said in one go is none; it is broken anywhere."""
    if fits(word) or len(word) == 1:
        yield word
    else:
        yield from _split_word(word[: len(word) // 2], fits)
        yield from _split_word(word[len(word) // 2 :], fits)
