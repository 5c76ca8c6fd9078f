"""Words as a figure: the attention of each of them over the image or images (as in Xu et al. 2015)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jumok.data.images import Pixels, decode_image
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.errors import InputError
from jumok.look.figures.plots import GREY, INK, Drawing, add_panel, create_colormap, to_single_line
from jumok.look.viewer.attended_image import AttendedImage, ImageMedium
from jumok.look.viewer.image_placement import ImageGrid, ImagePlacement
from jumok.look.viewer.tiles import FloatArray, WeightArray, to_float32_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

# From dark to light, and how much of the image that covers: as in static/colours.js and overlay.js.
OVERLAY_COLOURS = ("#101621", "#2a2b2f", "#46423c", "#635a49", "#827356", "#a08e62", "#bea96d", "#ddc779", "#fce584")
OVERLAY_STRENGTH, DARK_OPACITY, LIGHT_OPACITY = 0.7, 0.88, 0.42
# All in inches.
PANEL_AREA, MAX_PANEL_WIDTH, MAX_PANEL_HEIGHT, MIN_PANEL_WIDTH = 2.6, 3.4, 2.7, 0.85
PANEL_GAP, WORD_HEIGHT, MARGIN, NOTE_HEIGHT = 0.12, 0.25, 0.14, 0.3
MIN_FIGURE_WIDTH = 3.9  # so that the note fits
TARGET_ASPECT_RATIO = 1.75  # approximate width / height of the figure
WORD_FONT_SIZE, MIN_FONT_SIZE = 11.0, 7.0  # points
PANEL_DPI = 200
IMAGE_GAP = 8  # pixels between two images of a panel
MAX_WORDS = 200
MAX_WORD_LENGTH = 80  # characters that are drawn: some words may be whole documents


@dataclass(frozen=True)
class CaptionLayout:
    """Panels in rows, the first of them without an overlay. All in inches."""

    num_panels: int
    num_columns: int
    panel_width: float
    panel_height: float
    title_height: float

    @classmethod
    def from_aspect_ratio(cls, num_panels: int, aspect_ratio: float, has_title: bool) -> CaptionLayout:
        """Choose the layout of panels; ``aspect_ratio`` is the width of the image divided by its height."""
        width = math.sqrt(PANEL_AREA * aspect_ratio)
        factor = min(1.0, MAX_PANEL_WIDTH / width, MAX_PANEL_HEIGHT / (width / aspect_ratio))
        width, height = width * factor, width / aspect_ratio * factor
        cell, row = max(width, MIN_PANEL_WIDTH) + PANEL_GAP, height + WORD_HEIGHT + PANEL_GAP
        # As many columns as approximate the aspect ratio; with the same number of rows, as few as possible.
        max_columns = min(num_panels, max(1, round(math.sqrt(TARGET_ASPECT_RATIO * num_panels * row / cell))))
        return cls(
            num_panels,
            math.ceil(num_panels / math.ceil(num_panels / max_columns)),
            width,
            height,
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
        """The width and height of the figure."""
        width = max(MIN_FIGURE_WIDTH, 2 * MARGIN + self.num_columns * (self.cell_width + PANEL_GAP) - PANEL_GAP)
        return width, 2 * MARGIN + self.title_height + self.num_rows * (
            self.panel_height + WORD_HEIGHT + PANEL_GAP
        ) - PANEL_GAP + NOTE_HEIGHT

    def locate_panel(self, index: int) -> tuple[float, float]:
        """Return the left and the top of a panel, counted from the upper left corner."""
        row, column = divmod(index, self.num_columns)
        left = MARGIN + column * (self.cell_width + PANEL_GAP) + (self.cell_width - self.panel_width) / 2
        return left, MARGIN + self.title_height + row * (self.panel_height + WORD_HEIGHT + PANEL_GAP) + WORD_HEIGHT


class CaptionFigure(Drawing):
    """The images, and again for each of the words, with the attention of that word.

    ``weights (words, keys)`` are those of a layer whose patches are placed by ``placement``; of an
    :class:`AttendedImage`, also only those of its patches, row by row. Several images stand side by side. Every word
    has its own scale, from 0 to its maximum. If the keys include those of a text, the share of the attention
    that the images get is written beside each word.

    >>> CaptionFigure(image, ["a", "dog"], weights).save("caption.png")  # doctest: +SKIP
    """

    def __init__(
        self,
        image: ImageMedium,
        words: Sequence[str],
        weights: WeightArray,
        *,
        placement: ImagePlacement | None = None,
        title: str = "",
    ) -> None:
        self.title = to_single_line(title)
        self.words = [to_single_line(word)[:MAX_WORD_LENGTH] for word in words]
        if placement is None:
            if not isinstance(image, AttendedImage):
                raise InputError("several images given without a placement; expected that of the layer of the weights")
            placement = image.placement
        self.placement = placement
        self.weights = _check_weights(placement, self.words, to_float32_array(weights))
        self.grids = {n: [grid for grid in placement.grids if grid.image == n] for n in range(len(image.files))}
        self.pixels: list[Pixels] = [_decode(image.files[n], n) for n, grids in self.grids.items() if grids]
        self.captions = self.words
        if placement.has_text:
            shares = sum(self.weights[:, span.start : span.stop].sum(1) for span in placement.spans)
            self.captions = [f"{word}  {share:.2g} %" for word, share in zip(self.words, 100 * shares, strict=True)]
        self.texts = [*self.captions, self.title]

    def draw(self, figure: Figure) -> None:
        ratios = [pixels.shape[1] / pixels.shape[0] for pixels in self.pixels]
        layout = CaptionLayout.from_aspect_ratio(len(self.words) + 1, sum(ratios), bool(self.title))
        figure.set_size_inches(layout.figure_size)
        height = max(1, round(PANEL_DPI * layout.panel_height))
        resized = [
            resize_pixels(pixels, (max(1, round(height * ratio)), height))
            for pixels, ratio in zip(self.pixels, ratios, strict=True)
        ]
        self._draw_panel(figure, layout, 0, _join_images(resized))
        image_grids = [grids for grids in self.grids.values() if grids]
        for i, (word, weights) in enumerate(zip(self.captions, self.weights, strict=True), 1):
            max_weight = max(_find_max_weight(weights, grids) for grids in image_grids)
            panel = [
                overlay_weights(pixels, weights, grids, max_weight)
                for pixels, grids in zip(resized, image_grids, strict=True)
            ]
            axes = self._draw_panel(figure, layout, i, _join_images(panel))
            text = axes.text(0.5, 1 + 0.07 / layout.panel_height, word, transform=axes.transAxes, ha="center",
                             va="bottom", size=WORD_FONT_SIZE, color=INK, gid=f"word {i}")  # fmt: skip
            _fit_text(figure, text, layout.cell_width)
        figure_width, figure_height = layout.figure_size
        left = (layout.cell_width - layout.panel_width) / 2 + MARGIN
        if self.title:
            x, y = left / figure_width, 1 - MARGIN / figure_height
            title = figure.text(x, y, self.title, va="top", size=12.5, color=INK)
            _fit_text(figure, title, figure_width - left - MARGIN)
        self._draw_scale_note(figure, left, figure_width, figure_height)

    def _draw_panel(self, figure: Figure, layout: CaptionLayout, index: int, pixels: Pixels) -> Axes:
        axes = add_panel(figure, *layout.locate_panel(index), layout.panel_width, layout.panel_height)
        axes.imshow(pixels, aspect="auto", interpolation="antialiased")
        axes.set_axis_off()
        return axes

    def _draw_scale_note(self, figure: Figure, left: float, width: float, height: float) -> None:
        """Draw a scale, with a note that each panel has its own."""
        bar_width, bar_height = 0.7, 0.09
        axes = add_panel(figure, left, height - MARGIN - 0.1, bar_width, bar_height)
        grey = np.full((1, 256, 3), 140, np.uint8)
        axes.imshow(blend_overlay(grey, np.linspace(0, 1, 256)[None]), aspect="auto", interpolation="nearest")
        axes.set_axis_off()
        maxima = [
            max(_find_max_weight(weights, grids) for grids in self.grids.values() if grids) for weights in self.weights
        ]
        lowest, highest = (f"{reduce(maxima):.2g}" for reduce in (np.min, np.max))
        scale_end = highest if lowest == highest else f"the word’s maximum ({lowest} to {highest})"
        x, y = left + bar_width + 0.1, MARGIN + 0.055
        note = figure.text(x / width, y / height, f"attention, 0 to {scale_end}", va="center", size=8, color=GREY)
        _fit_text(figure, note, width - x - MARGIN)


def overlay_weights(
    pixels: Pixels, weights: FloatArray, grids: Sequence[ImageGrid], max_weight: float | None = None
) -> Pixels:
    """Overlay pixels ``(height, width, 3)`` with the weights of all keys ``(K,)`` on the patches of ``grids``.

    The scale ends at ``max_weight``, which defaults to the highest of these weights.
    """
    height, width, _ = pixels.shape
    total = np.zeros((height, width))
    for grid, patch_weights in zip(grids, _scale_weights(weights, grids), strict=True):
        left, top, right, bottom = grid.region
        x = ((np.arange(width) + 0.5) / width - left) / (right - left)  # within the grid, from 0 to 1
        y = ((np.arange(height) + 0.5) / height - top) / (bottom - top)
        rows, columns = grid.shape
        interpolated = _build_interpolation(y, rows) @ patch_weights @ _build_interpolation(x, columns).T
        is_outside = ((y < 0) | (y > 1))[:, None] | (x < 0) | (x > 1)
        total += np.where(is_outside, 0, interpolated)
    end = _find_max_weight(weights, grids) if max_weight is None else max_weight
    return blend_overlay(pixels, np.clip(total / (end or 1.0), 0, 1))


def _scale_weights(weights: FloatArray, grids: Sequence[ImageGrid]) -> list[FloatArray]:
    """Return the weights of the patches of each grid, spread over the area of the smallest patches."""
    finest = min(grid.cell_area for grid in grids)
    return [grid.get_weights(weights) * np.float32(finest / grid.cell_area) for grid in grids]


def _find_max_weight(weights: FloatArray, grids: Sequence[ImageGrid]) -> float:
    return max(float(patch_weights.max()) for patch_weights in _scale_weights(weights, grids))


def _join_images(images: Sequence[Pixels]) -> Pixels:
    """Return images of the same height side by side, with a white gap between them."""
    gap = np.full((len(images[0]), IMAGE_GAP, 3), 255, np.uint8)
    parts = [part for image in images for part in (gap, image)]
    return np.concatenate(parts[1:], axis=1)


def _decode(data: bytes, number: int) -> Pixels:
    pixels = decode_image(data, f"image {number + 1}")
    if isinstance(pixels, InvalidExample):
        raise InputError(str(pixels))
    return pixels


def blend_overlay(pixels: Pixels, shares: NDArray[np.floating]) -> Pixels:
    """Blend pixels with the overlay of relative weights ``shares (height, width)``, 0 to 1."""
    colours = 255 * create_colormap(OVERLAY_COLOURS)(shares)[..., :3]
    opacity = OVERLAY_STRENGTH * (DARK_OPACITY - (DARK_OPACITY - LIGHT_OPACITY) * shares)[..., None]
    return np.asarray(np.rint(colours * opacity + pixels * (1 - opacity)), np.uint8)


def resize_pixels(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize to this width and height."""
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def _build_interpolation(positions: NDArray[np.floating], num_cells: int) -> NDArray[np.floating]:
    """Return the Catmull-Rom interpolation weights ``(positions, num_cells)``; positions are 0 to 1."""
    coordinates = np.clip(positions, 0, 1) * num_cells - 0.5
    first = np.floor(coordinates).astype(int)
    t = coordinates - first
    shares = ((-t + 2 * t**2 - t**3) / 2, (2 - 5 * t**2 + 3 * t**3) / 2,
              (t + 4 * t**2 - 3 * t**3) / 2, (t**3 - t**2) / 2)  # fmt: skip
    interpolation = np.zeros((len(coordinates), num_cells))
    for k, share in enumerate(shares, -1):
        np.add.at(interpolation, (np.arange(len(coordinates)), np.clip(first + k, 0, num_cells - 1)), share)
    return interpolation


