"""Detection of losses that are not finite or that explode, with advice in the error message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jumok.errors import JumokError
from jumok.training.config import TrainConfig

MAX_HIGH_STEPS = 50  # consecutive steps with a high loss that count as divergence
AVERAGING_STEPS = 100  # time constant of the running mean of the loss
MAX_SHOWN = 8  # losses and examples in the error message


class DivergenceError(JumokError):
    """The loss is not finite, or it exploded. Earlier checkpoints are kept."""

    def __init__(self, message: str, step: int, examples: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.examples = tuple(examples)


@dataclass
class LossTrend:
    """Running statistics of the loss. They are a part of the training state."""

    first_loss: float | None = None
    running_mean: float = 0.0  # running mean of the losses that were not too high
    num_high_steps: int = 0  # consecutive steps with a high loss
    recent_losses: list[float] = field(default_factory=list)

    def update(self, loss: float, gradient_norm: float, divergence_factor: float) -> str | None:
        """Record the loss and gradient norm of one step. Returns a description of the problem, or None.

        A loss is too high if it exceeds ``divergence_factor`` times the running mean and also the loss of the
        first step: such a model is worse than an untrained one.
        """
        if not math.isfinite(loss) or not math.isfinite(gradient_norm):
            return f"the loss or its gradient is not finite: loss {loss:.4g}, gradient norm {gradient_norm:.4g}"
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
                    f"the loss exploded: it is {loss:.4g}, and for {MAX_HIGH_STEPS} steps it was over "
                    f"{divergence_factor:g} times its mean of {self.running_mean:.4g}"
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
    """Return the error message: the problem, the step and its examples, the checkpoint, and advice."""
    lines = [f"step {step}: {problem}."]
    if trend.recent_losses:
        lines.append(f"The last losses: {', '.join(f'{loss:.4g}' for loss in trend.recent_losses)}.")
    if examples:
        shown = ", ".join(map(str, examples[:MAX_SHOWN])) + (", …" if len(examples) > MAX_SHOWN else "")
        lines.append(f"The batch has {len(examples)} examples, with the indices {shown}.")
    advice = [f"learning_rate={config.learning_rate / 3:.1g}"]
    if config.warmup_steps < 4000:
        advice.append(f"warmup_steps={max(500, 2 * config.warmup_steps)}")
    if not config.max_grad_norm:
        advice.append("max_grad_norm=1.0")
    if config.precision != "float32":
        advice.append("precision=float32")
    lines += [
        checkpoint_message,
        f"In a new run, try {', '.join(advice)}, and inspect these examples.",
    ]
    return "\n".join(lines)
