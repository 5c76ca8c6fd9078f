"""The type of products by settings and GPU, and loss scaling for float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_toy import PointData, Points, Toy, quick, read_metrics, read_state, tensors_equal, validate_toy

from jumok.attention import gpu_support
from jumok.attention.gpu_support import GPUProperties
from jumok.batches.tokens import Loss
from jumok.training import DistributedRanks, DivergenceError, precision, train
from jumok.training.learner import Learner
from jumok.training.precision import LossScaler, select_autocast_dtype
from jumok.training.prefetch import iter_step_batches

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("gpu", "found"),
    [
        (None, None),
        (GPUProperties((7, 5), 65_536), None),
        (GPUProperties((8, 0), 166_912), torch.bfloat16),
        (GPUProperties((12, 0), 101_376), torch.bfloat16),
        (GPUProperties((9, 4), 65_536, is_rocm=True), torch.bfloat16),
    ],
)
def test_auto_precision_is_bfloat16_if_the_gpu_supports_it(
    gpu: GPUProperties | None, found: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_support, "get_gpu_properties", lambda device: gpu)
    assert select_autocast_dtype(quick(), CPU) is found
    assert select_autocast_dtype(quick(precision="fp16"), CPU) is torch.float16
    assert select_autocast_dtype(quick(precision="float32"), CPU) is None


def test_loss_scale_equals_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step as torch.amp.GradScaler, over overflows now and then."""
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 3)
    ours, theirs = LossScaler(CPU), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1, fused=True)
    theirs.scale(torch.ones(1))  # it begins at its first use
    for step, overflow in enumerate(np.random.default_rng(2).random(60) < 0.2):
        weight.grad = torch.full((1,), torch.inf if overflow else 1.0)
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(bool(overflow)))
        assert ours.scale.item() == theirs.get_scale(), step
    assert ours.scale != 65536.0


class Overflowing(Toy):
    """Its gradient is larger than float16 takes, unless the loss is scaled by less than ``limit``."""

    limit = 300.0

    def loss(self, batch: Points) -> Loss:
        loss = super().loss(batch)
        if loss.total.requires_grad:
            loss.total.register_hook(lambda slope: slope.where(slope * batch.count <= self.limit, torch.inf))
        return loss


def learner_of(model: Toy, **options: Any) -> Learner:
    return Learner(model, quick(precision="fp16", **options), DistributedRanks(), last_step=None)


@pytest.fixture
def from_1024(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "INITIAL_SCALE", 1024.0)


@pytest.mark.usefixtures("from_1024")
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_steps_that_overflow_are_skipped(optimizer: str) -> None:
    """1024 and 512 are too large, 256 is not."""
    learner = learner_of(Overflowing(), optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    stream = iter_step_batches(PointData(), DistributedRanks(), accumulation_steps=1)
    before = {name: weight.clone() for name, weight in learner.gather_weights().items()}
    skipped = [learner.step(next(stream), number) for number in (1, 2)]
    assert tensors_equal(before, learner.gather_weights())
    assert not any(moment.any() for name, moment in learner.gather_optimizer_state().items() if "/" in name)
    assert [row[2].item() for row in skipped] == [0.0, 0.0]
    row = learner.step(next(stream), 3)
    assert row[2] > 0
    assert not tensors_equal(before, learner.gather_weights())
    assert learner.gather_optimizer_state()["loss_scale"] == 256.0
    assert learner.gather_optimizer_state()["loss_scale_good_steps"] == 1


def test_a_scaled_gradient_is_unscaled_before_it_is_clipped() -> None:
    """In float32 products, which the toy's sizes allow to compare: the same step with and without a scale."""
    rows: list[Tensor] = []
    found: list[dict[str, Tensor]] = []
    for scaled in (False, True):
        learner = Learner(
            Toy().double(), quick(precision="float32", max_grad_norm=0.5), DistributedRanks(), last_step=None
        )
        if scaled:
            learner._loss_scaler = LossScaler(CPU)
        stream = iter_step_batches(PointData(dtype=torch.float64), DistributedRanks(), accumulation_steps=1)
        rows.append(torch.stack([learner.step(next(stream), number) for number in (1, 2, 3)]))
        found.append(learner.gather_weights())
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-12, atol=0)
    for name, weight in found[0].items():
        torch.testing.assert_close(weight, found[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("from_1024")
def test_training_resumes_with_identical_results(tmp_path: Path) -> None:
    """The scale is part of the state: without it, the second half would skip two steps again."""
    options: dict[str, Any] = {"precision": "fp16", "average_checkpoints": 0}
    train(Overflowing(), PointData(), quick(**options), tmp_path / "whole", validate=validate_toy)
    for steps in (4, 11):
        train(Overflowing(), PointData(), quick(max_steps=steps, **options), tmp_path / "halves", validate=validate_toy)
    whole, halves = read_state(tmp_path / "whole"), read_state(tmp_path / "halves")
    assert "loss_scale" in str(list(whole))
    assert tensors_equal(*({n: x for n, x in s.items() if not n.startswith("best")} for s in (whole, halves)))
    norms = [line["gradient_norm"] for line in read_metrics(tmp_path / "halves", "train")]
    assert norms[:2] == [0.0, 0.0]
    assert all(norms[2:])


def test_resuming_in_another_precision(tmp_path: Path) -> None:
    for steps, kind in enumerate(("fp16", "float32", "fp16"), 3):
        train(Toy(), PointData(), quick(max_steps=steps, precision=kind), tmp_path)


def test_gradients_that_stay_non_finite_raise(tmp_path: Path) -> None:
    class Broken(Overflowing):
        limit = 0.0

    with pytest.raises(DivergenceError, match="not finite") as caught:
        train(Broken(), PointData(), quick(max_steps=30, precision="fp16"), tmp_path)
    assert caught.value.step == 17  # at 65536 / 2¹⁶ = 1


def test_a_non_finite_loss_raises_immediately(tmp_path: Path) -> None:
    class Poisoned(PointData):
        def collate(self, index: np.ndarray) -> Points:
            points = super().collate(index)
            points.y.fill_(torch.nan)
            return points

    with pytest.raises(DivergenceError, match=r"step 1: .*not finite"):
        train(Toy(), Poisoned(), quick(precision="fp16"), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_float16_training_on_a_gpu(graphs: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "fp16", "compile": False, "max_steps": 40}
    train(Toy(), PointData(), quick(device="cpu", **options), tmp_path / "cpu")
    train(Toy(), PointData(), quick(device="cuda", cuda_graphs=graphs, **options), tmp_path / "cuda")
    cpu, gpu = (read_metrics(tmp_path / device, "train") for device in ("cpu", "cuda"))
    for name in ("loss", "gradient_norm"):  # the same steps are skipped
        assert [line[name] for line in gpu] == pytest.approx([line[name] for line in cpu], rel=0.05)
