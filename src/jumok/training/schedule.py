"""The learning rate of each step, as a share of the highest one: pure functions of how far a run has come.

===============  ============================================================================================
constant         the highest
inverse_sqrt     falls as 1/√step: the schedule of the Transformer's paper ("Noam"), whose ``width**-0.5`` is
                 ``learning_rate * warmup**0.5`` here
linear           falls in a straight line, to 0 at the end
cosine           falls along half a wave, to 0 at the end
===============  ============================================================================================

All begin with a warm-up, a straight line up from 0; ``warmup=0`` leaves it out. The end is behind the last
step, or where ``minutes`` are over, whichever is nearer: so a run that the clock stops has still learned with
a rate near 0. On a faster machine its numbers come out otherwise; it would stop elsewhere there anyway. Where
the epochs end before the warm-up would, it is shortened to a tenth of them (:func:`shorten_warmup`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from jumok.training.config import TrainConfig

__all__ = ["compute_last_step", "compute_lr_factor", "shorten_warmup"]

MAX_COUNTED_EPOCHS = 64  # epochs whose steps are counted


def compute_lr_factor(
    config: TrainConfig, step: int, last_step: int | None, time_fraction: float = 0.0
) -> float:
    """What share of ``config.learning_rate`` step number ``step`` (the first is 1) of ``last_step`` has.

    ``time_fraction`` is the share of ``config.minutes`` that is over.

    >>> settings = Settings(schedule="linear", warmup=2, steps=6)
    >>> [share(settings, step, last=6) for step in range(1, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> share(settings, 3, last=6, spent=0.75)
    0.25
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / step)
    if last_step is None and config.max_minutes is None:
        raise ValueError(f"the {config.schedule} schedule needs to know where it ends")
    # Counted from 0, so that the last step still learns something. Whoever trains longer than planned: not.
    by_steps = 0.0 if last_step is None else (step - 1 - warmup) / max(last_step - warmup, 1)
    done = min(max(by_steps, time_fraction), 1.0)
    return 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def compute_last_step(config: TrainConfig, count_epoch_steps: Callable[[int], int]) -> int | None:
    """The number of the last step; None: only time or patience will tell.

    ``count_epoch_steps`` says how many steps an epoch has, the first of which is 0: chance may make some longer. Of
    very many epochs it is asked for some, and the rest taken to be like these.

    >>> last_step(Settings(epochs=3), lambda epoch: 5 + epoch)
    18
    """
    if config.max_epochs is None:
        return config.max_steps
    counted, steps = min(config.max_epochs, MAX_COUNTED_EPOCHS), 0
    for epoch in range(counted):
        steps += count_epoch_steps(epoch)
        if config.max_steps is not None and steps >= config.max_steps:
            return config.max_steps
    whole = -(-steps * config.max_epochs // counted)
    return whole if config.max_steps is None else min(config.max_steps, whole)


def shorten_warmup(config: TrainConfig, last_step: int | None) -> TrainConfig:
    """The same, with a warm-up that ends before the training, where the number of epochs ends it.

    How many steps an epoch has is for the data to say, and a recipe's warm-up was chosen for other data.
    """
    if last_step is None or last_step > config.warmup_steps or last_step == config.max_steps:
        return config
    return replace(config, warmup_steps=last_step // 10)
