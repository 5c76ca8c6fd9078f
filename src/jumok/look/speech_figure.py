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
from jumok.look.document import plain
from jumok.look.figures import COLOURS, GREY, INK, SHADES, drawn, saved
from jumok.look.speech import Speech, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_speech", "speech_figure"]

# From quiet to loud, as in static/colours.js.
DUSK = ("#141a23", "#1a2b55", "#2f447b", "#536186", "#7b7c84", "#a69374", "#ceae64", "#ebd16d", "#fff69e")
# All in inches.
NARROWEST, WIDEST, A_SECOND = 5.0, 13.0, 2.4  # of both plots; a second of sound, if that fits
MEL, GAP = 1.5, 0.36
LOWEST, TALLEST, A_SYMBOL = 1.7, 8.0, 0.17  # of the alignment
BESIDE, TOKENS, A_TOKEN = 1.25, 2.0, 0.34  # the room for names, the width of bars, and what a token takes
SMALLEST = 6.0  # points of a symbol; where they are closer, some are left out
LETTERS = 12  # of a symbol that are drawn
MOST_CELLS = 4_000_000  # of an alignment

Weights = Tensor | NDArray[np.floating]
JAMO = re.compile(r"HANGUL (?:CHOSEONG|JUNGSEONG|JONGSEONG) (.+)")


def speech_figure(
    speech: Speech, symbols: Sequence[str], weights: Weights, style: Style | None = None, *, title: str = ""
) -> Figure:
    """Time goes to the right, in seconds, and the text upwards; ``weights (steps, symbols)``.

    >>> speech_figure(speech, list("hello"), weights).savefig("hello.svg")  # doctest: +SKIP
    """
    drawing = Drawing.of(speech, symbols, weights, style, title)
    return drawn(drawing.draw, drawing.texts)


def draw_speech(
    speech: Speech,
    symbols: Sequence[str],
    weights: Weights,
    path: str | Path,
    style: Style | None = None,
    *,
    title: str = "",
) -> Path:
    """The same, written to a file; the path is given back.

    >>> draw_speech(speech, list("hello"), weights, "hello.png", title="hello")  # doctest: +SKIP
    """
    drawing = Drawing.of(speech, symbols, weights, style, title)
    return saved(drawing.draw, path, drawing.texts)


