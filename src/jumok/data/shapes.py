"""Coloured shapes on a lightly textured ground, with smooth edges: how the built-in pictures are painted.

A shape is told by its *distance*: a function that says of a point how far it lies outside (or, if less than
0, inside) the shape, which reaches about 1 from its middle. A pixel is covered as much as its middle lies
inside, up to half a pixel either way. Points have x to the right and y downwards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["KINDS", "Box", "Chance", "background", "paint"]

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; the last two lie just outside
Numbers = NDArray[np.float64]
T = TypeVar("T")
WAVES = 6  # across a textured ground


class Chance:
    """Numbers drawn from a seed, alike with every NumPy: the bits of PCG64 are promised to stay."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def numbers(self, low: float, high: float, shape: tuple[int, ...]) -> Numbers:
        """Evenly between two numbers."""
        drawn = (self._bits.random_raw(math.prod(shape)) >> np.uint64(11)).astype(np.float64)
        return (low + (high - low) * 2.0**-53 * drawn).reshape(shape)

    def number(self, low: float, high: float) -> float:
        return float(self.numbers(low, high, (1,))[0])

    def pick(self, options: Sequence[T]) -> T:
        """One of these, each as likely as the others."""
        return options[int(self.number(0, len(options)))]

    def chance(self, share: float) -> bool:
        """True in this share of all cases."""
        return self.number(0, 1) < share


def background(chance: Chance, size: int) -> Numbers:
    """A ground of a pale or a dark grey with a tint, plain or in soft waves ``(size, size, 3)``."""
    grey = chance.number(20, 60) if chance.chance(0.25) else chance.number(165, 240)
    colour = grey + chance.numbers(-10, 10, (3,))
    rough = chance.numbers(-1, 1, (WAVES, WAVES)) * chance.pick((0.0, 6.0, 14.0))
    blend = _blend(size)
    ground: Numbers = (blend @ rough @ blend.T)[:, :, None] + colour
    return ground


def paint(
    pixels: Numbers, kind: str, colour: Sequence[float], at: tuple[float, float], reach: float, tilt: float
) -> Box:
    """Add a shape to a picture ``(height, width, 3)``, turned by ``tilt``; the box of its pixels."""
    x, y = at
    height, width, _ = pixels.shape
    left, top = (max(0, int(middle - 1.3 * reach)) for middle in at)
    right, bottom = min(width, int(x + 1.3 * reach) + 2), min(height, int(y + 1.3 * reach) + 2)
    across = (np.arange(left, right) + 0.5 - x) / reach
    down = ((np.arange(top, bottom) + 0.5 - y) / reach)[:, None]
    turned = (
        across * math.cos(tilt) + down * math.sin(tilt),
        down * math.cos(tilt) - across * math.sin(tilt),
    )
    cover = np.clip(0.5 - KINDS[kind](*turned) * reach, 0, 1)
    light = 1 - 0.07 * (across + down)  # from the upper left
    part = pixels[top:bottom, left:right]
    part += cover[:, :, None] * (light[:, :, None] * np.asarray(colour, float) - part)
    rows, columns = (np.flatnonzero((cover > 0.5).any(axis)) for axis in (1, 0))
    return (
        left + int(columns[0]),
        top + int(rows[0]),
        left + int(columns[-1]) + 1,
        top + int(rows[-1]) + 1,
    )


# ---------------------------------------------------------------------------------------------- distances


def _circle(x: Numbers, y: Numbers, radius: float = 0.93) -> Numbers:
    return np.hypot(x, y) - radius


def _square(x: Numbers, y: Numbers, half: float = 0.8) -> Numbers:
    return np.maximum(np.abs(x), np.abs(y)) - half


def _triangle(x: Numbers, y: Numbers) -> Numbers:
    return np.maximum(y - 0.82, np.abs(x) * math.cos(math.pi / 6) - (y + 0.98) / 2)


def _star(x: Numbers, y: Numbers) -> Numbers:
    """Its lines are those of a pentagon: what lies behind at most one of them is the star."""
    y = y - 0.1
    angles = math.pi / 2 + np.arange(5) * 0.4 * math.pi
    lines = np.stack([x * math.cos(angle) + y * math.sin(angle) for angle in angles])
    behind: Numbers = np.partition(lines, 3, axis=0)[3] - 1.18 * math.sin(math.pi / 10)
    return behind


def _heart(x: Numbers, y: Numbers, half: float = 0.84) -> Numbers:
    """A square on its corner, and a circle on each of its upper sides."""
    x, y = np.abs(x), y - 0.1 * half
    square = (x + np.abs(y) - half) / math.sqrt(2)
    return np.minimum(square, _circle(x - half / 2, y + half / 2, half / math.sqrt(2)))


def _moon(x: Numbers, y: Numbers) -> Numbers:
    return np.maximum(_circle(x, y, 1.0), -_circle(x - 0.4, y + 0.4, 0.78))


KINDS: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "moon": _moon,
}


@functools.cache
def _blend(size: int) -> Numbers:
    """How much of each knot of the waves a pixel has ``(size, WAVES)``: smooth from one to the next."""
    at = np.linspace(0, WAVES - 1, size)[:, None]
    near = np.clip(1 - np.abs(at - np.arange(WAVES)), 0, 1)
    return np.asarray(near**2 * (3 - 2 * near))
