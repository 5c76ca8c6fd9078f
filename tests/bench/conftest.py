"""Shared by the tests of benchmarks: run a script of bench/, or import one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jumok import recipe
from jumok.run import Run
from jumok.tasks import build_task, training

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem for path in (ROOT / "bench").glob("*.py")}


@pytest.fixture
def run_bench(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """Run a benchmark with ``--quick``; returns its JSON and what it printed. No way of a row may fail."""

    def run(script: str, *arguments: str | Path, cwd: Path = ROOT, **env: str) -> tuple[dict[str, Any], str]:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        out = tmp_path / f"{script}.json"
        command = [sys.executable, ROOT / "bench" / f"{script}.py", "--quick", "--out", out, *arguments]
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JUMOK_COMMIT": "abc1234", **env},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        *lines, last = done.stdout.splitlines()
        assert max(map(len, lines)) <= 110
        assert last.endswith(out.name)  # as long as the path happens to be
        assert "DIFFERENT" not in done.stdout
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        assert result["commit"] == "abc1234"
        for row in result["rows"]:
            if row["case"] != "eflomal":  # it is rarely installed
                assert not [way for way in row["ways"].values() if "error" in way], row
        return result, done.stdout

    return run


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a module of bench/ as its scripts do."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = {name: sys.modules.pop(name) for name in SCRIPTS if name in sys.modules}
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture(scope="session")
def train_translator() -> Callable[[Path, dict[str, Any]], Run]:
    """Train a translator of a few steps on the CPU; the settings are added to those given here."""

    def train(folder: Path, settings: dict[str, Any]) -> Run:
        train_settings = {"average_checkpoints": 0, "tensorboard": False, "device": "cpu"}
        settings = {"task": "translate", **settings, "train": {**train_settings, **settings["train"]}}
        run = Run.create_or_resume(folder, recipe.parse(settings))
        training.train(build_task(run), Console(quiet=True))
        return run

    return train
