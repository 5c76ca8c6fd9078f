"""Speech that was never said: a tone that rises, with an alignment that goes evenly through a text."""

from __future__ import annotations

import io
import unicodedata
import wave

import numpy as np

from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech
from jumok.look.viewer.viewer_data import ViewerData

RATE, HOP, STEP, BANDS = 8000, 100, 2, 40
SECONDS = HOP / RATE  # a frame: 12.5 ms
ENGLISH, KOREAN = "the quick brown fox", "안녕하세요"
TOKENS = ("token 0", "token 1", "token 2", "token 3", "token 4")


def letters(text: str) -> list[str]:
    """As a voice reads it: Hangul in jamo."""
    return list(unicodedata.normalize("NFD", text))


def sweep(frames: int, low: float = 200.0, high: float = 2000.0) -> np.ndarray:
    """A tone and its octave, that rise from low to high, with a pulse of syllables."""
    time = np.arange(frames * HOP) / RATE
    phase = 2 * np.pi * (low * time + (high - low) * time**2 / (2 * time[-1]))
    loud = 0.25 + 0.2 * np.sin(2 * np.pi * 4 * time) ** 2
    return np.asarray(loud * (np.sin(phase) + 0.4 * np.sin(2 * phase)), np.float32)


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((32767 * np.clip(samples, -1, 1)).astype("<i2").tobytes())
    return file.getvalue()


def spectrum(samples: np.ndarray, frames: int) -> np.ndarray:
    """In decibels ``(frames, BANDS)``: bands of equal width are enough to see a tone rise."""
    padded = np.pad(samples, (0, 400))
    windows = np.stack([padded[n * HOP : n * HOP + 400] for n in range(frames)]) * np.hanning(400)
    power = np.abs(np.fft.rfft(windows, 512))[:, : BANDS * 6].reshape(frames, BANDS, 6).mean(2)
    return np.asarray(np.maximum(20 * np.log10(power + 1e-6), -40), np.float32)


def diagonal(steps: int, symbols: int) -> np.ndarray:
    """Weights ``(steps, symbols)`` that go evenly from the first symbol to the last."""
    at = (np.arange(steps) + 0.5) * symbols / steps - 0.5
    scores = -((np.arange(symbols) - at[:, None]) ** 2) / 0.5
    return np.asarray(np.exp(scores) / np.exp(scores).sum(1, keepdims=True), np.float32)


def said(
    text: str = ENGLISH,
    weights: list[float] | None = None,
    *,
    steps: int = 53,
    heads: int = 2,
    sound: bool = True,
    live: bool = True,
) -> ViewerData:
    """A text with a style: the first token makes it high, the second long."""
    symbols = letters(text)
    given = np.array([[0.1, 0.2, 0.065, 0.5, 0.135], [0.3, 0.1, 0.3, 0.2, 0.1]])[:heads]
    if weights is not None:
        given = np.array([weights] * heads)
        steps = round(steps * (1 + max(0.0, weights[1])))
    frames = steps * STEP - 1  # the last step has a frame less
    samples = sweep(frames, high=2000 + 1500 * float(given.mean(0)[0]))
    return ViewerData.from_weights(
        {"decoder.attention": diagonal(steps, len(symbols))},
        col_labels=symbols,
        title=text,
        speech=SynthesizedSpeech(
            spectrum(samples, frames),
            frame_seconds=SECONDS,
            wav_bytes=wav(samples) if sound else None,
            frames_per_step=STEP,
            note="diagonality 1.00, 0 skipped",
        ),
        style=StyleTokenWeights(TOKENS, given),
        resynthesize=(lambda wish: said(text, wish, steps=53)) if live else None,
    )
