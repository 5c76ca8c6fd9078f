"""The interface between the server and the tasks: requests, responses and services.

The server knows no task. It parses a request by the schema of the task, asks for its size, batches it with other
requests that have the same key, and formats the responses by the schema of the task::

    JSON  ►  request  ►  estimate_tokens(request)  ►  predict([request, request, …])  ►  response  ►  JSON

To serve another task, write its module ``api``. To serve a task with another engine, give its service a predictor
with the same methods.
"""

from __future__ import annotations

import base64
import binascii
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Protocol, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from jumok.errors import InputError
from jumok.text_checks import CONTROL_PATTERN, SURROGATE_PATTERN

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

MAX_REQUEST_TEXTS = 2  # maximum number of texts in a request: a pair, or a question and its context
MAX_ESCAPED_BYTES = 12  # bytes of a character that JSON writes as two escapes
MAX_OTHER_ITEMS = 1024  # items of a request besides its texts


class RequestTooLarge(InputError):
    """A request is larger than the server accepts; the message names the limit."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a single request."""

    max_text_chars: int = 20_000
    max_beam_size: int = 10
    max_n_best: int = 100
    max_image_bytes: int = 12 << 20
    max_image_pixels: int = 24_000_000
    max_decode_tokens: int = 4096  # source tokens times hypotheses of one translation
    max_speech_chars: int = 2_000  # length of a text that is spoken
    max_audio_bytes: int = 8 << 20
    max_audio_seconds: float = 30.0
    max_audio_samples: int = 12_000_000  # of all channels together

    def check_text(self, field: str, text: str, max_chars: int | None = None) -> None:
        """Raise if a text is too long."""
        max_chars = self.max_text_chars if max_chars is None else min(max_chars, self.max_text_chars)
        if len(text) > max_chars:
            raise RequestTooLarge(
                f"{field} has {len(text):,} characters; this server accepts at most {max_chars:,}: split it"
            )

    def check_decode_tokens(self, num_tokens: int, num_hypotheses: int) -> None:
        """Raise if a translation would occupy the model for too long."""
        if num_tokens * num_hypotheses > self.max_decode_tokens:
            raise RequestTooLarge(
                f"this request needs {num_tokens * num_hypotheses:,} decoder tokens ({num_tokens:,} source tokens "
                f"times a beam of {num_hypotheses}); the limit is {self.max_decode_tokens:,}: split the text, or "
                "lower beam_size"
            )

    def check_maximum(self, field: str, value: int | None, maximum: int) -> None:
        """Raise if a number is too large."""
        if value is not None and value > maximum:
            raise RequestTooLarge(f"{field} is {value}; this server accepts at most {maximum}")


def _check_text(text: str) -> str:
    """Return a text without invalid characters, or raise."""
    if not text.strip():
        raise ValueError("it is empty; a text is expected")
    if match := SURROGATE_PATTERN.search(text):
        raise ValueError(
            f"it has half of a surrogate pair, U+{ord(match.group()):04X}, at position {match.start()}, which "
            "is not a character: remove it"
        )
    if match := CONTROL_PATTERN.search(text):
        raise ValueError(
            f"it has the control character U+{ord(match.group()):04X} at position {match.start()}; only tabs "
            "and newlines are allowed: remove it"
        )
    return text


RequestText = Annotated[str, AfterValidator(_check_text)]


