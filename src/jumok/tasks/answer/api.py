"""Answering, served."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks import api as tasks_api
from jumok.tasks.answer.task import AnswerPrediction, AnswerPredictor
from jumok.tasks.api import RequestLimits, RequestText, ResponseListener

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["AnswerRequest", "AnswerResponse", "AnswerService"]


class AnswerRequest(tasks_api.TaskRequest):
    """A question about a text."""

    question: RequestText
    context: RequestText
    n_best: Annotated[int, Field(ge=1, description="So many answers, the likeliest first.")] = 1


class AnswerSpan(tasks_api.TaskResponse):
    """A part of the text."""

    answer: Annotated[str, Field(description="Empty: the text has no answer.")]
    start: Annotated[int, Field(description="Its first character, counted from 0 in Unicode characters.")]
    end: Annotated[int, Field(description="The one after its last.")]
    probability: float


class AnswerResponse(AnswerSpan):
    """The likeliest answer; and if more were asked for, those behind it."""

    alternatives: tuple[AnswerSpan, ...] = ()


class AnswerService:
    """A model that answers, served."""

    endpoint = "answer"
    summary = "Find the answer to a question in a text."
    supports_streaming = False
    request_type = AnswerRequest
    response_type = AnswerResponse

    def __init__(self, predictor: AnswerPredictor, request_limits: RequestLimits) -> None:
        self.predictor, self.request_limits = predictor, request_limits

    def describe(self) -> dict[str, Any]:
        return {"has_unanswerable": self.predictor.task.recipe.data.has_unanswerable}

    def estimate_tokens(self, request: AnswerRequest) -> int:
        self.request_limits.check_text("question", request.question)
        self.request_limits.check_text("context", request.context)
        self.request_limits.check_maximum("n_best", request.n_best, self.request_limits.max_n_best)
        return self.predictor.count_tokens(request.question, request.context)

    def get_batch_key(self, request: AnswerRequest) -> Hashable:
        return request.n_best

    def predict(self, requests: Sequence[AnswerRequest], listener: ResponseListener) -> list[AnswerResponse]:
        found = self.predictor.answer_questions(
            [(one.question, one.context) for one in requests], requests[0].n_best
        )
        return [_build_response(one) for one in found]

    def build_viewer_data(self, request: AnswerRequest, response: AnswerResponse) -> list[ViewerData]:
        return self.predictor.build_viewer_data(
            json.dumps({"question": request.question, "context": request.context})
        )


def _build_response(prediction: AnswerPrediction) -> AnswerResponse:
    first, *others = (
        AnswerSpan(answer=answer.text, start=answer.start, end=answer.end, probability=share)
        for answer, share in prediction.answers
    )
    return AnswerResponse(**first.model_dump(), alternatives=tuple(others))


Service = AnswerService
