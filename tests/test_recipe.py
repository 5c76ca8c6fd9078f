"""Recipes: names, overrides, and the errors of invalid ones."""

from pathlib import Path

import pytest

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

SMALL = {"task": "translate", "model": {"type": "seq2seq", "width": 8}}


@pytest.mark.parametrize("name", list_builtin())
def test_every_builtin_recipe_is_valid_and_described(name: str) -> None:
    recipe = load(name)
    assert parse(to_dict(recipe)) == recipe
    summary = read_summary(find(name))
    assert 20 < len(summary) < 100
    assert summary.endswith(".")
    assert f"jumok train {name.removesuffix('/default')}" in find(name).read_text(encoding="utf-8")


def test_the_name_of_a_model_means_its_default_recipe() -> None:
    assert find("bahdanau") == find("bahdanau/default")


def test_written_recipes_are_read_unchanged(tmp_path: Path) -> None:
    recipe = load("transformer/multi30k-en-de", ["train.seed=7"])
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(recipe), encoding="utf-8")
    assert load(str(path)) == recipe


def test_overrides_are_yaml_and_apply_in_order() -> None:
    recipe = load(
        "bahdanau", ["train.max_steps=5", "train.learning_rate=2e-4", "train.max_steps=7", "data.train=[a, b]"]
    )
    assert (recipe.train.max_steps, recipe.train.learning_rate, recipe.data.train) == (7, 2e-4, ["a", "b"])
    assert load("bahdanau", ["model.attention=null"]).model.attention is None
    assert apply_overrides({}, ["a=x: y: z"]) == {"a": "x: y: z"}


def test_another_model_type_replaces_the_section() -> None:
    recipe = load("bahdanau", ["model={type: transformer, width: 64}"])
    assert (recipe.model.type, recipe.model.width) == ("transformer", 64)


def test_a_base_in_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("base: bahdanau\ntrain: {max_steps: 3}\n", encoding="utf-8")
    (tmp_path / "two.yaml").write_text("base: one.yaml\ntrain: {seed: 4}\n", encoding="utf-8")
    recipe = load(str(tmp_path / "two.yaml"))
    assert (recipe.train.max_steps, recipe.train.seed, recipe.model.type) == (3, 4, "seq2seq")


def test_label_names_are_replaced_as_a_whole(tmp_path: Path) -> None:
    labels = {"no": "negative", "yes": "positive"}
    overridden = load("bert/sst2", ["data.train=mine.tsv", "data.label_names={no: negative, yes: positive}"])
    assert (overridden.data.label_names, overridden.data.train) == (labels, "mine.tsv")
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: bert/sst2\ndata:\n  label_names: {no: negative, yes: positive}\n", encoding="utf-8")
    extended = load(str(mine))
    assert (extended.data.label_names, extended.data.train) == (labels, load("bert/sst2").data.train)


def test_an_override_of_a_single_entry() -> None:
    assert load("bert/sst2", ["data.label_names.0=bad"]).data.label_names == {"0": "bad", "1": "positive"}
    overrides = ["a.b.c=1", "a.b={d: 2}", "a.b.e.f=3"]
    assert apply_overrides({}, overrides) == {"a": {"b": {"d": 2, "c": 1, "e": {"f": 3}}}}


WRONG = {
    "a typo in a key": (["model.widht=5"], ["model.widht", "did you mean model.width?"]),
    "a typo in a section": (["modle.width=5"], ["modle", "did you mean model?"]),
    "a part of a key": (["train.warmup=5"], ["train.warmup: there is no such key; did you mean train.warmup_steps?"]),
    "a key of nobody": (["train.quux=5"], ["train.quux", "known: ", "learning_rate"]),
    "a word for a number": (["train.max_steps=many"], ["train.max_steps", "'many' is invalid"]),
    "another type": (["model={type: perceptron}"], ["model.type", "'perceptron' is unknown", "transformer"]),
    "no type": (["model={type: null}"], ["model.type"]),
    "values that do not go together": (["model.reverse_source=true"], ["model: ", "bidirectional"]),
    "no pair": (["train.max_steps"], ["'train.max_steps'", "key=value"]),
    "no key": (["=5"], ["'=5'", "key=value"]),
    "another task": (["task=transalte"], ["task", "'transalte'", "translate"]),
    "two things at once": (["model.widht=5", "train.max_steps=0"], ["model.widht", "train: max_steps=0"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_key(name: str) -> None:
    overrides, messages = WRONG[name]
    with pytest.raises(InputError) as caught:
        load("bahdanau", overrides)
    for part in messages:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("bahdnau", ["'bahdnau'", "did you mean bahdanau"]),
        ("transformer/multi30k-de-en", ["transformer/multi30k-en-de"]),
        ("missing.yaml", ["no file missing.yaml", "jumok recipes"]),
    ],
)
def test_an_unknown_name_is_reported_with_similar_names(name: str, messages: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        find(name)
    for part in messages:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("task: translate\nmodel: {type: seq2seq\n", ["mine.yaml:3", "not YAML"]),
        ("task: translate\ntask: translate\n", ["mine.yaml:2", "'task' comes twice"]),
        ("just a text", ["sections", "holds str"]),
        ("", ["sections", "None"]),
        ("base: mine.yaml", ["circle"]),
    ],
)
def test_an_invalid_file_is_reported_with_its_line(tmp_path: Path, text: str, messages: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read(path)
    for part in messages:
        assert part in str(caught.value)


def test_iter_changes() -> None:
    before, after = to_dict(parse(SMALL)), to_dict(parse({**SMALL, "train": {"max_steps": 5, "seed": 2}}))
    assert list(iter_changes(before, after)) == [("train.max_steps", None, 5), ("train.seed", 1, 2)]


def test_all_keys_with_the_same_word_are_suggested() -> None:
    with pytest.raises(InputError, match=r"did you mean train\.validate_every or train\.save_every or "):
        load("bahdanau", ["train.every=5"])
