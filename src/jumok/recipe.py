"""Recipes: everything that a training run depends on, in one YAML file.

A recipe names a ``task`` and has the sections that this task knows (model, data, train, …). A recipe may
begin from another one, ``base: transformer/multi30k-en-de``, and say only what differs. On the command line
``key=value`` overrides follow, the key dotted and the value in YAML::

    jumok train transformer/multi30k-en-de train.max_steps=500 model.width=128

What does not fit is told by its key, and a key that nobody knows with the nearest one that is known.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from jumok import tasks
from jumok.errors import InputError

__all__ = [
    "find",
    "get_run_folder",
    "iter_changes",
    "list_builtin",
    "load",
    "parse",
    "read",
    "read_summary",
    "to_dict",
    "to_yaml",
]

YAML_SUFFIXES = (".yaml", ".yml")
MAX_SIZE = 10_000_000  # of a model or a vocabulary
MAX_BASE_DEPTH = 8  # deeper than this, recipes begin from each other in a circle
RecipeTree = dict[str, Any]


def load(name: str, overrides: Sequence[str] = ()) -> Any:
    """A recipe by name or file, with overrides: the task's own ``Recipe``, checked."""
    tree = read(find(name))
    tree.pop("format", None)  # it may be a run's
    return parse(apply_overrides(tree, overrides), name)


def get_run_folder(name: str) -> Path:
    """Where a recipe's run goes unless told otherwise: no two recipes' runs lie in one another.

    >>> folder_of("bahdanau").as_posix(), folder_of("transformer/multi30k-en-de").as_posix()
    ('runs/bahdanau', 'runs/transformer-multi30k-en-de')
    """
    path = Path(name)
    own = path.stem if path.suffix in YAML_SUFFIXES else name.removesuffix("/default").replace("/", "-")
    return Path("runs") / own


def list_builtin() -> dict[str, Path]:
    """All recipes that come with jumok, by name."""
    root = Path(str(importlib.resources.files("jumok") / "recipes"))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def read_summary(path: Path) -> str:
    """The first line of the comment at the head of a recipe."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def find(name: str) -> Path:
    """The file of a recipe: by path, by name, or by the name of a model alone, which means its default."""
    known = list_builtin()
    for spelled in (name, f"{name}/default"):
        if spelled in known:
            return known[spelled]
    path = Path(name)
    if path.suffix in YAML_SUFFIXES:
        if path.is_file():
            return path
        raise InputError(f"there is no file {name}; `jumok recipes` lists the recipes that come with jumok")
    near = difflib.get_close_matches(name, [*known, *{one.split("/")[0] for one in known}], n=3, cutoff=0.4)
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    raise InputError(f"there is no recipe {name!r}{meant} `jumok recipes` lists them; a file ends in .yaml")


def read(path: Path, depth: int = 0, *, forbid_base: bool = False) -> RecipeTree:
    """The recipe in a file as plain data, with what it begins from filled in.

    ``forbid_base`` refuses a recipe with a base: the recipe of a run has none, and may come from a stranger. No
    error quotes the file, because a stranger's recipe could name any file as its base.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"{where}: this is not YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        raise InputError(f"{path}: this is not a recipe: its values are nested too deeply") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: a recipe has sections, as in `model:` and `train:`; it holds {type(tree).__name__}"
        )
    base = tree.pop("base", None)
    if base is None:
        return tree
    if forbid_base:
        raise InputError(f"{path} has base: {base!r}; the recipe of a run spells out all of its settings")
    if depth == MAX_BASE_DEPTH:
        raise InputError(f"{path}: base: {base!r} leads through {depth} recipes; do they begin in a circle?")
    beside = path.parent / str(base)
    is_file = beside.suffix in YAML_SUFFIXES and beside.is_file()
    return merge_trees(read(beside if is_file else find(str(base)), depth + 1), tree)


