"""Speech, served: a text in, a recording of it out, in a style of choice; as it is made, if one likes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jumok.data import audio
from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError
from jumok.tasks import api as tasks_api
from jumok.tasks.api import Base64File, RequestLimits, RequestText, RequestTooLarge, ResponseListener
from jumok.tasks.speak.prediction import MAX_STYLE_WEIGHT
from jumok.tasks.speak.predictor import SpeechOptions, SpeechPredictor, SpeechSegment
from jumok.tasks.speak.task import BUILTIN_DATASET

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["SpeechPart", "SpeechRequest", "SpeechResponse", "SpeechService"]

EXAMPLE_TEXTS = ("forty two", "ninety nine", "Three. Two. One.")  # for the built-in voices, which say numbers
MAX_OTHER_BYTES = 1 << 20  # bytes of a request besides its recording
MAX_STYLE_TOKENS = 1024  # style tokens, far more than any voice has
StyleWeight = Annotated[float, Field(ge=-MAX_STYLE_WEIGHT, le=MAX_STYLE_WEIGHT, allow_inf_nan=False)]


class SpeechRequest(tasks_api.TaskRequest):
    """A text to say, in the usual style, that of a recording, or a mix of style tokens."""

    text: RequestText
    style_weights: Annotated[
        Annotated[list[StyleWeight], Field(max_length=MAX_STYLE_TOKENS, fail_fast=True)] | None,
        Field(description="How much of each style token, as many as the voice has."),
    ] = None
    style_audio: Annotated[
        Base64File | None,
        Field(description="A recording to take the style from: WAV, FLAC or OGG, in base64."),
    ] = None

    @model_validator(mode="after")
    def _check_single_style(self) -> Self:
        if self.style_weights is not None and self.style_audio is not None:
            raise ValueError("style_weights and style_audio came: a style is taken from one of them")
        return self

    @classmethod
    def max_bytes(cls, limits: RequestLimits) -> int:
        return limits.max_audio_bytes * 4 // 3 + MAX_OTHER_BYTES


class SpeechPart(tasks_api.TaskResponse):
    """What was said in one go: a sentence, mostly."""

    text: str
    duration_seconds: float
    audio: Annotated[Base64File, Field(description="A WAV, in base64.")]


class SpeechResponse(tasks_api.TaskResponse):
    """A text and the sound of it."""

    media_type: ClassVar[str] = "audio/wav"

    audio: Annotated[Base64File, Field(description="A WAV, in base64.")]
    duration_seconds: float
    sample_rate: Annotated[int, Field(description="Samples a second.")]
    finished: Annotated[bool, Field(description="false: some of it was cut off, for it would not end.")]
    segments: Annotated[list[str], Field(description="What was said in one go, one after the other.")]
    unknown_characters: Annotated[
        list[str], Field(description="Signs of the text that the voice does not know.")
    ]
    style_weights: Annotated[
        list[float], Field(description="How much of each style token is in it, in the mean of the heads.")
    ]

    @property
    def body(self) -> bytes:
        return self.audio


CANCELLED_RESPONSE = SpeechResponse(
    audio=b"",
    duration_seconds=0,
    sample_rate=0,
    finished=False,
    segments=[],
    unknown_characters=[],
    style_weights=[],
)  # for who has left


class SpeechService:
    """A voice, served."""

    endpoint = "speak"
    summary = "Say a text."
    supports_streaming = True
    request_type = SpeechRequest
    response_type = SpeechResponse

    def __init__(self, predictor: SpeechPredictor, request_limits: RequestLimits) -> None:
        for name in ("soundfile", "librosa", "librosa.effects"):
            import_optional(name, "speech")  # now, not at the first request
        self.predictor, self.request_limits = predictor, request_limits
        self.audio_limits = audio.AudioLimits(
            max_bytes=request_limits.max_audio_bytes,
            max_seconds=request_limits.max_audio_seconds,
            max_samples=request_limits.max_audio_samples,
        )

    def describe(self) -> dict[str, Any]:
        usual = self.predictor.get_style_weights(SpeechOptions())
        tokens = [] if usual is None else [round(one, 4) for one in usual[0].mean(0).tolist()]
        known = {
            "sample_rate": self.predictor.audio.config.sample_rate,
            "default_style_weights": tokens,
            "max_audio_bytes": self.request_limits.max_audio_bytes,
        }
        examples = EXAMPLE_TEXTS if self.predictor.run.recipe.data.train == BUILTIN_DATASET else ()
        return known | {"examples": [{"text": text} for text in examples]}

    def estimate_tokens(self, request: SpeechRequest) -> int:
        self.request_limits.check_text("text", request.text, self.request_limits.max_speech_chars)
        count, style = len(request.style_weights or ()), self.predictor.model.style_tokens
        if style is None and (request.style_weights is not None or request.style_audio is not None):
            raise InputError("this voice has no style tokens: leave style_weights and style_audio out")
        if request.style_weights is not None and count != style.config.num_tokens:
            raise InputError(f"style_weights: {count} weights came; this voice has {style.config.num_tokens}")
        if request.style_audio is not None and len(request.style_audio) > self.audio_limits.max_bytes:
            raise RequestTooLarge(
                str(audio.file_too_large("style_audio", len(request.style_audio), self.audio_limits))
            )
        encode = self.predictor.tokenizer.encode
        return sum(len(encode(part)) for part in self.predictor.split_segments(request.text, "text"))

    def get_batch_key(self, request: SpeechRequest) -> Hashable:
        return None

    def predict(self, requests: Sequence[SpeechRequest], listener: ResponseListener) -> list[SpeechResponse]:
        texts = [self.predictor.split_segments(one.text, "text") for one in requests]
        styles = [self._get_style_weights(one) for one in requests]
        each = [style for style, some in zip(styles, texts, strict=True) for _ in some if style is not None]
        said = self.predictor.synthesize_segments(
            [part for some in texts for part in some], torch.cat(each) if each else None
        )
        answers = []
        for number, (one, style, parts) in enumerate(zip(requests, styles, texts, strict=True)):
            pieces = [self._send_segment(number, part, next(said), listener) for part in parts]
            gone = listener.is_cancelled(number)  # then the rest of its sound is not made
            answers.append(
                CANCELLED_RESPONSE if gone else self._build_response(one.text, parts, pieces, style)
            )
        return answers

    def _send_segment(
        self, index: int, text: str, segment: SpeechSegment, listener: ResponseListener
    ) -> SpeechSegment:
        if listener.is_streaming(index):
            rate = self.predictor.audio.config.sample_rate
            seconds = len(segment.waveform) / rate
            listener.on_partial(
                index,
                SpeechPart(
                    text=text, duration_seconds=seconds, audio=audio.encode_wav(segment.waveform, rate)
                ),
            )
        return segment

    def _build_response(
        self,
        text: str,
        segment_texts: list[str],
        segments: Sequence[SpeechSegment],
        style_weights: Tensor | None,
    ) -> SpeechResponse:
        found = self.predictor.join_segments(0, text, segments, style_weights)
        return SpeechResponse(
            audio=audio.encode_wav(found.waveform, found.sample_rate),
            duration_seconds=found.duration_seconds,
            sample_rate=found.sample_rate,
            finished=found.finished,
            segments=segment_texts,
            unknown_characters=list(found.unknown_characters),
            style_weights=list(found.style_weights),
        )

    def build_viewer_data(self, request: SpeechRequest, response: SpeechResponse) -> list[ViewerData]:
        return [self.predictor.build_segment_view(response.segments[0], self._get_style_weights(request))]

    def _get_style_weights(self, request: SpeechRequest) -> Tensor | None:
        """Weights of style tokens ``(1, H, N)``; None: the voice has none."""
        if request.style_weights is not None:
            return self.predictor.expand_style_weights(request.style_weights)
        if request.style_audio is None:
            return self.predictor.get_style_weights(SpeechOptions())
        wave = self.predictor.audio.decode_waveform(request.style_audio, "style_audio", self.audio_limits)
        if isinstance(wave, InvalidExample):
            raise (RequestTooLarge if wave.reason == audio.TOO_LONG_REASON else InputError)(str(wave))
        return self.predictor.extract_style_weights(self.predictor.audio.mel_spectrogram(wave))


Service = SpeechService
