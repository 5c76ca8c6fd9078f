"""Questions about texts, with answers that stand in them: the SQuAD format, and windows over long texts.

::

    {"data": [{"title": "Seoul",                                        an article
      "paragraphs": [{"context": "Seoul is the capital of Korea.",      a text
        "qas": [{"id": "1", "question": "Where is Seoul?",              what is asked about it
          "answers": [{"text": "Korea", "answer_start": 24}]}]}]}]}     where the answer begins, in characters

A model reads the question and a window of the text (:mod:`jumok.data.windows`)::

    ids       [CLS] q q q [SEP] p2 p3 p4 p5 p6 [SEP]        segments  0 0 0 0 0  1 1 1 1 1 1

A window that does not hold the whole answer points to [CLS].
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jumok.data import sources
from jumok.data.files import opened
from jumok.data.formats import Flaw, clean
from jumok.errors import InputError

__all__ = ["ENDINGS", "Answer", "Question", "pieces_of", "read", "text_of"]

ENDINGS = (".json",)


class Answer(NamedTuple):
    """An answer, and the character of the context at which it begins."""

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the text that answers it. ``answers`` are what people gave; none: it has no answer."""

    question: str
    context: str
    answers: tuple[Answer, ...]
    id: str
    article: str
    where: str


# ------------------------------------------------------------------------------------------------ reading


def read(
    where: str | Sequence[str], *, unanswerable: bool = False, split: str | None = None
) -> Iterator[Question | Flaw]:
    """The questions of the files that a recipe means, and a flaw in the place of one that cannot be used.

    A question without an answer (SQuAD 2.0) is one, unless such are expected.
    """
    for path in sources.files(where, ENDINGS, split):
        yield from _of_file(path, unanswerable)


def _of_file(path: Path, unanswerable: bool) -> Iterator[Question | Flaw]:
    with opened(path) as file:
        try:
            tree = json.loads(file.read())
        except (ValueError, EOFError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from None
    articles = tree.get("data") if isinstance(tree, Mapping) else None
    if not isinstance(articles, list):
        raise InputError(f'{path} is not in SQuAD format: a JSON object with a list "data" is expected')
    for number, article in enumerate(articles, 1):
        title = str(_of(article, "title") or f"article {number}")
        for paragraph in _list(article, "paragraphs"):
            for asked in _list(paragraph, "qas"):
                yield _question(path, title, paragraph, asked, unanswerable)


def _question(path: Path, title: str, paragraph: Any, asked: Any, unanswerable: bool) -> Question | Flaw:
    identity = str(_of(asked, "id") or "?")
    where = f"{path}, article {title!r}, question {identity}"
    context, question = _of(paragraph, "context"), clean(_of(asked, "question"), "question", where)
    told = clean(context, "context", where)
    for one in (question, told):
        if isinstance(one, Flaw):
            return one
    assert isinstance(context, str)
    answers = []
    for given in _list(asked, "answers"):
        text, start = _of(given, "text"), _of(given, "answer_start")
        if not isinstance(text, str) or not text or not isinstance(start, int):
            return Flaw(where, "an answer without text and answer_start", f"it is {given!r}"[:120])
        if start < 0 or context[start : start + len(text)] != text:
            return Flaw(where, "an answer that is not where it says", _misplaced(context, text, start))
        answers.append(Answer(text, start))
    if not answers and not unanswerable:
        return Flaw(where, "a question without an answer", "data.unanswerable=true expects such questions")
    # The context stays as it is, white space around it included: characters are counted in it.
    return Question(str(question), context, tuple(answers), identity, title, where)


def _misplaced(context: str, text: str, start: int) -> str:
    found = context.find(text)
    at = f"it stands at {found}" if found >= 0 else "it stands nowhere in the context"
    return f"{text[:40]!r} at {start}, where {context[max(start, 0) :][: len(text)][:40]!r} stands; {at}"


def _of(tree: Any, key: str) -> Any:
    return tree.get(key) if isinstance(tree, Mapping) else None


def _list(tree: Any, key: str) -> list[Any]:
    found = _of(tree, key)
    return found if isinstance(found, list) else []


# ------------------------------------------------------------------------------------ characters and pieces

Span = tuple[int, int]


def pieces_of(answer: Span, spans: Sequence[Span]) -> Span | None:
    """The first and the last piece of some characters ``[begin, end)``; ``spans`` are those of each piece.

    None: no piece has any of them (they were control characters, say).

    >>> pieces_of((4, 9), [(0, 3), (4, 7), (7, 10)])
    (1, 2)
    """
    begin, end = answer
    inside = [n for n, (first, last) in enumerate(spans) if first < end and last > begin]
    return (inside[0], inside[-1]) if inside else None


def text_of(context: str, spans: Sequence[Span], first: int, last: int, boundaries: Sequence[int]) -> Answer:
    """The text from one piece to another, both included, as it stands in the context.

    A piece of decomposed text (NFD) spans only the first code point of its last letter. So the answer reaches
    to the next of the ``boundaries`` between graphemes, those of the context.

    >>> text_of("the blue house", [(0, 3), (4, 8), (9, 14)], 1, 2, range(15))
    Answer(text='blue house', start=4)
    """
    begin = boundaries[bisect_right(boundaries, spans[first][0]) - 1]
    end = boundaries[bisect_left(boundaries, spans[last][1])]
    return Answer(context[begin:end], begin)
