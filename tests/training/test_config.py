"""The settings of a training: what they refuse, and the learning rates that they come to."""

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from jumok.training import TrainConfig
from jumok.training.schedule import MAX_COUNTED_EPOCHS, compute_last_step, compute_lr_factor, shorten_warmup


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_steps": 0}, "max_steps=0: 1 or more"),
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"max_minutes": float("nan")}, "max_minutes=nan"),
        ({"patience": 0}, "nothing ends the training"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"divergence_factor": 0.5}, "divergence_factor=0.5: 0, or more than 1"),
        ({"accumulation_steps": 0}, "accumulation_steps=0"),
        ({"log_every": 0}, "log_every=0"),
        ({"seed": -1}, "seed=-1"),
        ({"device": "gpu"}, "device='gpu': auto, cpu, cuda"),
        ({"schedule": "cosine"}, "set max_steps, max_epochs or max_minutes"),
        (
            {"schedule": "linear", "max_steps": 100, "warmup_steps": 100},
            "warmup_steps=100 must be less than max_steps=100",
        ),
    ],
)
def test_invalid_settings_raise(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrainConfig(**changes)


def test_a_recipe_is_validated_by_pydantic() -> None:
    adapter = TypeAdapter(TrainConfig)
    settings = adapter.validate_python({"max_steps": "7", "betas": [0.8, 0.9], "compile": True})
    assert (settings.max_steps, settings.betas, settings.compile) == (7, (0.8, 0.9), True)
    assert adapter.validate_python({}) == TrainConfig()
    with pytest.raises(ValidationError, match="learning_rte"):
        adapter.validate_python({"learning_rte": 0.1})
    with pytest.raises(ValidationError, match="schedule"):
        adapter.validate_python({"schedule": "noam"})
    with pytest.raises(ValidationError, match="max_grad_norm=-1"):
        adapter.validate_python({"max_grad_norm": -1})


def shares(last: int | None = None, steps: int = 8, **changes: Any) -> list[float]:
    settings = TrainConfig(max_steps=steps, **changes)
    return [round(compute_lr_factor(settings, step, last), 4) for step in range(1, steps + 1)]


def test_schedules_by_hand() -> None:
    assert shares(schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert shares(schedule="constant", warmup_steps=0) == [1] * 8
    # √(2/3), √(2/4), …
    assert shares(schedule="inverse_sqrt", warmup_steps=2) == [
        0.5,
        1,
        0.8165,
        0.7071,
        0.6325,
        0.5774,
        0.5345,
        0.5,
    ]
    assert shares(schedule="linear", warmup_steps=3, last=8) == [0.3333, 0.6667, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert shares(schedule="linear", warmup_steps=0, last=8)[0] == 1
    half = [round((1 + math.cos(math.pi * x)) / 2, 4) for x in (0, 1 / 4, 1 / 2, 3 / 4)]
    assert half == [1.0, 0.8536, 0.5, 0.1464]
    assert shares(schedule="cosine", warmup_steps=4, last=8) == [0.25, 0.5, 0.75, 1, *half]


def test_inverse_sqrt_is_the_schedule_of_the_transformer_paper() -> None:
    """width^-0.5 · min(step^-0.5, step · warmup^-1.5), with the highest rate given instead of the width."""
    width, warmup = 512, 40
    settings = TrainConfig(learning_rate=(width * warmup) ** -0.5, warmup_steps=warmup)
    for step in (1, 7, 39, 40, 41, 100_000):
        paper = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert settings.learning_rate * compute_lr_factor(settings, step, None) == pytest.approx(paper, rel=1e-12)


def test_the_learning_rate_stays_zero_after_the_last_step() -> None:
    settings = TrainConfig(schedule="cosine", warmup_steps=0, max_epochs=2)
    assert compute_lr_factor(settings, 9, last_step=8) == 0
    assert compute_lr_factor(settings, 1000, last_step=8) == 0


def test_a_schedule_ends_with_max_minutes_if_that_is_sooner() -> None:
    settings = TrainConfig(schedule="linear", warmup_steps=2, max_steps=10, max_minutes=4.0)
    # The 6th step of 10: 3 of the 8 behind the warm-up are done. Of the minutes, as many, or more.
    assert [compute_lr_factor(settings, 6, 10, spent) for spent in (0.0, 0.375, 0.75, 1.0, 1.5)] == [
        *(0.625, 0.625, 0.25),
        *(0, 0),
    ]
    assert compute_lr_factor(settings, 1, 10, time_fraction=0.75) == 0.5  # the warm-up is in steps
    by_clock = TrainConfig(schedule="cosine", warmup_steps=0, max_minutes=4.0)
    assert [compute_lr_factor(by_clock, 1000, None, spent) for spent in (0.0, 0.5)] == [1, pytest.approx(0.5)]
    # The others do not know of an end.
    assert compute_lr_factor(TrainConfig(schedule="constant", warmup_steps=0, max_minutes=4.0), 6, None, 0.75) == 1


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"max_steps": 70}, 70),
        ({"max_epochs": 3}, 15),
        ({"max_steps": 7, "max_epochs": 3}, 7),
        ({"max_steps": 70, "max_epochs": 3}, 15),
        ({"max_minutes": 3.0}, None),
    ],
)
def test_the_last_step_is_the_nearest_bound(changes: dict[str, Any], last: int | None) -> None:
    assert compute_last_step(TrainConfig(**changes), lambda epoch: 5) == last


def test_epochs_of_different_lengths_are_all_counted() -> None:
    assert compute_last_step(TrainConfig(max_epochs=3), lambda epoch: (1, 2, 2)[epoch]) == 5
    assert compute_last_step(TrainConfig(max_epochs=3, max_steps=4), lambda epoch: (1, 2, 2)[epoch]) == 4
    asked: list[int] = []

    def steps_of(epoch: int) -> int:
        asked.append(epoch)
        return 1 + epoch % 2

    assert compute_last_step(TrainConfig(max_epochs=10**9), steps_of) == 15 * 10**8
    assert len(asked) == MAX_COUNTED_EPOCHS
    asked.clear()
    assert compute_last_step(TrainConfig(max_epochs=9, max_steps=4), steps_of) == 4
    assert asked == [0, 1, 2]  # no more than needed


def test_warmup_is_shortened_for_short_trainings() -> None:
    asked = TrainConfig(max_epochs=3, warmup_steps=500, schedule="linear")
    short = shorten_warmup(asked, last_step=18)
    assert short.warmup_steps == 1
    assert [compute_lr_factor(short, step, 18) for step in (1, 2, 18)] == [1, 1, pytest.approx(1 / 17)]
    assert shorten_warmup(asked, last_step=500).warmup_steps == 50
    assert shorten_warmup(asked, last_step=501) is asked
    assert shorten_warmup(asked, last_step=None) is asked
    given = TrainConfig(max_steps=18, warmup_steps=500)  # both are the user's own; a longer run goes on with the same
    assert shorten_warmup(given, last_step=18) is given
