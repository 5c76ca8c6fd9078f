"""The reference, generated from the code: public names, commands, and all recipe keys."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jumok
from builder import table, write_if_changed
from jumok import tasks

# Pages: heading, introduction (empty: the module's docstring), the module as users import it, and its names
# (None: all public names).
PAGES: dict[str, tuple[str, str, str, list[str] | None]] = {
    "attention": (
        "Attention",
        "One pure function, `softmax(score(Q, K)) V`, its two halves, and the module that projects for it.",
        "jumok",
        ["attend", "weights", "mix", "explain", "MultiHead", "KVCache"],
    ),
    "masks": ("Masks", "", "jumok.masks", None),
    "scores": ("Scores", "How well a query fits a key.", "jumok.scores", None),
    "positions": ("Positions", "", "jumok.positions", None),
    "looking": (
        "Looking",
        "Capture the attention of any PyTorch model, ablate parts of it, and show it.",
        "jumok",
        ["watch", "knock_out"],
    ),
    "running": (
        "Runs",
        "A trained run in Python, and the exceptions.",
        "jumok",
        ["load", "JumokError", "InputError", "MissingExtra"],
    ),
    "training": (
        "Training",
        "One loop for every model; see [a model of your own](../own-model.md).",
        "jumok.training",
        None,
    ),
    "decoding": ("Decoding", "Search, independent of the model.", "jumok.decoding", None),
    "batches": (
        "Batches",
        "The inputs of models.",
        "jumok.batches.tokens",
        ["Tokens", "Seq2SeqBatch", "Loss", "LayerAttention"],
    ),
}
# Further classes and functions of a page, by module.
FURTHER_NAMES = {
    "looking": [
        ("jumok.look.capture.captures", "Captures"),
        ("jumok.look.capture.captures", "CapturedLayer"),
        ("jumok.look.viewer.viewer_data", "ViewerData"),
        ("jumok.look.viewer.view_writer", "save_view"),
        ("jumok.look.viewer.page", "serve"),
    ],
    "running": [("jumok.tasks.translate.predictor", "TranslationPredictor")],
}
CLASSES_WITH_MEMBERS = (
    *("Captures", "CapturedLayer", "KVCache", "MultiHead", "TranslationPredictor", "ViewerData", "Mask"),
    *("Score", "Additive", "PreparedKeys", "LocationSensitive", "Tokens", "Seq2SeqBatch"),
    *("SinusoidalPositions", "TrainConfig", "TrainingDataset", "DecoderState", "IncrementalDecoder"),
)


def build(into: Path) -> None:
    """Write all pages of the reference."""
    for name in PAGES:
        write_if_changed(into / "api" / f"{name}.md", _build_api_page(name))
    toctree = ["```{toctree}", *PAGES, "```", ""]
    index = ["# Python", "", *_list_public_names(), "", *toctree]
    write_if_changed(into / "api" / "index.md", "\n".join(index))
    write_if_changed(into / "cli-generated.txt", _build_cli_page())
    write_if_changed(into / "settings-generated.txt", _build_settings_page())


# ------------------------------------------------------------------------------------------- Python


def _build_api_page(page: str) -> str:
    heading, above, module, names = PAGES[page]
    home = sys.modules.get(module) or getattr(jumok, module.removeprefix("jumok."))
    sys.modules.setdefault(module, home)  # jumok.masks lies in jumok.attention
    lines = [f"# {heading}", ""]
    told = above or inspect.getdoc(home) or ""
    if above:
        lines += [told, ""]
    lines += ["```{eval-rst}"]
    if not above:
        lines += [told, ""]
    lines += [f".. py:currentmodule:: {module}", ""]
    chosen = [(module, name) for name in names or home.__all__] + FURTHER_NAMES.get(page, [])
    for where, name in chosen:
        lines += _list_directives(where, name)
    return "\n".join([*lines, "```", ""])


def _list_directives(module: str, name: str) -> Iterator[str]:
    thing = getattr(_import_module(module), name)
    if inspect.isclass(thing):
        yield f".. autoclass:: {module}.{name}"
        if name in CLASSES_WITH_MEMBERS:
            yield "   :members:"
    elif inspect.isfunction(thing) or callable(thing):
        yield f".. autofunction:: {module}.{name}"
    else:
        yield f".. autodata:: {module}.{name}"
    yield ""


def _import_module(name: str) -> Any:
    import importlib

    return sys.modules.get(name) or importlib.import_module(name)


def _list_public_names() -> Iterator[str]:
    """A table of the public names with the first paragraphs of their docstrings."""
    yield "The names of `import jumok`. They are loaded on first access.\n"
    homes = {name: page for page, (_, _, home, names) in PAGES.items() if home == "jumok" for name in names or ()}
    rows = []
    for name in jumok.__all__:
        told = " ".join((inspect.getdoc(getattr(jumok, name)) or "").partition("\n\n")[0].split())
        told = re.sub(r"``(.+?)``|:\w+:`(.+?)`", r"`\1\2`", told)
        rows.append([f"[`jumok.{name}`]({homes.get(name, name)}.md)", told])
    yield table(["name", "what it is"], rows)


# ---------------------------------------------------------------------------------------- commands


def _build_cli_page() -> str:
    """The help of all commands, without the option --help."""
    asked = [sys.executable, "-m", "typer", "jumok.cli.app", "utils", "docs", "--name", "jumok"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    told = re.sub(r"\* `--help`: .*\n", "", told)
    told = re.sub(r"\*\*Options\*\*:\n\n(?=#|\n|\Z)", "", told)
    told = re.sub(r"(?s)\*\*Commands\*\*:\n\n.*?(?=\n#)", "", told, count=1)  # cut short there; whole below
    told = re.sub(r"^# `jumok`.*?\n(?=## )", "", told, count=1, flags=re.S | re.M)
    told = re.sub(r"\*\*(Arguments|Options|Commands|Usage)\*\*:", r"\1", told)
    told = re.sub(r"^Usage\n\n", "", told, flags=re.M)
    return told.replace(" <str>`", "`")


# ---------------------------------------------------------------------------------------- settings


def _build_settings_page() -> str:
    """Every section of every task's recipe: keys, defaults and descriptions."""
    lines: list[str] = []
    shown: dict[type, str] = {}
    for task in tasks.TASK_NAMES:
        lines += [f"## task: {task}", ""]
        for section, kind in _list_sections(tasks.get_recipe_types(task)):
            if kind in shown:
                lines += [f"`{section}:` is as in {shown[kind]}.", ""]
                continue
            label = f"{task}-{section}-{kind.__module__.split('.')[-1]}-{kind.__name__.lower()}"
            shown[kind] = f"[{task}: {section}](#{label})"
            title = f"{task}: {section}" + (f" ({kind.__name__.removesuffix('Config')})" if section == "model" else "")
            lines += [f"({label})=", f"### {title}", "", *_build_key_table(section, kind), ""]
    return "\n".join(lines)


