"""Examples that are kept in a file are the same examples again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jumok.data.held_out import keep, kept
from jumok.data.labelled import Sample
from jumok.data.questions import Answer, Question
from jumok.data.tagged import Sentence
from jumok.errors import InputError

EXAMPLES: dict[type, list[Any]] = {
    Sample: [
        Sample("one\u2028line", None, "1", "a.tsv:2"),
        Sample("서울", "東京\r", 3.0, "a.tsv:3"),
        Sample("x", None, "1.0", "a.tsv:4"),
    ],
    Sentence: [Sentence(("서울", "is"), ("B-LOC", "O"), "a.txt:1"), Sentence((), (), "a.txt:4")],
    Question: [
        Question("where?", " in Seoul", (Answer("Seoul", 4), Answer("in", 1)), "7", "an article", "a.json"),
        Question("when?", "in Seoul", (), "8", "an article", "a.json"),
    ],
}


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_what_is_kept_is_the_same_again(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "data" / "test.jsonl"
    keep(path, EXAMPLES[kind])
    found: list[Any] = kept(path, kind)
    assert found == EXAMPLES[kind]
    assert repr(found) == repr(EXAMPLES[kind])  # 3.0 is no "3.0", and an answer an Answer


def test_something_else_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    keep(path, EXAMPLES[Sample])
    with pytest.raises(InputError, match=r"test\.jsonl:1 is not what training held out"):
        kept(path, Sentence)
