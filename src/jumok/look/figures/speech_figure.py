"""Synthesised speech as a figure: spectrogram, alignment and style token weights."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jumok.errors import InputError
from jumok.look.figures.plots import (
    COLOURS,
    GREY,
    INK,
    SHADES,
    Drawing,
    add_panel,
    annotate,
    create_colormap,
    draw_colour_bar,
    style_axes,
    to_single_line,
)
from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech
from jumok.look.viewer.tiles import FloatArray, WeightArray, to_float32_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From quiet to loud, as in static/colours.js.
SPECTROGRAM_COLOURS = (
    *("#141a23", "#1a2b55", "#2f447b", "#536186", "#7b7c84", "#a69374", "#ceae64", "#ebd16d", "#fff69e"),
)
# All in inches.
MIN_PLOT_WIDTH, MAX_PLOT_WIDTH, WIDTH_PER_SECOND = 5.0, 13.0, 2.4
SPECTROGRAM_HEIGHT, PLOT_GAP = 1.5, 0.36
MIN_ALIGNMENT_HEIGHT, MAX_ALIGNMENT_HEIGHT, HEIGHT_PER_SYMBOL = 1.7, 8.0, 0.17  # of the alignment
TOKEN_NAME_WIDTH, TOKEN_BAR_WIDTH, HEIGHT_PER_TOKEN = 1.25, 2.0, 0.34
MIN_FONT_SIZE = 6.0  # points of a symbol; if they are closer, some are left out
MAX_SYMBOL_LENGTH = 12  # characters of a symbol that are drawn
MAX_CELLS = 4_000_000  # of an alignment

JAMO_PATTERN = re.compile(r"HANGUL (?:CHOSEONG|JUNGSEONG|JONGSEONG) (.+)")


class SpeechFigure(Drawing):
    """The speech: time to the right, in seconds, and the text upwards; ``weights (steps, symbols)``.

    >>> SpeechFigure(speech, list("hello"), weights, title="hello").save("hello.png")  # doctest: +SKIP
    """

    def __init__(
        self,
        speech: SynthesizedSpeech,
        symbols: Sequence[str],
        weights: WeightArray,
        style: StyleTokenWeights | None = None,
        *,
        title: str = "",
    ) -> None:
        self.weights = to_float32_array(weights)
        shape = self.weights.shape
        if shape != (speech.num_steps, len(symbols)) or not self.weights.size:
            raise InputError(
                f"weights of shape {shape} given with {speech.num_frames} frames, {speech.frames_per_step} a step, "
                f"and {len(symbols)} symbols; expected ({speech.num_steps}, {len(symbols)})"
            )
        if self.weights.size > MAX_CELLS:
            raise InputError(f"{shape[0]} steps are too many for a figure: use an .html file")
        if not np.isfinite(self.weights).all():
            raise InputError("the weights contain NaN or infinity, which an alignment cannot show")
        self.speech, self.style, self.title = speech, style, to_single_line(title)
        self.symbols = [_format_symbol(text) for text in symbols]
        self.token_names = [to_single_line(name)[:24] for name in style.names] if style else []
        self.texts = [*self.symbols, *self.token_names, self.title, speech.note, "␣"]

    @property
    def duration(self) -> float:
        """The duration of all steps; the last may have fewer frames."""
        return self.speech.num_steps * self.speech.frames_per_step * self.speech.frame_seconds

    def draw(self, figure: Figure) -> None:
        plot_width = min(MAX_PLOT_WIDTH, max(MIN_PLOT_WIDTH, WIDTH_PER_SECOND * self.duration))
        alignment_height = min(MAX_ALIGNMENT_HEIGHT, max(MIN_ALIGNMENT_HEIGHT, HEIGHT_PER_SYMBOL * len(self.symbols)))
        plot_height = alignment_height + PLOT_GAP + SPECTROGRAM_HEIGHT
        figure.set_size_inches(plot_width, plot_height)  # labels are added when it is saved
        alignment_axes = add_panel(figure, 0, SPECTROGRAM_HEIGHT + PLOT_GAP, plot_width, alignment_height)
        mel_axes = add_panel(figure, 0, 0, plot_width, SPECTROGRAM_HEIGHT, sharex=alignment_axes)
        draw_spectrogram(mel_axes, self.speech.mel, (0, self.speech.duration))
        self._draw_alignment(alignment_axes, plot_width, alignment_height)
        if self.title:
            draw_title(mel_axes, self.title)
        if self.style is not None:
            self._draw_style_tokens(figure, self.style, plot_width, plot_height)

    def _draw_alignment(self, axes: Axes, width: float, height: float) -> None:
        extent = (0, self.duration, -0.5, len(self.symbols) - 0.5)
        note = to_single_line(self.speech.note)
        draw_weights(axes, self.weights.T, extent, "Alignment (text from bottom to top)", (width, height), note)
        axes.set(xlim=(0, self.duration))
        draw_labels(axes, self.symbols, height)

    def _draw_style_tokens(self, figure: Figure, style: StyleTokenWeights, width: float, height: float) -> None:
        """Draw a bar for each token and head, at the right, from the top down."""
        num_heads, num_tokens = style.weights.shape
        axes_height = min(height, max(0.6, HEIGHT_PER_TOKEN * num_tokens))
        axes = add_panel(figure, width + TOKEN_NAME_WIDTH, 0, TOKEN_BAR_WIDTH, axes_height)
        bar_height = 0.78 / num_heads
        for head, weights in enumerate(style.weights):
            positions = np.arange(num_tokens) + (head - (num_heads - 1) / 2) * bar_height
            axes.barh(positions, weights, 0.86 * bar_height, color=COLOURS[0], alpha=1 if num_heads == 1 else 0.85)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_ylim(num_tokens - 0.5, -0.5)
        axes.set_yticks(range(num_tokens), self.token_names)
        _style_frame(axes, "Style tokens" if num_heads == 1 else f"Style tokens, {num_heads} heads")
        style_axes(axes, grid="x", label_size=8.5)
        axes.tick_params(axis="x", labelcolor=GREY)
        axes.tick_params(axis="y", labelsize=min(10.0, 72 * 0.62 * axes_height / num_tokens))


def draw_title(axes: Axes, title: str) -> None:
    """Draw the title of a figure above its spectrogram."""
    annotate(axes, title, (0, 1), (0, 24), xycoords="axes fraction", size=12.5, color=INK)


def draw_spectrogram(axes: Axes, mel: FloatArray, span: tuple[float, float]) -> None:
    """Draw a spectrogram ``(T, M)``; ``span``: when it begins and ends, in seconds."""
    axes.imshow(
        mel.T,
        cmap=create_colormap(SPECTROGRAM_COLOURS),
        aspect="auto",
        origin="lower",
        interpolation="bilinear",
        extent=(*span, 0, mel.shape[1]),
    )
    _style_frame(axes, f"Mel spectrogram, {mel.shape[1]} bands")
    axes.set_yticks([])
    axes.tick_params(labelbottom=False)


def draw_weights(
    axes: Axes,
    weights: FloatArray,
    extent: tuple[float, float, float, float],
    title: str,
    size: tuple[float, float],
    note: str = "",
) -> None:
    """Draw a map with time to the right, and the scale of its colours.

    ``extent``: left, right, bottom and top; the first row of ``weights`` is at the bottom if that is the smaller one.
    ``size``: width and height of the plot in inches.
    """
    from matplotlib.colors import PowerNorm

    width, height = size
    max_weight = float(weights.max()) or 1.0
    left, right, bottom, top = extent
    image = axes.imshow(
        weights,
        cmap=create_colormap(SHADES),
        norm=PowerNorm(0.5, 0, max_weight, clip=True),  # square roots, so that small weights are visible
        aspect="auto",
        origin="lower" if bottom < top else "upper",
        interpolation="nearest",
        extent=(left, right, bottom, top),
    )
    _style_frame(axes, title)
    axes.set_xlabel("seconds" + (f"\n{note}" if note else ""), size=9, color=GREY, linespacing=1.6)
    scale = min(1.0, 2 / height)
    bar_axes = axes.inset_axes((1 + 0.09 / width, 1 - scale, 0.08 / width, scale))
    ticks = (0, max_weight / 4, max_weight)
    draw_colour_bar(bar_axes, image, ticks)
    bar_axes.set_yticklabels([f"{value:.2g}" for value in ticks])
    bar_axes.minorticks_off()


def draw_labels(axes: Axes, labels: Sequence[str], height: float) -> None:
    """Label the rows of a map that is so many inches high; if they are close, only some."""
    font_size = 72 * 0.78 * height / len(labels)
    step = max(1, int(np.ceil(MIN_FONT_SIZE / font_size)))
    positions = range(0, len(labels), step)
    axes.set_yticks(list(positions), [labels[n] for n in positions])
    axes.tick_params(axis="y", labelsize=min(11.0, font_size * step), labelcolor=INK)


def _style_frame(axes: Axes, title: str) -> None:
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
    return to_single_line(text)[:MAX_SYMBOL_LENGTH]
