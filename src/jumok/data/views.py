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

from jumok.data.features import Features, Prepare
from jumok.data.files import needed
from jumok.data.masking import Chance
from jumok.data.pictures import Pixels
from jumok.pictures import Known

__all__ = ["Augment", "Given", "KnownPlaces", "Places", "Squares", "squashed"]

Numbers = NDArray[np.int64]
NARROW = 3 / 4  # a part of a picture is at most so much narrower or wider than the whole
AREA, SHAPE, ACROSS, DOWN, MIRROR = range(5)  # what chance is for


@dataclass(frozen=True)
class Augment:
    """How pictures are changed by chance, so that a model that learns from pixels sees more of them."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    crop: float = 1.0  # the least share of a picture's area that is shown, enlarged; 1: always all of it
    flip: bool = False  # mirror half of the pictures; not where captions tell left from right

    def __post_init__(self) -> None:
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop={self.crop}: a share above 0 and up to 1 is expected")

    def __bool__(self) -> bool:
        return self.flip or self.crop < 1

    def __call__(self, pixels: Tensor, numbers: Numbers, chance: Chance) -> Tensor:
        """Pixels ``(B, 3, S, S)``, bytes, as others; the numbers ``(B,)`` say what each draws."""
        area = self.crop + (1 - self.crop) * chance(numbers, AREA)
        ratio = NARROW ** (2 * chance(numbers, SHAPE) - 1) if self.crop < 1 else np.ones(len(numbers))
        # Shares of the whole's width and height, and where the middle is, from −1 to 1.
        wide, high = (np.minimum(1, np.sqrt(part)) for part in (area * ratio, area / ratio))
        x, y = (
            (2 * chance(numbers, what) - 1) * (1 - share) for what, share in ((ACROSS, wide), (DOWN, high))
        )
        sign = np.where(chance(numbers, MIRROR) < 0.5, -1.0, 1.0) if self.flip else 1.0
        zero = np.zeros(len(numbers))
        frames = np.stack([[wide * sign, zero, x], [zero, high, y]]).transpose(2, 0, 1)
        grid = F.affine_grid(torch.from_numpy(frames).float(), list(pixels.shape), align_corners=False)
        seen = F.grid_sample(pixels.float(), grid, "bilinear", "border", align_corners=False)
        return seen.round_().to(torch.uint8)


class Given(Protocol):
    """What a batch is made with."""

    @property
    def grid(self) -> tuple[int, int]:
        """Of what is given: of places, or of pixels."""

    @property
    def known(self) -> Known | None:
        """Where places are found, if their numbers are given."""

    @property
    def anew(self) -> bool:
        """Whether it is something else at every epoch."""

    def __call__(self, pictures: Numbers, examples: Numbers, chance: Chance) -> Tensor:
        """Of these pictures ``(B,)``, for these examples."""


@dataclass(frozen=True, eq=False)
class Places:
    """Features of pictures ``(N, P, F)``, on disk, those wanted copied into memory."""

    features: Features
    rows: Numbers  # of each picture
    grid: tuple[int, int]
    known: ClassVar[None] = None
    anew: ClassVar[bool] = False

    def __call__(self, pictures: Numbers, examples: Numbers, chance: Chance) -> Tensor:
        return torch.from_numpy(self.features[self.rows[pictures]])


@dataclass(frozen=True, eq=False)
class KnownPlaces:
    """The same, in the memory of the device: only numbers travel."""

    known: Known
    grid: tuple[int, int]
    anew: ClassVar[bool] = False

    @classmethod
    def of(cls, places: Places) -> KnownPlaces:
        """All of them, in the order of the pictures."""
        return cls(Known(torch.from_numpy(places.features[places.rows])), places.grid)

    def __call__(self, pictures: Numbers, examples: Numbers, chance: Chance) -> Tensor:
        return torch.from_numpy(pictures)


@dataclass(frozen=True, eq=False)
class Squares:
    """Pixels of pictures ``(N, 3, S, S)``, on disk, changed by chance if that is asked for."""

    squares: Features
    rows: Numbers
    augment: Augment = Augment()
    known: ClassVar[None] = None

    @property
    def grid(self) -> tuple[int, int]:
        height, width = self.squares.shape[2:]
        return height, width

    @property
    def anew(self) -> bool:
        return bool(self.augment)

    def __call__(self, pictures: Numbers, examples: Numbers, chance: Chance) -> Tensor:
        pixels = torch.from_numpy(self.squares[self.rows[pictures]])
        return self.augment(pixels, examples, chance) if self.augment else pixels


def squashed(size: int) -> Prepare:
    """What makes a square ``(3, size, size)`` of a picture of any shape."""

    def prepare(pixels: Pixels) -> NDArray[np.uint8]:
        if pixels.shape[:2] != (size, size):
            pillow = needed("PIL.Image", "images")
            image = pillow.fromarray(pixels).resize((size, size), pillow.Resampling.BICUBIC)
            pixels = np.asarray(image)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    return prepare