def _fit_text(figure: Figure, text: Text, max_width: float) -> None:
    """Shrink a text, then truncate it, until it is at most ``max_width`` inches wide."""
    max_width *= 0.97  # the width of characters depends on the resolution

    def measure_width() -> float:
        return float(text.get_window_extent().width) / figure.dpi

    if (width := measure_width()) > max_width:
        size = float(text.get_fontsize())
        text.set_fontsize(max(min(MIN_FONT_SIZE, size), size * max_width / width))
    letters = text.get_text()
    while len(letters) > 1 and measure_width() > max_width:
        letters = letters[: max(1, min(len(letters) - 1, int(len(letters) * max_width / measure_width())))]
        text.set_text(f"{letters.rstrip()}…")


def _check_weights(placement: ImagePlacement, words: Sequence[str], weights: FloatArray) -> FloatArray:
    """Return the weights on all keys ``(words, keys)``."""
    if weights.ndim == 2 and len(placement.grids) == 1 and weights.shape[1] == placement.num_patches:
        keys = weights
        weights = np.zeros((len(keys), placement.num_keys), np.float32)
        weights[:, placement.grids[0].keys.ravel()] = keys
    if weights.shape != (len(words), placement.num_keys) or not words:
        sizes = ", ".join(f"{rows} × {columns}" for rows, columns in (grid.shape for grid in placement.grids))
        raise InputError(
            f"weights of shape {weights.shape} given with {len(words)} words and a grid of "
            f"{sizes}; expected (words, patches): a row for each word, {placement.num_patches} patches in each"
        )
    if len(words) > MAX_WORDS:
        raise InputError(f"{len(words)} words are too many for a figure: use an .html file")
    if not np.isfinite(weights).all() or weights.min() < 0:
        raise InputError("the weights contain NaN, infinity or negative numbers; expected attention weights")
    return weights
