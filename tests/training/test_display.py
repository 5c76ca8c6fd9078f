"""What one sees: on a terminal a bar, elsewhere lines."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from torch import nn
from training_toy import PointData, Toy, quick, validate_toy

from jumok.progress import format_duration
from jumok.training import ValidationReport, train
from jumok.training.checkpoint import TrainState
from jumok.training.display import TrainingDisplay


def console(terminal: bool = False, width: int = 80) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width, color_system=None), file


def with_samples(model: nn.Module) -> ValidationReport:
    figures = validate_toy(model).metrics | {"attention/entropy": 0.25}
    return ValidationReport(figures, "error", higher_is_better=False, samples=["[red]a dog[/red] → 개", "[/oops]"])


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    shown, file = console()
    settings = quick(max_steps=6, log_every=3, validate_every=6, average_checkpoints=0)
    train(Toy(), PointData(), settings, tmp_path, validate=with_samples, console=shown)
    text = file.getvalue().splitlines()
    assert text[0].startswith("epoch 1 · step 3/6 · loss ")
    assert text[0].endswith(" left")
    assert "lr 0.0058" in text[0]
    assert text[1].startswith("epoch 2 · step 6/6 · loss ")
    assert text[2] == "Validation of step 6"
    assert "← best so far" in text[3]
    assert text[4].split() == ["attention/entropy", "0.25"]
    assert text[5].strip() == "[red]a dog[/red] → 개"  # data, never markup
    assert text[6].strip() == "[/oops]"
    assert text[7] == "Finished: all 6 steps are done."
    assert text[8].startswith("Best: error ")
    assert text[9].startswith("6 steps, 1 complete epochs, ")
    assert str(tmp_path) in "".join(text[10:])
    assert all(len(line) <= 80 for line in text[:10])


LONG = "  said    a dog and a cat and a bird and a fish and a horse and a cow and a hen and a very small pig"


def test_long_samples_are_wrapped_below_their_label() -> None:
    report = ValidationReport({"bleu": 1.0}, "bleu", samples=[LONG, "  wanted  " + "개" * 50, "  said    "])
    shown, file = console()
    TrainingDisplay(shown, quick(), None, TrainState()).show_validation(report, "step 1", is_best=True)
    assert file.getvalue().splitlines()[2] == f"  {LONG}"  # in a file, whole

    shown, file = console(terminal=True)
    TrainingDisplay(shown, quick(), None, TrainState()).show_validation(report, "step 1", is_best=True)
    text = file.getvalue().splitlines()
    assert [cell_len(line) <= 80 for line in text] == [True] * 8
    assert [line[:10] for line in text[2:]] == [
        "    said  ",
        " " * 8 + text[3].strip()[:2],
        "    wanted",
        " " * 8 + "개개",  # a word that is too long for any line
        " " * 8 + "개개",
        "    said  ",
    ]
    assert " ".join(line.strip() for line in text[2:4]) == LONG.strip()
    assert "".join(line.strip() for line in text[4:7]) == "wanted" + "개" * 50


def test_resumed_and_finished_runs_are_reported(tmp_path: Path) -> None:
    train(Toy(), PointData(), quick(max_steps=2), tmp_path)
    shown, file = console()
    train(Toy(), PointData(), quick(max_steps=3), tmp_path, console=shown)
    assert file.getvalue().startswith("Resuming after step 2.\n")
    shown, file = console()
    train(Toy(), PointData(), quick(max_steps=3), tmp_path, console=shown)
    assert file.getvalue() == "This run is already finished: all 3 steps are done.\n"


def test_a_shortened_warmup_is_reported(tmp_path: Path) -> None:
    def first_line(name: str, **changes: Any) -> str:
        shown, file = console(width=200)
        train(Toy(), PointData(), quick(warmup_steps=70, **changes), tmp_path / name, console=shown)
        return file.getvalue().splitlines()[0]

    assert first_line("short", max_steps=None, max_epochs=4) == (
        "The training has 20 steps, and train.warmup_steps is 70: the warm-up is shortened to 2 steps, a tenth."
    )
    assert "never reaches its peak" in first_line("given", max_steps=7)
    assert first_line("long", max_steps=71).startswith("epoch 1")


class Uneven(PointData):
    """Epochs of 4, 5 and 5 batches."""

    def batches(self, epoch: int) -> list[Any]:
        return super().batches(epoch)[epoch == 0 :]


def test_the_last_step_of_uneven_epochs(tmp_path: Path) -> None:
    shown, file = console()
    summary = train(Toy(), Uneven(), quick(max_steps=None, max_epochs=3), tmp_path, console=shown)
    assert summary.num_steps == 14
    assert "epoch 3 · step 14/14 · " in file.getvalue()


def test_no_output_without_a_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Toy(), PointData(), quick(), tmp_path, validate=with_samples)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [80, 120])
def test_the_progress_bar_fits_the_terminal(width: int) -> None:
    shown, file = console(terminal=True, width=width)
    standing = TrainState(step=12_345, epoch=11, epoch_step=3, seconds=3000.0)
    display = TrainingDisplay(shown, quick(max_steps=100_000), 100_000, TrainState())
    with display:
        figures = {"loss": 2.3456, "labels_per_second": 123_456.7, "learning_rate": 7.12e-4}
        display.show_train_metrics(standing, figures)
        display.advance(standing)
        display._progress_bar.refresh()  # type: ignore[union-attr]
    text = file.getvalue()
    assert "epoch 12 · step 12,345/100,000" in text
    assert "loss 2.346" in text
    assert "123,457 tokens/s" in text
    assert ("lr 0.00071" in text) == (width == 120)
    assert "5:55:01 left" in text  # 87,655 steps more at 3,000 / 12,345 s


def test_the_unit_of_the_speed() -> None:
    shown, file = console(terminal=False, width=120)
    display = TrainingDisplay(shown, quick(max_steps=10), 10, TrainState(), unit="hidden words")
    display.show_train_metrics(TrainState(step=1), {"loss": 2.0, "labels_per_second": 31.0, "learning_rate": 1e-3})
    assert "31 hidden words/s" in file.getvalue()


def test_time_left_until_the_nearest_limit() -> None:
    standing = TrainState(step=100, seconds=50.0)
    both = TrainingDisplay(None, quick(max_steps=1000, max_minutes=2.0), 1000, TrainState())
    assert both._estimate_seconds_left(standing) == 70.0
    steps = TrainingDisplay(None, quick(max_steps=1000), 1000, TrainState())
    assert steps._estimate_seconds_left(standing) == 450.0
    resumed = TrainingDisplay(None, quick(max_steps=1000), 1000, TrainState(step=80, seconds=30.0))
    assert resumed._estimate_seconds_left(standing) == 900.0  # by the speed of this session
    open_end = TrainingDisplay(None, quick(max_steps=None), None, TrainState())
    assert open_end._estimate_seconds_left(standing) is None
    assert both.compute_progress(standing) == pytest.approx(50 / 120)


def test_format_duration() -> None:
    assert [format_duration(s) for s in (0, 59.6, 3599, 3600, 100_000)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "27:46:40",
    ]


def test_a_missing_tensorboard_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    shown, file = console()
    train(Toy(), PointData(), quick(max_steps=1, tensorboard=True), tmp_path, console=shown)
    assert file.getvalue().startswith("TensorBoard is not installed: pip install")
    assert not (tmp_path / "tensorboard").exists()
