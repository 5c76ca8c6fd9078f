"""Errors with what was looked at, and whether to trust it: a small model of our own, and a real BERT."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from labelled_runs import BAD, GOOD, pair, review, table, train_run
from numpy.typing import NDArray
from rich.console import Console

from jumok import recipe
from jumok.cli import app as cli_app
from jumok.data.readers.classification import ClassificationExample, LabelSet
from jumok.errors import InputError
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.base import DatasetSplit, Evaluation
from jumok.tasks.classify import faithfulness
from jumok.tasks.classify import metrics as classify_metrics
from jumok.tasks.classify.error_analysis import find_errors, report_errors
from jumok.tasks.classify.faithfulness import AttentionHighlighter
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.training import train

QUIET = Console(quiet=True)


class Counter:
    """Counts good and bad words, a sentence a line; and says that it looked at them, or at anything else."""

    labels: tuple[str, ...] = ("bad", "good")

    def __init__(self, folder: Path, samples: Sequence[ClassificationExample], *, honest: bool = True) -> None:
        self.run = SimpleNamespace(folder=folder)
        self.samples, self.honest = list(samples), honest
        self.asked: list[int] = []  # how many texts at once

    def load_split(self, name: str) -> DatasetSplit[ClassificationExample]:
        return DatasetSplit(name, self.samples)

    def predict_probabilities(self, documents: Sequence[Sequence[Sequence[str]]]) -> NDArray[np.float64]:
        assert all(one and all(one) for one in documents)
        words = [[word for sentence in one for word in sentence] for one in documents]
        count = np.array([sum((w in GOOD) - (w in BAD) for w in one) for one in words])
        good = 0.5 + 0.4 * np.tanh(count)
        return np.stack([1 - good, good], axis=1)

    def highlight_texts(self, texts: Sequence[str]) -> list[AttendedDocument]:
        self.asked.append(len(texts))
        found = []
        for text in texts:
            sentences = [line.split() for line in text.replace("\t", "\n").split("\n") if line.split()]
            if not sentences:
                raise InputError("a text has no words to look at")
            words = tuple(word for one in sentences for word in one)
            looks = np.array([word in GOOD + BAD for word in words]) == self.honest
            weights = np.where(looks, 9.0, 1.0)
            hops = np.stack([weights / weights.sum(), np.full(len(words), 1 / len(words))])
            edges = tuple(np.cumsum([0, *map(len, sentences)]).tolist())
            shares = self.predict_probabilities([sentences])[0]
            said = tuple((self.labels[at], float(shares[at])) for at in np.argsort(-shares))
            found.append(
                AttendedDocument(words, (" ",) * len(words), edges, hops.astype(np.float32), class_probabilities=said)
            )
        return found

    def outputs(self, samples: Sequence[ClassificationExample]) -> NDArray[np.float64]:
        return self.predict_probabilities([[line.split() for line in one.text.split("\n")] for one in samples])

    def score_split(self, split: Any, options: Any, **more: Any) -> Evaluation:
        samples, shares = split.examples, self.outputs(split.examples)
        truth = np.array([int(one.label) for one in samples])
        found = classify_metrics.score_classes(samples, truth, shares, self.labels, detailed=True)
        errors = find_errors(samples, shares, LabelSet(("0", "1"), self.labels))
        report = functools.partial(report_errors, self, errors, len(samples))
        return dataclasses.replace(found, reports=[report])


def samples(count: int, wrong: int = 0) -> list[ClassificationExample]:
    chance = random.Random(7)
    found = []
    for number in range(count):
        parts = [review(chance) for _ in range(2)]
        while parts[0][1] != parts[1][1]:
            parts = [review(chance) for _ in range(2)]
        label = int(parts[0][1])
        text = "\n".join(text for text, _ in parts)
        found.append(ClassificationExample(text, None, str(1 - label if number < wrong else label), f"x:{number}"))
    return found


def said(console: Console) -> str:
    file: Any = console.file
    return str(file.getvalue())


def console(**more: Any) -> Console:
    return Console(file=io.StringIO(), highlight=False, width=100, **more)


# ----------------------------------------------------------------------------------------------- faithfulness


def test_honest_highlights_mean_something_and_others_do_not(tmp_path: Path) -> None:
    told = console()
    honest = Counter(tmp_path / "honest", samples(60))
    assert isinstance(honest, AttentionHighlighter)
    found = faithfulness.evaluate_faithfulness(honest, "test", told)
    assert "the highlight is meaningful" in found.verdict
    assert found.comprehensiveness.probability.low > 0.1
    assert found.sufficiency.probability.high < -0.1
    for part in (
        "on 60 of 60 texts",
        "comprehensiveness",
        "sufficiency",
        "10 % (",
        "mean (AOPC)",
        found.verdict,
    ):
        assert part in said(told)
    kept = json.loads((tmp_path / "honest" / "eval" / "test.json").read_text(encoding="utf-8"))["faithfulness"]
    assert kept["verdict"] == found.verdict
    assert (kept["num_sampled"], kept["num_texts"], kept["seed"], kept["agreement"]) == (60, 60, 1, 1)
    assert kept["comprehensiveness"]["probability"]["low"] == found.comprehensiveness.probability.low
    assert [one["share"] for one in kept["shares"]] == [0.01, 0.05, 0.1, 0.2, 0.5]
    other = faithfulness.evaluate_faithfulness(Counter(tmp_path / "other", samples(60), honest=False), "test", QUIET)
    assert "misleading" in other.verdict or "do not trust" in other.verdict


def test_figures_are_added_to_what_eval_found(tmp_path: Path) -> None:
    counter = Counter(tmp_path, samples(30))
    evaluate(counter, "test", NBestOptions(), QUIET)
    faithfulness.evaluate_faithfulness(counter, "test", QUIET)
    kept = json.loads((tmp_path / "eval" / "test.json").read_text(encoding="utf-8"))
    assert kept["accuracy"] == 1
    assert kept["faithfulness"]["num_texts"] == 30


def test_a_sample_is_drawn_by_its_seed_and_told(tmp_path: Path) -> None:
    texts = [one.text for one in samples(50)]
    counter = Counter(tmp_path, [])
    one, about = faithfulness.compute_faithfulness(counter, texts, QUIET, max_texts=23)
    again, _ = faithfulness.compute_faithfulness(counter, texts, QUIET, max_texts=23)
    other, _ = faithfulness.compute_faithfulness(counter, texts, QUIET, max_texts=23, seed=2)
    assert one == again != other
    assert one.num_texts == 23
    assert (about["num_sampled"], about["num_texts"]) == (23, 50)
    told = console()
    faithfulness.evaluate_faithfulness(Counter(tmp_path, samples(50)), "test", told, max_texts=23)
    assert "on 23 of 50 texts (seed 1)" in said(told)


def test_empty_texts_and_single_words_are_left_out_and_told(tmp_path: Path) -> None:
    odd = [ClassificationExample(text, None, "0", "") for text in ("", "word", "\n \n")]
    told = console()
    found = faithfulness.evaluate_faithfulness(Counter(tmp_path, [*odd, *samples(25)]), "test", told)
    assert (found.num_texts, found.num_skipped) == (25, 3)
    assert "fewer than two words, left out: 3" in said(told)
    with pytest.raises(InputError, match="of 3 texts, none has words"):
        faithfulness.compute_faithfulness(Counter(tmp_path, []), ["", "", ""], QUIET)
    with pytest.raises(InputError, match="no texts came"):
        faithfulness.compute_faithfulness(Counter(tmp_path, []), [], QUIET)
    with pytest.raises(InputError, match="at least one text"):
        faithfulness.compute_faithfulness(Counter(tmp_path, []), ["a b"], QUIET, max_texts=0)


def test_words_that_are_read_otherwise_than_their_text_are_told(tmp_path: Path) -> None:
    class Forgetful(Counter):
        def highlight_texts(self, texts: Sequence[str]) -> list[AttendedDocument]:
            found = super().highlight_texts(texts)
            return [
                AttendedDocument(
                    one.words,
                    one.separators,
                    one.sentence_offsets,
                    one.weights,
                    class_probabilities=(("?", 1.0),),
                )
                for one in found
            ]

    told = console()
    faithfulness.evaluate_faithfulness(Forgetful(tmp_path, samples(25)), "test", told)
    assert "100.0 % of the texts get another class when their words are joined again" in said(told)


@pytest.mark.parametrize("kind", ["self_attentive", "hierarchical"])
def test_real_models(kind: str, tmp_path: Path) -> None:
    small = ["data.builtin_size=150", "data.held_out_size=30", "train.max_epochs=1", "train.device=cpu"]
    small += ["model.width=8", "model.embedding_width=8", "model.attention_width=8", "train.tensorboard=false"]
    run = Run.create_or_resume(tmp_path / kind, recipe.load(kind, small))
    train(build_task(run), QUIET)
    reader = load_predictor(run, "cpu")
    assert isinstance(reader, AttentionHighlighter)
    evaluate(reader, "test", NBestOptions(), QUIET)
    found = faithfulness.evaluate_faithfulness(reader, "test", QUIET)
    kept = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert kept["faithfulness"]["agreement"] == 1
    assert found.num_texts == kept["num_examples"]
    wrong = (run.folder / "eval" / "errors.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(wrong) == kept["num_examples"] - np.trace(kept["confusion"]) > 0
    words = json.loads(wrong[0])["words"]
    assert sum(weight for _, weight in words) == pytest.approx(1, abs=0.01)
    # What was told of the whole texts is what the reader says of them.
    lines = [json.loads(line) for line in (run.folder / "eval" / "test.jsonl").read_text().splitlines()]
    assert found.probability == pytest.approx(np.mean([line["probability"] for line in lines]), abs=1e-4)


def test_models_that_say_numbers_are_refused(tmp_path: Path) -> None:
    class Numbers(Counter):
        labels = ()

    with pytest.raises(InputError, match="this model predicts numbers"):
        faithfulness.check_can_highlight(Numbers(tmp_path, []))


def test_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this model reads text pairs"):
        faithfulness.evaluate_faithfulness(
            Counter(tmp_path, [ClassificationExample("a b", "c d", "0", "")]), "test", QUIET
        )


# ----------------------------------------------------------------------------------------------------- errors


def test_errors_are_kept_shown_and_made_a_page_of(tmp_path: Path) -> None:
    counter = Counter(tmp_path, samples(300, wrong=280))
    told = console()
    evaluate(counter, "test", NBestOptions(), told)
    lines = [json.loads(line) for line in (tmp_path / "eval" / "errors.jsonl").read_text().splitlines()]
    assert len(lines) == 280
    shares = [line["probability"] for line in lines]
    assert shares == sorted(shares, reverse=True)
    assert all(line["prediction"] != line["target"] for line in lines)
    first = lines[0]
    assert [word for word, _ in first["words"]] == first["text"].split()
    assert sum(weight for _, weight in first["words"]) == pytest.approx(1, abs=0.01)
    best = max(first["words"], key=lambda one: one[1])[0]
    assert best in GOOD + BAD
    assert counter.asked == [256, 24]
    page = (tmp_path / "figures" / "errors.html").read_text(encoding="utf-8")
    assert page.count("<li>") == 20
    assert f">{best}</mark>" in page
    assert "280 of 300 test texts were classified wrongly; shown: the 20" in page
    shown = said(told)
    assert "280 of 300 test texts were classified wrongly" in shown
    assert shown.count("highest weights: ") == 5
    assert f"predicted {first['prediction']} ({first['probability']:.3f}), label {first['target']}" in shown
    assert "\x1b" not in shown  # no terminal
    for name in ("test.png", "test-calibration.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 5000


def test_in_a_terminal_words_are_shaded(tmp_path: Path) -> None:
    told = console(force_terminal=True, color_system="truecolor")
    evaluate(Counter(tmp_path, samples(5, wrong=3)), "test", NBestOptions(), told)
    shown = said(told)
    assert re.search(r"\x1b\[(1;)?37;48;2;\d+;\d+;\d+m(" + "|".join(GOOD + BAD) + ")", shown)
    plain = console(force_terminal=True, no_color=True, color_system=None)
    evaluate(Counter(tmp_path, samples(5, wrong=3)), "test", NBestOptions(), plain)
    assert "48;2;" not in said(plain)


def test_other_splits_have_files_of_their_own_and_old_pages_go(tmp_path: Path) -> None:
    evaluate(Counter(tmp_path, samples(9, wrong=2)), "test", NBestOptions(), QUIET)
    evaluate(Counter(tmp_path, samples(9, wrong=1)), "valid", NBestOptions(), QUIET)
    count = {
        name: len((tmp_path / "eval" / f"{name}.jsonl").read_text().splitlines()) for name in ("errors", "valid-errors")
    }
    assert count == {"errors": 2, "valid-errors": 1}
    told = console()
    evaluate(Counter(tmp_path, samples(9)), "test", NBestOptions(), told)
    assert "errors: none" in said(told)
    assert (tmp_path / "eval" / "errors.jsonl").read_text() == ""
    assert not (tmp_path / "figures" / "errors.html").exists()
    assert (tmp_path / "figures" / "valid-errors.html").exists()


def test_texts_without_words_and_pairs(tmp_path: Path) -> None:
    empty = ClassificationExample("", None, "1", "")

    class Unread(Counter):
        def outputs(self, samples: Sequence[ClassificationExample]) -> NDArray[np.float64]:
            return np.array([[0.9, 0.1], [0.8, 0.2]])

    evaluate(Unread(tmp_path, [empty, samples(1)[0]]), "test", NBestOptions(), QUIET)
    first, second = map(json.loads, (tmp_path / "eval" / "errors.jsonl").read_text().splitlines())
    assert "words" not in first
    assert "words" in second
    both = ClassificationExample("a sad film", "a nice one", "1", "")
    evaluate(Unread(tmp_path, [both, both]), "test", NBestOptions(), QUIET)
    first, _ = map(json.loads, (tmp_path / "eval" / "errors.jsonl").read_text().splitlines())
    assert [word for word, _ in first["words"]] == ["a", "sad", "film", "a", "nice", "one"]
    page = (tmp_path / "figures" / "errors.html").read_text(encoding="utf-8")
    assert re.sub(r"</?mark[^>]*>", "", page).count("a sad film\na nice one") == 2


# ------------------------------------------------------------------------------------------------------- BERT


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One that has learned next to nothing."""
    folder = tmp_path_factory.mktemp("bert")
    chance = random.Random(1)
    path = table(folder / "reviews.tsv", "text\tlabel", [review(chance) for _ in range(150)])
    data = {"train": path, "held_out_size": 40, "label_names": {"0": "bad", "1": "good"}}
    return train_run(folder / "run", "classify", data, train={"max_epochs": None, "max_steps": 1, "warmup_steps": 0})


