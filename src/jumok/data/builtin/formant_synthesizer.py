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

from jumok.data.builtin.shapes import PortableGenerator

__all__ = ["PHONES", "SAMPLE_RATES", "PhoneSegment", "VoiceParameters", "synthesize"]

FloatArray = NDArray[np.float64]
ComplexArray = NDArray[np.complex128]
Formants = tuple[float, float, float]
SAMPLE_RATES = (16000, 8000)
BASE_SAMPLE_RATE = SAMPLE_RATES[0]
PULSE_SAMPLES, NOISE_FRAME_SAMPLES = (
    640,
    512,
)  # samples at 16 kHz: of a pulse's answer, of a frame of noise (half of it silence)
PHASE_STEP_SECONDS = 0.001  # of the voice's phase
MAX_EDGE_SECONDS = 0.006  # that a sound takes to become another's loudness, at most, on either side
TAIL_SECONDS = 0.04  # behind the last sound
HIGHER_FORMANTS = (3400.0, 4300.0)  # formants that stay
FORMANT_BANDWIDTHS = np.array([60.0, 90.0, 130.0, 220.0, 320.0])  # Hz, of the formants
NASAL_RESONANCE = (1000.0, 1350.0, 180.0)  # what the nose takes away, gives, and how widely
VOICE_GAIN, HISS_GAIN, BREATH_GAIN = 2.2, 0.25, 0.02  # so that a vowel has about 0.1


@dataclass(frozen=True)
class PhoneSegment:
    """A stretch of sound: its usual seconds, formants at its begin and end, and what makes it sound."""

    seconds: float
    start_formants: Formants
    end_formants: Formants
    voice: float = 0.0
    hiss: float = 0.0
    band: tuple[float, float] = (4000.0, 2000.0)  # the hiss's middle and width
    breath: float = 0.0
    nasal: float = 0.0


@dataclass(frozen=True)
class VoiceParameters:
    """Who speaks: how high, how varied, how long the mouth is, how breathy."""

    pitch: float  # Hz: the mean of the voice by its logarithm, over all that is voiced
    pitch_fall: float = 0.25  # how far the pitch falls from begin to end, in its logarithm
    formant_scale: float = 1.0  # of the formants; 1.15 is a shorter mouth
    breath: float = 0.1
    tilt: float = 0.0  # how much softer the high harmonics are, 0 to 0.9
    jitter: float = 0.008  # of a period


def _make_vowel(
    seconds: float, start_formants: Formants, end_formants: Formants | None = None, voice: float = 1.0
) -> PhoneSegment:
    return PhoneSegment(seconds, start_formants, end_formants or start_formants, voice)


def _make_stop(formants: Formants, band: tuple[float, float]) -> tuple[PhoneSegment, ...]:
    """Closed, then a burst, then breath."""
    return (
        PhoneSegment(0.050, formants, formants),
        PhoneSegment(0.014, formants, formants, hiss=0.5, band=band),
        PhoneSegment(0.036, formants, formants, hiss=0.04, band=band, breath=1.0),
    )


PHONES: dict[str, tuple[PhoneSegment, ...]] = {
    "iy": (_make_vowel(0.130, (280, 2250, 2950)),),
    "ih": (_make_vowel(0.090, (400, 1920, 2560)),),
    "eh": (_make_vowel(0.110, (560, 1770, 2490)),),
    "ah": (_make_vowel(0.115, (640, 1220, 2550)),),
    "ax": (_make_vowel(0.060, (480, 1450, 2500), voice=0.7),),
    "ao": (_make_vowel(0.135, (580, 860, 2500)),),
    "uw": (_make_vowel(0.160, (310, 900, 2250)),),
    "er": (_make_vowel(0.150, (480, 1280, 1600)),),
    "ey": (_make_vowel(0.170, (480, 1900, 2520), (320, 2220, 2800)),),
    "ay": (_make_vowel(0.190, (730, 1180, 2500), (340, 2060, 2650)),),
    "ow": (_make_vowel(0.180, (560, 1000, 2400), (370, 780, 2300)),),
    "w": (_make_vowel(0.070, (290, 640, 2200), voice=0.6),),
    "r": (_make_vowel(0.075, (320, 1080, 1450), voice=0.65),),
    "l": (_make_vowel(0.070, (340, 1050, 2850), voice=0.6),),
    "n": (PhoneSegment(0.085, (280, 1550, 2550), (280, 1550, 2550), voice=0.45, nasal=1.0),),
    "v": (PhoneSegment(0.070, (260, 1100, 2150), (260, 1100, 2150), 0.3, 0.04, (4200, 3500)),),
    "z": (PhoneSegment(0.095, (260, 1600, 2550), (260, 1600, 2550), 0.2, 0.14, (5500, 1500)),),
    "f": (PhoneSegment(0.100, (300, 1100, 2100), (300, 1100, 2100), 0.0, 0.08, (4500, 4000)),),
    "th": (PhoneSegment(0.100, (320, 1350, 2550), (320, 1350, 2550), 0.0, 0.07, (6000, 3000)),),
    "s": (PhoneSegment(0.115, (300, 1650, 2600), (300, 1650, 2600), 0.0, 0.24, (5500, 1500)),),
    "t": _make_stop((350, 1800, 2650), (4200, 1800)),
    "k": _make_stop((330, 1950, 2450), (2200, 800)),
    " ": (PhoneSegment(0.045, (450, 1450, 2450), (450, 1450, 2450)),),
}


