"""Recipes: names, overrides, and what is said of those that do not fit."""

import doctest
from pathlib import Path

import pytest

import jumok.recipe
from jumok import InputError
from jumok.recipe import (
    apply_overrides,
    find,
    iter_changes,
    list_builtin,
    load,
    parse,
    read,
    read_summary,
    to_dict,
    to_yaml,
)

SMALL = {"task": "translate", "model": {"kind": "seq2seq", "width": 8}}


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(jumok.recipe).failed == 0


@pytest.mark.parametrize("name", list_builtin())
def test_every_recipe_that_comes_with_jumok_fits_and_says_what_it_is(name: str) -> None:
    recipe = load(name)
    assert parse(to_dict(recipe)) == recipe
    said = read_summary(find(name))
    assert 20 < len(said) < 100
    assert said.endswith(".")
    assert f"jumok train {name.removesuffix('/default')}" in find(name).read_text(encoding="utf-8")


def test_a_model_alone_means_its_default() -> None:
    assert find("bahdanau") == find("bahdanau/default")


def test_what_is_written_reads_as_the_same_recipe(tmp_path: Path) -> None:
    recipe = load("transformer/multi30k-en-de", ["train.seed=7"])
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(recipe), encoding="utf-8")
    assert load(str(path)) == recipe


def test_overrides_are_yaml_and_come_in_order() -> None:
    recipe = load(
        "bahdanau",
        ["train.max_steps=5", "train.learning_rate=2e-4", "train.max_steps=7", "data.train=[a, b]"],
    )
    assert (recipe.train.steps, recipe.train.learning_rate, recipe.data.train) == (7, 2e-4, ["a", "b"])
    assert load("bahdanau", ["model.attention=null"]).model.attention is None
    assert apply_overrides({}, ["a=x: y: z"]) == {"a": "x: y: z"}


def test_another_kind_of_model_takes_the_place_of_the_whole_section() -> None:
    recipe = load("bahdanau", ["model={kind: transformer, width: 64}"])
    assert (recipe.model.kind, recipe.model.width) == ("transformer", 64)


def test_a_recipe_may_begin_from_another_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("base: bahdanau\ntrain: {steps: 3}\n", encoding="utf-8")
    (tmp_path / "two.yaml").write_text("base: one.yaml\ntrain: {seed: 4}\n", encoding="utf-8")
    recipe = load(str(tmp_path / "two.yaml"))
    assert (recipe.train.steps, recipe.train.seed, recipe.model.kind) == (3, 4, "seq2seq")


def test_labels_take_the_place_of_the_recipes_labels(tmp_path: Path) -> None:
    labels = {"no": "negative", "yes": "positive"}
    given = load("bert/sst2", ["data.train=mine.tsv", "data.label_names={no: negative, yes: positive}"])
    assert (given.data.labels, given.data.train) == (labels, "mine.tsv")
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: bert/sst2\ndata:\n  labels: {no: negative, yes: positive}\n", encoding="utf-8")
    begun = load(str(mine))
    assert (begun.data.labels, begun.data.train) == (labels, load("bert/sst2").data.train)


def test_an_entry_of_a_value_is_changed_by_its_key_alone() -> None:
    assert load("bert/sst2", ["data.labels.0=bad"]).data.labels == {"0": "bad", "1": "positive"}
    overrides = ["a.b.c=1", "a.b={d: 2}", "a.b.e.f=3"]
    assert apply_overrides({}, overrides) == {"a": {"b": {"d": 2, "c": 1, "e": {"f": 3}}}}


WRONG = {
    "a typo in a key": (["model.widht=5"], ["model.widht", "did you mean model.width?"]),
    "a typo in a section": (["modle.width=5"], ["modle", "did you mean model?"]),
    "a key of nobody": (["train.quux=5"], ["train.quux", "known: ", "learning_rate"]),
    "a word for a number": (["train.max_steps=many"], ["train.steps", "'many' came"]),
    "another kind": (["model={kind: perceptron}"], ["model.kind", "'perceptron' came", "transformer"]),
    "no kind": (["model={kind: null}"], ["model.kind"]),
    "values that do not go together": (["model.reverse_source=true"], ["model: ", "bidirectional"]),
    "no pair": (["train.steps"], ["'train.steps'", "key=value"]),
    "no key": (["=5"], ["'=5'", "key=value"]),
    "another task": (["task=transalte"], ["task", "'transalte'", "translate"]),
    "two things at once": (["model.widht=5", "train.max_steps=0"], ["model.widht", "train: steps=0"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_told_by_its_key(name: str) -> None:
    overrides, told = WRONG[name]
    with pytest.raises(InputError) as caught:
        load("bahdanau", overrides)
    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("bahdnau", ["'bahdnau'", "did you mean bahdanau"]),
        ("transformer/multi30k-de-en", ["transformer/multi30k-en-de"]),
        ("missing.yaml", ["no file missing.yaml", "jumok recipes"]),
    ],
)
def test_a_name_that_nobody_knows_is_told_with_the_nearest(name: str, told: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        find(name)
    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("task: translate\nmodel: {kind: seq2seq\n", ["mine.yaml:3", "not YAML"]),
        ("task: translate\ntask: translate\n", ["mine.yaml:2", "'task' comes twice"]),
        ("just a text", ["sections", "it holds str"]),
        ("", ["sections", "None"]),
        ("base: mine.yaml", ["circle"]),
    ],
)
def test_a_file_that_is_no_recipe_is_told_by_its_line(tmp_path: Path, text: str, told: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read(path)
    for part in told:
        assert part in str(caught.value)


def test_changed_names_every_key_that_differs() -> None:
    before, after = to_dict(parse(SMALL)), to_dict(parse({**SMALL, "train": {"steps": 5, "seed": 2}}))
    assert list(iter_changes(before, after)) == [("train.steps", None, 5), ("train.seed", 1, 2)]
