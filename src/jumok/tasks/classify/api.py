"""Classification, served."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.data.builtin import decisive_words
from jumok.tasks import api as tasks_api
from jumok.tasks.api import RequestLimits, RequestText, ResponseListener, to_single_line
from jumok.tasks.classify.predictor import BUILTIN_SEED, ClassificationPrediction, ClassificationPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["ClassificationRequest", "ClassificationResponse", "ClassificationService"]

NUM_EXAMPLES, UNSEEN_SEED = 3, BUILTIN_SEED + 1


class ClassificationRequest(tasks_api.TaskRequest):
    """A text to label, or a pair of texts for a model that reads two."""

    text: RequestText
    text_pair: Annotated[RequestText | None, Field(description="The second text, for a model of pairs.")] = (
        None
    )


class ClassProbability(tasks_api.TaskResponse):
    """A class and how likely it is."""

    label: str
    probability: float


class ClassificationResponse(tasks_api.TaskResponse):
    """The likeliest class, and all of them; of a model that says a number, that."""

    label: str | None = None
    probability: float | None = None
    classes: Annotated[tuple[ClassProbability, ...], Field(description="The likeliest first.")] = ()
    value: Annotated[float | None, Field(description="What a model of numbers says.")] = None


class ClassificationService:
    """A classifier, served."""

    endpoint = "classify"
    summary = "Label a text, or a pair of texts."
    supports_streaming = False
    request_type = ClassificationRequest
    response_type = ClassificationResponse

    def __init__(self, predictor: ClassificationPredictor, request_limits: RequestLimits) -> None:
        self.predictor, self.request_limits = predictor, request_limits

    def describe(self) -> dict[str, Any]:
        data = self.predictor.run.recipe.data
        known = {"labels": list(self.predictor.labels), "text_pairs": data.pair_column is not None}
        return known | {"examples": _build_examples(data.train)}

    def estimate_tokens(self, request: ClassificationRequest) -> int:
        self.request_limits.check_text("text", request.text)
        self.request_limits.check_text("text_pair", request.text_pair or "")
        return self.predictor.count_tokens(request.text, request.text_pair)

    def get_batch_key(self, request: ClassificationRequest) -> Hashable:
        return None

    def predict(
        self, requests: Sequence[ClassificationRequest], listener: ResponseListener
    ) -> list[ClassificationResponse]:
        return [
            _build_response(one)
            for one in self.predictor.classify_texts([(one.text, one.text_pair) for one in requests])
        ]

    def build_viewer_data(
        self, request: ClassificationRequest, response: ClassificationResponse
    ) -> list[ViewerData]:
        if request.text_pair is None:
            return self.predictor.build_viewer_data(request.text)
        return self.predictor.build_viewer_data(
            f"{to_single_line(request.text)}\t{to_single_line(request.text_pair)}"
        )


def _build_examples(data_source: object) -> list[dict[str, str]]:
    """Requests to try with a model of built-in documents: others than those that it has learned from."""
    if data_source not in decisive_words.LANGUAGES:
        return []
    return [
        {"text": one.text}
        for one in decisive_words.generate_documents(UNSEEN_SEED, NUM_EXAMPLES, str(data_source))
    ]


def _build_response(prediction: ClassificationPrediction) -> ClassificationResponse:
    if prediction.value is not None:
        return ClassificationResponse(value=prediction.value)
    classes = tuple(ClassProbability(label=label, probability=share) for label, share in prediction.classes)
    return ClassificationResponse(label=classes[0].label, probability=classes[0].probability, classes=classes)


Service = ClassificationService