def synthesize(
    segments: Sequence[PhoneSegment],
    starts: FloatArray,
    voice: VoiceParameters,
    sample_rate: int,
    rng: PortableGenerator,
) -> FloatArray:
    """The waveform of segments that begin at these times, up to the last of ``starts``, and a little more."""
    length = int(np.ceil((starts[-1] + TAIL_SECONDS) * sample_rate))
    tracks = _FormantTracks(segments, starts, voice.formant_scale)
    return _synthesize_voiced(tracks, voice, length, sample_rate, rng) + _synthesize_noise(
        tracks, voice, length, sample_rate, rng
    )


class _FormantTracks:
    """What changes with time, to be asked for at any."""

    def __init__(self, segments: Sequence[PhoneSegment], starts: FloatArray, formant_scale: float) -> None:
        self.start_time, self.end_time = float(starts[0]), float(starts[-1])
        lasts = np.diff(starts)
        # A sound has its formants from 30 to 70 % of its time; between, they glide.
        self._glide = np.stack([starts[:-1] + 0.3 * lasts, starts[:-1] + 0.7 * lasts], 1).ravel()
        self._formants = (
            np.array([one for each in segments for one in (each.start_formants, each.end_formants)])
            * formant_scale
        )
        edge = np.minimum(MAX_EDGE_SECONDS, 0.25 * lasts)
        inner = np.stack([starts[:-1] + edge, starts[1:] - edge], 1).ravel()
        self._steps = np.concatenate([[starts[0]], inner, [starts[-1]]])
        self._segments = segments

    def formants(self, times: FloatArray) -> FloatArray:
        """``(times, 3)``"""
        return np.stack([np.interp(times, self._glide, track) for track in self._formants.T], 1)

    def interpolate_level(self, times: FloatArray, levels: Sequence[float]) -> FloatArray:
        """A number of each segment, which rises or falls quickly at its edges, from and to 0."""
        found: FloatArray = np.interp(
            times, self._steps, [0.0, *np.repeat(np.asarray(levels), 2), 0.0], left=0, right=0
        )
        return found

    def segment_level(self, times: FloatArray, name: str) -> FloatArray:
        return self.interpolate_level(times, [getattr(one, name) for one in self._segments])

    def band(self, times: FloatArray) -> FloatArray:
        """``(times, 2)``: the middle and the width of the hiss, without a glide."""
        bands = np.array([one.band for one in self._segments])
        found = np.searchsorted(self._steps[1:-1:2], times, side="right") - 1
        chosen: FloatArray = bands[np.clip(found, 0, len(bands) - 1)]
        return chosen


def _vocal_tract_response(
    formants: FloatArray, nasal: FloatArray, formant_scale: float, z_inverse: ComplexArray
) -> ComplexArray:
    """What the mouth does to each frequency ``(times, bins)``; ``z_inverse`` is z⁻¹ of each."""
    times = len(formants)
    higher = np.broadcast_to(np.array(HIGHER_FORMANTS) * formant_scale, (times, 2))
    every = np.concatenate([formants, higher], 1)  # (times, 5)
    widths = FORMANT_BANDWIDTHS * (1 + np.outer(nasal, [0.5, 1.5, 0.5, 0, 0]))
    found = np.ones((times, len(z_inverse)), np.complex128)
    squared = z_inverse * z_inverse
    gain = np.ones(times)
    for frequency, width in zip(every.T, widths.T, strict=True):
        first, second = _resonator_coefficients(frequency, width)
        gain *= 1 - first - second
        found *= 1 - first[:, None] * z_inverse - second[:, None] * squared
    found = gain[:, None] / found
    if nasal.any():
        (one, two), (three, four) = (
            _resonator_coefficients(np.array([f]), np.array([NASAL_RESONANCE[2]]))
            for f in NASAL_RESONANCE[:2]
        )
        nose = (1 - one * z_inverse - two * squared) / (1 - three * z_inverse - four * squared)
        nose *= (1 - three - four) / (1 - one - two)
        found *= 1 + nasal[:, None] * (nose - 1)
    return found


