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

from jumok.data.images import Pixels, decode_image
from jumok.data.readers.formats import InvalidExample
from jumok.errors import InputError
from jumok.look.figures.plots import GREY, INK, build_figure, save_figure
from jumok.look.viewer.tiles import FloatArray
from jumok.look.viewer.viewer_data import AttendedImage, to_float32_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

__all__ = ["build_caption_figure", "draw_caption"]

# From shade to lamplight, and how much of the picture that covers: as in static/colours.js and overlay.js.
OVERLAY_COLOURS = (
    "#101621",
    "#2a2b2f",
    "#46423c",
    "#635a49",
    "#827356",
    "#a08e62",
    "#bea96d",
    "#ddc779",
    "#fce584",
)
OVERLAY_STRENGTH, DARK_OPACITY, LIGHT_OPACITY = 0.7, 0.88, 0.42
# All in inches.
PANEL_AREA, MAX_PANEL_WIDTH, MAX_PANEL_HEIGHT, MIN_PANEL_WIDTH = (
    2.6,
    3.4,
    2.7,
    0.85,
)  # of a small picture, whatever its shape
PANEL_GAP, WORD_HEIGHT, MARGIN, NOTE_HEIGHT = 0.12, 0.25, 0.14, 0.3
MIN_FIGURE_WIDTH = 3.9  # the whole: room for the note
TARGET_ASPECT_RATIO = 1.75  # of the whole: its width by its height, about
WORD_FONT_SIZE, MIN_FONT_SIZE = 11.0, 7.0  # points
PANEL_DPI = 200  # an inch of a small picture
MAX_WORDS = 200
MAX_WORD_LENGTH = 80  # of a word that are drawn: some may be whole documents

Words = Sequence[str]
WeightArray = Tensor | NDArray[np.floating]


@dataclass(frozen=True)
class CaptionLayout:
    """Small pictures in rows, the first of them without an overlay. All in inches."""

    num_panels: int
    num_columns: int
    panel_width: float  # a small picture
    panel_height: float
    title_height: float  # the title

    @classmethod
    def from_aspect_ratio(cls, num_panels: int, aspect_ratio: float, has_title: bool) -> CaptionLayout:
        """``aspect_ratio`` is a picture's width by its height."""
        wide = math.sqrt(PANEL_AREA * aspect_ratio)
        shrink = min(1.0, MAX_PANEL_WIDTH / wide, MAX_PANEL_HEIGHT / (wide / aspect_ratio))
        wide, tall = wide * shrink, wide / aspect_ratio * shrink
        cell, row = max(wide, MIN_PANEL_WIDTH) + PANEL_GAP, tall + WORD_HEIGHT + PANEL_GAP
        # As many columns as give the whole its shape; of those that need as many rows, the fewest.
        fitting = min(num_panels, max(1, round(math.sqrt(TARGET_ASPECT_RATIO * num_panels * row / cell))))
        return cls(
            num_panels,
            math.ceil(num_panels / math.ceil(num_panels / fitting)),
            wide,
            tall,
            0.36 if has_title else 0.0,
        )

    @property
    def num_rows(self) -> int:
        return math.ceil(self.num_panels / self.num_columns)

    @property
    def cell_width(self) -> float:
        return max(self.panel_width, MIN_PANEL_WIDTH)

    @property
    def figure_size(self) -> tuple[float, float]:
        """The whole."""
        wide = max(
            MIN_FIGURE_WIDTH, 2 * MARGIN + self.num_columns * (self.cell_width + PANEL_GAP) - PANEL_GAP
        )
        return wide, 2 * MARGIN + self.title_height + self.num_rows * (
            self.panel_height + WORD_HEIGHT + PANEL_GAP
        ) - PANEL_GAP + NOTE_HEIGHT

    def locate_panel(self, index: int) -> tuple[float, float]:
        """The left and the top of a small picture, counted from the upper left corner."""
        row, column = divmod(index, self.num_columns)
        left = MARGIN + column * (self.cell_width + PANEL_GAP) + (self.cell_width - self.panel_width) / 2
        return left, MARGIN + self.title_height + row * (
            self.panel_height + WORD_HEIGHT + PANEL_GAP
        ) + WORD_HEIGHT