def _list_sections(recipe_types: Mapping[str, type]) -> Iterator[tuple[str, type]]:
    """The sections of all recipe classes of a task, each once; all members if a section is a union."""
    seen = set()
    for recipe_type in recipe_types.values():
        for name, kind in typing.get_type_hints(recipe_type).items():
            for part in typing.get_args(kind) if isinstance(kind, types.UnionType) else [kind]:
                if dataclasses.is_dataclass(part) and (name, part) not in seen:
                    seen.add((name, part))
                    yield name, typing.cast(type, part)


def _build_key_table(section: str, kind: type) -> Iterator[str]:
    """A table of the keys of a section."""
    told = _read_field_comments(kind)
    about = (inspect.getdoc(kind) or "").partition("\n\n>>>")[0]
    yield "```{eval-rst}\n" + about + "\n```\n"
    rows = []
    for field in dataclasses.fields(kind):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        value = "" if default is dataclasses.MISSING else f"`{_to_yaml(default)}`"
        rows.append([f"`{section}.{field.name}`", value, told.get(field.name, "")])
    yield table(["key", "default", ""], rows)


def _to_yaml(value: Any) -> str:
    """A value as it is written in a recipe.

    >>> _to_yaml(None), _to_yaml(True), _to_yaml("auto"), _to_yaml((0.9, 0.98))
    ('null', 'true', 'auto', '[0.9, 0.98]')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _read_field_comments(kind: type) -> dict[str, str]:
    """The comments behind or above the fields of a dataclass, including inherited ones."""
    found = {}
    for one in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(one):
            continue
        above: list[str] = []
        for line in inspect.getsource(one).splitlines():
            if comment := re.fullmatch(r"    # (.+)", line):
                above.append(comment[1])
            elif field := re.match(r"    (\w+): [^#]*?(?:  # (.+))?$", line):
                text = " ".join([*above, field[2] or ""]) if not _is_heading(above) else field[2] or ""
                found[field[1]] = text.strip()
                above = []
            else:
                above = []
    return found


def _is_heading(above: list[str]) -> bool:
    """Whether a comment is a heading of several fields, as in ``TrainConfig``."""
    return len(above) == 1 and len(above[0]) < 65
