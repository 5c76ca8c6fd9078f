"""Synthesised speech: its spectrogram, its sound, and the style token weights that it was synthesised with.

>>> speech = SynthesizedSpeech(mel=np.ones((6, 80)), frame_seconds=0.125, frames_per_step=3)
>>> speech.num_frames, speech.num_steps, speech.duration
(6, 2, 0.75)
>>> style = StyleTokenWeights(names=("token 0", "token 1"), weights=np.array([[0.5, 0.5], [1.0, 0.0]]))
>>> style.mean_weights
array([0.75, 0.25], dtype=float32)

Viewer data of speech has a layer with a row for each step of the decoder and a column for each symbol; its
``resynthesize`` synthesises the text with other weights of the tokens::

    def synthesize(style: list[float] | None) -> ViewerData:
        result = model.synthesize(text, style)
        return ViewerData.from_weights(
            {"decoder.attention": result.alignment},               # (steps, symbols)
            col_labels=list("annyeong"), title="annyeong",
            speech=SynthesizedSpeech(result.mel, 0.0125, wav_bytes(result.waveform), frames_per_step=3),
            style=StyleTokenWeights(names, result.token_weights),  # (heads, tokens)
            resynthesize=synthesize,                               # called by the viewer's sliders
        )
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.look.viewer.medium import Medium
from jumok.look.viewer.tiles import FloatArray, to_float32_array

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerLayer


@dataclass(frozen=True, eq=False)
class SynthesizedSpeech(Medium):
    """Speech of which each query of a layer synthesises ``frames_per_step`` frames (the reduction factor).

    A layer has ``ceil(T / frames_per_step)`` queries for ``T`` frames; the last of them may have fewer.
    ``wav_bytes`` is a WAV file of the same duration as the frames; without it nothing can be played.
    """

    mel: NDArray[np.float32]  # (T, M): frames, and bands from low to high
    frame_seconds: float = 0.0125  # duration of a frame
    wav_bytes: bytes | None = None
    frames_per_step: int = 1
    note: str = ""  # shown with the alignment, as in "diagonality 0.92, 1 skipped"

    def __post_init__(self) -> None:
        mel = to_float32_array(self.mel)
        object.__setattr__(self, "mel", mel)
        if mel.ndim != 2 or not mel.size or self.frames_per_step < 1 or not 0 < self.frame_seconds < math.inf:
            raise InputError(
                f"mel of shape {mel.shape}, frames_per_step={self.frames_per_step}, "
                f"frame_seconds={self.frame_seconds} is invalid; expected (frames, bands), at least one frame per "
                "query, and a positive duration"
            )
        if not np.isfinite(mel).all():
            raise InputError("the spectrogram contains NaN or infinity")
        if self.wav_bytes is not None:
            _check_durations(_read_wav_duration(self.wav_bytes), self.duration)

    @property
    def num_frames(self) -> int:
        return len(self.mel)

    @property
    def num_steps(self) -> int:
        """The number of queries that synthesise these frames."""
        return -(-self.num_frames // self.frames_per_step)

    @property
    def duration(self) -> float:
        """The duration of all frames in seconds."""
        return self.num_frames * self.frame_seconds

    def matches(self, layer: ViewerLayer) -> bool:
        """Return whether the queries of a layer are the steps."""
        return layer.shape[0] == self.num_steps and layer.kind != "channel"

    def describe_mismatch(self, layers: Sequence[ViewerLayer]) -> str:
        """Return why the queries of none of these layers are the steps."""
        sizes = ", ".join(f"{layer.name} {layer.shape[0]}" for layer in layers[:8])
        return (
            f"a spectrogram of {self.num_frames} frames, {self.frames_per_step} a step, given with these queries: "
            f"{sizes}; expected a layer with {self.num_steps}, one for each step"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the speech as JSON for the viewer; the bands of the spectrogram in order, the lowest first."""
        return {
            "mel": encode_spectrogram(self.mel),
            "shape": list(self.mel.T.shape),
            "frames_per_step": self.frames_per_step,
            "frame_seconds": self.frame_seconds,
            "note": self.note,
            "wav": None if self.wav_bytes is None else base64.b64encode(self.wav_bytes).decode(),
        }