def build_caption_figure(
    image: AttendedImage, words: Words, weights: WeightArray, *, title: str | None = None
) -> Figure:
    """The picture, and then again for each of the words, lit where the model looked for it.

    ``weights (words, positions)``: the places of the picture's grid row by row; its ``first`` other keys may
    stand before them. Every word has a scale of its own, from 0 to its strongest place.

    >>> strip(picture, ["a", "dog"], weights).savefig("strip.svg")  # doctest: +SKIP
    """
    drawing = CaptionDrawing(image, words, weights, title or "")
    return build_figure(drawing.draw, drawing.texts)


def draw_caption(
    image: AttendedImage, words: Words, weights: WeightArray, path: str | Path, *, title: str = ""
) -> Path:
    """The same, written to a file; the path is given back.

    >>> draw_strip(picture, ["a", "dog"], weights, "strip.png")  # doctest: +SKIP
    """
    drawing = CaptionDrawing(image, words, weights, title)
    return save_figure(drawing.draw, path, drawing.texts)


class CaptionDrawing:
    """All that is drawn, checked."""

    def __init__(self, image: AttendedImage, words: Words, weights: WeightArray, title: str) -> None:
        self.image, self.title = image, _to_single_line(title)
        self.words = [_to_single_line(word)[:MAX_WORD_LENGTH] for word in words]
        self.weights = _check_weights(image, self.words, to_float32_array(weights))
        found = decode_image(image.data, "the picture")
        if isinstance(found, InvalidExample):
            raise InputError(str(found))
        self.pixels: Pixels = found

    @property
    def texts(self) -> list[str]:
        return [*self.words, self.title]

    def draw(self, figure: Figure) -> None:
        height, width, _ = self.pixels.shape
        layout = CaptionLayout.from_aspect_ratio(len(self.words) + 1, width / height, bool(self.title))
        figure.set_size_inches(layout.figure_size)
        photo = resize_pixels(
            self.pixels, (round(PANEL_DPI * layout.panel_width), round(PANEL_DPI * layout.panel_height))
        )
        self._draw_panel(figure, layout, 0, photo)
        for n, (word, weights) in enumerate(zip(self.words, self.weights, strict=True), 1):
            axes = self._draw_panel(figure, layout, n, overlay_weights(photo, weights, self.image))
            text = axes.text(0.5, 1 + 0.07 / layout.panel_height, word, transform=axes.transAxes, ha="center",
                             va="bottom", size=WORD_FONT_SIZE, color=INK, gid=f"word {n}")  # fmt: skip
            _fit_text(figure, text, layout.cell_width)
        wide, tall = layout.figure_size
        left = (layout.cell_width - layout.panel_width) / 2 + MARGIN
        if self.title:
            title = figure.text(left / wide, 1 - MARGIN / tall, self.title, va="top", size=12.5, color=INK)
            _fit_text(figure, title, wide - left - MARGIN)
        self._draw_scale_note(figure, left, wide, tall)

    def _draw_panel(self, figure: Figure, layout: CaptionLayout, index: int, pixels: Pixels) -> Axes:
        (wide, tall), (left, top) = layout.figure_size, layout.locate_panel(index)
        axes = figure.add_axes(
            (
                left / wide,
                1 - (top + layout.panel_height) / tall,
                layout.panel_width / wide,
                layout.panel_height / tall,
            )
        )
        axes.imshow(pixels, aspect="auto", interpolation="antialiased")
        axes.set_axis_off()
        return axes

    def _draw_scale_note(self, figure: Figure, left: float, width: float, height: float) -> None:
        """A scale, and what it says: each small picture has its own."""
        long = 0.7
        axes = figure.add_axes((left / width, (MARGIN + 0.01) / height, long / width, 0.09 / height))
        grey = np.full((1, 256, 3), 140, np.uint8)
        axes.imshow(blend_overlay(grey, np.linspace(0, 1, 256)[None]), aspect="auto", interpolation="nearest")
        axes.set_axis_off()
        least, most = (f"{edge(self.weights.max(1)):.2g}" for edge in (np.min, np.max))
        told = most if least == most else f"the word’s most ({least} to {most})"
        x, y = left + long + 0.1, MARGIN + 0.055
        note = figure.text(x / width, y / height, f"attention, 0 to {told}", va="center", size=8, color=GREY)
        _fit_text(figure, note, width - x - MARGIN)


