"""A recording with a tone for each word, and attention of each word to its tone."""

from __future__ import annotations

import numpy as np

from jumok.look.viewer.attended_audio import AttendedAudio, AudioFrames
from jumok.look.viewer.viewer_data import ViewerData

SAMPLE_RATE, NUM_FRAMES, STEP = 16000, 60, 0.04  # 2.4 seconds
WORDS = ["▁the", "▁quick", "▁brown", "▁fox"]
DURATION = NUM_FRAMES * STEP


def generate_tones() -> np.ndarray:
    """Return a tone for each word, each higher than the one before, with pauses between them."""
    time = np.arange(round(DURATION * SAMPLE_RATE)) / SAMPLE_RATE
    word = np.minimum((time / DURATION * len(WORDS)).astype(int), len(WORDS) - 1)
    part = time / DURATION * len(WORDS) - word
    return np.asarray(0.4 * np.sin(2 * np.pi * 300 * (word + 1) * time) * (part < 0.8), np.float32)


def build_audio_data(*, is_self: bool = False) -> ViewerData:
    """Return attention of each word to its quarter, 0.8 in all; or of each frame to the one 10 later."""
    frames = AudioFrames(NUM_FRAMES, 0.0, STEP)
    if is_self:
        weights = np.roll(np.eye(NUM_FRAMES), 10, axis=1)
        labels = frames.format_times()
    else:
        weights = 0.8 * np.repeat(np.eye(len(WORDS)), NUM_FRAMES // len(WORDS), axis=1) / (NUM_FRAMES // len(WORDS))
        labels = WORDS
    name = "encoder.0" if is_self else "decoder.0"
    key_frames = {name: frames}
    audio = AttendedAudio.from_waveform(generate_tones(), SAMPLE_RATE, key_frames, key_frames if is_self else None)
    return ViewerData.from_weights(
        {name: weights.astype(np.float32)},
        row_labels=labels,
        col_labels=frames.format_times(),
        kind="self" if is_self else "cross",
        title="tones.wav",
        audio=audio,
    )
