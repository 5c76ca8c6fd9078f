"""HTTP API of question answering."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks.answer.predictor import AnswerPredictor
from jumok.tasks.api import RequestText, ResponseListener, TaskRequest, TaskResponse, TaskService

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData


class AnswerRequest(TaskRequest):
    """A question about a text."""

    question: RequestText
    context: RequestText
    n_best: Annotated[int, Field(ge=1, description="Number of answers, likeliest first.")] = 1


class AnswerSpan(TaskResponse):
    """A span of the context."""

    answer: Annotated[str, Field(description="Empty: the context has no answer.")]
    start: Annotated[int, Field(description="Index of its first character, in Unicode characters.")]
    end: Annotated[int, Field(description="Index after its last character.")]
    probability: float


class AnswerResponse(AnswerSpan):
    """The likeliest answer, and the rest of an n-best list."""

    alternatives: tuple[AnswerSpan, ...] = ()


class AnswerService(TaskService[AnswerRequest, AnswerResponse]):
    """Serves a question answering model."""

    endpoint = "answer"
    summary = "Find the answer to a question in a text."
    request_type = AnswerRequest
    response_type = AnswerResponse
    predictor: AnswerPredictor

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
        pairs = [(request.question, request.context) for request in requests]
        predictions = self.predictor.answer_questions(pairs, requests[0].n_best)
        return [AnswerResponse(**prediction.to_dict(n_best=True)) for prediction in predictions]

    def build_viewer_data(self, request: AnswerRequest, response: AnswerResponse) -> list[ViewerData]:
        line = json.dumps({"question": request.question, "context": request.context})
        return self.predictor.build_viewer_data(line)


SERVICE = AnswerService
