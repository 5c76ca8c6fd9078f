"""Audio: decoding of files, spectrograms, and waveforms from spectrograms.

A *waveform* ``(samples,)`` is float32 between −1 and 1, with one channel, at the sample rate of the config. A
*spectrogram* ``(frames, bands)`` is float32. Its values are levels in decibels, scaled to 0 … 1::

    value = 1 − 20 · log10(magnitude) / min_level_db

A full-scale sine (0 dB) has the value 1, and ``min_level_db`` the value 0::

    processor = AudioProcessor(AudioConfig(sample_rate=16000))
    waveform = processor.decode_waveform(Path("hello.ogg").read_bytes(), "hello.ogg")
    mel = processor.mel_spectrogram(waveform)    # (T, 80): silence is 0, speech mostly 0.3 to 0.8
    save_audio(Path("again.wav"), processor.reconstruct_waveform(mel), 16000)

A spectrogram has no phases. :meth:`AudioProcessor.reconstruct_waveform` estimates them (Griffin and Lim
1984).
"""

from __future__ import annotations

import functools
import io
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.config import Config
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError
from jumok.files import atomic_write

Waveform = NDArray[np.float32]  # (samples,)
Spectrogram = NDArray[np.float32]  # (frames, bands)
# The first bytes of common audio files that libsndfile reads.
MAGIC_BYTES = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"FORM", b"ID3", b"\xff\xfb")
TOO_LONG_REASON = "too long a recording"
UNKNOWN_WAV_SIZES = (0, 0xFFFFFFFF)  # the size in the header of a streamed WAV
SPEECH_EXTRA = "speech"
# Samples outside the resolution and the range of 32-bit integers are silence or damaged. Numbers near the
# limits of float32 would become infinite when their loudness is normalized.
MIN_AMPLITUDE, MAX_AMPLITUDE = 2.0**-32, 2.0**32
NUM_MEL_UPDATES, EPSILON = 10, 1e-12  # of _invert_mel


@dataclass(frozen=True)
class AudioLimits:
    """Limits of a recording."""

    max_bytes: int = 256 << 20  # of the file
    max_seconds: float = 600.0
    max_samples: int = 1 << 28  # over all channels


AUDIO_LIMITS = AudioLimits()


