"""Sound as numbers: from a file's bytes to a waveform, from a waveform to spectra, and back.

A *waveform* is ``(samples,)`` float32 between −1 and 1, of one channel, at the rate of the config whatever
the file had. Spectra are ``(frames, bands)`` float32, in decibels of which the range from ``floor`` to 0 (a
sine as loud as can be) is laid on 0 to 1::

    sound = Sound(SoundConfig(rate=16000))
    waveform = sound.waveform(Path("hello.ogg").read_bytes(), "hello.ogg")
    mel = sound.mel(waveform)            # (T, 80): silence is 0, speech mostly 0.3 to 0.8
    saved(Path("again.wav"), sound.wave(mel), 16000)

A spectrum has lost its phases; :meth:`Sound.wave` finds some that fit (Griffin and Lim 1984).
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

from jumok.data.files import needed
from jumok.data.formats import Flaw
from jumok.errors import InputError
from jumok.files import written

__all__ = [
    "LIMITS",
    "Limits",
    "Sound",
    "SoundConfig",
    "Spectra",
    "Wave",
    "decode",
    "louder",
    "saved",
    "too_large",
]

Wave = NDArray[np.float32]  # (samples,)
Spectra = NDArray[np.float32]  # (frames, bands)
# How files of sound begin that libsndfile reads and people have.
BEGINNINGS = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"FORM", b"ID3", b"\xff\xfb")
TOO_LONG = "too long a recording"
UNTOLD = (0, 0xFFFFFFFF)  # the size in the header of a WAV that was written as it came
EXTRA = "speech"
# Beyond the steps and the range of 32-bit integers, samples are silence or damaged. Numbers near the limits
# of float32 would become infinite when they are made as loud as others.
SOFTEST, LOUDEST = 2.0**-32, 2.0**32
UPDATES, TINY = 10, 1e-12  # from mel bands to magnitudes


@dataclass(frozen=True)
class Limits:
    """The most that a recording may have."""

    size: int = 256 << 20  # bytes of its file
    seconds: float = 600.0
    samples: int = 1 << 28  # of all channels


LIMITS = Limits()


@dataclass(frozen=True)
class SoundConfig:
    """How sound becomes spectra; times are in samples at ``rate``.

    The defaults are for 16 kHz; ``SoundConfig.at(8000)`` has the same times at another rate.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    rate: int = 16000
    fft: int = 1024
    hop: int = 200  # from one frame to the next, 12.5 ms
    window: int = 800  # that a frame looks at, 50 ms
    mels: int = 80
    lowest: float = 50.0  # Hz, of the mel bands
    highest: float | None = None  # None: half the rate
    preemphasis: float = 0.97  # how much of a sample is taken off the next; 0: none
    floor: float = -100.0  # dB: what is softer counts as silence
    linear: bool = False  # whether features have the linear spectrum behind the mel bands
    trim: float | None = None  # cut what is so many dB softer than the loudest, at both ends
    loudness: float | None = -24.0  # dB of full scale that the mean square is brought to; None: as it is

    def __post_init__(self) -> None:
        if not 1000 <= self.rate <= 192_000:
            raise InputError(f"rate {self.rate}: samples a second, from 1000 to 192000")
        if not 0 < self.hop <= self.window <= self.fft:
            raise InputError(
                f"hop {self.hop}, window {self.window} and fft {self.fft}: each is at most the next one"
            )
        if not 0 < self.mels < self.bins:
            raise InputError(f"mels {self.mels}: from 1 to {self.bins - 1}, less than fft / 2 + 1")
        if not 0 <= self.lowest < self.top <= self.rate / 2:
            raise InputError(
                f"mel bands from {self.lowest} to {self.top} Hz; expected rising, up to {self.rate / 2:g}, "
                "half the rate"
            )
        if not 0 <= self.preemphasis < 1:
            raise InputError(f"preemphasis {self.preemphasis}: from 0 to less than 1")
        if self.floor >= 0:
            raise InputError(f"floor {self.floor}: decibels below full scale, as in -100")
        if self.trim is not None and self.trim <= 0:
            raise InputError(f"trim {self.trim}: decibels below the loudest, as in 40; None cuts nothing")
        if self.loudness is not None and self.loudness >= 0:
            raise InputError(f"loudness {self.loudness}: decibels of full scale, as in -24")

    @classmethod
    def at(cls, rate: int, mels: int = 80) -> SoundConfig:
        """The usual times at another rate: 12.5 ms from frame to frame, of 50 ms each.

        >>> config = SoundConfig.at(8000)
        >>> config.fft, config.hop, config.window
        (512, 100, 400)
        """
        window = max(1, round(rate / 20))
        return cls(rate, 1 << math.ceil(math.log2(window)), max(1, window // 4), window, mels)

    @property
    def bins(self) -> int:
        """Of a linear spectrum."""
        return self.fft // 2 + 1

    @property
    def top(self) -> float:
        return self.rate / 2 if self.highest is None else self.highest

    @property
    def width(self) -> int:
        """The numbers of one frame of :meth:`Sound.features`."""
        return self.mels + (self.bins if self.linear else 0)

    @property
    def seconds(self) -> float:
        """From one frame to the next."""
        return self.hop / self.rate


class Sound:
    """Waveforms and spectra by one config."""

    def __init__(self, config: SoundConfig | None = None) -> None:
        self.config = config or SoundConfig()

    # ---------------------------------------------------------------------------------------- waveforms

    def waveform(self, data: bytes, where: str, limits: Limits = LIMITS) -> Wave | Flaw:
        """Of a file's bytes, trimmed and as loud as the config says; or why there is none."""
        found = decode(data, where, limits)
        if isinstance(found, Flaw):
            return found
        wave = self.prepared(*found)
        return wave if len(wave) else Flaw(where, "a recording of nothing but silence")

    def read(self, path: Path, limits: Limits = LIMITS) -> Wave:
        """The same of a file; an error if it cannot be used."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        found = self.waveform(data, str(path), limits)
        if isinstance(found, Flaw):
            raise InputError(str(found))
        return found

    def prepared(self, wave: NDArray[Any], rate: int) -> Wave:
        """Samples ``(n,)`` or ``(n, channels)`` of any rate, as the config has them; none of pure silence."""
        wave = np.asarray(wave, np.float32)
        if wave.ndim == 2:
            wave = wave.mean(1)
        if rate != self.config.rate and len(wave):
            librosa = needed("librosa", EXTRA)
            wave = librosa.resample(wave, orig_sr=rate, target_sr=self.config.rate, res_type="soxr_hq")
        if not np.any(np.abs(wave) > SOFTEST):
            return np.zeros(0, np.float32)
        if self.config.trim is not None:
            trim = needed("librosa.effects", EXTRA).trim
            loud = wave / np.abs(wave).max()  # for librosa, what is very soft is not softer than silence
            times = {"frame_length": self.config.window, "hop_length": self.config.hop}
            _, (begin, end) = trim(loud, top_db=self.config.trim, **times)
            wave = wave[begin:end]
        if self.config.loudness is not None:
            wave = louder(wave, self.config.loudness)
        return np.ascontiguousarray(wave, np.float32)

    # ------------------------------------------------------------------------------------------ spectra

    def mel(self, wave: Wave) -> Spectra:
        """``(T, mels)``: in each band, the mean of the magnitudes; T is 1 + samples // hop."""
        return self._scaled(_mels(self.config) @ self._magnitudes(wave))

    def linear(self, wave: Wave) -> Spectra:
        """``(T, fft / 2 + 1)``: the magnitudes."""
        return self._scaled(self._magnitudes(wave))

    def features(self, wave: Wave) -> Spectra:
        """``(T, width)``: mel bands, and the linear spectrum behind them if the config says so."""
        magnitudes = self._magnitudes(wave)
        both = [_mels(self.config) @ magnitudes, *([magnitudes] if self.config.linear else [])]
        return self._scaled(np.concatenate(both))

    def wave(self, spectra: NDArray[Any], *, turns: int = 32, sharpen: float = 1.0) -> Wave:
        """A waveform whose spectra are about these: of mel bands, or linear ones, as the width tells.

        ``sharpen`` raises magnitudes to a power: what a model says is blurred, and 1.2 or so is heard better.
        The same spectra give the same waveform.
        """
        config = self.config
        spectra = np.asarray(spectra, np.float64)
        if spectra.ndim != 2 or spectra.shape[1] not in (config.mels, config.bins) or not len(spectra):
            raise InputError(
                f"spectra of shape {spectra.shape} came; expected (frames, {config.mels}) mel bands or "
                f"(frames, {config.bins}) magnitudes"
            )
        if not np.isfinite(spectra).all():
            raise InputError("spectra with NaN or infinity came; they cannot be heard")
        level = (1 - np.clip(spectra.T, 0, 1.2)) * config.floor  # dB
        magnitudes = np.where(spectra.T > 0, 10 ** (level / 20), 0.0)
        if len(magnitudes) == config.mels:
            magnitudes = _unmixed(_mels(config).astype(np.float64), magnitudes)
        librosa = needed("librosa", EXTRA)
        length = max(1, len(spectra) - 1) * config.hop
        short = max(0, -(-config.fft // config.hop) + 1 - len(spectra))  # what librosa would warn of
        sharp = magnitudes**sharpen
        sharp *= math.sqrt(
            np.square(magnitudes).sum() / max(np.square(sharp).sum(), TINY)
        )  # as loud as before
        magnitudes = np.pad(sharp, ((0, 0), (0, short))) * self._full
        wave = librosa.griffinlim(
            magnitudes.astype(np.float32),
            n_iter=turns,
            hop_length=config.hop,
            win_length=config.window,
            n_fft=config.fft,
            random_state=0,
        )[:length]
        if config.preemphasis:
            wave = needed("librosa.effects", EXTRA).deemphasis(wave, coef=config.preemphasis, zi=[0.0])
        return np.asarray(wave, np.float32)

    @property
    def _full(self) -> float:
        """What a sine as loud as can be has for a magnitude: half the sum of a Hann window."""
        return self.config.window / 4

    def _magnitudes(self, wave: Wave) -> NDArray[np.float32]:
        """``(bins, T)``, a full sine being 1."""
        config, librosa = self.config, needed("librosa", EXTRA)
        if wave.ndim != 1 or not len(wave):
            raise InputError(f"a waveform of shape {wave.shape} came; expected (samples,), one or more")
        wave = np.asarray(wave, np.float32)
        if config.preemphasis:
            wave = np.append(wave[:1], wave[1:] - np.float32(config.preemphasis) * wave[:-1])
        short = config.fft - len(wave)  # what librosa would warn of
        if short > 0:
            wave = np.pad(wave, (0, short))
        complex_ = librosa.stft(wave, n_fft=config.fft, hop_length=config.hop, win_length=config.window)
        magnitudes: NDArray[np.float32] = np.abs(complex_) / np.float32(self._full)
        return magnitudes[:, : 1 + (len(wave) - max(short, 0)) // config.hop]

    def _scaled(self, magnitudes: NDArray[np.float32]) -> Spectra:
        floor = self.config.floor
        level = 20 * np.log10(np.maximum(magnitudes.T, 10 ** (floor / 20)))
        return np.clip(1 - level / floor, 0, 1.2).astype(np.float32)


@functools.lru_cache(8)
def _mels(config: SoundConfig) -> NDArray[np.float32]:
    """``(mels, bins)``, each row a mean: its weights sum to 1."""
    librosa, filters = needed("librosa", EXTRA), needed("librosa.filters", EXTRA)
    bands = {"n_mels": config.mels, "fmin": config.lowest, "fmax": config.top}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Empty filters detected")
        bank: NDArray[np.float32] = filters.mel(sr=config.rate, n_fft=config.fft, norm=None, **bands)
    # A band that is narrower than the bins may lie between two of them: it takes the nearest.
    edges = librosa.mel_frequencies(config.mels + 2, fmin=config.lowest, fmax=config.top)
    nearest = np.rint(edges[1:-1] * config.fft / config.rate).astype(int)
    empty = np.flatnonzero(bank.sum(1) == 0)
    bank[empty, nearest[empty]] = 1.0
    means: NDArray[np.float32] = bank / bank.sum(1, keepdims=True)
    return means


def _unmixed(bank: NDArray[np.float64], bands: NDArray[np.float64]) -> NDArray[np.float64]:
    """Magnitudes ``(bins, T)``, none below 0, whose means are about these bands ``(mels, T)``.

    By multiplicative updates (Lee and Seung 2001): nearer to the bands, soft ones above all, than librosa's
    general solver is after ten times as long.
    """
    found: NDArray[np.float64] = bank.T @ bands / (bank.T.sum(1, keepdims=True) + TINY)
    wanted, squared = bank.T @ bands, bank.T @ bank
    for _ in range(UPDATES):
        found *= wanted / (squared @ found + TINY)
    return found


def decode(data: bytes, where: str, limits: Limits = LIMITS) -> tuple[NDArray[np.float32], int] | Flaw:
    """The samples ``(n, channels)`` of a file's bytes and their rate, or why there are none."""
    if not data:
        return Flaw(where, "an empty recording")
    if len(data) > limits.size:
        return too_large(where, len(data), limits)
    if data[:4] == b"RIFF" and (told := int.from_bytes(data[4:8], "little")) not in UNTOLD:
        missing = told + 8 - len(data)
        if missing > 1:  # a last byte of padding is often left out
            return Flaw(where, "a damaged recording", f"the last {missing} bytes are missing")
    soundfile = needed("soundfile", EXTRA)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            seconds, all_samples = file.frames / file.samplerate, file.frames * file.channels
            if seconds > limits.seconds:
                told_of = f"{seconds:.0f} seconds, and {limits.seconds:.0f} are the most"
                return Flaw(where, TOO_LONG, told_of)
            if all_samples > limits.samples:
                return Flaw(where, TOO_LONG, f"{all_samples} samples, and {limits.samples} are the most")
            samples, rate, frames = file.read(dtype="float32", always_2d=True), file.samplerate, file.frames
    except soundfile.SoundFileError as error:
        if data.startswith(BEGINNINGS):
            return Flaw(where, "a damaged recording", _reason(error))
        return Flaw(where, "no recording in WAV, FLAC or OGG", f"it begins with {data[:12]!r}")
    if len(samples) < frames:
        return Flaw(where, "a damaged recording", f"it ends after {len(samples)} of {frames} samples")
    if not len(samples):
        return Flaw(where, "a recording without a sample", "is it cut off?")
    if not np.isfinite(samples).all():
        return Flaw(where, "a damaged recording", "it has NaN or infinity among its samples")
    if (loudest := float(np.abs(samples).max())) > LOUDEST:
        return Flaw(where, "a damaged recording", f"it has samples up to {loudest:.3g}; 1 is full scale")
    return samples, rate


def too_large(where: str, size: int, limits: Limits) -> Flaw:
    """Of a file that nobody should read."""
    return Flaw(where, "a recording of too many bytes", f"{size}, and {limits.size} are the most")


def _reason(error: Exception) -> str:
    """What libsndfile says, without the address of our buffer."""
    told = str(error).partition(">: ")[2] or str(error)
    return told.strip().rstrip(".") or "it cannot be decoded to its end"


def louder(wave: NDArray[Any], level: float) -> Wave:
    """The same waveform at a mean square of so many dB of full scale, or less if a sample would pass 1."""
    wave = np.asarray(wave, np.float32)
    if not np.any(np.abs(wave) > SOFTEST):
        return wave
    root = math.sqrt(float(np.mean(np.square(wave, dtype=np.float64))))
    factor = min(10 ** (level / 20) / root, 0.999 / float(np.abs(wave).max()))
    return wave * np.float32(factor)


def wav(wave: NDArray[Any], rate: int) -> bytes:
    """A waveform as the bytes of a WAV file."""
    file = io.BytesIO()
    needed("soundfile", EXTRA).write(file, np.clip(wave, -1, 1), rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def saved(path: Path, wave: NDArray[Any], rate: int) -> None:
    """Write a waveform; the name tells the format: .wav, .flac or .ogg."""
    formats = {".wav": ("WAV", "PCM_16"), ".flac": ("FLAC", "PCM_16"), ".ogg": ("OGG", "VORBIS")}
    if path.suffix.lower() not in formats:
        raise InputError(f"{path}: sound is written as {', '.join(formats)}")
    form, kind = formats[path.suffix.lower()]
    data = io.BytesIO()  # libsndfile does not report a full disk
    needed("soundfile", EXTRA).write(data, np.clip(wave, -1, 1), rate, format=form, subtype=kind)
    with written(path) as part:
        part.write_bytes(data.getvalue())
