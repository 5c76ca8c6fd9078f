"""Painting of the built-in images: anti-aliased coloured shapes on a slightly textured background.

A shape is defined by its *signed distance function*: the distance of a point from the shape, negative inside.
A shape has a radius of about 1. The coverage of a pixel depends on the distance of its centre, up to half a
pixel on either side. The x axis points right and the y axis points down.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom are exclusive
FloatArray = NDArray[np.float64]
T = TypeVar("T")
NUM_TEXTURE_KNOTS = 6  # of the background, per axis


class PortableGenerator:
    """Random numbers that are the same with every version of NumPy, which guarantees the bits of PCG64."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    @classmethod
    def from_key(cls, key: str) -> Self:
        """A generator seeded with a digest, which makes neighbouring keys independent."""
        return cls(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big"))

    def uniform_array(self, low: float, high: float, shape: tuple[int, ...]) -> FloatArray:
        """Uniform numbers between two limits."""
        fractions = (self._bits.random_raw(math.prod(shape)) >> np.uint64(11)).astype(np.float64)
        return (low + (high - low) * 2.0**-53 * fractions).reshape(shape)

    def uniform(self, low: float, high: float) -> float:
        return float(self.uniform_array(low, high, (1,))[0])

    def choice(self, options: Sequence[T]) -> T:
        """One of the options, with equal probability."""
        return options[int(self.uniform(0, len(options)))]

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""
        return self.uniform(0, 1) < probability


def draw_background(rng: PortableGenerator, size: int) -> FloatArray:
    """A light or dark tinted gray, plain or with soft waves ``(size, size, 3)``."""
    gray = rng.uniform(20, 60) if rng.bernoulli(0.25) else rng.uniform(165, 240)
    color = gray + rng.uniform_array(-10, 10, (3,))
    knots = rng.uniform_array(-1, 1, (NUM_TEXTURE_KNOTS, NUM_TEXTURE_KNOTS)) * rng.choice((0.0, 6.0, 14.0))
    weights = _interpolation_weights(size)
    background: FloatArray = (weights @ knots @ weights.T)[:, :, None] + color
    return background


def paint_shape(
    pixels: FloatArray, shape_name: str, color: Sequence[float], center: tuple[float, float], radius: float, tilt: float
) -> Box:
    """Paint a shape, rotated by ``tilt``, on an image ``(height, width, 3)``.

    Returns the box of its pixels.
    """
    x, y = center
    height, width, _ = pixels.shape
    left, top = (max(0, int(middle - 1.3 * radius)) for middle in center)
    right, bottom = min(width, int(x + 1.3 * radius) + 2), min(height, int(y + 1.3 * radius) + 2)
    across = (np.arange(left, right) + 0.5 - x) / radius
    down = ((np.arange(top, bottom) + 0.5 - y) / radius)[:, None]
    rotated = (across * math.cos(tilt) + down * math.sin(tilt), down * math.cos(tilt) - across * math.sin(tilt))
    coverage = np.clip(0.5 - SHAPE_DISTANCES[shape_name](*rotated) * radius, 0, 1)
    light = 1 - 0.07 * (across + down)  # from the upper left
    region = pixels[top:bottom, left:right]
    region += coverage[:, :, None] * (light[:, :, None] * np.asarray(color, float) - region)
    rows, columns = (np.flatnonzero((coverage > 0.5).any(axis)) for axis in (1, 0))
    return (left + int(columns[0]), top + int(rows[0]), left + int(columns[-1]) + 1, top + int(rows[-1]) + 1)


# ---------------------------------------------------------------------------------------------- distances


def _circle_distance(x: FloatArray, y: FloatArray, radius: float = 0.93) -> FloatArray:
    return np.hypot(x, y) - radius


def _square_distance(x: FloatArray, y: FloatArray, half: float = 0.8) -> FloatArray:
    return np.maximum(np.abs(x), np.abs(y)) - half


def _triangle_distance(x: FloatArray, y: FloatArray) -> FloatArray:
    return np.maximum(y - 0.82, np.abs(x) * math.cos(math.pi / 6) - (y + 0.98) / 2)


def _star_distance(x: FloatArray, y: FloatArray) -> FloatArray:
    """The star consists of the points outside at most one of the five lines of a pentagon."""
    y = y - 0.1
    angles = math.pi / 2 + np.arange(5) * 0.4 * math.pi
    lines = np.stack([x * math.cos(angle) + y * math.sin(angle) for angle in angles])
    distance: FloatArray = np.partition(lines, 3, axis=0)[3] - 1.18 * math.sin(math.pi / 10)
    return distance


def _heart_distance(x: FloatArray, y: FloatArray, half: float = 0.84) -> FloatArray:
    """A square on its corner, with a circle on each upper side."""
    x, y = np.abs(x), y - 0.1 * half
    square = (x + np.abs(y) - half) / math.sqrt(2)
    return np.minimum(square, _circle_distance(x - half / 2, y + half / 2, half / math.sqrt(2)))


def _moon_distance(x: FloatArray, y: FloatArray) -> FloatArray:
    return np.maximum(_circle_distance(x, y, 1.0), -_circle_distance(x - 0.4, y + 0.4, 0.78))


SHAPE_DISTANCES: dict[str, Callable[[FloatArray, FloatArray], FloatArray]] = {
    "circle": _circle_distance,
    "square": _square_distance,
    "triangle": _triangle_distance,
    "star": _star_distance,
    "heart": _heart_distance,
    "moon": _moon_distance,
}


@functools.cache
def _interpolation_weights(size: int) -> FloatArray:
    """Weights ``(size, NUM_TEXTURE_KNOTS)`` of smooth interpolation between the knots of a texture."""
    positions = np.linspace(0, NUM_TEXTURE_KNOTS - 1, size)[:, None]
    nearness = np.clip(1 - np.abs(positions - np.arange(NUM_TEXTURE_KNOTS)), 0, 1)
    return np.asarray(nearness**2 * (3 - 2 * nearness))
