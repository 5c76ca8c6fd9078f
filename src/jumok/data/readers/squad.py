"""Reader of extractive question answering data in the SQuAD format.

::

    {"data": [{"title": "Seoul",                                        an article
      "paragraphs": [{"context": "Seoul is the capital of Korea.",      a text
        "qas": [{"id": "1", "question": "Where is Seoul?",              a question about it
          "answers": [{"text": "Korea", "answer_start": 24}]}]}]}]}     answer_start counts characters

A model reads the question and a window of the text (:mod:`jumok.data.tokenizers.windows`)::

    ids       [CLS] q q q [SEP] p2 p3 p4 p5 p6 [SEP]        segments  0 0 0 0 0  1 1 1 1 1 1

The label of a window without the complete answer is [CLS].
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jumok.data.readers.dataset_files import find_files
from jumok.data.readers.invalid_examples import InvalidExample, clean_text
from jumok.data.readers.text_files import open_decompressed
from jumok.errors import InputError

SQUAD_SUFFIXES = (".json",)


class ContextSpan(NamedTuple):
    """An answer, and the index of its first character in the context."""

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class AnswerExample:
    """A question, its context and the gold answers; none if the question is unanswerable."""

    question: str
    context: str
    answers: tuple[ContextSpan, ...]
    id: str
    article: str
    location: str


# ------------------------------------------------------------------------------------------------ reading


def read_answer_examples(
    dataset: str | Sequence[str], *, allow_unanswerable: bool = False, split: str | None = None
) -> Iterator[AnswerExample | InvalidExample]:
    """Read the files that a recipe names. A question that cannot be used is an :class:`InvalidExample`.

    A question without an answer (SQuAD 2.0) is invalid unless ``allow_unanswerable`` is set.
    """
    for path in find_files(dataset, SQUAD_SUFFIXES, split):
        for title, paragraphs in read_articles(path):
            for paragraph in paragraphs:
                for entry in _get_list(paragraph, "qas"):
                    yield _parse_question(path, title, paragraph, entry, allow_unanswerable)


def read_articles(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """The title and the paragraphs of each article."""
    with open_decompressed(path) as file:
        try:
            tree = json.loads(file.read())
        except (ValueError, EOFError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from None
    articles = tree.get("data") if isinstance(tree, Mapping) else None
    if not isinstance(articles, list):
        raise InputError(f'{path} is not in SQuAD format: expected a JSON object with a list "data"')
    for number, article in enumerate(articles, 1):
        yield str(get_value(article, "title") or f"article {number}"), _get_list(article, "paragraphs")


def _parse_question(
    path: Path, title: str, paragraph: Any, entry: Any, allow_unanswerable: bool
) -> AnswerExample | InvalidExample:
    identity = str(get_value(entry, "id") or "?")
    location = f"{path}, article {title!r}, question {identity}"
    question = clean_text(get_value(entry, "question"), "question", location)
    if isinstance(question, InvalidExample):
        return question
    context = get_value(paragraph, "context")  # with surrounding white space, which answer_start counts
    if isinstance(invalid := clean_text(context, "context", location), InvalidExample):
        return invalid
    answers = []
    for answer in _get_list(entry, "answers"):
        text, start = get_value(answer, "text"), get_value(answer, "answer_start")
        if not isinstance(text, str) or not text or not isinstance(start, int):
            return InvalidExample(location, "an answer without text and answer_start", f"it is {answer!r}"[:120])
        if start < 0 or context[start : start + len(text)] != text:
            return InvalidExample(
                location,
                "an answer that is not where it says",
                _describe_misplaced_answer(context, text, start),
            )
        answers.append(ContextSpan(text, start))
    if not answers and not allow_unanswerable:
        return InvalidExample(
            location, "a question without an answer", "set data.has_unanswerable=true to use such questions"
        )
    return AnswerExample(question, context, tuple(answers), identity, title, location)


def _describe_misplaced_answer(context: str, text: str, start: int) -> str:
    position = context.find(text)
    actual = f"it is at {position}" if position >= 0 else "it is not in the context"
    instead = context[max(start, 0) :][: len(text)][:40]
    return f"{text[:40]!r} at {start}, where the context has {instead!r}; {actual}"


def get_value(tree: Any, key: str) -> Any:
    """The value of a key; None if there is none, or ``tree`` is no object."""
    return tree.get(key) if isinstance(tree, Mapping) else None


def _get_list(tree: Any, key: str) -> list[Any]:
    value = get_value(tree, key)
    return value if isinstance(value, list) else []


# ---------------------------------------------------------------------------------- characters and pieces

CharSpan = tuple[int, int]


def find_piece_span(char_span: CharSpan, offsets: Sequence[CharSpan]) -> CharSpan | None:
    """The first and the last piece of the characters ``[begin, end)``, given the offsets of all pieces.

    None if no piece contains any of the characters, for example control characters.

    >>> find_piece_span((4, 9), [(0, 3), (4, 7), (7, 10)])
    (1, 2)
    """
    begin, end = char_span
    inside = [piece for piece, (first, last) in enumerate(offsets) if first < end and last > begin]
    return (inside[0], inside[-1]) if inside else None


def extract_answer(
    context: str, offsets: Sequence[CharSpan], first_piece: int, last_piece: int, boundaries: Sequence[int]
) -> ContextSpan:
    """The text of the context from one piece to another, both included.

    A piece of decomposed text (NFD) covers only the first code point of its last letter. The answer is
    therefore extended to the ``boundaries`` of graphemes of the context.

    >>> extract_answer("the blue house", [(0, 3), (4, 8), (9, 14)], 1, 2, range(15))
    ContextSpan(text='blue house', start=4)
    """
    begin = boundaries[bisect_right(boundaries, offsets[first_piece][0]) - 1]
    end = boundaries[bisect_left(boundaries, offsets[last_piece][1])]
    return ContextSpan(context[begin:end], begin)
