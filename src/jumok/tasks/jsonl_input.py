"""Objects of JSONL files as input lines of ``jumok run``. They have the fields of requests to the server.

::

    {"id": 7, "text": "this is an example"}                →   this is an example
    {"text": "He is old.", "text_pair": "He is young."}    →   He is old. ⇥ He is young.

Other fields, such as a label, are ignored. The ``id`` is copied to the prediction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jumok.errors import InputError
from jumok.text_checks import SURROGATE_PATTERN, to_single_line

JsonObject = Mapping[str, Any]
CLI_OPTIONS = {"beam_size": "--beam-size", "n_best": "--n-best", "alignments": "--alignments"}
WHITE_SPACE = re.compile(r"\s++")


def parse_object(text: str) -> dict[str, Any]:
    """Parse one line of a JSONL file."""
    try:
        json_object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is not JSON: {error}; a .jsonl file has one object per line") from None
    if not isinstance(json_object, dict):
        raise InputError(f'expected an object, as in {{"text": …}}, but got {text[:40]!r}')
    for name, option in CLI_OPTIONS.items():
        if name in json_object:
            raise InputError(f'"{name}" is set for all lines at once: {option}')
    return json_object


def get_text_field(json_object: JsonObject, *field_names: str) -> str:
    """Return the text of the first of these fields that the object has."""
    for name in field_names:
        if name in json_object:
            text = json_object[name]
            if not isinstance(text, str):
                raise InputError(f'"{name}" must be a text, but got {type(text).__name__}')
            if surrogate := SURROGATE_PATTERN.search(text):
                raise InputError(f'"{name}" has half of a surrogate pair at position {surrogate.start()}: remove it')
            return text
    fields = ", ".join(map(repr, json_object)) or "nothing"
    raise InputError(f'there is no "{field_names[0]}"; the object has: {fields[:200]}')


def split_pair(line: str) -> list[str]:
    """Split a line into the texts that tabs separate, or |||, if there is no tab.

    >>> split_pair(" he opened the door ||| she left ")
    ['he opened the door', 'she left']
    """
    line = line.strip()
    if "\t" not in line:
        return [text.strip() for text in line.split("|||")]
    texts, start = [], 0
    for gap in WHITE_SPACE.finditer(line):
        if "\t" in gap[0]:
            texts.append(line[start : gap.start()])
            start = gap.end()
    return [*texts, line[start:]]


def to_pair_line(text: str, text_pair: str | None) -> str:
    """Join one or two texts to an input line."""
    return text if text_pair is None else f"{to_single_line(text)}\t{to_single_line(text_pair)}"


# Each of these functions takes the path of the JSONL file, and returns a function that makes an input line of an
# object.


def make_text_reader(path: Path) -> Callable[[JsonObject], str]:
    """Objects with one text: ``text``."""
    return lambda json_object: get_text_field(json_object, "text")


def make_pair_reader(path: Path) -> Callable[[JsonObject], str]:
    """Objects with one or two texts: ``text``, ``text_pair``."""

    def read(json_object: JsonObject) -> str:
        has_pair = json_object.get("text_pair") is not None
        text_pair = get_text_field(json_object, "text_pair") if has_pair else None
        return to_pair_line(get_text_field(json_object, "text"), text_pair)

    return read


def make_question_reader(path: Path) -> Callable[[JsonObject], str]:
    """Objects with a question and its context. The line stays JSON, because offsets in the context matter."""
    names = ("question", "context")
    return lambda json_object: json.dumps(
        {name: get_text_field(json_object, name) for name in names}, ensure_ascii=False
    )