def merge_trees(base: RecipeTree, overrides: RecipeTree) -> RecipeTree:
    """What ``overrides`` says, and what ``base`` says where ``overrides`` is silent, section by section.

    Below the sections a value takes the place of the other as a whole, whatever it holds: of other labels,
    none is a class any more. So does a model of another ``kind``: the settings of a GRU mean nothing to a
    Transformer.

    >>> merged({"data": {"train": "a", "labels": {"0": "bad"}}}, {"data": {"labels": {"no": "bad"}}})
    {'data': {'train': 'a', 'labels': {'no': 'bad'}}}
    """
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        if not (isinstance(old, dict) and isinstance(value, dict)) or (
            key == "model" and value.get("kind", old.get("kind")) != old.get("kind")
        ):
            result[key] = value
        else:
            result[key] = {**old, **value}
    return result


def apply_overrides(tree: RecipeTree, overrides: Sequence[str]) -> RecipeTree:
    """The recipe with ``key=value`` pairs from the command line.

    >>> overridden({"train": {"steps": 5}}, ["train.max_steps=7", "data.train=[a.en, a.de]"])
    {'train': {'steps': 7}, 'data': {'train': ['a.en', 'a.de']}}
    """
    together: RecipeTree = {}
    within: list[tuple[list[str], Any]] = []  # what changes one entry of a value, as in data.labels.0=bad
    for one in overrides:
        key, equals, text = one.partition("=")
        keys = key.split(".")
        if not equals or not all(keys):
            raise InputError(f"{one!r}: an override is key=value, as in train.max_steps=500")
        try:
            value: Any = yaml.load(text, Loader=_StrictLoader)
        except yaml.YAMLError:
            value = text  # a text with a colon or a bracket in it, say
        if len(keys) > 2:
            within.append((keys, value))
        else:
            together = merge_trees(
                together, {keys[0]: value} if len(keys) == 1 else {keys[0]: {keys[1]: value}}
            )
    result = merge_trees(tree, together)
    for keys, value in within:
        result = _set_value(result, keys, value)
    return result


def _set_value(tree: Any, keys: Sequence[str], value: Any) -> Any:
    """The same with another value there."""
    if not keys:
        return value
    known = tree if isinstance(tree, dict) else {}
    return {**known, keys[0]: _set_value(known.get(keys[0]), keys[1:], value)}


def parse(tree: Mapping[str, Any], name: str = "this recipe") -> Any:
    """The task's ``Recipe`` from plain data; all that does not fit is told at once."""
    task = tree.get("task")
    if task not in tasks.TASK_NAMES:
        raise InputError(f"{name}: task: {task!r}; it is one of: {', '.join(tasks.TASK_NAMES)}")
    schema = _select_schema(tasks.get_task_module(task).Recipe, tree, name)
    if large := list(_find_oversized(tree)):
        raise InputError("\n".join([f"{name} does not fit:", *(f"  {line}" for line in large)]))
    try:
        return pydantic.TypeAdapter(schema).validate_python(dict(tree))
    except pydantic.ValidationError as error:
        lines = list(dict.fromkeys(_format_problem(problem, schema, tree) for problem in error.errors()))
        raise InputError("\n".join([f"{name} does not fit:", *(f"  {line}" for line in lines)])) from None


def _find_oversized(tree: Mapping[str, Any]) -> Iterator[str]:
    """Messages about sizes that no memory could hold."""
    waiting = [(section, tree.get(section)) for section in ("model", "text")]
    while waiting:
        key, value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += [(f"{key}.{inner}", one) for inner, one in value.items()]
        elif isinstance(value, int) and value > MAX_SIZE:
            yield f"{key}: {value} came; a size is at most {MAX_SIZE:,}"


