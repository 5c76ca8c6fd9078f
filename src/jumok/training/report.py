"""Results of a validation and of a whole training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ValidationReport:
    """Metrics and sample outputs of one validation.

    >>> rule = {"select_by": "bleu", "tie_breaker": "perplexity"}
    >>> first = ValidationReport({"bleu": 0, "perplexity": 289}, **rule)
    >>> later = ValidationReport({"bleu": 0, "perplexity": 27}, **rule, samples=["a dog → Hund"])
    >>> later.value, later.is_better_than(first.metrics)
    (0.0, True)
    """

    metrics: dict[str, float]
    select_by: str  # the metric that selects the best weights
    higher_is_better: bool = True
    tie_breaker: str | None = None  # a metric, lower is better, that decides between equal values
    chance_level: float | None = None  # values that are no better than chance count as equal
    samples: list[str] = field(default_factory=list)  # lines of text to display

    def __post_init__(self) -> None:
        if self.select_by not in self.metrics:
            raise ValueError(f"select_by={self.select_by!r} is not one of the metrics: {', '.join(self.metrics)}")
        if self.tie_breaker is not None and self.tie_breaker not in self.metrics:
            raise ValueError(f"tie_breaker={self.tie_breaker!r} is not one of the metrics: {', '.join(self.metrics)}")
        # Metrics are written as JSON, so NumPy numbers and tensors become floats.
        object.__setattr__(self, "metrics", {name: float(value) for name, value in self.metrics.items()})

    @property
    def value(self) -> float:
        """The value of the metric that selects the best weights."""
        return self.metrics[self.select_by]

    def is_better_than(self, previous: Mapping[str, float] | None) -> bool:
        """Whether this validation is better than one with the metrics ``previous``.

        NaN is never better. A metric that is missing in ``previous`` counts as NaN.
        """
        value = self._to_comparable(self.value)
        previous_value = self._to_comparable((previous or {}).get(self.select_by, math.nan))
        if value != previous_value or self.tie_breaker is None or previous is None:
            return _is_greater(value, previous_value)
        return _is_greater(-self.metrics[self.tie_breaker], -previous.get(self.tie_breaker, math.nan))

    def _to_comparable(self, value: float) -> float:
        """Map a value to a scale where higher is better and all values below chance are equal."""
        sign = 1 if self.higher_is_better else -1
        lowest = -math.inf if self.chance_level is None else sign * self.chance_level
        return value if math.isnan(value) else max(sign * value, lowest)


def _is_greater(value: float, previous: float) -> bool:
    """Compare two values. Every number is greater than NaN."""
    return value > previous or (math.isnan(previous) and not math.isnan(value))


@dataclass(frozen=True)
class BestValidation:
    """The best validation of a run, whose weights are in ``model.safetensors``."""

    step: int
    metric: str  # name of the metric that selects the best weights
    value: float
    metrics: dict[str, float]
    num_averaged: int = 0  # number of averaged checkpoints; 0: the weights of this step


@dataclass(frozen=True)
class TrainingSummary:
    """Result of a training. The model and ``folder/model.safetensors`` hold the best weights."""

    folder: Path
    num_steps: int
    num_epochs: int  # complete epochs
    seconds: float  # total over all sessions
    num_labels: int  # number of labels trained on
    stop_reason: str
    best: BestValidation | None  # None: there was no validation, and the last weights are used
    alarms: tuple[str, ...] = ()  # problems found in the attention
