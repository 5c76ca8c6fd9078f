"""Inputs of captioning models, by image index: cached features or pixels.

::

    frozen encoder       cached features (see ``caches/image_features.py``), the same at every step
    trainable encoder    pixels, resized to a square, so that the grid covers the whole image; optionally
                         with a random crop and a horizontal flip, different in every epoch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from jumok.batches.images import ImageFeatureTable
from jumok.config import Config
from jumok.data.caches.image_features import Features, PrepareImage
from jumok.data.counter_rng import CounterRng
from jumok.data.images import Pixels
from jumok.data.readers.text_files import import_optional

IndexArray = NDArray[np.int64]
MIN_ASPECT = 3 / 4  # limit of the aspect ratio of a crop relative to the image
STREAM_AREA, STREAM_ASPECT, STREAM_X, STREAM_Y, STREAM_FLIP = range(5)  # streams of random numbers


@dataclass(frozen=True)
class ImageAugmentation(Config):
    """Random crops and horizontal flips of images."""

    min_crop_area: float = 1.0  # smallest share of the area that a crop keeps; 1: no cropping
    horizontal_flip: bool = False  # flip half of the images; not if captions mention left and right

    def __post_init__(self) -> None:
        if not 0 < self.min_crop_area <= 1:
            raise ValueError(f"min_crop_area={self.min_crop_area}: expected a share above 0 and up to 1")

    def __bool__(self) -> bool:
        return self.horizontal_flip or self.min_crop_area < 1

    def __call__(self, pixels: Tensor, indices: IndexArray, rng: CounterRng) -> Tensor:
        """Augment pixels ``(B, 3, S, S)``. The indices ``(B,)`` determine the random numbers."""
        area = self.min_crop_area + (1 - self.min_crop_area) * rng(indices, STREAM_AREA)
        ratio = MIN_ASPECT ** (2 * rng(indices, STREAM_ASPECT) - 1) if self.min_crop_area < 1 else np.ones(len(indices))
        # The size relative to the image, and the centre from −1 to 1.
        width, height = (np.minimum(1, np.sqrt(part)) for part in (area * ratio, area / ratio))
        x, y = ((2 * rng(indices, stream) - 1) * (1 - size) for stream, size in ((STREAM_X, width), (STREAM_Y, height)))
        sign = np.where(rng(indices, STREAM_FLIP) < 0.5, -1.0, 1.0) if self.horizontal_flip else 1.0
        zero = np.zeros(len(indices))
        transforms = np.stack([[width * sign, zero, x], [zero, height, y]]).transpose(2, 0, 1)
        grid = F.affine_grid(torch.from_numpy(transforms).float(), list(pixels.shape), align_corners=False)
        augmented = F.grid_sample(pixels.float(), grid, "bilinear", "border", align_corners=False)
        return augmented.round_().to(torch.uint8)


class ImageInputs(Protocol):
    """The image inputs of a batch."""

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of the features, or the height and width of the pixels."""

    @property
    def feature_table(self) -> ImageFeatureTable | None:
        """The table that inputs are indices of; None if inputs are features or pixels."""

    @property
    def varies_by_epoch(self) -> bool:
        """Whether inputs differ between epochs."""

    def __call__(self, image_indices: IndexArray, example_indices: IndexArray, rng: CounterRng) -> Tensor:
        """The inputs of these images ``(B,)``, for these examples ``(B,)``."""


@dataclass(frozen=True, eq=False)
class CachedFeatureInputs:
    """Features ``(N, P, F)`` of images on disk. Those of a batch are copied into memory."""

    features: Features
    feature_rows: IndexArray  # row of each image
    grid: tuple[int, int]
    feature_table: ClassVar[None] = None
    varies_by_epoch: ClassVar[bool] = False

    def __call__(self, image_indices: IndexArray, example_indices: IndexArray, rng: CounterRng) -> Tensor:
        return torch.from_numpy(self.features[self.feature_rows[image_indices]])


@dataclass(frozen=True, eq=False)
class DeviceFeatureInputs:
    """Features in the memory of the device. A batch only contains indices."""

    feature_table: ImageFeatureTable
    grid: tuple[int, int]
    varies_by_epoch: ClassVar[bool] = False

    @classmethod
    def from_cached(cls, cached: CachedFeatureInputs) -> DeviceFeatureInputs:
        """Load all features, in the order of the images."""
        return cls(ImageFeatureTable(torch.from_numpy(cached.features[cached.feature_rows])), cached.grid)

    def __call__(self, image_indices: IndexArray, example_indices: IndexArray, rng: CounterRng) -> Tensor:
        return torch.from_numpy(image_indices)


@dataclass(frozen=True, eq=False)
class PixelInputs:
    """Pixels ``(N, 3, S, S)`` of images on disk, optionally augmented."""

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
    """A function that resizes an image of any shape to a square ``(3, size, size)``."""

    def prepare(pixels: Pixels) -> NDArray[np.uint8]:
        if pixels.shape[:2] != (size, size):
            pillow = import_optional("PIL.Image", "images")
            image = pillow.fromarray(pixels).resize((size, size), pillow.Resampling.BICUBIC)
            pixels = np.asarray(image)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    return prepare
