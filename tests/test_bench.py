"""The benchmarks run, on the smallest sizes, and report what they should."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """Import a file of bench/ as its scripts do."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in {"report", "attention"} - before:
        sys.modules.pop(name, None)


def test_the_attention_bench_measures_every_section_and_agrees_with_float64(tmp_path: Path) -> None:
    out = tmp_path / "attention.json"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "bench/attention.py", "--quick", "--no-compile", "--device", "cpu", "--out", out],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JUMOK_COMMIT": "abc1234"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    assert last.endswith(out.name)  # as long as the path happens to be
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["commit"] == "abc1234"
    assert found["machine"]["torch"] == torch.__version__
    assert {row["section"] for row in found["rows"]} == {"additive", "dot", "step"}
    for row in found["rows"]:
        assert not [way for way in row["ways"].values() if "error" in way], row
        assert row["ways"]["ours"]["ms"] > 0
        assert row["path"]
        assert row["ratios"]
    checked = [row["errors"] for row in found["rows"] if "errors" in row]
    assert len(checked) == 1 + 8 + 2
    assert max(max(errors[way].values()) for errors in checked for way in ("ours", "eager")) < 1e-5


def test_what_fails_is_told_in_its_place_and_the_rest_goes_on(bench, tmp_path: Path) -> None:
    report = bench("report").Report("test", torch.device("cpu"), repeats=2)
    report.out = tmp_path / "deep" / "test.json"
    row = report.row("section", "case", "forward")

    def broken() -> None:
        raise RuntimeError("out of memory\nand more")

    report.measure(row, "broken", broken)
    report.measure(row, "fine", lambda: torch.ones(3) + 1)
    report.note(row, errors={"ours": {"out": math.nan}})
    found = json.loads(report.out.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert found["rows"][0]["ways"]["broken"] == {"error": "RuntimeError: out of memory"}
    assert found["rows"][0]["ways"]["fine"]["repeats"] == 2
    assert found["rows"][0]["errors"]["ours"]["out"] == "nan"


def test_when_the_time_is_up_the_rest_is_left_out(bench) -> None:
    report = bench("report").Report("test", torch.device("cpu"), seconds=0)
    way = report.measure(report.row("section", "case"), "late", lambda: pytest.fail("was run"))
    assert way == {"error": "skipped, the time was up"}


def test_numbers_have_three_digits_that_matter(bench) -> None:
    number = bench("report").number
    came = [number(x) for x in (0.064231, 1.0, 0.99996, 12.345, 123.4, 6148.2, 3.2e-7, 0.0, None, math.nan)]
    assert came == ["0.0642", "1.00", "1.00", "12.3", "123", "6,148", "3.2e-07", "0", "–", "nan"]


def test_the_floor_of_an_h200_is_the_one_worked_out_by_hand(bench) -> None:
    attention = bench("attention")
    report = bench("report").Report("test", torch.device("cpu"))
    assert attention.tanh_floor(report, 32 * 128 * 128 * 512, 1) is None
    report.head["machine"] |= {"multiprocessors": 132, "sm_mhz": 1980.0}
    assert attention.tanh_floor(report, 32 * 128 * 128 * 512, 1) == pytest.approx(0.0642, abs=1e-4)


def test_the_float64_reference_is_the_same_in_pieces(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = bench("attention")
    plan = attention.Plan(torch.device("cpu"), quick=True, compile=False)
    score = plan.additive(7, 7, 5)
    leaves = [plan.random(2, n, 7) for n in (11, 3, 3)]
    leaves += [score.query.weight, score.key.weight, score.v]
    upstream = plan.random(2, 11, 7, grad=False)
    whole = attention.additive_in_float64(leaves, upstream)
    monkeypatch.setattr(attention, "AT_ONCE", 4 * 3 * 5)  # four rows at a time
    for x, y in zip(attention.additive_in_float64(leaves, upstream), whole, strict=True):
        torch.testing.assert_close(x, y)
