"""What a frozen encoder makes of pictures, on disk: no picture is decoded twice.

How it is kept, is told in ``kept.py``; there is a cache for each encoder and size of its input::

    cache = Cache.open(Path("cache"), encoder="efficientnet_lite0", size=224)
    found = list(usable(cache.filled(captioned.find("flickr8k"), resized, encode), "skip", skipped))
    cache.features[cache.rows(one.picture for one in found[:32])]    # (32, 49, 1280)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jumok.data.builtin.scenes import BuiltinScene
from jumok.data.caches.feature_cache import FORMAT_VERSION, FeatureCache, StorageType, cache_path
from jumok.data.images import IMAGE_LIMITS, ImageFile, ImageLimits, Pixels
from jumok.data.readers.captions import CaptionExample
from jumok.data.readers.formats import InvalidExample
from jumok.errors import InputError

__all__ = ["EncodeImages", "ImageFeatureCache", "PrepareImage"]

Features = NDArray[np.float16] | NDArray[np.uint8]
PrepareImage = Callable[[Pixels], NDArray[Any]]  # a picture of any size → what the encoder takes
EncodeImages = Callable[[list[NDArray[Any]]], NDArray[Any]]  # of several pictures → (pictures, *shape)
ImageSource = ImageFile | BuiltinScene


class ImageFeatureCache(FeatureCache[ImageSource]):
    """Features of pictures by one encoder, on disk."""

    source_name: ClassVar[str] = "pictures"

    @classmethod
    def open(
        cls, folder: Path, *, encoder: str, image_size: int, storage_type: StorageType = "float16"
    ) -> ImageFeatureCache:
        """The cache of one encoder, in a folder for those of many.

        ``encoder`` is to name all that features depend on besides the picture and the size: the network, its
        weights, the layer, how pictures are cropped.
        """
        made_by: dict[str, object] = {"format": FORMAT_VERSION, "encoder": encoder, "size": image_size}
        if storage_type != "float16":
            made_by["kind"] = storage_type
        return cls(cache_path(folder, f"{encoder[:40]}-{image_size}", made_by), made_by, storage_type)

    def row_indices(self, images: Iterable[ImageSource]) -> NDArray[np.int64]:
        """Where the features of these pictures are among ``features``."""
        return np.array([self.span(picture)[0] for picture in images], np.int64)

    def fill(
        self,
        examples: Iterable[CaptionExample | InvalidExample],
        prepare: PrepareImage,
        encode: EncodeImages,
        limits: ImageLimits = IMAGE_LIMITS,
    ) -> Iterator[CaptionExample | InvalidExample]:
        """The same, one after the other, once their features are here; a flaw for what cannot be decoded."""

        def read(one: CaptionExample) -> NDArray[Any] | InvalidExample:
            pixels = one.image.decode(f"{one.location} {one.image.name}", limits)
            return pixels if isinstance(pixels, InvalidExample) else prepare(pixels)

        def add(pictures: list[ImageSource], prepared: list[NDArray[Any]]) -> None:
            self._add_features(pictures, encode(prepared))

        return self._fill_examples(examples, lambda one: one.image, read, add)

    def _add_features(self, images: Sequence[ImageSource], features: NDArray[Any]) -> None:
        if len(features) != len(images) or self.shape not in (None, features.shape[1:]):
            raise InputError(
                f"the encoder made features of shape {features.shape} of {len(images)} pictures; expected "
                f"({len(images)}, {', '.join(map(str, self.shape or ('…',)))})"
            )
        self._append_rows(images, self._to_storage_type(features, images), [1] * len(images))
