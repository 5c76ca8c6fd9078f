"""The loop: steps that one can check by hand, and what happens between and after them."""

import io
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from training_toy import PointData, Points, Toy, quick, read_metrics, read_state, tensors_equal, validate_toy

from jumok.batches.tokens import Loss
from jumok.errors import InputError
from jumok.training import DistributedRanks, ValidationReport, load_weights, train
from jumok.training.learner import Learner
from jumok.training.optimizer import build_optimizer
from jumok.training.prefetch import iter_step_batches
from jumok.training.weights import read_safetensors

pytestmark = pytest.mark.long


class Line(nn.Module):
    """y = w x, from w = 0. For x = (1, 2), y = (2, 4): loss 20 / 2, slope Σ 2 (w x − y) x / 2 = −10."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))

    def loss(self, batch: Points) -> Loss:
        return Loss((self.w * batch.x - batch.y).square().sum(), batch.count)


class TwoPoints(PointData):
    def batches(self, epoch: int) -> list[np.ndarray]:
        return [np.array([0, 1])]

    def collate(self, index: np.ndarray) -> Points:
        x = torch.tensor([1.0, 2.0], dtype=torch.float64)[torch.as_tensor(index)]
        return Points(x, 2 * x, torch.ones(len(x)), len(x), tuple(index.tolist()))


@pytest.mark.parametrize(
    ("changes", "weight"),
    [
        ({"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}, 1.0),
        ({"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 5.0}, 0.5),  # the gradient cut to half
        ({"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 20.0}, 1.0),
        (
            {"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 2},
            1.5,
        ),  # slope −5 at w = 1
        ({"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "warmup_steps": 4}, 0.25),
        # With momentum ½: 1, then slope −5 + ½ · −10.
        (
            {"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "momentum": 0.5, "max_steps": 2},
            2.0,
        ),
        (
            {"optimizer": "adam", "learning_rate": 0.1, "max_grad_norm": 0.0},
            0.1,
        ),  # as long as the rate
        (
            {"optimizer": "adam", "learning_rate": 0.1, "max_grad_norm": 0.0, "eps": 10.0},
            0.05,
        ),  # 10 / (10 + 10)
        ({"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "accumulation_steps": 2}, 1.0),
        (
            {"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "accumulation_steps": 3},
            1.0,
        ),  # one part is empty
    ],
)
def test_the_first_steps_by_hand(tmp_path: Path, changes: dict[str, Any], weight: float) -> None:
    model = Line()
    train(model, TwoPoints(), quick(**{"max_steps": 1, "schedule": "constant", **changes}), tmp_path)
    assert model.w.item() == pytest.approx(weight, abs=1e-7)
    first = read_metrics(tmp_path, "train")[0]
    assert (first["loss"], first["num_labels"]) == (10.0, 2)
    assert first["gradient_norm"] == 10.0  # before it is cut


def test_weight_decay_shrinks_matrices_only(tmp_path: Path) -> None:
    groups = build_optimizer(Toy(), quick(optimizer="adamw", weight_decay=0.1)).param_groups
    decays = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert sum(decay == 0.1 for decay in decays.values()) == 5  # inner, two layers, outer = again, read
    assert all(decay == (0.1 if parameter.dim() > 1 else 0.0) for parameter, decay in decays.items())


def test_a_frozen_parameter_stays_and_a_frozen_model_is_refused(tmp_path: Path) -> None:
    model = Toy()
    model.read.bias.requires_grad_(False).fill_(0.25)
    train(model, PointData(), quick(max_steps=3, optimizer="adamw", weight_decay=0.1), tmp_path)
    assert model.read.bias.tolist() == [0.25, 0.25]
    with pytest.raises(InputError, match="nothing to train"):
        train(Toy().requires_grad_(False), PointData(), quick(), tmp_path / "frozen")


def test_accumulated_gradients_equal_those_of_the_whole_batch(tmp_path: Path) -> None:
    weights = []
    for accumulate in (1, 2, 5):  # the last batch of an epoch has one example: parts of it are empty
        model = Toy().double()
        data = PointData(dtype=torch.float64)
        train(model, data, quick(accumulation_steps=accumulate), tmp_path / str(accumulate))
        weights.append(torch.cat([p.flatten() for p in model.parameters()]).detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(weights[2], weights[0], rtol=1e-10, atol=1e-10)


def test_logged_metrics(tmp_path: Path) -> None:
    train(Toy(), PointData(), quick(max_steps=13, log_every=4), tmp_path / "each 4")
    train(Toy(), PointData(), quick(max_steps=13, log_every=1), tmp_path / "each")
    four, one = read_metrics(tmp_path / "each 4", "train"), read_metrics(tmp_path / "each", "train")
    assert [line["step"] for line in four] == [4, 8, 12, 13]
    assert [line["epoch"] for line in four] == [1, 2, 3, 3]  # 5 batches each
    assert [line["epoch"] for line in one] == [1] * 5 + [2] * 5 + [3] * 3
    assert one[-1]["num_labels"] == four[-1]["num_labels"]
    new = [b["num_labels"] - a["num_labels"] for a, b in itertools.pairwise([{"num_labels": 0}, *one])]
    mean = sum(line["loss"] * count for line, count in zip(one[:4], new, strict=False)) / sum(new[:4])
    assert four[0]["loss"] == pytest.approx(mean, rel=1e-12)
    assert four[0]["gradient_norm"] == pytest.approx(sum(line["gradient_norm"] for line in one[:4]) / 4)
    assert one[8]["learning_rate"] == pytest.approx(0.01 / 3)  # inverse square root of 9
    assert set(one[0]) == {
        "event",
        "step",
        "epoch",
        "loss",
        "nll",
        "learning_rate",
        "gradient_norm",
        "num_labels",
    }


# ---------------------------------------------------------------------------------- validation


def scripted(values: list[float], **options: Any) -> Any:
    """A validation that finds these values, one after the other."""
    left = iter(values)
    return lambda model: ValidationReport({"score": next(left), "other": 1.0}, "score", **options)


def test_best_weights_and_patience(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    values = scripted([1.0, 3.0, 2.0, 3.0, float("nan"), 9.0])

    def validate(model: nn.Module) -> ValidationReport:
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.append(model.read.weight.clone())
        return values(model)  # type: ignore[no-any-return]

    model = Toy()
    settings = quick(max_steps=100, validate_every=2, patience=3, average_checkpoints=0)
    summary = train(model, PointData(), settings, tmp_path, validate=validate)
    assert summary.stop_reason == "3 validations in a row were no better"
    assert (summary.num_steps, summary.num_epochs) == (10, 2)
    assert summary.best is not None
    assert (summary.best.step, summary.best.value, summary.best.num_averaged) == (4, 3.0, 0)
    assert summary.best.metrics == {"score": 3.0, "other": 1.0}
    assert len(seen) == 5
    assert torch.equal(model.read.weight, seen[1])  # the model holds the best
    assert torch.equal(read_safetensors(tmp_path / "model.safetensors")["read.weight"], seen[1])
    logged = [line["score"] for line in read_metrics(tmp_path, "validation")]
    assert logged == [1.0, 3.0, 2.0, 3.0, None]  # JSON knows no NaN
    assert [line["is_best"] for line in read_metrics(tmp_path, "validation")] == [True, True, False, False, False]


def test_lower_is_better(tmp_path: Path) -> None:
    validate = scripted([3.0, 1.0, 2.0], higher_is_better=False)
    summary = train(
        Toy(),
        PointData(),
        quick(max_steps=3, validate_every=1, average_checkpoints=0),
        tmp_path,
        validate=validate,
    )
    assert summary.best is not None
    assert (summary.best.step, summary.best.value) == (2, 1.0)


def test_validation_at_the_end_of_each_epoch_and_of_the_run(tmp_path: Path) -> None:
    train(Toy(), PointData(), quick(max_steps=12, average_checkpoints=0), tmp_path, validate=validate_toy)
    assert [line["step"] for line in read_metrics(tmp_path, "validation")] == [5, 10, 12]


def test_the_average_by_hand(tmp_path: Path) -> None:
    """The mean of the last three validated weights; it is kept where it does better."""
    seen: list[torch.Tensor] = []

    def better_when_averaged(model: nn.Module) -> ValidationReport:
        seen.append(model.read.weight.clone())
        return ValidationReport({"score": [5.0, 1.0, 2.0, 3.0, 6.0][len(seen) - 1]}, "score")

    model = Toy()
    settings = quick(max_steps=8, validate_every=2, average_checkpoints=3)
    summary = train(model, PointData(), settings, tmp_path / "better", validate=better_when_averaged)
    mean = (seen[1] + seen[2] + seen[3]) / 3
    torch.testing.assert_close(seen[4], mean)
    assert torch.equal(model.read.weight, seen[4])
    assert summary.best is not None
    assert (summary.best.value, summary.best.num_averaged) == (6.0, 3)
    assert [line["event"] for line in read_metrics(tmp_path / "better")][-1] == "averaged_weights"

    model, seen = Toy(), []
    worse = scripted([5.0, 1.0, 2.0, 3.0, 4.0])
    summary = train(model, PointData(), settings, tmp_path / "worse", validate=worse)
    assert summary.best is not None
    assert (summary.best.value, summary.best.step, summary.best.num_averaged) == (5.0, 2, 0)


def test_averaging_leaves_the_state_alone(tmp_path: Path) -> None:
    """A run that ended with an average goes on from its last weights, not from their mean."""
    plain, averaged = tmp_path / "plain", tmp_path / "averaged"
    train(Toy(), PointData(), quick(max_steps=9), plain)
    train(
        Toy(),
        PointData(),
        quick(max_steps=5, validate_every=2, average_checkpoints=2),
        averaged,
        validate=validate_toy,
    )
    train(
        Toy(),
        PointData(),
        quick(max_steps=9, validate_every=2, average_checkpoints=2),
        averaged,
        validate=validate_toy,
    )
    a, b = read_state(plain), read_state(averaged)
    assert tensors_equal(*({n: x for n, x in s.items() if not n.startswith("best")} for s in (a, b)))


def test_without_validation_the_newest_weights_are_the_best(tmp_path: Path) -> None:
    model = Toy()
    summary = train(model, PointData(), quick(), tmp_path)
    assert summary.best is None
    other = Toy(seed=4)
    load_weights(other, tmp_path / "model.safetensors")
    assert torch.equal(other.read.weight, model.read.weight)
    with pytest.raises(InputError, match="patience needs a validation"):
        train(Toy(), PointData(), quick(max_steps=None), tmp_path / "endless")


def test_a_failed_validation_loses_no_step(tmp_path: Path) -> None:
    def failing(model: nn.Module) -> ValidationReport:
        raise MemoryError("too long a sentence")

    settings = quick(max_steps=6, validate_every=4, save_every=100, average_checkpoints=0)
    with pytest.raises(MemoryError):
        train(Toy(0.3), PointData(), settings, tmp_path / "failed", validate=failing)
    assert (tmp_path / "failed" / "state" / "00000004").exists()
    for folder in ("failed", "whole"):
        train(Toy(0.3), PointData(), settings, tmp_path / folder, validate=validate_toy)
    assert read_metrics(tmp_path / "failed") == read_metrics(tmp_path / "whole")
    assert tensors_equal(read_state(tmp_path / "failed"), read_state(tmp_path / "whole"))


def test_metrics_of_any_number_type(tmp_path: Path) -> None:
    def odd(model: nn.Module) -> ValidationReport:
        return ValidationReport({"a": np.float32(0.5), "b": torch.tensor(2), "c": 3}, "a")  # type: ignore[dict-item]

    summary = train(Toy(), PointData(), quick(max_steps=2), tmp_path, validate=odd)
    assert summary.best is not None
    assert summary.best.metrics == {"a": 0.5, "b": 2.0, "c": 3.0}


def test_a_report_validates_its_metric_names() -> None:
    with pytest.raises(ValueError, match="select_by='blue' is not one of the metrics: bleu"):
        ValidationReport({"bleu": 1.0}, "blue")
    with pytest.raises(ValueError, match="tie_breaker='loss' is not one of the metrics: bleu"):
        ValidationReport({"bleu": 1.0}, "bleu", tie_breaker="loss")


NAN = float("nan")


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "better"),
    [
        (None, (0, 9), True),
        (None, (NAN, 9), False),
        ((0, 9), (0, 8), True),
        ((0, 9), (0, 9), False),
        ((0, 8), (0, 9), False),
        ((0, 1), (2, 9), True),  # the first figure comes first
        ((2, 9), (0, 1), False),
        ((0, NAN), (0, 9), True),
        ((0, 9), (0, NAN), False),
        ((NAN, 9), (0, 9), True),
        ((0, 9), (NAN, 8), False),
        ((NAN, 9), (NAN, 8), False),
        ((0, None), (0, 9), True),  # as a run has it that began before there was such a figure
        ((0, None), (-1, 1), False),
    ],
)
def test_tie_breaker(
    before: tuple[float, float | None] | None, after: tuple[float, float], better: bool, higher: bool
) -> None:
    sign = 1 if higher else -1
    other = None if before is None else {"score": sign * before[0]}
    if before is not None and before[1] is not None:
        other = {"score": sign * before[0], "loss": before[1]}
    figures = {"score": sign * after[0], "loss": after[1]}
    assert (
        ValidationReport(figures, "score", higher_is_better=higher, tie_breaker="loss").is_better_than(other) == better
    )


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "better"),
    [
        ((0.2, 9), (0, 8), True),  # neither is more than chance: the loss decides
        ((0, 8), (0.2, 9), False),
        ((1, 8), (0.2, 7), True),
        ((0, 1), (1.25, 9), True),
        ((1.25, 9), (0.75, 1), False),
        ((1.25, 9), (1.5, 9), True),
        ((NAN, 9), (0.2, 9), True),
        ((0.2, 9), (NAN, 1), False),
    ],
)
def test_chance_level(before: tuple[float, float], after: tuple[float, float], better: bool, higher: bool) -> None:
    sign = 1 if higher else -1
    figures, other = ({"score": sign * score, "loss": loss} for score, loss in (after, before))
    report = ValidationReport(figures, "score", higher_is_better=higher, tie_breaker="loss", chance_level=sign * 1.0)
    assert report.is_better_than(other) == better


def test_a_resumed_run_remembers_the_tie_breaker(tmp_path: Path) -> None:
    """The loss that is to be beaten was found before the break."""
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 0.5, 10: 0.75, 12: 0.6}
    settings = quick(max_steps=12, validate_every=2, save_every=3, average_checkpoints=3)

    def validate(broken: list[int], folder: Path) -> Any:
        def found(model: nn.Module) -> ValidationReport:
            (newest,) = (int(path.name) for path in (folder / "state").glob("0*"))
            if newest in broken:
                raise MemoryError("too long a sentence")
            return ValidationReport({"score": 0.0, "loss": losses[newest]}, "score", tie_breaker="loss")

        return found

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(Toy(0.3), PointData(), settings, whole, validate=validate([], whole))
    for step in (6, 10):
        with pytest.raises(MemoryError):
            train(Toy(0.3), PointData(), settings, broken, validate=validate([step], broken))
    train(Toy(0.3), PointData(), settings, broken, validate=validate([], broken))
    assert [line["is_best"] for line in read_metrics(whole, "validation")] == [True, True, False, True, False, False]
    assert read_metrics(broken) == read_metrics(whole)
    assert tensors_equal(read_state(broken), read_state(whole))


# ----------------------------------------------------------------------------- ends and goes on


def test_a_finished_run_stays_and_a_longer_one_resumes(tmp_path: Path) -> None:
    settings = quick(max_steps=7, schedule="constant")
    first = train(Toy(0.3), PointData(), settings, tmp_path / "a")
    before = read_state(tmp_path / "a"), read_metrics(tmp_path / "a")
    model = Toy(0.3, seed=4)
    again = train(model, PointData(), settings, tmp_path / "a")
    assert again == first
    assert tensors_equal(read_state(tmp_path / "a"), before[0])
    assert read_metrics(tmp_path / "a") == before[1]
    assert torch.equal(model.read.weight, before[0]["best: read.weight"])

    longer = quick(max_steps=17, schedule="constant")
    train(Toy(0.3, seed=4), PointData(), longer, tmp_path / "a")
    train(Toy(0.3), PointData(), longer, tmp_path / "b")
    assert tensors_equal(read_state(tmp_path / "a"), read_state(tmp_path / "b"))
    assert read_metrics(tmp_path / "a") == read_metrics(tmp_path / "b")


def test_a_shortened_warmup_is_equal_after_resuming(tmp_path: Path) -> None:
    settings = quick(max_steps=None, max_epochs=8, warmup_steps=500, schedule="linear", save_every=3)
    train(Toy(0.3), PointData(), settings, tmp_path / "whole")
    rates = [one["learning_rate"] / settings.learning_rate for one in read_metrics(tmp_path / "whole", "train")]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])  # of 40 steps, 4
    with pytest.raises(RuntimeError, match="pulled"):
        train(Toy(0.3), PointData(), replace(settings, validate_every=2), tmp_path / "broken", validate=_pulled)
    train(Toy(0.3, seed=4), PointData(), settings, tmp_path / "broken")
    assert tensors_equal(read_state(tmp_path / "broken"), read_state(tmp_path / "whole"))


def _pulled(model: nn.Module) -> ValidationReport:
    raise RuntimeError("pulled")


def test_epochs_and_minutes_end_a_run(tmp_path: Path) -> None:
    summary = train(Toy(), PointData(), quick(max_steps=None, max_epochs=2), tmp_path / "epochs")
    assert (summary.num_steps, summary.num_epochs, summary.stop_reason) == (10, 2, "all 2 epochs are done")
    timed = quick(max_steps=None, max_minutes=0.005)
    summary = train(Toy(), PointData(), timed, tmp_path / "minutes")
    assert summary.seconds >= 0.3
    assert summary.num_steps > 1
    assert train(Toy(), PointData(), timed, tmp_path / "minutes") == summary  # time of earlier sessions counts


def test_max_minutes_completes_the_schedule(tmp_path: Path) -> None:
    timed = quick(max_steps=10**9, max_minutes=0.01, schedule="linear", warmup_steps=0, log_every=10)
    summary = train(Toy(), PointData(), timed, tmp_path / "run")
    assert 10 < summary.num_steps < 10**9
    logged = read_metrics(tmp_path / "run", "train")
    rates = [one["learning_rate"] / timed.learning_rate for one in logged]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2 * rates[-1]


def test_metrics_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    settings = quick(max_steps=10, save_every=4, schedule="constant")
    train(Toy(0.3), PointData(), settings, tmp_path / "whole")

    class Stop(PointData):
        def collate(self, index: np.ndarray) -> Points:
            if threading.current_thread() is threading.main_thread() and next(count) == 6:
                raise RuntimeError("the power went")
            return super().collate(index)

    count = itertools.count()
    broken = quick(max_steps=10, save_every=4, schedule="constant", prefetch_batches=0)
    with pytest.raises(RuntimeError, match="the power went"):
        train(Toy(0.3), Stop(), broken, tmp_path / "broken")
    metrics = tmp_path / "broken" / "metrics.jsonl"
    assert [line["step"] for line in read_metrics(tmp_path / "broken")] == [1, 2, 3, 4, 5, 6]
    with metrics.open("a") as file:
        file.write('{"event": "train", "st')  # torn in the middle
    train(Toy(0.3), PointData(), settings, tmp_path / "broken")
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "whole")
    assert tensors_equal(read_state(tmp_path / "broken"), read_state(tmp_path / "whole"))


def test_steps_do_not_depend_on_other_random_numbers(tmp_path: Path) -> None:
    """Validation that draws random numbers changes nothing; each step's dropout is its own."""

    def drawing(model: nn.Module) -> ValidationReport:
        torch.rand(17)
        return validate_toy(model)

    often, never = tmp_path / "often", tmp_path / "never"
    train(Toy(0.5), PointData(), quick(validate_every=1, average_checkpoints=0), often, validate=drawing)
    torch.rand(3)
    train(Toy(0.5), PointData(), quick(), never)
    assert read_metrics(often, "train") == read_metrics(never, "train")
    train(Toy(0.5), PointData(), quick(seed=2), tmp_path / "other")
    assert read_metrics(tmp_path / "other", "train") != read_metrics(never, "train")


