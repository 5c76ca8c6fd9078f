"""Generated speech: a rising tone, with an alignment that advances evenly through a text."""

from __future__ import annotations

import io
import unicodedata
import wave

import numpy as np

from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech
from jumok.look.viewer.viewer_data import ViewerData

SAMPLE_RATE, HOP_LENGTH, FRAMES_PER_STEP, NUM_BANDS = 8000, 100, 2, 40
FRAME_SECONDS = HOP_LENGTH / SAMPLE_RATE  # 12.5 ms
ENGLISH, KOREAN = "the quick brown fox", "안녕하세요"
TOKENS = ("token 0", "token 1", "token 2", "token 3", "token 4")
STYLE_WEIGHTS = np.array([[0.1, 0.2, 0.065, 0.5, 0.135], [0.3, 0.1, 0.3, 0.2, 0.1]])


def split_symbols(text: str) -> list[str]:
    """Return the symbols of a voice: Hangul as jamo."""
    return list(unicodedata.normalize("NFD", text))


def generate_sweep(num_frames: int, low: float = 200.0, high: float = 2000.0) -> np.ndarray:
    """Return a tone and its octave that rise from low to high, with four pulses a second."""
    time = np.arange(num_frames * HOP_LENGTH) / SAMPLE_RATE
    phase = 2 * np.pi * (low * time + (high - low) * time**2 / (2 * time[-1]))
    volume = 0.25 + 0.2 * np.sin(2 * np.pi * 4 * time) ** 2
    return np.asarray(volume * (np.sin(phase) + 0.4 * np.sin(2 * phase)), np.float32)


def encode_wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes((32767 * np.clip(samples, -1, 1)).astype("<i2").tobytes())
    return file.getvalue()


def compute_spectrogram(samples: np.ndarray, num_frames: int) -> np.ndarray:
    """Return decibels ``(frames, bands)``; bands of equal width suffice to show a rising tone."""
    padded = np.pad(samples, (0, 400))
    windows = np.stack([padded[n * HOP_LENGTH : n * HOP_LENGTH + 400] for n in range(num_frames)]) * np.hanning(400)
    power = np.abs(np.fft.rfft(windows, 512))[:, : NUM_BANDS * 6].reshape(num_frames, NUM_BANDS, 6).mean(2)
    return np.asarray(np.maximum(20 * np.log10(power + 1e-6), -40), np.float32)


def build_diagonal(num_steps: int, num_symbols: int) -> np.ndarray:
    """Return weights ``(steps, symbols)`` that advance evenly from the first symbol to the last."""
    centres = (np.arange(num_steps) + 0.5) * num_symbols / num_steps - 0.5
    scores = np.exp(-((np.arange(num_symbols) - centres[:, None]) ** 2) / 0.5)
    return np.asarray(scores / scores.sum(1, keepdims=True), np.float32)


def build_speech_data(
    text: str = ENGLISH,
    weights: list[float] | None = None,
    *,
    num_steps: int = 53,
    has_audio: bool = True,
    can_resynthesize: bool = True,
) -> ViewerData:
    """Return speech with style tokens: the first token raises the pitch, the second slows the speech down."""
    symbols = split_symbols(text)
    style_weights = STYLE_WEIGHTS
    if weights is not None:
        style_weights = np.array([weights] * 2)
        num_steps = round(num_steps * (1 + max(0.0, weights[1])))
    num_frames = num_steps * FRAMES_PER_STEP - 1  # the last step has one frame less
    samples = generate_sweep(num_frames, high=2000 + 1500 * float(style_weights.mean(0)[0]))
    return ViewerData.from_weights(
        {"decoder.attention": build_diagonal(num_steps, len(symbols))},
        col_labels=symbols,
        title=text,
        speech=SynthesizedSpeech(
            compute_spectrogram(samples, num_frames),
            frame_seconds=FRAME_SECONDS,
            wav_bytes=encode_wav(samples) if has_audio else None,
            frames_per_step=FRAMES_PER_STEP,
            note="diagonality 1.00, 0 skipped",
        ),
        style=StyleTokenWeights(TOKENS, style_weights),
        resynthesize=(lambda new_weights: build_speech_data(text, new_weights)) if can_resynthesize else None,
    )
