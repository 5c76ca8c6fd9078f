"""HTTP API of mask filling, for models of the task pretrain. Its endpoint is ``fill``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks.api import RequestLimits, ResponseListener, TaskResponse, TextPairRequest
from jumok.tasks.pretrain.predictor import FillMaskOptions, FillMaskPrediction, FillMaskPredictor
from jumok.text_checks import to_single_line

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData


class FillMaskRequest(TextPairRequest):
    """A text with [MASK] for each masked word; or two texts: does the second follow the first?"""

    n_best: Annotated[int, Field(ge=1, description="Number of words for each mask.")] = 5

    def to_line(self) -> str:
        """The request as an input line."""
        texts = [self.text] if self.text_pair is None else [self.text, self.text_pair]
        return "\t".join(map(to_single_line, texts))


class MaskCandidate(TaskResponse):
    """A word and its probability."""

    word: str
    probability: float


class FillMaskResponse(TaskResponse):
    """The words for each mask, likeliest first, and the text with the likeliest words."""

    filled_text: str
    mask_predictions: list[list[MaskCandidate]]
    next_sentence_probability: Annotated[
        float | None, Field(description="Probability that the second text follows the first.")
    ] = None

    @classmethod
    def from_prediction(cls, prediction: FillMaskPrediction, n_best: int) -> FillMaskResponse:
        return cls(
            filled_text=prediction.filled_text,
            mask_predictions=[
                [MaskCandidate(word=word, probability=p) for word, p in candidates[:n_best]]
                for candidates in prediction.mask_predictions
            ],
            next_sentence_probability=prediction.next_sentence_probability,
        )


class FillMaskService:
    """Serves a model that fills masks."""

    endpoint = "fill-mask"
    summary = "Predict the masked words of a text, or whether one text follows another."
    supports_streaming = False
    request_type = FillMaskRequest
    response_type = FillMaskResponse

    def __init__(self, predictor: FillMaskPredictor, request_limits: RequestLimits) -> None:
        self.predictor, self.request_limits = predictor, request_limits

    def describe(self) -> dict[str, Any]:
        return {"mask_token": self.predictor.tokenizer.special_tokens["mask"]}

    def estimate_tokens(self, request: FillMaskRequest) -> int:
        request.check_limits(self.request_limits)
        self.request_limits.check_maximum("n_best", request.n_best, self.request_limits.max_n_best)
        return self.predictor.count_tokens(request.to_line())

    def get_batch_key(self, request: FillMaskRequest) -> Hashable:
        return request.n_best

    def predict(self, requests: Sequence[FillMaskRequest], listener: ResponseListener) -> list[FillMaskResponse]:
        n_best = requests[0].n_best
        lines = [request.to_line() for request in requests]
        predictions = self.predictor.predict(lines, FillMaskOptions(n_best=n_best))
        return [FillMaskResponse.from_prediction(prediction, n_best) for prediction in predictions]

    def build_viewer_data(self, request: FillMaskRequest, response: FillMaskResponse) -> list[ViewerData]:
        return self.predictor.build_viewer_data(request.to_line())


SERVICE = FillMaskService