@dataclass(frozen=True, eq=False)
class Drawing:
    """All that is drawn, checked."""

    speech: Speech
    symbols: list[str]
    weights: NDArray[np.float32]
    style: Style | None
    title: str

    @classmethod
    def of(
        cls, speech: Speech, symbols: Sequence[str], weights: Weights, style: Style | None, title: str
    ) -> Drawing:
        cells = plain(weights)
        if cells.shape != (speech.steps, len(symbols)) or not cells.size:
            raise InputError(
                f"weights of shape {cells.shape} came with {speech.frames} frames, {speech.step} a step, and "
                f"{len(symbols)} symbols; expected ({speech.steps}, {len(symbols)})"
            )
        if cells.size > MOST_CELLS:
            raise InputError(f"{cells.shape[0]} steps are too many for a picture: give an .html file")
        if not np.isfinite(cells).all():
            raise InputError("the weights hold NaN or infinity; an alignment cannot be drawn of these")
        return cls(speech, [_symbol(text) for text in symbols], cells, style, _line(title))

    @property
    def texts(self) -> list[str]:
        return [
            *self.symbols,
            *(map(_line, self.style.names) if self.style else ()),
            self.title,
            self.speech.note,
            "␣",
        ]

    @property
    def seconds(self) -> float:
        """Of all steps; the last may have fewer frames."""
        return self.speech.steps * self.speech.step * self.speech.seconds

    def draw(self, figure: Figure) -> None:
        wide = min(WIDEST, max(NARROWEST, A_SECOND * self.seconds))
        tall = min(TALLEST, max(LOWEST, A_SYMBOL * len(self.symbols)))
        high = tall + GAP + MEL
        figure.set_size_inches(wide, high)  # what stands around the plots is added when it is saved
        below = figure.add_axes((0, 0, 1, tall / high))
        above = figure.add_axes((0, (tall + GAP) / high, 1, MEL / high), sharex=below)
        self._mel(above)
        self._alignment(below, wide, tall)
        if self.title:
            above.annotate(self.title, (0, 1), (0, 24), xycoords="axes fraction", textcoords="offset points",
                           size=12.5, color=INK, annotation_clip=False)  # fmt: skip
        if self.style is not None:
            self._tokens(figure, self.style, wide, high)

    def _mel(self, axes: Axes) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        mel = self.speech.mel
        axes.imshow(
            mel.T,
            cmap=LinearSegmentedColormap.from_list("dusk", DUSK),
            aspect="auto",
            origin="lower",
            interpolation="bilinear",
            extent=(0, self.speech.duration, 0, mel.shape[1]),
        )
        _quietly(axes, f"Spectrogram, {mel.shape[1]} bands from low to high")
        axes.set_yticks([])
        axes.tick_params(labelbottom=False)

    def _alignment(self, axes: Axes, wide: float, tall: float) -> None:
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm

        most = float(self.weights.max()) or 1.0
        shown = axes.imshow(
            self.weights.T,
            cmap=LinearSegmentedColormap.from_list("jumok", SHADES),
            norm=PowerNorm(0.5, 0, most, clip=True),  # roots, so that small weights show: as in the viewer
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            extent=(0, self.seconds, -0.5, len(self.symbols) - 0.5),
        )
        _quietly(axes, "Alignment, the text upwards")
        axes.set(xlim=(0, self.seconds))
        note = _line(self.speech.note)
        axes.set_xlabel("seconds" + (f"\n{note}" if note else ""), size=9, color=GREY, linespacing=1.6)
        size = 72 * 0.78 * tall / len(self.symbols)
        every = max(1, int(np.ceil(SMALLEST / size)))
        places = range(0, len(self.symbols), every)
        axes.set_yticks(list(places), [self.symbols[n] for n in places])
        axes.tick_params(axis="y", labelsize=min(11.0, size * every), labelcolor=INK)
        scale = min(1.0, 2 / tall)
        beside = axes.inset_axes((1 + 0.09 / wide, 1 - scale, 0.08 / wide, scale))
        bar = axes.figure.colorbar(shown, cax=beside, ticks=[0, most / 4, most])
        bar.outline.set_visible(False)
        beside.set_yticklabels([f"{value:.2g}" for value in (0, most / 4, most)])
        beside.tick_params(length=0, labelsize=8, labelcolor=GREY, pad=3)
        beside.minorticks_off()

    def _tokens(self, figure: Figure, style: Style, wide: float, high: float) -> None:
        """A bar for each token and head, at the right, from the top down."""
        heads, tokens = style.weights.shape
        need = min(high, max(0.6, A_TOKEN * tokens))
        axes = figure.add_axes((1 + BESIDE / wide, 1 - need / high, TOKENS / wide, need / high))
        thick = 0.78 / heads
        for head, weights in enumerate(style.weights):
            places = np.arange(tokens) + (head - (heads - 1) / 2) * thick
            axes.barh(places, weights, 0.86 * thick, color=COLOURS[0], alpha=1 if heads == 1 else 0.85)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_ylim(tokens - 0.5, -0.5)
        size = min(10.0, 72 * 0.62 * need / tokens)
        axes.set_yticks(range(tokens), [_line(name)[:24] for name in style.names])
        _quietly(axes, "Style tokens" if heads == 1 else f"Style tokens, {heads} heads")
        axes.tick_params(axis="y", labelsize=size, labelcolor=INK)
        axes.spines[:].set_visible(False)
        axes.grid(axis="x", color="#e6e8ec", linewidth=0.8)
        axes.set_axisbelow(True)


def _quietly(axes: Axes, title: str) -> None:
    axes.set_title(title, size=8.5, color=GREY, loc="left", pad=4)
    axes.spines[:].set_color("#d5d9df")
    axes.tick_params(length=0, labelsize=8.5, labelcolor=GREY)


def _symbol(text: str) -> str:
    """As one reads it: a blank to be seen, a letter of Hangul as it is written alone."""
    if text and not text.strip():
        return "␣"
    if len(text) == 1 and (found := JAMO.fullmatch(unicodedata.name(text, ""))):
        try:
            return unicodedata.lookup(f"HANGUL LETTER {found[1]}")
        except KeyError:  # one that is no longer written
            return text
    return _line(text)[:LETTERS]


def _line(text: str) -> str:
    """On one line, without what would do things instead of being seen."""
    shown = " ".join(text.split())
    return "".join(c if c.isprintable() else "\ufffd" for c in shown) or "∅" * bool(text)
