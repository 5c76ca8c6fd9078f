"""Every benchmark runs on the smallest sizes, and both sides of each comparison do the same work."""

from __future__ import annotations

import collections
import gzip
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.data.builtin import english_korean
from jumok.metrics.symmetrization import SYMMETRIZATIONS
from jumok.run import Run
from jumok.tasks.translate.data import TranslationData

pytestmark = pytest.mark.long


RunBench = Callable[..., tuple[dict[str, Any], str]]
TrainTranslator = Callable[[Path, dict[str, Any]], Run]
# Rates of implementations, with the keys of rows that count the same things.
RATES = {
    "tokens_s": ("tokens", "labels"),
    "sentences_s": ("sentences",),
    "documents_s": ("documents",),
    "frames_s": ("frames",),
    "times_real": ("seconds",),
}


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Check that rates, ratios, initial losses and differences of outputs agree with each other."""
    for row in rows:
        results = row["implementations"]
        for result in results.values():
            assert result.get("ms", 1) > 0
            for rate, counts in RATES.items():
                count = next((row[key] for key in counts if key in row), None)
                if rate in result and count is not None:
                    assert result[rate] == pytest.approx(count / result["ms"] * 1e3, rel=1e-3)
        for name, value in row.get("ratios", {}).items():
            x, _, y = name.partition(" / ")
            if x in results and y in results and "ms" in results[x]:
                assert value == pytest.approx(results[x]["ms"] / results[y]["ms"], rel=1e-3)
        if row["section"] in ("transformer", "bahdanau", "pretraining") or row["case"].startswith("12 utterances"):
            starts = [result["start"] for result in results.values()]
            assert starts == pytest.approx([starts[0]] * len(starts), rel=1e-3)
            assert len(set(row.get("weights", {"ours": 1}).values())) == 1
        assert max(row.get("differs", {"": 0}).values()) < 1e-3
        for errors in row.get("errors", {}).values():
            assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("script", "arguments", "package", "sections"),
    [
        ("attention", ["--no-compile"], "torch", {"overhead": 8, "additive": 2, "dot": 16, "step": 2}),
        ("look", ["--tokens", "97", "--size", "13"], "torch", {"forward": 2, "maps": 2, "statistics": 2, "tile": 10}),
        ("look", ["--section", "model"], "transformers", {"model": 3}),
        ("training", [], "transformers", {"transformer": 1, "bahdanau": 2, "host": 2, "host-bahdanau": 2}),
        ("decoding", [], "transformers", {"same": 2, "speed": 2, "host": 6}),
        ("bert", [], "transformers", {"inference": 5, "pretraining": 2}),
        ("speech", [], "librosa", {"training": 1, "synthesis": 2}),
    ],
)
def test_a_benchmark_runs(
    run_bench: RunBench, script: str, arguments: list[str], package: str, sections: dict[str, int]
) -> None:
    pytest.importorskip(package)
    result, _ = run_bench(script, "--device", "cpu", *arguments)
    rows = [row for row in result["rows"] if row["section"] != "implementations"]  # models that could not be loaded
    assert collections.Counter(row["section"] for row in rows) == sections
    assert all(any(result.startswith("ours") for result in row["implementations"]) for row in rows if script != "look")
    check_rows(rows)
    for row in rows:
        assert row["section"] != "maps" or row["worst_cell"] < 1e-5
        assert row["section"] not in ("additive", "dot", "step", "transformer") or row["path"]
        if row["section"] == "pretraining":
            assert row["tokens"] == 2 * sum(8 + n * 17 // 6 for n in range(6))
            assert all(result["end"] < result["start"] for result in row["implementations"].values())  # the loss falls
        if row["section"] == "same" and row["case"] == "greedy":
            assert row["implementations"]["ours"]["equal"] == 1.0
            assert "bleu" not in row["implementations"]["ours"]  # random weights
        if row["section"] == "host-bahdanau":
            assert row["implementations"]["ours"]["nodes"] < row["implementations"]["loop"]["nodes"]
            assert row["implementations"]["loop"]["functions"] == 0 < row["implementations"]["ours"]["functions"]
        if row["section"] == "host" and "equal" in row:
            assert row["equal"] == 1.0 or not row["case"].startswith("greedy")  # random weights, at the limit
        if row["section"] == "training":
            assert 50 < row["launches"]["ours"] < row["launches"]["loop"]


@pytest.fixture(scope="module")
def copying_run(tmp_path_factory: pytest.TempPathFactory, train_translator: TrainTranslator) -> Run:
    """A Transformer that has learned to repeat sentences of one to six words."""
    folder = tmp_path_factory.mktemp("decoding")
    rng = random.Random(0)
    for name, count in (("train", 400), ("valid", 5), ("test", 11)):
        texts = [" ".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(count)]
        (folder / f"{name}.tsv").write_text("".join(f"{text}\t{text}\n" for text in texts), encoding="utf-8")
    sizes = {"width": 32, "num_heads": 2, "feed_forward_width": 64, "encoder_layers": 1, "decoder_layers": 1}
    steps = {"max_steps": 150, "batch_tokens": 256, "warmup_steps": 30, "validate_every": 150}
    return train_translator(
        folder / "run",
        {
            "model": {"type": "transformer", **sizes, "tie_embeddings": "all", "dropout": 0.0},
            "data": {name: str(folder / f"{name}.tsv") for name in ("train", "valid", "test")},
            "tokenizer": {"type": "words", "vocab_size": 300},
            "train": {**steps, "learning_rate": 5e-3},
        },
    )


def test_translations_of_a_run_are_those_of_transformers(run_bench: RunBench, copying_run: Run) -> None:
    pytest.importorskip("transformers")
    result, _ = run_bench("decoding", copying_run.folder, "--section", "same", "--device", "cpu")
    assert result["model"] == "trained"
    rows = [row for row in result["rows"] if row["section"] == "same"]
    assert [(row["case"], row["pass"]) for row in rows] == [("greedy", "float32"), ("beam 5", "float32")]
    for row in rows:
        ours, theirs = row["implementations"]["ours"], row["implementations"]["transformers"]
        assert ours["equal"] == 1.0, ours
        assert ours["tokens"] == theirs["tokens"] < 11 * 12  # all translations end before the limit
        assert ours["bleu"] == theirs["bleu"] > 30
        assert row["implementations"].get("graphed", ours)["equal"] == 1.0


def write_data_sets(folder: Path) -> None:
    """Data sets in the formats of the real ones, with labels that single words determine."""
    rng = np.random.default_rng(0)
    words = ["bad", "dull", "fine", "great"]

    def write(name: str, lines: list[str]) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
            file.write("".join(lines))

    for split in ("train", "test"):
        labels = rng.integers(0, 4, 60).tolist()
        ratings = [(1, 2, 9, 10)[label] for label in labels]
        texts = [f"It was\u0085 {words[label]}!<br />Yes. I saw it." for label in labels]
        write(f"imdb/{split}.jsonl.gz", [
            json.dumps({"text": text, "label": int(rating > 5), "rating": rating}, ensure_ascii=False) + "\n"
            for text, rating in zip(texts, ratings, strict=True)
        ])  # fmt: skip
        news = [f'"{label + 1}","a ""{words[label]}"" one","of news"\r\n' for label in labels]
        write(f"ag_news/{split}.csv.gz", news)
        rows = [f'{label}\t"{words[label]} 영화\t{label // 2}\r\n' for label in labels]  # an open quote
        write(f"nsmc/{split}.tsv.gz", ["id\tdocument\tlabel\n", *rows, "7\t\t1\n"])


def test_classify(run_bench: RunBench, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    write_data_sets(tmp_path)
    run = tmp_path / "self_attentive-ag_news"
    (run / "eval").mkdir(parents=True)
    (run / "eval" / "test.json").write_text(json.dumps({"split": "test", "accuracy": 0.5}), encoding="utf-8")
    result, _ = run_bench("classify", "--device", "cpu", run, JUMOK_DATA=str(tmp_path))
    check_rows(result["rows"])
    first, second, training, *baselines = result["rows"]
    for row in (first, second):
        assert row["documents"] == 6
        assert set(row["implementations"]) == {"ours", "padded", "padded, packed GRU"}
        assert row["spread"][0] <= row["in_turn"] <= row["spread"][1]
    assert "ours, unsorted / padded, sorted" in first["ratios"]
    results = training["implementations"]
    assert len(results) == 9
    starts = [results[name]["start"] for name in ("padded", "padded, packed GRU")]
    assert starts[0] == pytest.approx(starts[1], abs=0.1)  # up to dropout
    assert {result["batches"] for name, result in results.items() if "like" in name} == {4}
    scores = {row["case"]: row["implementations"]["TF-IDF"] for row in baselines}
    assert list(scores) == ["imdb", "imdb-ratings", "ag_news", "nsmc"]
    assert all(score["accuracy"] > 0.95 for score in scores.values())
    assert scores["imdb-ratings"]["mean_error"] < 0.2
    assert scores["nsmc"]["test"] == 61
    assert baselines[2]["runs"] == [{"run": run.name, "task": "ag_news", "accuracy": 0.5}]


@pytest.mark.slow
def test_serving(run_bench: RunBench) -> None:
    pytest.importorskip("ctranslate2")
    result, printed = run_bench("serving")
    assert result["beam_size"] == 4
    speed, overload = result["rows"]
    assert speed["sentences"] == 24
    ratios, results = speed["ratios"], speed["implementations"]
    assert len(results) == 5
    assert all(result["sentences_s"] > 0 for result in results.values())
    both = results["server, ctranslate2"]["sentences_s"] / results["ctranslate2 itself"]["sentences_s"]
    assert ratios["server, ctranslate2 / ctranslate2 itself"] == pytest.approx(both, rel=1e-3)
    assert 1 <= results["server, torch"]["mean_batch_size"] <= 4
    [result] = overload["implementations"].values()
    assert set(result["statuses"]) <= {"200", "503"}
    assert result["statuses"]["503"] > 0
    assert result["without_retry_after"] == 0
    assert result["answers_after"]
    assert len(result["mib"]) >= 3
    assert "overload: 4 times the possible load" in printed


@pytest.fixture(scope="module")
def both_directions(tmp_path_factory: pytest.TempPathFactory, train_translator: TrainTranslator) -> list[Run]:
    """Two barely trained translators, with eleven manually aligned pairs."""
    folder = tmp_path_factory.mktemp("align")
    pairs = [pair for pair in english_korean.read_pairs("train", 1000) if len(pair.english.split()) <= 7][:100]
    for name, examples in (("train", pairs[11:]), ("gold", pairs[:11])):
        text = "".join(f"{pair.english}\t{pair.korean}\n" for pair in examples)
        (folder / f"{name}.tsv").write_text(f"en\tko\n{text}", encoding="utf-8")
    links = (" ".join(f"{i}-{j}" for i, j in pair.sure_links) for pair in pairs[:11])
    (folder / "gold.links").write_text("".join(f"{line}\n" for line in links), encoding="utf-8")
    sizes = {"width": 8, "num_heads": 2, "feed_forward_width": 16, "encoder_layers": 1, "decoder_layers": 3}
    data = {
        "train": [str(folder / "train.tsv"), str(folder / "gold.tsv")],
        "gold_alignments": str(folder / "gold"),
        "held_out_size": 9,
    }
    return [
        train_translator(
            folder / f"{source}-{target}",
            {
                "model": {"type": "transformer", **sizes},
                "data": {**data, "source": source, "target": target},
                "tokenizer": {"vocab_size": 400},
                "train": {"max_steps": 2, "batch_tokens": 512, "validate_every": 2},
            },
        )
        for source, target in (("en", "ko"), ("ko", "en"))
    ]


def test_align(run_bench: RunBench, both_directions: list[Run]) -> None:
    run, reverse = both_directions
    result, printed = run_bench("align", run.folder, reverse.folder, "--device", "cpu")
    assert result["sentences"] == 11
    views = [row for row in result["rows"] if row["section"] == "views"]
    assert len(views) == 2 * 2 * 3 * 3  # directions, plain and shifted, layers, heads and their mean
    rates = {(row["pass"], row["case"]): row["implementations"]["attention"]["error_rate"] for row in views}
    links = {row["case"]: row for row in result["rows"] if row["section"] == "links"}
    choices = ("plain", "shifted", "chosen")
    assert set(links) == {*choices, *(f"{name}, means" for name in choices), "eflomal"}
    for name in set(links) - {"eflomal"}:  # a selected view is one of the views, and has its score
        forward, backward, why = links[name]["chosen"].split("; ")
        results = links[name]["implementations"]
        assert results["forward"]["error_rate"] == rates["forward", forward]
        assert results["backward"]["error_rate"] == rates["backward", backward.partition(": ")[2]]
        assert "agreement" in why
    results = links["chosen"]["implementations"]
    assert set(results) == {"forward", "backward", *SYMMETRIZATIONS} - {"none"}
    assert results["intersection"]["num_links"] <= results["grow-diag"]["num_links"] <= results["union"]["num_links"]
    assert "alignment error rate" in printed
    peer = links["eflomal"]["implementations"]
    if importlib.util.find_spec("eflomal") is None:
        assert "pip install eflomal" in peer["eflomal"]["error"]
    else:  # a barely trained model is worse than co-occurrence counts
        assert peer["grow-diag"]["error_rate"] < results["grow-diag"]["error_rate"]
        corpus = TranslationData(run.recipe.data, run.folder).train_corpus()
        assert links["eflomal"]["pairs"] == sum("gold.tsv" not in pair.location for pair in corpus) + 11

    gold = run.recipe.data.gold_alignments  # the option names the same data
    options = ("--section", "eflomal", "--gold", gold, "--device", "cpu")
    result, _ = run_bench("align", run.folder, reverse.folder, *options)
    assert result["gold"] == gold
    assert [row["case"] for row in result["rows"]] == ["eflomal"]


def test_coverage(run_bench: RunBench, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    table = tmp_path / "coverage.md"
    result, printed = run_bench("watch_coverage", "--library", "transformers", "--table", table)
    verdicts = {row["case"]: row["verdict"] for row in result["rows"]}
    assert verdicts == {
        "bert": "right",
        "bloom": "right",
        "swiftformer": "no map",
        "yoso": "no map",
        "convnext": "no attention",
    }
    results = result["rows"][0]["implementations"]
    assert set(results) == {"eager", "sdpa"}
    assert all(result["calls"] == 2 and result["difference"] < 1e-6 for result in results.values())
    assert "yoso: no map" in printed
    lines = table.read_text(encoding="utf-8").splitlines()
    assert "bert; bloom" in lines
    assert any(line.startswith("| right | 2 |") for line in lines)
    assert any(line.startswith("| yoso | encoder.layer.0.attention.self: ") for line in lines)


def test_coverage_of_other_libraries(run_bench: RunBench, tmp_path: Path) -> None:
    pytest.importorskip("x_transformers")
    earlier = tmp_path / "earlier.json"
    row = {"section": "x-transformers", "case": "attn_flash", "verdict": "silent", "detail": "", "implementations": {}}
    kept = {**row, "section": "timm", "case": "levit", "verdict": "right"}
    earlier.write_text(
        json.dumps({"commit": "f00d", "libraries": {"timm": "1.0"}, "rows": [row, kept]}), encoding="utf-8"
    )
    result, _ = run_bench("watch_coverage", "--library", "x-transformers", "--update", earlier)
    verdicts = {(row["section"], row["case"]): row["verdict"] for row in result["rows"]}
    assert verdicts == {
        ("timm", "levit"): "right",
        ("x-transformers", "default"): "right",
        ("x-transformers", "attn_flash"): "right",
    }


def test_coverage_goes_on_after_a_type_that_hangs(run_bench: RunBench) -> None:
    pytest.importorskip("transformers", minversion="5")
    result, _ = run_bench("watch_coverage", "--library", "transformers", "--only", "bert", "convnext", "--seconds", "0")
    assert [(row["verdict"], row["detail"]) for row in result["rows"]] == [("no result", "exceeded 0 seconds")] * 2
