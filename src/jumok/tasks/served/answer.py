"""Answering, served."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks import served
from jumok.tasks.answer import Answered, AnswerReader
from jumok.tasks.served import Audience, Bounds, Text

if TYPE_CHECKING:
    from jumok.look.scene import Scene

__all__ = ["Ask", "Service", "Spans"]


class Ask(served.Asked):
    """A question about a text."""

    question: Text
    context: Text
    n_best: Annotated[int, Field(ge=1, description="So many answers, the likeliest first.")] = 1


class Span(served.Answer):
    """A part of the text."""

    text: Annotated[str, Field(description="Empty: the text has no answer.")]
    begin: Annotated[int, Field(description="Its first character, counted from 0 in Unicode characters.")]
    end: Annotated[int, Field(description="The one after its last.")]
    probability: float


class Spans(Span):
    """The likeliest answer; and if more were asked for, those behind it."""

    others: tuple[Span, ...] = ()


class Service:
    """A model that answers, served."""

    task = "answer"
    says = "Find the answer to a question in a text."
    streams = False
    Request = Ask
    Response = Spans

    def __init__(self, reader: AnswerReader, bounds: Bounds) -> None:
        self.reader, self.bounds = reader, bounds

    def about(self) -> dict[str, Any]:
        return {"unanswerable": self.reader.use.recipe.data.unanswerable}

    def size(self, asked: Ask) -> int:
        self.bounds.check_text("question", asked.question)
        self.bounds.check_text("context", asked.context)
        self.bounds.check_number("n_best", asked.n_best, self.bounds.n_best)
        return self.reader.length(asked.question, asked.context)

    def alike(self, asked: Ask) -> Hashable:
        return asked.n_best

    def predict(self, asked: Sequence[Ask], audience: Audience) -> list[Spans]:
        found = self.reader.answers([(one.question, one.context) for one in asked], asked[0].n_best)
        return [_told(one) for one in found]

    def look(self, asked: Ask, answer: Spans) -> list[Scene]:
        return self.reader.look(json.dumps({"question": asked.question, "context": asked.context}))


def _told(one: Answered) -> Spans:
    first, *others = (
        Span(text=answer.text, begin=answer.start, end=answer.end, probability=share)
        for answer, share in one.answers
    )
    return Spans(**first.model_dump(), others=tuple(others))
