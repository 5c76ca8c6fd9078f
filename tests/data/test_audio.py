"""Audio: decoding, spectrograms, waveforms from spectrograms, and damaged files."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from jumok.data.audio import AudioConfig, AudioLimits, AudioProcessor, decode_audio, normalize_loudness, save_audio
from jumok.data.builtin.spoken_numbers import synthesize_text
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.errors import InputError, MissingExtra

pytestmark = pytest.mark.long


soundfile = pytest.importorskip("soundfile")
librosa = pytest.importorskip("librosa")


def sine(frequency: float, sample_rate: int = 16000, seconds: float = 0.5, amplitude: float = 0.5) -> np.ndarray:
    times = np.arange(int(seconds * sample_rate)) / sample_rate
    return (amplitude * np.sin(2 * np.pi * frequency * times)).astype(np.float32)


def encode(waveform: np.ndarray, sample_rate: int, format_name: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, waveform, sample_rate, format=format_name, subtype=subtype)
    return file.getvalue()


def find_frequency(waveform: np.ndarray, sample_rate: int) -> float:
    """The frequency of a sine."""
    return float(np.abs(np.fft.rfft(waveform * np.hanning(len(waveform)))).argmax() * sample_rate / len(waveform))


# -------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    ("format_name", "subtype"),
    [("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")],
)
def test_stereo_at_44_khz_becomes_mono_at_16_khz(format_name: str, subtype: str) -> None:
    data = encode(np.stack([sine(440, 44100), 0.2 * sine(440, 44100)], 1), 44100, format_name, subtype)
    waveform = AudioProcessor(AudioConfig(target_level_db=None)).decode_waveform(data, "a")
    assert not isinstance(waveform, InvalidExample)
    assert (waveform.dtype, waveform.shape) == (np.float32, (8000,))
    assert find_frequency(waveform, 16000) == 440
    assert np.abs(waveform[1000:-1000]).max() == pytest.approx(0.5 * 0.6, rel=0.03)


def test_resampling_has_no_aliasing() -> None:
    processor = AudioProcessor(AudioConfig.for_sample_rate(8000))
    spectrum = np.abs(np.fft.rfft(processor.preprocess(sine(440, 48000) + sine(7000, 48000), 48000)))
    assert spectrum[1000 // 2].max() < 0.001 * spectrum.max()  # 8000 − 7000, in steps of 2 Hz


def test_preprocessing_trims_silence_and_normalizes_loudness() -> None:
    quiet = np.concatenate([np.zeros(8000), sine(300, amplitude=0.001), np.zeros(4800)])
    waveform = AudioProcessor(AudioConfig(trim_db=40.0, target_level_db=-20.0)).preprocess(quiet, 16000)
    assert len(waveform) == pytest.approx(8000, abs=1000)
    assert 10 * math.log10(np.mean(waveform**2)) == pytest.approx(-20, abs=0.01)
    clicks = np.zeros(16000)
    clicks[::1000] = 0.01  # at −20 dB, they would be clipped
    assert np.abs(normalize_loudness(clicks, -20)).max() == pytest.approx(0.999)
    unchanged = AudioProcessor(AudioConfig(target_level_db=None)).preprocess(quiet, 16000)
    np.testing.assert_array_equal(unchanged, quiet.astype("f4"))


def make_damaged_files() -> dict[str, tuple[bytes, str]]:
    noise = np.random.default_rng(1).normal(size=16000).clip(-3, 3) / 4
    flac, ogg, wav = encode(noise, 16000, "FLAC"), encode(noise, 16000, "OGG", "VORBIS"), encode(noise, 16000, "WAV")
    return {
        "half.flac": (flac[: len(flac) // 2], "a damaged recording"),
        "header.flac": (flac[:20], "a damaged recording"),
        "half.wav": (wav[: len(wav) // 2], "a damaged recording (the last 16022 bytes are missing)"),
        "half.ogg": (ogg[: len(ogg) // 2], "a recording without samples"),
        "text.wav": (b"this is no sound at all\n" * 9, "not a recording in WAV, FLAC or OGG"),
        "empty.wav": (b"", "an empty recording"),
        "no-samples.wav": (encode(np.zeros(0), 16000, "WAV"), "a recording without samples"),
        "silent.wav": (encode(np.zeros(1600), 16000, "WAV"), "a silent recording"),
        "nan.wav": (encode(np.full(160, math.nan), 16000, "WAV", "FLOAT"), "its samples contain NaN"),
    }


@pytest.mark.parametrize("name", make_damaged_files())
def test_damaged_files_are_invalid(tmp_path: Path, name: str) -> None:
    data, reason = make_damaged_files()[name]
    result = AudioProcessor().decode_waveform(data, name)
    assert isinstance(result, InvalidExample)
    assert result.location == name
    assert reason in str(result)
    assert "0x" not in str(result)  # no address of a buffer
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=name):
        AudioProcessor().read_waveform(tmp_path / name)


@pytest.mark.parametrize("size", [b"\xff\xff\xff\xff", b"\0\0\0\0"])
def test_wav_of_unknown_size(size: bytes) -> None:
    data = encode(sine(440), 16000, "WAV")
    decoded = decode_audio(data[:4] + size + data[8:], "a")
    assert not isinstance(decoded, InvalidExample)
    assert decoded[0].shape == (8000, 1)


def test_limits() -> None:
    data = encode(sine(440, seconds=2), 16000, "WAV")
    assert "too long a recording (2 seconds; the limit is 1" in str(decode_audio(data, "a", AudioLimits(max_seconds=1)))
    assert "too many bytes" in str(decode_audio(data, "a", AudioLimits(max_bytes=1000)))


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[speech\]"'):
        decode_audio(b"RIFF", "a")


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("sample_rate", [8000, 16000])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20, 1e-10, 1e-9, 1e9, 1e11, 3e38])
def test_extreme_samples_give_a_finite_waveform_or_are_invalid(size: float, sample_rate: int, channels: int) -> None:
    """A float WAV may contain numbers that would become infinite when their loudness is normalized."""
    samples = np.full((4000, channels), size, np.float32) * np.where(np.arange(4000) % 7, 1, -1)[:, None]
    data = encode(samples.astype(np.float32), sample_rate, "WAV", "FLOAT")
    for trim_db in (None, 30.0):
        processor = AudioProcessor(AudioConfig(trim_db=trim_db))
        waveform = processor.decode_waveform(data, "x.wav")
        if isinstance(waveform, InvalidExample):
            assert size <= 1e-10 or size >= 1e11
        else:
            assert 1e-10 < size < 1e11
            assert np.isfinite(waveform).all()
            assert 0 < np.abs(waveform).max() <= 1
            assert np.isfinite(processor.mel_spectrogram(waveform)).all()


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg"])
def test_save_and_read(tmp_path: Path, name: str) -> None:
    save_audio(tmp_path / name, sine(440, amplitude=0.3), 16000)
    waveform = AudioProcessor(AudioConfig(target_level_db=None)).read_waveform(tmp_path / name)
    assert find_frequency(waveform, 16000) == 440
    assert np.abs(waveform[1000:-1000]).max() == pytest.approx(0.3, rel=0.05)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(InputError, match=r"\.wav, \.flac, \.ogg"):
        save_audio(tmp_path / "a.xyz", sine(440), 16000)


# ---------------------------------------------------------------------------------------------- spectrograms


def test_spectrogram_of_a_sine() -> None:
    processor = AudioProcessor(AudioConfig(preemphasis=0.0))
    waveform = sine(1000, amplitude=0.1)
    linear, mel = processor.linear_spectrogram(waveform), processor.mel_spectrogram(waveform)
    assert (linear.shape, linear.dtype, mel.shape) == ((1 + 8000 // 200, 513), np.float32, (41, 80))
    assert linear[20].argmax() == 1000 * 1024 / 16000
    assert linear[20].max() == pytest.approx(1 - 20 / 100, abs=0.001)  # −20 dB of 100
    band_centers = librosa.mel_frequencies(82, fmin=50, fmax=8000)[1:-1]
    assert mel[20].argmax() == np.abs(band_centers - 1000).argmin()
    assert 0.7 < mel[20].max() < 0.8


def test_silence_is_zero_and_short_waveforms_have_a_frame() -> None:
    processor = AudioProcessor()
    assert not processor.mel_spectrogram(np.zeros(1000, np.float32)).any()
    for num_samples, num_frames in ((1, 1), (199, 1), (200, 2), (1023, 6)):
        assert processor.mel_spectrogram(np.ones(num_samples, np.float32)).shape == (num_frames, 80)


def test_features_are_mel_and_linear_bands() -> None:
    waveform = synthesize_text("two").waveform
    processor = AudioProcessor(AudioConfig(linear_spectrogram=True))
    features = processor.extract_features(waveform)
    assert features.shape[1] == processor.config.num_features == 80 + 513
    np.testing.assert_array_equal(features[:, :80], processor.mel_spectrogram(waveform))
    np.testing.assert_array_equal(features[:, 80:], processor.linear_spectrogram(waveform))
    np.testing.assert_array_equal(AudioProcessor().extract_features(waveform), features[:, :80])


@pytest.mark.parametrize("sample_rate", [16000, 8000])
@pytest.mark.parametrize("method", ["mel_spectrogram", "linear_spectrogram"])
def test_reconstructed_waveform_has_the_same_spectrogram(method: str, sample_rate: int) -> None:
    processor = AudioProcessor(AudioConfig.for_sample_rate(sample_rate))
    original = synthesize_text("seven", sample_rate=sample_rate).waveform
    spectrogram = getattr(processor, method)(original)
    waveform = processor.reconstruct_waveform(spectrogram)
    assert len(waveform) == pytest.approx(len(original), abs=processor.config.hop_length)
    reconstructed = getattr(processor, method)(waveform)
    assert reconstructed.shape == spectrogram.shape
    is_loud = spectrogram > 0.4  # errors of quiet parts are inaudible
    assert np.abs(reconstructed - spectrogram)[is_loud].mean() < 0.03  # 3 dB of 100
    assert np.corrcoef(reconstructed.ravel(), spectrogram.ravel())[0, 1] > 0.97
    np.testing.assert_array_equal(waveform, processor.reconstruct_waveform(spectrogram))  # deterministic


def test_invalid_spectrograms_and_waveforms_are_errors() -> None:
    processor = AudioProcessor()
    with pytest.raises(InputError, match=r"\(frames, 80\) mel bands or \(frames, 513\)"):
        processor.reconstruct_waveform(np.zeros((7, 81)))
    with pytest.raises(InputError, match="NaN"):
        processor.reconstruct_waveform(np.full((7, 80), math.nan))
    with pytest.raises(InputError, match="the waveform has shape"):
        processor.mel_spectrogram(np.zeros((7, 2), np.float32))
    assert not processor.reconstruct_waveform(np.zeros((7, 80))).any()
    assert len(processor.reconstruct_waveform(np.zeros((1, 80)))) == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sample_rate", 10),
        ("hop_length", 900),
        ("win_length", 2048),
        ("n_mels", 513),
        ("f_max", 9000.0),
        ("f_min", 8000.0),
        ("preemphasis", 1.0),
        ("min_level_db", 0.0),
        ("trim_db", 0.0),
        ("target_level_db", 3.0),
    ],
)
def test_invalid_config_is_an_error(name: str, value: float) -> None:
    with pytest.raises(InputError, match=name):
        AudioConfig(**{name: value})  # type: ignore[arg-type]


def test_config_for_another_sample_rate_has_the_same_durations() -> None:
    config = AudioConfig.for_sample_rate(22050)
    assert config.frame_seconds == pytest.approx(0.0125, rel=0.01)
    assert (config.n_fft, config.win_length) == (2048, 1102)
    assert AudioConfig.for_sample_rate(16000) == AudioConfig()
