"""What a server asks of a trained model: one task, one module, and each has a ``TaskService``.

A server knows no task. It reads a request by the task's schema, asks how much work it is, puts it together
with others that are alike, has them answered, and writes the answers by the task's schema::

    JSON  ►  request  ►  size(request)  ►  predict([request, request, …])  ►  response  ►  JSON

To serve one more task, write its module here; to serve it by another engine, give its ``TaskService`` a predictor
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
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = [
    *(
        "TaskResponse",
        "TaskRequest",
        "ResponseListener",
        "RequestLimits",
        "Base64File",
        "TaskService",
        "RequestText",
        "RequestTooLarge",
    ),
    *("to_single_line", "get_api_module", "format_request_error"),
]

MAX_REQUEST_TEXTS = 2  # texts of a request at most: a pair, or a question and its context
MAX_ESCAPED_BYTES = 12  # bytes of a character that JSON writes as two escapes
MAX_OTHER_ITEMS = 1024  # items of a request besides its texts
SURROGATE_PATTERN = re.compile(r"[\ud800-\udfff]")  # half of a pair, which JSON can write and UTF-8 cannot
CONTROL_PATTERN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)  # all but tab, newline and carriage return


class RequestTooLarge(InputError):
    """A request is larger than this server takes; the message says how large one may be."""


@dataclass(frozen=True)
class RequestLimits:
    """How much one request may ask for."""

    max_text_chars: int = 20_000  # characters of a text
    max_beam_size: int = 10  # hypotheses side by side
    max_n_best: int = 100  # answers
    max_image_bytes: int = 12 << 20  # bytes of a picture
    max_image_pixels: int = 24_000_000
    max_decode_tokens: int = 4096  # source tokens times hypotheses of one translation
    max_speech_chars: int = 2_000  # characters of a text that is spoken
    max_audio_bytes: int = 8 << 20  # bytes of a recording
    max_audio_seconds: float = 30.0  # of it
    max_audio_samples: int = 12_000_000  # of all of its channels

    def check_text(self, field: str, text: str, max_chars: int | None = None) -> None:
        """Refuse a text that is too long."""
        max_chars = self.max_text_chars if max_chars is None else min(max_chars, self.max_text_chars)
        if len(text) > max_chars:
            raise RequestTooLarge(
                f"{field} has {len(text):,} characters; this server takes {max_chars:,} at most: divide it"
            )

    def check_decode_tokens(self, num_tokens: int, num_hypotheses: int) -> None:
        """Refuse a translation that would occupy the model for too long."""
        if num_tokens * num_hypotheses > self.max_decode_tokens:
            raise RequestTooLarge(
                f"this would be {num_tokens * num_hypotheses:,} tokens of work ({num_tokens:,} source tokens times a "
                f"beam of {num_hypotheses}); {self.max_decode_tokens:,} are taken at most: divide the text or lower the beam"
            )

    def check_maximum(self, field: str, value: int | None, maximum: int) -> None:
        """Refuse a number that is too large."""
        if value is not None and value > maximum:
            raise RequestTooLarge(f"{field} is {value}; this server takes {maximum} at most")


def _check_text(text: str) -> str:
    """A text that can be read, or an error that says why not."""
    if not text.strip():
        raise ValueError("it is empty; a text is expected")
    if found := SURROGATE_PATTERN.search(text):
        raise ValueError(
            f"it has half of a surrogate pair, U+{ord(found.group()):04X}, at place {found.start()}: no "
            "character, take it out"
        )
    if found := CONTROL_PATTERN.search(text):
        raise ValueError(
            f"it has the control character U+{ord(found.group()):04X} at place {found.start()}; of them only "
            "tabs and newlines are read: take it out"
        )
    return text


RequestText = Annotated[str, AfterValidator(_check_text)]


def _decode_base64(value: object) -> object:
    """The bytes that a text in base64 stands for."""
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(
            "it is no base64; the bytes of a file are expected in it, and nothing else"
        ) from None


def _encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# The bytes of a file; in JSON, a text in base64. Never a path or an address.
Base64File = Annotated[
    bytes,
    BeforeValidator(_decode_base64),
    PlainSerializer(_encode_base64, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]


class TaskRequest(BaseModel):
    """What all requests have."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    body_media_types: ClassVar[
        tuple[str, ...]
    ] = ()  # media types, besides JSON: the body is the one thing asked about

    model: str | None = Field(None, description="The name of a model; without it, the first of this task.")

    @classmethod
    def max_bytes(cls, limits: RequestLimits) -> int:
        """Of a body: what the largest request within the bounds may have."""
        return max(1 << 20, MAX_REQUEST_TEXTS * MAX_ESCAPED_BYTES * limits.max_text_chars)

    @classmethod
    def max_items(cls, limits: RequestLimits) -> int:
        """The number of commas and brackets in the JSON of the largest request within the bounds.

        Every item of a list and every key needs one, so this also limits the number of objects that parsing
        creates. Texts may hold them as well.
        """
        return MAX_REQUEST_TEXTS * limits.max_text_chars + MAX_OTHER_ITEMS


