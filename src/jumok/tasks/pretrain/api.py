"""A pretrained BERT, served: it fills hidden words in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks import api as tasks_api
from jumok.tasks.api import RequestLimits, RequestText, ResponseListener, to_single_line
from jumok.tasks.pretrain.predictor import FillMaskOptions, FillMaskPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["FillMaskRequest", "FillMaskResponse", "FillMaskService"]


class FillMaskRequest(tasks_api.TaskRequest):
    """A text with [MASK] for each hidden word; or two texts: does the second follow the first?"""

    text: RequestText
    text_pair: Annotated[RequestText | None, Field(description="The second text.")] = None
    n_best: Annotated[int, Field(ge=1, description="So many words for each mask.")] = 5


class MaskCandidate(tasks_api.TaskResponse):
    """A word and how likely it is."""

    word: str
    probability: float


class FillMaskResponse(tasks_api.TaskResponse):
    """The words of each mask, the likeliest first, and the text with these."""

    filled_text: str
    mask_predictions: list[list[MaskCandidate]]
    next_sentence_probability: Annotated[
        float | None, Field(description="How likely it is that the second text follows the first.")
    ] = None


class FillMaskService:
    """A model that fills words in, served."""

    endpoint = "fill"
    summary = "Say the hidden words of a text; of two, whether the second follows the first."
    supports_streaming = False
    request_type = FillMaskRequest
    response_type = FillMaskResponse

    def __init__(self, predictor: FillMaskPredictor, request_limits: RequestLimits) -> None:
        self.predictor, self.request_limits = predictor, request_limits

    def describe(self) -> dict[str, Any]:
        return {"mask_token": self.predictor.tokenizer.special_tokens["mask"]}

    def estimate_tokens(self, request: FillMaskRequest) -> int:
        self.request_limits.check_text("text", request.text)
        self.request_limits.check_text("text_pair", request.text_pair or "")
        self.request_limits.check_maximum("n_best", request.n_best, self.request_limits.max_n_best)
        return self.predictor.count_tokens(_build_line(request))

    def get_batch_key(self, request: FillMaskRequest) -> Hashable:
        return request.n_best

    def predict(
        self, requests: Sequence[FillMaskRequest], listener: ResponseListener
    ) -> list[FillMaskResponse]:
        most = requests[0].n_best
        found = self.predictor.predict([_build_line(one) for one in requests], FillMaskOptions(n_best=most))
        return [
            FillMaskResponse(
                filled_text=one.filled_text,
                mask_predictions=[
                    [MaskCandidate(word=word, probability=p) for word, p in some[:most]]
                    for some in one.mask_predictions
                ],
                next_sentence_probability=one.next_sentence_probability,
            )
            for one in found
        ]

    def build_viewer_data(self, request: FillMaskRequest, response: FillMaskResponse) -> list[ViewerData]:
        return self.predictor.build_viewer_data(_build_line(request))


def _build_line(request: FillMaskRequest) -> str:
    return (
        to_single_line(request.text)
        if request.text_pair is None
        else f"{to_single_line(request.text)} ||| {to_single_line(request.text_pair)}"
    )


Service = FillMaskService
