"""Translation, served."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from jumok.data.builtin import english_korean
from jumok.tasks import api as tasks_api
from jumok.tasks.api import RequestLimits, RequestText, ResponseListener
from jumok.tasks.translate.data import BUILTIN_CORPUS
from jumok.tasks.translate.predictor import TranslationOptions, TranslationPrediction, TranslationPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["TranslationRequest", "TranslationResponse", "TranslationService"]

NUM_EXAMPLES = 3


class TranslationRequest(tasks_api.TaskRequest):
    """A text to translate."""

    text: RequestText
    beam_size: Annotated[
        int | None,
        Field(ge=1, description="Hypotheses side by side; 1 is greedy; without it, as the recipe says."),
    ] = None
    n_best: Annotated[int, Field(ge=1, description="So many translations, the best first.")] = 1
    alignments: Annotated[bool, Field(description="Add the word links.")] = False

    @model_validator(mode="after")
    def _check_n_best(self) -> Self:
        if self.beam_size is not None and self.n_best > self.beam_size:
            raise ValueError(f"n_best {self.n_best} needs a beam of as many; beam_size {self.beam_size} came")
        return self


class TranslationAlternative(tasks_api.TaskResponse):
    """One translation."""

    translation: str
    score: float
    finished: Annotated[bool, Field(description="false: cut off at the length limit.")]
    source_words: list[str]
    target_words: list[str]
    alignment: Annotated[
        list[tuple[int, int]] | None,
        Field(description="Pairs of a source word and a word, counted from 0; null: not asked for."),
    ] = None


class TranslationResponse(TranslationAlternative):
    """The best translation; and of an n-best list, those behind it."""

    alternatives: tuple[TranslationAlternative, ...] = ()


class TranslationService:
    """A translator, served."""

    endpoint = "translate"
    summary = "Translate a text."
    supports_streaming = True
    request_type = TranslationRequest
    response_type = TranslationResponse

    def __init__(self, predictor: TranslationPredictor, request_limits: RequestLimits) -> None:
        self.predictor, self.request_limits = predictor, request_limits

    def describe(self) -> dict[str, Any]:
        known = {"beam_size": self.predictor.decode_config.beam_size, "has_attention_maps": self.predictor.has_attention}
        return known | {"examples": _build_examples(self.predictor.run.recipe.data.train)}

    def estimate_tokens(self, request: TranslationRequest) -> int:
        self.request_limits.check_text("text", request.text)
        self.request_limits.check_maximum("beam_size", request.beam_size, self.request_limits.max_beam_size)
        self.request_limits.check_maximum("n_best", request.n_best, self.request_limits.max_beam_size)
        if request.alignments:
            self.predictor.check_has_attention()
        beam = self.predictor.decode_config.beam_size if request.beam_size is None else request.beam_size
        tokens, hypotheses = self.predictor.count_tokens(request.text), max(beam, request.n_best)
        self.request_limits.check_decode_tokens(tokens, hypotheses)
        return tokens * hypotheses

    def get_batch_key(self, request: TranslationRequest) -> Hashable:
        return request.beam_size, request.n_best, request.alignments

    def predict(
        self, requests: Sequence[TranslationRequest], listener: ResponseListener
    ) -> list[TranslationResponse]:
        first = requests[0]
        found = self.predictor.predict(
            [one.text for one in requests],
            TranslationOptions(beam_size=first.beam_size, n_best=first.n_best),
            with_attention=first.alignments,
            listener=_TranslationListener(self.predictor, listener),
        )
        return [
            TranslationResponse(
                **_to_fields(one),
                alternatives=tuple(TranslationAlternative(**_to_fields(other)) for other in one.alternatives),
            )
            for one in found
        ]

    def build_viewer_data(
        self, request: TranslationRequest, response: TranslationResponse
    ) -> list[ViewerData]:
        return self.predictor.build_viewer_data(request.text, response.translation)


def _build_examples(data_source: object) -> list[dict[str, str]]:
    """Requests to try with a model of the built-in sentences: of those that are for testing."""
    if data_source != BUILTIN_CORPUS:
        return []
    return [{"text": pair.english} for pair in english_korean.make_splits(test=NUM_EXAMPLES).test]


def _to_fields(prediction: TranslationPrediction) -> dict[str, Any]:
    names = ("translation", "score", "finished", "source_words", "target_words", "alignment")
    return {name: getattr(prediction, name) for name in names}


class _TranslationListener:
    """Follows a search for an audience, which reads texts rather than ids."""

    def __init__(self, predictor: TranslationPredictor, listener: ResponseListener) -> None:
        self.predictor, self.listener = predictor, listener
        self.is_streaming = listener.is_streaming

    def is_cancelled(self, sentence: int) -> bool:
        if self.predictor.is_reentrant:
            self.listener.yield_to_shorter_jobs()
        return self.listener.is_cancelled(sentence)

    def on_tokens(self, sentence: int, target_ids: Sequence[int]) -> None:
        self.listener.on_partial(sentence, self.predictor.ids_to_text(target_ids))


Service = TranslationService
