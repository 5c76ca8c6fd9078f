"""Held-out examples are the same after writing and reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jumok.data.readers.classification import ClassificationExample
from jumok.data.readers.squad import AnswerExample, ContextSpan
from jumok.data.readers.tagging import TaggingExample
from jumok.data.splits import read_examples, write_examples
from jumok.errors import InputError

EXAMPLES: dict[type, list[Any]] = {
    ClassificationExample: [
        ClassificationExample("one\u2028line", None, "1", "a.tsv:2"),
        ClassificationExample("서울", "東京\r", 3.0, "a.tsv:3"),
        ClassificationExample("x", None, "1.0", "a.tsv:4"),
    ],
    TaggingExample: [TaggingExample(("서울", "is"), ("B-LOC", "O"), "a.txt:1"), TaggingExample((), (), "a.txt:4")],
    AnswerExample: [
        AnswerExample(
            "where?", " in Seoul", (ContextSpan("Seoul", 4), ContextSpan("in", 1)), "7", "an article", "a.json"
        ),
        AnswerExample("when?", "in Seoul", (), "8", "an article", "a.json"),
    ],
}


@pytest.mark.parametrize("example_type", EXAMPLES, ids=lambda example_type: example_type.__name__)
def test_write_and_read_examples(example_type: type, tmp_path: Path) -> None:
    path = tmp_path / "data" / "test.jsonl"
    write_examples(path, EXAMPLES[example_type])
    examples: list[Any] = read_examples(path, example_type)
    assert examples == EXAMPLES[example_type]
    assert repr(examples) == repr(EXAMPLES[example_type])  # the same types, too: 3.0 is not "3.0"


def test_other_content_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    write_examples(path, EXAMPLES[ClassificationExample])
    with pytest.raises(InputError, match=r"test\.jsonl:1 is not an example that training held out"):
        read_examples(path, TaggingExample)
