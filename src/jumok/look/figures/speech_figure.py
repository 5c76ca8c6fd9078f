"""Synthesised speech as a figure: spectrogram, alignment and style token weights."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from jumok.errors import InputError
from jumok.look.figures.plots import COLOURS, GREY, INK, SHADES, build_figure, save_figure
from jumok.look.viewer.attended_document import to_float32_array
from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From quiet to loud, as in static/colours.js.
SPECTROGRAM_COLOURS = (
    "#141a23",
    "#1a2b55",
    "#2f447b",
    "#536186",
    "#7b7c84",
    "#a69374",
    "#ceae64",
    "#ebd16d",
    "#fff69e",
)
# All in inches.
MIN_PLOT_WIDTH, MAX_PLOT_WIDTH, WIDTH_PER_SECOND = 5.0, 13.0, 2.4
SPECTROGRAM_HEIGHT, PLOT_GAP = 1.5, 0.36
MIN_ALIGNMENT_HEIGHT, MAX_ALIGNMENT_HEIGHT, HEIGHT_PER_SYMBOL = 1.7, 8.0, 0.17  # of the alignment
TOKEN_NAME_WIDTH, TOKEN_BAR_WIDTH, HEIGHT_PER_TOKEN = 1.25, 2.0, 0.34
MIN_FONT_SIZE = 6.0  # points of a symbol; if they are closer, some are left out
MAX_SYMBOL_LENGTH = 12  # characters of a symbol that are drawn
MAX_CELLS = 4_000_000  # of an alignment

WeightArray = Tensor | NDArray[np.floating]
JAMO_PATTERN = re.compile(r"HANGUL (?:CHOSEONG|JUNGSEONG|JONGSEONG) (.+)")


def build_speech_figure(
    speech: SynthesizedSpeech,
    symbols: Sequence[str],
    weights: WeightArray,
    style: StyleTokenWeights | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draw the speech: time to the right, in seconds, and the text upwards; ``weights (steps, symbols)``.

    >>> build_speech_figure(speech, list("hello"), weights).savefig("hello.svg")  # doctest: +SKIP
    """
    drawing = SpeechDrawing.from_weights(speech, symbols, weights, style, title)
    return build_figure(drawing.draw, drawing.texts)


def draw_speech(
    speech: SynthesizedSpeech,
    symbols: Sequence[str],
    weights: WeightArray,
    path: str | Path,
    style: StyleTokenWeights | None = None,
    *,
    title: str = "",
) -> Path:
    """Draw the same to a file. Returns the path.

    >>> draw_speech(speech, list("hello"), weights, "hello.png", title="hello")  # doctest: +SKIP
    """
    drawing = SpeechDrawing.from_weights(speech, symbols, weights, style, title)
    return save_figure(drawing.draw, path, drawing.texts)


