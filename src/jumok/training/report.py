"""What a validation finds, and what a whole training comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["BestValidation", "TrainingSummary", "ValidationReport"]


@dataclass(frozen=True)
class ValidationReport:
    """The outcome of one validation.

    >>> first = Report({"bleu": 0, "perplexity": 289}, best="bleu", tie="perplexity")
    >>> later = Report({"bleu": 0, "perplexity": 27}, best="bleu", tie="perplexity", samples=["a dog → Hund"])
    >>> later.value, later.beats(first.figures)
    (0.0, True)
    """

    metrics: dict[str, float]
    select_by: str  # the figure that decides which weights are best
    higher_is_better: bool = True
    tie_breaker: str | None = (
        None  # a loss, the lower the better, that decides where the first figure is equal
    )
    chance_level: float | None = None  # what is no better than this is by chance, and counts as equal to it
    samples: list[str] = field(default_factory=list)  # lines to read

    def __post_init__(self) -> None:
        if self.select_by not in self.metrics:
            raise ValueError(f"best={self.select_by!r} is not one of the figures: {', '.join(self.metrics)}")
        if self.tie_breaker is not None and self.tie_breaker not in self.metrics:
            raise ValueError(f"tie={self.tie_breaker!r} is not one of the figures: {', '.join(self.metrics)}")
        # Whatever kind of number a metric gives, it must go into JSON.
        object.__setattr__(self, "figures", {name: float(value) for name, value in self.metrics.items()})

    @property
    def value(self) -> float:
        return self.metrics[self.select_by]

    def is_better_than(self, previous: Mapping[str, float] | None) -> bool:
        """Whether this is better than the figures of before; what is not a number never is.

        A figure that was not known before is as one that was no number.
        """
        value, before = (
            self._to_comparable(self.value),
            self._to_comparable((previous or {}).get(self.select_by, math.nan)),
        )
        if value != before or self.tie_breaker is None or previous is None:
            return _is_greater(value, before)
        return _is_greater(-self.metrics[self.tie_breaker], -previous.get(self.tie_breaker, math.nan))

    def _to_comparable(self, value: float) -> float:
        """The higher, the better."""
        sign = 1 if self.higher_is_better else -1
        chance = -math.inf if self.chance_level is None else sign * self.chance_level
        return value if math.isnan(value) else max(sign * value, chance)


def _is_greater(value: float, previous: float) -> bool:
    """A number is more than none."""
    return value > previous or (math.isnan(previous) and not math.isnan(value))


@dataclass(frozen=True)
class BestValidation:
    """The best validation of a run, whose weights are in ``model.safetensors``."""

    step: int
    metric: str  # of the figure that decides
    value: float
    metrics: dict[str, float]
    num_averaged: int = 0  # the weights are the mean of so many; 0: those of this step


@dataclass(frozen=True)
class TrainingSummary:
    """The outcome of a training. The best weights are in the model, and in ``folder/model.safetensors``."""

    folder: Path
    num_steps: int
    num_epochs: int  # whole ones
    seconds: float  # of all sessions
    num_labels: int  # trained on
    stop_reason: str  # why it ended
    best: BestValidation | None  # None: nothing was validated, and the last weights were taken
    alarms: tuple[str, ...] = ()  # what is wrong with the attention, if anything is
