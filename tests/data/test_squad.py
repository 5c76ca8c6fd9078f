"""SQuAD files by hand, with every flaw; windows cover everything, and answers come back as they were."""

from __future__ import annotations

import doctest
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.data.readers import squad as module
from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples, skip_invalid
from jumok.data.readers.squad import (
    AnswerExample,
    ContextSpan,
    extract_answer,
    find_piece_span,
    read_answer_examples,
)
from jumok.data.tokenizers.windows import find_central_window, make_windows
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError

CONTEXT = " Seoul is the capital of Korea. "


def squad(path: Path, *asked: Any, context: Any = CONTEXT, title: str | None = "Seoul") -> Path:
    article: dict[str, Any] = {"paragraphs": [{"context": context, "qas": list(asked)}]}
    if title:
        article["title"] = title
    data = json.dumps({"version": "1", "data": [article]}, ensure_ascii=False).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def asked(*answers: tuple[str, Any], question: Any = " Where? ") -> dict[str, Any]:
    given = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": "q1", "question": question, "answers": given}


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module) == (0, 2)


@pytest.mark.parametrize("name", ["train.json", "train.json.gz"])
def test_a_file_by_hand(tmp_path: Path, name: str) -> None:
    path = squad(tmp_path / name, asked(("Korea", 25), ("of Korea", 22)))
    [one] = read_answer_examples(str(path))
    assert isinstance(one, AnswerExample)
    assert (one.question, one.context, one.id, one.article) == ("Where?", CONTEXT, "q1", "Seoul")
    assert one.answers == (ContextSpan("Korea", 25), ContextSpan("of Korea", 22))
    assert all(CONTEXT[answer.start : answer.end] == answer.text for answer in one.answers)
    assert one.location == f"{path}, article 'Seoul', question q1"


@pytest.mark.parametrize(
    ("told", "reason", "detail"),
    [
        (
            asked(("Korea", 24)),
            "an answer that is not where it says",
            "'Korea' at 24, where the context has ' Kore'; it is at 25",
        ),
        (
            asked(("Busan", 0)),
            "an answer that is not where it says",
            "'Busan' at 0, where the context has ' Seou'; it is not in the context",
        ),
        (
            asked(("Korea", -6)),
            "an answer that is not where it says",
            "'Korea' at -6, where the context has ' Seou'; it is at 25",
        ),
        (
            asked(("Korea", None)),
            "an answer without text and answer_start",
            "it is {'text': 'Korea', 'answer_start': None}",
        ),
        (
            asked(("", 3)),
            "an answer without text and answer_start",
            "it is {'text': '', 'answer_start': 3}",
        ),
        (asked(), "a question without an answer", "set data.has_unanswerable=true to use such questions"),
        (asked(("Korea", 25), question=" "), "an empty question", ""),
        (asked(("Korea", 25), question=7), "a question that is no text", "it is 7"),
        ("no object", "an empty question", ""),
    ],
)
def test_a_question_that_cannot_be_used(tmp_path: Path, told: Any, reason: str, detail: str) -> None:
    path = squad(tmp_path / "train.json", told, asked(("Korea", 25)))
    flaw, fine = read_answer_examples(str(path))
    name = told["id"] if isinstance(told, dict) else "?"
    assert flaw == InvalidExample(f"{path}, article 'Seoul', question {name}", reason, detail)
    assert isinstance(fine, AnswerExample)
    with pytest.raises(InputError, match=f"train.json, article 'Seoul', question .*{reason}"):
        list(skip_invalid(read_answer_examples(str(path)), "stop", SkippedExamples()))


def test_an_empty_context_and_an_article_without_a_name(tmp_path: Path) -> None:
    path = squad(tmp_path / "train.json", asked(("Korea", 25)), context="  ", title=None)
    assert list(read_answer_examples(str(path))) == [
        InvalidExample(f"{path}, article 'article 1', question q1", "an empty context")
    ]


def test_questions_without_an_answer_where_they_are_expected(tmp_path: Path) -> None:
    [one] = read_answer_examples(str(squad(tmp_path / "train.json", asked())), allow_unanswerable=True)
    assert isinstance(one, AnswerExample)
    assert one.answers == ()


@pytest.mark.parametrize(
    ("text", "told"), [("{", "is not JSON"), ("[]", "not in SQuAD format"), ('{"data": 1}', "list")]
)
def test_files_that_are_something_else(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        list(read_answer_examples(str(path)))


# ------------------------------------------------------------------------------------------------ windows


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 30))
def test_windows_cover_every_piece(length: int, room: int, stride: int) -> None:
    found = make_windows(length, room, stride)
    assert {piece for begin, end in found for piece in range(begin, end)} == set(range(length))
    assert all(end - begin <= room for begin, end in found)
    assert found[0].begin == 0
    assert found[-1].end == length
    steps = [second.begin - first.begin for first, second in itertools.pairwise(found)]
    assert set(steps) <= {min(stride, max(1, room // 2))}
    # No window too many: the one before the last does not reach the end.
    assert all(one.end < length for one in found[:-1])


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_a_short_answer_is_whole_in_some_window(length: int, room: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, 30))
    most = room - min(stride, room // 2) + 1  # half a window and more, whatever the stride
    size = data.draw(st.integers(1, min(length, most if room > 1 else 1)))
    first = data.draw(st.integers(0, length - size))
    assert any(begin <= first and first + size <= end for begin, end in make_windows(length, room, stride))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20))
def test_the_central_window_holds_the_piece_and_no_other_holds_it_better(n: int, room: int, stride: int) -> None:
    found = make_windows(n, room, stride)
    for piece in range(n):
        at = find_central_window(piece, found)
        margins = [min(piece - begin, end - 1 - piece) for begin, end in found]
        assert margins[at] == max(margins) >= 0


def test_windows_that_cannot_be() -> None:
    for room, stride in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match="expected 1 or more"):
            make_windows(5, room, stride)


TEXTS = [
    "Seoul is the capital of Korea .",
    "서울은 한국의 수도이다",
    "東京は日本の首都",
    "naïve café",
    "x\u200by  z",
]
PIECES = WordPieceTokenizer.train(TEXTS * 3, vocab_size=150)


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4).map("  ".join), st.data())
def test_answers_come_back_from_their_pieces(context: str, data: st.DataObject) -> None:
    spans = PIECES.encode_with_offsets([context])[0].offsets
    first = data.draw(st.integers(0, len(spans) - 1))
    last = data.draw(st.integers(first, len(spans) - 1))
    answer = extract_answer(context, spans, first, last, range(len(context) + 1))
    assert context[answer.start : answer.end] == answer.text
    assert find_piece_span((answer.start, answer.end), spans) == (first, last)
    # Any characters at all come back with what is left of the pieces that they cut.
    begin = data.draw(st.integers(0, len(context) - 1))
    end = data.draw(st.integers(begin + 1, len(context)))
    found = find_piece_span((begin, end), spans)
    if found is not None:
        again = extract_answer(context, spans, *found, range(len(context) + 1))
        assert context[begin:end].strip() in again.text or "\u200b" in context


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4).map(" ".join), st.integers(1, 9))
def test_every_character_is_in_a_window(context: str, room: int) -> None:
    spans = PIECES.encode_with_offsets([context])[0].offsets
    covered = {
        place
        for begin, end in make_windows(len(spans), room, 2)
        for first, last in spans[begin:end]
        for place in range(first, last)
    }
    assert {n for n, one in enumerate(context) if not one.isspace() and one != "\u200b"} <= covered
