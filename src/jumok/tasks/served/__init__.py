"""What a server asks of a trained model: one task, one module, and each has a ``Service``.

A server knows no task. It reads a request by the task's schema, asks how much work it is, puts it together
with others that are alike, has them answered, and writes the answers by the task's schema::

    JSON  ►  request  ►  size(request)  ►  predict([request, request, …])  ►  response  ►  JSON

To serve one more task, write its module here; to serve it by another engine, give its ``Service`` a predictor
with the same methods.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import importlib.util
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from jumok.errors import InputError

if TYPE_CHECKING:
    from jumok.look.scene import Scene

__all__ = [
    *("Answer", "Asked", "Audience", "Bounds", "File", "Service", "Text", "TooMuch"),
    *("line", "of", "told"),
]

TEXTS = 2  # texts of a request at most: a pair, or a question and its context
ESCAPED = 12  # bytes of a character that JSON writes as two escapes
ITEMS = 1024  # items of a request besides its texts
SURROGATE = re.compile(r"[\ud800-\udfff]")  # half of a pair, which JSON can write and UTF-8 cannot
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all but tab, newline and carriage return


class TooMuch(InputError):
    """A request is larger than this server takes; the message says how large one may be."""


@dataclass(frozen=True)
class Bounds:
    """How much one request may ask for."""

    text: int = 20_000  # characters of a text
    beam: int = 10  # hypotheses side by side
    n_best: int = 100  # answers
    image: int = 12 << 20  # bytes of a picture
    pixels: int = 24_000_000
    work: int = 4096  # source tokens times hypotheses of one translation
    speech: int = 2_000  # characters of a text that is spoken
    sound: int = 8 << 20  # bytes of a recording
    seconds: float = 30.0  # of it
    samples: int = 12_000_000  # of all of its channels

    def check_text(self, field: str, text: str, most: int | None = None) -> None:
        """Refuse a text that is too long."""
        most = self.text if most is None else min(most, self.text)
        if len(text) > most:
            raise TooMuch(
                f"{field} has {len(text):,} characters; this server takes {most:,} at most: divide it"
            )

    def check_work(self, tokens: int, hypotheses: int) -> None:
        """Refuse a translation that would occupy the model for too long."""
        if tokens * hypotheses > self.work:
            raise TooMuch(
                f"this would be {tokens * hypotheses:,} tokens of work ({tokens:,} source tokens times a "
                f"beam of {hypotheses}); {self.work:,} are taken at most: divide the text or lower the beam"
            )

    def check_number(self, field: str, value: int | None, most: int) -> None:
        """Refuse a number that is too large."""
        if value is not None and value > most:
            raise TooMuch(f"{field} is {value}; this server takes {most} at most")


def _plain(text: str) -> str:
    """A text that can be read, or an error that says why not."""
    if not text.strip():
        raise ValueError("it is empty; a text is expected")
    if found := SURROGATE.search(text):
        raise ValueError(
            f"it has half of a surrogate pair, U+{ord(found.group()):04X}, at place {found.start()}: no "
            "character, take it out"
        )
    if found := CONTROL.search(text):
        raise ValueError(
            f"it has the control character U+{ord(found.group()):04X} at place {found.start()}; of them only "
            "tabs and newlines are read: take it out"
        )
    return text


Text = Annotated[str, AfterValidator(_plain)]


def _decoded(given: object) -> object:
    """The bytes that a text in base64 stands for."""
    if not isinstance(given, str):
        return given
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(
            "it is no base64; the bytes of a file are expected in it, and nothing else"
        ) from None


def _coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


# The bytes of a file; in JSON, a text in base64. Never a path or an address.
File = Annotated[
    bytes,
    BeforeValidator(_decoded),
    PlainSerializer(_coded, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]


class Asked(BaseModel):
    """What all requests have."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    bodies: ClassVar[tuple[str, ...]] = ()  # media types, besides JSON: the body is the one thing asked about

    model: str | None = Field(None, description="The name of a model; without it, the first of this task.")

    @classmethod
    def most_bytes(cls, bounds: Bounds) -> int:
        """Of a body: what the largest request within the bounds may have."""
        return max(1 << 20, TEXTS * ESCAPED * bounds.text)

    @classmethod
    def max_items(cls, bounds: Bounds) -> int:
        """The number of commas and brackets in the JSON of the largest request within the bounds.

        Every item of a list and every key needs one, so this also limits the number of objects that parsing
        creates. Texts may hold them as well.
        """
        return TEXTS * bounds.text + ITEMS


class Answer(BaseModel):
    """What all responses have."""

    model_config = ConfigDict(extra="forbid")
    media: ClassVar[str | None] = None  # what it may be instead of JSON, for a client that accepts that

    @property
    def body(self) -> bytes:
        """The answer as that."""
        raise NotImplementedError


class Audience(Protocol):
    """Those who wait for the answers to some requests, by their numbers, from 0."""

    def gone(self, number: int) -> bool:
        """Whether this one has left: its answer may be anything."""
        ...

    def hears(self, number: int) -> bool:
        """Whether this one wants to hear the text while it is made."""
        ...

    def heard(self, number: int, said: str | Answer) -> None:
        """The text so far, in the place of that before; or a part, which comes behind those before."""
        ...

    def pause(self) -> None:
        """Let much shorter requests be computed now; for work in steps that other work may interrupt."""
        ...


Q = TypeVar("Q", contravariant=True, bound=Asked)
A = TypeVar("A", covariant=True, bound=Answer)


class Service(Protocol[Q, A]):
    """A model of one task, as a server uses it; made by ``Service(predictor, bounds)``.

    ``size`` is called by any thread, the others only by the one that owns the model.
    """

    task: ClassVar[str]  # what it does, and the address it is asked at
    says: ClassVar[str]  # the same, in a sentence
    streams: ClassVar[bool]  # whether there is something to hear before the answer is whole
    Request: ClassVar[type[Any]]  # the schema, a subclass of Asked
    Response: ClassVar[type[Any]]  # a subclass of Answer

    def about(self) -> dict[str, Any]:
        """What a client may want to know of this model, such as the names of its classes.

        ``examples`` are requests to try it with; only built-in data gives some away.
        """
        ...

    def size(self, asked: Q) -> int:
        """How much work this is, in tokens; an error if it is too much, or cannot be read."""
        ...

    def alike(self, asked: Q) -> Hashable:
        """Requests for which this is equal may be answered together."""
        ...

    def predict(self, asked: Sequence[Q], audience: Audience) -> Sequence[A]:
        """The answers to requests that are alike, in their order."""
        ...

    def look(self, asked: Q, answer: Any) -> list[Scene]:
        """What the model attends to while it gives this answer, for the viewer."""
        ...


def of(task: str) -> Any:
    """The module of a task, by the name that its recipes have."""
    name = f"{__name__}.{task}"
    if importlib.util.find_spec(name) is None:
        raise InputError(f"runs of the task {task} cannot be served yet")
    return importlib.import_module(name)


def line(text: str) -> str:
    """A text without what would mean something in a line of ``jumok run``: tabs and newlines."""
    return " ".join(text.split())


def told(error: InputError) -> str:
    """What is wrong, without the number of a line: a request has none. No address in memory is told."""
    message = re.sub(r" at 0x[0-9a-fA-F]+", "", str(error))
    return re.sub(r"^line 1\b(: )?", lambda found: "" if found[1] else "the text", message)
