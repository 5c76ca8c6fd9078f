"""Losses that are not finite, or grow far beyond what they were: found out, and told with what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jumok.errors import JumokError
from jumok.training.settings import Settings

__all__ = ["Diverged", "Trend"]

LASTING = 50  # steps in a row that a loss must be too high, to be more than a bad patch
MEMORY = 100  # steps that the usual loss is averaged over, about
SHOWN = 8  # losses and examples in a message


class Diverged(JumokError):
    """Training came to a loss that is not finite, or that exploded. What was saved before is still there."""

    def __init__(self, message: str, step: int, examples: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.examples = tuple(examples)


@dataclass
class Trend:
    """How the losses went, step by step; a part of a run's state."""

    first: float | None = None
    usual: float = 0.0  # the running average of losses that were not too high
    high: int = 0  # steps in a row whose loss was too high
    last: list[float] = field(default_factory=list)

    def add(self, loss: float, norm: float, factor: float) -> str | None:
        """Take in one step's loss and gradient norm. What is wrong, in words; None: nothing.

        Too high is a loss of over ``factor`` times the usual one that is also above the very first: a model
        that does worse than untrained, not one whose tiny loss became a little less tiny.
        """
        if not math.isfinite(loss) or not math.isfinite(norm):
            return f"the loss or its gradient is not finite: loss {loss:.4g}, gradient norm {norm:.4g}"
        if self.first is None:
            self.first = self.usual = loss
        self.last = [*self.last[1 - SHOWN :], loss]
        if factor and loss > self.first and loss > self.usual + (factor - 1) * abs(self.usual):
            self.high += 1
            if self.high >= LASTING:
                return (
                    f"the loss exploded: {loss:.4g}, and for {LASTING} steps over {factor:g} times "
                    f"the {self.usual:.4g} that was usual"
                )
        else:
            self.high = 0
            self.usual += (loss - self.usual) / MEMORY
        return None


def told(fault: str, step: int, trend: Trend, examples: Sequence[int], settings: Settings, kept: str) -> str:
    """The whole message: what happened, where, what is kept, and what to try."""
    lines = [f"step {step}: {fault}."]
    if trend.last:
        lines.append(f"The losses before: {', '.join(f'{loss:.4g}' for loss in trend.last)}.")
    if examples:
        shown = ", ".join(map(str, examples[:SHOWN])) + (", …" if len(examples) > SHOWN else "")
        lines.append(f"The batch had {len(examples)} examples, with the numbers {shown}.")
    advice = [f"learning_rate={settings.learning_rate / 3:.1g}"]
    if settings.warmup < 4000:
        advice.append(f"warmup={max(500, 2 * settings.warmup)}")
    if not settings.clip:
        advice.append("clip=1.0")
    if settings.precision != "float32":
        advice.append("precision=float32")
    lines += [kept, f"What may help, in a new run: {', '.join(advice)}; and a look at these examples."]
    return "\n".join(lines)
