"""A picture with its caption, word by word: where the model looked for each (as in Xu et al. 2015)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from jumok.data.formats import Flaw
from jumok.data.pictures import Pixels, decode
from jumok.errors import InputError
from jumok.look.figures import GREY, INK, drawn, saved
from jumok.look.scene import Picture, numbers
from jumok.look.tiles import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

__all__ = ["draw_strip", "strip"]

# From shade to lamplight, and how much of the picture that covers: as in static/colours.js and overlay.js.
LAMP = ("#101621", "#2a2b2f", "#46423c", "#635a49", "#827356", "#a08e62", "#bea96d", "#ddc779", "#fce584")
STRENGTH, SHADED, LIT = 0.7, 0.88, 0.42
# All in inches.
AREA, WIDEST, TALLEST, NARROWEST = 2.6, 3.4, 2.7, 0.85  # of a small picture, whatever its shape
GAP, LINE, MARGIN, NOTE = 0.12, 0.25, 0.14, 0.3
NARROW = 3.9  # the whole: room for the note
SHAPE = 1.75  # of the whole: its width by its height, about
WORD, SMALLEST = 11.0, 7.0  # points
DOTS = 200  # an inch of a small picture
MOST_WORDS = 200
LETTERS = 80  # of a word that are drawn: some may be whole documents

Words = Sequence[str]
Weights = Tensor | NDArray[np.floating]


@dataclass(frozen=True)
class Layout:
    """Small pictures in rows, the first of them without an overlay. All in inches."""

    count: int
    columns: int
    wide: float  # a small picture
    tall: float
    above: float  # the title

    @classmethod
    def of(cls, count: int, ratio: float, title: bool) -> Layout:
        """``ratio`` is a picture's width by its height."""
        wide = math.sqrt(AREA * ratio)
        shrink = min(1.0, WIDEST / wide, TALLEST / (wide / ratio))
        wide, tall = wide * shrink, wide / ratio * shrink
        cell, row = max(wide, NARROWEST) + GAP, tall + LINE + GAP
        # As many columns as give the whole its shape; of those that need as many rows, the fewest.
        fitting = min(count, max(1, round(math.sqrt(SHAPE * count * row / cell))))
        return cls(count, math.ceil(count / math.ceil(count / fitting)), wide, tall, 0.36 if title else 0.0)

    @property
    def rows(self) -> int:
        return math.ceil(self.count / self.columns)

    @property
    def cell(self) -> float:
        return max(self.wide, NARROWEST)

    @property
    def size(self) -> tuple[float, float]:
        """The whole."""
        wide = max(NARROW, 2 * MARGIN + self.columns * (self.cell + GAP) - GAP)
        return wide, 2 * MARGIN + self.above + self.rows * (self.tall + LINE + GAP) - GAP + NOTE

    def place(self, number: int) -> tuple[float, float]:
        """The left and the top of a small picture, counted from the upper left corner."""
        row, column = divmod(number, self.columns)
        left = MARGIN + column * (self.cell + GAP) + (self.cell - self.wide) / 2
        return left, MARGIN + self.above + row * (self.tall + LINE + GAP) + LINE


def strip(picture: Picture, words: Words, weights: Weights, *, title: str | None = None) -> Figure:
    """The picture, and then again for each of the words, lit where the model looked for it.

    ``weights (words, places)``: the places of the picture's grid row by row; its ``first`` other keys may
    stand before them. Every word has a scale of its own, from 0 to its strongest place.

    >>> strip(picture, ["a", "dog"], weights).savefig("strip.svg")  # doctest: +SKIP
    """
    drawing = Drawing(picture, words, weights, title or "")
    return drawn(drawing.draw, drawing.texts)


def draw_strip(
    picture: Picture, words: Words, weights: Weights, path: str | Path, *, title: str = ""
) -> Path:
    """The same, written to a file; the path is given back.

    >>> draw_strip(picture, ["a", "dog"], weights, "strip.png")  # doctest: +SKIP
    """
    drawing = Drawing(picture, words, weights, title)
    return saved(drawing.draw, path, drawing.texts)


