"""Captions, served: a picture comes as bytes, never by a path or an address."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from jumok.data import pictures
from jumok.data.drawn import LANGUAGES, UNSEEN, Drawn
from jumok.data.files import needed
from jumok.errors import InputError
from jumok.tasks import served
from jumok.tasks.caption_reader import Caption, CaptionReader, Search
from jumok.tasks.served import Audience, Bounds, File, TooMuch

if TYPE_CHECKING:
    from jumok.look.scene import Scene

__all__ = ["Captioned", "Describe", "Service"]

EXAMPLES = (1, 4, 7)  # built-in scenes that a client may try
MORE = 1 << 16  # bytes of a request besides its picture


class Describe(served.Asked):
    """A picture to describe: PNG, JPEG or WebP."""

    bodies: ClassVar[tuple[str, ...]] = ("image/png", "image/jpeg", "image/webp")

    image: Annotated[File, Field(description="The bytes of its file, in base64.")]
    beam: Annotated[
        int | None,
        Field(ge=1, description="Hypotheses side by side; 1 is greedy; without it, as the recipe says."),
    ] = None
    n_best: Annotated[int, Field(ge=1, description="So many captions, the best first.")] = 1
    alignments: Annotated[bool, Field(description="Add the place that each word looked at most.")] = False

    @model_validator(mode="before")
    @classmethod
    def _picture_alone(cls, given: Any) -> Any:
        return {"image": given} if isinstance(given, bytes) else given

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.beam is not None and self.n_best > self.beam:
            raise ValueError(f"n_best {self.n_best} needs a beam of as many; beam {self.beam} came")
        return self

    @classmethod
    def most_bytes(cls, bounds: Bounds) -> int:
        return bounds.image * 4 // 3 + MORE


class Other(served.Answer):
    """One caption."""

    caption: str
    score: float
    finished: Annotated[bool, Field(description="false: cut off at the length limit.")]
    words: list[str]
    places: Annotated[
        list[tuple[int, int]] | None,
        Field(description="For each word a row and a column of the grid, from 0; null: not asked for."),
    ] = None


class Captioned(Other):
    """The best caption; and of an n-best list, those behind it."""

    grid: Annotated[tuple[int, int], Field(description="Rows and columns of places that the model sees.")]
    others: tuple[Other, ...] = ()


class Service:
    """A captioner, served."""

    task = "caption"
    says = "Say what is in a picture."
    streams = False
    Request = Describe
    Response = Captioned

    def __init__(self, reader: CaptionReader, bounds: Bounds) -> None:
        self.reader, self.bounds = reader, bounds
        self.limits = pictures.Limits(size=bounds.image, pixels=bounds.pixels)

    def about(self) -> dict[str, Any]:
        known = {"beam": self._beam, "grid": list(self.reader.grid)}
        known |= {"max_bytes": self.bounds.image, "max_pixels": self.bounds.pixels}
        return known | {"examples": self._examples}

    def size(self, asked: Describe) -> int:
        self.bounds.check_number("beam", asked.beam, self.bounds.beam)
        self.bounds.check_number("n_best", asked.n_best, self.bounds.beam)
        if (flaw := pictures.check(asked.image, "image", self.limits)) is not None:
            raise (TooMuch if flaw.reason in pictures.TOO_LARGE else InputError)(str(flaw))
        rows, columns = self.reader.grid
        return rows * columns * max(asked.beam or self._beam, asked.n_best)

    def alike(self, asked: Describe) -> Hashable:
        return asked.beam, asked.n_best, asked.alignments

    def predict(self, asked: Sequence[Describe], audience: Audience) -> list[Captioned]:
        first = asked[0]
        found = self.reader.describe_all(
            (one.image for one in asked),
            Search(beam=first.beam, n_best=first.n_best),
            align=first.alignments,
            limits=self.limits,
        )
        return [
            Captioned(
                **_told(one),
                grid=self.reader.grid,
                others=tuple(Other(**_told(other)) for other in one.others),
            )
            for one in found
        ]

    def look(self, asked: Describe, answer: Captioned) -> list[Scene]:
        return self.reader.look_at(asked.image, answer.caption, limits=self.limits)

    @functools.cached_property
    def _examples(self) -> list[dict[str, str]]:
        return _examples(self.reader.run.recipe.data.train)

    @property
    def _beam(self) -> int:
        beam: int = self.reader.run.recipe.decode.beam
        return beam


def _told(one: Caption) -> dict[str, Any]:
    known: dict[str, Any] = {"caption": one.caption, "score": one.score, "finished": one.finished}
    known["words"] = list(one.words)
    if one.weights is not None:
        strongest = one.weights.flatten(1).argmax(1).tolist()
        known["places"] = [divmod(at, one.weights.shape[2]) for at in strongest]
    return known


def _examples(data: object) -> list[dict[str, str]]:
    """Requests to try with a model of built-in scenes: those that it has not learned from."""
    if data not in LANGUAGES:
        return []
    image = needed("PIL.Image", "images")
    made = []
    for number in EXAMPLES:
        file = io.BytesIO()
        image.fromarray(Drawn(UNSEEN, number).decode()).save(file, "JPEG", quality=90)
        made.append({"image": base64.b64encode(file.getvalue()).decode()})
    return made
