"""Classification, served."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.data import decisive
from jumok.tasks import served
from jumok.tasks.classes import SEED, ClassReader, Labelling
from jumok.tasks.served import Audience, Bounds, Text, line

if TYPE_CHECKING:
    from jumok.look.scene import Scene

__all__ = ["Classified", "Classify", "Service"]

EXAMPLES, UNSEEN = 3, SEED + 1


class Classify(served.Asked):
    """A text to label, or a pair of texts for a model that reads two."""

    text: Text
    pair: Annotated[Text | None, Field(description="The second text, for a model of pairs.")] = None


class Class(served.Answer):
    """A class and how likely it is."""

    label: str
    probability: float


class Classified(served.Answer):
    """The likeliest class, and all of them; of a model that says a number, that."""

    label: str | None = None
    probability: float | None = None
    classes: Annotated[tuple[Class, ...], Field(description="The likeliest first.")] = ()
    value: Annotated[float | None, Field(description="What a model of numbers says.")] = None


class Service:
    """A classifier, served."""

    task = "classify"
    says = "Label a text, or a pair of texts."
    streams = False
    Request = Classify
    Response = Classified

    def __init__(self, reader: ClassReader, bounds: Bounds) -> None:
        self.reader, self.bounds = reader, bounds

    def about(self) -> dict[str, Any]:
        data = self.reader.run.recipe.data
        known = {"labels": list(self.reader.labels), "pairs": data.pair is not None}
        return known | {"examples": _examples(data.train)}

    def size(self, asked: Classify) -> int:
        self.bounds.check_text("text", asked.text)
        self.bounds.check_text("pair", asked.pair or "")
        return self.reader.length(asked.text, asked.pair)

    def alike(self, asked: Classify) -> Hashable:
        return None

    def predict(self, asked: Sequence[Classify], audience: Audience) -> list[Classified]:
        return [_told(one) for one in self.reader.label([(one.text, one.pair) for one in asked])]

    def look(self, asked: Classify, answer: Classified) -> list[Scene]:
        if asked.pair is None:
            return self.reader.look(asked.text)
        return self.reader.look(f"{line(asked.text)}\t{line(asked.pair)}")


def _examples(data: object) -> list[dict[str, str]]:
    """Requests to try with a model of built-in documents: others than those that it has learned from."""
    if data not in decisive.LANGUAGES:
        return []
    return [{"text": one.text} for one in decisive.documents(UNSEEN, EXAMPLES, str(data))]


def _told(one: Labelling) -> Classified:
    if one.value is not None:
        return Classified(value=one.value)
    classes = tuple(Class(label=label, probability=share) for label, share in one.classes)
    return Classified(label=classes[0].label, probability=classes[0].probability, classes=classes)
