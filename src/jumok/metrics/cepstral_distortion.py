"""Mel-cepstral distortion in dB: the distance between synthesized speech and a recording.

Two utterances of the same text have different lengths. Dynamic time warping aligns their frames such that
they differ least. The distance of two frames is (10 / ln 10) · √(2 Σ (c − c′)²) over the cepstral
coefficients 1 to 13, which describe the shape of the spectrum without its loudness (c0) and without the
harmonics of the voice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError

FloatArray = NDArray[np.float64]
NUM_COEFFICIENTS = 13


@dataclass(frozen=True, eq=False)
class CepstralDistortion:
    """The mean distance of the aligned frames, and their indices ``(pairs, 2)``."""

    decibels: float
    path: NDArray[np.int64]


def mel_cepstra(mel: NDArray[Any], *, range_db: float = 100.0, num_coefficients: int = NUM_COEFFICIENTS) -> FloatArray:
    """Cepstra ``(T, num_coefficients)`` of log-mel spectra ``(T, M)``. Their Euclidean distances are in dB.

    ``range_db`` is the range in dB that the values from 0 to 1 represent, such as
    ``-AudioConfig.min_level_db``. Use 1 for spectra in dB.
    """
    mel = np.asarray(mel, np.float64) * range_db
    if mel.ndim != 2 or not len(mel) or not np.isfinite(mel).all():
        raise InputError(f"the spectra have shape {mel.shape}; expected (frames, mel bands), finite")
    n_mels = mel.shape[1]
    if not 1 <= num_coefficients < n_mels:
        raise InputError(f"num_coefficients={num_coefficients}: expected 1 to {n_mels - 1}, for {n_mels} mel bands")
    angles = np.outer(np.arange(n_mels) + 0.5, np.arange(1, num_coefficients + 1)) * (math.pi / n_mels)
    cepstra: FloatArray = mel @ np.cos(angles) * (math.sqrt(2) / n_mels)
    return cepstra


def mel_cepstral_distortion(
    first: NDArray[Any],
    second: NDArray[Any],
    *,
    range_db: float = 100.0,
    num_coefficients: int = NUM_COEFFICIENTS,
) -> CepstralDistortion:
    """The distortion between two log-mel spectra ``(T, M)`` and ``(U, M)``."""
    if np.shape(first)[1:] != np.shape(second)[1:]:
        raise InputError(
            f"the spectra have shapes {np.shape(first)} and {np.shape(second)}; expected the same mel bands"
        )
    left, right = (mel_cepstra(mel, range_db=range_db, num_coefficients=num_coefficients) for mel in (first, second))
    costs = np.sqrt(np.square(left[:, None] - right).sum(2))
    _, path = import_optional("librosa.sequence", "speech").dtw(C=costs, backtrack=True)
    path = np.asarray(path[::-1], np.int64)
    return CepstralDistortion(float(costs[path[:, 0], path[:, 1]].mean()), path)
