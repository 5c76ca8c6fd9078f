"""A recording that a model hears as a figure: spectrogram, and below it the attention of words or times over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jumok.errors import InputError
from jumok.look.figures.plots import Drawing, add_panel, to_single_line
from jumok.look.figures.speech_figure import (
    HEIGHT_PER_SYMBOL,
    MAX_ALIGNMENT_HEIGHT,
    MAX_CELLS,
    MAX_PLOT_WIDTH,
    MIN_ALIGNMENT_HEIGHT,
    MIN_PLOT_WIDTH,
    PLOT_GAP,
    SPECTROGRAM_HEIGHT,
    WIDTH_PER_SECOND,
    draw_labels,
    draw_spectrogram,
    draw_title,
    draw_weights,
)
from jumok.look.viewer.attended_audio import AttendedAudio, AudioFrames
from jumok.look.viewer.tiles import WeightArray, to_float32_array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SQUARE_HEIGHT = 5.0  # inches, of a map of times over times
MAX_WORD_LENGTH = 24  # characters of a word that are drawn


class AudioFigure(Drawing):
    """The recording, with time to the right in seconds, and the weights of each query from top to bottom.

    ``weights (queries, frames)``: the queries are ``words``, or the frames themselves if ``words`` is None.

    >>> AudioFigure(audio, frames, ["hello", "you"], weights, title="hello.wav").save("hello.png")  # doctest: +SKIP
    """

    def __init__(
        self,
        audio: AttendedAudio,
        frames: AudioFrames,
        words: Sequence[str] | None,
        weights: WeightArray,
        *,
        title: str = "",
    ) -> None:
        self.weights = to_float32_array(weights)
        num_queries = frames.num_frames if words is None else len(words)
        if self.weights.shape != (num_queries, frames.num_frames) or not self.weights.size:
            raise InputError(
                f"weights of shape {self.weights.shape} given with {num_queries} queries and {frames.num_frames} "
                f"frames; expected ({num_queries}, {frames.num_frames})"
            )
        if self.weights.size > MAX_CELLS:
            raise InputError(
                f"{num_queries} × {frames.num_frames} weights are too many for a figure: use an .html file"
            )
        if not np.isfinite(self.weights).all():
            raise InputError("the weights contain NaN or infinity, which a map cannot show")
        self.audio, self.frames, self.title = audio, frames, to_single_line(title)
        self.words = None if words is None else [_format_word(word) for word in words]
        self.texts = [*(self.words or ()), self.title]

    def draw(self, figure: Figure) -> None:
        duration, start, end = self.audio.duration, self.frames.start, self.frames.end
        width = min(MAX_PLOT_WIDTH, max(MIN_PLOT_WIDTH, WIDTH_PER_SECOND * duration))
        num_queries = len(self.weights)
        if self.words is None:
            height = min(MAX_SQUARE_HEIGHT, width)
        else:
            height = min(MAX_ALIGNMENT_HEIGHT, max(MIN_ALIGNMENT_HEIGHT, HEIGHT_PER_SYMBOL * num_queries))
        figure.set_size_inches(width, height + PLOT_GAP + SPECTROGRAM_HEIGHT)  # labels are added when it is saved
        axes = add_panel(figure, 0, SPECTROGRAM_HEIGHT + PLOT_GAP, width, height)
        mel_axes = add_panel(figure, 0, 0, width, SPECTROGRAM_HEIGHT, sharex=axes)
        half = self.audio.frame_seconds / 2
        draw_spectrogram(mel_axes, self.audio.mel, (-half, self.audio.end))
        if self.words is None:
            draw_weights(
                axes, self.weights, (start, end, end, start), "Attention of each time (down) over time", (width, height)
            )
            axes.set_ylim(duration, 0)
        else:
            draw_weights(
                axes,
                self.weights,
                (start, end, num_queries - 0.5, -0.5),
                "Attention of each word over time",
                (width, height),
            )
            draw_labels(axes, self.words, height)
        axes.set_xlim(0, duration)
        if self.title:
            draw_title(mel_axes, self.title)


def _format_word(text: str) -> str:
    """Return a word as it is drawn: without the mark of a space, and a visible blank."""
    word = to_single_line(text.replace("▁", " ")).strip()
    return word[:MAX_WORD_LENGTH] or "␣"
