"""Fixtures of the tests of benchmarks: import a module of bench/, or run a script."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from jumok import recipe
from jumok.run import Run
from jumok.tasks import build_task, training

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem for path in (ROOT / "bench").glob("*.py")}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a module of bench/ as its scripts do."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = {name: sys.modules.pop(name) for name in SCRIPTS if name in sys.modules}
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture
def run_bench(
    bench: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., tuple[dict[str, Any], str]]]:
    """Run a benchmark with ``--quick``; returns its JSON and its output. No implementation of a row may fail."""

    def run(script: str, *arguments: str | Path, **env: str) -> tuple[dict[str, Any], str]:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        for name, value in {"PYTHONPATH": path, "JUMOK_COMMIT": "abc1234", **env}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        out = tmp_path / f"{script}.json"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other libraries, as in a script
            bench(script).main(["--quick", "--out", str(out), *map(str, arguments)])
        printed = capsys.readouterr().out
        *lines, last = printed.splitlines()
        assert max(map(len, lines)) <= 120
        assert last.endswith(out.name)
        assert "DIFFERENT" not in printed
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        assert result["commit"] == "abc1234"
        for row in result["rows"]:
            if row["case"] != "eflomal":  # an optional package
                assert not [result for result in row["implementations"].values() if "error" in result], row
        return result, printed

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def train_translator() -> Callable[[Path, dict[str, Any]], Run]:
    """Train a translator of a few steps on the CPU; ``settings`` override the defaults."""

    def train(folder: Path, settings: dict[str, Any]) -> Run:
        train_settings = {"average_checkpoints": 0, "tensorboard": False, "device": "cpu"}
        settings = {"task": "translate", **settings, "train": {**train_settings, **settings["train"]}}
        run = Run.create_or_resume(folder, recipe.parse(settings))
        training.train(build_task(run), Console(quiet=True))
        return run

    return train
