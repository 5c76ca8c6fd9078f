"""Pictures as they are found, in a folder or inside a .tar, and from their bytes to colours.

A picture is PNG, JPEG or WebP, and comes as RGB, the way up that its EXIF says, on white where it can be seen
through. What cannot be used is a *flaw*: missing, damaged, none of these formats, or larger than the limits,
which are looked at before anything is decoded: a small file may hold a picture that fills all memory, or
takes minutes to decode (see :mod:`jumok.data.image_structure`).
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jumok.data import members
from jumok.data.files import needed
from jumok.data.formats import Flaw
from jumok.data.image_structure import check_structure
from jumok.data.members import Member
from jumok.errors import InputError

__all__ = ["LIMITS", "Archive", "Folder", "Limits", "PictureFile", "Pixels", "check", "decode"]

Pixels = NDArray[np.uint8]  # (height, width, 3)
FORMATS = ("PNG", "JPEG", "WEBP")
BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")  # of their files
TOO_MANY_BYTES, TOO_MANY_PIXELS = "a picture of too many bytes", "a picture of too many pixels"
TOO_MANY_PARTS = "a picture of too many parts"
TOO_LARGE = (TOO_MANY_BYTES, TOO_MANY_PIXELS, TOO_MANY_PARTS)


@dataclass(frozen=True)
class Limits:
    """The most that a picture may have."""

    size: int = 64 << 20  # bytes of its file
    pixels: int = 50_000_000


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class PictureFile(Member):
    """A picture that is there, in a file or inside a .tar, and has not been read yet."""

    what: ClassVar[str] = "picture"

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


class Folder(members.Folder[PictureFile]):
    """Pictures in a folder, by their path in it; or by their path as seen from the table ``beside`` it."""

    def __init__(self, path: Path, beside: Path | None = None) -> None:
        super().__init__(path, PictureFile)
        self.beside = beside

    def find(self, name: str, where: str) -> PictureFile | Flaw:
        found = super().find(name, where)
        if isinstance(found, Flaw) and self.beside is not None:
            as_seen = members.Folder(self.beside, PictureFile).find(name, where)
            return found if isinstance(as_seen, Flaw) else as_seen
        return found


class Archive(members.Archive[PictureFile]):
    """Pictures in a .tar, which is not unpacked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, PictureFile)


def decode(data: bytes, where: str, limits: Limits = LIMITS) -> Pixels | Flaw:
    """The colours ``(height, width, 3)`` of a file's bytes, or why there are none."""
    image = _opened(data, where, limits)
    if isinstance(image, Flaw):
        return image
    try:
        return _colours(image, needed("PIL.Image", "images"))
    except Exception as error:
        return Flaw(where, "a damaged picture", _reason(error))


def check(data: bytes, where: str, limits: Limits = LIMITS) -> Flaw | None:
    """What the first bytes of a file tell against it; nothing is decoded."""
    image = _opened(data, where, limits)
    return image if isinstance(image, Flaw) else None


def _opened(data: bytes, where: str, limits: Limits) -> Any:
    """A picture that has yet to be decoded, or a flaw."""
    if not data:
        return Flaw(where, "an empty picture")
    if len(data) > limits.size:
        return _too_large(where, len(data), limits)
    if (excess := check_structure(data)) is not None:
        return Flaw(where, TOO_MANY_PARTS, f"{excess}; save it again with an image editor")
    pillow = needed("PIL.Image", "images")
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):  # which tell of other limits
        told = f"far too many for {len(data)} bytes, and {limits.pixels} pixels are the most"
        return Flaw(where, TOO_MANY_PIXELS, told)
    except Exception as error:  # of damaged files, Pillow's readers raise a dozen kinds
        if data.startswith(BEGINNINGS):
            return Flaw(where, "a damaged picture", _reason(error))
        return Flaw(where, "no picture in PNG, JPEG or WebP", f"it begins with {data[:12]!r}")
    width, height = image.size
    if width * height > limits.pixels:
        told = f"{width} × {height}, and {limits.pixels} pixels are the most"
        return Flaw(where, TOO_MANY_PIXELS, told)
    return image


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


def _too_large(where: str, size: int, limits: Limits) -> Flaw:
    return Flaw(where, TOO_MANY_BYTES, f"{size}, and {limits.size} are the most")


def _reason(error: Exception) -> str:
    """What Pillow says, without the address of our buffer in memory."""
    return re.sub(r" *<[^<>]* object at 0x[0-9a-fA-F]+>", "", str(error)) or type(error).__name__
