"""HTTP API of translation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from jumok.tasks.api import BeamSearchRequest, RequestText, ResponseListener, TaskResponse, TaskService
from jumok.tasks.translate.config import BUILTIN_CORPUS
from jumok.tasks.translate.predictor import TranslationOptions, TranslationPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

NUM_EXAMPLES = 3


class TranslationRequest(BeamSearchRequest):
    """A text to translate."""

    text: RequestText
    alignments: Annotated[bool, Field(description="Add the word alignment.")] = False


class TranslationAlternative(TaskResponse):
    """One translation."""

    translation: str
    score: float
    finished: Annotated[bool, Field(description="false: cut off at the length limit.")]
    source_words: list[str]
    target_words: list[str]
    alignment: Annotated[
        list[tuple[int, int]] | None,
        Field(description="Pairs of a source word and a target word, counted from 0. null: not requested."),
    ] = None


class TranslationResponse(TranslationAlternative):
    """The best translation, and the rest of an n-best list."""

    alternatives: tuple[TranslationAlternative, ...] = ()


class TranslationService(TaskService[TranslationRequest, TranslationResponse]):
    """Serves a translation model."""

    endpoint = "translate"
    summary = "Translate a text."
    supports_streaming = True
    request_type = TranslationRequest
    response_type = TranslationResponse
    predictor: TranslationPredictor

    def describe(self) -> dict[str, Any]:
        return {
            "beam_size": self.predictor.decode_config.beam_size,
            "has_attention_maps": self.predictor.has_attention,
            "examples": _build_examples(self.predictor.data.config.train),
        }

    def estimate_tokens(self, request: TranslationRequest) -> int:
        limits = self.request_limits
        limits.check_text("text", request.text)
        limits.check_maximum("beam_size", request.beam_size, limits.max_beam_size)
        limits.check_maximum("n_best", request.n_best, limits.max_beam_size)
        if request.alignments:
            self.predictor.check_has_attention()
        beam_size = self.predictor.decode_config.beam_size if request.beam_size is None else request.beam_size
        num_tokens, num_hypotheses = self.predictor.count_tokens(request.text), max(beam_size, request.n_best)
        limits.check_decode_tokens(num_tokens, num_hypotheses)
        return num_tokens * num_hypotheses

    def get_batch_key(self, request: TranslationRequest) -> Hashable:
        return request.beam_size, request.n_best, request.alignments

    def predict(self, requests: Sequence[TranslationRequest], listener: ResponseListener) -> list[TranslationResponse]:
        first = requests[0]
        predictions = self.predictor.predict(
            [request.text for request in requests],
            TranslationOptions(beam_size=first.beam_size, n_best=first.n_best),
            with_attention=first.alignments,
            listener=_TranslationListener(self.predictor, listener),
        )
        return [
            TranslationResponse(
                **best.to_dict(),
                alternatives=tuple(TranslationAlternative(**other.to_dict()) for other in best.alternatives),
            )
            for best in predictions
        ]

    def build_viewer_data(self, request: TranslationRequest, response: TranslationResponse) -> list[ViewerData]:
        return self.predictor.build_viewer_data(request.text, response.translation)


def _build_examples(data_source: object) -> list[dict[str, str]]:
    """Test sentences of the built-in corpus, for a model that was trained on it."""
    if data_source != BUILTIN_CORPUS:
        return []
    from jumok.data.builtin import english_korean

    return [{"text": pair.english} for pair in english_korean.read_pairs("test", NUM_EXAMPLES)]


class _TranslationListener:
    """Passes partial translations on as text."""

    def __init__(self, predictor: TranslationPredictor, listener: ResponseListener) -> None:
        self.predictor, self.listener = predictor, listener
        self.is_streaming = listener.is_streaming

    def is_cancelled(self, sentence: int) -> bool:
        if self.predictor.is_reentrant:
            self.listener.yield_to_shorter_jobs()
        return self.listener.is_cancelled(sentence)

    def on_tokens(self, sentence: int, target_ids: Sequence[int]) -> None:
        self.listener.on_partial(sentence, self.predictor.ids_to_text(target_ids))


SERVICE = TranslationService
