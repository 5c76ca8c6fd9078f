"""Speech, served: a text in, a recording of it out, in a style of choice; as it is made, if one likes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jumok.data import sound
from jumok.data.files import needed
from jumok.data.formats import Flaw
from jumok.errors import InputError
from jumok.tasks import served
from jumok.tasks.served import Audience, Bounds, File, Text, TooMuch
from jumok.tasks.speak import BUILT_IN
from jumok.tasks.speaker import Piece, Search, Speaker
from jumok.tasks.spoken import MOST

if TYPE_CHECKING:
    from jumok.look.scene import Scene

__all__ = ["Part", "Said", "Say", "Service"]

EXAMPLES = ("forty two", "ninety nine", "Three. Two. One.")  # for the built-in voices, which say numbers
MORE = 1 << 20  # bytes of a request besides its recording
MAX_TOKENS = 1024  # style tokens, far more than any voice has
Weight = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]


class Say(served.Asked):
    """A text to say, in the usual style, that of a recording, or a mix of style tokens."""

    text: Text
    tokens: Annotated[
        Annotated[list[Weight], Field(max_length=MAX_TOKENS, fail_fast=True)] | None,
        Field(description="How much of each style token, as many as the voice has."),
    ] = None
    style_from: Annotated[
        File | None, Field(description="A recording to take the style from: WAV, FLAC or OGG, in base64.")
    ] = None

    @model_validator(mode="after")
    def _one_style(self) -> Self:
        if self.tokens is not None and self.style_from is not None:
            raise ValueError("tokens and style_from came: a style is taken from one of them")
        return self

    @classmethod
    def most_bytes(cls, bounds: Bounds) -> int:
        return bounds.sound * 4 // 3 + MORE


class Part(served.Answer):
    """What was said in one go: a sentence, mostly."""

    text: str
    seconds: float
    audio: Annotated[File, Field(description="A WAV, in base64.")]


class Said(served.Answer):
    """A text and the sound of it."""

    media: ClassVar[str] = "audio/wav"

    audio: Annotated[File, Field(description="A WAV, in base64.")]
    seconds: float
    rate: Annotated[int, Field(description="Samples a second.")]
    finished: Annotated[bool, Field(description="false: some of it was cut off, for it would not end.")]
    parts: Annotated[list[str], Field(description="What was said in one go, one after the other.")]
    left_out: Annotated[list[str], Field(description="Signs of the text that the voice does not know.")]
    tokens: Annotated[
        list[float], Field(description="How much of each style token is in it, in the mean of the heads.")
    ]

    @property
    def body(self) -> bytes:
        return self.audio


NOTHING = Said(
    audio=b"", seconds=0, rate=0, finished=False, parts=[], left_out=[], tokens=[]
)  # for who has left


class Service:
    """A voice, served."""

    task = "speak"
    says = "Say a text."
    streams = True
    Request = Say
    Response = Said

    def __init__(self, voice: Speaker, bounds: Bounds) -> None:
        for name in ("soundfile", "librosa", "librosa.effects"):
            needed(name, "speech")  # now, not at the first request
        self.voice, self.bounds = voice, bounds
        self.limits = sound.Limits(size=bounds.sound, seconds=bounds.seconds, samples=bounds.samples)

    def about(self) -> dict[str, Any]:
        usual = self.voice.style(Search())
        tokens = [] if usual is None else [round(one, 4) for one in usual[0].mean(0).tolist()]
        known = {"rate": self.voice.sound.config.rate, "tokens": tokens, "max_sound": self.bounds.sound}
        examples = EXAMPLES if self.voice.run.recipe.data.train == BUILT_IN else ()
        return known | {"examples": [{"text": text} for text in examples]}

    def size(self, asked: Say) -> int:
        self.bounds.check_text("text", asked.text, self.bounds.speech)
        count, style = len(asked.tokens or ()), self.voice.model.style
        if style is None and (asked.tokens is not None or asked.style_from is not None):
            raise InputError("this voice has no style tokens: leave tokens and style_from out")
        if asked.tokens is not None and count != style.config.tokens:
            raise InputError(f"tokens: {count} weights came; this voice has {style.config.tokens}")
        if asked.style_from is not None and len(asked.style_from) > self.limits.size:
            raise TooMuch(str(sound.too_large("style_from", len(asked.style_from), self.limits)))
        encode = self.voice.tokenizer.encode
        return sum(len(encode(part)) for part in self.voice.pieces(asked.text, "text"))

    def alike(self, asked: Say) -> Hashable:
        return None

    def predict(self, asked: Sequence[Say], audience: Audience) -> list[Said]:
        texts = [self.voice.pieces(one.text, "text") for one in asked]
        styles = [self._style(one) for one in asked]
        each = [style for style, some in zip(styles, texts, strict=True) for _ in some if style is not None]
        said = self.voice.said([part for some in texts for part in some], torch.cat(each) if each else None)
        answers = []
        for number, (one, style, parts) in enumerate(zip(asked, styles, texts, strict=True)):
            pieces = [self._heard(number, part, next(said), audience) for part in parts]
            gone = audience.gone(number)  # then the rest of its sound is not made
            answers.append(NOTHING if gone else self._told(one.text, parts, pieces, style))
        return answers

    def _heard(self, number: int, text: str, piece: Piece, audience: Audience) -> Piece:
        if audience.hears(number):
            rate = self.voice.sound.config.rate
            seconds = len(piece.wave) / rate
            audience.heard(number, Part(text=text, seconds=seconds, audio=sound.wav(piece.wave, rate)))
        return piece

    def _told(self, text: str, parts: list[str], pieces: Sequence[Piece], style: Tensor | None) -> Said:
        found = self.voice.joined(0, text, pieces, style)
        return Said(
            audio=sound.wav(found.wave, found.rate),
            seconds=found.seconds,
            rate=found.rate,
            finished=found.finished,
            parts=parts,
            left_out=list(found.left_out),
            tokens=list(found.tokens),
        )

    def look(self, asked: Say, answer: Said) -> list[Scene]:
        return [self.voice.scene(answer.parts[0], self._style(asked))]

    def _style(self, asked: Say) -> Tensor | None:
        """Weights of style tokens ``(1, H, N)``; None: the voice has none."""
        if asked.tokens is not None:
            return self.voice.mixed(asked.tokens)
        if asked.style_from is None:
            return self.voice.style(Search())
        wave = self.voice.sound.waveform(asked.style_from, "style_from", self.limits)
        if isinstance(wave, Flaw):
            raise (TooMuch if wave.reason == sound.TOO_LONG else InputError)(str(wave))
        return self.voice.style_of(self.voice.sound.mel(wave))
