"""What a frozen encoder makes of pictures, on disk: no picture is decoded twice.

A cache is a folder, one for each encoder and size of its input::

    cache.json     what made it, and the shape of one picture's features, as in [49, 1280]
    features.f16   the features of one picture after the other, 2 bytes a number; or, in features.u8, whole
                   numbers of 1 byte: pictures that are decoded and resized, for an encoder that learns
    pictures.key   32 bytes a picture, in the same order: a digest of its file's name, place, size and time

Features are on the disk before their keys are: whatever ends a process, a key that is there has its features,
and what lies behind the last key is written over. A picture that has changed has another key, and is computed
anew. Several processes may fill one cache; they take turns::

    cache = Cache.open(Path("cache"), encoder="efficientnet_lite0", size=224)
    found = list(usable(cache.filled(captioned.find("flickr8k"), resized, encode), "skip", skipped))
    cache.features[cache.rows(one.picture for one in found[:32])]    # (32, 49, 1280)
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jumok.data.captioned import Captioned
from jumok.data.drawn import Drawn
from jumok.data.formats import Flaw
from jumok.data.pictures import LIMITS, Limits, PictureFile, Pixels
from jumok.errors import InputError
from jumok.files import written

__all__ = ["Cache", "Encode", "Prepare"]

FORMAT = 1
FACTS, KEYS, LOCK = "cache.json", "pictures.key", "lock"
FILES = {"float16": "features.f16", "uint8": "features.u8"}
KEY = 32  # bytes
AT_ONCE = 64  # pictures
THREADS = 8  # that decode; Pillow lets others work meanwhile

Kind = Literal["float16", "uint8"]
Picture = PictureFile | Drawn
Features = NDArray[np.float16] | NDArray[np.uint8]
Prepare = Callable[[Pixels], NDArray[Any]]  # a picture of any size → what the encoder takes
Encode = Callable[[list[NDArray[Any]]], NDArray[Any]]  # of several pictures → (pictures, *shape)


class Cache:
    """Features of pictures by one encoder, on disk."""

    def __init__(self, path: Path, made_by: dict[str, object], kind: Kind = "float16") -> None:
        self.path, self.kind = path, np.dtype(kind)
        self.file = path / FILES[kind]
        self.shape: tuple[int, ...] | None = None  # of one picture; None before there is one
        self._made_by = made_by
        self._count = 0  # rows on the disk that count
        self._row: dict[bytes, int] = {}
        self._features: Features | None = None
        self._update()

    @classmethod
    def open(cls, folder: Path, *, encoder: str, size: int, kind: Kind = "float16") -> Cache:
        """The cache of one encoder, in a folder for those of many.

        ``encoder`` is to name all that features depend on besides the picture and the size: the network, its
        weights, the layer, how pictures are cropped.
        """
        made_by: dict[str, object] = {"format": FORMAT, "encoder": encoder, "size": size}
        if kind != "float16":
            made_by["kind"] = kind
        digest = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]
        name = re.sub(r"[^\w.-]+", "-", encoder)[:40].strip("-.")
        return cls(folder / f"{name}-{size}-{digest}", made_by, kind)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, picture: Picture) -> bool:
        return _key(picture) in self._row

    @property
    def features(self) -> Features:
        """Of all pictures, through the memory map ``(rows, *shape)``; read-only."""
        if self.shape is None or not len(self):
            raise InputError(f"{self.path} holds no features yet; fill it first")
        if self._features is None or len(self._features) < len(self):
            shape = (len(self), *self.shape)
            # A plain array over the map: a slice of a memmap object takes far longer.
            self._features = np.asarray(np.memmap(self.file, self.kind, "r", shape=shape))
        return self._features

    def rows(self, pictures: Iterable[Picture]) -> NDArray[np.int64]:
        """Where the features of these pictures are among ``features``."""
        found = []
        for picture in pictures:
            row = self._row.get(_key(picture))
            if row is None:
                raise InputError(f"{self.path} has no features of {picture.where}; fill it first")
            found.append(row)
        return np.array(found, np.int64)

    def filled(
        self,
        found: Iterable[Captioned | Flaw],
        prepare: Prepare,
        encode: Encode,
        limits: Limits = LIMITS,
    ) -> Iterator[Captioned | Flaw]:
        """The same, one after the other, once their features are here; a flaw for what cannot be decoded.

        Pictures are decoded and prepared in threads, so that no more than a few whole ones are in memory.
        """
        found = iter(found)
        with ThreadPoolExecutor(THREADS) as pool:

            def read(one: Captioned) -> NDArray[Any] | Flaw:
                pixels = one.picture.decode(f"{one.where} {one.picture.name}", limits)
                return pixels if isinstance(pixels, Flaw) else prepare(pixels)

            while some := list(itertools.islice(found, AT_ONCE)):
                flaws = self._fill(
                    {one.picture: one for one in some if isinstance(one, Captioned)},
                    lambda ones: pool.map(read, ones),
                    encode,
                )
                yield from (one if isinstance(one, Flaw) else flaws.get(one.picture, one) for one in some)

    def _fill(
        self,
        some: Mapping[Picture, Captioned],
        read: Callable[[Iterable[Captioned]], Iterable[NDArray[Any] | Flaw]],
        encode: Encode,
    ) -> dict[Picture, Flaw]:
        """Compute what is not here; why some of it cannot be."""
        if all(picture in self for picture in some):
            return {}
        with self._turn():
            new = {picture: one for picture, one in some.items() if picture not in self}
            results = dict(zip(new, read(new.values()), strict=True))
            flaws = {picture: one for picture, one in results.items() if isinstance(one, Flaw)}
            prepared = {picture: one for picture, one in results.items() if not isinstance(one, Flaw)}
            if prepared:
                self._add(list(prepared), encode(list(prepared.values())))
        return flaws

    def _add(self, pictures: Sequence[Picture], features: NDArray[Any]) -> None:
        """Write features behind those that are here, and then their keys."""
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(features, self.kind)
        if len(rows) != len(pictures) or self.shape not in (None, rows.shape[1:]):
            raise InputError(
                f"the encoder made features of shape {rows.shape} of {len(pictures)} pictures; expected "
                f"({len(pictures)}, {', '.join(map(str, self.shape or ('…',)))})"
            )
        if not np.isfinite(rows).all():
            raise InputError(
                f"the encoder made NaN, infinity or numbers over 65504 of {pictures[0].where} or one of the "
                f"{len(pictures) - 1} behind it; features are kept with 16 bits"
            )
        if self.shape is None:
            self.shape = rows.shape[1:]
            with written(self.path / FACTS) as part:
                part.write_text(json.dumps({**self._made_by, "shape": self.shape}), encoding="utf-8")
        keys = b"".join(map(_key, pictures))
        _append(self.file, self._count * rows[0].nbytes, rows.tobytes())
        _append(self.path / KEYS, self._count * KEY, keys)
        self._learn(keys, len(pictures))

    def _update(self) -> None:
        """Learn what is on the disk: this process, or another one, may have written it."""
        try:
            told = json.loads((self.path / FACTS).read_text(encoding="utf-8"))
            self.shape = tuple(told["shape"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.path} is damaged: {error!r}; remove this folder, and fill it") from None
        each = self.kind.itemsize * math.prod(self.shape)
        with contextlib.suppress(FileNotFoundError), (self.path / KEYS).open("rb") as file:
            file.seek(self._count * KEY)
            keys = file.read()
            there = self.file.stat().st_size // each
            self._learn(keys, min(len(keys) // KEY, there - self._count))

    def _learn(self, keys: bytes, count: int) -> None:
        """That so many more rows are there, with these keys."""
        for number in range(count):
            self._row[keys[number * KEY : (number + 1) * KEY]] = self._count + number
        self._count += max(0, count)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other process adds to the cache, where files can be locked."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("w") as file:
            with contextlib.suppress(ImportError, OSError):  # Windows; a file system without locks
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            self._update()
            yield


def _key(picture: Picture) -> bytes:
    return hashlib.sha256(json.dumps(picture.identity).encode()).digest()


def _append(path: Path, end: int, data: bytes) -> None:
    """Write behind the part that counts, over what a process that was killed may have left there."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