def test_seeding_each_step_does_not_leak_memory(tmp_path: Path) -> None:
    """``torch.manual_seed`` without a GPU keeps a traceback of each call: a long run would eat the memory."""
    queued = getattr(torch.cuda, "_queued_calls", [])
    before = len(queued)
    train(Toy(0.3), PointData(), quick(prefetch_batches=0), tmp_path)
    assert len(queued) < before + 11


def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def with_samples(model: nn.Module) -> ValidationReport:
        report = validate_toy(model)
        return ValidationReport(report.metrics, report.select_by, samples=["<b>a</b> → b"])

    settings = quick(tensorboard=True, max_steps=4, validate_every=2, average_checkpoints=0)
    train(Toy(), PointData(), settings, tmp_path, validate=with_samples)
    seen = board.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [event.value for event in seen.Scalars("train/loss")]
    assert losses == pytest.approx([line["loss"] for line in read_metrics(tmp_path, "train")])
    assert [event.step for event in seen.Scalars("validation/error")] == [2, 4]


# ----------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("precision", ["auto", "float32", "bf16", "fp16"])
def test_weights_stay_float32_in_low_precision(tmp_path: Path, precision: str) -> None:
    class Watched(Toy):
        def loss(self, batch: Points) -> Loss:
            kinds.add(self.inner(batch.x).dtype)
            return super().loss(batch)

    kinds: set[torch.dtype] = set()
    model = Watched()
    train(model, PointData(), quick(max_steps=2, precision=precision), tmp_path)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert kinds == {low.get(precision, torch.float32)}
    assert model.inner.weight.dtype == torch.float32


