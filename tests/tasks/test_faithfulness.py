"""Error analysis, and the faithfulness of word weights: of a word counter, trained models and a BERT."""

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
from labelled_runs import BAD, GOOD, make_pair, make_review, train_run, write_table
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

pytestmark = pytest.mark.long


QUIET = Console(quiet=True)


class WordCounter:
    """Counts good and bad words. Each line is a sentence. Weights are on these words, or, if unfaithful, on others."""

    labels: tuple[str, ...] = ("bad", "good")

    def __init__(self, folder: Path, samples: Sequence[ClassificationExample], *, faithful: bool = True) -> None:
        self.run = SimpleNamespace(folder=folder)
        self.samples, self.faithful = list(samples), faithful
        self.batch_sizes: list[int] = []

    def load_split(self, name: str) -> DatasetSplit[ClassificationExample]:
        return DatasetSplit(name, self.samples)

    def predict_probabilities(self, documents: Sequence[Sequence[Sequence[str]]]) -> NDArray[np.float64]:
        assert all(document and all(document) for document in documents)
        words = [[word for sentence in document for word in sentence] for document in documents]
        count = np.array([sum((w in GOOD) - (w in BAD) for w in document) for document in words])
        good = 0.5 + 0.4 * np.tanh(count)
        return np.stack([1 - good, good], axis=1)

    def highlight_texts(self, texts: Sequence[str]) -> list[AttendedDocument]:
        self.batch_sizes.append(len(texts))
        documents = []
        for text in texts:
            sentences = [line.split() for line in text.replace("\t", "\n").split("\n") if line.split()]
            if not sentences:
                raise InputError("a text has no words to look at")
            words = tuple(word for sentence in sentences for word in sentence)
            looks = np.array([word in GOOD + BAD for word in words]) == self.faithful
            weights = np.where(looks, 9.0, 1.0)
            hops = np.stack([weights / weights.sum(), np.full(len(words), 1 / len(words))])
            edges = tuple(np.cumsum([0, *map(len, sentences)]).tolist())
            probabilities = self.predict_probabilities([sentences])[0]
            ranked = tuple((self.labels[at], float(probabilities[at])) for at in np.argsort(-probabilities))
            documents.append(
                AttendedDocument(words, (" ",) * len(words), edges, hops.astype(np.float32), class_probabilities=ranked)
            )
        return documents

    def outputs(self, samples: Sequence[ClassificationExample]) -> NDArray[np.float64]:
        return self.predict_probabilities([[line.split() for line in sample.text.split("\n")] for sample in samples])

    def score_split(self, split: Any, options: Any, **_: Any) -> Evaluation:
        samples, probabilities = split.examples, self.outputs(split.examples)
        truth = np.array([int(sample.label) for sample in samples])
        documents = classify_metrics.score_classes(samples, truth, probabilities, self.labels, detailed=True)
        errors = find_errors(samples, probabilities, LabelSet(("0", "1"), self.labels))
        report = functools.partial(report_errors, self, errors, len(samples))
        return dataclasses.replace(documents, reports=[report])


def samples(count: int, num_wrong: int = 0) -> list[ClassificationExample]:
    rng = random.Random(7)
    examples = []
    for number in range(count):
        parts = [make_review(rng) for _ in range(2)]
        while parts[0][1] != parts[1][1]:
            parts = [make_review(rng) for _ in range(2)]
        label = int(parts[0][1])
        text = "\n".join(text for text, _ in parts)
        examples.append(
            ClassificationExample(text, None, str(1 - label if number < num_wrong else label), f"x:{number}")
        )
    return examples


def read_output(console: Console) -> str:
    file: Any = console.file
    return str(file.getvalue())


def console(**options: Any) -> Console:
    return Console(file=io.StringIO(), highlight=False, width=100, **options)


# ----------------------------------------------------------------------------------------------- faithfulness


