"""The lines of a JSONL file as ``jumok run`` reads them: objects with what a request to the server has.

::

    {"id": 7, "text": "this is an example"}           →   this is an example
    {"text": "He is old.", "pair": "He is young."}    →   He is old. ⇥ He is young.

What else an object has, such as a label, is not looked at; its ``id`` comes back with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jumok.errors import InputError
from jumok.tasks.served import SURROGATE, line

__all__ = ["Told", "field", "of_pairs", "of_questions", "of_texts", "read"]

Told = Mapping[str, Any]
OPTIONS = {"beam": "--beam", "n_best": "--n-best", "alignments": "--alignments"}


def read(text: str) -> dict[str, Any]:
    """An object of its own line, or an error that says what is wrong with it."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is not JSON: {error}; a .jsonl file has an object a line") from None
    if not isinstance(told, dict):
        raise InputError(f'an object is expected, as in {{"text": …}}, and {text[:40]!r} came')
    for name, option in OPTIONS.items():
        if name in told:
            raise InputError(f'"{name}" is told for all lines at once: {option}')
    return told


def field(told: Told, *names: str) -> str:
    """The text that an object has under one of these names."""
    for name in names:
        if name in told:
            text = told[name]
            if not isinstance(text, str):
                raise InputError(f'"{name}" is a text, and {type(text).__name__} came')
            if found := SURROGATE.search(text):
                raise InputError(
                    f'"{name}" has half of a surrogate pair at place {found.start()}: take it out'
                )
            return text
    there = ", ".join(map(repr, told)) or "nothing"
    raise InputError(f'there is no "{names[0]}"; there is: {there[:200]}')


# What follows is given the file's path, and gives what makes a line of an object, as the predictor reads it.


def of_texts(path: Path) -> Callable[[Told], str]:
    """One text: ``text``."""
    return lambda told: field(told, "text")


def of_pairs(path: Path) -> Callable[[Told], str]:
    """One text or two: ``text``, ``pair``."""

    def made(told: Told) -> str:
        if told.get("pair") is None:
            return field(told, "text")
        return f"{line(field(told, 'text'))}\t{line(field(told, 'pair'))}"

    return made


def of_questions(path: Path) -> Callable[[Told], str]:
    """A question about a text: ``question``, ``context``. It stays JSON: in the text, places count."""
    names = ("question", "context")
    return lambda told: json.dumps({name: field(told, name) for name in names}, ensure_ascii=False)
