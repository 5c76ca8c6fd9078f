"""Disk cache of image features of a frozen encoder.

There is one cache for each encoder and input size; for its format see ``feature_cache.py``::

    cache = ImageFeatureCache.open(Path("cache"), encoder="efficientnet_lite0", image_size=224)
    filled = cache.fill(read_caption_examples("flickr8k"), resize, encode)
    examples = list(skip_invalid(filled, "skip", skipped))
    cache.features[cache.row_indices(example.image for example in examples[:32])]    # (32, 49, 1280)
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
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.errors import InputError

Features = NDArray[np.float16] | NDArray[np.uint8]
PrepareImage = Callable[[Pixels], NDArray[Any]]  # an image of any size → input of the encoder
EncodeImages = Callable[[list[NDArray[Any]]], NDArray[Any]]  # inputs → (images, *shape)
ImageSource = ImageFile | BuiltinScene


class ImageFeatureCache(FeatureCache[ImageSource]):
    """Image features of one encoder on disk."""

    source_name: ClassVar[str] = "pictures"

    @classmethod
    def open(
        cls, folder: Path, *, encoder: str, image_size: int, storage_type: StorageType = "float16"
    ) -> ImageFeatureCache:
        """Open the cache of one encoder, in a folder of caches.

        ``encoder`` must identify everything that features depend on besides the image and its size: the
        network, its weights, the layer, and how images are cropped.
        """
        provenance: dict[str, object] = {"format": FORMAT_VERSION, "encoder": encoder, "size": image_size}
        if storage_type != "float16":
            provenance["kind"] = storage_type
        return cls(cache_path(folder, f"{encoder[:40]}-{image_size}", provenance), provenance, storage_type)

    def row_indices(self, images: Iterable[ImageSource]) -> NDArray[np.int64]:
        """The rows of ``features`` that belong to these images."""
        return np.array([self.span(image)[0] for image in images], np.int64)

    def fill(
        self,
        examples: Iterable[CaptionExample | InvalidExample],
        prepare: PrepareImage,
        encode: EncodeImages,
        limits: ImageLimits = IMAGE_LIMITS,
    ) -> Iterator[CaptionExample | InvalidExample]:
        """Yield the same examples once their features are cached, and invalid ones if decoding fails."""

        def read(example: CaptionExample) -> NDArray[Any] | InvalidExample:
            pixels = example.image.decode(f"{example.location} {example.image.name}", limits)
            return pixels if isinstance(pixels, InvalidExample) else prepare(pixels)

        def add(images: list[ImageSource], prepared: list[NDArray[Any]]) -> None:
            self._add_features(images, encode(prepared))

        return self._fill_examples(examples, lambda example: example.image, read, add)

    def _add_features(self, images: Sequence[ImageSource], features: NDArray[Any]) -> None:
        if len(features) != len(images) or self.shape not in (None, features.shape[1:]):
            raise InputError(
                f"the encoder returned features of shape {features.shape} for {len(images)} images; expected "
                f"({len(images)}, {', '.join(map(str, self.shape or ('…',)))})"
            )
        self._append_rows(images, self._to_storage_type(features, images), [1] * len(images))
