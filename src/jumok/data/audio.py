"""Sound as numbers: from a file's bytes to a waveform, from a waveform to spectra, and back.

A *waveform* is ``(max_samples,)`` float32 between −1 and 1, of one channel, at the rate of the config whatever
the file had. Spectra are ``(frames, mel_magnitudes)`` float32, in decibels of which the range from ``min_level_db`` to 0 (a
sine as loud as can be) is laid on 0 to 1::

    sound = Sound(SoundConfig(rate=16000))
    waveform = sound.waveform(Path("hello.ogg").read_bytes(), "hello.ogg")
    mel = sound.mel(waveform)            # (T, 80): silence is 0, speech mostly 0.3 to 0.8
    saved(Path("again.wav"), sound.wave(mel), 16000)

A spectrum has lost its phases; :meth:`AudioProcessor.wave` finds some that fit (Griffin and Lim 1984).
"""

from __future__ import annotations

import functools
import io
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError
from jumok.files import atomic_write

__all__ = [
    "AUDIO_LIMITS",
    "AudioConfig",
    "AudioLimits",
    "AudioProcessor",
    "Spectrogram",
    "Waveform",
    "decode_audio",
    "file_too_large",
    "normalize_loudness",
    "save_audio",
]

Waveform = NDArray[np.float32]  # (samples,)
Spectrogram = NDArray[np.float32]  # (frames, bands)
# How files of sound begin that libsndfile reads and people have.
MAGIC_BYTES = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"FORM", b"ID3", b"\xff\xfb")
TOO_LONG_REASON = "too long a recording"
UNKNOWN_WAV_SIZES = (0, 0xFFFFFFFF)  # the size in the header of a WAV that was written as it came
SPEECH_EXTRA = "speech"
# Beyond the steps and the range of 32-bit integers, samples are silence or damaged. Numbers near the limits
# of float32 would become infinite when they are made as loud as others.
MIN_AMPLITUDE, MAX_AMPLITUDE = 2.0**-32, 2.0**32
NUM_MEL_UPDATES, EPSILON = 10, 1e-12  # from mel bands to magnitudes


@dataclass(frozen=True)
class AudioLimits:
    """The most that a recording may have."""

    max_bytes: int = 256 << 20  # bytes of its file
    max_seconds: float = 600.0
    max_samples: int = 1 << 28  # of all channels


AUDIO_LIMITS = AudioLimits()


