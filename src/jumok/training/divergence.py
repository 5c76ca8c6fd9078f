"""Losses that are not finite, or grow far beyond what they were: found out, and told with what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jumok.errors import JumokError
from jumok.training.config import TrainConfig

__all__ = ["DivergenceError", "LossTrend"]

MAX_HIGH_STEPS = 50  # steps in a row that a loss must be too high, to be more than a bad patch
AVERAGING_STEPS = 100  # steps that the usual loss is averaged over, about
MAX_SHOWN = 8  # losses and examples in a message


class DivergenceError(JumokError):
    """Training came to a loss that is not finite, or that exploded. What was saved before is still there."""

    def __init__(self, message: str, step: int, examples: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.examples = tuple(examples)


@dataclass
class LossTrend:
    """How the losses went, step by step; a part of a run's state."""

    first_loss: float | None = None
    running_mean: float = 0.0  # the running average of losses that were not too high
    num_high_steps: int = 0  # steps in a row whose loss was too high
    recent_losses: list[float] = field(default_factory=list)

    def update(self, loss: float, gradient_norm: float, divergence_factor: float) -> str | None:
        """Take in one step's loss and gradient norm. What is wrong, in words; None: nothing.

        Too high is a loss of over ``divergence_factor`` times the usual one that is also above the very first: a model
        that does worse than untrained, not one whose tiny loss became a little less tiny.
        """
        if not math.isfinite(loss) or not math.isfinite(gradient_norm):
            return (
                f"the loss or its gradient is not finite: loss {loss:.4g}, gradient norm {gradient_norm:.4g}"
            )
        if self.first_loss is None:
            self.first_loss = self.running_mean = loss
        self.recent_losses = [*self.recent_losses[1 - MAX_SHOWN :], loss]
        if (
            divergence_factor
            and loss > self.first_loss
            and loss > self.running_mean + (divergence_factor - 1) * abs(self.running_mean)
        ):
            self.num_high_steps += 1
            if self.num_high_steps >= MAX_HIGH_STEPS:
                return (
                    f"the loss exploded: {loss:.4g}, and for {MAX_HIGH_STEPS} steps over {divergence_factor:g} times "
                    f"the {self.running_mean:.4g} that was usual"
                )
        else:
            self.num_high_steps = 0
            self.running_mean += (loss - self.running_mean) / AVERAGING_STEPS
        return None


def format_divergence(
    problem: str,
    step: int,
    trend: LossTrend,
    examples: Sequence[int],
    config: TrainConfig,
    checkpoint_message: str,
) -> str:
    """The whole message: what happened, where, what is kept, and what to try."""
    lines = [f"step {step}: {problem}."]
    if trend.recent_losses:
        lines.append(f"The losses before: {', '.join(f'{loss:.4g}' for loss in trend.recent_losses)}.")
    if examples:
        shown = ", ".join(map(str, examples[:MAX_SHOWN])) + (", …" if len(examples) > MAX_SHOWN else "")
        lines.append(f"The batch had {len(examples)} examples, with the numbers {shown}.")
    advice = [f"learning_rate={config.learning_rate / 3:.1g}"]
    if config.warmup_steps < 4000:
        advice.append(f"warmup={max(500, 2 * config.warmup_steps)}")
    if not config.max_grad_norm:
        advice.append("clip=1.0")
    if config.precision != "float32":
        advice.append("precision=float32")
    lines += [
        checkpoint_message,
        f"What may help, in a new run: {', '.join(advice)}; and a look at these examples.",
    ]
    return "\n".join(lines)
