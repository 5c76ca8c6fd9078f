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

from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError

__all__ = ["CepstralDistortion", "mel_cepstra", "mel_cepstral_distortion"]

FloatArray = NDArray[np.float64]
NUM_COEFFICIENTS = 13


@dataclass(frozen=True, eq=False)
class CepstralDistortion:
    """The mean over all pairs of frames, and which these are ``(pairs, 2)``."""

    decibels: float
    path: NDArray[np.int64]


def mel_cepstra(
    mel: NDArray[Any], *, range_db: float = 100.0, num_coefficients: int = NUM_COEFFICIENTS
) -> FloatArray:
    """``(T, num_coefficients)`` of log-mel spectra ``(T, M)``; Euclidean distances between them are in dB.

    ``range_db`` is how many dB the numbers from 0 to 1 mean, as in ``-SoundConfig.floor``; 1 for dB.
    """
    mel = np.asarray(mel, np.float64) * range_db
    if mel.ndim != 2 or not len(mel) or not np.isfinite(mel).all():
        raise InputError(f"spectra of shape {mel.shape} came; expected (frames, mel bands), finite")
    bands = mel.shape[1]
    if not 1 <= num_coefficients < bands:
        raise InputError(f"{num_coefficients} coefficients of {bands} bands: from 1 to {bands - 1}")
    angles = np.outer(np.arange(bands) + 0.5, np.arange(1, num_coefficients + 1)) * (math.pi / bands)
    found: FloatArray = mel @ np.cos(angles) * (math.sqrt(2) / bands)
    return found


def mel_cepstral_distortion(
    first: NDArray[Any],
    second: NDArray[Any],
    *,
    range_db: float = 100.0,
    num_coefficients: int = NUM_COEFFICIENTS,
) -> CepstralDistortion:
    """Between two log-mel spectra ``(T, M)`` and ``(U, M)``."""
    if np.shape(first)[1:] != np.shape(second)[1:]:
        raise InputError(
            f"spectra of shapes {np.shape(first)} and {np.shape(second)} differ in their mel bands"
        )
    left, right = (
        mel_cepstra(mel, range_db=range_db, num_coefficients=num_coefficients) for mel in (first, second)
    )
    costs = np.sqrt(np.square(left[:, None] - right).sum(2))
    _, path = import_optional("librosa.sequence", "speech").dtw(C=costs, backtrack=True)
    path = np.asarray(path[::-1], np.int64)
    return CepstralDistortion(float(costs[path[:, 0], path[:, 1]].mean()), path)
