"""Damaged files of a run: ``jumok run`` names the file, without a traceback."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import caption_runs
import labelled_runs
import pytest
import speech_runs
import translation_runs

from jumok import recipe
from jumok.cli import app as cli_app
from jumok.run import Run
from jumok.tasks import build_task
from jumok.tasks.training import train

pytestmark = pytest.mark.long


TRAIN = {"max_epochs": None, "max_steps": 2, "warmup_steps": 1}
TEXT = {"caption": "scenes:4", "speak": "seven"}  # inputs of tasks that do not read a text


def reviews(path: Path) -> dict[str, object]:
    rng = random.Random(1)
    rows = [labelled_runs.make_review(rng) for _ in range(40)]
    return {"train": labelled_runs.write_table(path / "reviews.tsv", "text\tlabel", rows), "held_out_size": 8}


def a_classifier_of_words(path: Path) -> Run:
    data = reviews(path)
    overrides = [f"data.{name}={value}" for name, value in data.items()]
    settings = ["model.width=8", "model.embedding_width=8", "train.device=cpu", "train.tensorboard=false"]
    settings += ["train.max_epochs=null", "train.max_steps=2", "train.warmup_steps=1", "train.average_checkpoints=0"]
    run = Run.create_or_resume(path / "run", recipe.load("self_attentive", [*settings, *overrides]))
    train(build_task(run), caption_runs.QUIET)
    return run


MADE: dict[str, Callable[[Path], Run]] = {
    "translate": lambda path: translation_runs.train_run(path / "run", "bahdanau"),
    "classify": lambda path: labelled_runs.train_run(path / "run", "classify", reviews(path), train=TRAIN),
    "words": a_classifier_of_words,
    "caption": lambda path: caption_runs.train_run(path / "run", caption_runs.small_recipe("captioner")),
    "speak": lambda path: speech_runs.train_run(
        path / "run", speech_runs.small_recipe("tacotron", "data.held_out_size=5")
    ),
}
DAMAGE: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "binary": bytes(range(255, -1, -1)) * 9,
    "zeros": bytes(5000),
    "a list": b"[]",
    "an object": b"{}",
    "a number": b"7",
    "null": b"null",
    "text": b'"text"',
    "other content": b'{"vocabulary": "many", "share": [], "characters": 7, "numbers": [], "format": {}}',
    "deep": b"[" * 100_000,
}


CUT = ("cut in half", "one byte less")
FAST = ("classify",)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MADE]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return MADE[request.param](tmp_path_factory.mktemp(request.param))


def damages(data: bytes) -> dict[str, bytes | None]:
    return DAMAGE | dict(zip(CUT, (data[: len(data) // 2], data.rstrip()[:-1]), strict=True))


def test_a_damaged_file_is_reported_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("state", "data"))
    monkeypatch.chdir(tmp_path)
    text = TEXT.get(run.recipe.task, "a text")
    monkeypatch.setattr(sys, "argv", ["jumok", "run", str(folder), text, "--device", "cpu"])
    failures = []
    for file in Run.open(folder).model_files:
        data = file.read_bytes()
        for name, content in damages(data).items():
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(SystemExit) as ended:
                cli_app.main()
            message = capsys.readouterr().err
            if ended.value.code:
                failures += (
                    [] if message.startswith("jumok: ") and file.name in message else [(file.name, name, message)]
                )
            elif not (file.name == "recipe.yaml" and name in CUT):  # it may be YAML still
                failures.append((file.name, name, "nothing was said"))
        file.write_bytes(data)
    assert not failures
    with pytest.raises(SystemExit) as ended:
        cli_app.main()
    assert not ended.value.code
