"""Recipes: everything that a training run depends on, in one YAML file.

A recipe names a ``task`` and has the sections of that task (model, data, train, …). A recipe can extend
another one, ``base: transformer/multi30k-en-de``, and list only the differences. On the command line,
``key=value`` overrides follow, with a dotted key and a value in YAML::

    jumok train transformer/multi30k-en-de train.max_steps=500 model.width=128

Every error names the key that is wrong. The error for an unknown key suggests the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from jumok import tasks
from jumok.errors import InputError

YAML_SUFFIXES = (".yaml", ".yml")
MAX_SIZE = 10_000_000  # limit for sizes of models and vocabularies
MAX_BASE_DEPTH = 8  # a longer chain of bases is a circle
RecipeTree = dict[str, Any]


def load(name: str, overrides: Sequence[str] = ()) -> Any:
    """Load a recipe by name or file, apply overrides and validate it. Returns the task's recipe."""
    tree = read(find(name))
    tree.pop("format", None)  # present in the recipe of a run
    return parse(apply_overrides(tree, overrides), name)


def get_run_folder(name: str) -> Path:
    """Default folder of a recipe's run. The folders of two recipes are never nested.

    >>> get_run_folder("bahdanau").as_posix(), get_run_folder("transformer/multi30k-en-de").as_posix()
    ('runs/bahdanau', 'runs/transformer-multi30k-en-de')
    """
    path = Path(name)
    run_name = path.stem if path.suffix in YAML_SUFFIXES else name.removesuffix("/default").replace("/", "-")
    return Path("runs") / run_name


def list_builtin() -> dict[str, Path]:
    """Paths of the built-in recipes by name."""
    root = Path(str(importlib.resources.files("jumok") / "recipes"))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def read_summary(path: Path) -> str:
    """Return the first line of the comment at the head of a recipe."""
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    return first_line.removeprefix("#").strip()


def find(name: str) -> Path:
    """Find the file of a recipe by path or by name. The name of a model means its default recipe."""
    builtin = list_builtin()
    for candidate in (name, f"{name}/default"):
        if candidate in builtin:
            return builtin[candidate]
    path = Path(name)
    if path.suffix in YAML_SUFFIXES:
        if path.is_file():
            return path
        raise InputError(f"there is no file {name}; `jumok recipes` lists the built-in recipes")
    models = {recipe_name.split("/")[0] for recipe_name in builtin}
    matches = difflib.get_close_matches(name, [*builtin, *sorted(models)], n=3, cutoff=0.4)
    suggestion = f"; did you mean {' or '.join(matches)}?" if matches else "."
    raise InputError(
        f"there is no recipe {name!r}{suggestion} `jumok recipes` lists the built-in recipes; "
        "a recipe file ends in .yaml"
    )


