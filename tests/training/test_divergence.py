"""Losses that are not finite or explode: caught, told, and kept away from the weights."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from training_toy import PointData, Points, Toy, quick, read_metrics, read_state, tensors_equal, validate_toy

from jumok.batches.tokens import Loss
from jumok.training import DivergenceError, train
from jumok.training.divergence import MAX_HIGH_STEPS, LossTrend

pytestmark = pytest.mark.long


class Bad(Toy):
    """At step ``at`` (counted from 1) the loss is ``value``, or its gradient is."""

    def __init__(self, at: int, value: float = math.nan, only_gradient: bool = False) -> None:
        super().__init__()
        self.at, self.value, self.only_gradient, self.calls = at, value, only_gradient, 0

    def loss(self, batch: Points) -> Loss:
        self.calls += self.training
        loss = super().loss(batch)
        if self.calls == self.at and self.training:
            bad = loss.total * self.value
            return Loss(loss.total + bad - bad.detach() if self.only_gradient else bad, batch.count, loss.parts)
        return loss


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("log_every", [1, 10])
def test_non_finite_losses_never_change_the_weights(
    tmp_path: Path, optimizer: str, value: float, log_every: int
) -> None:
    options = {"optimizer": optimizer, "momentum": 0.5 if optimizer == "sgd" else 0.0, "weight_decay": 0.1}
    good = Toy()
    train(good, PointData(), quick(max_steps=6, **options), tmp_path / "good")
    bad = Bad(at=7, value=value)
    settings = quick(max_steps=20, save_every=4, log_every=log_every, **options)
    with pytest.raises(DivergenceError) as caught:
        train(bad, PointData(), settings, tmp_path / "bad")
    assert caught.value.step == 7
    assert caught.value.examples == tuple(PointData().batches(1)[1].tolist())  # the second of the second epoch
    # The weights in memory are those of step 6, however late it was found out.
    assert torch.equal(bad.read.weight, good.read.weight)
    assert torch.equal(bad.inner.bias, good.inner.bias)


def test_the_error_message(tmp_path: Path) -> None:
    settings = quick(max_steps=20, save_every=4, max_grad_norm=0.0, validate_every=2, average_checkpoints=0)
    with pytest.raises(DivergenceError) as caught:
        train(Bad(at=7), PointData(), settings, tmp_path, validate=validate_toy)
    message = str(caught.value)
    losses = [line["loss"] for line in read_metrics(tmp_path, "train")]
    assert message.startswith("step 7: the loss or its gradient is not finite: loss nan, gradient norm nan.")
    assert ", ".join(f"{loss:.4g}" for loss in losses[:6]) in message
    assert "The batch has 7 examples, with the indices " + str(caught.value.examples)[1:-1] in message
    assert f"The checkpoint of step 6 is in {tmp_path / 'state'}" in message
    for advice in ("learning_rate=0.003", "warmup_steps=500", "max_grad_norm=1.0", "precision=float32"):
        assert advice in message


def test_the_last_checkpoint_and_the_best_weights_stay(tmp_path: Path) -> None:
    settings = quick(max_steps=6, save_every=3, validate_every=6, average_checkpoints=0, schedule="constant")
    train(Toy(), PointData(), settings, tmp_path, validate=validate_toy)
    before = read_state(tmp_path)
    longer = quick(
        max_steps=50,
        save_every=100,
        log_every=7,
        average_checkpoints=0,
        validate_every=50,
        schedule="constant",
    )
    with pytest.raises(DivergenceError):
        train(Bad(at=3), PointData(), longer, tmp_path, validate=validate_toy)
    assert tensors_equal(read_state(tmp_path), before)
    # The same run with a model that is well goes on from there.
    train(Toy(), PointData(), longer, tmp_path, validate=validate_toy)
    steps = [line["step"] for line in read_metrics(tmp_path, "train")]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 14, 21, 28, 35, 42, 49, 50]


def test_non_finite_gradients_raise(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"gradient norm (inf|nan)"):
        train(Bad(at=2, value=math.inf, only_gradient=True), PointData(), quick(), tmp_path)


def test_non_finite_steps_are_not_saved_or_validated(tmp_path: Path) -> None:
    def validate(model: nn.Module) -> None:
        raise AssertionError("a model that is not well is not validated")

    settings = quick(max_steps=20, save_every=4, validate_every=4, log_every=100)
    with pytest.raises(DivergenceError):
        train(Bad(at=4), PointData(), settings, tmp_path, validate=validate)  # type: ignore[arg-type]
    (saved,) = (tmp_path / "state").glob("0*")
    assert saved.name == "00000000"


class Exploding(Toy):
    """From step ``at`` on the loss is ten thousand times what it should be."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def loss(self, batch: Points) -> Loss:
        self.calls += 1
        loss = super().loss(batch)
        return Loss(loss.total * (1e4 if self.calls >= self.at else 1), loss.count)


def test_exploding_losses_raise_unless_disabled(tmp_path: Path) -> None:
    settings = quick(max_steps=MAX_HIGH_STEPS + 20, log_every=10)
    with pytest.raises(DivergenceError, match=f"exploded.*for {MAX_HIGH_STEPS} steps it was over 5 times") as caught:
        train(Exploding(at=11), PointData(), settings, tmp_path / "caught")
    assert caught.value.step == 10 + MAX_HIGH_STEPS
    calm = quick(max_steps=MAX_HIGH_STEPS + 20, log_every=10, divergence_factor=0.0)
    assert train(Exploding(at=11), PointData(), calm, tmp_path / "let").num_steps == MAX_HIGH_STEPS + 20


def test_explosion_criterion() -> None:
    def verdict(losses: list[float]) -> int | None:
        trend = LossTrend()
        return next((i for i, loss in enumerate(losses) if trend.update(loss, 1.0, divergence_factor=5.0)), None)

    assert verdict([2.0] * 100 + [11.0] * MAX_HIGH_STEPS) == 99 + MAX_HIGH_STEPS
    assert verdict([2.0] * 100 + [9.0] * 500) is None  # worse, but no five times
    assert verdict(([2.0] * 10 + [50.0] * (MAX_HIGH_STEPS - 1)) * 5) is None  # bad patches, each with an end
    assert verdict([8.0] + [0.001] * 2000 + [0.1] * 500) is None  # a hundred times, and still well
    assert verdict([-3.0] * 100 + [-2.0] * 100) is None  # log densities may be below 0
    assert verdict([-3.0] * 100 + [500.0] * MAX_HIGH_STEPS) == 99 + MAX_HIGH_STEPS
    assert verdict([1.0, math.nan]) == 1
    assert verdict([math.inf]) == 0