def test_faithful_and_unfaithful_weights(tmp_path: Path) -> None:
    output = console()
    faithful = WordCounter(tmp_path / "faithful", samples(60))
    assert isinstance(faithful, AttentionHighlighter)
    result = faithfulness.evaluate_faithfulness(faithful, "test", output)
    assert "the highlight is meaningful" in result.verdict
    assert result.comprehensiveness.probability.low > 0.1
    assert result.sufficiency.probability.high < -0.1
    for part in ("on 60 of 60 texts", "comprehensiveness", "sufficiency", "10 % (", "mean (AOPC)", result.verdict):
        assert part in read_output(output)
    stored = json.loads((tmp_path / "faithful" / "eval" / "test.json").read_text(encoding="utf-8"))["faithfulness"]
    assert stored["verdict"] == result.verdict
    assert (stored["num_sampled"], stored["num_texts"], stored["seed"], stored["agreement"]) == (60, 60, 1, 1)
    assert stored["comprehensiveness"]["probability"]["low"] == result.comprehensiveness.probability.low
    assert [row["share"] for row in stored["shares"]] == [0.01, 0.05, 0.1, 0.2, 0.5]
    unfaithful = faithfulness.evaluate_faithfulness(
        WordCounter(tmp_path / "other", samples(60), faithful=False), "test", QUIET
    )
    assert "misleading" in unfaithful.verdict or "do not trust" in unfaithful.verdict


def test_faithfulness_is_added_to_the_evaluation(tmp_path: Path) -> None:
    counter = WordCounter(tmp_path, samples(30))
    evaluate(counter, "test", NBestOptions(), QUIET)
    faithfulness.evaluate_faithfulness(counter, "test", QUIET)
    stored = json.loads((tmp_path / "eval" / "test.json").read_text(encoding="utf-8"))
    assert stored["accuracy"] == 1
    assert stored["faithfulness"]["num_texts"] == 30


def test_sampling_depends_on_the_seed(tmp_path: Path) -> None:
    texts = [result.text for result in samples(50)]
    counter = WordCounter(tmp_path, [])
    result, about = faithfulness.compute_faithfulness(counter, texts, QUIET, max_texts=23)
    again, _ = faithfulness.compute_faithfulness(counter, texts, QUIET, max_texts=23)
    other_seed, _ = faithfulness.compute_faithfulness(counter, texts, QUIET, max_texts=23, seed=2)
    assert result == again != other_seed
    assert result.num_texts == 23
    assert (about["num_sampled"], about["num_texts"]) == (23, 50)
    output = console()
    faithfulness.evaluate_faithfulness(WordCounter(tmp_path, samples(50)), "test", output, max_texts=23)
    assert "on 23 of 50 texts (seed 1)" in read_output(output)


def test_texts_with_fewer_than_two_words_are_left_out(tmp_path: Path) -> None:
    odd = [ClassificationExample(text, None, "0", "") for text in ("", "word", "\n \n")]
    output = console()
    result = faithfulness.evaluate_faithfulness(WordCounter(tmp_path, [*odd, *samples(25)]), "test", output)
    assert (result.num_texts, result.num_skipped) == (25, 3)
    assert "fewer than two words, left out: 3" in read_output(output)
    with pytest.raises(InputError, match="of 3 texts, none has words"):
        faithfulness.compute_faithfulness(WordCounter(tmp_path, []), ["", "", ""], QUIET)
    with pytest.raises(InputError, match="no texts given"):
        faithfulness.compute_faithfulness(WordCounter(tmp_path, []), [], QUIET)
    with pytest.raises(InputError, match="at least one text"):
        faithfulness.compute_faithfulness(WordCounter(tmp_path, []), ["a b"], QUIET, max_texts=0)


def test_disagreement_of_joined_words_is_reported(tmp_path: Path) -> None:
    class Forgetful(WordCounter):
        def highlight_texts(self, texts: Sequence[str]) -> list[AttendedDocument]:
            documents = super().highlight_texts(texts)
            return [
                AttendedDocument(
                    document.words,
                    document.separators,
                    document.sentence_offsets,
                    document.weights,
                    class_probabilities=(("?", 1.0),),
                )
                for document in documents
            ]

    output = console()
    faithfulness.evaluate_faithfulness(Forgetful(tmp_path, samples(25)), "test", output)
    assert "100.0 % of the texts get another class when their words are joined again" in read_output(output)


