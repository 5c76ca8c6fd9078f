"""HTTP API of captioning. An image is sent as bytes, never as a path or an address."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from jumok.data import images
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError
from jumok.tasks.api import (
    Base64File,
    BeamSearchRequest,
    RequestLimits,
    RequestTooLarge,
    ResponseListener,
    TaskResponse,
    TaskService,
)
from jumok.tasks.caption.predictor import CaptionOptions, CaptionPrediction, CaptionPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

EXAMPLE_SCENES = (1, 4, 7)  # built-in scenes to try
MAX_OTHER_BYTES = 1 << 16  # bytes of a request besides its image


class CaptionRequest(BeamSearchRequest):
    """An image to describe: PNG, JPEG or WebP."""

    body_media_types: ClassVar[tuple[str, ...]] = ("image/png", "image/jpeg", "image/webp")

    image: Annotated[Base64File, Field(description="Bytes of the file, in base64.")]
    alignments: Annotated[bool, Field(description="Add the position that each word attends to most.")] = False

    @model_validator(mode="before")
    @classmethod
    def _wrap_image_bytes(cls, value: Any) -> Any:
        return {"image": value} if isinstance(value, bytes) else value

    @classmethod
    def max_bytes(cls, limits: RequestLimits) -> int:
        return limits.max_image_bytes * 4 // 3 + MAX_OTHER_BYTES


class CaptionAlternative(TaskResponse):
    """One caption."""

    caption: str
    score: float
    finished: Annotated[bool, Field(description="false: cut off at the length limit.")]
    words: list[str]
    attention_peaks: Annotated[
        list[tuple[int, int]] | None,
        Field(description="Row and column of the grid for each word, from 0. null: not requested."),
    ] = None


class CaptionResponse(CaptionAlternative):
    """The best caption, and the rest of an n-best list."""

    grid_size: Annotated[tuple[int, int], Field(description="Rows and columns of the feature map.")]
    alternatives: tuple[CaptionAlternative, ...] = ()

    @classmethod
    def from_prediction(cls, prediction: CaptionPrediction, grid_size: tuple[int, int]) -> CaptionResponse:
        best, *others = (
            {name: x for name, x in each.to_dict().items() if name != "grid_size"}  # which is there with attention only
            for each in (prediction, *prediction.alternatives)
        )
        return cls(**best, grid_size=grid_size, alternatives=tuple(CaptionAlternative(**other) for other in others))


class CaptionService(TaskService[CaptionRequest, CaptionResponse]):
    """Serves a captioner."""

    endpoint = "caption"
    summary = "Describe an image."
    request_type = CaptionRequest
    response_type = CaptionResponse
    predictor: CaptionPredictor

    def __init__(self, predictor: CaptionPredictor, request_limits: RequestLimits) -> None:
        super().__init__(predictor, request_limits)
        self.image_limits = images.ImageLimits(
            max_bytes=request_limits.max_image_bytes, max_pixels=request_limits.max_image_pixels
        )

    def describe(self) -> dict[str, Any]:
        return {
            "beam_size": self.predictor.task.recipe.decode.beam_size,
            "grid_size": list(self.predictor.grid_size),
            "max_image_bytes": self.request_limits.max_image_bytes,
            "max_image_pixels": self.request_limits.max_image_pixels,
            "examples": self._examples,
        }

    def estimate_tokens(self, request: CaptionRequest) -> int:
        limits = self.request_limits
        limits.check_maximum("beam_size", request.beam_size, limits.max_beam_size)
        limits.check_maximum("n_best", request.n_best, limits.max_beam_size)
        if (problem := images.check_image(request.image, "image", self.image_limits)) is not None:
            is_too_large = problem.reason in images.TOO_LARGE_REASONS
            raise (RequestTooLarge if is_too_large else InputError)(str(problem))
        rows, columns = self.predictor.grid_size
        beam_size = request.beam_size or self.predictor.task.recipe.decode.beam_size
        return rows * columns * max(beam_size, request.n_best)

    def get_batch_key(self, request: CaptionRequest) -> Hashable:
        return request.beam_size, request.n_best, request.alignments

    def predict(self, requests: Sequence[CaptionRequest], listener: ResponseListener) -> list[CaptionResponse]:
        first = requests[0]
        predictions = self.predictor.caption_images(
            (request.image for request in requests),
            CaptionOptions(beam_size=first.beam_size, n_best=first.n_best),
            with_attention=first.alignments,
            limits=self.image_limits,
        )
        grid_size = self.predictor.grid_size
        return [CaptionResponse.from_prediction(prediction, grid_size) for prediction in predictions]

    def build_viewer_data(self, request: CaptionRequest, response: CaptionResponse) -> list[ViewerData]:
        return self.predictor.build_image_viewer_data(request.image, response.caption, limits=self.image_limits)

    @functools.cached_property
    def _examples(self) -> list[dict[str, str]]:
        """Built-in scenes, for a model that was trained on others of them."""
        from jumok.data.builtin.scenes import LANGUAGES, UNSEEN_SEED, BuiltinScene

        if self.predictor.task.recipe.data.train not in tuple(LANGUAGES):  # it may be a list, which has no hash
            return []
        pillow = import_optional("PIL.Image", "images")
        examples = []
        for number in EXAMPLE_SCENES:
            file = io.BytesIO()
            pillow.fromarray(BuiltinScene(UNSEEN_SEED, number).decode()).save(file, "JPEG", quality=90)
            examples.append({"image": base64.b64encode(file.getvalue()).decode()})
        return examples


SERVICE = CaptionService
