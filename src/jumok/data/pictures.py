"""Pictures as they are found, in a folder or inside a .tar, and from their bytes to colours.

A picture is PNG, JPEG or WebP, and comes as RGB, the way up that its EXIF says, on white where it can be seen
through. What cannot be used is a *flaw*: missing, damaged, none of these formats, or larger than the limits,
which are looked at before anything is decoded: a small file may hold a picture that fills all memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.files import needed
from jumok.data.formats import Flaw
from jumok.errors import InputError

__all__ = ["LIMITS", "Archive", "Folder", "Limits", "PictureFile", "Pixels", "decode"]

Pixels = NDArray[np.uint8]  # (height, width, 3)
FORMATS = ("PNG", "JPEG", "WEBP")
BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")  # of their files


@dataclass(frozen=True)
class Limits:
    """The most that a picture may have."""

    size: int = 64 << 20  # bytes of its file
    pixels: int = 50_000_000


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture that is there, in a file or inside a .tar, and has not been read yet."""

    path: Path  # of the file, or of the .tar
    name: str  # in the .tar or the folder
    begin: int  # its first byte in that file
    size: int  # bytes
    time: int  # when the file or the .tar was changed, in nanoseconds

    @classmethod
    def of(cls, path: Path) -> PictureFile:
        """A file of its own."""
        found = Folder(path.parent).find(path.name, str(path))
        if isinstance(found, Flaw):
            raise InputError(str(found))
        return found

    @property
    def where(self) -> str:
        return f"{self.path}:{self.name}" if self.begin else str(self.path)

    @property
    def identity(self) -> list[object]:
        """Other values for every other picture, and for this one once it has changed."""
        return [os.path.abspath(self.path), self.name, self.begin, self.size, self.time]

    def read(self) -> bytes:
        """Its bytes."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.begin)
                return file.read(self.size)
        except OSError as error:
            raise InputError(f"{self.where} cannot be read: {error.strerror or error}") from None

    def decode(self, where: str | None = None, limits: Limits = LIMITS) -> Pixels | Flaw:
        """Its colours ``(height, width, 3)``, or why there are none."""
        where = where or self.where
        if self.size > limits.size:
            return _too_large(where, self.size, limits)
        try:
            data = self.read()
        except InputError as error:
            return Flaw(where, "a picture that cannot be read", str(error))
        return decode(data, where, limits)

    def pixels(self, limits: Limits = LIMITS) -> Pixels:
        """Its colours ``(height, width, 3)``; an error if there are none."""
        found = self.decode(limits=limits)
        if isinstance(found, Flaw):
            raise InputError(str(found))
        return found


@dataclass(frozen=True)
class Folder:
    """Pictures in a folder, by their path in it."""

    path: Path

    def find(self, name: str, where: str) -> PictureFile | Flaw:
        """The picture of this name; ``where`` someone speaks of it, is told of a flaw."""
        path = self.path / name
        try:
            facts = path.stat()
        except (OSError, ValueError):
            return _missing(name, where, self.path)
        if not stat.S_ISREG(facts.st_mode):
            return _missing(name, where, self.path)
        return PictureFile(path, name, 0, facts.st_size, facts.st_mtime_ns)


class Archive:
    """Pictures in a .tar, which is not unpacked: where each one begins is found out once.

    A picture is found by its whole name (``images/dog.jpg``), or by its last part, if that is one of a kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._by_name: dict[str, PictureFile] = {}
        self._by_last: dict[str, PictureFile | None] = {}  # None: there are several
        try:
            time = path.stat().st_mtime_ns
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                    if not member.isreg() or member.issparse():
                        continue
                    name = member.name.removeprefix("./")
                    self._by_name[name] = PictureFile(path, name, member.offset_data, member.size, time)
        except tarfile.TarError as error:
            raise InputError(
                f"{path} cannot be read: {error}; expected a .tar that is not compressed and not cut off "
                f"(gunzip {path.name}, or unpack it into a folder)"
            ) from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        for name, picture in self._by_name.items():
            short = PurePosixPath(name).name
            self._by_last[short] = None if short in self._by_last else picture

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str, where: str) -> PictureFile | Flaw:
        """The picture of this name; ``where`` someone speaks of it, is told of a flaw."""
        name = name.removeprefix("./")
        return self._by_name.get(name) or self._by_last.get(name) or _missing(name, where, self.path)


def decode(data: bytes, where: str, limits: Limits = LIMITS) -> Pixels | Flaw:
    """The colours ``(height, width, 3)`` of a file's bytes, or why there are none."""
    if not data:
        return Flaw(where, "an empty picture")
    if len(data) > limits.size:
        return _too_large(where, len(data), limits)
    pillow = needed("PIL.Image", "images")
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        return Flaw(where, "a picture of too many pixels", str(error))
    except Exception as error:  # of damaged files, Pillow's readers raise a dozen kinds
        if data.startswith(BEGINNINGS):
            return Flaw(where, "a damaged picture", str(error))
        return Flaw(where, "no picture in PNG, JPEG or WebP", f"it begins with {data[:12]!r}")
    width, height = image.size
    if width * height > limits.pixels:
        told = f"{width} × {height}, and {limits.pixels} pixels are the most"
        return Flaw(where, "a picture of too many pixels", told)
    try:
        return _colours(image, pillow)
    except Exception as error:
        return Flaw(where, "a damaged picture", str(error) or type(error).__name__)


def _colours(image: Any, pillow: Any) -> Pixels:
    image.load()
    with contextlib.suppress(Exception):  # damaged EXIF says nothing
        image = needed("PIL.ImageOps", "images").exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow would keep the lower ones
        grey = (np.clip(np.asarray(image), 0, 65535) // 257).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        ground = pillow.new("RGBA", image.size, "white")
        ground.alpha_composite(image.convert("RGBA"))
        image = ground
    return np.array(image.convert("RGB"))


def _missing(name: str, where: str, among: Path) -> Flaw:
    return Flaw(where, "a missing picture", f"{name} is not in {among}")


def _too_large(where: str, size: int, limits: Limits) -> Flaw:
    return Flaw(where, "a picture of too many bytes", f"{size}, and {limits.size} are the most")