class Drawing:
    """All that is drawn, checked."""

    def __init__(self, picture: Picture, words: Words, weights: Weights, title: str) -> None:
        self.picture, self.title = picture, _line(title)
        self.words = [_line(word)[:LETTERS] for word in words]
        self.weights = _checked(picture, self.words, numbers(weights))
        found = decode(picture.data, "the picture")
        if isinstance(found, Flaw):
            raise InputError(str(found))
        self.pixels: Pixels = found

    @property
    def texts(self) -> list[str]:
        return [*self.words, self.title]

    def draw(self, figure: Figure) -> None:
        height, width, _ = self.pixels.shape
        layout = Layout.of(len(self.words) + 1, width / height, bool(self.title))
        figure.set_size_inches(layout.size)
        photo = resized(self.pixels, (round(DOTS * layout.wide), round(DOTS * layout.tall)))
        self._panel(figure, layout, 0, photo)
        for n, (word, weights) in enumerate(zip(self.words, self.weights, strict=True), 1):
            axes = self._panel(figure, layout, n, lit(photo, weights, self.picture))
            text = axes.text(0.5, 1 + 0.07 / layout.tall, word, transform=axes.transAxes, ha="center",
                             va="bottom", size=WORD, color=INK, gid=f"word {n}")  # fmt: skip
            _fit(figure, text, layout.cell)
        wide, tall = layout.size
        left = (layout.cell - layout.wide) / 2 + MARGIN
        if self.title:
            title = figure.text(left / wide, 1 - MARGIN / tall, self.title, va="top", size=12.5, color=INK)
            _fit(figure, title, wide - left - MARGIN)
        self._note(figure, left, wide, tall)

    def _panel(self, figure: Figure, layout: Layout, number: int, pixels: Pixels) -> Axes:
        (wide, tall), (left, top) = layout.size, layout.place(number)
        axes = figure.add_axes(
            (left / wide, 1 - (top + layout.tall) / tall, layout.wide / wide, layout.tall / tall)
        )
        axes.imshow(pixels, aspect="auto", interpolation="antialiased")
        axes.set_axis_off()
        return axes

    def _note(self, figure: Figure, left: float, wide: float, tall: float) -> None:
        """A scale, and what it says: each small picture has its own."""
        long = 0.7
        axes = figure.add_axes((left / wide, (MARGIN + 0.01) / tall, long / wide, 0.09 / tall))
        grey = np.full((1, 256, 3), 140, np.uint8)
        axes.imshow(mixed(grey, np.linspace(0, 1, 256)[None]), aspect="auto", interpolation="nearest")
        axes.set_axis_off()
        least, most = (f"{edge(self.weights.max(1)):.2g}" for edge in (np.min, np.max))
        told = most if least == most else f"the word’s most ({least} to {most})"
        x, y = left + long + 0.1, MARGIN + 0.055
        note = figure.text(x / wide, y / tall, f"attention, 0 to {told}", va="center", size=8, color=GREY)
        _fit(figure, note, wide - x - MARGIN)


def lit(photo: Pixels, weights: Numbers, picture: Picture) -> Pixels:
    """The photo ``(height, width, 3)`` under the weights of all places, on their own scale."""
    height, width, _ = photo.shape
    left, top, right, bottom = picture.part
    across = ((np.arange(width) + 0.5) / width - left) / (right - left)  # in the grid, from 0 to 1
    down = ((np.arange(height) + 0.5) / height - top) / (bottom - top)
    rows, columns = picture.grid
    fine = _taps(down, rows) @ weights.reshape(rows, columns) @ _taps(across, columns).T
    unseen = ((down < 0) | (down > 1))[:, None] | (across < 0) | (across > 1)
    most = float(weights.max())
    return mixed(photo, np.where(unseen, 0, np.clip(fine / (most or 1.0), 0, 1)))


def mixed(photo: Pixels, parts: NDArray[np.floating]) -> Pixels:
    """The photo with the veil of a scale's ``parts (height, width)``, 0 to 1, over it."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = 255 * LinearSegmentedColormap.from_list("lamp", LAMP)(parts)[..., :3]
    cover = STRENGTH * (SHADED - (SHADED - LIT) * parts)[..., None]
    return np.asarray(np.rint(colours * cover + photo * (1 - cover)), np.uint8)


def resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """To this width and height."""
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def _taps(places: NDArray[np.floating], cells: int) -> NDArray[np.floating]:
    """How much of each cell a place, 0 to 1 along an axis, has ``(places, cells)``: Catmull and Rom's."""
    at = np.clip(places, 0, 1) * cells - 0.5
    first = np.floor(at).astype(int)
    t = at - first
    shares = ((-t + 2 * t**2 - t**3) / 2, (2 - 5 * t**2 + 3 * t**3) / 2,
              (t + 4 * t**2 - 3 * t**3) / 2, (t**3 - t**2) / 2)  # fmt: skip
    taps = np.zeros((len(at), cells))
    for k, share in enumerate(shares, -1):
        np.add.at(taps, (np.arange(len(at)), np.clip(first + k, 0, cells - 1)), share)
    return taps


def _fit(figure: Figure, text: Text, room: float) -> None:
    """Smaller letters, and then fewer, until a text is no wider than that many inches."""
    room *= 0.97  # letters are not as wide at all resolutions

    def width() -> float:
        return float(text.get_window_extent().width) / figure.dpi

    if (found := width()) > room:
        size = float(text.get_fontsize())
        text.set_fontsize(max(min(SMALLEST, size), size * room / found))
    letters = text.get_text()
    while len(letters) > 1 and width() > room:
        letters = letters[: max(1, min(len(letters) - 1, int(len(letters) * room / width())))]
        text.set_text(f"{letters.rstrip()}…")


def _line(text: str) -> str:
    """On one line, without what would do things instead of being seen."""
    shown = " ".join(text.split())
    return "".join(c if c.isprintable() else "\ufffd" for c in shown) or "∅" * bool(text)


def _checked(picture: Picture, words: Words, weights: Numbers) -> Numbers:
    if weights.ndim == 2 and weights.shape[1] == picture.keys:
        weights = weights[:, picture.first :]
    places = picture.grid[0] * picture.grid[1]
    if weights.shape != (len(words), places) or not words:
        raise InputError(
            f"weights of shape {weights.shape} came with {len(words)} words and a grid of "
            f"{picture.grid[0]} × {picture.grid[1]}; expected (words, places): a row a word, "
            f"{places} places in each"
        )
    if len(words) > MOST_WORDS:
        raise InputError(f"{len(words)} words are too many for a picture: give an .html file")
    if not np.isfinite(weights).all() or weights.min() < 0:
        raise InputError("the weights hold NaN, infinity or less than 0; expected attention weights")
    return weights
