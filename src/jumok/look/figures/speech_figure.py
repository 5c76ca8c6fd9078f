"""Something said as a figure: its spectrogram, the alignment under it, and beside them its style tokens."""

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

__all__ = ["build_speech_figure", "draw_speech"]

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
MIN_PLOT_WIDTH, MAX_PLOT_WIDTH, WIDTH_PER_SECOND = (
    5.0,
    13.0,
    2.4,
)  # of both plots; a second of sound, if that fits
SPECTROGRAM_HEIGHT, PLOT_GAP = 1.5, 0.36
MIN_ALIGNMENT_HEIGHT, MAX_ALIGNMENT_HEIGHT, HEIGHT_PER_SYMBOL = 1.7, 8.0, 0.17  # of the alignment
TOKEN_NAME_WIDTH, TOKEN_BAR_WIDTH, HEIGHT_PER_TOKEN = (
    1.25,
    2.0,
    0.34,
)  # the room for names, the width of bars, and what a token takes
MIN_FONT_SIZE = 6.0  # points of a symbol; where they are closer, some are left out
MAX_SYMBOL_LENGTH = 12  # of a symbol that are drawn
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
    """Time goes to the right, in seconds, and the text upwards; ``weights (steps, symbols)``.

    >>> speech_figure(speech, list("hello"), weights).savefig("hello.svg")  # doctest: +SKIP
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
    """The same, written to a file; the path is given back.

    >>> draw_speech(speech, list("hello"), weights, "hello.png", title="hello")  # doctest: +SKIP
    """
    drawing = SpeechDrawing.from_weights(speech, symbols, weights, style, title)
    return save_figure(drawing.draw, path, drawing.texts)


@dataclass(frozen=True, eq=False)
class SpeechDrawing:
    """All that is drawn, checked."""

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
        cells = to_float32_array(weights)
        if cells.shape != (speech.num_steps, len(symbols)) or not cells.size:
            raise InputError(
                f"weights of shape {cells.shape} came with {speech.num_frames} frames, {speech.frames_per_step} a step, and "
                f"{len(symbols)} symbols; expected ({speech.num_steps}, {len(symbols)})"
            )
        if cells.size > MAX_CELLS:
            raise InputError(f"{cells.shape[0]} steps are too many for a picture: give an .html file")
        if not np.isfinite(cells).all():
            raise InputError("the weights hold NaN or infinity; an alignment cannot be drawn of these")
        return cls(speech, [_format_symbol(text) for text in symbols], cells, style, _to_single_line(title))

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
        """Of all steps; the last may have fewer frames."""
        return self.speech.num_steps * self.speech.frames_per_step * self.speech.frame_seconds

    def draw(self, figure: Figure) -> None:
        wide = min(MAX_PLOT_WIDTH, max(MIN_PLOT_WIDTH, WIDTH_PER_SECOND * self.duration))
        tall = min(MAX_ALIGNMENT_HEIGHT, max(MIN_ALIGNMENT_HEIGHT, HEIGHT_PER_SYMBOL * len(self.symbols)))
        high = tall + PLOT_GAP + SPECTROGRAM_HEIGHT
        figure.set_size_inches(wide, high)  # what stands around the plots is added when it is saved
        below = figure.add_axes((0, 0, 1, tall / high))
        above = figure.add_axes((0, (tall + PLOT_GAP) / high, 1, SPECTROGRAM_HEIGHT / high), sharex=below)
        self._draw_spectrogram(above)
        self._draw_alignment(below, wide, tall)
        if self.title:
            above.annotate(self.title, (0, 1), (0, 24), xycoords="axes fraction", textcoords="offset points",
                           size=12.5, color=INK, annotation_clip=False)  # fmt: skip
        if self.style is not None:
            self._draw_style_tokens(figure, self.style, wide, high)

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
        _style_axes(axes, f"Spectrogram, {mel.shape[1]} bands from low to high")
        axes.set_yticks([])
        axes.tick_params(labelbottom=False)

    def _draw_alignment(self, axes: Axes, width: float, height: float) -> None:
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm

        most = float(self.weights.max()) or 1.0
        shown = axes.imshow(
            self.weights.T,
            cmap=LinearSegmentedColormap.from_list("jumok", SHADES),
            norm=PowerNorm(0.5, 0, most, clip=True),  # roots, so that small weights show: as in the viewer
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            extent=(0, self.duration, -0.5, len(self.symbols) - 0.5),
        )
        _style_axes(axes, "Alignment, the text upwards")
        axes.set(xlim=(0, self.duration))
        note = _to_single_line(self.speech.note)
        axes.set_xlabel("seconds" + (f"\n{note}" if note else ""), size=9, color=GREY, linespacing=1.6)
        size = 72 * 0.78 * height / len(self.symbols)
        every = max(1, int(np.ceil(MIN_FONT_SIZE / size)))
        places = range(0, len(self.symbols), every)
        axes.set_yticks(list(places), [self.symbols[n] for n in places])
        axes.tick_params(axis="y", labelsize=min(11.0, size * every), labelcolor=INK)
        scale = min(1.0, 2 / height)
        beside = axes.inset_axes((1 + 0.09 / width, 1 - scale, 0.08 / width, scale))
        bar = axes.figure.colorbar(shown, cax=beside, ticks=[0, most / 4, most])
        bar.outline.set_visible(False)
        beside.set_yticklabels([f"{value:.2g}" for value in (0, most / 4, most)])
        beside.tick_params(length=0, labelsize=8, labelcolor=GREY, pad=3)
        beside.minorticks_off()

    def _draw_style_tokens(
        self, figure: Figure, style: StyleTokenWeights, width: float, height: float
    ) -> None:
        """A bar for each token and head, at the right, from the top down."""
        heads, tokens = style.weights.shape
        need = min(height, max(0.6, HEIGHT_PER_TOKEN * tokens))
        axes = figure.add_axes(
            (1 + TOKEN_NAME_WIDTH / width, 1 - need / height, TOKEN_BAR_WIDTH / width, need / height)
        )
        thick = 0.78 / heads
        for head, weights in enumerate(style.weights):
            places = np.arange(tokens) + (head - (heads - 1) / 2) * thick
            axes.barh(places, weights, 0.86 * thick, color=COLOURS[0], alpha=1 if heads == 1 else 0.85)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_ylim(tokens - 0.5, -0.5)
        size = min(10.0, 72 * 0.62 * need / tokens)
        axes.set_yticks(range(tokens), [_to_single_line(name)[:24] for name in style.names])
        _style_axes(axes, "Style tokens" if heads == 1 else f"Style tokens, {heads} heads")
        axes.tick_params(axis="y", labelsize=size, labelcolor=INK)
        axes.spines[:].set_visible(False)
        axes.grid(axis="x", color="#e6e8ec", linewidth=0.8)
        axes.set_axisbelow(True)


def _style_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, size=8.5, color=GREY, loc="left", pad=4)
    axes.spines[:].set_color("#d5d9df")
    axes.tick_params(length=0, labelsize=8.5, labelcolor=GREY)


def _format_symbol(text: str) -> str:
    """As one reads it: a blank to be seen, a letter of Hangul as it is written alone."""
    if text and not text.strip():
        return "␣"
    if len(text) == 1 and (found := JAMO_PATTERN.fullmatch(unicodedata.name(text, ""))):
        try:
            return unicodedata.lookup(f"HANGUL LETTER {found[1]}")
        except KeyError:  # one that is no longer written
            return text
    return _to_single_line(text)[:MAX_SYMBOL_LENGTH]


def _to_single_line(text: str) -> str:
    """On one line, without what would do things instead of being seen."""
    shown = " ".join(text.split())
    return "".join(c if c.isprintable() else "\ufffd" for c in shown) or "∅" * bool(text)
