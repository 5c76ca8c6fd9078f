"""Weights and states on the disk: whole, or not there."""

import io
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from torch import nn
from training_toy import PointData, Toy, quick, read_metrics, read_state, tensors_equal, validate_toy

from jumok.errors import InputError
from jumok.files import atomic_write, remove_atomically, remove_partial_files
from jumok.training import ValidationReport, load_weights, save_weights, train
from jumok.training.weights import (
    average_weights,
    get_weights,
    read_safetensors,
    set_weights,
    write_safetensors,
)

pytestmark = pytest.mark.long


def test_tied_tensors_are_saved_once(tmp_path: Path) -> None:
    model, path = Toy(seed=3), tmp_path / "model.safetensors"
    save_weights(model, path)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(model.state_dict()) - {"again.weight"}
        assert file.metadata() == {"format": "pt"}
    other = Toy(seed=4)
    assert not torch.equal(other.again.weight, model.again.weight)
    load_weights(other, path)
    assert torch.equal(other.again.weight, model.again.weight)
    assert other.again.weight is other.outer.weight
    assert list(tmp_path.iterdir()) == [path]


def test_weights_of_any_dtype_and_layout(tmp_path: Path) -> None:
    model = nn.Module()
    model.turned = nn.Parameter(torch.randn(5, 3, dtype=torch.float64).T)  # not contiguous
    model.short = nn.Parameter(torch.randn(7).bfloat16())
    model.register_buffer("steps", torch.tensor(2**40))
    model.register_buffer("nothing", torch.empty(0, 3))
    path = tmp_path / "w.safetensors"
    save_weights(model, path)
    before = {name: tensor.clone() for name, tensor in get_weights(model).items()}
    with torch.no_grad():
        for tensor in get_weights(model).values():
            tensor.zero_()
    load_weights(model, path)
    assert tensors_equal(get_weights(model), before)