def _select_schema(schemas: Any, tree: Mapping[str, Any], name: str) -> Any:
    """What a recipe must fit: the task's, or where it has several, that of the kind of model."""
    if not isinstance(schemas, Mapping):
        return schemas
    model = tree.get("model")
    kind = model.get("kind") if isinstance(model, Mapping) else None
    if kind is None:
        return next(iter(schemas.values()))
    if kind not in schemas:
        near = difflib.get_close_matches(str(kind), schemas, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise InputError(
            f"{name} does not fit:\n  model.kind: {kind!r} came; it is one of {', '.join(schemas)}{meant}"
        )
    return schemas[kind]


def to_dict(recipe: Any) -> RecipeTree:
    """The recipe as plain data, every value spelled out: ``parse(to_dict(recipe)) == recipe``."""
    found: RecipeTree = pydantic.TypeAdapter(type(recipe)).dump_python(recipe, mode="json", by_alias=True)
    return found


def to_yaml(recipe: Any, *, header: str = "") -> str:
    """The recipe as YAML."""
    text: str = yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True, width=100)
    return header + text


def iter_changes(before: RecipeTree, after: RecipeTree) -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys whose values differ, with both values; a missing one is None.

    >>> list(changed({"train": {"steps": 5, "seed": 1}}, {"train": {"steps": 7, "seed": 1}}))
    [('train.steps', 5, 7)]
    """
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from ((f"{key}.{inner}", one, other) for inner, one, other in iter_changes(old, new))
        elif old != new:
            yield key, old, new


# --------------------------------------------------------------------------------- telling what is wrong


def _format_problem(problem: Any, schema: type, tree: Mapping[str, Any]) -> str:
    """One line for one thing that pydantic found."""
    keys = _find_keys(problem["loc"], tree, missing=problem["type"] == "missing")
    dotted = ".".join(keys)
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _list_field_names(schema, keys[:-1], tree)
        near = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
        meant = f"did you mean {'.'.join([*keys[:-1], near[0]])}?" if near else f"known: {', '.join(known)}"
        return f"{dotted}: there is no such key; {meant}"
    if problem["type"] == "missing":
        return f"{dotted}: this is missing"
    if problem["type"].startswith("union_tag"):
        tags = problem["ctx"].get("expected_tags")
        came = problem["input"].get("kind")
        return f"{dotted}.kind: " + (f"{came!r} came; it is one of {tags}" if tags else "this is missing")
    said = problem["msg"].removeprefix("Value error, ")
    if not dotted:
        return str(said)
    came = problem.get("input")
    is_section = isinstance(came, Mapping) or dataclasses.is_dataclass(came)
    return f"{dotted}: {said}" if is_section else f"{dotted}: {came!r} came; {said[0].lower()}{said[1:]}"


def _find_keys(location: Sequence[str | int], tree: Mapping[str, Any], *, missing: bool) -> list[str]:
    """The keys of the file on the way to an error; pydantic's path also names kinds and types."""
    keys: list[str] = []
    here: Any = tree
    for place, part in enumerate(location):
        known = part in here if isinstance(here, Mapping) else isinstance(part, int)
        if known or (missing and place == len(location) - 1):
            keys.append(str(part))
            here = here.get(part) if isinstance(here, Mapping) else None
    return keys


def _list_field_names(schema: Any, keys: Sequence[str], tree: Any) -> list[str]:
    """The names of the fields of the section at ``keys``."""
    for key in keys:
        tree = tree.get(key, {}) if isinstance(tree, Mapping) else {}
        hint = typing.get_type_hints(schema)[key]
        sections = [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]
        kind = tree.get("kind") if isinstance(tree, Mapping) else None
        schema = next((one for one in sections if getattr(one, "kind", None) == kind), sections[0])
    # A key that is a word of Python's, as ``from``, is a field with an underscore behind it.
    return [field.name.removesuffix("_") for field in dataclasses.fields(schema)]


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key comes once only, 1e-3 is a number, and ``no`` is Norwegian."""


def _construct_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> RecipeTree:
    found: RecipeTree = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        if key in found:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} comes twice", key_node.start_mark
            )
        found[key] = loader.construct_object(value_node, deep=True)
    return found


def _construct_float(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)))


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
_StrictLoader.add_constructor("!exponent", _construct_float)
BOOL_TAG = "tag:yaml.org,2002:bool"
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag != BOOL_TAG]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(BOOL_TAG, re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_StrictLoader.add_implicit_resolver(
    "!exponent", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
