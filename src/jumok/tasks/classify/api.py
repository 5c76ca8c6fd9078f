"""HTTP API of classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks.api import ResponseListener, TaskResponse, TaskService, TextPairRequest
from jumok.tasks.classify.data import BUILTIN_SEED
from jumok.tasks.classify.predictor import ClassificationPrediction, ClassificationPredictor
from jumok.tasks.jsonl_input import to_pair_line

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

NUM_EXAMPLES = 3
UNSEEN_SEED = BUILTIN_SEED + 1  # of built-in documents that no model was trained on


class ClassificationRequest(TextPairRequest):
    """A text to classify, or a text pair for a model of pairs."""


class ClassProbability(TaskResponse):
    """A class and its probability."""

    label: str
    probability: float


class ClassificationResponse(TaskResponse):
    """The likeliest class and all classes; or the number that a regression model predicts."""

    label: str | None = None
    probability: float | None = None
    classes: Annotated[tuple[ClassProbability, ...], Field(description="Likeliest first.")] = ()
    value: Annotated[float | None, Field(description="Prediction of a regression model.")] = None

    @classmethod
    def from_prediction(cls, prediction: ClassificationPrediction) -> ClassificationResponse:
        if prediction.value is not None:
            return cls(value=prediction.value)
        classes = tuple(ClassProbability(label=label, probability=p) for label, p in prediction.classes)
        return cls(label=classes[0].label, probability=classes[0].probability, classes=classes)


class ClassificationService(TaskService[ClassificationRequest, ClassificationResponse]):
    """Serves a classifier."""

    endpoint = "classify"
    summary = "Classify a text, or a pair of texts."
    request_type = ClassificationRequest
    response_type = ClassificationResponse
    predictor: ClassificationPredictor

    def describe(self) -> dict[str, Any]:
        task = self.predictor.task
        return {
            "labels": list(self.predictor.labels),
            "text_pairs": task.has_pairs,
            "examples": _build_examples(task.data_config.train),
        }

    def estimate_tokens(self, request: ClassificationRequest) -> int:
        request.check_limits(self.request_limits)
        return self.predictor.count_tokens(request.text, request.text_pair)

    def predict(
        self, requests: Sequence[ClassificationRequest], listener: ResponseListener
    ) -> list[ClassificationResponse]:
        texts = [(request.text, request.text_pair) for request in requests]
        predictions = self.predictor.classify_texts(texts)
        return [ClassificationResponse.from_prediction(prediction) for prediction in predictions]

    def build_viewer_data(self, request: ClassificationRequest, response: ClassificationResponse) -> list[ViewerData]:
        return self.predictor.build_viewer_data(to_pair_line(request.text, request.text_pair))


def _build_examples(data_source: object) -> list[dict[str, str]]:
    """Built-in documents, for a model that was trained on others of them."""
    from jumok.data.builtin import decisive_words

    if data_source not in decisive_words.LANGUAGES:
        return []
    documents = decisive_words.generate_documents(UNSEEN_SEED, NUM_EXAMPLES, str(data_source))
    return [{"text": document.text} for document in documents]


SERVICE = ClassificationService
