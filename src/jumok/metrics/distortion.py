"""How far synthesised speech is from a recording: mel-cepstral distortion, in dB.

Two utterances of one text have different lengths: dynamic time warping lays the frames of the one along those
of the other so that they differ least. The difference of two frames is that of their cepstra, from the first
coefficient to the 13th: the shape of the spectrum, without its loudness (c0) and without the harmonics of the
voice. In dB it is what the field gives, (10 / ln 10) · √(2 Σ (c − c′)²).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.files import needed
from jumok.errors import InputError

__all__ = ["Distortion", "cepstra", "distortion"]

Array = NDArray[np.float64]
COEFFICIENTS = 13


@dataclass(frozen=True, eq=False)
class Distortion:
    """The mean over all pairs of frames, and which these are ``(pairs, 2)``."""

    decibels: float
    path: NDArray[np.int64]


def cepstra(mel: NDArray[Any], *, spans: float = 100.0, coefficients: int = COEFFICIENTS) -> Array:
    """``(T, coefficients)`` of log-mel spectra ``(T, M)``; Euclidean distances between them are in dB.

    ``spans`` is how many dB the numbers from 0 to 1 mean, as in ``-SoundConfig.floor``; 1 for dB.
    """
    mel = np.asarray(mel, np.float64) * spans
    if mel.ndim != 2 or not len(mel) or not np.isfinite(mel).all():
        raise InputError(f"spectra of shape {mel.shape} came; expected (frames, mel bands), finite")
    bands = mel.shape[1]
    if not 1 <= coefficients < bands:
        raise InputError(f"{coefficients} coefficients of {bands} bands: from 1 to {bands - 1}")
    angles = np.outer(np.arange(bands) + 0.5, np.arange(1, coefficients + 1)) * (math.pi / bands)
    found: Array = mel @ np.cos(angles) * (math.sqrt(2) / bands)
    return found


def distortion(
    one: NDArray[Any], other: NDArray[Any], *, spans: float = 100.0, coefficients: int = COEFFICIENTS
) -> Distortion:
    """Between two log-mel spectra ``(T, M)`` and ``(U, M)``."""
    if np.shape(one)[1:] != np.shape(other)[1:]:
        raise InputError(f"spectra of shapes {np.shape(one)} and {np.shape(other)} differ in their mel bands")
    left, right = (cepstra(mel, spans=spans, coefficients=coefficients) for mel in (one, other))
    costs = np.sqrt(np.square(left[:, None] - right).sum(2))
    _, path = needed("librosa.sequence", "speech").dtw(C=costs, backtrack=True)
    path = np.asarray(path[::-1], np.int64)
    return Distortion(float(costs[path[:, 0], path[:, 1]].mean()), path)
