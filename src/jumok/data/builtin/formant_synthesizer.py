"""A small formant synthesizer.

The glottis emits a pulse in every period of the voice. The vocal tract filters it: a cascade of resonators,
whose frequencies (the *formants*) move from those of one phone to those of the next. The waveform is the sum
of the impulse responses of the vocal tract at the times of the pulses. Fricatives, bursts and aspiration are
noise, filtered by a band or by the formants.

All spectra are computed for 16 kHz; 8 kHz uses their lower half. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jumok.data.builtin.shapes import PortableGenerator

FloatArray = NDArray[np.float64]
ComplexArray = NDArray[np.complex128]
Formants = tuple[float, float, float]
SAMPLE_RATES = (16000, 8000)
BASE_SAMPLE_RATE = SAMPLE_RATES[0]
# Samples at 16 kHz of an impulse response, and of a frame of noise, half of which is zero.
PULSE_SAMPLES, NOISE_FRAME_SAMPLES = 640, 512
PHASE_STEP_SECONDS = 0.001  # resolution of the phase of the voice
MAX_EDGE_SECONDS = 0.006  # longest transition between levels, on either side of a boundary
TAIL_SECONDS = 0.04  # after the last phone
HIGHER_FORMANTS = (3400.0, 4300.0)  # constant formants, Hz
FORMANT_BANDWIDTHS = np.array([60.0, 90.0, 130.0, 220.0, 320.0])  # Hz
NASAL_RESONANCE = (1000.0, 1350.0, 180.0)  # antiresonance, resonance and bandwidth, Hz
VOICE_GAIN, HISS_GAIN, BREATH_GAIN = 2.2, 0.25, 0.02  # a vowel has a level of about 0.1


@dataclass(frozen=True)
class PhoneSegment:
    """A segment of a phone: its normal duration, start and end formants, and the levels of its sources."""

    seconds: float
    start_formants: Formants
    end_formants: Formants
    voice: float = 0.0
    hiss: float = 0.0
    band: tuple[float, float] = (4000.0, 2000.0)  # centre and width of the hiss, Hz
    breath: float = 0.0
    nasal: float = 0.0


@dataclass(frozen=True)
class VoiceParameters:
    """Parameters of a speaker."""

    pitch: float  # Hz: geometric mean over voiced segments
    pitch_fall: float = 0.25  # fall of the logarithm of the pitch from start to end
    formant_scale: float = 1.0  # 1.15 is a shorter vocal tract
    breath: float = 0.1
    tilt: float = 0.0  # attenuation of high harmonics, 0 to 0.9
    jitter: float = 0.008  # variation of a period


def _make_vowel(
    seconds: float, start_formants: Formants, end_formants: Formants | None = None, voice: float = 1.0
) -> PhoneSegment:
    return PhoneSegment(seconds, start_formants, end_formants or start_formants, voice)


def _make_stop(formants: Formants, band: tuple[float, float]) -> tuple[PhoneSegment, ...]:
    """A closure, a burst and aspiration."""
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
    """The waveform of segments with these start times.

    The last of ``starts`` is the end of the last segment.
    """
    length = int(np.ceil((starts[-1] + TAIL_SECONDS) * sample_rate))
    tracks = _FormantTracks(segments, starts, voice.formant_scale)
    return _synthesize_voiced(tracks, voice, length, sample_rate, rng) + _synthesize_noise(
        tracks, voice, length, sample_rate, rng
    )


class _FormantTracks:
    """Parameters that change with time."""

    def __init__(self, segments: Sequence[PhoneSegment], starts: FloatArray, formant_scale: float) -> None:
        self.start_time, self.end_time = float(starts[0]), float(starts[-1])
        durations = np.diff(starts)
        # A segment has its own formants from 30 to 70 % of its time. In between, they are interpolated.
        self._glide = np.stack([starts[:-1] + 0.3 * durations, starts[:-1] + 0.7 * durations], 1).ravel()
        self._formants = (
            np.array([formants for segment in segments for formants in (segment.start_formants, segment.end_formants)])
            * formant_scale
        )
        edge = np.minimum(MAX_EDGE_SECONDS, 0.25 * durations)
        inner = np.stack([starts[:-1] + edge, starts[1:] - edge], 1).ravel()
        self._steps = np.concatenate([[starts[0]], inner, [starts[-1]]])
        self._segments = segments

    def formants(self, times: FloatArray) -> FloatArray:
        """``(times, 3)``"""
        return np.stack([np.interp(times, self._glide, track) for track in self._formants.T], 1)

    def interpolate_level(self, times: FloatArray, levels: Sequence[float]) -> FloatArray:
        """One level per segment, interpolated quickly at the boundaries, and 0 outside."""
        interpolated: FloatArray = np.interp(
            times, self._steps, [0.0, *np.repeat(np.asarray(levels), 2), 0.0], left=0, right=0
        )
        return interpolated

    def segment_level(self, times: FloatArray, name: str) -> FloatArray:
        return self.interpolate_level(times, [getattr(segment, name) for segment in self._segments])

    def band(self, times: FloatArray) -> FloatArray:
        """``(times, 2)``: the centre and the width of the hiss, without interpolation."""
        bands = np.array([segment.band for segment in self._segments])
        indices = np.searchsorted(self._steps[1:-1:2], times, side="right") - 1
        segment_bands: FloatArray = bands[np.clip(indices, 0, len(bands) - 1)]
        return segment_bands


def _vocal_tract_response(
    formants: FloatArray, nasal: FloatArray, formant_scale: float, z_inverse: ComplexArray
) -> ComplexArray:
    """The frequency response of the vocal tract ``(times, bins)``; ``z_inverse`` is z⁻¹ of each frequency."""
    num_times = len(formants)
    higher = np.broadcast_to(np.array(HIGHER_FORMANTS) * formant_scale, (num_times, 2))
    all_formants = np.concatenate([formants, higher], 1)  # (times, 5)
    widths = FORMANT_BANDWIDTHS * (1 + np.outer(nasal, [0.5, 1.5, 0.5, 0, 0]))
    response = np.ones((num_times, len(z_inverse)), np.complex128)
    squared = z_inverse * z_inverse
    gain = np.ones(num_times)
    for frequency, width in zip(all_formants.T, widths.T, strict=True):
        b, c = _resonator_coefficients(frequency, width)
        gain *= 1 - b - c
        response *= 1 - b[:, None] * z_inverse - c[:, None] * squared
    response = gain[:, None] / response
    if nasal.any():
        (zero_b, zero_c), (pole_b, pole_c) = (
            _resonator_coefficients(np.array([f]), np.array([NASAL_RESONANCE[2]])) for f in NASAL_RESONANCE[:2]
        )
        nose = (1 - zero_b * z_inverse - zero_c * squared) / (1 - pole_b * z_inverse - pole_c * squared)
        nose *= (1 - pole_b - pole_c) / (1 - zero_b - zero_c)
        response *= 1 + nasal[:, None] * (nose - 1)
    return response


def _resonator_coefficients(frequency: FloatArray, bandwidth: FloatArray) -> tuple[FloatArray, FloatArray]:
    """b and c of the resonator y[n] = (1 − b − c) x[n] + b y[n−1] + c y[n−2] (Klatt 1980)."""
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
    """The sum of the impulse responses to all pulses."""
    waveform = np.zeros(length + PULSE_SAMPLES)
    times = np.arange(tracks.start_time, tracks.end_time, PHASE_STEP_SECONDS)
    progress = (times - tracks.start_time) / (tracks.end_time - tracks.start_time)
    log_pitch = voice.pitch_fall * (0.5 - progress) + 0.25 * voice.pitch_fall * np.sin(2 * np.pi * progress)
    is_voiced = tracks.segment_level(times, "voice") > 0.1
    pitch = voice.pitch * np.exp(log_pitch - log_pitch[is_voiced if is_voiced.any() else slice(None)].mean())
    phase = np.cumsum(pitch) * PHASE_STEP_SECONDS
    cycles = np.arange(1.0, int(phase[-1]))
    cycles += voice.jitter * rng.uniform_array(-1.7, 1.7, (len(cycles),))
    pulses = np.interp(cycles, phase, times)
    levels = tracks.segment_level(pulses, "voice")
    pulses, levels = pulses[levels > 1e-3], levels[levels > 1e-3]
    if not len(pulses):
        return waveform[:length]
    frequencies, z_inverse = _fft_frequencies(PULSE_SAMPLES, sample_rate)
    response = _vocal_tract_response(
        tracks.formants(pulses), tracks.segment_level(pulses, "nasal"), voice.formant_scale, z_inverse
    )
    # The glottal spectrum falls by 12 dB per octave above 100 Hz. Lip radiation adds 6 dB per octave.
    decay = np.exp(-np.pi * 100 / BASE_SAMPLE_RATE)
    source = (1 - decay) ** 2 / (1 - decay * z_inverse) ** 2 * (1 - z_inverse) * BASE_SAMPLE_RATE / 100
    source *= (1 - voice.tilt) / (1 - voice.tilt * z_inverse)
    positions = pulses * sample_rate
    sample_indices = np.floor(positions).astype(int)
    delays = (positions - sample_indices) / sample_rate
    shifted = response * source * np.exp(-2j * np.pi * frequencies * delays[:, None])
    strength = VOICE_GAIN * levels * np.sqrt(120 / np.interp(pulses, times, pitch))
    size = PULSE_SAMPLES * sample_rate // BASE_SAMPLE_RATE
    for index, pulse_response in zip(sample_indices, np.fft.irfft(shifted * strength[:, None], size), strict=True):
        waveform[index : index + size] += pulse_response * (sample_rate / BASE_SAMPLE_RATE)
    return waveform[:length]


def _synthesize_noise(
    tracks: _FormantTracks, voice: VoiceParameters, length: int, sample_rate: int, rng: PortableGenerator
) -> FloatArray:
    """Hiss in its bands, and breath filtered by the formants, frame by frame."""
    half, hop = NOISE_FRAME_SAMPLES // 2, NOISE_FRAME_SAMPLES // 4
    frames = length * (BASE_SAMPLE_RATE // sample_rate) // hop + 2
    starts = np.arange(frames) * hop  # the noise starts ``hop`` before the waveform
    times = np.arange(-hop, starts[-1] + half - hop) / BASE_SAMPLE_RATE
    centers = starts / BASE_SAMPLE_RATE
    frequencies, z_inverse = _fft_frequencies(NOISE_FRAME_SAMPLES, sample_rate)
    hiss = HISS_GAIN * tracks.segment_level(times, "hiss")
    breath = BREATH_GAIN * (tracks.segment_level(times, "breath") + voice.breath * tracks.segment_level(times, "voice"))
    formant_gain = np.abs(
        _vocal_tract_response(tracks.formants(centers), np.zeros(frames), voice.formant_scale, z_inverse)
    )
    spectra = np.zeros((frames, len(frequencies)), np.complex128)
    for level, shape in ((hiss, _hiss_spectrum(tracks.band(centers), frequencies)), (breath, formant_gain)):
        noise = rng.uniform_array(-1.7, 1.7, times.shape) * level
        frame_noise = noise[starts[:, None] + np.arange(half)] * np.hanning(half + 1)[:-1]
        spectra += np.fft.rfft(frame_noise, NOISE_FRAME_SAMPLES)[:, : len(frequencies)] * shape
    step, size = hop * sample_rate // BASE_SAMPLE_RATE, NOISE_FRAME_SAMPLES * sample_rate // BASE_SAMPLE_RATE
    waveform = np.zeros(frames * step + size)
    for frame, frame_waveform in enumerate(np.fft.irfft(spectra, size)):
        waveform[frame * step : frame * step + size] += frame_waveform * (sample_rate / BASE_SAMPLE_RATE)
    return waveform[step : step + length]


def _hiss_spectrum(band: FloatArray, frequencies: FloatArray) -> FloatArray:
    middle, width = band[:, :1], band[:, 1:]
    return np.exp(-0.5 * ((frequencies - middle) / width) ** 2) + 0.02
