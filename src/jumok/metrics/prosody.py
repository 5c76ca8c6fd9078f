"""Prosody of an utterance: pitch, energy and duration.

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

FloatArray = NDArray[np.float64]
MIN_PITCH, MAX_PITCH = 60.0, 500.0  # Hz, the range of voices
PERIODS_PER_FRAME = 3  # length of a frame, in periods of the lowest pitch
HOP_SECONDS = 0.01
MIN_PERIODICITY = 0.5  # smallest normalized autocorrelation of a voiced frame
OCTAVE_COST = 0.03  # a candidate an octave lower must be better by this much
MAX_PITCH_JUMP = 0.15  # octaves: the pitch changes less than this within 10 ms
SILENCE_DB = 40.0  # dB below the loudest frame: quieter frames at both ends are silence


@dataclass(frozen=True)
class Prosody:
    """Prosody of one utterance, without the silence at both ends."""

    pitch: float  # Hz: the geometric mean over voiced frames; NaN if there are none
    energy: float  # mean square, in dB of full scale
    seconds: float  # from the first audible frame to the last
    voiced_share: float  # the share of frames that have a pitch


def measure_prosody(waveform: NDArray[Any], sample_rate: int) -> Prosody:
    """Measure a waveform ``(samples,)``. Ends that are 40 dB below the loudest frame are ignored."""
    waveform = _check_waveform(waveform, sample_rate)
    hop = max(1, round(HOP_SECONDS * sample_rate))
    power = np.square(np.pad(waveform, (0, -len(waveform) % hop))).reshape(-1, hop).mean(1)
    loudest = power.max()
    if not loudest:
        return Prosody(math.nan, -math.inf, 0.0, 0.0)
    audible = np.flatnonzero(power > loudest * 10 ** (-SILENCE_DB / 10))
    first, last = int(audible[0]), int(audible[-1]) + 1
    speech = waveform[first * hop : last * hop]
    pitch = track_pitch(waveform, sample_rate)[first:last]
    with np.errstate(invalid="ignore"):
        median = np.nanmedian(pitch) if np.isfinite(pitch).any() else math.nan
        is_voiced = np.abs(np.log2(pitch / median)) < 1  # an octave off is a tracking error
    return Prosody(
        pitch=float(np.exp(np.log(pitch[is_voiced]).mean())) if is_voiced.any() else math.nan,
        energy=10 * math.log10(float(np.square(speech).mean())),
        seconds=len(speech) / sample_rate,
        voiced_share=float(is_voiced.mean()),
    )


def track_pitch(waveform: NDArray[Any], sample_rate: int) -> FloatArray:
    """The pitch in Hz every 10 ms ``(frames,)``; NaN where there is none.

    Uses the autocorrelation of a frame divided by that of the window (Boersma 1993). Frames far quieter than
    the loudest have no pitch, nor have frames whose pitch differs from that of both neighbours.
    """
    waveform = _check_waveform(waveform, sample_rate)
    hop = max(1, round(HOP_SECONDS * sample_rate))
    size = math.ceil(PERIODS_PER_FRAME * sample_rate / MIN_PITCH)
    num_frames = -(-len(waveform) // hop)
    padded = np.pad(waveform, (size // 2, size + hop))
    frames = padded[np.arange(num_frames)[:, None] * hop + hop // 2 + np.arange(size)]
    frames = frames - frames.mean(1, keepdims=True)
    window = np.hanning(size + 2)[1:-1]
    window_correlation = _autocorrelate(window[None])
    correlation = _autocorrelate(frames * window)
    power = correlation[:, 0].copy()
    lags = np.arange(math.floor(sample_rate / MAX_PITCH), math.ceil(sample_rate / MIN_PITCH) + 1)
    num_lags = lags[-1] + 2
    with np.errstate(divide="ignore", invalid="ignore"):
        window_share = (window_correlation / window_correlation[:, :1])[:, :num_lags]
        periodicity = np.nan_to_num(correlation[:, :num_lags] / power[:, None] / window_share)
    before, here, after = periodicity[:, lags - 1], periodicity[:, lags], periodicity[:, lags + 1]
    is_peak = (here > before) & (here >= after)
    score = np.where(is_peak, here - OCTAVE_COST * np.log2(lags / lags[0]), -np.inf)
    best = score.argmax(1)
    rows = np.arange(num_frames)
    left, top, right = before[rows, best], here[rows, best], after[rows, best]
    curvature = np.where(is_peak[rows, best], left - 2 * top + right, -1.0)
    period = lags[best] + 0.5 * (left - right) / curvature  # vertex of the parabola through the three points
    is_loud = power > power.max() * 10 ** (-SILENCE_DB / 10)
    is_voiced = is_peak[rows, best] & (top > MIN_PERIODICITY) & is_loud
    pitch = np.where(is_voiced, sample_rate / period, np.nan)
    octaves = np.abs(np.diff(np.log2(pitch), prepend=np.nan, append=np.nan))  # NaN beside unvoiced frames
    return np.where((octaves[:-1] < MAX_PITCH_JUMP) | (octaves[1:] < MAX_PITCH_JUMP), pitch, np.nan)


def _autocorrelate(frames: FloatArray) -> FloatArray:
    """The autocorrelation of each row."""
    size = frames.shape[1]
    spectrum = np.fft.rfft(frames, 1 << (2 * size - 1).bit_length())
    return np.fft.irfft(np.abs(spectrum) ** 2)[:, :size]


def _check_waveform(waveform: NDArray[Any], sample_rate: int) -> FloatArray:
    waveform = np.asarray(waveform, np.float64)
    if waveform.ndim != 1 or not len(waveform) or not np.isfinite(waveform).all():
        raise InputError(f"the waveform has shape {waveform.shape}; expected one or more finite samples, (samples,)")
    if sample_rate < 2 * MAX_PITCH:
        raise InputError(f"sample_rate={sample_rate}: expected {2 * MAX_PITCH:g} or more samples per second")
    return waveform
