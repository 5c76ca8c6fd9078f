"""SQuAD files, invalid questions, windows, and answers from pieces."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def write_squad(path: Path, *make_question: Any, context: Any = CONTEXT, title: str | None = "Seoul") -> Path:
    article: dict[str, Any] = {"paragraphs": [{"context": context, "qas": list(make_question)}]}
    if title:
        article["title"] = title
    data = json.dumps({"version": "1", "data": [article]}, ensure_ascii=False).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def make_question(*answers: tuple[str, Any], question: Any = " Where? ") -> dict[str, Any]:
    answer_list = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": "q1", "question": question, "answers": answer_list}


@pytest.mark.parametrize("name", ["train.json", "train.json.gz"])
def test_read_answer_examples(tmp_path: Path, name: str) -> None:
    path = write_squad(tmp_path / name, make_question(("Korea", 25), ("of Korea", 22)))
    [example] = read_answer_examples(str(path))
    assert isinstance(example, AnswerExample)
    assert (example.question, example.context, example.id, example.article) == ("Where?", CONTEXT, "q1", "Seoul")
    assert example.answers == (ContextSpan("Korea", 25), ContextSpan("of Korea", 22))
    assert all(CONTEXT[answer.start : answer.end] == answer.text for answer in example.answers)
    assert example.location == f"{path}, article 'Seoul', question q1"


@pytest.mark.parametrize(
    ("entry", "reason", "detail"),
    [
        (
            make_question(("Korea", 24)),
            "an answer that is not where it says",
            "'Korea' at 24, where the context has ' Kore'; it is at 25",
        ),
        (
            make_question(("Busan", 0)),
            "an answer that is not where it says",
            "'Busan' at 0, where the context has ' Seou'; it is not in the context",
        ),
        (
            make_question(("Korea", -6)),
            "an answer that is not where it says",
            "'Korea' at -6, where the context has ' Seou'; it is at 25",
        ),
        (
            make_question(("Korea", None)),
            "an answer without text and answer_start",
            "it is {'text': 'Korea', 'answer_start': None}",
        ),
        (
            make_question(("", 3)),
            "an answer without text and answer_start",
            "it is {'text': '', 'answer_start': 3}",
        ),
        (make_question(), "a question without an answer", "set data.has_unanswerable=true to use such questions"),
        (make_question(("Korea", 25), question=" "), "an empty question", ""),
        (make_question(("Korea", 25), question=7), "a question that is no text", "it is 7"),
        ("no object", "an empty question", ""),
    ],
)
def test_invalid_questions(tmp_path: Path, entry: Any, reason: str, detail: str) -> None:
    path = write_squad(tmp_path / "train.json", entry, make_question(("Korea", 25)))
    invalid, fine = read_answer_examples(str(path))
    name = entry["id"] if isinstance(entry, dict) else "?"
    assert invalid == InvalidExample(f"{path}, article 'Seoul', question {name}", reason, detail)
    assert isinstance(fine, AnswerExample)
    with pytest.raises(InputError, match=f"train.json, article 'Seoul', question .*{reason}"):
        list(skip_invalid(read_answer_examples(str(path)), "stop", SkippedExamples()))


def test_empty_context_and_article_without_title(tmp_path: Path) -> None:
    path = write_squad(tmp_path / "train.json", make_question(("Korea", 25)), context="  ", title=None)
    assert list(read_answer_examples(str(path))) == [
        InvalidExample(f"{path}, article 'article 1', question q1", "an empty context")
    ]


def test_unanswerable_questions(tmp_path: Path) -> None:
    [example] = read_answer_examples(
        str(write_squad(tmp_path / "train.json", make_question())), allow_unanswerable=True
    )
    assert isinstance(example, AnswerExample)
    assert example.answers == ()


@pytest.mark.parametrize(
    ("text", "entry"), [("{", "is not JSON"), ("[]", "not in SQuAD format"), ('{"data": 1}', "list")]
)
def test_invalid_files(tmp_path: Path, text: str, entry: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(text)
    with pytest.raises(InputError, match=entry):
        list(read_answer_examples(str(path)))


# ------------------------------------------------------------------------------------------------ windows


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 30))
def test_windows_cover_every_piece(length: int, max_length: int, stride: int) -> None:
    windows = make_windows(length, max_length, stride)
    assert {piece for begin, end in windows for piece in range(begin, end)} == set(range(length))
    assert all(end - begin <= max_length for begin, end in windows)
    assert windows[0].begin == 0
    assert windows[-1].end == length
    steps = [second.begin - first.begin for first, second in itertools.pairwise(windows)]
    assert set(steps) <= {min(stride, max(1, max_length // 2))}
    # No window too many: the one before the last does not reach the end.
    assert all(example.end < length for example in windows[:-1])


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_short_answer_is_inside_one_window(length: int, max_length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, 30))
    max_size = max_length - min(stride, max_length // 2) + 1  # half a window and more, whatever the stride
    size = data.draw(st.integers(1, min(length, max_size if max_length > 1 else 1)))
    first = data.draw(st.integers(0, length - size))
    assert any(begin <= first and first + size <= end for begin, end in make_windows(length, max_length, stride))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20))
def test_central_window_has_the_largest_margin(n: int, max_length: int, stride: int) -> None:
    windows = make_windows(n, max_length, stride)
    for piece in range(n):
        index = find_central_window(piece, windows)
        margins = [min(piece - begin, end - 1 - piece) for begin, end in windows]
        assert margins[index] == max(margins) >= 0


def test_invalid_window_sizes() -> None:
    for max_length, stride in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match="expected 1 or more"):
            make_windows(5, max_length, stride)


TEXTS = [
    "Seoul is the capital of Korea .",
    "서울은 한국의 수도이다",
    "東京は日本の首都",
    "naïve café",
    "x\u200by  z",
]
PIECES = WordPieceTokenizer.train(TEXTS * 3, vocab_size=150)


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4).map("  ".join), st.data())
def test_answers_round_trip_through_pieces(context: str, data: st.DataObject) -> None:
    spans = PIECES.encode_with_offsets([context])[0].offsets
    first = data.draw(st.integers(0, len(spans) - 1))
    last = data.draw(st.integers(first, len(spans) - 1))
    answer = extract_answer(context, spans, first, last, range(len(context) + 1))
    assert context[answer.start : answer.end] == answer.text
    assert find_piece_span((answer.start, answer.end), spans) == (first, last)
    # Any characters at all come back with what is left of the pieces that they cut.
    begin = data.draw(st.integers(0, len(context) - 1))
    end = data.draw(st.integers(begin + 1, len(context)))
    windows = find_piece_span((begin, end), spans)
    if windows is not None:
        repeated = extract_answer(context, spans, *windows, range(len(context) + 1))
        assert context[begin:end].strip() in repeated.text or "\u200b" in context


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4).map(" ".join), st.integers(1, 9))
def test_windows_cover_every_character(context: str, max_length: int) -> None:
    spans = PIECES.encode_with_offsets([context])[0].offsets
    covered = {
        position
        for begin, end in make_windows(len(spans), max_length, 2)
        for first, last in spans[begin:end]
        for position in range(first, last)
    }
    assert {n for n, example in enumerate(context) if not example.isspace() and example != "\u200b"} <= covered
