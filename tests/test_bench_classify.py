"""The benchmark of classifiers runs, on the smallest sizes, and both networks are found to say the same."""

import gzip
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

from jumok.batches.tokens import PAD
from jumok.data.batching.documents import DocumentBatcher
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[1]
MODULES = {"report", "drawn", "peers", "training", "padded", "reviews", "tfidf", "classify"}
SMALL = HierarchicalConfig(embedding_width=7, width=3, attention_width=5)
DOCUMENTS = [[[4, 9, 5], [7]], [[10, 6, 8, 8, 21, 4, 5]], [[5, 5], [20, 13, 11, 4], [9], [6, 7]]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark, imported as scripts of bench/ are."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield importlib.import_module("classify")
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def made_up(folder: Path) -> None:
    """Data sets in the forms of the real ones, whose labels some words tell."""
    chance = np.random.default_rng(0)
    words = ["bad", "dull", "fine", "great"]

    def zipped(name: str, lines: list[str]) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
            file.write("".join(lines))

    for split in ("train", "test"):
        kinds = chance.integers(0, 4, 150).tolist()
        ratings = [(1, 2, 9, 10)[kind] for kind in kinds]
        texts = [f"It was\u0085 {words[kind]}!<br />Yes. I saw it." for kind in kinds]
        zipped(f"imdb/{split}.jsonl.gz", [
            json.dumps({"text": text, "label": int(rating > 5), "rating": rating}, ensure_ascii=False) + "\n"
            for text, rating in zip(texts, ratings, strict=True)
        ])  # fmt: skip
        news = [f'"{kind + 1}","a ""{words[kind]}"" one","of news"\r\n' for kind in kinds]
        zipped(f"ag_news/{split}.csv.gz", news)
        rows = [f'{kind}\t"{words[kind]} 영화\t{kind // 2}\r\n' for kind in kinds]  # a quote that never ends
        zipped(f"nsmc/{split}.tsv.gz", ["id\tdocument\tlabel\n", *rows, "7\t\t1\n"])


def test_it_measures_both_over_the_same_documents(tmp_path: Path) -> None:
    made_up(tmp_path)
    run = tmp_path / "selfattentive-ag_news"
    (run / "eval").mkdir(parents=True)
    (run / "eval" / "test.json").write_text(json.dumps({"split": "test", "accuracy": 0.5}), encoding="utf-8")
    out = tmp_path / "classify.json"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JUMOK_COMMIT": "abc1234"}
    done = subprocess.run(
        [sys.executable, "bench/classify.py", "--quick", "--device", "cpu", "--out", str(out), str(run)],
        cwd=ROOT,
        env={**os.environ, **more, "JUMOK_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    assert last.endswith(out.name)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["commit"] == "abc1234"
    assert found["machine"]["threads"] == 1
    for row in found["rows"]:
        for name, way in row["ways"].items():
            assert "error" not in way, (name, way)
        for name, way in row["ways"].items() if row["section"] != "baselines" else ():
            assert way["documents_s"] == pytest.approx(row["documents"] / way["ms"] * 1e3, rel=1e-3), name
            assert max(row["differs"].values()) <= 1e-5

    as_they_come, in_order = (row for row in found["rows"] if row["section"] == "inference")
    for row in (as_they_come, in_order):
        assert set(row["ways"]) == {"ours", "padded", "padded, packed GRU"}
        assert row["spread"][0] <= row["in_turn"] <= row["spread"][1]
    assert as_they_come["documents"] == in_order["documents"] == 6
    assert "ours as they come / padded, sorted" in as_they_come["ratios"]

    (learning,) = (row for row in found["rows"] if row["section"] == "training")
    ways = learning["ways"]
    assert len(ways) == 9
    starts = [ways[name]["start"] for name in ("padded", "padded, packed GRU")]
    assert starts[0] == pytest.approx(starts[1], abs=0.1)  # but for dropout
    assert {way["batches"] for name, way in ways.items() if "like" in name} == {4}
    for name in ("padded", "padded, like lengths"):
        best = min((name, f"{name}, packed GRU"), key=lambda way: ways[way]["ms"])
        expected = ways["ours"]["ms"] / ways[best]["ms"]
        assert learning["ratios"][f"ours / {best}"] == pytest.approx(expected, rel=1e-3)

    judged = {row["case"]: row for row in found["rows"] if row["section"] == "baselines"}
    assert list(judged) == ["imdb", "imdb-ratings", "ag_news", "nsmc"]
    for row in judged.values():
        assert row["ways"]["TF-IDF"]["accuracy"] > 0.95
    assert judged["imdb-ratings"]["ways"]["TF-IDF"]["mean_error"] < 0.2
    assert judged["nsmc"]["ways"]["TF-IDF"]["test"] == 151
    assert judged["ag_news"]["runs"] == [{"run": run.name, "task": "ag_news", "accuracy": 0.5}]


@pytest.mark.parametrize("packed", [True, False], ids=["packed GRU", "padding read"])
def test_the_padded_network_is_ours(bench: Any, packed: bool) -> None:
    torch.manual_seed(0)
    ours = HierarchicalAttentionNetwork(SMALL, 23, 2).eval()
    if packed:  # any weights; those over padding are right while biases are zero
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    theirs = bench.Padded.like(ours, packed)
    assert {name: x.shape for name, x in theirs.named_parameters()} == {
        name: x.shape for name, x in ours.named_parameters()
    }
    block = bench.Block.of(DOCUMENTS, [1, 0, 1])
    assert block.ids.shape == (3, 4, 7)
    assert int((block.ids != PAD).sum()) == sum(len(s) for document in DOCUMENTS for s in document)
    batch = DocumentBatcher(DOCUMENTS, [1, 0, 1], max_tokens=100, seed=1).collate([0, 1, 2])
    torch.testing.assert_close(theirs(block), ours.logits(batch), rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs.loss(block), ours.loss(batch).total / 3)


def test_networks_that_say_other_things_are_not_measured(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench.Plan(torch.device("cpu"), quick=True, compile=False)
    texts = bench.reviews("train", 7)
    ours = bench.network(texts.vocabulary, plan)
    assert max(bench.check(plan, ours, texts).values()) < 1e-6
    forward = bench.Padded.forward
    monkeypatch.setattr(bench.Padded, "forward", lambda self, block: forward(self, block) + 2e-5)
    with pytest.raises(RuntimeError, match="do not say the same"):
        bench.check(plan, ours, texts)


def test_drawn_documents_have_the_lengths_of_reviews(bench: Any) -> None:
    drawn = sys.modules["reviews"].drawn(5000, 300)
    sentences = [len(document) for document in drawn.documents]
    words = [len(sentence) for document in drawn.documents for sentence in document]
    assert np.mean(sentences) == pytest.approx(12, abs=1)  # in IMDB's training data 12.1
    assert np.mean(words) == pytest.approx(22.5, abs=1)  # 22.3
    assert np.quantile(words, 0.99) == pytest.approx(90, abs=20)  # 77
    assert min(min(s) for document in drawn.documents for s in document) == 4  # nothing special
    assert max(max(s) for document in drawn.documents for s in document) < drawn.vocabulary == 300
    assert set(drawn.labels) == {0, 1}


def test_costs_are_those_of_the_longest(bench: Any) -> None:
    texts = sys.modules["reviews"].Reviews("test", DOCUMENTS, [0, 1, 0], 30)
    assert texts.words == [4, 7, 9]
    chosen = bench.Chosen([[0, 2], [1]])
    assert chosen.costs(texts, "packed") == {"batches": 2, "steps": (4 + 4) + (7 + 1)}
    assert chosen.costs(texts, "padded")["real"] == 20 / (2 * 4 * 4 + 7)


def test_a_rating_that_is_near_is_less_wrong(bench: Any) -> None:
    shares = np.array([[0.5, 0.1, 0.4], [0.0, 0.0, 1.0]])
    found = bench.tfidf.errors(shares, np.array([1, 2, 10]), np.array([3, 10]))
    assert found == {"mean_error": 1.0, "mean_error_of_mean": pytest.approx((0.7 + 4.0 - 3) / 2)}


def test_of_which_task_a_run_is(bench: Any, tmp_path: Path) -> None:
    def told(name: str, recipe: str | None) -> str:
        run = tmp_path / name
        (run / "eval").mkdir(parents=True)
        (run / "eval" / "test.json").write_text('{"accuracy": 0.9, "names": ["a"]}', encoding="utf-8")
        if recipe:
            (run / "recipe.yaml").write_text(recipe, encoding="utf-8")
        (found,) = bench.tfidf.beside([run])
        assert found["accuracy"] == 0.9
        task: str = found["task"]
        return task

    assert told("a", "data: {train: imdb/train, label: label}") == "imdb"
    assert told("b", "data: {train: imdb/train, label: rating}") == "imdb-ratings"
    assert told("c", "data: {train: nsmc/train}") == "nsmc"
    assert told("hierarchical-imdb-ratings", None) == "imdb-ratings"
    assert told("mine", "data: {train: my.tsv}") == "unknown"
    with pytest.raises(FileNotFoundError, match="jumok eval"):
        bench.tfidf.beside([tmp_path / "nothing"])