def _decode_base64(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it is not base64; the bytes of a file are expected in base64") from None


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
    """Fields of all requests."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    body_media_types: ClassVar[tuple[str, ...]] = ()  # media types of a body that is the input itself

    model: str | None = Field(None, description="Name of a model. Defaults to the first model of the task.")

    @classmethod
    def max_bytes(cls, limits: RequestLimits) -> int:
        """The size of the largest body within the limits."""
        return max(1 << 20, MAX_REQUEST_TEXTS * MAX_ESCAPED_BYTES * limits.max_text_chars)

    @classmethod
    def max_items(cls, limits: RequestLimits) -> int:
        """The number of commas and brackets in the JSON of the largest request within the limits.

        Every item of a list and every key needs one, so this also limits the number of objects that parsing
        creates. Texts may contain them, too.
        """
        return MAX_REQUEST_TEXTS * limits.max_text_chars + MAX_OTHER_ITEMS


class BeamSearchRequest(TaskRequest):
    """Fields of requests for generated text."""

    beam_size: Annotated[
        int | None, Field(ge=1, description="Beam size. 1 means greedy search. Defaults to the value of the recipe.")
    ] = None
    n_best: Annotated[int, Field(ge=1, description="Number of predictions, best first.")] = 1

    @model_validator(mode="after")
    def _check_n_best(self) -> Self:
        if self.beam_size is not None and self.n_best > self.beam_size:
            raise ValueError(
                f"n_best {self.n_best} needs a beam of at least {self.n_best}, not beam_size {self.beam_size}"
            )
        return self


class TextPairRequest(TaskRequest):
    """Fields of requests with one or two texts."""

    text: RequestText
    text_pair: Annotated[RequestText | None, Field(description="Second text, for a model of text pairs.")] = None

    def check_limits(self, limits: RequestLimits) -> None:
        """Raise if a text is too long."""
        limits.check_text("text", self.text)
        limits.check_text("text_pair", self.text_pair or "")


class TaskResponse(BaseModel):
    """Base class of all responses. The fields are those of ``Prediction.to_dict``."""

    model_config = ConfigDict(extra="forbid")
    media_type: ClassVar[str | None] = None  # alternative to JSON, for a client that accepts it

    @property
    def body(self) -> bytes:
        """The response in the alternative media type."""
        raise NotImplementedError


class ResponseListener(Protocol):
    """The clients that wait for the responses to a batch of requests, by index."""

    def is_cancelled(self, index: int) -> bool:
        """Whether the client has left; its response may then be anything."""
        ...

    def is_streaming(self, index: int) -> bool:
        """Whether the client wants partial responses."""
        ...

    def on_partial(self, index: int, partial: str | TaskResponse) -> None:
        """Send the text so far, which replaces the previous one, or a part, which is added to the others."""
        ...

    def yield_to_shorter_jobs(self) -> None:
        """Run much shorter requests now. A search that may be interrupted calls it between its steps."""
        ...


Q = TypeVar("Q", contravariant=True, bound=TaskRequest)
A = TypeVar("A", covariant=True, bound=TaskResponse)


class TaskService(ABC, Generic[Q, A]):
    """Base class of services: each serves a model of one task.

    Any thread calls ``estimate_tokens``; only the thread that owns the model calls the other methods.
    """

    endpoint: ClassVar[str]  # the path of its URL
    summary: ClassVar[str]  # one sentence
    supports_streaming: ClassVar[bool] = False
    request_type: ClassVar[type[Any]]  # a subclass of TaskRequest
    response_type: ClassVar[type[Any]]  # a subclass of TaskResponse

    predictor: Any
    request_limits: RequestLimits

    def __init__(self, predictor: Any, request_limits: RequestLimits) -> None:
        self.predictor, self.request_limits = predictor, request_limits

    def describe(self) -> dict[str, Any]:
        """Properties of the model, such as its class names.

        ``examples`` are requests to try it with, for models of built-in data.
        """
        return {}

    @abstractmethod
    def estimate_tokens(self, request: Q) -> int:
        """Estimate the work of a request in tokens. Raise if it is invalid or too large."""

    def get_batch_key(self, request: Q) -> Hashable:
        """Requests with equal keys may be batched."""
        return None

    @abstractmethod
    def predict(self, requests: Sequence[Q], listener: ResponseListener) -> Sequence[A]:
        """Respond to requests with equal keys, in their order."""

    @abstractmethod
    def build_viewer_data(self, request: Q, response: Any) -> list[ViewerData]:
        """Capture the attention of the model for a response, for the viewer."""


def format_request_error(error: InputError) -> str:
    """Format an error without line numbers, which a request does not have, and without memory addresses."""
    message = re.sub(r" at 0x[0-9a-fA-F]+", "", str(error))
    return re.sub(r"^line 1\b(: )?", lambda match: "" if match[1] else "the text", message)