def read(path: Path, depth: int = 0, *, forbid_base: bool = False) -> RecipeTree:
    """Read the recipe in a file as plain data, merged into its base.

    ``forbid_base`` rejects a recipe with a base: the recipe of a run has none, and the run may come from an
    untrusted source. Errors never quote the file, because an untrusted recipe could name any file as base.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"{location}: this is not YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        raise InputError(f"{path}: this is not a recipe: its values are nested too deeply") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: a recipe has sections such as `model:` and `train:`; this file holds {type(tree).__name__}"
        )
    base = tree.pop("base", None)
    if base is None:
        return tree
    if forbid_base:
        raise InputError(f"{path} has base: {base!r}; the recipe of a run must contain all of its settings")
    if depth == MAX_BASE_DEPTH:
        raise InputError(f"{path}: base: {base!r} is a chain of {depth} recipes; is it a circle?")
    sibling = path.parent / str(base)
    is_file = sibling.suffix in YAML_SUFFIXES and sibling.is_file()
    return merge_trees(read(sibling if is_file else find(str(base)), depth + 1), tree)


def merge_trees(base: RecipeTree, overrides: RecipeTree) -> RecipeTree:
    """Merge ``overrides`` into ``base``, section by section.

    Within a section, a value replaces the base's value as a whole, even if both are mappings: new label names
    replace all label names of the base. A ``model`` section with another ``type`` also replaces the whole
    section, because the settings of a GRU mean nothing to a Transformer.

    >>> base = {"data": {"train": "a", "label_names": {"0": "bad"}}}
    >>> merge_trees(base, {"data": {"label_names": {"no": "bad"}}})
    {'data': {'train': 'a', 'label_names': {'no': 'bad'}}}
    """
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        if not (isinstance(old, dict) and isinstance(value, dict)) or (
            key == "model" and value.get("type", old.get("type")) != old.get("type")
        ):
            result[key] = value
        else:
            result[key] = {**old, **value}
    return result


def apply_overrides(tree: RecipeTree, overrides: Sequence[str]) -> RecipeTree:
    """Apply ``key=value`` pairs from the command line to a recipe.

    >>> apply_overrides({"train": {"max_steps": 5}}, ["train.max_steps=7", "data.train=[a.en, a.de]"])
    {'train': {'max_steps': 7}, 'data': {'train': ['a.en', 'a.de']}}
    """
    sections: RecipeTree = {}
    nested: list[tuple[list[str], Any]] = []  # overrides of an entry of a value, as in data.label_names.0=bad
    for override in overrides:
        key, equals, text = override.partition("=")
        keys = key.split(".")
        if not equals or not all(keys):
            raise InputError(f"{override!r}: an override is key=value, as in train.max_steps=500")
        try:
            value: Any = yaml.load(text, Loader=_StrictLoader)
        except yaml.YAMLError:
            value = text  # for example a text with a colon or a bracket
        if len(keys) > 2:
            nested.append((keys, value))
        else:
            sections = merge_trees(sections, {keys[0]: value} if len(keys) == 1 else {keys[0]: {keys[1]: value}})
    result = merge_trees(tree, sections)
    for keys, value in nested:
        result = _set_value(result, keys, value)
    return result


def _set_value(tree: Any, keys: Sequence[str], value: Any) -> Any:
    """Return a copy of ``tree`` with ``value`` at ``keys``."""
    if not keys:
        return value
    entries = tree if isinstance(tree, dict) else {}
    return {**entries, keys[0]: _set_value(entries.get(keys[0]), keys[1:], value)}


def parse(tree: Mapping[str, Any], name: str = "this recipe") -> Any:
    """Build the recipe of a task from plain data. The error lists everything that is wrong."""
    task = tree.get("task")
    if task not in tasks.TASK_NAMES:
        raise InputError(f"{name}: task: {task!r}; it is one of: {', '.join(tasks.TASK_NAMES)}")
    schema = _select_schema(tasks.get_recipe_types(task), tree, name)
    if oversized := list(_find_oversized(tree)):
        raise _build_error(name, oversized)
    try:
        return pydantic.TypeAdapter(schema).validate_python(dict(tree))
    except pydantic.ValidationError as error:
        problems = dict.fromkeys(_format_problem(problem, schema, tree) for problem in error.errors())
        raise _build_error(name, problems) from None


def _build_error(name: str, problems: Iterable[str]) -> InputError:
    return InputError("\n".join([f"{name} is not a valid recipe:", *(f"  {problem}" for problem in problems)]))


def _find_oversized(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages about sizes that no memory could hold."""
    pending = [(section, tree.get(section)) for section in ("model", "tokenizer")]
    while pending:
        key, value = pending.pop(0)
        if isinstance(value, Mapping):
            pending += [(f"{key}.{inner_key}", inner_value) for inner_key, inner_value in value.items()]
        elif isinstance(value, int) and value > MAX_SIZE:
            yield f"{key}: {value} is too large; a size is at most {MAX_SIZE:,}"


def _select_schema(recipe_types: Mapping[str, type], tree: Mapping[str, Any], name: str) -> Any:
    """Return the recipe class for the type of the model. Without a model type, it is the first one."""
    model = tree.get("model")
    model_type = model.get("type") if isinstance(model, Mapping) else None
    if model_type is None:
        return next(iter(recipe_types.values()))
    if model_type not in recipe_types:
        matches = difflib.get_close_matches(str(model_type), recipe_types, n=1, cutoff=0.5)
        suggestion = f"; did you mean {matches[0]}?" if matches else ""
        message = f"model.type: {model_type!r} is unknown; expected one of {', '.join(recipe_types)}{suggestion}"
        raise _build_error(name, [message])
    return recipe_types[model_type]