@dataclass(frozen=True)
class AudioConfig:
    """How sound becomes spectra; times are in samples at ``sample_rate``.

    The defaults are for 16 kHz; ``AudioConfig.at(8000)`` has the same times at another rate.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    sample_rate: int = 16000
    n_fft: int = 1024
    hop_length: int = 200  # from one frame to the next, 12.5 ms
    win_length: int = 800  # that a frame looks at, 50 ms
    n_mels: int = 80
    f_min: float = 50.0  # Hz, of the mel bands
    f_max: float | None = None  # None: half the rate
    preemphasis: float = 0.97  # how much of a sample is taken off the next; 0: none
    min_level_db: float = -100.0  # dB: what is softer counts as silence
    linear_spectrogram: bool = False  # whether features have the linear spectrum behind the mel bands
    trim_db: float | None = None  # cut what is so many dB softer than the loudest, at both ends
    target_level_db: (
        float | None
    ) = -24.0  # dB of full scale that the mean square is brought to; None: as it is

    def __post_init__(self) -> None:
        if not 1000 <= self.sample_rate <= 192_000:
            raise InputError(f"sample_rate={self.sample_rate}: expected 1000 to 192000 samples per second")
        if not 0 < self.hop_length <= self.win_length <= self.n_fft:
            raise InputError(
                f"hop_length={self.hop_length}, win_length={self.win_length} and n_fft={self.n_fft}: expected each to be at most the next"
            )
        if not 0 < self.n_mels < self.num_bins:
            raise InputError(
                f"n_mels={self.n_mels}: expected 1 to {self.num_bins - 1}, less than n_fft / 2 + 1"
            )
        if not 0 <= self.f_min < self.effective_f_max <= self.sample_rate / 2:
            raise InputError(
                f"f_min={self.f_min} and f_max={self.effective_f_max}: expected f_min < f_max ≤ {self.sample_rate / 2:g} Hz, "
                "half the sample rate"
            )
        if not 0 <= self.preemphasis < 1:
            raise InputError(f"preemphasis={self.preemphasis}: expected at least 0 and less than 1")
        if self.min_level_db >= 0:
            raise InputError(
                f"min_level_db={self.min_level_db}: expected decibels below full scale, as in -100"
            )
        if self.trim_db is not None and self.trim_db <= 0:
            raise InputError(
                f"trim_db={self.trim_db}: expected decibels below the loudest, as in 40; None trims nothing"
            )
        if self.target_level_db is not None and self.target_level_db >= 0:
            raise InputError(
                f"target_level_db={self.target_level_db}: expected decibels below full scale, as in -24"
            )

    @classmethod
    def for_sample_rate(cls, sample_rate: int, n_mels: int = 80) -> AudioConfig:
        """The usual times at another rate: 12.5 ms from frame to frame, of 50 ms each.

        >>> config = AudioConfig.for_sample_rate(8000)
        >>> config.n_fft, config.hop_length, config.win_length
        (512, 100, 400)
        """
        window = max(1, round(sample_rate / 20))
        return cls(sample_rate, 1 << math.ceil(math.log2(window)), max(1, window // 4), window, n_mels)

    @property
    def num_bins(self) -> int:
        """Of a linear spectrum."""
        return self.n_fft // 2 + 1

    @property
    def effective_f_max(self) -> float:
        return self.sample_rate / 2 if self.f_max is None else self.f_max

    @property
    def num_features(self) -> int:
        """The numbers of one frame of :meth:`AudioProcessor.extract_features`."""
        return self.n_mels + (self.num_bins if self.linear_spectrogram else 0)

    @property
    def frame_seconds(self) -> float:
        """From one frame to the next."""
        return self.hop_length / self.sample_rate


class AudioProcessor:
    """Waveforms and spectra by one config."""

    def __init__(self, config: AudioConfig | None = None) -> None:
        self.config = config or AudioConfig()

    # ---------------------------------------------------------------------------------------- waveforms

    def decode_waveform(
        self, data: bytes, location: str, limits: AudioLimits = AUDIO_LIMITS
    ) -> Waveform | InvalidExample:
        """Of a file's bytes, trimmed and as loud as the config says; or why there is none."""
        found = decode_audio(data, location, limits)
        if isinstance(found, InvalidExample):
            return found
        wave = self.preprocess(*found)
        return wave if len(wave) else InvalidExample(location, "a recording of nothing but silence")

    def read_waveform(self, path: Path, limits: AudioLimits = AUDIO_LIMITS) -> Waveform:
        """The same of a file; an error if it cannot be used."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        found = self.decode_waveform(data, str(path), limits)
        if isinstance(found, InvalidExample):
            raise InputError(str(found))
        return found

    def preprocess(self, waveform: NDArray[Any], sample_rate: int) -> Waveform:
        """Samples ``(n,)`` or ``(n, channels)`` of any rate, as the config has them; none of pure silence."""
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
            loud = (
                waveform / np.abs(waveform).max()
            )  # for librosa, what is very soft is not softer than silence
            times = {"frame_length": self.config.win_length, "hop_length": self.config.hop_length}
            _, (begin, end) = trim(loud, top_db=self.config.trim_db, **times)
            waveform = waveform[begin:end]
        if self.config.target_level_db is not None:
            waveform = normalize_loudness(waveform, self.config.target_level_db)
        return np.ascontiguousarray(waveform, np.float32)

    # ------------------------------------------------------------------------------------------ spectra

    def mel_spectrogram(self, waveform: Waveform) -> Spectrogram:
        """``(T, n_mels)``: in each band, the mean of the magnitudes; T is 1 + samples // hop."""
        return self._scale_decibels(_mel_filterbank(self.config) @ self._stft_magnitudes(waveform))

    def linear_spectrogram(self, waveform: Waveform) -> Spectrogram:
        """``(T, n_fft / 2 + 1)``: the magnitudes."""
        return self._scale_decibels(self._stft_magnitudes(waveform))

    def extract_features(self, waveform: Waveform) -> Spectrogram:
        """``(T, num_features)``: mel bands, and the linear spectrum behind them if the config says so."""
        magnitudes = self._stft_magnitudes(waveform)
        both = [
            _mel_filterbank(self.config) @ magnitudes,
            *([magnitudes] if self.config.linear_spectrogram else []),
        ]
        return self._scale_decibels(np.concatenate(both))

    def reconstruct_waveform(
        self, spectrogram: NDArray[Any], *, num_iterations: int = 32, magnitude_power: float = 1.0
    ) -> Waveform:
        """A waveform whose spectra are about these: of mel bands, or linear ones, as the width tells.

        ``magnitude_power`` raises magnitudes to a power: what a model says is blurred, and 1.2 or so is heard better.
        The same spectra give the same waveform.
        """
        config = self.config
        spectrogram = np.asarray(spectrogram, np.float64)
        if (
            spectrogram.ndim != 2
            or spectrogram.shape[1] not in (config.n_mels, config.num_bins)
            or not len(spectrogram)
        ):
            raise InputError(
                f"spectra of shape {spectrogram.shape} came; expected (frames, {config.n_mels}) mel bands or "
                f"(frames, {config.num_bins}) magnitudes"
            )
        if not np.isfinite(spectrogram).all():
            raise InputError("spectra with NaN or infinity came; they cannot be heard")
        level = (1 - np.clip(spectrogram.T, 0, 1.2)) * config.min_level_db  # dB
        magnitudes = np.where(spectrogram.T > 0, 10 ** (level / 20), 0.0)
        if len(magnitudes) == config.n_mels:
            magnitudes = _invert_mel(_mel_filterbank(config).astype(np.float64), magnitudes)
        librosa = import_optional("librosa", SPEECH_EXTRA)
        length = max(1, len(spectrogram) - 1) * config.hop_length
        short = max(
            0, -(-config.n_fft // config.hop_length) + 1 - len(spectrogram)
        )  # what librosa would warn of
        sharp = magnitudes**magnitude_power
        sharp *= math.sqrt(
            np.square(magnitudes).sum() / max(np.square(sharp).sum(), EPSILON)
        )  # as loud as before
        magnitudes = np.pad(sharp, ((0, 0), (0, short))) * self._full_scale
        wave = librosa.griffinlim(
            magnitudes.astype(np.float32),
            n_iter=num_iterations,
            hop_length=config.hop_length,
            win_length=config.win_length,
            n_fft=config.n_fft,
            random_state=0,
        )[:length]
        if config.preemphasis:
            wave = import_optional("librosa.effects", SPEECH_EXTRA).deemphasis(
                wave, coef=config.preemphasis, zi=[0.0]
            )
        return np.asarray(wave, np.float32)

    @property
    def _full_scale(self) -> float:
        """What a sine as loud as can be has for a magnitude: half the sum of a Hann window."""
        return self.config.win_length / 4

    def _stft_magnitudes(self, waveform: Waveform) -> NDArray[np.float32]:
        """``(num_bins, T)``, a full sine being 1."""
        config, librosa = self.config, import_optional("librosa", SPEECH_EXTRA)
        if waveform.ndim != 1 or not len(waveform):
            raise InputError(f"a waveform of shape {waveform.shape} came; expected (samples,), one or more")
        waveform = np.asarray(waveform, np.float32)
        if config.preemphasis:
            waveform = np.append(waveform[:1], waveform[1:] - np.float32(config.preemphasis) * waveform[:-1])
        short = config.n_fft - len(waveform)  # what librosa would warn of
        if short > 0:
            waveform = np.pad(waveform, (0, short))
        complex_ = librosa.stft(
            waveform, n_fft=config.n_fft, hop_length=config.hop_length, win_length=config.win_length
        )
        magnitudes: NDArray[np.float32] = np.abs(complex_) / np.float32(self._full_scale)
        return magnitudes[:, : 1 + (len(waveform) - max(short, 0)) // config.hop_length]

    def _scale_decibels(self, magnitudes: NDArray[np.float32]) -> Spectrogram:
        floor = self.config.min_level_db
        level = 20 * np.log10(np.maximum(magnitudes.T, 10 ** (floor / 20)))
        return np.clip(1 - level / floor, 0, 1.2).astype(np.float32)


@functools.lru_cache(8)
def _mel_filterbank(config: AudioConfig) -> NDArray[np.float32]:
    """``(n_mels, num_bins)``, each row a mean: its weights sum to 1."""
    librosa, filters = (
        import_optional("librosa", SPEECH_EXTRA),
        import_optional("librosa.filters", SPEECH_EXTRA),
    )
    bands = {"n_mels": config.n_mels, "fmin": config.f_min, "fmax": config.effective_f_max}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Empty filters detected")
        bank: NDArray[np.float32] = filters.mel(sr=config.sample_rate, n_fft=config.n_fft, norm=None, **bands)
    # A band that is narrower than the bins may lie between two of them: it takes the nearest.
    edges = librosa.mel_frequencies(config.n_mels + 2, fmin=config.f_min, fmax=config.effective_f_max)
    nearest = np.rint(edges[1:-1] * config.n_fft / config.sample_rate).astype(int)
    empty = np.flatnonzero(bank.sum(1) == 0)
    bank[empty, nearest[empty]] = 1.0
    means: NDArray[np.float32] = bank / bank.sum(1, keepdims=True)
    return means


def _invert_mel(filterbank: NDArray[np.float64], mel_magnitudes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Magnitudes ``(num_bins, T)``, none below 0, whose means are about these bands ``(n_mels, T)``.

    By multiplicative updates (Lee and Seung 2001): nearer to the bands, soft ones above all, than librosa's
    general solver is after ten times as long.
    """
    found: NDArray[np.float64] = (
        filterbank.T @ mel_magnitudes / (filterbank.T.sum(1, keepdims=True) + EPSILON)
    )
    wanted, squared = filterbank.T @ mel_magnitudes, filterbank.T @ filterbank
    for _ in range(NUM_MEL_UPDATES):
        found *= wanted / (squared @ found + EPSILON)
    return found


def decode_audio(
    data: bytes, location: str, limits: AudioLimits = AUDIO_LIMITS
) -> tuple[NDArray[np.float32], int] | InvalidExample:
    """The samples ``(n, channels)`` of a file's bytes and their rate, or why there are none."""
    if not data:
        return InvalidExample(location, "an empty recording")
    if len(data) > limits.max_bytes:
        return file_too_large(location, len(data), limits)
    if data[:4] == b"RIFF" and (told := int.from_bytes(data[4:8], "little")) not in UNKNOWN_WAV_SIZES:
        missing = told + 8 - len(data)
        if missing > 1:  # a last byte of padding is often left out
            return InvalidExample(location, "a damaged recording", f"the last {missing} bytes are missing")
    soundfile = import_optional("soundfile", SPEECH_EXTRA)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            seconds, all_samples = file.frames / file.samplerate, file.frames * file.channels
            if seconds > limits.max_seconds:
                told_of = f"{seconds:.0f} seconds, and {limits.max_seconds:.0f} are the most"
                return InvalidExample(location, TOO_LONG_REASON, told_of)
            if all_samples > limits.max_samples:
                return InvalidExample(
                    location, TOO_LONG_REASON, f"{all_samples} samples, and {limits.max_samples} are the most"
                )
            samples, rate, frames = file.read(dtype="float32", always_2d=True), file.samplerate, file.frames
    except soundfile.SoundFileError as error:
        if data.startswith(MAGIC_BYTES):
            return InvalidExample(location, "a damaged recording", _clean_error_text(error))
        return InvalidExample(location, "no recording in WAV, FLAC or OGG", f"it begins with {data[:12]!r}")
    if len(samples) < frames:
        return InvalidExample(
            location, "a damaged recording", f"it ends after {len(samples)} of {frames} samples"
        )
    if not len(samples):
        return InvalidExample(location, "a recording without a sample", "is it cut off?")
    if not np.isfinite(samples).all():
        return InvalidExample(location, "a damaged recording", "it has NaN or infinity among its samples")
    if (loudest := float(np.abs(samples).max())) > MAX_AMPLITUDE:
        return InvalidExample(
            location, "a damaged recording", f"it has samples up to {loudest:.3g}; 1 is full scale"
        )
    return samples, rate


def file_too_large(location: str, num_bytes: int, limits: AudioLimits) -> InvalidExample:
    """Of a file that nobody should read."""
    return InvalidExample(
        location, "a recording of too many bytes", f"{num_bytes}, and {limits.max_bytes} are the most"
    )


def _clean_error_text(error: Exception) -> str:
    """What libsndfile says, without the address of our buffer."""
    told = str(error).partition(">: ")[2] or str(error)
    return told.strip().rstrip(".") or "it cannot be decoded to its end"


def normalize_loudness(waveform: NDArray[Any], level_db: float) -> Waveform:
    """The same waveform at a mean square of so many dB of full scale, or less if a sample would pass 1."""
    waveform = np.asarray(waveform, np.float32)
    if not np.any(np.abs(waveform) > MIN_AMPLITUDE):
        return waveform
    root = math.sqrt(float(np.mean(np.square(waveform, dtype=np.float64))))
    factor = min(10 ** (level_db / 20) / root, 0.999 / float(np.abs(waveform).max()))
    return waveform * np.float32(factor)


def encode_wav(waveform: NDArray[Any], sample_rate: int) -> bytes:
    """A waveform as the bytes of a WAV file."""
    file = io.BytesIO()
    import_optional("soundfile", SPEECH_EXTRA).write(
        file, np.clip(waveform, -1, 1), sample_rate, format="WAV", subtype="PCM_16"
    )
    return file.getvalue()


def save_audio(path: Path, waveform: NDArray[Any], sample_rate: int) -> None:
    """Write a waveform; the name tells the format: .wav, .flac or .ogg."""
    formats = {".wav": ("WAV", "PCM_16"), ".flac": ("FLAC", "PCM_16"), ".ogg": ("OGG", "VORBIS")}
    if path.suffix.lower() not in formats:
        raise InputError(f"{path}: sound is written as {', '.join(formats)}")
    form, kind = formats[path.suffix.lower()]
    data = io.BytesIO()  # libsndfile does not report a full disk
    import_optional("soundfile", SPEECH_EXTRA).write(
        data, np.clip(waveform, -1, 1), sample_rate, format=form, subtype=kind
    )
    with atomic_write(path) as part:
        part.write_bytes(data.getvalue())
