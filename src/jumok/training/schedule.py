"""Learning rate schedules: the learning rate of each step as a fraction of its peak.

===============  ============================================================================================
constant         the peak
inverse_sqrt     decays as 1/√step. This is the schedule of the Transformer paper ("Noam"), whose
                 ``width**-0.5`` is ``learning_rate * warmup_steps**0.5`` here
linear           decays linearly to 0 at the end
cosine           decays along half a cosine wave to 0 at the end
===============  ============================================================================================

All schedules begin with a linear warm-up from 0; ``warmup_steps=0`` disables it. The end is after the last
step or after ``max_minutes``, whichever comes first, so a run with a time limit also ends with a learning
rate near 0. Its results depend on the speed of the machine. If the epochs end before the warm-up, the warm-up
is shortened to a tenth of the steps (:func:`shorten_warmup`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from jumok.training.config import TrainConfig

MAX_COUNTED_EPOCHS = 64  # beyond these, the number of steps is extrapolated


def compute_lr_factor(config: TrainConfig, step: int, last_step: int | None, time_fraction: float = 0.0) -> float:
    """Return the learning rate of a step (counted from 1) as a fraction of ``config.learning_rate``.

    ``time_fraction`` is the elapsed fraction of ``config.max_minutes``.

    >>> config = TrainConfig(schedule="linear", warmup_steps=2, max_steps=6)
    >>> [compute_lr_factor(config, step, last_step=6) for step in range(1, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> compute_lr_factor(config, 3, last_step=6, time_fraction=0.75)
    0.25
    """
    warmup_steps = config.warmup_steps
    if step <= warmup_steps:
        return step / warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":
        return math.sqrt(max(warmup_steps, 1) / step)
    if last_step is None and config.max_minutes is None:
        raise ValueError(f"the {config.schedule} schedule needs to know where it ends")
    # Steps count from 0 here, so that the rate of the last step is above 0. Steps beyond the last one get 0.
    step_fraction = 0.0 if last_step is None else (step - 1 - warmup_steps) / max(last_step - warmup_steps, 1)
    progress = min(max(step_fraction, time_fraction), 1.0)
    return 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2


def compute_last_step(config: TrainConfig, count_epoch_steps: Callable[[int], int]) -> int | None:
    """Return the number of the last step. None: it depends on time or patience.

    ``count_epoch_steps`` returns the number of steps of an epoch (counted from 0), which may differ between
    epochs. Beyond ``MAX_COUNTED_EPOCHS`` the number is extrapolated.

    >>> compute_last_step(TrainConfig(max_epochs=3), lambda epoch: 5 + epoch)
    18
    """
    if config.max_epochs is None:
        return config.max_steps
    counted_epochs, num_steps = min(config.max_epochs, MAX_COUNTED_EPOCHS), 0
    for epoch in range(counted_epochs):
        num_steps += count_epoch_steps(epoch)
        if config.max_steps is not None and num_steps >= config.max_steps:
            return config.max_steps
    total = -(-num_steps * config.max_epochs // counted_epochs)
    return total if config.max_steps is None else min(config.max_steps, total)


def shorten_warmup(config: TrainConfig, last_step: int | None) -> TrainConfig:
    """Return a config whose warm-up ends before the training, if the number of epochs limits the training.

    An epoch of other data than the recipe's may have far fewer steps.
    """
    if last_step is None or last_step > config.warmup_steps or last_step == config.max_steps:
        return config
    return replace(config, warmup_steps=last_step // 10)
