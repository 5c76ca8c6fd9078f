"""The benchmark of serving runs on a small model: every way is measured, and an overload told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def ran(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, str(ROOT / "bench" / "serving.py"), "--quick", "--out", "serving.json"]
    done = subprocess.run(
        [*words, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JUMOK_COMMIT": "abc1234"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *lines, _ = done.stdout.splitlines()  # the last names a file, wherever that is
    assert max(map(len, lines)) <= 110
    return json.loads((folder / "serving.json").read_text(encoding="utf-8")), done.stdout


@pytest.mark.slow
def test_speed_and_overload(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    found, said = ran(tmp_path)
    assert (found["commit"], found["beam"]) == ("abc1234", 4)
    speed, overload = found["rows"]
    assert speed["sentences"] == 24
    assert all(way["sentences_s"] > 0 for way in speed["ways"].values())
    assert len(speed["ways"]) == 5
    ratios, ways = speed["ratios"], speed["ways"]
    both = ways["server, ctranslate2"]["sentences_s"] / ways["ctranslate2 itself"]["sentences_s"]
    assert ratios["server, ctranslate2 / ctranslate2 itself"] == pytest.approx(both, rel=1e-3)
    assert 1 <= ways["server, torch"]["in_a_batch"] <= 4
    [way] = overload["ways"].values()
    assert set(way["statuses"]) <= {"200", "503"}
    assert way["statuses"]["503"] > 0
    assert way["without_retry_after"] == 0
    assert way["answers_after"]
    assert len(way["mib"]) >= 3
    assert "overload: 4 times as much as it does" in said
