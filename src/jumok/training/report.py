"""What a validation finds, and what a whole training comes to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Best", "Report", "Summary"]


@dataclass(frozen=True)
class Report:
    """The outcome of one validation.

    >>> Report({"bleu": 31.2, "perplexity": 8.4}, best="bleu", samples=["a dog → ein Hund"]).value
    31.2
    """

    figures: dict[str, float]
    best: str  # the figure that decides which weights are best
    higher_is_better: bool = True
    samples: list[str] = field(default_factory=list)  # lines to read

    def __post_init__(self) -> None:
        if self.best not in self.figures:
            raise ValueError(f"best={self.best!r} is not one of the figures: {', '.join(self.figures)}")
        # Whatever kind of number a metric gives, it must go into JSON.
        object.__setattr__(self, "figures", {name: float(value) for name, value in self.figures.items()})

    @property
    def value(self) -> float:
        return self.figures[self.best]

    def beats(self, other: float | None) -> bool:
        """Whether this is better than a value of before; what is not a number never is."""
        if math.isnan(self.value):
            return False
        if other is None or math.isnan(other):
            return True
        return self.value > other if self.higher_is_better else self.value < other


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