def test_saved_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save_weights(Toy(), tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("damage", ["missing", "short", "text"])
def test_damaged_weight_files_raise(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(Toy(), path)
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        path.write_text("hello")
    with pytest.raises(
        InputError, match=r"no file .*model.safetensors|model.safetensors is not a complete safetensors file"
    ):
        load_weights(Toy(), path)


def test_mismatched_names_raise_and_change_nothing() -> None:
    model = Toy()
    before = model.inner.weight.clone()
    tensors = {name: tensor + 1 for name, tensor in get_weights(model).items()}
    tensors["nobody"] = tensors.pop("read.bias")
    with pytest.raises(InputError, match=r"read.bias is missing; nobody is unexpected"):
        set_weights(model, tensors)
    assert torch.equal(model.inner.weight, before)


def test_weights_are_averaged_in_float64(tmp_path: Path) -> None:
    """In float32, 2²⁴ + 1 is 2²⁴: the ones would be lost."""
    for number, value in enumerate([2.0**24, 1.0, 1.0, -(2.0**24)]):
        write_safetensors({"x": torch.tensor([value]), "n": torch.tensor([number])}, tmp_path / str(number))
    mean = average_weights([tmp_path / str(number) for number in range(4)])
    assert mean["x"].item() == 0.5
    assert mean["x"].dtype == torch.float32
    assert mean["n"].tolist() == [3]  # whole numbers have no mean: those of the last


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with atomic_write(path) as part:
            part.write_text("new")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / ".file.part").mkdir()  # left by someone who was killed
    with atomic_write(path) as part:
        part.write_text("new")
    assert path.read_text() == "new"


def test_partial_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.part").write_text("")
    (tmp_path / ".b.part" / "deep").mkdir(parents=True)
    (tmp_path / "c").write_text("")
    remove_partial_files(tmp_path)
    remove_atomically(tmp_path / "nobody")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# ---------------------------------------------------------------------------------- a whole run

SETTINGS = quick(max_steps=8, save_every=4, validate_every=2, average_checkpoints=2, schedule="constant")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train(Toy(0.3), PointData(), SETTINGS, tmp_path / "run", validate=validate_toy)
    return tmp_path / "run"


def go_on(run: Path, steps: int = 12) -> None:
    longer = quick(max_steps=steps, save_every=4, validate_every=2, average_checkpoints=2, schedule="constant")
    train(Toy(0.3, seed=4), PointData(), longer, run, validate=validate_toy)


def test_files_of_a_finished_run(run: Path) -> None:
    files = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    assert files == [
        "metrics.jsonl",
        "model.safetensors",
        "state/00000008/model.safetensors",
        "state/00000008/optimizer.safetensors",
        "state/00000008/state.json",
        "state/snapshots/00000006.safetensors",
        "state/snapshots/00000008.safetensors",
    ]
    keys = read_safetensors(run / "state/00000008/optimizer.safetensors").keys()
    assert "exp_avg/inner.weight" in keys
    assert "exp_avg_sq/again.weight" not in keys  # tied


@pytest.mark.parametrize("damage", ["no json", "torn json", "no weights", "short optimizer", "empty"])
def test_a_damaged_newer_checkpoint_is_skipped(run: Path, damage: str) -> None:
    """As if a disk had lost what it was given: the older one is taken, and the damaged one goes."""
    newest = run / "state" / "00000008"
    damaged = run / "state" / "00000012"
    shutil.copytree(newest, damaged)
    if damage == "no json":
        (damaged / "state.json").unlink()
    elif damage == "torn json":
        (damaged / "state.json").write_text((damaged / "state.json").read_text()[:-40])
    elif damage == "no weights":
        (damaged / "model.safetensors").unlink()
    elif damage == "short optimizer":
        path = damaged / "optimizer.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    else:
        shutil.rmtree(damaged)
        damaged.mkdir()
    go_on(run)
    (only,) = (run / "state").glob("0*")
    assert json.loads((only / "state.json").read_text())["state"]["step"] == 12
    assert [line["step"] for line in read_metrics(run, "train")] == list(range(1, 13))


def test_a_run_without_an_intact_checkpoint_raises(run: Path) -> None:
    (run / "state" / "00000008" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"damaged: .*model.safetensors has 0 bytes instead of \d+"):
        go_on(run)
    assert (run / "model.safetensors").exists()


def test_partially_written_checkpoints_are_ignored(run: Path) -> None:
    before = read_state(run)
    shutil.copytree(run / "state" / "00000008", run / "state" / ".00000010.part")
    (run / "state" / "notes.txt").write_text("what a user puts there stays there")
    train(Toy(0.3), PointData(), SETTINGS, run, validate=validate_toy)
    assert tensors_equal(read_state(run), before)
    go_on(run)
    assert not list((run / "state").glob(".*"))
    assert (run / "state" / "notes.txt").exists()


@pytest.mark.parametrize("cut", [False, True])
def test_damaged_snapshots_are_left_out_of_the_average(run: Path, cut: bool) -> None:
    """The mean is that of those that are left."""
    scores = itertools.count()
    for steps, lost, message, averaged in (
        (12, (8,), "averaging 3.", 3),  # of 6, 10, 12
        (14, (10, 12), "nothing is averaged.", 0),
    ):
        for step in lost:
            path = run / "state" / "snapshots" / f"{step:08}.safetensors"
            path.write_bytes(path.read_bytes()[:-1])
            if not cut:
                path.unlink()
        file = io.StringIO()
        settings = quick(max_steps=steps, validate_every=2, average_checkpoints=4, schedule="constant")
        summary = train(
            Toy(0.3),
            PointData(),
            settings,
            run,
            validate=lambda model: ValidationReport({"score": next(scores)}, "score"),
            console=Console(file=file, width=1000),
        )
        assert summary.best is not None
        assert (summary.best.step, summary.best.num_averaged) == (steps, averaged)
        (line,) = (one for one in file.getvalue().splitlines() if "missing or damaged" in one)
        assert line.endswith(message)
        assert all(f"{step:08}.safetensors" in line for step in lost)


def test_other_formats_raise(run: Path) -> None:
    path = run / "state" / "00000008" / "state.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(InputError, match="has format 1, and this version of jumok reads format 2; train again"):
        go_on(run)
