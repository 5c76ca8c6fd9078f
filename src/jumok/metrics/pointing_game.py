"""The pointing game (Zhang et al. 2016): does attention point at the object that a word refers to?

The attention map of a word points at the centre of its strongest grid cell. It is a hit if that point lies
inside the box of the word.
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

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom are exclusive
AttentionMaps: TypeAlias = Tensor | NDArray[Any]


@dataclass(frozen=True)
class PointingScore:
    """The share of hits, and the expected share for a random cell."""

    accuracy: float
    chance: float
    count: int  # words with a box

    def __str__(self) -> str:
        return f"pointing {self.accuracy:.3f} (chance {self.chance:.3f}, {self.count} words)"


def score_pointing(
    maps: Sequence[AttentionMaps], boxes: Sequence[Sequence[Box | None]], image_size: tuple[int, int]
) -> PointingScore:
    """Score the maps ``(words, rows, columns)`` of images that all have ``image_size`` (height, width).

    Words without a box (None) are not counted. If several cells have the largest weight, the share of them
    inside the box counts, so that a uniform map scores like a random cell.

    >>> weights = torch.tensor([[[0.7, 0.3], [0.0, 0.0]], [[0.0, 0.2], [0.2, 0.6]]])  # two words, 2 × 2 cells
    >>> score_pointing([weights], [[(0, 0, 48, 48), None]], image_size=(96, 96))
    PointingScore(accuracy=1.0, chance=0.25, count=1)
    """
    if len(maps) != len(boxes) or min(image_size) < 1:
        raise InputError(
            f"there are maps of {len(maps)} images, boxes of {len(boxes)}, and image_size={image_size}; "
            "expected the same number of both, and the height and the width of the images"
        )
    hits: list[float] = []
    random_hits: list[float] = []
    for image, (image_maps, image_boxes) in enumerate(zip(maps, boxes, strict=True)):
        weights = _to_numpy(image_maps)
        if weights.ndim != 3 or len(weights) != len(image_boxes) or 0 in weights.shape[1:]:
            raise InputError(
                f"image {image} has maps of shape {weights.shape} and {len(image_boxes)} boxes; expected "
                "(words, rows, columns), and a box or None for each word"
            )
        for word_map, box in zip(weights, image_boxes, strict=True):
            if box is None:
                continue
            if not np.isfinite(word_map).all():
                raise InputError(f"image {image}: a map contains NaN or infinity; expected finite weights")
            inside = _cells_inside(box, word_map.shape, image_size)
            hits.append(float(inside[word_map == word_map.max()].mean()))
            random_hits.append(float(inside.mean()))
    if not hits:
        raise InputError("no word has a box; expected at least one")
    return PointingScore(float(np.mean(hits)), float(np.mean(random_hits)), len(hits))


def _cells_inside(box: Box, grid: tuple[int, ...], image_size: tuple[int, int]) -> NDArray[np.bool_]:
    """Which cells of a grid over the image have their centre inside the box ``(rows, columns)``."""
    left, top, right, bottom = box
    y, x = ((np.arange(cells) + 0.5) * length / cells for cells, length in zip(grid, image_size, strict=True))
    return ((top <= y) & (y < bottom))[:, None] & ((left <= x) & (x < right))


def _to_numpy(maps: AttentionMaps) -> NDArray[Any]:
    if isinstance(maps, Tensor):
        return maps.detach().to("cpu", torch.float32).numpy()
    return np.asarray(maps)
