"""Tagging, served."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks import served
from jumok.tasks.fine_tuning import Search
from jumok.tasks.served import Audience, Bounds, Text
from jumok.tasks.tag import TagReader

if TYPE_CHECKING:
    from jumok.look.scene import Scene

__all__ = ["Service", "Tag", "Tagged"]


class Tag(served.Asked):
    """A text to find entities in."""

    text: Text


class Found(served.Answer):
    """An entity."""

    kind: str
    text: str
    begin: Annotated[int, Field(description="Its first character, counted from 0 in Unicode characters.")]
    end: Annotated[int, Field(description="The one after its last.")]
    probability: float


class Tagged(served.Answer):
    """The entities of a text; and its words, each with its tag in IOB2."""

    entities: list[Found]
    words: list[str]
    tags: list[str]


class Service:
    """A tagger, served."""

    task = "tag"
    says = "Find the entities of a text."
    streams = False
    Request = Tag
    Response = Tagged

    def __init__(self, reader: TagReader, bounds: Bounds) -> None:
        self.reader, self.bounds = reader, bounds

    def about(self) -> dict[str, Any]:
        return {"labels": list(self.reader.labels)}

    def size(self, asked: Tag) -> int:
        self.bounds.check_text("text", asked.text)
        return self.reader.length(asked.text)

    def alike(self, asked: Tag) -> Hashable:
        return None

    def predict(self, asked: Sequence[Tag], audience: Audience) -> list[Tagged]:
        return [
            Tagged(
                entities=[Found(**entity) for entity in one.found()],
                words=list(one.words),
                tags=list(one.tags),
            )
            for one in self.reader.predict([one.text for one in asked], Search())
        ]

    def look(self, asked: Tag, answer: Tagged) -> list[Scene]:
        return self.reader.look(asked.text)
