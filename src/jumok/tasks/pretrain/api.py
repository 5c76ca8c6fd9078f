"""HTTP API of mask filling, for models of the task pretrain. Its endpoint is ``fill``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks.api import ResponseListener, TaskResponse, TaskService, TextPairRequest
from jumok.tasks.jsonl_input import to_pair_line
from jumok.tasks.pretrain.predictor import FillMaskOptions, FillMaskPredictor
from jumok.text_checks import to_single_line

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData


class FillMaskRequest(TextPairRequest):
    """A text with [MASK] for each masked word; or two texts: does the second follow the first?"""

    n_best: Annotated[int, Field(ge=1, description="Number of words for each mask.")] = 5

    def to_line(self) -> str:
        """The request as an input line."""
        return to_pair_line(to_single_line(self.text), self.text_pair)


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


class FillMaskService(TaskService[FillMaskRequest, FillMaskResponse]):
    """Serves a model that fills masks."""

    endpoint = "fill-mask"
    summary = "Predict the masked words of a text, or whether one text follows another."
    request_type = FillMaskRequest
    response_type = FillMaskResponse
    predictor: FillMaskPredictor

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
        responses = [FillMaskResponse(**prediction.to_dict()) for prediction in predictions]
        for response in responses:  # the predictor returns more than one word in any case
            response.mask_predictions = [candidates[:n_best] for candidates in response.mask_predictions]
        return responses

    def build_viewer_data(self, request: FillMaskRequest, response: FillMaskResponse) -> list[ViewerData]:
        return self.predictor.build_viewer_data(request.to_line())


SERVICE = FillMaskService
