"""Every benchmark runs on the smallest sizes, and both sides of each comparison do the same work."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jumok.data.builtin import english_korean
from jumok.metrics.symmetrization import SYMMETRIZATIONS
from jumok.run import Run
from jumok.tasks.translate.data import TranslationData

RunBench = Callable[..., tuple[dict[str, Any], str]]
TrainTranslator = Callable[[Path, dict[str, Any]], Run]


def check_rates(row: dict[str, Any], count: str, rate: str) -> None:
    """``rate`` of each way is ``count`` of the row over the time taken."""
    for name, way in row["ways"].items():
        assert way[rate] == pytest.approx(row[count] / way["ms"] * 1e3, rel=1e-3), name


def ratio(row: dict[str, Any], way: str, other: str) -> Any:
    return pytest.approx(row["ways"][way]["ms"] / row["ways"][other]["ms"], rel=1e-3)


def test_attention(run_bench: RunBench) -> None:
    result, _ = run_bench("attention", "--no-compile", "--device", "cpu")
    assert result["machine"]["torch"] == torch.__version__
    assert {row["section"] for row in result["rows"]} == {"overhead", "additive", "dot", "step"}
    for row in result["rows"]:
        assert row["ways"]["ours"]["ms"] > 0
        assert row["section"] == "overhead" or row["path"]
        assert row["ratios"]
    errors = [row["errors"] for row in result["rows"] if "errors" in row]
    assert len(errors) == 1 + 8 + 2
    assert max(max(error[way].values()) for error in errors for way in ("ours", "eager")) < 1e-5


def test_look(run_bench: RunBench) -> None:
    result, _ = run_bench("look", "--device", "cpu", "--tokens", "97", "--size", "13")
    assert [row["section"] for row in result["rows"]] == ["forward", "maps", *["tile"] * 5] * 2
    for row in result["rows"]:
        assert all(way["ms"] > 0 for way in row["ways"].values())
        assert row["ratios"].keys() == row["ways"].keys()
    assert all(row["worst_cell"] < 1e-5 for row in result["rows"] if row["section"] == "maps")


def test_training(run_bench: RunBench) -> None:
    pytest.importorskip("transformers")
    result, _ = run_bench("training", "--device", "cpu")
    transformer, bahdanau, decoder, *host = result["rows"][:5]
    assert [(row["section"], row["pass"]) for row in result["rows"]] == [
        ("transformer", "training"),
        ("bahdanau", "training"),
        ("bahdanau", "decoder"),
        ("host", "torch.float32"),
        ("host", "torch.bfloat16"),
        ("host-bahdanau", "training"),
        ("host-bahdanau", "decoder"),
    ]
    for row in result["rows"][5:]:
        assert row["ratios"]["ms"] == ratio(row, "loop", "ours")
        assert row["ways"]["ours"]["nodes"] < row["ways"]["loop"]["nodes"]
        assert row["ways"]["loop"]["functions"] == 0 < row["ways"]["ours"]["functions"]
    assert list(transformer["ways"]) == ["ours", "marian", "ours, padded"]
    assert list(bahdanau["ways"]) == list(decoder["ways"]) == ["ours", "loop"]
    for row in host:
        assert row["ratios"]["ours, eager / marian"] == ratio(row, "ours, eager", "marian")
        losses = [way["start"] for way in row["ways"].values()]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-2)
    for row in (transformer, bahdanau, decoder):
        check_rates(row, "labels", "tokens_s")
        starts = [way["start"] for way in row["ways"].values()]
        assert starts == pytest.approx([starts[0]] * len(starts), rel=1e-4)  # from the same weights
    assert (bahdanau["labels"], decoder["labels"]) == (2 * 3 * 5, 3 * 5)
    for row in (transformer, bahdanau):
        assert len(set(row["weights"].values())) == 1
    assert max(decoder["differs"].values()) < 1e-5
    assert transformer["ratios"]["ours / marian"] == ratio(transformer, "ours", "marian")


@pytest.fixture(scope="module")
def copying_run(tmp_path_factory: pytest.TempPathFactory, train_translator: TrainTranslator) -> Run:
    """A Transformer that has learned to repeat sentences of one to six words."""
    folder = tmp_path_factory.mktemp("decoding")
    chance = random.Random(0)
    for name, count in (("train", 400), ("valid", 5), ("test", 11)):
        texts = [" ".join(chance.choices("abcdefgh", k=chance.randint(1, 6))) for _ in range(count)]
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


def test_decoding_says_what_generate_says(run_bench: RunBench, copying_run: Run) -> None:
    pytest.importorskip("transformers")
    result, _ = run_bench("decoding", copying_run.folder, "--device", "cpu")
    assert result["model"] == "trained"
    same = [row for row in result["rows"] if row["section"] == "same"]
    assert [(row["case"], row["pass"]) for row in same] == [("greedy", "float32"), ("beam 5", "float32")]
    for row in same:
        ours, theirs = row["ways"]["ours"], row["ways"]["transformers"]
        assert ours["equal"] == 1.0, ours
        assert ours["tokens"] == theirs["tokens"] < 11 * 12  # so they end by themselves
        assert ours["bleu"] == theirs["bleu"] > 30
        assert row["ways"].get("graphed", ours)["equal"] == 1.0
    speed = [row for row in result["rows"] if row["section"] == "speed"]
    assert [row["case"] for row in speed] == ["greedy, batch 3", "beam 5, batch 3"]
    for row in speed:
        assert row["sentences"] == 11
        check_rates(row, "sentences", "sentences_s")
        assert row["ratios"]["ours"] == ratio(row, "ours", "transformers")
    host = [row for row in result["rows"] if row["section"] == "host"]
    assert [row["case"] for row in host] == [
        f"{search}, batch {n}" for search in ("greedy", "beam 5") for n in (1, 8, 32)
    ]
    for row in host:
        assert row["equal"] == 1.0 or not row["case"].startswith("greedy")  # random weights, cut off by the limit
        assert row["ratios"]["ours"] == ratio(row, "ours", "transformers")


def test_decoding_without_a_run_uses_random_weights(run_bench: RunBench) -> None:
    pytest.importorskip("transformers")
    result, _ = run_bench("decoding", "--section", "same", "--device", "cpu")
    assert result["model"].startswith("random weights")
    greedy = next(row for row in result["rows"] if (row["section"], row["case"]) == ("same", "greedy"))
    assert greedy["ways"]["ours"]["equal"] == 1.0
    assert "bleu" not in greedy["ways"]["ours"]


def test_bert(run_bench: RunBench) -> None:
    pytest.importorskip("transformers")
    result, _ = run_bench("bert", "--device", "cpu")
    inference = [row for row in result["rows"] if row["section"] == "inference"]
    pretraining = [row for row in result["rows"] if row["section"] == "pretraining"]
    assert len(inference) == 5
    assert [row["pass"] for row in pretraining] == ["attention dropout 0.1", "attention dropout 0.0"]
    for row in result["rows"]:
        check_rates(row, "tokens", "tokens_s")
        assert row["ratios"]["ours / transformers"] == ratio(row, "ours", "transformers")
    for row in inference:
        assert set(row["differs"]) == {"hidden", "pooled"}
        assert max(row["differs"].values()) <= 1e-5
        assert row["ways"]["ours"]["repeats"] == row["ways"]["transformers"]["repeats"] == 3
    for row in pretraining:
        assert row["weights"]["ours"] == row["weights"]["transformers"]
        assert row["tokens"] == 2 * sum(8 + n * 17 // 6 for n in range(6))
        starts = [way["start"] for way in row["ways"].values()]
        assert starts == pytest.approx([starts[0]] * 3, rel=1e-4)
        assert all(way["end"] < way["start"] for way in row["ways"].values())  # the loss falls


def write_data_sets(folder: Path) -> None:
    """Data sets in the formats of the real ones, with labels that single words determine."""
    chance = np.random.default_rng(0)
    words = ["bad", "dull", "fine", "great"]

    def write(name: str, lines: list[str]) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
            file.write("".join(lines))

    for split in ("train", "test"):
        labels = chance.integers(0, 4, 150).tolist()
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
    assert result["machine"]["threads"] == 1
    sections: dict[str, list[dict[str, Any]]] = {"inference": [], "training": [], "baselines": []}
    for row in result["rows"]:
        sections[row["section"]].append(row)
        if row["section"] != "baselines":
            check_rates(row, "documents", "documents_s")
            assert max(row["differs"].values()) <= 1e-5

    for row in sections["inference"]:
        assert row["documents"] == 6
        assert set(row["ways"]) == {"ours", "padded", "padded, packed GRU"}
        assert row["spread"][0] <= row["in_turn"] <= row["spread"][1]
    assert "ours, unsorted / padded, sorted" in sections["inference"][0]["ratios"]

    (training,) = sections["training"]
    ways = training["ways"]
    assert len(ways) == 9
    starts = [ways[name]["start"] for name in ("padded", "padded, packed GRU")]
    assert starts[0] == pytest.approx(starts[1], abs=0.1)  # up to dropout
    assert {way["batches"] for name, way in ways.items() if "like" in name} == {4}
    for name in ("padded", "padded, like lengths"):
        best = min((name, f"{name}, packed GRU"), key=lambda way: ways[way]["ms"])
        assert training["ratios"][f"ours / {best}"] == ratio(training, "ours", best)

    baselines = {row["case"]: row for row in sections["baselines"]}
    assert list(baselines) == ["imdb", "imdb-ratings", "ag_news", "nsmc"]
    assert all(row["ways"]["TF-IDF"]["accuracy"] > 0.95 for row in baselines.values())
    assert baselines["imdb-ratings"]["ways"]["TF-IDF"]["mean_error"] < 0.2
    assert baselines["nsmc"]["ways"]["TF-IDF"]["test"] == 151
    assert baselines["ag_news"]["runs"] == [{"run": run.name, "task": "ag_news", "accuracy": 0.5}]


def test_speech(run_bench: RunBench) -> None:
    pytest.importorskip("librosa")
    result, _ = run_bench("speech", "--device", "cpu")
    training, one, four = result["rows"]
    assert not any("errors" in row for row in result["rows"])
    ways = training["ways"]
    assert list(ways) == ["ours", "loop"]
    assert ways["ours"]["start"] == pytest.approx(ways["loop"]["start"], rel=1e-3)  # the same dropout, too
    check_rates(training, "frames", "frames_s")
    assert training["ratios"]["ours / loop"] == ratio(training, "ours", "loop")
    assert training["weights"]["ours"] == training["weights"]["loop"]
    assert training["differs"]["mels"] <= 1e-4
    assert 50 < training["launches"]["ours"] < training["launches"]["loop"]
    for row, texts in ((one, 1), (four, 4)):
        assert list(row["ways"]) == ["ours", "the network", "Griffin-Lim"]
        assert row["seconds"] == pytest.approx(texts * round(9 * np.exp(1.537)) / 80)
        check_rates(row, "seconds", "times_real")


@pytest.mark.slow
def test_serving(run_bench: RunBench, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    result, printed = run_bench("serving", cwd=tmp_path)
    assert result["beam_size"] == 4
    speed, overload = result["rows"]
    assert speed["sentences"] == 24
    ratios, ways = speed["ratios"], speed["ways"]
    assert len(ways) == 5
    assert all(way["sentences_s"] > 0 for way in ways.values())
    both = ways["server, ctranslate2"]["sentences_s"] / ways["ctranslate2 itself"]["sentences_s"]
    assert ratios["server, ctranslate2 / ctranslate2 itself"] == pytest.approx(both, rel=1e-3)
    assert 1 <= ways["server, torch"]["in_a_batch"] <= 4
    [way] = overload["ways"].values()
    assert set(way["statuses"]) <= {"200", "503"}
    assert way["statuses"]["503"] > 0
    assert way["without_retry_after"] == 0
    assert way["answers_after"]
    assert len(way["mib"]) >= 3
    assert "overload: 4 times as much as it does" in printed


@pytest.fixture(scope="module")
def both_directions(tmp_path_factory: pytest.TempPathFactory, train_translator: TrainTranslator) -> list[Run]:
    """Two barely trained translators, with eleven manually aligned pairs."""
    folder = tmp_path_factory.mktemp("align")
    pairs = [pair for pair in english_korean.read_pairs("train", 2000) if len(pair.english.split()) <= 7][:200]
    for name, some in (("train", pairs[11:]), ("gold", pairs[:11])):
        text = "".join(f"{pair.english}\t{pair.korean}\n" for pair in some)
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
    rates = {(row["pass"], row["case"]): row["ways"]["attention"]["error_rate"] for row in views}
    links = {row["case"]: row for row in result["rows"] if row["section"] == "links"}
    choices = ("plain", "shifted", "chosen")
    assert set(links) == {*choices, *(f"{name}, means" for name in choices), "eflomal"}
    for name in set(links) - {"eflomal"}:  # a selected view is one of the views, and has its score
        forward, backward, why = links[name]["chosen"].split("; ")
        ways = links[name]["ways"]
        assert ways["forward"]["error_rate"] == rates["forward", forward]
        assert ways["backward"]["error_rate"] == rates["backward", backward.partition(": ")[2]]
        assert "agreement" in why
    ways = links["chosen"]["ways"]
    assert set(ways) == {"forward", "backward", *SYMMETRIZATIONS} - {"none"}
    assert ways["intersection"]["num_links"] <= ways["grow-diag"]["num_links"] <= ways["union"]["num_links"]
    assert "alignment error rate" in printed
    peer = links["eflomal"]["ways"]
    if importlib.util.find_spec("eflomal") is None:
        assert "pip install eflomal" in peer["eflomal"]["error"]
    else:  # co-occurrence tells more than barely trained models know
        assert peer["grow-diag"]["error_rate"] < ways["grow-diag"]["error_rate"]
        corpus = TranslationData(run.recipe.data, run.folder).train_corpus()
        assert links["eflomal"]["pairs"] == sum("gold.tsv" not in pair.location for pair in corpus) + 11

    gold = run.recipe.data.gold_alignments  # the option names the same data
    named = ("--section", "eflomal", "--gold", gold, "--device", "cpu")
    result, _ = run_bench("align", run.folder, reverse.folder, *named)
    assert result["gold"] == gold
    assert [row["case"] for row in result["rows"]] == ["eflomal"]