@dataclass(frozen=True, eq=False)
class StyleTokenWeights:
    """The weight of each of N style tokens in synthesised speech, by head.

    If the speech can be synthesised again, each token has a slider from ``-slider_range`` to
    ``slider_range``: a style is linear in its tokens, so negative weights are valid.
    """

    names: tuple[str, ...]
    weights: NDArray[np.float32]  # (heads, N), or (N,) for a single head
    slider_range: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        weights = to_float32_array(self.weights)
        object.__setattr__(self, "weights", weights[None] if weights.ndim == 1 else weights)
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise InputError(f"names={self.names} is invalid; expected a text for each style token, at least one")
        if self.weights.ndim != 2 or self.weights.shape[1] != len(self.names) or not len(self.weights):
            raise InputError(
                f"weights of shape {weights.shape} given for {len(self.names)} style tokens; "
                f"expected (heads, {len(self.names)}), or ({len(self.names)},)"
            )
        if not np.isfinite(self.weights).all():
            raise InputError("the weights of the style tokens contain NaN or infinity")
        if not 0 < self.slider_range < math.inf:
            raise InputError(f"slider_range={self.slider_range} is invalid; expected a positive number, as in 1.0")

    @property
    def mean_weights(self) -> FloatArray:
        """The mean over the heads ``(N,)``: the initial slider positions."""
        return np.asarray(self.weights.mean(0), np.float32)

    @property
    def slider_limit(self) -> float:
        """The end of the sliders: ``slider_range``, or the largest weight if that is larger."""
        return max(self.slider_range, float(np.abs(self.mean_weights).max()))

    def check_weights(self, values: Any) -> list[float]:
        """Check weights that a viewer requests: one for each token, within the limits of its slider."""
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != len(self.names):
            raise InputError(f"weights={str(values)[:40]} is invalid; expected a list of {len(self.names)} numbers")
        for name, weight in zip(self.names, values, strict=True):
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not abs(weight) <= self.slider_limit + 1e-6:  # also rejects NaN
                raise InputError(
                    f"{str(weight)[:40]} given for {name}; expected a number from {-self.slider_limit:g} to "
                    f"{self.slider_limit:g}"
                )
        return [float(weight) for weight in values]

    def to_json(self, *, can_resynthesize: bool) -> dict[str, Any]:
        """Return the style as JSON for the viewer; ``can_resynthesize``: whether its sliders can be moved."""
        return {
            "names": list(self.names),
            "weights": [[round(float(weight), 6) for weight in head] for head in self.weights],
            "slider_limit": self.slider_limit,
            "can_resynthesize": can_resynthesize,
        }


def encode_spectrogram(mel: NDArray[np.float32]) -> str:
    """Encode a spectrogram ``(T, M)`` for the viewer: a byte for each value, band by band, the lowest first."""
    low, high = float(mel.min()), float(mel.max())
    shades = np.round((mel.T - low) * (255 / ((high - low) or 1.0))).astype(np.uint8)  # 8 bits suffice
    return base64.b64encode(shades.tobytes()).decode()


def _read_wav_duration(data: bytes) -> float:
    """Return the duration of a WAV file in seconds, from its header."""
    rate, offset = 0, 12
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        while offset + 8 <= len(data):
            name, size = struct.unpack_from("<4sI", data, offset)
            if name == b"fmt " and offset + 20 <= len(data):
                (rate,) = struct.unpack_from("<I", data, offset + 16)  # bytes per second
            if name == b"data" and rate:
                return float(min(size, len(data) - offset - 8) / rate)
            offset += 8 + size + size % 2
    raise InputError("wav_bytes is not a WAV file; expected one with a header that has rate and length")


def _check_durations(wav_seconds: float, mel_seconds: float) -> None:
    # Windows at the edges and a trimmed end make a small difference; a wrong rate or hop a large one.
    if abs(wav_seconds - mel_seconds) > 0.2 + 0.1 * mel_seconds:
        raise InputError(
            f"audio of {wav_seconds:.2f} s given with frames of {mel_seconds:.2f} s; expected the audio of "
            "these frames: is frame_seconds the hop length divided by the sample rate?"
        )