@pytest.mark.parametrize(("wish", "times"), [("auto", 0), (False, 0), (True, 1)])
def test_a_models_own_compile_is_called(tmp_path: Path, wish: Any, times: int) -> None:
    class Own(Toy):
        def compile(self, *args: Any, **options: Any) -> None:
            calls.append(args)

    calls: list[Any] = []
    train(Own(), PointData(), quick(max_steps=2, compile=wish), tmp_path)
    assert len(calls) == times  # "auto" is for GPUs


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_steps_do_not_synchronize_with_the_gpu(optimizer: str) -> None:
    ranks = DistributedRanks(device=torch.device("cuda", 0))
    learner = Learner(Toy(0.3), quick(optimizer=optimizer, compile=False, accumulation_steps=2), ranks, last_step=None)
    stream = iter_step_batches(PointData(), ranks, accumulation_steps=2)
    rows = [learner.step(next(stream), 1)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows += [learner.step(next(stream), number) for number in (2, 3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(rows).isfinite().all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_backward_pass_runs_in_the_thread_of_the_step(device: str) -> None:
    threads: list[tuple[int, bool]] = []

    class Observed(Toy):
        def loss(self, batch: Points) -> Loss:
            loss = super().loss(batch)
            loss.total.register_hook(
                lambda _: threads.append((threading.get_ident(), torch._C._is_multithreading_enabled()))
            )
            return loss

    ranks = DistributedRanks(device=torch.device(device))
    learner = Learner(Observed(), quick(compile=False), ranks, last_step=None)
    learner.step(next(iter_step_batches(PointData(), ranks, accumulation_steps=1)), 1)
    assert threads == [(threading.get_ident(), False)]


@pytest.mark.gpu
def test_training_on_a_gpu_equals_the_cpu(tmp_path: Path) -> None:
    options = {"precision": "float32", "compile": False}
    for device in ("cpu", "cuda"):
        train(Toy(), PointData(), quick(device=device, **options), tmp_path / device, validate=judge_anywhere)
    for cpu, gpu in zip(read_metrics(tmp_path / "cpu", "train"), read_metrics(tmp_path / "cuda", "train"), strict=True):
        assert gpu["loss"] == pytest.approx(cpu["loss"], rel=0.01)  # TF32


def judge_anywhere(model: nn.Module) -> ValidationReport:
    data = PointData()
    points = data.collate(np.arange(len(data.x))).to(next(model.parameters()).device)
    return ValidationReport({"error": model.loss(points).total.item()}, "error", higher_is_better=False)


# --------------------------------------------------------------------------------------- data


class Broken(PointData):
    def collate(self, index: np.ndarray) -> Points:
        if 13 in index:
            raise InputError("example 13 is not well")
        return super().collate(index)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_data_errors_are_raised_unchanged(tmp_path: Path, prefetch: int) -> None:
    before = threading.active_count()
    with pytest.raises(InputError, match=r"^example 13 is not well$"):
        train(Toy(), Broken(), quick(prefetch_batches=prefetch), tmp_path)
    assert threading.active_count() == before
    at = [13 in index for index in PointData().batches(0)].index(True)
    assert len(read_metrics(tmp_path, "train")) == at  # every batch before it was used


def test_empty_data_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to train on: epoch 1 has no batches"):
        train(Toy(), Empty(), quick(), tmp_path)


class Empty(PointData):
    def batches(self, epoch: int) -> list[np.ndarray]:
        return []


def test_training_on_a_single_example(tmp_path: Path) -> None:
    summary = train(Toy(), PointData(length=1), quick(max_steps=None, max_epochs=3, accumulation_steps=2), tmp_path)
    assert (summary.num_steps, summary.num_labels) == (3, 3)


def test_weights_of_another_model_raise_and_change_nothing(tmp_path: Path) -> None:
    train(Toy(), PointData(), quick(max_steps=2), tmp_path)
    other = Toy()
    other.read = nn.Linear(3, 7)
    before = other.inner.weight.clone()
    with pytest.raises(InputError, match=r"read.weight has shape \(2, 3\) instead of \(7, 3\)"):
        train(other, PointData(), quick(max_steps=4), tmp_path)
    assert torch.equal(other.inner.weight, before)
    assert json.loads((tmp_path / "state" / "00000002" / "state.json").read_text())["state"]["step"] == 2


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before + 1  # TensorBoard may keep one of its own


def test_alarms_are_reported_once_and_in_the_summary(tmp_path: Path) -> None:
    spoken = io.StringIO()
    console = Console(file=spoken, width=300)

    def never_diagonal(model: nn.Module) -> ValidationReport:
        return ValidationReport({"loss": 1.0, "alignment/diagonality": 0.1}, select_by="loss", higher_is_better=False)

    settings = quick(max_steps=10, validate_every=2, patience=0, average_checkpoints=0)
    summary = train(Toy(), PointData(), settings, tmp_path, validate=never_diagonal, console=console)
    [alarm] = summary.alarms
    assert alarm.startswith("attention never became diagonal: its diagonality was at most 0.10 after 100%")
    assert spoken.getvalue().count("ALARM: attention never") == 2  # when it is found, and at the end
    steps = [line["step"] for line in read_metrics(tmp_path) if line["event"] == "alarm"]
    assert steps == [4, 6, 8, 10]  # a third of the training is too early to say
    again = train(Toy(), PointData(), settings, tmp_path, validate=never_diagonal)
    assert again.alarms == summary.alarms
