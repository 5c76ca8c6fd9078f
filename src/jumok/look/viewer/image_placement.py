"""Which keys of a layer are which patches of which image.

A model may see several images, and each of them as a whole, in tiles, or both. Its patches may be all keys of a layer,
or stand between the tokens of a text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError

ImageRegion = tuple[float, float, float, float]  # left, top, right, bottom
WHOLE_IMAGE: ImageRegion = (0.0, 0.0, 1.0, 1.0)
NO_KEY = -1  # a patch of a grid that the model did not keep


@dataclass(frozen=True, eq=False)
class ImageGrid:
    """Patches of one image: ``keys (rows, columns)`` are their positions among the keys of a layer, -1 for none.

    ``region`` is the region of the image that the grid covers: its left, top, right and bottom as fractions
    of the image's width and height. For a padded image, an edge is below 0 or above 1. ``name`` tells the grids of
    an image apart, as in "overview" and "tiles".
    """

    keys: NDArray[np.int64]
    region: ImageRegion = WHOLE_IMAGE
    image: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.keys.ndim != 2 or not self.keys.size or not (self.keys >= 0).any():
            raise InputError(
                f"keys of shape {self.keys.shape} are invalid; expected (rows, columns), the key of each patch"
            )
        check_region(self.region)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        rows, columns = self.keys.shape
        return rows, columns

    @property
    def cell_area(self) -> float:
        """The area of a patch, as a fraction of the image."""
        left, top, right, bottom = self.region
        return (right - left) * (bottom - top) / self.keys.size

    def get_weights(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the weights of the patches ``(…, rows, columns)`` of those of all keys ``(…, K)``."""
        return np.where(self.keys >= 0, weights[..., self.keys], np.float32(0))

    def to_json(self) -> dict[str, Any]:
        first = int(self.keys.flat[0])
        keys = self.keys.ravel()
        is_range = bool((keys == np.arange(first, first + keys.size)).all())
        return {
            "image": self.image,
            "name": self.name,
            "shape": list(self.shape),
            "region": list(self.region),
            "keys": first if is_range else keys.tolist(),  # the first of consecutive keys, or all of them
        }


@dataclass(frozen=True)
class ImageSpan:
    """Consecutive keys ``start`` to ``stop`` that belong to one image; they may include keys without a place in it."""

    image: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ImagePlacement:
    """The patches among the ``num_keys`` keys of a layer, which may be those of a text, too."""

    grids: tuple[ImageGrid, ...]
    spans: tuple[ImageSpan, ...]
    num_keys: int
    has_text: bool = False

    def __post_init__(self) -> None:
        if not self.grids:
            raise InputError("a placement without grids; expected at least one grid of patches")
        largest = max(int(grid.keys.max()) for grid in self.grids)
        if largest >= self.num_keys:
            raise InputError(
                f"a patch is key {largest}, and the layer has {self.num_keys} keys: 0 to {self.num_keys - 1}"
            )

    @property
    def num_patches(self) -> int:
        return sum(int((grid.keys >= 0).sum()) for grid in self.grids)

    def list_word_rows(self, num_queries: int, *, is_self: bool, is_causal: bool) -> list[tuple[int, int]]:
        """Return the spans of queries that are words: in self-attention, those that are not patches.

        In causal attention, queries before the first image cannot see it and are left out, and so are those
        between two parts of one image, which separate its tiles.
        """
        if not is_self:
            return [(0, num_queries)]
        start = min(span.start for span in self.spans) if is_causal else 0
        rows, image = [], None
        for span in sorted(self.spans, key=lambda item: item.start):
            if span.image != image or not self.has_text:
                rows.append((start, min(span.start, num_queries)))
            start, image = max(start, span.stop), span.image
        rows.append((start, num_queries))
        return [(first, stop) for first, stop in rows if first < stop]

    def renumber(self, starts: Sequence[int]) -> ImagePlacement:
        """Return the placement after keys were merged, of the first key of each merged one; patches stay apart."""
        merged = np.searchsorted(starts, np.arange(self.num_keys), side="right") - 1
        grids = tuple(replace(grid, keys=np.where(grid.keys >= 0, merged[grid.keys], NO_KEY)) for grid in self.grids)
        spans = tuple(
            ImageSpan(span.image, int(merged[span.start]), int(merged[span.stop - 1]) + 1) for span in self.spans
        )
        return ImagePlacement(grids, spans, len(starts), self.has_text)

    def to_json(self) -> dict[str, Any]:
        return {
            "grids": [grid.to_json() for grid in self.grids],
            "spans": [[span.image, span.start, span.stop] for span in self.spans],
            "has_text": self.has_text,
        }


def check_region(region: ImageRegion) -> None:
    """Raise an error if a region is empty or outside of the image."""
    left, top, right, bottom = region
    if not (np.isfinite(region).all() and left < min(right, 1) and top < min(bottom, 1) and right > 0 and bottom > 0):
        raise InputError(
            f"region={region} is invalid; expected left, top, right and bottom of what the grid covers, "
            "as fractions of the image: (0, 0, 1, 1) is the whole image"
        )


def find_spans(image_of_key: Iterable[int]) -> tuple[ImageSpan, ...]:
    """Return the runs of keys that belong to one image, of the image of each key (-1: none).

    >>> find_spans([-1, 0, 0, -1, 1])
    (ImageSpan(image=0, start=1, stop=3), ImageSpan(image=1, start=4, stop=5))
    """
    images = np.asarray([-1, *image_of_key, -1])
    edges = np.flatnonzero(np.diff(images))
    return tuple(
        ImageSpan(int(images[start + 1]), start, stop)
        for start, stop in itertools.pairwise(edges.tolist())
        if images[start + 1] >= 0
    )
