"""The benchmark of looking runs, on the smallest sizes, and reports what it should."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch):
    """bench/look.py, imported as a script would be."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)
    yield importlib.import_module("look")
    for name in {"report", "look"} - before:
        sys.modules.pop(name, None)


def test_it_measures_forward_maps_and_tiles_and_agrees_with_float64(tmp_path: Path) -> None:
    out = tmp_path / "look.json"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = ["bench/look.py", "--quick", "--device", "cpu", "--tokens", "97", "--size", "13", "--out", out]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JUMOK_COMMIT": "abc1234"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    assert last.endswith(out.name)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["commit"] == "abc1234"
    sections = [row["section"] for row in found["rows"]]
    assert sections == ["forward", "maps", *["tile"] * 5] * 2
    for row in found["rows"]:
        assert not [way for way in row["ways"].values() if "error" in way], row
        assert all(way["ms"] > 0 for way in row["ways"].values())
        assert row["ratios"].keys() == row["ways"].keys()
    assert all(row["worst_cell"] < 1e-5 for row in found["rows"] if row["section"] == "maps")


def test_the_check_would_see_a_wrong_map(look, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = look.Layer(*look.torch.randn(3, 1, 2, 31, 8).unbind(), causal=True)
    right = look.views.map
    assert look.errors(layer, layer.kept(None), 7)["worst_cell"] < 1e-5
    monkeypatch.setattr(look.views, "map", lambda *a, **more: right(*a, **more).flip(-1))
    assert look.errors(layer, layer.kept(None), 7)["worst_cell"] > 0.1


def test_rectangles_lie_within(look) -> None:
    for tokens in (1, 2, 131072):
        for rows, cols in look.rectangles(tokens):
            assert 0 <= rows[0] < rows[1] <= tokens
            assert 0 <= cols[0] < cols[1] <= tokens
