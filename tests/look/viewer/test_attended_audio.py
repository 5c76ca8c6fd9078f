"""Tests of a recording and its frames, with numbers that can be checked by hand."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jumok.errors import InputError
from jumok.look.figures.audio_figure import AudioFigure
from jumok.look.viewer.attended_audio import AttendedAudio, AudioFrames
from jumok.look.viewer.viewer_data import ViewerData

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_audio import WORDS, build_audio_data


def test_frames_have_times() -> None:
    frames = AudioFrames(3, -0.01, 0.02)
    assert frames.end == pytest.approx(0.05)
    assert frames.format_times() == ["0.00 s", "0.02 s", "0.04 s"]
    assert AudioFrames(2, 0.0, 0.005).format_times() == ["0.003 s", "0.007 s"]  # more digits for short frames


def test_spectrogram_and_sound_are_those_of_the_waveform() -> None:
    time = np.arange(44100) / 44100
    waveform = np.where(time < 0.5, 0, 0.5 * np.sin(2 * np.pi * 1000 * time)).astype(np.float32)
    audio = AttendedAudio.from_waveform(waveform, 44100, {"a": AudioFrames(10, 0.0, 0.1)})
    assert audio.duration == 1.0
    assert audio.end == pytest.approx(1.0, abs=audio.frame_seconds)
    half = len(audio.mel) // 2
    assert audio.mel[: half - 4].max() < 0.1 < 0.5 < audio.mel[half + 4 :].max(1).min()
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio.to_json()["wav"])))
    assert (rate, len(samples)) == (16000, 16000)  # no more than speech needs
    assert np.abs(np.fft.rfft(samples)).argmax() == 1000
    long = AttendedAudio.from_waveform(np.full(16000 * 200, 0.1, np.float32), 16000, {"a": AudioFrames(10, 0.0, 0.1)})
    assert soundfile.info(io.BytesIO(long.wav_bytes or b"")).samplerate == 8000
    assert len(long.mel) <= 4000
    assert long.end == pytest.approx(200, abs=0.1)
    assert long.compute_file_size() < 6 << 20


def test_layers_match_by_name_and_size() -> None:
    data = build_audio_data()
    assert data.audio is not None
    assert [data.audio.matches(layer) for layer in data.layers] == [True]
    waveform = np.zeros(16000, np.float32)
    for frames in ({"b": AudioFrames(5, 0.0, 0.2)}, {"a": AudioFrames(4, 0.0, 0.2)}):
        audio = AttendedAudio.from_waveform(waveform, 16000, frames)
        with pytest.raises(InputError, match="the layers have these keys: a 5"):
            ViewerData.from_weights({"a": np.ones((2, 5))}, audio=audio)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ({}, "no key_frames were given"),
        ({"a": AudioFrames(150, 0.0, 0.02)}, "150 frames of a end at 3.00 s, and the recording has 1.00 s"),
    ],
)
def test_invalid_frames_are_rejected(frames: dict[str, AudioFrames], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        AttendedAudio.from_waveform(np.zeros(16000, np.float32), 16000, frames)
    with pytest.raises(InputError, match="expected at least one frame"):
        AudioFrames(0, 0.0, 0.02)


def test_figure_has_the_spectrogram_above_the_words() -> None:
    data = build_audio_data()
    (layer,), audio = data.layers, data.audio
    assert audio is not None
    frames = audio.key_frames[layer.name]
    figure = AudioFigure(audio, frames, layer.row_texts, layer.compute_weights(0), title="a title").build()
    weights_axes, mel_axes = figure.axes[:2]
    assert [text.get_text() for text in weights_axes.get_yticklabels()] == [word.strip("▁") for word in WORDS]
    assert weights_axes.get_ylim()[0] > weights_axes.get_ylim()[1]  # from top to bottom
    assert weights_axes.get_xlim() == mel_axes.get_xlim() == (0, audio.duration)
    left, right, bottom, top = weights_axes.images[0].get_extent()
    assert (left, right) == pytest.approx((frames.start, frames.end))
    assert bottom > top
    with pytest.raises(InputError, match="expected"):
        AudioFigure(audio, frames, ["one"], layer.compute_weights(0))
    square = AudioFigure(audio, frames, None, np.eye(frames.num_frames)).build()
    assert square.axes[0].get_ylim() == (audio.duration, 0)
