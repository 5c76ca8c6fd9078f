"""How a voice sounds, in three numbers: how high, how loud, how long.

>>> wave = np.sin(2 * np.pi * 220 * np.arange(16000) / 16000)
>>> prosody = measure_prosody(wave, 16000)
>>> round(prosody.pitch), round(prosody.energy), round(prosody.seconds, 1)
(220, -3, 1.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError

__all__ = ["Prosody", "measure_prosody", "track_pitch"]

FloatArray = NDArray[np.float64]
MIN_PITCH, MAX_PITCH = 60.0, 500.0  # Hz, of voices
PERIODS_PER_FRAME = 3  # of the lowest voice, that a frame looks at
HOP_SECONDS = 0.01  # seconds
MIN_PERIODICITY = 0.5  # how like itself one period later a frame is, at least
OCTAVE_COST = 0.03  # what a candidate an octave lower has to be better by
MAX_PITCH_JUMP = 0.15  # octaves, by which the pitch does not change in 10 ms
SILENCE_DB = 40.0  # dB below the loudest frame, where sound begins and ends


@dataclass(frozen=True)
class Prosody:
    """Of one utterance."""

    pitch: float  # Hz: the mean over voiced frames, by its logarithm; NaN if there are none
    energy: float  # dB of full scale: the mean square between begin and end
    seconds: float  # from the first frame that is heard to the last
    voiced_share: float  # the share of frames between them that have a pitch


def measure_prosody(waveform: NDArray[Any], sample_rate: int) -> Prosody:
    """Of a waveform ``(samples,)``, without what is 40 dB softer than its loudest frame, at both ends."""
    waveform = _check_waveform(waveform, sample_rate)
    hop = max(1, round(HOP_SECONDS * sample_rate))
    power = np.square(np.pad(waveform, (0, -len(waveform) % hop))).reshape(-1, hop).mean(1)
    loudest = power.max()
    if not loudest:
        return Prosody(math.nan, -math.inf, 0.0, 0.0)
    heard = np.flatnonzero(power > loudest * 10 ** (-SILENCE_DB / 10))
    first, last = int(heard[0]), int(heard[-1]) + 1
    part = waveform[first * hop : last * hop]
    found = track_pitch(waveform, sample_rate)[first:last]
    with np.errstate(invalid="ignore"):
        middle = np.nanmedian(found) if np.isfinite(found).any() else math.nan
        voiced = np.abs(np.log2(found / middle)) < 1  # an octave off is an error, not a voice
    return Prosody(
        pitch=float(np.exp(np.log(found[voiced]).mean())) if voiced.any() else math.nan,
        energy=10 * math.log10(float(np.square(part).mean())),
        seconds=len(part) / sample_rate,
        voiced_share=float(voiced.mean()),
    )


def track_pitch(waveform: NDArray[Any], sample_rate: int) -> FloatArray:
    """The pitch every 10 ms ``(frames,)``, NaN where there is none.

    By autocorrelation (Boersma 1993): a frame is as like itself a period later as it is periodic, once the
    window's own share is divided out. Frames far softer than the loudest have none, nor those that
    no neighbour is like.
    """
    waveform = _check_waveform(waveform, sample_rate)
    hop, size = (
        max(1, round(HOP_SECONDS * sample_rate)),
        math.ceil(PERIODS_PER_FRAME * sample_rate / MIN_PITCH),
    )
    frames = -(-len(waveform) // hop)
    padded = np.pad(waveform, (size // 2, size + hop))
    framed = padded[np.arange(frames)[:, None] * hop + hop // 2 + np.arange(size)]
    framed = framed - framed.mean(1, keepdims=True)
    window = np.hanning(size + 2)[1:-1]
    own = _autocorrelate(window[None])
    found = _autocorrelate(framed * window)
    loud = found[:, 0].copy()
    lags = np.arange(math.floor(sample_rate / MAX_PITCH), math.ceil(sample_rate / MIN_PITCH) + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        alike = np.nan_to_num(
            found[:, : lags[-1] + 2] / loud[:, None] / (own / own[:, :1])[:, : lags[-1] + 2]
        )
    before, here, after = alike[:, lags - 1], alike[:, lags], alike[:, lags + 1]
    peak = (here > before) & (here >= after)
    score = np.where(peak, here - OCTAVE_COST * np.log2(lags / lags[0]), -np.inf)
    best = score.argmax(1)
    rows = np.arange(frames)
    one, two, three = before[rows, best], here[rows, best], after[rows, best]
    bend = np.where(peak[rows, best], one - 2 * two + three, -1.0)
    period = lags[best] + 0.5 * (one - three) / bend  # the top of a parabola through the three
    voiced = peak[rows, best] & (two > MIN_PERIODICITY) & (loud > loud.max() * 10 ** (-SILENCE_DB / 10))
    pitch = np.where(voiced, sample_rate / period, np.nan)
    octaves = np.abs(np.diff(np.log2(pitch), prepend=np.nan, append=np.nan))  # NaN beside what has no pitch
    return np.where((octaves[:-1] < MAX_PITCH_JUMP) | (octaves[1:] < MAX_PITCH_JUMP), pitch, np.nan)


def _autocorrelate(frames: FloatArray) -> FloatArray:
    """Of each row with itself, by how far it is shifted."""
    size = frames.shape[1]
    spectrum = np.fft.rfft(frames, 1 << (2 * size - 1).bit_length())
    return np.fft.irfft(np.abs(spectrum) ** 2)[:, :size]


def _check_waveform(waveform: NDArray[Any], sample_rate: int) -> FloatArray:
    waveform = np.asarray(waveform, np.float64)
    if waveform.ndim != 1 or not len(waveform) or not np.isfinite(waveform).all():
        raise InputError(
            f"a waveform of shape {waveform.shape} came; expected (samples,), finite, one or more"
        )
    if sample_rate < 2 * MAX_PITCH:
        raise InputError(f"rate {sample_rate}: samples a second, {2 * MAX_PITCH:g} or more")
    return waveform