def _resonator_coefficients(frequency: FloatArray, bandwidth: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Of a resonator y[n] = (1 − b − c) x[n] + b y[n−1] + c y[n−2] (Klatt 1980)."""
    decay = np.exp(-np.pi * bandwidth / BASE_SAMPLE_RATE)
    return 2 * decay * np.cos(2 * np.pi * frequency / BASE_SAMPLE_RATE), -(decay**2)


def _fft_frequencies(size: int, sample_rate: int) -> tuple[FloatArray, ComplexArray]:
    """The frequencies of a 16 kHz transform that are below half of ``sample_rate``, and z⁻¹ of each."""
    frequencies: FloatArray = np.arange(size * sample_rate // BASE_SAMPLE_RATE // 2 + 1, dtype=np.float64) * (
        BASE_SAMPLE_RATE / size
    )
    return frequencies, np.exp(-2j * np.pi * frequencies / BASE_SAMPLE_RATE)


def _synthesize_voiced(
    tracks: _FormantTracks, voice: VoiceParameters, length: int, sample_rate: int, rng: PortableGenerator
) -> FloatArray:
    """The answers to all pulses, added up."""
    out = np.zeros(length + PULSE_SAMPLES)
    times = np.arange(tracks.start_time, tracks.end_time, PHASE_STEP_SECONDS)
    course = (times - tracks.start_time) / (tracks.end_time - tracks.start_time)
    bend = voice.pitch_fall * (0.5 - course) + 0.25 * voice.pitch_fall * np.sin(2 * np.pi * course)
    heard = tracks.segment_level(times, "voice") > 0.1
    pitch = voice.pitch * np.exp(bend - bend[heard if heard.any() else slice(None)].mean())
    phase = np.cumsum(pitch) * PHASE_STEP_SECONDS
    turns = np.arange(1.0, int(phase[-1]))
    turns += voice.jitter * rng.uniform_array(-1.7, 1.7, (len(turns),))
    pulses = np.interp(turns, phase, times)
    loud = tracks.segment_level(pulses, "voice")
    pulses, loud = pulses[loud > 1e-3], loud[loud > 1e-3]
    if not len(pulses):
        return out[:length]
    frequencies, turn = _fft_frequencies(PULSE_SAMPLES, sample_rate)
    answer = _vocal_tract_response(
        tracks.formants(pulses), tracks.segment_level(pulses, "nasal"), voice.formant_scale, turn
    )
    # The throat's own spectrum falls by 12 dB an octave above 100 Hz; the lips give 6 dB of them back.
    slow = np.exp(-np.pi * 100 / BASE_SAMPLE_RATE)
    source = (1 - slow) ** 2 / (1 - slow * turn) ** 2 * (1 - turn) * BASE_SAMPLE_RATE / 100
    source *= (1 - voice.tilt) / (1 - voice.tilt * turn)
    places = pulses * sample_rate
    whole = np.floor(places).astype(int)
    late = (places - whole) / sample_rate
    shifted = answer * source * np.exp(-2j * np.pi * frequencies * late[:, None])
    strength = VOICE_GAIN * loud * np.sqrt(120 / np.interp(pulses, times, pitch))
    size = PULSE_SAMPLES * sample_rate // BASE_SAMPLE_RATE
    for place, sound in zip(whole, np.fft.irfft(shifted * strength[:, None], size), strict=True):
        out[place : place + size] += sound * (sample_rate / BASE_SAMPLE_RATE)
    return out[:length]


def _synthesize_noise(
    tracks: _FormantTracks, voice: VoiceParameters, length: int, sample_rate: int, rng: PortableGenerator
) -> FloatArray:
    """Hiss in its bands, and breath through the formants, frame by frame."""
    half, hop = NOISE_FRAME_SAMPLES // 2, NOISE_FRAME_SAMPLES // 4
    frames = length * (BASE_SAMPLE_RATE // sample_rate) // hop + 2
    starts = np.arange(frames) * hop  # in noise that begins ``hop`` before the waveform
    times = np.arange(-hop, starts[-1] + half - hop) / BASE_SAMPLE_RATE
    middles = starts / BASE_SAMPLE_RATE
    frequencies, turn = _fft_frequencies(NOISE_FRAME_SAMPLES, sample_rate)
    hiss = HISS_GAIN * tracks.segment_level(times, "hiss")
    breath = BREATH_GAIN * (
        tracks.segment_level(times, "breath") + voice.breath * tracks.segment_level(times, "voice")
    )
    mouth = np.abs(
        _vocal_tract_response(tracks.formants(middles), np.zeros(frames), voice.formant_scale, turn)
    )
    spectra = np.zeros((frames, len(frequencies)), np.complex128)
    for level, shape in ((hiss, _hiss_spectrum(tracks.band(middles), frequencies)), (breath, mouth)):
        raw = rng.uniform_array(-1.7, 1.7, times.shape) * level
        framed = raw[starts[:, None] + np.arange(half)] * np.hanning(half + 1)[:-1]
        spectra += np.fft.rfft(framed, NOISE_FRAME_SAMPLES)[:, : len(frequencies)] * shape
    step, size = hop * sample_rate // BASE_SAMPLE_RATE, NOISE_FRAME_SAMPLES * sample_rate // BASE_SAMPLE_RATE
    out = np.zeros(frames * step + size)
    for number, sound in enumerate(np.fft.irfft(spectra, size)):
        out[number * step : number * step + size] += sound * (sample_rate / BASE_SAMPLE_RATE)
    return out[step : step + length]


def _hiss_spectrum(band: FloatArray, frequencies: FloatArray) -> FloatArray:
    middle, width = band[:, :1], band[:, 1:]
    return np.exp(-0.5 * ((frequencies - middle) / width) ** 2) + 0.02
