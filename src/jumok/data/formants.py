"""A small speech synthesiser: sounds told by their formants become a waveform.

The throat gives a pulse at every period of the voice; what the mouth makes of it is heard: a cascade of
resonators, whose frequencies (the *formants*) glide from those of one sound to those of the next. So every
pulse is answered by the impulse response of the mouth at that moment, and the answers are added up. Hisses,
bursts and breath are noise, shaped by a band of their own or by the formants.

All spectra are made for 16 kHz; at 8 kHz the lower half of them is taken. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jumok.data.shapes import Chance

__all__ = ["PHONES", "RATES", "Segment", "Throat", "synthesised"]

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]
Formants = tuple[float, float, float]
RATES = (16000, 8000)
FULL = RATES[0]
PULSE, FRAME = 640, 512  # samples at 16 kHz: of a pulse's answer, of a frame of noise (half of it silence)
GRID = 0.001  # of the voice's phase
EDGE = 0.006  # that a sound takes to become another's loudness, at most, on either side
TAIL = 0.04  # behind the last sound
HIGHER = (3400.0, 4300.0)  # formants that stay
WIDTHS = np.array([60.0, 90.0, 130.0, 220.0, 320.0])  # Hz, of the formants
NASAL = (1000.0, 1350.0, 180.0)  # what the nose takes away, gives, and how widely
VOICE, HISS, BREATH = 2.2, 0.25, 0.02  # so that a vowel has about 0.1


@dataclass(frozen=True)
class Segment:
    """A stretch of sound: its usual seconds, formants at its begin and end, and what makes it sound."""

    seconds: float
    begin: Formants
    end: Formants
    voice: float = 0.0
    hiss: float = 0.0
    band: tuple[float, float] = (4000.0, 2000.0)  # the hiss's middle and width
    breath: float = 0.0
    nasal: float = 0.0


@dataclass(frozen=True)
class Throat:
    """Who speaks: how high, how varied, how long the mouth is, how breathy."""

    pitch: float  # Hz: the mean of the voice by its logarithm, over all that is voiced
    swing: float = 0.25  # how far the pitch falls from begin to end, in its logarithm
    stretch: float = 1.0  # of the formants; 1.15 is a shorter mouth
    breath: float = 0.1
    tilt: float = 0.0  # how much softer the high harmonics are, 0 to 0.9
    jitter: float = 0.008  # of a period


def _vowel(seconds: float, begin: Formants, end: Formants | None = None, voice: float = 1.0) -> Segment:
    return Segment(seconds, begin, end or begin, voice)


def _stop(at: Formants, band: tuple[float, float]) -> tuple[Segment, ...]:
    """Closed, then a burst, then breath."""
    return (
        Segment(0.050, at, at),
        Segment(0.014, at, at, hiss=0.5, band=band),
        Segment(0.036, at, at, hiss=0.04, band=band, breath=1.0),
    )


PHONES: dict[str, tuple[Segment, ...]] = {
    "iy": (_vowel(0.130, (280, 2250, 2950)),),
    "ih": (_vowel(0.090, (400, 1920, 2560)),),
    "eh": (_vowel(0.110, (560, 1770, 2490)),),
    "ah": (_vowel(0.115, (640, 1220, 2550)),),
    "ax": (_vowel(0.060, (480, 1450, 2500), voice=0.7),),
    "ao": (_vowel(0.135, (580, 860, 2500)),),
    "uw": (_vowel(0.160, (310, 900, 2250)),),
    "er": (_vowel(0.150, (480, 1280, 1600)),),
    "ey": (_vowel(0.170, (480, 1900, 2520), (320, 2220, 2800)),),
    "ay": (_vowel(0.190, (730, 1180, 2500), (340, 2060, 2650)),),
    "ow": (_vowel(0.180, (560, 1000, 2400), (370, 780, 2300)),),
    "w": (_vowel(0.070, (290, 640, 2200), voice=0.6),),
    "r": (_vowel(0.075, (320, 1080, 1450), voice=0.65),),
    "l": (_vowel(0.070, (340, 1050, 2850), voice=0.6),),
    "n": (Segment(0.085, (280, 1550, 2550), (280, 1550, 2550), voice=0.45, nasal=1.0),),
    "v": (Segment(0.070, (260, 1100, 2150), (260, 1100, 2150), 0.3, 0.04, (4200, 3500)),),
    "z": (Segment(0.095, (260, 1600, 2550), (260, 1600, 2550), 0.2, 0.14, (5500, 1500)),),
    "f": (Segment(0.100, (300, 1100, 2100), (300, 1100, 2100), 0.0, 0.08, (4500, 4000)),),
    "th": (Segment(0.100, (320, 1350, 2550), (320, 1350, 2550), 0.0, 0.07, (6000, 3000)),),
    "s": (Segment(0.115, (300, 1650, 2600), (300, 1650, 2600), 0.0, 0.24, (5500, 1500)),),
    "t": _stop((350, 1800, 2650), (4200, 1800)),
    "k": _stop((330, 1950, 2450), (2200, 800)),
    " ": (Segment(0.045, (450, 1450, 2450), (450, 1450, 2450)),),
}


def synthesised(
    segments: Sequence[Segment], begins: Array, throat: Throat, rate: int, chance: Chance
) -> Array:
    """The waveform of segments that begin at these times, up to the last of ``begins``, and a little more."""
    length = int(np.ceil((begins[-1] + TAIL) * rate))
    tracks = _Tracks(segments, begins, throat.stretch)
    return _voiced(tracks, throat, length, rate, chance) + _noise(tracks, throat, length, rate, chance)


class _Tracks:
    """What changes with time, to be asked for at any."""

    def __init__(self, segments: Sequence[Segment], begins: Array, stretch: float) -> None:
        self.begin, self.end = float(begins[0]), float(begins[-1])
        lasts = np.diff(begins)
        # A sound has its formants from 30 to 70 % of its time; between, they glide.
        self._glide = np.stack([begins[:-1] + 0.3 * lasts, begins[:-1] + 0.7 * lasts], 1).ravel()
        self._formants = np.array([one for each in segments for one in (each.begin, each.end)]) * stretch
        edge = np.minimum(EDGE, 0.25 * lasts)
        inner = np.stack([begins[:-1] + edge, begins[1:] - edge], 1).ravel()
        self._steps = np.concatenate([[begins[0]], inner, [begins[-1]]])
        self._segments = segments

    def formants(self, times: Array) -> Array:
        """``(times, 3)``"""
        return np.stack([np.interp(times, self._glide, track) for track in self._formants.T], 1)

    def level(self, times: Array, of: Sequence[float]) -> Array:
        """A number of each segment, which rises or falls quickly at its edges, from and to 0."""
        found: Array = np.interp(
            times, self._steps, [0.0, *np.repeat(np.asarray(of), 2), 0.0], left=0, right=0
        )
        return found

    def named(self, times: Array, name: str) -> Array:
        return self.level(times, [getattr(one, name) for one in self._segments])

    def band(self, times: Array) -> Array:
        """``(times, 2)``: the middle and the width of the hiss, without a glide."""
        bands = np.array([one.band for one in self._segments])
        found = np.searchsorted(self._steps[1:-1:2], times, side="right") - 1
        chosen: Array = bands[np.clip(found, 0, len(bands) - 1)]
        return chosen


def _response(formants: Array, nasal: Array, stretch: float, turn: Complex) -> Complex:
    """What the mouth does to each frequency ``(times, bins)``; ``turn`` is z⁻¹ of each."""
    times = len(formants)
    higher = np.broadcast_to(np.array(HIGHER) * stretch, (times, 2))
    every = np.concatenate([formants, higher], 1)  # (times, 5)
    widths = WIDTHS * (1 + np.outer(nasal, [0.5, 1.5, 0.5, 0, 0]))
    found = np.ones((times, len(turn)), np.complex128)
    squared = turn * turn
    gain = np.ones(times)
    for frequency, width in zip(every.T, widths.T, strict=True):
        first, second = _coefficients(frequency, width)
        gain *= 1 - first - second
        found *= 1 - first[:, None] * turn - second[:, None] * squared
    found = gain[:, None] / found
    if nasal.any():
        (one, two), (three, four) = (_coefficients(np.array([f]), np.array([NASAL[2]])) for f in NASAL[:2])
        nose = (1 - one * turn - two * squared) / (1 - three * turn - four * squared)
        nose *= (1 - three - four) / (1 - one - two)
        found *= 1 + nasal[:, None] * (nose - 1)
    return found


def _coefficients(frequency: Array, width: Array) -> tuple[Array, Array]:
    """Of a resonator y[n] = (1 − b − c) x[n] + b y[n−1] + c y[n−2] (Klatt 1980)."""
    decay = np.exp(-np.pi * width / FULL)
    return 2 * decay * np.cos(2 * np.pi * frequency / FULL), -(decay**2)


def _frequencies(size: int, rate: int) -> tuple[Array, Complex]:
    """Those of a transform of so many samples at 16 kHz that ``rate`` has room for, and z⁻¹ of each."""
    frequencies: Array = np.arange(size * rate // FULL // 2 + 1, dtype=np.float64) * (FULL / size)
    return frequencies, np.exp(-2j * np.pi * frequencies / FULL)


def _voiced(tracks: _Tracks, throat: Throat, length: int, rate: int, chance: Chance) -> Array:
    """The answers to all pulses, added up."""
    out = np.zeros(length + PULSE)
    times = np.arange(tracks.begin, tracks.end, GRID)
    course = (times - tracks.begin) / (tracks.end - tracks.begin)
    bend = throat.swing * (0.5 - course) + 0.25 * throat.swing * np.sin(2 * np.pi * course)
    heard = tracks.named(times, "voice") > 0.1
    pitch = throat.pitch * np.exp(bend - bend[heard if heard.any() else slice(None)].mean())
    phase = np.cumsum(pitch) * GRID
    turns = np.arange(1.0, int(phase[-1]))
    turns += throat.jitter * chance.numbers(-1.7, 1.7, (len(turns),))
    pulses = np.interp(turns, phase, times)
    loud = tracks.named(pulses, "voice")
    pulses, loud = pulses[loud > 1e-3], loud[loud > 1e-3]
    if not len(pulses):
        return out[:length]
    frequencies, turn = _frequencies(PULSE, rate)
    answer = _response(tracks.formants(pulses), tracks.named(pulses, "nasal"), throat.stretch, turn)
    # The throat's own spectrum falls by 12 dB an octave above 100 Hz; the lips give 6 dB of them back.
    slow = np.exp(-np.pi * 100 / FULL)
    source = (1 - slow) ** 2 / (1 - slow * turn) ** 2 * (1 - turn) * FULL / 100
    source *= (1 - throat.tilt) / (1 - throat.tilt * turn)
    places = pulses * rate
    whole = np.floor(places).astype(int)
    late = (places - whole) / rate
    shifted = answer * source * np.exp(-2j * np.pi * frequencies * late[:, None])
    strength = VOICE * loud * np.sqrt(120 / np.interp(pulses, times, pitch))
    size = PULSE * rate // FULL
    for place, sound in zip(whole, np.fft.irfft(shifted * strength[:, None], size), strict=True):
        out[place : place + size] += sound * (rate / FULL)
    return out[:length]


def _noise(tracks: _Tracks, throat: Throat, length: int, rate: int, chance: Chance) -> Array:
    """Hiss in its bands, and breath through the formants, frame by frame."""
    half, hop = FRAME // 2, FRAME // 4
    frames = length * (FULL // rate) // hop + 2
    starts = np.arange(frames) * hop  # in noise that begins ``hop`` before the waveform
    times = np.arange(-hop, starts[-1] + half - hop) / FULL
    middles = starts / FULL
    frequencies, turn = _frequencies(FRAME, rate)
    hiss = HISS * tracks.named(times, "hiss")
    breath = BREATH * (tracks.named(times, "breath") + throat.breath * tracks.named(times, "voice"))
    mouth = np.abs(_response(tracks.formants(middles), np.zeros(frames), throat.stretch, turn))
    spectra = np.zeros((frames, len(frequencies)), np.complex128)
    for level, shape in ((hiss, _bands(tracks.band(middles), frequencies)), (breath, mouth)):
        raw = chance.numbers(-1.7, 1.7, times.shape) * level
        framed = raw[starts[:, None] + np.arange(half)] * np.hanning(half + 1)[:-1]
        spectra += np.fft.rfft(framed, FRAME)[:, : len(frequencies)] * shape
    step, size = hop * rate // FULL, FRAME * rate // FULL
    out = np.zeros(frames * step + size)
    for number, sound in enumerate(np.fft.irfft(spectra, size)):
        out[number * step : number * step + size] += sound * (rate / FULL)
    return out[step : step + length]


def _bands(band: Array, frequencies: Array) -> Array:
    middle, width = band[:, :1], band[:, 1:]
    return np.exp(-0.5 * ((frequencies - middle) / width) ** 2) + 0.02