@dataclass(frozen=True, eq=False)
class SpeechDrawing:
    """The checked content of a speech figure."""

    speech: SynthesizedSpeech
    symbols: list[str]
    weights: NDArray[np.float32]
    style: StyleTokenWeights | None
    title: str

    @classmethod
    def from_weights(
        cls,
        speech: SynthesizedSpeech,
        symbols: Sequence[str],
        weights: WeightArray,
        style: StyleTokenWeights | None,
        title: str,
    ) -> SpeechDrawing:
        array = to_float32_array(weights)
        if array.shape != (speech.num_steps, len(symbols)) or not array.size:
            raise InputError(
                f"weights of shape {array.shape} came with {speech.num_frames} frames, "
                f"{speech.frames_per_step} a step, and {len(symbols)} symbols; expected "
                f"({speech.num_steps}, {len(symbols)})"
            )
        if array.size > MAX_CELLS:
            raise InputError(f"{array.shape[0]} steps are too many for a figure: use an .html file")
        if not np.isfinite(array).all():
            raise InputError("the weights contain NaN or infinity, which an alignment cannot show")
        return cls(speech, [_format_symbol(text) for text in symbols], array, style, _to_single_line(title))

    @property
    def texts(self) -> list[str]:
        return [
            *self.symbols,
            *(map(_to_single_line, self.style.names) if self.style else ()),
            self.title,
            self.speech.note,
            "␣",
        ]

    @property
    def duration(self) -> float:
        """The duration of all steps; the last may have fewer frames."""
        return self.speech.num_steps * self.speech.frames_per_step * self.speech.frame_seconds

    def draw(self, figure: Figure) -> None:
        plot_width = min(MAX_PLOT_WIDTH, max(MIN_PLOT_WIDTH, WIDTH_PER_SECOND * self.duration))
        alignment_height = min(MAX_ALIGNMENT_HEIGHT, max(MIN_ALIGNMENT_HEIGHT, HEIGHT_PER_SYMBOL * len(self.symbols)))
        plot_height = alignment_height + PLOT_GAP + SPECTROGRAM_HEIGHT
        figure.set_size_inches(plot_width, plot_height)  # labels are added when it is saved
        alignment_axes = figure.add_axes((0, 0, 1, alignment_height / plot_height))
        mel_axes = figure.add_axes(
            (0, (alignment_height + PLOT_GAP) / plot_height, 1, SPECTROGRAM_HEIGHT / plot_height),
            sharex=alignment_axes,
        )
        self._draw_spectrogram(mel_axes)
        self._draw_alignment(alignment_axes, plot_width, alignment_height)
        if self.title:
            mel_axes.annotate(
                self.title,
                (0, 1),
                (0, 24),
                xycoords="axes fraction",
                textcoords="offset points",
                size=12.5,
                color=INK,
                annotation_clip=False,
            )
        if self.style is not None:
            self._draw_style_tokens(figure, self.style, plot_width, plot_height)

    def _draw_spectrogram(self, axes: Axes) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        mel = self.speech.mel
        axes.imshow(
            mel.T,
            cmap=LinearSegmentedColormap.from_list("dusk", SPECTROGRAM_COLOURS),
            aspect="auto",
            origin="lower",
            interpolation="bilinear",
            extent=(0, self.speech.duration, 0, mel.shape[1]),
        )
        _style_axes(axes, f"Mel spectrogram, {mel.shape[1]} bands")
        axes.set_yticks([])
        axes.tick_params(labelbottom=False)

    def _draw_alignment(self, axes: Axes, width: float, height: float) -> None:
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm

        max_weight = float(self.weights.max()) or 1.0
        image = axes.imshow(
            self.weights.T,
            cmap=LinearSegmentedColormap.from_list("jumok", SHADES),
            norm=PowerNorm(0.5, 0, max_weight, clip=True),  # square roots, so that small weights are visible
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            extent=(0, self.duration, -0.5, len(self.symbols) - 0.5),
        )
        _style_axes(axes, "Alignment (text from bottom to top)")
        axes.set(xlim=(0, self.duration))
        note = _to_single_line(self.speech.note)
        axes.set_xlabel("seconds" + (f"\n{note}" if note else ""), size=9, color=GREY, linespacing=1.6)
        font_size = 72 * 0.78 * height / len(self.symbols)
        step = max(1, int(np.ceil(MIN_FONT_SIZE / font_size)))
        positions = range(0, len(self.symbols), step)
        axes.set_yticks(list(positions), [self.symbols[n] for n in positions])
        axes.tick_params(axis="y", labelsize=min(11.0, font_size * step), labelcolor=INK)
        scale = min(1.0, 2 / height)
        bar_axes = axes.inset_axes((1 + 0.09 / width, 1 - scale, 0.08 / width, scale))
        bar = axes.figure.colorbar(image, cax=bar_axes, ticks=[0, max_weight / 4, max_weight])
        bar.outline.set_visible(False)
        bar_axes.set_yticklabels([f"{value:.2g}" for value in (0, max_weight / 4, max_weight)])
        bar_axes.tick_params(length=0, labelsize=8, labelcolor=GREY, pad=3)
        bar_axes.minorticks_off()

    def _draw_style_tokens(self, figure: Figure, style: StyleTokenWeights, width: float, height: float) -> None:
        """Draw a bar for each token and head, at the right, from the top down."""
        num_heads, num_tokens = style.weights.shape
        axes_height = min(height, max(0.6, HEIGHT_PER_TOKEN * num_tokens))
        axes = figure.add_axes(
            (
                1 + TOKEN_NAME_WIDTH / width,
                1 - axes_height / height,
                TOKEN_BAR_WIDTH / width,
                axes_height / height,
            )
        )
        bar_height = 0.78 / num_heads
        for head, weights in enumerate(style.weights):
            positions = np.arange(num_tokens) + (head - (num_heads - 1) / 2) * bar_height
            axes.barh(positions, weights, 0.86 * bar_height, color=COLOURS[0], alpha=1 if num_heads == 1 else 0.85)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_ylim(num_tokens - 0.5, -0.5)
        font_size = min(10.0, 72 * 0.62 * axes_height / num_tokens)
        axes.set_yticks(range(num_tokens), [_to_single_line(name)[:24] for name in style.names])
        _style_axes(axes, "Style tokens" if num_heads == 1 else f"Style tokens, {num_heads} heads")
        axes.tick_params(axis="y", labelsize=font_size, labelcolor=INK)
        axes.spines[:].set_visible(False)
        axes.grid(axis="x", color="#e6e8ec", linewidth=0.8)
        axes.set_axisbelow(True)


def _style_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, size=8.5, color=GREY, loc="left", pad=4)
    axes.spines[:].set_color("#d5d9df")
    axes.tick_params(length=0, labelsize=8.5, labelcolor=GREY)


def _format_symbol(text: str) -> str:
    """Return a readable symbol: a visible blank, a Hangul letter as it is written alone."""
    if text and not text.strip():
        return "␣"
    if len(text) == 1 and (match := JAMO_PATTERN.fullmatch(unicodedata.name(text, ""))):
        try:
            return unicodedata.lookup(f"HANGUL LETTER {match[1]}")
        except KeyError:  # an obsolete letter
            return text
    return _to_single_line(text)[:MAX_SYMBOL_LENGTH]


def _to_single_line(text: str) -> str:
    """Return the text on one line, without control characters."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "\ufffd" for c in line) or "∅" * bool(text)
