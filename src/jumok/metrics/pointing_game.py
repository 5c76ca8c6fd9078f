"""The pointing game: does attention look at what a word is about?

Of each word, the strongest place of its map is taken: the centre of a cell of the grid that covers the
picture. It is a hit if that lies inside the word's box (Zhang et al. 2016, who play it with objects).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.errors import InputError

__all__ = ["Box", "PointingScore", "score_pointing"]

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; the last two lie just outside
AttentionMaps: TypeAlias = Tensor | NDArray[Any]


@dataclass(frozen=True)
class PointingScore:
    """The share of words that were pointed at, and what a place drawn by chance would reach."""

    accuracy: float
    chance: float
    count: int  # words with a box

    def __str__(self) -> str:
        return f"pointing {self.accuracy:.3f} (chance {self.chance:.3f}, {self.count} words)"


def score_pointing(
    maps: Sequence[AttentionMaps], boxes: Sequence[Sequence[Box | None]], image_size: tuple[int, int]
) -> PointingScore:
    """Over many pictures of one ``image_size`` (height, width), each with its maps ``(words, rows, columns)``.

    A word without a box (None) is not counted. Where several places are the strongest alike, the share of
    them inside the box counts, so that a flat map does as well as chance, and not as its first cell.

    >>> weights = torch.tensor([[[0.7, 0.3], [0.0, 0.0]], [[0.0, 0.2], [0.2, 0.6]]])  # two words, 2 × 2 cells
    >>> score_pointing([weights], [[(0, 0, 48, 48), None]], image_size=(96, 96))
    PointingScore(accuracy=1.0, chance=0.25, count=1)
    """
    if len(maps) != len(boxes) or min(image_size) < 1:
        raise InputError(
            f"maps of {len(maps)} pictures, boxes of {len(boxes)} and size={image_size} came; expected as many of "
            "the one as of the other, and the pictures' height and width"
        )
    hits: list[float] = []
    by_chance: list[float] = []
    for number, (given, some) in enumerate(zip(maps, boxes, strict=True)):
        weights = _to_numpy(given)
        if weights.ndim != 3 or len(weights) != len(some) or 0 in weights.shape[1:]:
            raise InputError(
                f"picture {number}: maps of shape {weights.shape} came with {len(some)} boxes; expected "
                "(words, rows, columns), and a box or None for each word"
            )
        for word, box in zip(weights, some, strict=True):
            if box is None:
                continue
            if not np.isfinite(word).all():
                raise InputError(f"picture {number}: a map holds NaN or infinity; where does it point?")
            inside = _cells_inside(box, word.shape, image_size)
            hits.append(float(inside[word == word.max()].mean()))
            by_chance.append(float(inside.mean()))
    if not hits:
        raise InputError("no word has a box; expected one at least")
    return PointingScore(float(np.mean(hits)), float(np.mean(by_chance)), len(hits))


def _cells_inside(box: Box, grid: tuple[int, ...], image_size: tuple[int, int]) -> NDArray[np.bool_]:
    """Which cells of a grid over the picture have their centre in the box ``(rows, columns)``."""
    left, top, right, bottom = box
    y, x = ((np.arange(cells) + 0.5) * length / cells for cells, length in zip(grid, image_size, strict=True))
    return ((top <= y) & (y < bottom))[:, None] & ((left <= x) & (x < right))


def _to_numpy(maps: AttentionMaps) -> NDArray[Any]:
    if isinstance(maps, Tensor):
        return maps.detach().to("cpu", torch.float32).numpy()
    return np.asarray(maps)