class TaskResponse(BaseModel):
    """What all responses have."""

    model_config = ConfigDict(extra="forbid")
    media_type: ClassVar[str | None] = None  # what it may be instead of JSON, for a client that accepts that

    @property
    def body(self) -> bytes:
        """The answer as that."""
        raise NotImplementedError


class ResponseListener(Protocol):
    """Those who wait for the answers to some requests, by their numbers, from 0."""

    def is_cancelled(self, index: int) -> bool:
        """Whether this one has left: its answer may be anything."""
        ...

    def is_streaming(self, index: int) -> bool:
        """Whether this one wants to hear the text while it is made."""
        ...

    def on_partial(self, index: int, partial: str | TaskResponse) -> None:
        """The text so far, in the place of that before; or a part, which comes behind those before."""
        ...

    def yield_to_shorter_jobs(self) -> None:
        """Let much shorter requests be computed now; for work in steps that other work may interrupt."""
        ...


Q = TypeVar("Q", contravariant=True, bound=TaskRequest)
A = TypeVar("A", covariant=True, bound=TaskResponse)


class TaskService(Protocol[Q, A]):
    """A model of one task, as a server uses it; made by ``TaskService(predictor, limits)``.

    ``estimate_tokens`` is called by any thread, the others only by the one that owns the model.
    """

    endpoint: ClassVar[str]  # what it does, and the address it is asked at
    summary: ClassVar[str]  # the same, in a sentence
    supports_streaming: ClassVar[bool]  # whether there is something to hear before the answer is whole
    request_type: ClassVar[type[Any]]  # the schema, a subclass of Asked
    response_type: ClassVar[type[Any]]  # a subclass of Answer

    def describe(self) -> dict[str, Any]:
        """What a client may want to know of this model, such as the names of its classes.

        ``examples`` are requests to try it with; only built-in data gives some away.
        """
        ...

    def estimate_tokens(self, request: Q) -> int:
        """How much work this is, in tokens; an error if it is too much, or cannot be read."""
        ...

    def get_batch_key(self, request: Q) -> Hashable:
        """Requests for which this is equal may be answered together."""
        ...

    def predict(self, requests: Sequence[Q], listener: ResponseListener) -> Sequence[A]:
        """The answers to requests that are alike, in their order."""
        ...

    def build_viewer_data(self, request: Q, response: Any) -> list[ViewerData]:
        """What the model attends to while it gives this answer, for the viewer."""
        ...


def get_api_module(task: str) -> Any:
    """The module of a task, by the name that its recipes have."""
    name = f"jumok.tasks.{task}.api"
    if importlib.util.find_spec(name) is None:
        raise InputError(f"runs of the task {task} cannot be served yet")
    return importlib.import_module(name)


def to_single_line(text: str) -> str:
    """A text without what would mean something in a line of ``jumok run``: tabs and newlines."""
    return " ".join(text.split())


def format_request_error(error: InputError) -> str:
    """What is wrong, without the number of a line: a request has none. No address in memory is told."""
    message = re.sub(r" at 0x[0-9a-fA-F]+", "", str(error))
    return re.sub(r"^line 1\b(: )?", lambda found: "" if found[1] else "the text", message)
