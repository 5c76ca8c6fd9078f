"""Input images of a model, and which keys of its layers are their patches.

``AttendedImage`` is one image whose patches are all keys of a layer, perhaps after some others. ``AttendedImages``
are any number of them, whose patches are placed layer by layer.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.look.viewer.image_placement import (
    WHOLE_IMAGE,
    ImageGrid,
    ImagePlacement,
    ImageRegion,
    ImageSpan,
    check_region,
)
from jumok.look.viewer.medium import Medium
from jumok.look.viewer.token_marks import is_special_token

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerLayer

MAX_WORDS = 400  # that the viewer shows beside the images


class ImageMedium(Medium):
    """Images, and for each layer that attends to them which of its keys are their patches."""

    @property
    @abstractmethod
    def files(self) -> tuple[bytes, ...]:
        """The PNG, JPEG or WebP files of the images."""

    @abstractmethod
    def find_placement(self, layer: ViewerLayer) -> ImagePlacement | None:
        """Return which keys of a layer are patches; None if it does not attend to the images."""

    def matches(self, layer: ViewerLayer) -> bool:
        """Return whether keys of a layer are patches."""
        return self.find_placement(layer) is not None

    def has_patch_queries(self, layer: ViewerLayer) -> bool:
        """Return whether the queries of a layer that it matches are its keys, and so include the patches."""
        return layer.shape[0] == layer.shape[1] and layer.kind != "cross"

    def list_word_rows(self, layer: ViewerLayer) -> list[tuple[int, int]]:
        """Return the spans of queries of a layer whose weights are shown on the images, at most MAX_WORDS in all.

        Of too many words, those are kept that the model generated, and those before them.
        """
        placement = self.find_placement(layer)
        if placement is None:
            return []
        rows = placement.list_word_rows(
            layer.shape[0], is_self=self.has_patch_queries(layer), is_causal="causal" in layer.kind
        )
        is_generated = layer.first_generated[0] is not None
        spans, remaining = [], MAX_WORDS
        for start, stop in reversed(rows) if is_generated else rows:
            length = min(stop - start, remaining)
            remaining -= length
            if length:
                spans.append((stop - length, stop) if is_generated else (start, start + length))
        return sorted(spans)

    def list_figure_rows(self, layer: ViewerLayer) -> list[int]:
        """Return the queries that a figure shows: the words that were generated, or all; without special tokens."""
        placement = self.find_placement(layer)
        if placement is None or (self.has_patch_queries(layer) and not placement.has_text):
            return []
        rows = [row for start, stop in self.list_word_rows(layer) for row in range(start, stop)]
        if not placement.has_text:
            return rows
        first = layer.first_generated[0]
        texts = layer.row_texts
        words = [row for row in rows if not is_special_token(texts[row])]
        return [row for row in words if first is not None and row >= first] or words or rows

    def to_json(self) -> dict[str, Any]:
        """Return the images as JSON for the viewer."""
        return {
            "files": [f"data:{get_media_type(data)};base64,{base64.b64encode(data).decode()}" for data in self.files]
        }

    def layer_to_json(self, layer: ViewerLayer) -> dict[str, Any]:
        """Return how a layer that it matches attends to the images, as JSON for the viewer."""
        placement = self.find_placement(layer)
        assert placement is not None
        return {
            **placement.to_json(),
            "word_rows": self.list_word_rows(layer),
            "has_patch_queries": self.has_patch_queries(layer),
        }


class ImageLayerTable:
    """How layers attend to the images, as JSON for the viewer. What layers share is stored once."""

    def __init__(self, image: ImageMedium | None) -> None:
        self.image = image
        self.entries: list[dict[str, Any]] = []
        self._indices: dict[str, int] = {}

    def store(self, layer: ViewerLayer) -> int | None:
        """Return the index of the entry of a layer; None if it does not attend to the images."""
        if self.image is None or not self.image.matches(layer):
            return None
        entry = self.image.layer_to_json(layer)
        index = self._indices.setdefault(json.dumps(entry), len(self.entries))
        if index == len(self.entries):
            self.entries.append(entry)
        return index


@dataclass(frozen=True, eq=False)
class AttendedImage(ImageMedium):
    """The image whose patches are the keys: a ``grid`` (rows, columns), after ``num_prefix_keys`` other keys.

    ``region`` is the region of the image that the grid covers: its left, top, right and bottom as fractions
    of the image's width and height. For a model that saw only the middle third it is ``(1/3, 0, 2/3, 1)``;
    for a padded image, an edge is below 0 or above 1.
    """

    data: bytes  # a PNG, JPEG or WebP file
    grid: tuple[int, int]
    num_prefix_keys: int = 0
    region: ImageRegion = WHOLE_IMAGE

    def __post_init__(self) -> None:
        if min(self.grid) < 1 or self.num_prefix_keys < 0:
            raise InputError(
                f"grid={self.grid}, num_prefix_keys={self.num_prefix_keys} is invalid; expected the grid of "
                "patches and the number of keys before it, as in (14, 14) and 1"
            )
        check_region(self.region)
        get_media_type(self.data)

    @classmethod
    def from_pixels(
        cls,
        pixels: NDArray[np.uint8],
        grid: tuple[int, int],
        num_prefix_keys: int = 0,
        region: ImageRegion = WHOLE_IMAGE,
    ) -> AttendedImage:
        """Build it from RGB pixels ``(height, width, 3)``."""
        return cls(encode_png(pixels), grid, num_prefix_keys, region)

    @property
    def num_keys(self) -> int:
        """The number of keys of a layer over the image."""
        return self.num_prefix_keys + self.grid[0] * self.grid[1]

    @property
    def files(self) -> tuple[bytes, ...]:
        return (self.data,)

    def find_placement(self, layer: ViewerLayer) -> ImagePlacement | None:
        if layer.shape[1] != self.num_keys or "causal" in layer.kind or layer.kind == "channel":
            return None
        return self.placement

    @property
    def placement(self) -> ImagePlacement:
        """The patches among the keys of a layer over the image."""
        keys = np.arange(self.num_prefix_keys, self.num_keys).reshape(self.grid)
        span = ImageSpan(0, self.num_prefix_keys, self.num_keys)
        return ImagePlacement((ImageGrid(keys, self.region),), (span,), self.num_keys)

    def has_patch_queries(self, layer: ViewerLayer) -> bool:
        return layer.shape[0] == layer.shape[1]

    def describe_mismatch(self, layers: Sequence[ViewerLayer]) -> str:
        """Return why the keys of none of these layers are the patches."""
        rows, cols = self.grid
        prefix = f" after {self.num_prefix_keys} other keys" * (self.num_prefix_keys > 0)
        sizes = ", ".join(f"{layer.name} {layer.shape[1]} ({layer.kind})" for layer in layers[:8])
        reason = (
            f"an image of {rows} × {cols} patches{prefix}, {self.num_keys} keys in all, and the layers have these "
            f"keys: {sizes}; expected a layer with {self.num_keys} that is neither causal nor over channels"
        )
        extra = next((n for layer in layers if (n := layer.shape[1] - rows * cols) in range(1, 9)), None)
        if extra in (None, self.num_prefix_keys):
            return reason
        return (
            f"{reason}. If {extra} of the keys come before the patches, as a class token does, pass "
            f"num_prefix_keys={extra}"
        )


@dataclass(frozen=True, eq=False)
class AttendedImages(ImageMedium):
    """Images, and the placement of their patches in each layer that attends to them, by its name.

    The patches may lie anywhere between other keys, as in a decoder that reads images and text.
    """

    image_files: tuple[bytes, ...]
    placements: Mapping[str, ImagePlacement]

    def __post_init__(self) -> None:
        for data in self.image_files:
            get_media_type(data)
        for name, placement in self.placements.items():
            last = max(grid.image for grid in placement.grids)
            if last >= len(self.image_files):
                raise InputError(f"{name} has patches of image {last}, and there are {len(self.image_files)} images")

    @property
    def files(self) -> tuple[bytes, ...]:
        return self.image_files

    def find_placement(self, layer: ViewerLayer) -> ImagePlacement | None:
        placement = self.placements.get(layer.name)
        return placement if placement is not None and placement.num_keys == layer.shape[1] else None

    def get_positions(self, layer: ViewerLayer) -> Hashable:
        """Return where the patches of a layer are."""
        placement = self.placements.get(layer.name)
        grids = () if placement is None else placement.grids
        return tuple((grid.image, grid.region, grid.name, grid.keys.tobytes()) for grid in grids)

    def add_layers(self, models: Mapping[str, str]) -> AttendedImages:
        """Return the images with further layers, with the placements of others."""
        added = {name: self.placements[model] for name, model in models.items() if model in self.placements}
        return replace(self, placements={**self.placements, **added})

    def describe_mismatch(self, layers: Sequence[ViewerLayer]) -> str:
        """Return why the patches are keys of none of these layers."""
        sizes = ", ".join(f"{layer.name} {layer.shape[1]}" for layer in layers[:8])
        expected = ", ".join(f"{name} {placement.num_keys}" for name, placement in list(self.placements.items())[:8])
        return f"the layers have these keys: {sizes}; patches are placed in {expected or 'no layer'}"


def get_media_type(data: bytes) -> str:
    """Return the media type of an image file that a browser shows."""
    if data.startswith(b"\x89PNG"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    raise InputError("the image is neither PNG nor JPEG nor WebP; expected the bytes of such a file")


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode RGB pixels ``(height, width, 3)`` as a PNG file."""
    pixels = np.ascontiguousarray(pixels)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InputError(
            f"pixels of {pixels.dtype} and shape {pixels.shape} are invalid; expected uint8 (height, width, 3)"
        )
    height, width, _ = pixels.shape
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # filter type 0 before each line
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
              for name, data in parts)  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
