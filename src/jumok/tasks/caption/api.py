"""Captions, served: a picture comes as bytes, never by a path or an address."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from jumok.data import images
from jumok.data.builtin.scenes import LANGUAGES, UNSEEN_SEED, BuiltinScene
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError
from jumok.tasks import api as tasks_api
from jumok.tasks.api import Base64File, RequestLimits, RequestTooLarge, ResponseListener
from jumok.tasks.caption.predictor import CaptionOptions, CaptionPrediction, CaptionPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["CaptionRequest", "CaptionResponse", "CaptionService"]

EXAMPLE_SCENES = (1, 4, 7)  # built-in scenes that a client may try
MAX_OTHER_BYTES = 1 << 16  # bytes of a request besides its picture


class CaptionRequest(tasks_api.TaskRequest):
    """A picture to describe: PNG, JPEG or WebP."""

    body_media_types: ClassVar[tuple[str, ...]] = ("image/png", "image/jpeg", "image/webp")

    image: Annotated[Base64File, Field(description="The bytes of its file, in base64.")]
    beam_size: Annotated[
        int | None,
        Field(ge=1, description="Hypotheses side by side; 1 is greedy; without it, as the recipe says."),
    ] = None
    n_best: Annotated[int, Field(ge=1, description="So many captions, the best first.")] = 1
    alignments: Annotated[bool, Field(description="Add the place that each word looked at most.")] = False

    @model_validator(mode="before")
    @classmethod
    def _wrap_image_bytes(cls, value: Any) -> Any:
        return {"image": value} if isinstance(value, bytes) else value

    @model_validator(mode="after")
    def _check_n_best(self) -> Self:
        if self.beam_size is not None and self.n_best > self.beam_size:
            raise ValueError(f"n_best {self.n_best} needs a beam of as many; beam_size {self.beam_size} came")
        return self

    @classmethod
    def max_bytes(cls, limits: RequestLimits) -> int:
        return limits.max_image_bytes * 4 // 3 + MAX_OTHER_BYTES


class CaptionAlternative(tasks_api.TaskResponse):
    """One caption."""

    caption: str
    score: float
    finished: Annotated[bool, Field(description="false: cut off at the length limit.")]
    words: list[str]
    attention_peaks: Annotated[
        list[tuple[int, int]] | None,
        Field(description="For each word a row and a column of the grid, from 0; null: not asked for."),
    ] = None


class CaptionResponse(CaptionAlternative):
    """The best caption; and of an n-best list, those behind it."""

    grid_size: Annotated[
        tuple[int, int], Field(description="Rows and columns of places that the model sees.")
    ]
    alternatives: tuple[CaptionAlternative, ...] = ()


class CaptionService:
    """A captioner, served."""

    endpoint = "caption"
    summary = "Say what is in a picture."
    supports_streaming = False
    request_type = CaptionRequest
    response_type = CaptionResponse

    def __init__(self, predictor: CaptionPredictor, request_limits: RequestLimits) -> None:
        self.predictor, self.request_limits = predictor, request_limits
        self.image_limits = images.ImageLimits(
            max_bytes=request_limits.max_image_bytes, max_pixels=request_limits.max_image_pixels
        )

    def describe(self) -> dict[str, Any]:
        known = {"beam_size": self._default_beam_size, "grid_size": list(self.predictor.grid_size)}
        known |= {
            "max_image_bytes": self.request_limits.max_image_bytes,
            "max_image_pixels": self.request_limits.max_image_pixels,
        }
        return known | {"examples": self._examples}

    def estimate_tokens(self, request: CaptionRequest) -> int:
        self.request_limits.check_maximum("beam_size", request.beam_size, self.request_limits.max_beam_size)
        self.request_limits.check_maximum("n_best", request.n_best, self.request_limits.max_beam_size)
        if (flaw := images.check_image(request.image, "image", self.image_limits)) is not None:
            raise (RequestTooLarge if flaw.reason in images.TOO_LARGE_REASONS else InputError)(str(flaw))
        rows, columns = self.predictor.grid_size
        return rows * columns * max(request.beam_size or self._default_beam_size, request.n_best)

    def get_batch_key(self, request: CaptionRequest) -> Hashable:
        return request.beam_size, request.n_best, request.alignments

    def predict(
        self, requests: Sequence[CaptionRequest], listener: ResponseListener
    ) -> list[CaptionResponse]:
        first = requests[0]
        found = self.predictor.caption_images(
            (one.image for one in requests),
            CaptionOptions(beam_size=first.beam_size, n_best=first.n_best),
            with_attention=first.alignments,
            limits=self.image_limits,
        )
        return [
            CaptionResponse(
                **_to_fields(one),
                grid_size=self.predictor.grid_size,
                alternatives=tuple(CaptionAlternative(**_to_fields(other)) for other in one.alternatives),
            )
            for one in found
        ]

    def build_viewer_data(self, request: CaptionRequest, response: CaptionResponse) -> list[ViewerData]:
        return self.predictor.build_image_viewer_data(
            request.image, response.caption, limits=self.image_limits
        )

    @functools.cached_property
    def _examples(self) -> list[dict[str, str]]:
        return _build_examples(self.predictor.run.recipe.data.train)

    @property
    def _default_beam_size(self) -> int:
        beam: int = self.predictor.run.recipe.decode.beam_size
        return beam


def _to_fields(prediction: CaptionPrediction) -> dict[str, Any]:
    known: dict[str, Any] = {
        "caption": prediction.caption,
        "score": prediction.score,
        "finished": prediction.finished,
    }
    known["words"] = list(prediction.words)
    if prediction.attention is not None:
        strongest = prediction.attention.flatten(1).argmax(1).tolist()
        known["attention_peaks"] = [divmod(at, prediction.attention.shape[2]) for at in strongest]
    return known


def _build_examples(data_source: object) -> list[dict[str, str]]:
    """Requests to try with a model of built-in scenes: those that it has not learned from."""
    if data_source not in LANGUAGES:
        return []
    image = import_optional("PIL.Image", "images")
    made = []
    for number in EXAMPLE_SCENES:
        file = io.BytesIO()
        image.fromarray(BuiltinScene(UNSEEN_SEED, number).decode()).save(file, "JPEG", quality=90)
        made.append({"image": base64.b64encode(file.getvalue()).decode()})
    return made


Service = CaptionService
