"""What a validation finds, and what a whole training comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Best", "Report", "Summary"]


@dataclass(frozen=True)
class Report:
    """The outcome of one validation.

    >>> first = Report({"bleu": 0, "perplexity": 289}, best="bleu", tie="perplexity")
    >>> later = Report({"bleu": 0, "perplexity": 27}, best="bleu", tie="perplexity", samples=["a dog → Hund"])
    >>> later.value, later.beats(first.figures)
    (0.0, True)
    """

    figures: dict[str, float]
    best: str  # the figure that decides which weights are best
    higher_is_better: bool = True
    tie: str | None = None  # a loss, the lower the better, that decides where the first figure is equal
    chance: float | None = None  # what is no better than this is by chance, and counts as equal to it
    samples: list[str] = field(default_factory=list)  # lines to read

    def __post_init__(self) -> None:
        if self.best not in self.figures:
            raise ValueError(f"best={self.best!r} is not one of the figures: {', '.join(self.figures)}")
        if self.tie is not None and self.tie not in self.figures:
            raise ValueError(f"tie={self.tie!r} is not one of the figures: {', '.join(self.figures)}")
        # Whatever kind of number a metric gives, it must go into JSON.
        object.__setattr__(self, "figures", {name: float(value) for name, value in self.figures.items()})

    @property
    def value(self) -> float:
        return self.figures[self.best]

    def beats(self, other: Mapping[str, float] | None) -> bool:
        """Whether this is better than the figures of before; what is not a number never is.

        A figure that was not known before is as one that was no number.
        """
        value, before = self._worth(self.value), self._worth((other or {}).get(self.best, math.nan))
        if value != before or self.tie is None or other is None:
            return _is_more(value, before)
        return _is_more(-self.figures[self.tie], -other.get(self.tie, math.nan))

    def _worth(self, value: float) -> float:
        """The higher, the better."""
        sign = 1 if self.higher_is_better else -1
        chance = -math.inf if self.chance is None else sign * self.chance
        return value if math.isnan(value) else max(sign * value, chance)


def _is_more(value: float, before: float) -> bool:
    """A number is more than none."""
    return value > before or (math.isnan(before) and not math.isnan(value))


@dataclass(frozen=True)
class Best:
    """The best validation of a run, whose weights are in ``model.safetensors``."""

    step: int
    name: str  # of the figure that decides
    value: float
    figures: dict[str, float]
    averaged: int = 0  # the weights are the mean of so many; 0: those of this step


@dataclass(frozen=True)
class Summary:
    """The outcome of a training. The best weights are in the model, and in ``folder/model.safetensors``."""

    folder: Path
    steps: int
    epochs: int  # whole ones
    seconds: float  # of all sessions
    labels: int  # trained on
    reason: str  # why it ended
    best: Best | None  # None: nothing was validated, and the last weights were taken
    alarms: tuple[str, ...] = ()  # what is wrong with the attention, if anything is
