"""Tagging, on small generated data."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from labelled_runs import make_sentence, train_run, write_tagged
from rich.console import Console

import jumok
from jumok import InputError
from jumok.batches.tokens import IGNORE
from jumok.data.readers.tagging import Entity, TaggingExample
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.tag.data import WORD_PATTERN
from jumok.tasks.tag.task import TaggingTask

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tagged")
    rng = random.Random(1)
    path = write_tagged(folder / "train.txt", [make_sentence(rng) for _ in range(300)])
    return train_run(folder / "run", "tag", {"train": path, "held_out_size": 40, "tag_scheme": "iob1"})


def test_tagging_learns_entities(run: Run) -> None:
    predictor = jumok.load(run.folder, "cpu")
    evaluation = evaluate(predictor, "test", NBestOptions(), QUIET)
    assert evaluation.metrics["f1"] == evaluation.metrics["accuracy"] == 1
    assert {row["type"]: row["f1"] for row in evaluation.metrics["types"]} == {"PER": 1, "LOC": 1}
    assert sorted(predictor.labels) == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    assert predictor.labels[0] == "O"


def test_output_lines(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    text = "the story: Carla Maria was  a New York."
    prediction = predictor.tag(text)
    assert prediction.words == ("the", "story", ":", "Carla", "Maria", "was", "a", "New", "York", ".")
    assert prediction.entities == [Entity("PER", 3, 5), Entity("LOC", 7, 9)]
    [line] = prediction.to_lines()
    assert line == "the story: [Carla Maria](PER) was  a [New York](LOC)."
    [content] = map(json.loads, prediction.to_lines(as_json=True))
    assert content["tags"] == list(prediction.tags)
    for entity in content["entities"]:
        assert text[entity["start"] : entity["end"]] == entity["text"]
        assert 0.5 < entity["probability"] <= 1
    assert [entity["text"] for entity in content["entities"]] == ["Carla Maria", "New York"]


def test_order_and_empty_lines_are_kept(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    lines = ["the film was Anna", "", "\u200b", "a Busan and Bruno", "U.N."]
    predictions = list(predictor.predict(lines, NBestOptions(), first_index=3))
    assert [prediction.index for prediction in predictions] == [3, 4, 5, 6, 7]
    assert [prediction.words for prediction in predictions[1:3]] == [(), ("\u200b",)]
    assert predictions[2].tags == ("O",)
    assert predictions[4].words == ("U.N.",)
    assert [entity.type for entity in predictions[3].entities] == ["LOC", "PER"]
    assert all(len(prediction.tags) == len(prediction.spans) == len(prediction.words) for prediction in predictions)


def test_full_stops_of_abbreviations() -> None:
    text = "The U.N. sent U.S.-led teams to St. Paul."
    words = ["The", "U.N.", "sent", "U.S.-led", "teams", "to", "St", ".", "Paul", "."]
    assert WORD_PATTERN.findall(text) == words


def test_n_best_is_an_error(run: Run) -> None:
    with pytest.raises(InputError, match="--n-best: each word has one tag"):
        list(load_predictor(run, "cpu").predict(["Anna"], NBestOptions(n_best=2)))


def test_a_long_sentence_is_tagged_in_windows(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    predictor.task.recipe = replace(run.recipe, data=replace(run.recipe.data, window_stride=11))
    words = (["the", "film", "Anna", "was", "Paris", "and"] * 20)[:110]
    prediction = predictor.tag(" ".join(words))
    assert [prediction.words[entity.begin] for entity in prediction.entities] == [
        w for w in words if w in ("Anna", "Paris")
    ]
    # In training, each word counts in one window only.
    example = TaggingExample(tuple(words), ("O",) * len(words), "x:1")
    [rows] = predictor.encode([example])
    labels = [label for row in rows for label in row.annotations["labels"]]
    assert sum(label != IGNORE for label in labels) == len(words)
    assert all(len(row.ids) <= 40 for row in rows)


def test_a_long_sentence_is_an_error_without_windows(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    predictor.task.recipe = replace(run.recipe, data=replace(run.recipe.data, on_overflow="error"))
    with pytest.raises(InputError, match=r"line 2: a sentence that is too long .*data.on_overflow=window"):
        list(predictor.predict(["fine", "film " * 60], NBestOptions()))


def test_an_unknown_tag_is_an_error(run: Run, tmp_path: Path) -> None:
    path = write_tagged(tmp_path / "test.txt", [[("fine", "O")], [("the", "O"), ("ACME", "I-ORG")]])
    task = TaggingTask(replace(run, recipe=replace(run.recipe, data=replace(run.recipe.data, test=path))))
    with pytest.raises(InputError, match=r"test.txt:4: an unknown tag \('B-ORG' of the word 'ACME'; the tags are: O"):
        task.load_split("test")


def test_predicted_tags_are_converted_to_iob2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = load_predictor(run, "cpu")
    tagged = ("I-PER", "I-PER", "I-LOC"), (0.9, 0.8, 0.7)
    monkeypatch.setattr(predictor, "_predict_tags", lambda sentences, first: iter([tagged]))
    prediction = predictor.tag("Carla Maria Seoul")
    [line] = prediction.to_lines(as_json=True)
    content = json.loads(line)
    assert content["tags"] == ["B-PER", "I-PER", "B-LOC"]
    assert [entity["text"] for entity in content["entities"]] == ["Carla Maria", "Seoul"]


def test_viewer_data_and_export(run: Run, tmp_path: Path) -> None:
    predictor = load_predictor(run, "cpu")
    assert predictor.build_viewer_data("Anna was")[0].layers[0].row_labels[0] == "[CLS]"
    predictor.export("hf", tmp_path / "hf")
    loaded = jumok.load(tmp_path / "hf", "cpu")
    assert loaded.labels == tuple(predictor.labels)
