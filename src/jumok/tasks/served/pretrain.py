"""A pretrained BERT, served: it fills hidden words in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks import served
from jumok.tasks.filler import Filler, Search
from jumok.tasks.served import Audience, Bounds, Text, line

if TYPE_CHECKING:
    from jumok.look.scene import Scene

__all__ = ["Fill", "Filled", "Service"]


class Fill(served.Asked):
    """A text with [MASK] for each hidden word; or two texts: does the second follow the first?"""

    text: Text
    pair: Annotated[Text | None, Field(description="The second text.")] = None
    n_best: Annotated[int, Field(ge=1, description="So many words for each mask.")] = 5


class Word(served.Answer):
    """A word and how likely it is."""

    word: str
    probability: float


class Filled(served.Answer):
    """The words of each mask, the likeliest first, and the text with these."""

    filled: str
    masks: list[list[Word]]
    next: Annotated[
        float | None, Field(description="How likely it is that the second text follows the first.")
    ] = None


class Service:
    """A model that fills words in, served."""

    task = "fill"
    says = "Say the hidden words of a text; of two, whether the second follows the first."
    streams = False
    Request = Fill
    Response = Filled

    def __init__(self, filler: Filler, bounds: Bounds) -> None:
        self.filler, self.bounds = filler, bounds

    def about(self) -> dict[str, Any]:
        return {"mask": self.filler.tokenizer.names["mask"]}

    def size(self, asked: Fill) -> int:
        self.bounds.check_text("text", asked.text)
        self.bounds.check_text("pair", asked.pair or "")
        self.bounds.check_number("n_best", asked.n_best, self.bounds.n_best)
        return self.filler.length(_line(asked))

    def alike(self, asked: Fill) -> Hashable:
        return asked.n_best

    def predict(self, asked: Sequence[Fill], audience: Audience) -> list[Filled]:
        most = asked[0].n_best
        found = self.filler.predict([_line(one) for one in asked], Search(n_best=most))
        return [
            Filled(
                filled=one.filled,
                masks=[[Word(word=word, probability=p) for word, p in some[:most]] for some in one.words],
                next=one.next,
            )
            for one in found
        ]

    def look(self, asked: Fill, answer: Filled) -> list[Scene]:
        return self.filler.look(_line(asked))


def _line(asked: Fill) -> str:
    return line(asked.text) if asked.pair is None else f"{line(asked.text)} ||| {line(asked.pair)}"
