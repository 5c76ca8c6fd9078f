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

from jumok.data.captioned import Captioned
from jumok.data.drawn import Drawn
from jumok.data.formats import Flaw
from jumok.data.kept import FORMAT, Kept, Kind, named
from jumok.data.pictures import LIMITS, Limits, PictureFile, Pixels
from jumok.errors import InputError

__all__ = ["Cache", "Encode", "Prepare"]

Features = NDArray[np.float16] | NDArray[np.uint8]
Prepare = Callable[[Pixels], NDArray[Any]]  # a picture of any size → what the encoder takes
Encode = Callable[[list[NDArray[Any]]], NDArray[Any]]  # of several pictures → (pictures, *shape)
Picture = PictureFile | Drawn


class Cache(Kept[Picture]):
    """Features of pictures by one encoder, on disk."""

    whose: ClassVar[str] = "pictures"

    @classmethod
    def open(cls, folder: Path, *, encoder: str, size: int, kind: Kind = "float16") -> Cache:
        """The cache of one encoder, in a folder for those of many.

        ``encoder`` is to name all that features depend on besides the picture and the size: the network, its
        weights, the layer, how pictures are cropped.
        """
        made_by: dict[str, object] = {"format": FORMAT, "encoder": encoder, "size": size}
        if kind != "float16":
            made_by["kind"] = kind
        return cls(named(folder, f"{encoder[:40]}-{size}", made_by), made_by, kind)

    def rows(self, pictures: Iterable[Picture]) -> NDArray[np.int64]:
        """Where the features of these pictures are among ``features``."""
        return np.array([self.span(picture)[0] for picture in pictures], np.int64)

    def filled(
        self,
        found: Iterable[Captioned | Flaw],
        prepare: Prepare,
        encode: Encode,
        limits: Limits = LIMITS,
    ) -> Iterator[Captioned | Flaw]:
        """The same, one after the other, once their features are here; a flaw for what cannot be decoded."""

        def read(one: Captioned) -> NDArray[Any] | Flaw:
            pixels = one.picture.decode(f"{one.where} {one.picture.name}", limits)
            return pixels if isinstance(pixels, Flaw) else prepare(pixels)

        def add(pictures: list[Picture], prepared: list[NDArray[Any]]) -> None:
            self._add(pictures, encode(prepared))

        return self._filled(found, lambda one: one.picture, read, add)

    def _add(self, pictures: Sequence[Picture], features: NDArray[Any]) -> None:
        if len(features) != len(pictures) or self.shape not in (None, features.shape[1:]):
            raise InputError(
                f"the encoder made features of shape {features.shape} of {len(pictures)} pictures; expected "
                f"({len(pictures)}, {', '.join(map(str, self.shape or ('…',)))})"
            )
        self._write(pictures, self._rounded(features, pictures), [1] * len(pictures))
