"""Sound as numbers: what is read is what was written, spectra are what they say, and files may be broken."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jumok.data.audio import AudioConfig, AudioLimits, AudioProcessor, decode_audio, normalize_loudness, save_audio
from jumok.data.builtin.spoken_numbers import synthesize_text
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.errors import InputError, MissingExtra

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("librosa")


def sine(pitch: float, rate: int = 16000, seconds: float = 0.5, loud: float = 0.5) -> np.ndarray:
    return (loud * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def encoded(wave: np.ndarray, rate: int, form: str, kind: str | None = None) -> bytes:
    with io.BytesIO() as file:
        soundfile.write(file, wave, rate, format=form, subtype=kind)
        return file.getvalue()


def height(wave: np.ndarray, rate: int) -> float:
    """The frequency of a sine."""
    return float(np.abs(np.fft.rfft(wave * np.hanning(len(wave)))).argmax() * rate / len(wave))


# --------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("form", "kind"), [("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")]
)
def test_stereo_at_44_khz_is_read_as_16_khz_mono(form: str, kind: str) -> None:
    both = np.stack([sine(440, 44100), 0.2 * sine(440, 44100)], 1)
    wave = AudioProcessor(AudioConfig(target_level_db=None)).decode_waveform(encoded(both, 44100, form, kind), "a")
    assert not isinstance(wave, InvalidExample)
    assert wave.dtype == np.float32
    assert wave.shape == (8000,)
    assert height(wave, 16000) == 440
    assert np.abs(wave[1000:-1000]).max() == pytest.approx(0.5 * 0.6, rel=0.03)


def test_what_is_above_half_the_rate_does_not_fold_back() -> None:
    wave = AudioProcessor(AudioConfig.for_sample_rate(8000)).preprocess(sine(440, 48000) + sine(7000, 48000), 48000)
    spectrum = np.abs(np.fft.rfft(wave))
    assert spectrum[1000 // 2].max() < 0.001 * spectrum.max()  # 8000 − 7000, in steps of 2 Hz


def test_quiet_recordings_are_made_as_loud_as_others_and_silence_is_cut() -> None:
    quiet = np.concatenate([np.zeros(8000), sine(300, loud=0.001), np.zeros(4800)])
    sound = AudioProcessor(AudioConfig(trim_db=40.0, target_level_db=-20.0))
    wave = sound.preprocess(quiet, 16000)
    assert len(wave) == pytest.approx(8000, abs=1000)
    assert 10 * math.log10(np.mean(wave**2)) == pytest.approx(-20, abs=0.01)
    clicks = np.zeros(16000)
    clicks[::1000] = 0.01  # as loud as that, they would be cut off
    assert np.abs(normalize_loudness(clicks, -20)).max() == pytest.approx(0.999)
    np.testing.assert_array_equal(
        AudioProcessor(AudioConfig(target_level_db=None)).preprocess(quiet, 16000), quiet.astype("f4")
    )


def damaged() -> dict[str, tuple[bytes, str]]:
    noise = np.random.default_rng(1).normal(size=16000).clip(-3, 3) / 4
    flac, ogg = encoded(noise, 16000, "FLAC"), encoded(noise, 16000, "OGG", "VORBIS")
    wav = encoded(noise, 16000, "WAV")
    return {
        "half.flac": (flac[: len(flac) // 2], "a damaged recording"),
        "begun.flac": (flac[:20], "a damaged recording"),
        "half.wav": (wav[: len(wav) // 2], "a damaged recording (the last 16022 bytes are missing)"),
        "half.ogg": (ogg[: len(ogg) // 2], "a recording without samples"),
        "text.wav": (b"this is no sound at all\n" * 9, "not a recording in WAV, FLAC or OGG"),
        "nothing.wav": (b"", "an empty recording"),
        "none.wav": (encoded(np.zeros(0), 16000, "WAV"), "a recording without samples"),
        "silent.wav": (encoded(np.zeros(1600), 16000, "WAV"), "a silent recording"),
        "nan.wav": (encoded(np.full(160, math.nan), 16000, "WAV", "FLOAT"), "its samples contain NaN"),
    }


@pytest.mark.parametrize("name", damaged())
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    data, reason = damaged()[name]
    flaw = AudioProcessor().decode_waveform(data, name)
    assert isinstance(flaw, InvalidExample)
    assert flaw.location == name
    assert reason in str(flaw)
    assert "0x" not in str(flaw)  # no address of a buffer of ours
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=name):
        AudioProcessor().read_waveform(tmp_path / name)


def test_a_wav_that_does_not_know_its_size_is_read() -> None:
    whole = encoded(sine(440), 16000, "WAV")
    for size in (b"\xff\xff\xff\xff", b"\0\0\0\0"):
        told = decode_audio(whole[:4] + size + whole[8:], "a")
        assert not isinstance(told, InvalidExample)
        assert told[0].shape == (8000, 1)


def test_limits() -> None:
    data = encoded(sine(440, seconds=2), 16000, "WAV")
    assert "too long a recording (2 seconds; the limit is 1" in str(decode_audio(data, "a", AudioLimits(max_seconds=1)))
    assert "too many bytes" in str(decode_audio(data, "a", AudioLimits(max_bytes=1000)))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[speech\]"'):
        decode_audio(b"RIFF", "a")


# --------------------------------------------------------------------------------------------------- spectra


def test_a_sine_is_at_its_place_and_as_loud_as_it_is() -> None:
    sound = AudioProcessor(AudioConfig(preemphasis=0.0))
    linear = sound.linear_spectrogram(sine(1000, loud=0.1))
    assert linear.shape == (1 + 8000 // 200, 513)
    assert linear.dtype == np.float32
    middle = linear[20]
    assert middle.argmax() == 1000 * 1024 / 16000
    assert middle.max() == pytest.approx(1 - 20 / 100, abs=0.001)  # −20 dB of 100
    mel = sound.mel_spectrogram(sine(1000, loud=0.1))
    assert mel.shape == (41, 80)
    import librosa

    middles = librosa.mel_frequencies(82, fmin=50, fmax=8000)[1:-1]
    assert mel[20].argmax() == np.abs(middles - 1000).argmin()
    assert 0.7 < mel[20].max() < 0.8


def test_silence_is_zero_and_short_sounds_have_a_frame() -> None:
    sound = AudioProcessor()
    assert not sound.mel_spectrogram(np.zeros(1000, np.float32)).any()
    for samples, frames in ((1, 1), (199, 1), (200, 2), (1023, 6)):
        assert sound.mel_spectrogram(np.ones(samples, np.float32)).shape == (frames, 80)


def test_features_are_mel_and_linear_side_by_side() -> None:
    wave = synthesize_text("two").waveform
    sound = AudioProcessor(AudioConfig(linear_spectrogram=True))
    both = sound.extract_features(wave)
    assert both.shape[1] == sound.config.num_features == 80 + 513
    np.testing.assert_array_equal(both[:, :80], sound.mel_spectrogram(wave))
    np.testing.assert_array_equal(both[:, 80:], sound.linear_spectrogram(wave))
    np.testing.assert_array_equal(AudioProcessor().extract_features(wave), sound.mel_spectrogram(wave))


@pytest.mark.parametrize("rate", [16000, 8000])
@pytest.mark.parametrize("kind", ["mel_spectrogram", "linear_spectrogram"])
def test_from_spectra_to_a_waveform_and_back(kind: str, rate: int) -> None:
    sound = AudioProcessor(AudioConfig.for_sample_rate(rate))
    said = synthesize_text("seven", sample_rate=rate)
    spectra = getattr(sound, kind)(said.waveform)
    wave = sound.reconstruct_waveform(spectra)
    assert len(wave) == pytest.approx(len(said.waveform), abs=sound.config.hop_length)
    again = getattr(sound, kind)(wave)
    assert again.shape == spectra.shape
    loud = spectra > 0.4  # of what is soft, nobody hears the error
    assert np.abs(again - spectra)[loud].mean() < 0.03  # 3 dB of 100
    assert np.corrcoef(again.ravel(), spectra.ravel())[0, 1] > 0.97
    np.testing.assert_array_equal(wave, sound.reconstruct_waveform(spectra))  # no chance in it


def test_what_cannot_be_heard() -> None:
    with pytest.raises(InputError, match=r"\(frames, 80\) mel bands or \(frames, 513\)"):
        AudioProcessor().reconstruct_waveform(np.zeros((7, 81)))
    with pytest.raises(InputError, match="NaN"):
        AudioProcessor().reconstruct_waveform(np.full((7, 80), math.nan))
    with pytest.raises(InputError, match="the waveform has shape"):
        AudioProcessor().mel_spectrogram(np.zeros((7, 2), np.float32))
    assert not AudioProcessor().reconstruct_waveform(np.zeros((7, 80))).any()
    assert len(AudioProcessor().reconstruct_waveform(np.zeros((1, 80)))) == 200


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg"])
def test_what_is_saved_can_be_read(tmp_path: Path, name: str) -> None:
    save_audio(tmp_path / name, sine(440, loud=0.3), 16000)
    wave = AudioProcessor(AudioConfig(target_level_db=None)).read_waveform(tmp_path / name)
    assert height(wave, 16000) == 440
    assert np.abs(wave[1000:-1000]).max() == pytest.approx(0.3, rel=0.05)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(InputError, match=r"\.wav, \.flac, \.ogg"):
        save_audio(tmp_path / "a.xyz", sine(440), 16000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sample_rate": 10},
        {"hop_length": 900},
        {"win_length": 2048},
        {"n_mels": 513},
        {"f_max": 9000.0},
        {"f_min": 8000.0},
        {"preemphasis": 1.0},
        {"min_level_db": 0.0},
        {"trim_db": 0.0},
        {"target_level_db": 3.0},
    ],
)
def test_a_config_that_does_not_fit_together(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        AudioConfig(**wrong)


def test_the_same_times_at_another_rate() -> None:
    config = AudioConfig.for_sample_rate(22050)
    assert config.frame_seconds == pytest.approx(0.0125, rel=0.01)
    assert (config.n_fft, config.win_length) == (2048, 1102)
    assert AudioConfig.for_sample_rate(16000) == AudioConfig()


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20, 1e-10, 1e-9, 1e9, 1e11, 3e38])
def test_samples_at_the_limits_of_float_give_a_waveform_or_a_flaw(size: float, rate: int, channels: int) -> None:
    """A float WAV may hold numbers that become infinite when they are made as loud as others."""
    file = io.BytesIO()
    samples = np.full((4000, channels), size, np.float32) * np.where(np.arange(4000) % 7, 1, -1)[:, None]
    soundfile.write(file, samples.astype(np.float32), rate, format="WAV", subtype="FLOAT")
    for trim in (None, 30.0):
        sound = AudioProcessor(replace(AudioConfig(sample_rate=16000), trim_db=trim))
        found = sound.decode_waveform(file.getvalue(), "x.wav")
        if isinstance(found, InvalidExample):
            assert size <= 1e-10 or size >= 1e11
        else:
            assert 1e-10 < size < 1e11
            assert np.isfinite(found).all()
            assert 0 < np.abs(found).max() <= 1
            assert np.isfinite(sound.mel_spectrogram(found)).all()
