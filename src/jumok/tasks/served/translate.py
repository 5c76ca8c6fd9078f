"""Translation, served."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from jumok.data import english_korean
from jumok.tasks import served
from jumok.tasks.corpora import BUILT_IN
from jumok.tasks.served import Audience, Bounds, Text
from jumok.tasks.translator import Search, Translation, Translator

if TYPE_CHECKING:
    from jumok.look.scene import Scene

__all__ = ["Service", "Translate", "Translated"]

EXAMPLES = 3


class Translate(served.Asked):
    """A text to translate."""

    text: Text
    beam: Annotated[
        int | None,
        Field(ge=1, description="Hypotheses side by side; 1 is greedy; without it, as the recipe says."),
    ] = None
    n_best: Annotated[int, Field(ge=1, description="So many translations, the best first.")] = 1
    alignments: Annotated[bool, Field(description="Add the word links.")] = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.beam is not None and self.n_best > self.beam:
            raise ValueError(f"n_best {self.n_best} needs a beam of as many; beam {self.beam} came")
        return self


class Other(served.Answer):
    """One translation."""

    text: str
    score: float
    finished: Annotated[bool, Field(description="false: cut off at the length limit.")]
    source_words: list[str]
    words: list[str]
    links: Annotated[
        list[tuple[int, int]] | None,
        Field(description="Pairs of a source word and a word, counted from 0; null: not asked for."),
    ] = None


class Translated(Other):
    """The best translation; and of an n-best list, those behind it."""

    others: tuple[Other, ...] = ()


class Service:
    """A translator, served."""

    task = "translate"
    says = "Translate a text."
    streams = True
    Request = Translate
    Response = Translated

    def __init__(self, translator: Translator, bounds: Bounds) -> None:
        self.translator, self.bounds = translator, bounds

    def about(self) -> dict[str, Any]:
        known = {"beam": self.translator.decode.beam, "maps": self.translator.has_maps}
        return known | {"examples": _examples(self.translator.run.recipe.data.train)}

    def size(self, asked: Translate) -> int:
        self.bounds.check_text("text", asked.text)
        self.bounds.check_number("beam", asked.beam, self.bounds.beam)
        self.bounds.check_number("n_best", asked.n_best, self.bounds.beam)
        if asked.alignments:
            self.translator.check_maps()
        beam = self.translator.decode.beam if asked.beam is None else asked.beam
        tokens, hypotheses = self.translator.length(asked.text), max(beam, asked.n_best)
        self.bounds.check_work(tokens, hypotheses)
        return tokens * hypotheses

    def alike(self, asked: Translate) -> Hashable:
        return asked.beam, asked.n_best, asked.alignments

    def predict(self, asked: Sequence[Translate], audience: Audience) -> list[Translated]:
        first = asked[0]
        found = self.translator.predict(
            [one.text for one in asked],
            Search(beam=first.beam, n_best=first.n_best),
            align=first.alignments,
            listener=_Listener(self.translator, audience),
        )
        return [
            Translated(**_told(one), others=tuple(Other(**_told(other)) for other in one.others))
            for one in found
        ]

    def look(self, asked: Translate, answer: Translated) -> list[Scene]:
        return self.translator.look(asked.text, answer.text)


def _examples(data: object) -> list[dict[str, str]]:
    """Requests to try with a model of the built-in sentences: of those that are for testing."""
    if data != BUILT_IN:
        return []
    return [{"text": pair.english} for pair in english_korean.splits(test=EXAMPLES).test]


def _told(one: Translation) -> dict[str, Any]:
    names = ("text", "score", "finished", "source_words", "words", "links")
    return {name: getattr(one, name) for name in names}


class _Listener:
    """Follows a search for an audience, which reads texts rather than ids."""

    def __init__(self, translator: Translator, audience: Audience) -> None:
        self.translator, self.audience = translator, audience
        self.hears = audience.hears

    def gone(self, sentence: int) -> bool:
        if self.translator.is_reentrant:
            self.audience.pause()
        return self.audience.gone(sentence)

    def heard(self, sentence: int, ids: Sequence[int]) -> None:
        self.audience.heard(sentence, self.translator.shown(ids))