@dataclass(frozen=True)
class AudioConfig(Config):
    """Config of spectrograms. Lengths are in samples at ``sample_rate``.

    The defaults are for 16 kHz; ``AudioConfig.for_sample_rate(8000)`` has the same durations at another rate.
    """

    sample_rate: int = 16000
    n_fft: int = 1024
    hop_length: int = 200  # from one frame to the next, 12.5 ms
    win_length: int = 800  # of a frame, 50 ms
    n_mels: int = 80
    f_min: float = 50.0  # Hz, of the mel bands
    f_max: float | None = None  # None: half the sample rate
    preemphasis: float = 0.97  # share of a sample that is subtracted from the next; 0: none
    min_level_db: float = -100.0  # quieter levels count as silence
    linear_spectrogram: bool = False  # append the linear spectrogram to the mel bands
    trim_db: float | None = None  # trim both ends where they are this much quieter than the loudest frame
    target_level_db: float | None = -24.0  # normalize the mean square to this level, in dB of full scale; None: keep

    def __post_init__(self) -> None:
        if not 1000 <= self.sample_rate <= 192_000:
            raise InputError(f"sample_rate={self.sample_rate}: expected 1000 to 192000 samples per second")
        if not 0 < self.hop_length <= self.win_length <= self.n_fft:
            raise InputError(
                f"hop_length={self.hop_length}, win_length={self.win_length} and n_fft={self.n_fft}: "
                "expected hop_length ≤ win_length ≤ n_fft"
            )
        if not 0 < self.n_mels < self.num_bins:
            raise InputError(f"n_mels={self.n_mels}: expected 1 to {self.num_bins - 1}, less than n_fft / 2 + 1")
        if not 0 <= self.f_min < self.effective_f_max <= self.sample_rate / 2:
            raise InputError(
                f"f_min={self.f_min} and f_max={self.effective_f_max}: expected f_min < f_max ≤ "
                f"{self.sample_rate / 2:g} Hz, half the sample rate"
            )
        if not 0 <= self.preemphasis < 1:
            raise InputError(f"preemphasis={self.preemphasis}: expected at least 0 and less than 1")
        if self.min_level_db >= 0:
            raise InputError(f"min_level_db={self.min_level_db}: expected decibels below full scale, as in -100")
        if self.trim_db is not None and self.trim_db <= 0:
            raise InputError(
                f"trim_db={self.trim_db}: expected decibels below the loudest, as in 40; None trims nothing"
            )
        if self.target_level_db is not None and self.target_level_db >= 0:
            raise InputError(f"target_level_db={self.target_level_db}: expected decibels below full scale, as in -24")

    @classmethod
    def for_sample_rate(cls, sample_rate: int, n_mels: int = 80) -> AudioConfig:
        """The usual durations at another sample rate: frames of 50 ms, every 12.5 ms.

        >>> config = AudioConfig.for_sample_rate(8000)
        >>> config.n_fft, config.hop_length, config.win_length
        (512, 100, 400)
        """
        window = max(1, round(sample_rate / 20))
        return cls(sample_rate, 1 << math.ceil(math.log2(window)), max(1, window // 4), window, n_mels)

    @property
    def num_bins(self) -> int:
        """The number of bands of a linear spectrogram."""
        return self.n_fft // 2 + 1

    @property
    def effective_f_max(self) -> float:
        return self.sample_rate / 2 if self.f_max is None else self.f_max

    @property
    def num_features(self) -> int:
        """The width of a frame of :meth:`AudioProcessor.extract_features`."""
        return self.n_mels + (self.num_bins if self.linear_spectrogram else 0)

    @property
    def frame_seconds(self) -> float:
        """The time from one frame to the next."""
        return self.hop_length / self.sample_rate


class AudioProcessor:
    """Waveforms and spectrograms for one config."""

    def __init__(self, config: AudioConfig | None = None) -> None:
        self.config = config or AudioConfig()

    # ---------------------------------------------------------------------------------------- waveforms

    def decode_waveform(
        self, data: bytes, location: str, limits: AudioLimits = AUDIO_LIMITS
    ) -> Waveform | InvalidExample:
        """Decode and preprocess the bytes of a file; or why that is not possible."""
        decoded = decode_audio(data, location, limits)
        if isinstance(decoded, InvalidExample):
            return decoded
        waveform = self.preprocess(*decoded)
        return waveform if len(waveform) else InvalidExample(location, "a silent recording")

    def read_waveform(self, path: Path, limits: AudioLimits = AUDIO_LIMITS) -> Waveform:
        """Read, decode and preprocess a file. Raises if it cannot be used."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        waveform = self.decode_waveform(data, str(path), limits)
        if isinstance(waveform, InvalidExample):
            raise InputError(str(waveform))
        return waveform

    def preprocess(self, waveform: NDArray[Any], sample_rate: int) -> Waveform:
        """Resample, trim and normalize samples ``(n,)`` or ``(n, channels)``. Silence becomes ``(0,)``."""
        waveform = np.asarray(waveform, np.float32)
        if waveform.ndim == 2:
            waveform = waveform.mean(1)
        if sample_rate != self.config.sample_rate and len(waveform):
            librosa = import_optional("librosa", SPEECH_EXTRA)
            waveform = librosa.resample(
                waveform, orig_sr=sample_rate, target_sr=self.config.sample_rate, res_type="soxr_hq"
            )
        if not np.any(np.abs(waveform) > MIN_AMPLITUDE):
            return np.zeros(0, np.float32)
        if self.config.trim_db is not None:
            trim = import_optional("librosa.effects", SPEECH_EXTRA).trim
            normalized = waveform / np.abs(waveform).max()  # librosa treats very quiet samples as silence
            frame_sizes = {"frame_length": self.config.win_length, "hop_length": self.config.hop_length}
            _, (start, end) = trim(normalized, top_db=self.config.trim_db, **frame_sizes)
            waveform = waveform[start:end]
        if self.config.target_level_db is not None:
            waveform = normalize_loudness(waveform, self.config.target_level_db)
        return np.ascontiguousarray(waveform, np.float32)

    # ------------------------------------------------------------------------------------- spectrograms

    def mel_spectrogram(self, waveform: Waveform) -> Spectrogram:
        """``(T, n_mels)``: the mean magnitude of each band; T is 1 + samples // hop_length."""
        return self._scale_decibels(_mel_filterbank(self.config) @ self._stft_magnitudes(waveform))

    def linear_spectrogram(self, waveform: Waveform) -> Spectrogram:
        """``(T, n_fft / 2 + 1)``: the magnitude of each frequency."""
        return self._scale_decibels(self._stft_magnitudes(waveform))

    def extract_features(self, waveform: Waveform) -> Spectrogram:
        """``(T, num_features)``: mel bands, followed by the linear spectrogram if the config has one."""
        magnitudes = self._stft_magnitudes(waveform)
        mel = _mel_filterbank(self.config) @ magnitudes
        both = np.concatenate([mel, magnitudes]) if self.config.linear_spectrogram else mel
        return self._scale_decibels(both)

    def reconstruct_waveform(
        self, spectrogram: NDArray[Any], *, num_iterations: int = 32, magnitude_power: float = 1.0
    ) -> Waveform:
        """A waveform with approximately this spectrogram, mel or linear depending on its width.

        ``magnitude_power``: raise magnitudes to this power. The output of a model is blurred; about 1.2
        sounds better. The result is deterministic.
        """
        config = self.config
        spectrogram = np.asarray(spectrogram, np.float64)
        widths = (config.n_mels, config.num_bins)
        if spectrogram.ndim != 2 or spectrogram.shape[1] not in widths or not len(spectrogram):
            raise InputError(
                f"the spectrogram has shape {spectrogram.shape}; expected (frames, {config.n_mels}) mel "
                f"bands or (frames, {config.num_bins}) magnitudes"
            )
        if not np.isfinite(spectrogram).all():
            raise InputError("the spectrogram contains NaN or infinity; expected finite values")
        level = (1 - np.clip(spectrogram.T, 0, 1.2)) * config.min_level_db  # dB
        magnitudes = np.where(spectrogram.T > 0, 10 ** (level / 20), 0.0)
        if len(magnitudes) == config.n_mels:
            magnitudes = _invert_mel(_mel_filterbank(config).astype(np.float64), magnitudes)
        librosa = import_optional("librosa", SPEECH_EXTRA)
        length = max(1, len(spectrogram) - 1) * config.hop_length
        # With fewer frames, librosa would warn.
        num_missing = max(0, -(-config.n_fft // config.hop_length) + 1 - len(spectrogram))
        sharpened = magnitudes**magnitude_power
        # Keep the loudness.
        sharpened *= math.sqrt(np.square(magnitudes).sum() / max(np.square(sharpened).sum(), EPSILON))
        magnitudes = np.pad(sharpened, ((0, 0), (0, num_missing))) * self._full_scale
        waveform = librosa.griffinlim(
            magnitudes.astype(np.float32),
            n_iter=num_iterations,
            hop_length=config.hop_length,
            win_length=config.win_length,
            n_fft=config.n_fft,
            random_state=0,
        )[:length]
        if config.preemphasis:
            effects = import_optional("librosa.effects", SPEECH_EXTRA)
            waveform = effects.deemphasis(waveform, coef=config.preemphasis, zi=[0.0])
        return np.asarray(waveform, np.float32)

    @property
    def _full_scale(self) -> float:
        """The magnitude of a full-scale sine: half the sum of a Hann window."""
        return self.config.win_length / 4

    def _stft_magnitudes(self, waveform: Waveform) -> NDArray[np.float32]:
        """``(num_bins, T)``; a full-scale sine has magnitude 1."""
        config, librosa = self.config, import_optional("librosa", SPEECH_EXTRA)
        if waveform.ndim != 1 or not len(waveform):
            raise InputError(f"the waveform has shape {waveform.shape}; expected one or more samples, (samples,)")
        waveform = np.asarray(waveform, np.float32)
        if config.preemphasis:
            waveform = np.append(waveform[:1], waveform[1:] - np.float32(config.preemphasis) * waveform[:-1])
        num_missing = config.n_fft - len(waveform)  # librosa would warn
        if num_missing > 0:
            waveform = np.pad(waveform, (0, num_missing))
        spectrum = librosa.stft(
            waveform, n_fft=config.n_fft, hop_length=config.hop_length, win_length=config.win_length
        )
        magnitudes: NDArray[np.float32] = np.abs(spectrum) / np.float32(self._full_scale)
        return magnitudes[:, : 1 + (len(waveform) - max(num_missing, 0)) // config.hop_length]

    def _scale_decibels(self, magnitudes: NDArray[np.float32]) -> Spectrogram:
        min_level = self.config.min_level_db
        level = 20 * np.log10(np.maximum(magnitudes.T, 10 ** (min_level / 20)))
        return np.clip(1 - level / min_level, 0, 1.2).astype(np.float32)


@functools.lru_cache(8)
def _mel_filterbank(config: AudioConfig) -> NDArray[np.float32]:
    """``(n_mels, num_bins)``. The weights of each row sum to 1."""
    librosa, filters = (import_optional(name, SPEECH_EXTRA) for name in ("librosa", "librosa.filters"))
    band_limits = {"n_mels": config.n_mels, "fmin": config.f_min, "fmax": config.effective_f_max}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Empty filters detected")
        filterbank: NDArray[np.float32] = filters.mel(
            sr=config.sample_rate, n_fft=config.n_fft, norm=None, **band_limits
        )
    # A band that is narrower than a bin may lie between two bins. It uses the nearest one.
    edges = librosa.mel_frequencies(config.n_mels + 2, fmin=config.f_min, fmax=config.effective_f_max)
    nearest = np.rint(edges[1:-1] * config.n_fft / config.sample_rate).astype(int)
    empty_bands = np.flatnonzero(filterbank.sum(1) == 0)
    filterbank[empty_bands, nearest[empty_bands]] = 1.0
    normalized: NDArray[np.float32] = filterbank / filterbank.sum(1, keepdims=True)
    return normalized


def _invert_mel(filterbank: NDArray[np.float64], mel_magnitudes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Nonnegative magnitudes ``(num_bins, T)`` with approximately these mel magnitudes ``(n_mels, T)``.

    Uses multiplicative updates (Lee and Seung 2001). They are more accurate than the general solver of
    librosa in a tenth of the time, especially for quiet bands.
    """
    magnitudes: NDArray[np.float64] = filterbank.T @ mel_magnitudes / (filterbank.T.sum(1, keepdims=True) + EPSILON)
    target, squared = filterbank.T @ mel_magnitudes, filterbank.T @ filterbank
    for _ in range(NUM_MEL_UPDATES):
        magnitudes *= target / (squared @ magnitudes + EPSILON)
    return magnitudes


def decode_audio(
    data: bytes, location: str, limits: AudioLimits = AUDIO_LIMITS
) -> tuple[NDArray[np.float32], int] | InvalidExample:
    """Decode the bytes of a file to samples ``(n, channels)`` and their rate; or why that is not possible."""
    if not data:
        return InvalidExample(location, "an empty recording")
    if len(data) > limits.max_bytes:
        return file_too_large(location, len(data), limits)
    if data[:4] == b"RIFF" and (declared_size := int.from_bytes(data[4:8], "little")) not in UNKNOWN_WAV_SIZES:
        missing = declared_size + 8 - len(data)
        if missing > 1:  # the last padding byte is often missing
            return InvalidExample(location, "a damaged recording", f"the last {missing} bytes are missing")
    soundfile = import_optional("soundfile", SPEECH_EXTRA)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            seconds, num_samples = file.frames / file.samplerate, file.frames * file.channels
            if seconds > limits.max_seconds:
                detail = f"{seconds:.0f} seconds; the limit is {limits.max_seconds:.0f}"
                return InvalidExample(location, TOO_LONG_REASON, detail)
            if num_samples > limits.max_samples:
                return InvalidExample(
                    location, TOO_LONG_REASON, f"{num_samples} samples; the limit is {limits.max_samples}"
                )
            samples, sample_rate, frames = file.read(dtype="float32", always_2d=True), file.samplerate, file.frames
    except soundfile.SoundFileError as error:
        if data.startswith(MAGIC_BYTES):
            return InvalidExample(location, "a damaged recording", _clean_error_text(error))
        return InvalidExample(location, "not a recording in WAV, FLAC or OGG", f"it begins with {data[:12]!r}")
    if len(samples) < frames:
        return InvalidExample(location, "a damaged recording", f"it ends after {len(samples)} of {frames} samples")
    if not len(samples):
        return InvalidExample(location, "a recording without samples", "is it truncated?")
    if not np.isfinite(samples).all():
        return InvalidExample(location, "a damaged recording", "its samples contain NaN or infinity")
    if (loudest := float(np.abs(samples).max())) > MAX_AMPLITUDE:
        return InvalidExample(location, "a damaged recording", f"it has samples up to {loudest:.3g}; 1 is full scale")
    return samples, sample_rate


def file_too_large(location: str, num_bytes: int, limits: AudioLimits) -> InvalidExample:
    """The result for a file that exceeds the limit."""
    return InvalidExample(location, "a recording of too many bytes", f"{num_bytes}; the limit is {limits.max_bytes}")


def _clean_error_text(error: Exception) -> str:
    """The message of libsndfile, without the address of the buffer."""
    text = str(error).partition(">: ")[2] or str(error)
    return text.strip().rstrip(".") or "it cannot be decoded completely"


def normalize_loudness(waveform: NDArray[Any], level_db: float) -> Waveform:
    """Scale a waveform to this mean square, in dB of full scale, or lower if a sample would exceed 1."""
    waveform = np.asarray(waveform, np.float32)
    if not np.any(np.abs(waveform) > MIN_AMPLITUDE):
        return waveform
    rms = math.sqrt(float(np.mean(np.square(waveform, dtype=np.float64))))
    factor = min(10 ** (level_db / 20) / rms, 0.999 / float(np.abs(waveform).max()))
    return waveform * np.float32(factor)


def encode_wav(waveform: NDArray[Any], sample_rate: int) -> bytes:
    """Encode a waveform as a WAV file."""
    return _encode_audio(waveform, sample_rate, "WAV", "PCM_16")


def save_audio(path: Path, waveform: NDArray[Any], sample_rate: int) -> None:
    """Write a waveform. The suffix determines the format: .wav, .flac or .ogg."""
    formats = {".wav": ("WAV", "PCM_16"), ".flac": ("FLAC", "PCM_16"), ".ogg": ("OGG", "VORBIS")}
    if path.suffix.lower() not in formats:
        raise InputError(f"{path}: expected a file ending in {', '.join(formats)}")
    data = _encode_audio(waveform, sample_rate, *formats[path.suffix.lower()])  # libsndfile does not report a full disk
    with atomic_write(path) as part:
        part.write_bytes(data)


def _encode_audio(waveform: NDArray[Any], sample_rate: int, format_name: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile = import_optional("soundfile", SPEECH_EXTRA)
    soundfile.write(file, np.clip(waveform, -1, 1), sample_rate, format=format_name, subtype=subtype)
    return file.getvalue()
