"""HTTP API of tagging."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks.api import RequestLimits, RequestText, ResponseListener, TaskRequest, TaskResponse
from jumok.tasks.options import NBestOptions
from jumok.tasks.tag.predictor import TaggingPrediction, TaggingPredictor

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

    @classmethod
    def from_prediction(cls, prediction: TaggingPrediction) -> TaggingResponse:
        entities = [TaggedEntity(**entity) for entity in prediction.to_entity_dicts()]
        return cls(entities=entities, words=list(prediction.words), tags=list(prediction.tags))


class TaggingService:
    """Serves a tagger."""

    endpoint = "tag"
    summary = "Find the entities of a text."
    supports_streaming = False
    request_type = TaggingRequest
    response_type = TaggingResponse

    def __init__(self, predictor: TaggingPredictor, request_limits: RequestLimits) -> None:
        self.predictor, self.request_limits = predictor, request_limits

    def describe(self) -> dict[str, Any]:
        return {"labels": list(self.predictor.labels)}

    def estimate_tokens(self, request: TaggingRequest) -> int:
        self.request_limits.check_text("text", request.text)
        return self.predictor.count_tokens(request.text)

    def get_batch_key(self, request: TaggingRequest) -> Hashable:
        return None

    def predict(self, requests: Sequence[TaggingRequest], listener: ResponseListener) -> list[TaggingResponse]:
        predictions = self.predictor.predict([request.text for request in requests], NBestOptions())
        return [TaggingResponse.from_prediction(prediction) for prediction in predictions]

    def build_viewer_data(self, request: TaggingRequest, response: TaggingResponse) -> list[ViewerData]:
        return self.predictor.build_viewer_data(request.text)


SERVICE = TaggingService
