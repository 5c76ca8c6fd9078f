"""The input image of a model: its file, and the grid of patches that are the keys of a layer."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.look.viewer.medium import Medium

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerLayer

ImageRegion = tuple[float, float, float, float]  # left, top, right, bottom
WHOLE_IMAGE: ImageRegion = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True, eq=False)
class AttendedImage(Medium):
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
        left, top, right, bottom = self.region
        if not (np.isfinite(self.region).all() and left < min(right, 1) and top < min(bottom, 1)
                and right > 0 and bottom > 0):  # fmt: skip
            raise InputError(
                f"region={self.region} is invalid; expected left, top, right and bottom of what the grid covers, "
                "as fractions of the image: (0, 0, 1, 1) is the whole image"
            )
        self.media_type  # noqa: B018  raises an error if it is not an image

    @classmethod
    def from_pixels(
        cls,
        pixels: NDArray[np.uint8],
        grid: tuple[int, int],
        num_prefix_keys: int = 0,
        region: ImageRegion = WHOLE_IMAGE,
    ) -> AttendedImage:
        """Build it from RGB pixels ``(height, width, 3)``."""
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
        return cls(b"\x89PNG\r\n\x1a\n" + b"".join(chunks), grid, num_prefix_keys, region)

    @property
    def num_keys(self) -> int:
        """The number of keys of a layer over the image."""
        return self.num_prefix_keys + self.grid[0] * self.grid[1]

    @property
    def media_type(self) -> str:
        if self.data.startswith(b"\x89PNG"):
            return "image/png"
        if self.data.startswith(b"\xff\xd8\xff"):
            return "image/jpeg"
        if self.data[:4] == b"RIFF" and self.data[8:12] == b"WEBP":
            return "image/webp"
        raise InputError("the image is neither PNG nor JPEG nor WebP; expected the bytes of such a file")

    def matches(self, layer: ViewerLayer) -> bool:
        """Return whether the keys of a layer are the patches."""
        return layer.shape[1] == self.num_keys and "causal" not in layer.kind and layer.kind != "channel"

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

    def to_json(self) -> dict[str, Any]:
        """Return the image as JSON for the viewer."""
        return {
            "source": f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}",
            "grid": list(self.grid),
            "num_prefix_keys": self.num_prefix_keys,
            "region": list(self.region),
        }
