"""The benchmarks of training and decoding run, on the smallest sizes, and find what they should."""

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from jumok import recipe
from jumok.batches.tokens import BOS, EOS, PAD, Seq2SeqBatch
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.run import Run
from jumok.tasks.translate import task as translate_task

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
MODULES = {"report", "drawn", "peers", "training", "decoding"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a file of bench/ as its scripts do."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def ran(script: str, *arguments: str | Path) -> dict[str, Any]:
    """What a benchmark wrote."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    out = Path(arguments[-1])
    done = subprocess.run(
        [sys.executable, f"bench/{script}.py", "--quick", "--device", "cpu", *map(str, arguments)],
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
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert found["commit"] == "abc1234"
    return found


def test_the_training_bench_measures_ours_and_the_peers_from_the_same_start(tmp_path: Path) -> None:
    found = ran("training", "--out", tmp_path / "training.json")
    whole, training, decoder = found["rows"]
    assert [(row["section"], row["pass"]) for row in found["rows"]] == [
        ("transformer", "training"),
        ("bahdanau", "training"),
        ("bahdanau", "decoder"),
    ]
    assert list(whole["ways"]) == ["ours", "marian", "ours, padded"]
    assert list(training["ways"]) == list(decoder["ways"]) == ["ours", "loop"]
    for row in found["rows"]:
        assert not [way for way in row["ways"].values() if "error" in way], row
        assert all(way["ms"] > 0 for way in row["ways"].values())
        for name, way in row["ways"].items():
            assert way["tokens_s"] == pytest.approx(row["labels"] / way["ms"] * 1e3, rel=1e-3)
            assert way["start"] == pytest.approx(row["ways"]["ours"]["start"], rel=1e-4), name
    assert training["labels"] == 2 * 3 * 5
    assert decoder["labels"] == 3 * 5
    for row in (whole, training):
        ours, theirs = row["weights"].values()
        assert ours == theirs
    assert max(decoder["differs"].values()) < 1e-5
    assert whole["ratios"]["ours / marian"] == pytest.approx(
        whole["ways"]["ours"]["ms"] / whole["ways"]["marian"]["ms"], rel=1e-3
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A Transformer that has learned to repeat sentences of one to six words."""
    folder = tmp_path_factory.mktemp("decoding")
    chance = random.Random(0)
    for name, count in (("train", 400), ("valid", 5), ("test", 11)):
        texts = [" ".join(chance.choices("abcdefgh", k=chance.randint(1, 6))) for _ in range(count)]
        (folder / f"{name}.tsv").write_text("".join(f"{text}\t{text}\n" for text in texts), encoding="utf-8")
    tree = {
        "task": "translate",
        "model": {"kind": "transformer", "width": 32, "heads": 2, "feed_forward": 64, "tie": "all"},
        "data": {name: str(folder / f"{name}.tsv") for name in ("train", "valid", "test")},
        "text": {"kind": "words", "size": 300},
        "train": {"steps": 150, "tokens": 256, "learning_rate": 5e-3, "warmup": 30, "validate_every": 150},
    }
    tree["model"] |= {"encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    tree["train"] |= {"average": 0, "tensorboard": False, "device": "cpu"}
    made = Run.create_or_resume(folder / "run", recipe.parse(tree, "toy"))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        translate_task.train(made, Console(file=nowhere))
    return made


def test_the_decoding_bench_finds_that_ours_says_what_generate_says(run: Run, tmp_path: Path) -> None:
    found = ran("decoding", run.folder, "--out", tmp_path / "decoding.json")
    assert found["model"] == "trained"
    same = [row for row in found["rows"] if row["section"] == "same"]
    assert [(row["case"], row["pass"]) for row in same] == [("greedy", "float32"), ("beam 5", "float32")]
    for row in same:
        ours, theirs = row["ways"]["ours"], row["ways"]["transformers"]
        assert ours["equal"] == 1.0, ours
        assert ours["tokens"] == theirs["tokens"] < 11 * 12  # so they end by themselves
        assert ours["bleu"] == theirs["bleu"] > 30
        assert row["ways"].get("graphed", ours)["equal"] == 1.0
    speed = [row for row in found["rows"] if row["section"] == "speed"]
    assert [row["case"] for row in speed] == ["greedy, batch 3", "beam 5, batch 3"]
    for row in speed:
        assert row["sentences"] == 11
        ours, theirs = row["ways"]["ours"], row["ways"]["transformers"]
        assert ours["sentences_s"] == pytest.approx(11 / ours["ms"] * 1e3, rel=1e-3)
        assert row["ratios"]["ours"] == pytest.approx(ours["ms"] / theirs["ms"], rel=1e-3)


def test_without_a_run_the_weights_are_random_and_that_is_told(tmp_path: Path) -> None:
    found = ran("decoding", "--section", "same", "--out", tmp_path / "decoding.json")
    assert found["model"].startswith("random weights")
    greedy = next(row for row in found["rows"] if (row["section"], row["case"]) == ("same", "greedy"))
    assert greedy["ways"]["ours"]["equal"] == 1.0
    assert "bleu" not in greedy["ways"]["ours"]


def test_drawn_lengths_are_uniform_and_go_together(bench: Any) -> None:
    text = bench("drawn").Text(pairs=1000, shortest=8, longest=64, vocabulary=50)
    batches = text.draw(4)
    lengths = torch.tensor([[len(one) + 1 for sides in batches for one in sides[n]] for n in (0, 1)])
    assert (int(lengths.min()), int(lengths.max())) == (8, 64)
    torch.testing.assert_close(lengths.double().mean(1), torch.full((2,), 36.0).double(), atol=1, rtol=0)
    assert float(torch.corrcoef(lengths.double())[0, 1]) == pytest.approx(0.9, abs=0.02)
    sums = [sum(len(one) for side in sides for one in side) for sides in batches]
    assert max(sums) - min(sums) < 64  # dealt out by length
    words = torch.tensor([word for sides in batches for side in sides for one in side for word in one])
    assert (int(words.min()), int(words.max())) == (4, 49)
    assert text.draw(4) == batches


def test_the_usual_loop_is_the_same_model(bench: Any) -> None:
    peers = bench("peers")
    ours = Seq2Seq(Seq2SeqConfig(width=6, embedding_width=5, dropout=0.0), 23, 29).double()
    loop = peers.Loop(ours).double()
    assert sum(p.numel() for p in loop.parameters()) == sum(p.numel() for p in ours.parameters())
    batch = Seq2SeqBatch.from_sequences([[5, 6, 7], [8, 9, 10]], [[11, 12], [13, 14]])
    one, other = ours.loss(batch).total, loop.loss(batch, peers.Loop.step)
    torch.testing.assert_close(one, other)
    one.backward()
    other.backward()
    torch.testing.assert_close(loop.encoder.weight_ih_l0.grad, ours.encoder.weight_ih_l0.grad)
    torch.testing.assert_close(loop.query.weight.grad, ours.decoder.attention.score.query.weight.grad)
    torch.testing.assert_close(loop.generator.weight.grad, ours.generator.weight.grad)


def test_batches_of_like_length_cover_all_sentences_or_are_spread_evenly(bench: Any) -> None:
    decoding = bench("decoding")
    work = decoding.Work(None, [[7] * n for n in range(1, 12)])
    assert [batch.lengths for batch in work.batches(4)] == [(2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)]
    assert [batch.lengths for batch in work.batches(1, 3)] == [(3,), (7,), (11,)]
    assert len(work.batches(100, 3)) == 1


def test_what_generate_gives_is_read_up_to_its_end(bench: Any) -> None:
    words = bench("decoding").words
    assert words([5, 6, EOS, PAD, PAD], 9) == (5, 6)
    assert words([5, 6, 7], 2) == (5, 6)  # cut off by the limit
    assert words([EOS, BOS], 2) == ()


def test_the_first_difference_is_told(bench: Any) -> None:
    agreement = bench("decoding").agreement
    assert agreement([(1,), (2, 3)], [(1,), (2, 3)]) == {"equal": 1.0}
    found = agreement([(1,), (2, 3, 4), (5,)], [(1,), (2, 9), (6,)])
    assert found["equal"] == pytest.approx(1 / 3)
    assert found["first"] == {"sentence": 1, "word": 1, "says": (3, 4), "transformers": (9,)}
    assert agreement([(1, 2)], [(1,)])["first"]["word"] == 1
