"""The benchmark of BERT runs, on the smallest sizes, and finds that both sides do the same work."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jumok.batches.tokens import IGNORE
from jumok.models.bert import BertConfig, BertPretrainingModel

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
MODULES = {"report", "drawn", "peers", "training", "bert"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark, imported as scripts of bench/ are."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield importlib.import_module("bert")
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_it_measures_both_sides_from_the_same_start_and_to_the_same_outputs(tmp_path: Path) -> None:
    out = tmp_path / "bert.json"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "bench/bert.py", "--quick", "--device", "cpu", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JUMOK_COMMIT": "abc1234"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    assert last.endswith(out.name)
    assert "DIFFERENT" not in done.stdout
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["commit"] == "abc1234"
    reading = [row for row in found["rows"] if row["section"] == "inference"]
    learning = [row for row in found["rows"] if row["section"] == "pretraining"]
    assert len(reading) == 5
    assert [row["pass"] for row in learning] == ["attention dropout 0.1", "attention dropout 0.0"]
    for row in found["rows"]:
        assert row["ways"].keys() >= {"ours", "transformers"}
        for name, way in row["ways"].items():
            assert "error" not in way, way
            assert way["tokens_s"] == pytest.approx(row["tokens"] / way["ms"] * 1e3, rel=1e-3), name
        ours, theirs = (row["ways"][name]["ms"] for name in ("ours", "transformers"))
        assert row["ratios"]["ours / transformers"] == pytest.approx(ours / theirs, rel=1e-3)
    for row in reading:
        assert set(row["differs"]) == {"hidden", "pooled"}
        assert max(row["differs"].values()) <= 1e-5
        assert row["ways"]["ours"]["repeats"] == row["ways"]["transformers"]["repeats"] == 3
    for row in learning:
        assert row["weights"]["ours"] == row["weights"]["transformers"]
        assert row["tokens"] == 2 * sum(8 + n * 17 // 6 for n in range(6))
        starts = [way["start"] for way in row["ways"].values()]
        assert starts == pytest.approx([starts[0]] * 3, rel=1e-4)
        assert all(way["end"] < way["start"] for way in row["ways"].values())  # it is learned, too


def test_drawn_batches_say_the_same_packed_padded_and_to_transformers(bench: Any) -> None:
    size = bench.Size(texts=8, shortest=8, longest=24, vocabulary=50)
    one, other = bench.Drawn.of(size, 2)
    assert sorted(one.lengths) == sorted(other.lengths) == [8 + n * 17 // 8 for n in range(8)]
    assert not np.array_equal(one.ids, other.ids)
    assert one.packed().form == other.packed().form
    assert one.padded().form == other.padded().form

    packed, padded = one.packed(), one.padded()
    counted = packed.labels != IGNORE
    assert int(counted.sum()) == padded.count == packed.count == sum(round(n * 0.15) for n in one.lengths)
    seen = [batch.tokens.ids.flatten()[batch.places] for batch in (packed, padded)]
    assert torch.equal(seen[0][counted], seen[1])
    inputs = bench.Inputs.of(padded).named
    assert int((inputs["labels"] != IGNORE).sum()) == padded.count
    assert torch.equal(inputs["labels"].flatten()[padded.places], padded.labels)
    assert inputs["attention_mask"].sum(1).tolist() == one.lengths.tolist()
    for ids, length in zip(inputs["input_ids"].tolist(), one.lengths, strict=True):
        assert ids[0] == bench.CLS
        assert ids[length // 2] == ids[length - 1] == bench.SEP
        assert set(ids[length:]) <= {bench.PAD}
    model = BertPretrainingModel(
        BertConfig(width=8, num_heads=2, feed_forward_width=16, max_positions=128), 50
    ).eval()
    torch.testing.assert_close(model.loss(packed).total, model.loss(padded).total)


def test_most_masked_words_are_hidden_and_labels_are_what_stood_there(bench: Any) -> None:
    (drawn,) = bench.Drawn.of(bench.Size(texts=200, shortest=32, longest=128, vocabulary=300), 1)
    shown = drawn.ids[drawn.places]
    assert np.mean(shown == bench.MASK) == pytest.approx(0.8, abs=0.03)
    assert np.mean(shown == drawn.labels) == pytest.approx(0.1, abs=0.03)
    assert drawn.labels.min() > bench.MASK  # special tokens are never asked for
    assert np.mean(drawn.lengths) == pytest.approx(80, abs=0.5)


def test_what_matters_most_is_measured_first(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    monkeypatch.setattr(bench, "measure", lambda report, row, way: done.append((row["pass"][-3:], way.name)))
    report = bench.Report("test", torch.device("cpu"))
    bench.pretraining(report, bench.Plan(torch.device("cpu"), quick=True, compile=True))
    most = ["ours", "transformers, compiled", "transformers"]
    assert done[:6] == [(share, name) for share in ("0.1", "0.0") for name in most]
    assert done[6:] == [(share, name) for share in ("0.1", "0.0") for name in ("ours, padded", "ours, eager")]


def test_a_way_that_fails_is_told_and_a_late_one_left_out(bench: Any) -> None:
    report = bench.Report("test", torch.device("cpu"))
    row = report.row("pretraining", "case", tokens=1)

    def broken() -> None:
        raise RuntimeError("no such kernel")

    bench.measure(report, row, bench.Way("broken", broken))
    report.seconds = 0.0
    bench.measure(report, row, bench.Way("late", lambda: pytest.fail("was made")))
    assert row["ways"]["broken"] == {"error": "RuntimeError: no such kernel"}
    assert row["ways"]["late"]["error"].startswith("skipped")


def test_mixes_are_uneven_as_they_say(bench: Any) -> None:
    mixes = bench.mixes(128, 32)
    real = {name: float(lengths.sum()) / (32 * lengths.max()) for name, lengths in mixes.items()}
    assert [len(lengths) for lengths in mixes.values()] == [32] * 5
    assert real["32 to 128"] == pytest.approx(80 / 128, abs=0.02)
    assert real["one of 128, the rest of 16"] == (128 + 31 * 16) / (32 * 128)
    assert real["all of 64"] == 1
    assert real["112 to 128"] > 0.9
    assert 0.15 < real["as sentences are"] < 0.45


def test_ways_are_called_in_turn_and_what_comes_too_late_is_told(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = iter([9.0, 9.0, 1.0, 2.0, 1.0, 4.0, 2.0, 6.0])  # seconds: a first call of each, then three turns
    monkeypatch.setattr(bench.r, "_clocked", lambda run: (run(), next(took))[1])
    called: list[str] = []
    runs = {name: lambda name=name: called.append(name) for name in ("ours", "transformers")}
    report = bench.Report("test", torch.device("cpu"))
    row = report.row("inference", "case", tokens=100)
    bench.in_turn(report, row, runs, 3)
    assert called == ["ours", "transformers"] * 4
    assert row["ways"]["ours"]["ms"] == 1000
    assert row["ways"]["transformers"]["tokens_s"] == 25
    assert (row["in_turn"], row["best"]) == (3, 2)  # 2, 4, 3; and 2 / 1
    late = report.row("inference", "late", tokens=100)
    report.seconds = 0.0
    bench.in_turn(report, late, runs, 3)
    assert late["ways"]["ours"]["error"].startswith("skipped")
