"""HTTP API of speech synthesis. Segments can be streamed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jumok.data import audio
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError
from jumok.tasks.api import (
    Base64File,
    RequestLimits,
    RequestText,
    RequestTooLarge,
    ResponseListener,
    TaskRequest,
    TaskResponse,
    TaskService,
)
from jumok.tasks.speak.config import BUILTIN_DATASET
from jumok.tasks.speak.prediction import MAX_STYLE_WEIGHT, SpeechPrediction, SpeechSegment
from jumok.tasks.speak.predictor import SpeechOptions, SpeechPredictor

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

EXAMPLE_TEXTS = ("forty two", "ninety nine", "Three. Two. One.")  # for the built-in voices, which say numbers
MAX_OTHER_BYTES = 1 << 20  # bytes of a request besides its recording
MAX_STYLE_TOKENS = 1024  # far more than any voice has
StyleWeight = Annotated[float, Field(ge=-MAX_STYLE_WEIGHT, le=MAX_STYLE_WEIGHT, allow_inf_nan=False)]


class SpeechRequest(TaskRequest):
    """A text to speak, in the default style, that of a recording, or a mix of style tokens."""

    text: RequestText
    style_weights: Annotated[
        Annotated[list[StyleWeight], Field(max_length=MAX_STYLE_TOKENS, fail_fast=True)] | None,
        Field(description="Weights of all style tokens of the voice."),
    ] = None
    style_audio: Annotated[
        Base64File | None,
        Field(description="Recording to take the style from: WAV, FLAC or OGG, in base64."),
    ] = None

    @model_validator(mode="after")
    def _check_single_style(self) -> Self:
        if self.style_weights is not None and self.style_audio is not None:
            raise ValueError("style_weights and style_audio exclude each other")
        return self

    @classmethod
    def max_bytes(cls, limits: RequestLimits) -> int:
        return limits.max_audio_bytes * 4 // 3 + MAX_OTHER_BYTES


class SpeechPart(TaskResponse):
    """A segment of the speech, usually a sentence."""

    text: str
    duration_seconds: float
    audio: Annotated[Base64File, Field(description="WAV, in base64.")]


class SpeechResponse(TaskResponse):
    """The speech of a text."""

    media_type: ClassVar[str] = "audio/wav"

    audio: Annotated[Base64File, Field(description="WAV, in base64.")]
    duration_seconds: float
    sample_rate: Annotated[int, Field(description="Samples per second.")]
    finished: Annotated[bool, Field(description="false: a segment was cut off at the length limit.")]
    segments: Annotated[list[str], Field(description="Parts of the text that were synthesized at once.")]
    unknown_characters: Annotated[list[str], Field(description="Signs of the text that the voice does not know.")]
    style_weights: Annotated[list[float], Field(description="Weights of the style tokens, averaged over heads.")]

    @property
    def body(self) -> bytes:
        return self.audio

    @classmethod
    def from_prediction(cls, prediction: SpeechPrediction) -> SpeechResponse:
        fields = {name: x for name, x in prediction.to_dict().items() if name in cls.model_fields}
        exact_numbers = {  # ``to_dict`` rounds them
            "duration_seconds": prediction.duration_seconds,
            "style_weights": list(prediction.style_weights),
        }
        return cls(**fields | exact_numbers, audio=audio.encode_wav(prediction.waveform, prediction.sample_rate))


class SpeechService(TaskService[SpeechRequest, SpeechResponse]):
    """Serves a voice."""

    endpoint = "speak"
    summary = "Speak a text."
    supports_streaming = True
    request_type = SpeechRequest
    response_type = SpeechResponse
    predictor: SpeechPredictor

    def __init__(self, predictor: SpeechPredictor, request_limits: RequestLimits) -> None:
        for name in ("soundfile", "librosa", "librosa.effects"):
            import_optional(name, "speech")  # now, not at the first request
        super().__init__(predictor, request_limits)
        self.audio_limits = audio.AudioLimits(
            max_bytes=request_limits.max_audio_bytes,
            max_seconds=request_limits.max_audio_seconds,
            max_samples=request_limits.max_audio_samples,
        )

    def describe(self) -> dict[str, Any]:
        default = self.predictor.get_style_weights(SpeechOptions())
        weights = [] if default is None else [round(x, 4) for x in default[0].mean(0).tolist()]
        texts = EXAMPLE_TEXTS if self.predictor.task.recipe.data.train == BUILTIN_DATASET else ()
        return {
            "sample_rate": self.predictor.audio.config.sample_rate,
            "default_style_weights": weights,
            "max_audio_bytes": self.request_limits.max_audio_bytes,
            "examples": [{"text": text} for text in texts],
        }

    def estimate_tokens(self, request: SpeechRequest) -> int:
        self.request_limits.check_text("text", request.text, self.request_limits.max_speech_chars)
        self._check_style(request)
        parts = self.predictor.split_segments(request.text, "text")
        return sum(len(self.predictor.tokenizer.encode(part)) for part in parts)

    def _check_style(self, request: SpeechRequest) -> None:
        if request.style_weights is None and request.style_audio is None:
            return
        style_tokens = self.predictor.model.style_tokens
        if style_tokens is None:
            raise InputError("this voice has no style tokens: remove style_weights and style_audio")
        num_tokens = style_tokens.config.num_tokens
        if request.style_weights is not None and len(request.style_weights) != num_tokens:
            raise InputError(f"style_weights: {len(request.style_weights)} weights given; this voice has {num_tokens}")
        if request.style_audio is not None and len(request.style_audio) > self.audio_limits.max_bytes:
            size = len(request.style_audio)
            raise RequestTooLarge(str(audio.file_too_large("style_audio", size, self.audio_limits)))

    def predict(self, requests: Sequence[SpeechRequest], listener: ResponseListener) -> list[SpeechResponse]:
        texts = [self.predictor.split_segments(request.text, "text") for request in requests]
        styles = [self._get_style_weights(request) for request in requests]
        weights = [style for style, parts in zip(styles, texts, strict=True) for _ in parts if style is not None]
        segments = self.predictor.synthesize_segments(
            list(itertools.chain.from_iterable(texts)), torch.cat(weights) if weights else None
        )
        responses = []
        for index, (request, style, parts) in enumerate(zip(requests, styles, texts, strict=True)):
            own = list(self._send_segments(index, parts, segments, listener))
            if listener.is_cancelled(index):  # then the waveforms are not computed
                responses.append(SpeechResponse.model_construct(audio=b""))
            else:
                responses.append(
                    SpeechResponse.from_prediction(self.predictor.join_segments(0, request.text, own, style))
                )
        return responses

    def _send_segments(
        self, index: int, texts: Sequence[str], segments: Iterator[SpeechSegment], listener: ResponseListener
    ) -> Iterator[SpeechSegment]:
        """Pass the segments of a request on, and stream them if the client wants that."""
        sample_rate = self.predictor.audio.config.sample_rate
        for text, segment in zip(texts, segments, strict=False):
            if listener.is_streaming(index):
                part = SpeechPart(
                    text=text,
                    duration_seconds=len(segment.waveform) / sample_rate,
                    audio=audio.encode_wav(segment.waveform, sample_rate),
                )
                listener.on_partial(index, part)
            yield segment

    def build_viewer_data(self, request: SpeechRequest, response: SpeechResponse) -> list[ViewerData]:
        first, *_ = self.predictor.split_segments(request.text, "text")
        return [self.predictor.build_segment_view(first, self._get_style_weights(request))]

    def _get_style_weights(self, request: SpeechRequest) -> Tensor | None:
        """The weights of the style tokens ``(1, H, N)``; None: the voice has no style tokens."""
        if request.style_weights is not None:
            return self.predictor.expand_style_weights(request.style_weights)
        if request.style_audio is None:
            return self.predictor.get_style_weights(SpeechOptions())
        processor = self.predictor.audio
        waveform = processor.decode_waveform(request.style_audio, "style_audio", self.audio_limits)
        if isinstance(waveform, InvalidExample):
            is_too_long = waveform.reason == audio.TOO_LONG_REASON
            raise (RequestTooLarge if is_too_long else InputError)(str(waveform))
        return self.predictor.extract_style_weights(processor.mel_spectrogram(waveform))


SERVICE = SpeechService