@pytest.mark.parametrize("kind", ["self_attentive", "hierarchical"])
def test_faithfulness_of_trained_models(kind: str, tmp_path: Path) -> None:
    small = ["data.builtin_size=150", "data.held_out_size=30", "train.max_epochs=1", "train.device=cpu"]
    small += ["model.width=8", "model.embedding_width=8", "model.attention_width=8", "train.tensorboard=false"]
    run = Run.create_or_resume(tmp_path / kind, recipe.load(kind, small))
    train(build_task(run), QUIET)
    predictor = load_predictor(run, "cpu")
    assert isinstance(predictor, AttentionHighlighter)
    evaluate(predictor, "test", NBestOptions(), QUIET)
    result = faithfulness.evaluate_faithfulness(predictor, "test", QUIET)
    stored = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert stored["faithfulness"]["agreement"] == 1
    assert result.num_texts == stored["num_examples"]
    error_lines = (run.folder / "eval" / "errors.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(error_lines) == stored["num_examples"] - np.trace(stored["confusion"]) > 0
    words = json.loads(error_lines[0])["words"]
    assert sum(weight for _, weight in words) == pytest.approx(1, abs=0.01)
    # The probability of the whole texts is that of the evaluation.
    lines = [json.loads(line) for line in (run.folder / "eval" / "test.jsonl").read_text().splitlines()]
    assert result.probability == pytest.approx(np.mean([line["probability"] for line in lines]), abs=1e-4)


def test_regression_models_are_an_error(tmp_path: Path) -> None:
    class Numbers(WordCounter):
        labels = ()

    with pytest.raises(InputError, match="this model predicts numbers"):
        faithfulness.check_can_highlight(Numbers(tmp_path, []))


def test_text_pairs_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this model reads text pairs"):
        faithfulness.evaluate_faithfulness(
            WordCounter(tmp_path, [ClassificationExample("a b", "c d", "0", "")]), "test", QUIET
        )


# --------------------------------------------------------------------------------------------- error analysis


def test_errors_are_written_and_printed(tmp_path: Path) -> None:
    counter = WordCounter(tmp_path, samples(300, num_wrong=280))
    output = console()
    evaluate(counter, "test", NBestOptions(), output)
    lines = [json.loads(line) for line in (tmp_path / "eval" / "errors.jsonl").read_text().splitlines()]
    assert len(lines) == 280
    probabilities = [line["probability"] for line in lines]
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(line["prediction"] != line["target"] for line in lines)
    first = lines[0]
    assert [word for word, _ in first["words"]] == first["text"].split()
    assert sum(weight for _, weight in first["words"]) == pytest.approx(1, abs=0.01)
    best = max(first["words"], key=lambda example: example[1])[0]
    assert best in GOOD + BAD
    assert counter.batch_sizes == [256, 24]
    page = (tmp_path / "figures" / "errors.html").read_text(encoding="utf-8")
    assert page.count("<li>") == 20
    assert f">{best}</mark>" in page
    assert "280 of 300 test texts were classified wrongly; shown: the 20" in page
    shown = read_output(output)
    assert "280 of 300 test texts were classified wrongly" in shown
    assert shown.count("highest weights: ") == 5
    assert f"predicted {first['prediction']} ({first['probability']:.3f}), label {first['target']}" in shown
    assert "\x1b" not in shown  # no terminal
    for name in ("test.png", "test-calibration.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 5000


def test_words_are_shaded_in_a_terminal(tmp_path: Path) -> None:
    output = console(force_terminal=True, color_system="truecolor")
    evaluate(WordCounter(tmp_path, samples(5, num_wrong=3)), "test", NBestOptions(), output)
    shown = read_output(output)
    assert re.search(r"\x1b\[(1;)?37;48;2;\d+;\d+;\d+m(" + "|".join(GOOD + BAD) + ")", shown)
    plain = console(force_terminal=True, no_color=True, color_system=None)
    evaluate(WordCounter(tmp_path, samples(5, num_wrong=3)), "test", NBestOptions(), plain)
    assert "48;2;" not in read_output(plain)


def test_files_of_other_splits_and_old_pages(tmp_path: Path) -> None:
    evaluate(WordCounter(tmp_path, samples(9, num_wrong=2)), "test", NBestOptions(), QUIET)
    evaluate(WordCounter(tmp_path, samples(9, num_wrong=1)), "valid", NBestOptions(), QUIET)
    count = {
        name: len((tmp_path / "eval" / f"{name}.jsonl").read_text().splitlines()) for name in ("errors", "valid-errors")
    }
    assert count == {"errors": 2, "valid-errors": 1}
    output = console()
    evaluate(WordCounter(tmp_path, samples(9)), "test", NBestOptions(), output)
    assert "errors: none" in read_output(output)
    assert (tmp_path / "eval" / "errors.jsonl").read_text() == ""
    assert not (tmp_path / "figures" / "errors.html").exists()
    assert (tmp_path / "figures" / "valid-errors.html").exists()


def test_errors_of_empty_texts_and_pairs(tmp_path: Path) -> None:
    empty = ClassificationExample("", None, "1", "")

    class Unread(WordCounter):
        def outputs(self, samples: Sequence[ClassificationExample]) -> NDArray[np.float64]:
            return np.array([[0.9, 0.1], [0.8, 0.2]])

    evaluate(Unread(tmp_path, [empty, samples(1)[0]]), "test", NBestOptions(), QUIET)
    first, second = map(json.loads, (tmp_path / "eval" / "errors.jsonl").read_text().splitlines())
    assert "words" not in first
    assert "words" in second
    pair_example = ClassificationExample("a sad film", "a nice one", "1", "")
    evaluate(Unread(tmp_path, [pair_example, pair_example]), "test", NBestOptions(), QUIET)
    first, _ = map(json.loads, (tmp_path / "eval" / "errors.jsonl").read_text().splitlines())
    assert [word for word, _ in first["words"]] == ["a", "sad", "film", "a", "nice", "one"]
    page = (tmp_path / "figures" / "errors.html").read_text(encoding="utf-8")
    assert re.sub(r"</?mark[^>]*>", "", page).count("a sad film\na nice one") == 2


# ------------------------------------------------------------------------------------------------------- BERT


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A BERT that is hardly trained."""
    folder = tmp_path_factory.mktemp("bert")
    rng = random.Random(1)
    path = write_table(folder / "reviews.tsv", "text\tlabel", [make_review(rng) for _ in range(150)])
    data = {"train": path, "held_out_size": 40, "label_names": {"0": "bad", "1": "good"}}
    return train_run(folder / "run", "classify", data, train={"max_epochs": None, "max_steps": 1, "warmup_steps": 0})


def test_errors_of_a_bert_have_no_word_weights(bert: Run) -> None:
    output = console()
    predictor = load_predictor(bert, "cpu")
    assert not isinstance(predictor, AttentionHighlighter)
    result = evaluate(predictor, "test", NBestOptions(), output)
    lines = [json.loads(line) for line in (bert.folder / "eval" / "errors.jsonl").read_text().splitlines()]
    stored = json.loads((bert.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    num_wrong = stored["num_examples"] - np.trace(stored["confusion"])
    assert len(lines) == num_wrong > 0
    assert len(result.reports) == 1
    assert set(lines[0]) == {"text", "prediction", "target", "probability"}
    page = (bert.folder / "figures" / "errors.html").read_text(encoding="utf-8")
    assert lines[0]["text"] in page
    assert "<mark" not in page
    assert lines[0]["text"] in read_output(output)
    assert (bert.folder / "figures" / "test-calibration.png").stat().st_size > 5000
    assert sum(stored["calibration"]["count"]) == stored["num_examples"]
    gap = np.abs(np.subtract(stored["calibration"]["confidence"], stored["calibration"]["accuracy"]))
    assert np.average(gap, weights=stored["calibration"]["count"]) == pytest.approx(stored["calibration_error"])


def test_errors_of_pairs_show_both_texts(tmp_path: Path) -> None:
    rng = random.Random(2)
    path = write_table(tmp_path / "pairs.tsv", "a\tb\tlabel", [make_pair(rng) for _ in range(90)])
    data = {"train": path, "text_column": "a", "pair_column": "b", "held_out_size": 20}
    short = {"max_epochs": None, "max_steps": 1, "warmup_steps": 0}
    run = train_run(tmp_path / "run", "classify", data, train=short)
    output = console()
    evaluate(load_predictor(run, "cpu"), "test", NBestOptions(), output)
    first = json.loads((run.folder / "eval" / "errors.jsonl").read_text().splitlines()[0])
    assert f"{first['text']} | {first['text_pair']}" in read_output(output)
    page = (run.folder / "figures" / "errors.html").read_text(encoding="utf-8")
    assert f'<p dir="auto">{first["text"]}</p><p dir="auto">{first["text_pair"]}</p>' in page


# ---------------------------------------------------------------------------------------------------- command


def test_faithfulness_option(
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
    counter = WordCounter(tmp_path, samples(40, num_wrong=4))
    monkeypatch.setattr("jumok.tasks.load_predictor", lambda run, device: counter)
    status, out, err = run()
    assert status == 0, err
    assert "4 of 40 test texts were classified wrongly" in out
    assert "the highlight is meaningful" in out
    stored = json.loads((tmp_path / "eval" / "test.json").read_text(encoding="utf-8"))
    assert stored["accuracy"] == 0.9
    assert stored["faithfulness"]["num_sampled"] == 40
