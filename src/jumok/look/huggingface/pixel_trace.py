"""Where the inputs of a model come from: the place in its image of every pixel that a processor returns.

Processors resize, crop, pad and split images in many ways. Instead of repeating their rules, a processor is run on
pictures of the same sizes whose brightness is the position::

    picture            black   white   brighter to the right   brighter downwards
    pixel value          b       w              v                      u
    place in the image                  x = (v - b) / (w - b)   y = (u - b) / (w - b)

A pixel whose value is the same for black and for white is padding. With several images, one more picture has a
brightness for each image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jumok.data.images import Pixels
from jumok.errors import InputError
from jumok.look.viewer.image_placement import ImageRegion

Floats = NDArray[np.float64]
EDGE = 0.03  # of the image, as a fraction
MAX_DEVIATION = 0.02  # of a place from a regular grid, as a fraction of the image
MIN_SIDE = 8  # pixels: with fewer levels of brightness, a place differs by more than 1 % of the image


@dataclass(frozen=True, eq=False)
class PixelTrace:
    """The places of all pixel values: ``x``, ``y`` from 0 to 1 in image number ``image``; NaN where there is padding.

    All have the shape of the pixel values.
    """

    x: Floats
    y: Floats
    image: Floats


def trace_pixels(process: Callable[[Sequence[Pixels]], Floats], sizes: Sequence[tuple[int, int]]) -> PixelTrace:
    """Trace what ``process`` returns for images of these sizes (height, width)."""
    for height, width in sizes:
        if min(height, width) < MIN_SIDE:
            raise InputError(
                f"an image has {width} × {height} pixels, too few to place patches on it; expected at least "
                f"{MIN_SIDE} × {MIN_SIDE}: enlarge it"
            )
    black, white = (process([_fill(size, value) for size in sizes]) for value in (0, 255))
    across = process([_draw_ramp(size, axis=1) for size in sizes])
    down = process([_draw_ramp(size, axis=0) for size in sizes])
    levels = np.linspace(0, 255, len(sizes) + 2).round()[1:-1]
    numbers = process([_fill(size, level) for size, level in zip(sizes, levels, strict=True)])
    if len({values.shape for values in (black, white, across, down, numbers)}) > 1:
        raise InputError(
            "the processor of this model cuts images by their content, so that their patches cannot be placed"
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        span = np.where(np.abs(white - black) > 1e-6, white - black, np.nan)
        x, y, number = ((values - black) / span for values in (across, down, numbers))
    image = np.abs(number[..., None] * 255 - levels).argmin(-1) if len(sizes) > 1 else np.zeros_like(number)
    return PixelTrace(x, y, np.where(np.isnan(number), np.nan, image))


def average_known(values: Floats, axis: int) -> Floats:
    """Return the mean over an axis of the values that are not NaN; NaN if there are none."""
    known = np.isfinite(values)
    count = known.sum(axis)
    mean = np.where(known, values, 0).sum(axis) / np.maximum(count, 1)
    return np.where(count, mean, np.nan)


def fit_region(x: Floats, y: Floats, size: tuple[float, float] | None = None) -> ImageRegion | None:
    """Return the region that a grid of places ``(rows, columns)`` covers; None if all of it is padding.

    ``size``, its width and height as fractions of the image, helps if most of the grid is padding. Raises an error
    if the places do not lie on a regular, upright grid.
    """
    rows, columns = x.shape
    known = np.isfinite(x) & np.isfinite(y)
    if not known.any():
        return None
    row, column = np.nonzero(known)
    left, width, x_error = _fit_line(column, x[known], columns, size and size[0])
    top, height, y_error = _fit_line(row, y[known], rows, size and size[1])
    if max(x_error, y_error) > MAX_DEVIATION or min(width, height) <= 0:
        raise InputError("the processor of this model turns or warps images, so that their patches cannot be placed")
    left, top, right, bottom = (_snap(edge) for edge in (left, top, left + width, top + height))
    return (left, top, right, bottom)


def measure_known(values: Floats) -> tuple[float, float]:
    """Return the shares of the columns and of the rows ``(rows, columns)`` that are not all padding."""
    known = np.isfinite(values)
    return float(known.any(0).mean()), float(known.any(1).mean())


def trim_region(region: ImageRegion, size: tuple[int, int], covered: tuple[int, int]) -> ImageRegion:
    """Return the region of the first ``covered`` rows and columns of pixels of a region of this ``size``."""
    left, top, right, bottom = region
    return (
        left,
        top,
        left + (right - left) * covered[1] / size[1],
        top + (bottom - top) * covered[0] / size[0],
    )


def _fit_line(
    cells: NDArray[np.intp], places: Floats, num_cells: int, known_length: float | None
) -> tuple[float, float, float]:
    """Fit ``place = start + (cell + 0.5) / num_cells * length``. Returns start, length and the typical deviation."""
    positions = (cells + 0.5) / num_cells
    # A filter that resizes sees the edge of the picture: the middle is exact.
    inner = (places > EDGE) & (places < 1 - EDGE)
    chosen = inner if inner.sum() > 8 and np.ptp(positions[inner]) > 0 else np.ones_like(inner)
    if known_length is None and np.ptp(positions) == 0:  # a single column
        known_length = 1.0
    if known_length is not None:
        length, start = known_length, float((places - known_length * positions)[chosen].mean())
    else:
        length, start = np.polyfit(positions[chosen], places[chosen], 1)
    deviation = float(np.median(np.abs(start + length * positions[chosen] - places[chosen])))
    return float(start), float(length), deviation


def _snap(edge: float) -> float:
    """Return the edge of the image instead of a place that differs by less than a brightness level."""
    return float(round(edge)) if abs(edge - round(edge)) < 1 / 255 and round(edge) in (0, 1) else edge


def _fill(size: tuple[int, int], value: float) -> Pixels:
    return np.full((*size, 3), round(value), np.uint8)


def _draw_ramp(size: tuple[int, int], axis: int) -> Pixels:
    length = size[axis]
    ramp = np.rint(255 * (np.arange(length) + 0.5) / length).astype(np.uint8)
    lines = ramp[None, :] if axis == 1 else ramp[:, None]
    return np.repeat(np.broadcast_to(lines, size)[..., None], 3, axis=2)
