"""Examples that are kept in a file are the same examples again."""

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


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_what_is_kept_is_the_same_again(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "data" / "test.jsonl"
    write_examples(path, EXAMPLES[kind])
    found: list[Any] = read_examples(path, kind)
    assert found == EXAMPLES[kind]
    assert repr(found) == repr(EXAMPLES[kind])  # 3.0 is no "3.0", and an answer an Answer


def test_something_else_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    write_examples(path, EXAMPLES[ClassificationExample])
    with pytest.raises(InputError, match=r"test\.jsonl:1 is not an example that training held out"):
        read_examples(path, TaggingExample)
