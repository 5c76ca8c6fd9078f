"""Entities of sentences, from columns of words to text in brackets: learned to the last one."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from labelled_runs import sentence, tagged, train_run
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
    chance = random.Random(1)
    path = tagged(folder / "train.txt", [sentence(chance) for _ in range(300)])
    return train_run(folder / "run", "tag", {"train": path, "held_out_size": 40, "tag_scheme": "iob1"})


def test_entities_are_learned(run: Run) -> None:
    reader = jumok.load(run.folder, "cpu")
    found = evaluate(reader, "test", NBestOptions(), QUIET)
    assert found.metrics["f1"] == found.metrics["accuracy"] == 1
    assert {row["type"]: row["f1"] for row in found.metrics["types"]} == {"PER": 1, "LOC": 1}
    assert sorted(reader.labels) == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    assert reader.labels[0] == "O"


def test_what_is_said_in_words(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    text = "the story: Carla Maria was  a New York."
    found = reader.tag(text)
    assert found.words == ("the", "story", ":", "Carla", "Maria", "was", "a", "New", "York", ".")
    assert found.entities == [Entity("PER", 3, 5), Entity("LOC", 7, 9)]
    [line] = found.to_lines(n_best=False, alignments=False, as_json=False)
    assert line == "the story: [Carla Maria](PER) was  a [New York](LOC)."
    [told] = map(json.loads, found.to_lines(n_best=False, alignments=False, as_json=True))
    assert told["tags"] == list(found.tags)
    for one in told["entities"]:
        assert text[one["start"] : one["end"]] == one["text"]
        assert 0.5 < one["probability"] <= 1
    assert [one["text"] for one in told["entities"]] == ["Carla Maria", "New York"]


def test_order_and_empty_lines_are_kept(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    lines = ["the film was Anna", "", "\u200b", "a Busan and Bruno", "U.N."]
    found = list(reader.predict(lines, NBestOptions(), first_index=3))
    assert [one.index for one in found] == [3, 4, 5, 6, 7]
    assert [one.words for one in found[1:3]] == [(), ("\u200b",)]
    assert found[2].tags == ("O",)
    assert found[4].words == ("U.N.",)
    assert [entity.type for entity in found[3].entities] == ["LOC", "PER"]
    assert all(len(one.tags) == len(one.spans) == len(one.words) for one in found)


def test_a_point_belongs_to_an_abbreviation_and_not_to_a_sentence() -> None:
    said = "The U.N. sent U.S.-led teams to St. Paul."
    words = ["The", "U.N.", "sent", "U.S.-led", "teams", "to", "St", ".", "Paul", "."]
    assert WORD_PATTERN.findall(said) == words


def test_several_taggings_are_not_told(run: Run) -> None:
    with pytest.raises(InputError, match="--n-best: each word has one tag"):
        list(load_predictor(run, "cpu").predict(["Anna"], NBestOptions(n_best=2)))


def test_a_long_sentence_is_tagged_in_windows(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    reader.task.recipe = replace(run.recipe, data=replace(run.recipe.data, window_stride=11))
    words = (["the", "film", "Anna", "was", "Paris", "and"] * 20)[:110]
    found = reader.tag(" ".join(words))
    assert [found.words[one.begin] for one in found.entities] == [w for w in words if w in ("Anna", "Paris")]
    # In training, each word counts in one window only.
    given = TaggingExample(tuple(words), ("O",) * len(words), "x:1")
    [rows] = reader.encode([given])
    labels = [label for row in rows for label in row.annotations["labels"]]
    assert sum(label != IGNORE for label in labels) == len(words)
    assert all(len(row.ids) <= 40 for row in rows)


def test_a_long_sentence_is_refused_if_the_recipe_says_so(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    reader.task.recipe = replace(run.recipe, data=replace(run.recipe.data, on_overflow="error"))
    with pytest.raises(InputError, match=r"line 2: a sentence that is too long .*data.on_overflow=window"):
        list(reader.predict(["fine", "film " * 60], NBestOptions()))


def test_a_tag_that_was_never_learned(run: Run, tmp_path: Path) -> None:
    path = tagged(tmp_path / "test.txt", [[("fine", "O")], [("the", "O"), ("ACME", "I-ORG")]])
    use = TaggingTask(replace(run, recipe=replace(run.recipe, data=replace(run.recipe.data, test=path))))
    with pytest.raises(InputError, match=r"test.txt:4: an unknown tag \('B-ORG' of the word 'ACME'; the tags are: O"):
        use.load_split("test")


def test_tags_are_told_in_iob2_whatever_the_model_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = load_predictor(run, "cpu")
    said = ("I-PER", "I-PER", "I-LOC"), (0.9, 0.8, 0.7)
    monkeypatch.setattr(reader, "_predict_tags", lambda sentences, first: iter([said]))
    found = reader.tag("Carla Maria Seoul")
    [line] = found.to_lines(n_best=False, alignments=False, as_json=True)
    told = json.loads(line)
    assert told["tags"] == ["B-PER", "I-PER", "B-LOC"]
    assert [one["text"] for one in told["entities"]] == ["Carla Maria", "Seoul"]


def test_look_and_export(run: Run, tmp_path: Path) -> None:
    reader = load_predictor(run, "cpu")
    assert reader.build_viewer_data("Anna was")[0].layers[0].row_labels[0] == "[CLS]"
    reader.export("hf", tmp_path / "hf")
    loaded = jumok.load(tmp_path / "hf", "cpu")
    assert loaded.labels == tuple(reader.labels)
