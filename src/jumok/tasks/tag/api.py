"""Tagging, served."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks import api as tasks_api
from jumok.tasks.api import RequestLimits, RequestText, ResponseListener
from jumok.tasks.fine_tuning import NBestOptions
from jumok.tasks.tag.task import TaggingPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["TaggingRequest", "TaggingResponse", "TaggingService"]


class TaggingRequest(tasks_api.TaskRequest):
    """A text to find entities in."""

    text: RequestText


class TaggedEntity(tasks_api.TaskResponse):
    """An entity."""

    type: str
    text: str
    start: Annotated[int, Field(description="Its first character, counted from 0 in Unicode characters.")]
    end: Annotated[int, Field(description="The one after its last.")]
    probability: float


class TaggingResponse(tasks_api.TaskResponse):
    """The entities of a text; and its words, each with its tag in IOB2."""

    entities: list[TaggedEntity]
    words: list[str]
    tags: list[str]


class TaggingService:
    """A tagger, served."""

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

    def predict(
        self, requests: Sequence[TaggingRequest], listener: ResponseListener
    ) -> list[TaggingResponse]:
        return [
            TaggingResponse(
                entities=[TaggedEntity(**entity) for entity in one.to_entity_dicts()],
                words=list(one.words),
                tags=list(one.tags),
            )
            for one in self.predictor.predict([one.text for one in requests], NBestOptions())
        ]

    def build_viewer_data(self, request: TaggingRequest, response: TaggingResponse) -> list[ViewerData]:
        return self.predictor.build_viewer_data(request.text)


Service = TaggingService