def overlay_weights(pixels: Pixels, weights: FloatArray, image: AttendedImage) -> Pixels:
    """The photo ``(height, width, 3)`` under the weights of all places, on their own scale."""
    height, width, _ = pixels.shape
    left, top, right, bottom = image.region
    across = ((np.arange(width) + 0.5) / width - left) / (right - left)  # in the grid, from 0 to 1
    down = ((np.arange(height) + 0.5) / height - top) / (bottom - top)
    rows, columns = image.grid
    fine = (
        _build_interpolation(down, rows)
        @ weights.reshape(rows, columns)
        @ _build_interpolation(across, columns).T
    )
    unseen = ((down < 0) | (down > 1))[:, None] | (across < 0) | (across > 1)
    most = float(weights.max())
    return blend_overlay(pixels, np.where(unseen, 0, np.clip(fine / (most or 1.0), 0, 1)))


def blend_overlay(pixels: Pixels, shares: NDArray[np.floating]) -> Pixels:
    """The photo with the veil of a scale's ``shares (height, width)``, 0 to 1, over it."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = 255 * LinearSegmentedColormap.from_list("lamp", OVERLAY_COLOURS)(shares)[..., :3]
    cover = OVERLAY_STRENGTH * (DARK_OPACITY - (DARK_OPACITY - LIGHT_OPACITY) * shares)[..., None]
    return np.asarray(np.rint(colours * cover + pixels * (1 - cover)), np.uint8)


def resize_pixels(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """To this width and height."""
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def _build_interpolation(positions: NDArray[np.floating], num_cells: int) -> NDArray[np.floating]:
    """How much of each cell a place, 0 to 1 along an axis, has ``(positions, num_cells)``: Catmull and Rom's."""
    at = np.clip(positions, 0, 1) * num_cells - 0.5
    first = np.floor(at).astype(int)
    t = at - first
    shares = ((-t + 2 * t**2 - t**3) / 2, (2 - 5 * t**2 + 3 * t**3) / 2,
              (t + 4 * t**2 - 3 * t**3) / 2, (t**3 - t**2) / 2)  # fmt: skip
    taps = np.zeros((len(at), num_cells))
    for k, share in enumerate(shares, -1):
        np.add.at(taps, (np.arange(len(at)), np.clip(first + k, 0, num_cells - 1)), share)
    return taps


def _fit_text(figure: Figure, text: Text, max_width: float) -> None:
    """Smaller letters, and then fewer, until a text is no wider than that many inches."""
    max_width *= 0.97  # letters are not as wide at all resolutions

    def width() -> float:
        return float(text.get_window_extent().width) / figure.dpi

    if (found := width()) > max_width:
        size = float(text.get_fontsize())
        text.set_fontsize(max(min(MIN_FONT_SIZE, size), size * max_width / found))
    letters = text.get_text()
    while len(letters) > 1 and width() > max_width:
        letters = letters[: max(1, min(len(letters) - 1, int(len(letters) * max_width / width())))]
        text.set_text(f"{letters.rstrip()}…")


def _to_single_line(text: str) -> str:
    """On one line, without what would do things instead of being seen."""
    shown = " ".join(text.split())
    return "".join(c if c.isprintable() else "\ufffd" for c in shown) or "∅" * bool(text)


def _check_weights(image: AttendedImage, words: Words, weights: FloatArray) -> FloatArray:
    if weights.ndim == 2 and weights.shape[1] == image.num_keys:
        weights = weights[:, image.num_prefix_keys :]
    places = image.grid[0] * image.grid[1]
    if weights.shape != (len(words), places) or not words:
        raise InputError(
            f"weights of shape {weights.shape} came with {len(words)} words and a grid of "
            f"{image.grid[0]} × {image.grid[1]}; expected (words, places): a row a word, "
            f"{places} places in each"
        )
    if len(words) > MAX_WORDS:
        raise InputError(f"{len(words)} words are too many for a picture: give an .html file")
    if not np.isfinite(weights).all() or weights.min() < 0:
        raise InputError("the weights hold NaN, infinity or less than 0; expected attention weights")
    return weights
