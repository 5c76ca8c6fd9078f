"""Killed at any moment, a run goes on to the same losses and weights, bit by bit."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


SCRIPT = Path(__file__).with_name("training_kills.py")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory if possible, for a slow disk would be synced thousands of times."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def kills(folder: Path, timed: int, points: int) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(timed), str(points)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["steps"] == 9  # two at a time, and the last
    assert report["differ"] == [], done.stderr
    assert report["killed"] >= points  # a timed one may come after the end


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_some_kills(folder: Path) -> None:
    kills(folder, timed=4, points=9)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_hundred_kills_and_one_at_every_call(folder: Path) -> None:
    kills(folder, timed=100, points=320)
