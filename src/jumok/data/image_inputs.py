"""What a model is given of pictures, by their numbers: features that are known, or pixels, each time anew.

::

    frozen encoder      features from a cache (see ``features.py``); the same at every step
    one that learns     pixels, squashed to a square: the grid of places lies over the whole picture.
                        If asked for, another part of the picture at every epoch, and mirrored by chance
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from jumok.batches.images import ImageFeatureTable
from jumok.data.caches.image_features import Features, PrepareImage
from jumok.data.counter_rng import CounterRng
from jumok.data.images import Pixels
from jumok.data.readers.text_files import import_optional

__all__ = [
    "CachedFeatureInputs",
    "DeviceFeatureInputs",
    "ImageAugmentation",
    "ImageInputs",
    "PixelInputs",
    "build_square_resize",
]

IndexArray = NDArray[np.int64]
MIN_ASPECT = 3 / 4  # a part of a picture is at most so much narrower or wider than the whole
STREAM_AREA, STREAM_ASPECT, STREAM_X, STREAM_Y, STREAM_FLIP = range(5)  # what chance is for


@dataclass(frozen=True)
class ImageAugmentation:
    """How pictures are changed by chance, so that a model that learns from pixels sees more of them."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    min_crop_area: float = (
        1.0  # the least share of a picture's area that is shown, enlarged; 1: always all of it
    )
    horizontal_flip: bool = False  # mirror half of the pictures; not where captions tell left from right

    def __post_init__(self) -> None:
        if not 0 < self.min_crop_area <= 1:
            raise ValueError(f"crop={self.min_crop_area}: a share above 0 and up to 1 is expected")

    def __bool__(self) -> bool:
        return self.horizontal_flip or self.min_crop_area < 1

    def __call__(self, pixels: Tensor, indices: IndexArray, rng: CounterRng) -> Tensor:
        """Pixels ``(B, 3, S, S)``, bytes, as others; the numbers ``(B,)`` say what each draws."""
        area = self.min_crop_area + (1 - self.min_crop_area) * rng(indices, STREAM_AREA)
        ratio = (
            MIN_ASPECT ** (2 * rng(indices, STREAM_ASPECT) - 1)
            if self.min_crop_area < 1
            else np.ones(len(indices))
        )
        # Shares of the whole's width and height, and where the middle is, from −1 to 1.
        wide, high = (np.minimum(1, np.sqrt(part)) for part in (area * ratio, area / ratio))
        x, y = (
            (2 * rng(indices, what) - 1) * (1 - share) for what, share in ((STREAM_X, wide), (STREAM_Y, high))
        )
        sign = np.where(rng(indices, STREAM_FLIP) < 0.5, -1.0, 1.0) if self.horizontal_flip else 1.0
        zero = np.zeros(len(indices))
        frames = np.stack([[wide * sign, zero, x], [zero, high, y]]).transpose(2, 0, 1)
        grid = F.affine_grid(torch.from_numpy(frames).float(), list(pixels.shape), align_corners=False)
        seen = F.grid_sample(pixels.float(), grid, "bilinear", "border", align_corners=False)
        return seen.round_().to(torch.uint8)


class ImageInputs(Protocol):
    """What a batch is made with."""

    @property
    def grid(self) -> tuple[int, int]:
        """Of what is given: of places, or of pixels."""

    @property
    def feature_table(self) -> ImageFeatureTable | None:
        """Where places are found, if their numbers are given."""

    @property
    def varies_by_epoch(self) -> bool:
        """Whether it is something else at every epoch."""

    def __call__(self, image_indices: IndexArray, example_indices: IndexArray, rng: CounterRng) -> Tensor:
        """Of these pictures ``(B,)``, for these examples."""


@dataclass(frozen=True, eq=False)
class CachedFeatureInputs:
    """Features of pictures ``(N, P, F)``, on disk, those wanted copied into memory."""

    features: Features
    feature_rows: IndexArray  # of each picture
    grid: tuple[int, int]
    feature_table: ClassVar[None] = None
    varies_by_epoch: ClassVar[bool] = False

    def __call__(self, image_indices: IndexArray, example_indices: IndexArray, rng: CounterRng) -> Tensor:
        return torch.from_numpy(self.features[self.feature_rows[image_indices]])


@dataclass(frozen=True, eq=False)
class DeviceFeatureInputs:
    """The same, in the memory of the device: only numbers travel."""

    feature_table: ImageFeatureTable
    grid: tuple[int, int]
    varies_by_epoch: ClassVar[bool] = False

    @classmethod
    def from_cached(cls, cached: CachedFeatureInputs) -> DeviceFeatureInputs:
        """All of them, in the order of the pictures."""
        return cls(ImageFeatureTable(torch.from_numpy(cached.features[cached.feature_rows])), cached.grid)

    def __call__(self, image_indices: IndexArray, example_indices: IndexArray, rng: CounterRng) -> Tensor:
        return torch.from_numpy(image_indices)


@dataclass(frozen=True, eq=False)
class PixelInputs:
    """Pixels of pictures ``(N, 3, S, S)``, on disk, changed by chance if that is asked for."""

    pixels: Features
    pixel_rows: IndexArray
    augment: ImageAugmentation = ImageAugmentation()
    feature_table: ClassVar[None] = None

    @property
    def grid(self) -> tuple[int, int]:
        height, width = self.pixels.shape[2:]
        return height, width

    @property
    def varies_by_epoch(self) -> bool:
        return bool(self.augment)

    def __call__(self, image_indices: IndexArray, example_indices: IndexArray, rng: CounterRng) -> Tensor:
        pixels = torch.from_numpy(self.pixels[self.pixel_rows[image_indices]])
        return self.augment(pixels, example_indices, rng) if self.augment else pixels


def build_square_resize(size: int) -> PrepareImage:
    """What makes a square ``(3, size, size)`` of a picture of any shape."""

    def prepare(pixels: Pixels) -> NDArray[np.uint8]:
        if pixels.shape[:2] != (size, size):
            pillow = import_optional("PIL.Image", "images")
            image = pillow.fromarray(pixels).resize((size, size), pillow.Resampling.BICUBIC)
            pixels = np.asarray(image)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    return prepare