def test_of_a_bert_errors_are_listed_without_shades(bert: Run) -> None:
    told = console()
    reader = load_predictor(bert, "cpu")
    assert not isinstance(reader, AttentionHighlighter)
    found = evaluate(reader, "test", NBestOptions(), told)
    lines = [json.loads(line) for line in (bert.folder / "eval" / "errors.jsonl").read_text().splitlines()]
    kept = json.loads((bert.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    wrong = kept["num_examples"] - np.trace(kept["confusion"])
    assert len(lines) == wrong > 0
    assert len(found.reports) == 1
    assert set(lines[0]) == {"text", "prediction", "target", "probability"}
    page = (bert.folder / "figures" / "errors.html").read_text(encoding="utf-8")
    assert lines[0]["text"] in page
    assert "<mark" not in page
    assert lines[0]["text"] in said(told)
    assert (bert.folder / "figures" / "test-calibration.png").stat().st_size > 5000
    assert sum(kept["calibration"]["count"]) == kept["num_examples"]
    gap = np.abs(np.subtract(kept["calibration"]["confidence"], kept["calibration"]["accuracy"]))
    assert np.average(gap, weights=kept["calibration"]["count"]) == pytest.approx(kept["calibration_error"])


def test_of_pairs_both_texts_are_shown(tmp_path: Path) -> None:
    chance = random.Random(2)
    path = table(tmp_path / "pairs.tsv", "a\tb\tlabel", [pair(chance) for _ in range(90)])
    data = {"train": path, "text_column": "a", "pair_column": "b", "held_out_size": 20}
    few = {"max_epochs": None, "max_steps": 1, "warmup_steps": 0}
    run = train_run(tmp_path / "run", "classify", data, train=few)
    told = console()
    evaluate(load_predictor(run, "cpu"), "test", NBestOptions(), told)
    first = json.loads((run.folder / "eval" / "errors.jsonl").read_text().splitlines()[0])
    assert f"{first['text']} | {first['text_pair']}" in said(told)
    page = (run.folder / "figures" / "errors.html").read_text(encoding="utf-8")
    assert f'<p dir="auto">{first["text"]}</p><p dir="auto">{first["text_pair"]}</p>' in page


# ------------------------------------------------------------------------------------------------ the command


def test_the_command(
    bert: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jumok", "eval", str(bert.folder), "--faithfulness"])
        with pytest.raises(SystemExit) as ended:
            cli_app.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    (bert.folder / "eval" / "test.json").unlink(missing_ok=True)
    status, _, err = run()
    assert status == 1
    assert err.startswith("jumok: --faithfulness: this model has no word weights")
    assert "self-attentive" in err
    assert "hierarchical" in err
    assert not (bert.folder / "eval" / "test.json").exists()  # before anything is read
    counter = Counter(tmp_path, samples(40, wrong=4))
    monkeypatch.setattr("jumok.tasks.load_predictor", lambda run, device: counter)
    status, out, err = run()
    assert status == 0, err
    assert "4 of 40 test texts were classified wrongly" in out
    assert "the highlight is meaningful" in out
    kept = json.loads((tmp_path / "eval" / "test.json").read_text(encoding="utf-8"))
    assert kept["accuracy"] == 0.9
    assert kept["faithfulness"]["num_sampled"] == 40
