"""Something said: its spectrogram, its sound, and the style tokens it was said with.

>>> speech = Speech(mel=np.ones((6, 80)), seconds=0.125, wave=None, step=3)
>>> speech.frames, speech.steps, speech.duration
(6, 2, 0.75)
>>> style = Style(names=("token 0", "token 1"), weights=np.array([[0.5, 0.5], [1.0, 0.0]]))
>>> style.mean
array([0.75, 0.25], dtype=float32)

A scene of speech has a layer with a row for each step of the decoder and a column for each symbol; its
``retell`` says the text anew, with other weights of the tokens::

    def said(style: list[float] | None) -> Scene:
        spoken = model.speak(text, style)
        return Scene.of_weights(
            {"decoder.attention": spoken.alignment},               # (steps, symbols)
            cols=list("annyeong"), title="annyeong",
            speech=Speech(spoken.mel, seconds=0.0125, wave=wav_file(spoken.wave), step=3),
            style=Style(names, spoken.token_weights),              # (heads, tokens)
            retell=said,                                           # the viewer's sliders call it
        )
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.look.viewer.attended_document import to_float32_array
from jumok.look.viewer.tiles import FloatArray

__all__ = ["StyleTokenWeights", "SynthesizedSpeech", "speech_to_json", "style_to_json"]


@dataclass(frozen=True, eq=False)
class SynthesizedSpeech:
    """The sound that the queries of a layer speak, ``frames_per_step`` frames each: the decoder's reduction factor.

    A layer has ``ceil(T / frames_per_step)`` queries for ``T`` frames; the last of them may have fewer. ``wave`` is the
    sound as the bytes of a WAV file, as long as the frames are; without it nothing can be played.
    """

    mel: NDArray[np.float32]  # (T, M): frames, and bands from low to high
    frame_seconds: float = 0.0125  # a frame
    wav_bytes: bytes | None = None
    frames_per_step: int = 1
    note: str = ""  # told of the alignment, as in "diagonality 0.92, 1 skipped"

    def __post_init__(self) -> None:
        mel = to_float32_array(self.mel)
        object.__setattr__(self, "mel", mel)
        if mel.ndim != 2 or not mel.size or self.frames_per_step < 1 or not 0 < self.frame_seconds < math.inf:
            raise InputError(
                f"mel of shape {mel.shape}, step={self.frames_per_step}, seconds={self.frame_seconds} came; "
                "expected (frames, bands), whole frames a query, and a frame's duration"
            )
        if not np.isfinite(mel).all():
            raise InputError("the spectrogram holds NaN or infinity; it cannot be drawn")
        if self.wav_bytes is not None:
            _check_durations(_read_wav_duration(self.wav_bytes), self.duration)

    @property
    def num_frames(self) -> int:
        return len(self.mel)

    @property
    def num_steps(self) -> int:
        """How many queries speak these frames."""
        return -(-self.num_frames // self.frames_per_step)

    @property
    def duration(self) -> float:
        """All frames, in seconds."""
        return self.num_frames * self.frame_seconds


@dataclass(frozen=True, eq=False)
class StyleTokenWeights:
    """How much of each of N style tokens is in what was said, by head.

    Where the scene can be told anew, a token has a slider from ``-slider_range`` to ``slider_range``: a style is linear in
    its tokens, and less than none of one is its opposite.
    """

    names: tuple[str, ...]
    weights: NDArray[np.float32]  # (heads, N), or (N,) where there is but one head
    slider_range: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        weights = to_float32_array(self.weights)
        object.__setattr__(self, "weights", weights[None] if weights.ndim == 1 else weights)
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise InputError(f"names={self.names} came; expected a text for each style token, at least one")
        if self.weights.ndim != 2 or self.weights.shape[1] != len(self.names) or not len(self.weights):
            raise InputError(
                f"weights of shape {weights.shape} came for {len(self.names)} style tokens; "
                f"expected (heads, {len(self.names)}), or ({len(self.names)},)"
            )
        if not np.isfinite(self.weights).all():
            raise InputError("the weights of the style tokens hold NaN or infinity")
        if not 0 < self.slider_range < math.inf:
            raise InputError(f"scale={self.slider_range} came; expected how far a slider goes, as in 1.0")

    @property
    def mean_weights(self) -> FloatArray:
        """Over the heads ``(N,)``: where the sliders begin."""
        return np.asarray(self.weights.mean(0), np.float32)

    @property
    def slider_limit(self) -> float:
        """Where sliders end: at ``slider_range``, or farther out where a weight already is."""
        return max(self.slider_range, float(np.abs(self.mean_weights).max()))

    def check_weights(self, values: Any) -> list[float]:
        """The weights that a viewer asks for, checked: one for each token, between the ends of its slider."""
        if (
            not isinstance(values, Sequence)
            or isinstance(values, str | bytes)
            or len(values) != len(self.names)
        ):
            raise InputError(f"weights={str(values)[:40]} came; expected a list of {len(self.names)} numbers")
        for name, weight in zip(self.names, values, strict=True):
            whole = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not whole or not abs(weight) <= self.slider_limit + 1e-6:  # nor is NaN
                raise InputError(
                    f"{str(weight)[:40]} came for {name}; expected a number from {-self.slider_limit:g} to "
                    f"{self.slider_limit:g}"
                )
        return [float(weight) for weight in values]


def speech_to_json(speech: SynthesizedSpeech) -> dict[str, Any]:
    """For the viewer, as plain JSON; the spectrogram's bands one after the other, the lowest first."""
    low, high = float(speech.mel.min()), float(speech.mel.max())
    shades = np.round((speech.mel.T - low) * (255 / ((high - low) or 1.0))).astype(np.uint8)  # 8 bits do
    return {
        "mel": base64.b64encode(shades.tobytes()).decode(),
        "shape": list(shades.shape),
        "step": speech.frames_per_step,
        "seconds": speech.frame_seconds,
        "note": speech.note,
        "wave": None if speech.wav_bytes is None else base64.b64encode(speech.wav_bytes).decode(),
    }


def style_to_json(style: StyleTokenWeights, *, can_resynthesize: bool) -> dict[str, Any]:
    """The same of a style; ``can_resynthesize``: whether its sliders can be moved."""
    weights = [[round(float(weight), 6) for weight in head] for head in style.weights]
    return {
        "names": list(style.names),
        "weights": weights,
        "scale": style.slider_limit,
        "live": can_resynthesize,
    }


def _read_wav_duration(data: bytes) -> float:
    """Of a WAV file, by its header, in seconds."""
    rate, place = 0, 12
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        while place + 8 <= len(data):
            name, size = struct.unpack_from("<4sI", data, place)
            if name == b"fmt " and place + 20 <= len(data):
                (rate,) = struct.unpack_from("<I", data, place + 16)  # bytes a second
            if name == b"data" and rate:
                return float(min(size, len(data) - place - 8) / rate)
            place += 8 + size + size % 2
    raise InputError("the wave is no WAV file; expected its bytes, with a header that tells rate and length")


def _check_durations(wav_seconds: float, mel_seconds: float) -> None:
    # Windows at the edges and a trimmed end differ a little; a wrong rate or hop by much.
    if abs(wav_seconds - mel_seconds) > 0.2 + 0.1 * mel_seconds:
        raise InputError(
            f"a wave of {wav_seconds:.2f} s came with frames of {mel_seconds:.2f} s; expected the sound of these frames: "
            "is seconds the hop divided by the rate?"
        )