def to_dict(recipe: Any) -> RecipeTree:
    """Return the recipe as plain data with every value included: ``parse(to_dict(recipe)) == recipe``."""
    tree: RecipeTree = pydantic.TypeAdapter(type(recipe)).dump_python(recipe, mode="json")
    return tree


def to_yaml(recipe: Any, *, header: str = "") -> str:
    """Return the recipe as YAML."""
    text: str = yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True, width=100)
    return header + text


def iter_changes(before: RecipeTree, after: RecipeTree) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted keys whose values differ, with both values. A missing value is None.

    >>> list(iter_changes({"train": {"max_steps": 5, "seed": 1}}, {"train": {"max_steps": 7, "seed": 1}}))
    [('train.max_steps', 5, 7)]
    """
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            for inner_key, old_value, new_value in iter_changes(old, new):
                yield f"{key}.{inner_key}", old_value, new_value
        elif old != new:
            yield key, old, new


# --------------------------------------------------------------------------------------- error messages


def _format_problem(problem: Any, schema: type, tree: Mapping[str, Any]) -> str:
    """Return one line for one error of pydantic."""
    keys = _find_keys(problem["loc"], tree, missing=problem["type"] == "missing")
    dotted = ".".join(keys)
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _list_field_names(schema, keys[:-1], tree)
        suggestions = [".".join([*keys[:-1], name]) for name in _suggest_keys(keys[-1], known)]
        hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else f"known: {', '.join(known)}"
        return f"{dotted}: there is no such key; {hint}"
    if problem["type"] == "missing":
        return f"{dotted}: this is missing"
    if problem["type"].startswith("union_tag"):
        tags = problem["ctx"].get("expected_tags")
        value = problem["input"].get("type")
        return f"{dotted}.type: " + (f"{value!r} is unknown; expected one of {tags}" if tags else "this is missing")
    message = problem["msg"].removeprefix("Value error, ")
    if not dotted:
        return str(message)
    value = problem.get("input")
    is_section = isinstance(value, Mapping) or dataclasses.is_dataclass(value)
    if is_section:
        return f"{dotted}: {message}"
    return f"{dotted}: {value!r} is invalid; {message[0].lower()}{message[1:]}"


def _suggest_keys(key: str, known: Sequence[str]) -> list[str]:
    """Return the known keys of a section that an unknown key may mean.

    >>> _suggest_keys("warmup", ["warmup_steps", "max_grad_norm"])
    ['warmup_steps']
    """
    same_word = [name for name in known if key in name.split("_")]
    return same_word or difflib.get_close_matches(key, known, n=1, cutoff=0.6)


def _find_keys(location: Sequence[str | int], tree: Mapping[str, Any], *, missing: bool) -> list[str]:
    """Return the keys of the file that lead to an error. Pydantic's path also contains model types."""
    keys: list[str] = []
    node: Any = tree
    for depth, part in enumerate(location):
        is_key = part in node if isinstance(node, Mapping) else isinstance(part, int)
        if is_key or (missing and depth == len(location) - 1):
            keys.append(str(part))
            node = node.get(part) if isinstance(node, Mapping) else None
    return keys


def _list_field_names(schema: Any, keys: Sequence[str], tree: Any) -> list[str]:
    """Return the names of the fields of the section at ``keys``."""
    for key in keys:
        tree = tree.get(key, {}) if isinstance(tree, Mapping) else {}
        hint = typing.get_type_hints(schema)[key]
        sections = [type_ for type_ in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(type_)]
        section_type = tree.get("type") if isinstance(tree, Mapping) else None
        schema = next((section for section in sections if getattr(section, "type", None) == section_type), sections[0])
    return [field.name for field in dataclasses.fields(schema)]


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that rejects duplicate keys, reads 1e-3 as a number, and ``no`` as a text (Norwegian)."""


def _construct_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> RecipeTree:
    mapping: RecipeTree = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        if key in mapping:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} comes twice", key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _construct_float(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)))


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
_StrictLoader.add_constructor("!exponent", _construct_float)
BOOL_TAG = "tag:yaml.org,2002:bool"
_StrictLoader.yaml_implicit_resolvers = {
    first_character: [(tag, pattern) for tag, pattern in resolvers if tag != BOOL_TAG]
    for first_character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(BOOL_TAG, re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_StrictLoader.add_implicit_resolver("!exponent", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))
