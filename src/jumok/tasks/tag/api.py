"""HTTP API of tagging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks.api import RequestText, ResponseListener, TaskRequest, TaskResponse, TaskService
from jumok.tasks.options import NBestOptions
from jumok.tasks.tag.predictor import TaggingPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData


class TaggingRequest(TaskRequest):
    """A text to find entities in."""

    text: RequestText


class TaggedEntity(TaskResponse):
    """An entity."""

    type: str
    text: str
    start: Annotated[int, Field(description="Index of its first character, in Unicode characters.")]
    end: Annotated[int, Field(description="Index after its last character.")]
    probability: float


class TaggingResponse(TaskResponse):
    """The entities of a text; and its words with their tags in IOB2."""

    entities: list[TaggedEntity]
    words: list[str]
    tags: list[str]


class TaggingService(TaskService[TaggingRequest, TaggingResponse]):
    """Serves a tagger."""

    endpoint = "tag"
    summary = "Find the entities of a text."
    request_type = TaggingRequest
    response_type = TaggingResponse
    predictor: TaggingPredictor

    def describe(self) -> dict[str, Any]:
        return {"labels": list(self.predictor.labels)}

    def estimate_tokens(self, request: TaggingRequest) -> int:
        self.request_limits.check_text("text", request.text)
        return self.predictor.count_tokens(request.text)

    def predict(self, requests: Sequence[TaggingRequest], listener: ResponseListener) -> list[TaggingResponse]:
        predictions = self.predictor.predict([request.text for request in requests], NBestOptions())
        return [TaggingResponse(**prediction.to_dict()) for prediction in predictions]

    def build_viewer_data(self, request: TaggingRequest, response: TaggingResponse) -> list[ViewerData]:
        return self.predictor.build_viewer_data(request.text)


SERVICE = TaggingService
