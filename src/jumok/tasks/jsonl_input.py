"""The lines of a JSONL file as ``jumok run`` reads them: objects with what a request to the server has.

::

    {"id": 7, "text": "this is an example"}           →   this is an example
    {"text": "He is old.", "text_pair": "He is young."}    →   He is old. ⇥ He is young.

What else an object has, such as a label, is not looked at; its ``id`` comes back with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jumok.errors import InputError
from jumok.tasks.api import SURROGATE_PATTERN, to_single_line

__all__ = [
    "JsonObject",
    "get_text_field",
    "make_pair_reader",
    "make_question_reader",
    "make_text_reader",
    "parse_object",
]

JsonObject = Mapping[str, Any]
CLI_OPTIONS = {"beam_size": "--beam-size", "n_best": "--n-best", "alignments": "--alignments"}


def parse_object(text: str) -> dict[str, Any]:
    """An object of its own line, or an error that says what is wrong with it."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is not JSON: {error}; a .jsonl file has an object a line") from None
    if not isinstance(told, dict):
        raise InputError(f'an object is expected, as in {{"text": …}}, and {text[:40]!r} came')
    for name, option in CLI_OPTIONS.items():
        if name in told:
            raise InputError(f'"{name}" is told for all lines at once: {option}')
    return told


def get_text_field(json_object: JsonObject, *field_names: str) -> str:
    """The text that an object has under one of these names."""
    for name in field_names:
        if name in json_object:
            text = json_object[name]
            if not isinstance(text, str):
                raise InputError(f'"{name}" is a text, and {type(text).__name__} came')
            if found := SURROGATE_PATTERN.search(text):
                raise InputError(
                    f'"{name}" has half of a surrogate pair at place {found.start()}: take it out'
                )
            return text
    there = ", ".join(map(repr, json_object)) or "nothing"
    raise InputError(f'there is no "{field_names[0]}"; there is: {there[:200]}')


# What follows is given the file's path, and gives what makes a line of an object, as the predictor reads it.


def make_text_reader(path: Path) -> Callable[[JsonObject], str]:
    """One text: ``text``."""
    return lambda told: get_text_field(told, "text")


def make_pair_reader(path: Path) -> Callable[[JsonObject], str]:
    """One text or two: ``text``, ``text_pair``."""

    def made(told: JsonObject) -> str:
        if told.get("text_pair") is None:
            return get_text_field(told, "text")
        return (
            f"{to_single_line(get_text_field(told, 'text'))}\t{to_single_line(get_text_field(told, 'text_pair'))}"
        )

    return made


def make_question_reader(path: Path) -> Callable[[JsonObject], str]:
    """A question about a text: ``question``, ``context``. It stays JSON: in the text, places count."""
    names = ("question", "context")
    return lambda told: json.dumps({name: get_text_field(told, name) for name in names}, ensure_ascii=False)
