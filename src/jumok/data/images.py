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

from jumok.data.image_structure import check_structure
from jumok.data.readers import archive
from jumok.data.readers.archive import DataFile
from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError

__all__ = [
    "IMAGE_LIMITS",
    "ImageArchive",
    "ImageFile",
    "ImageFolder",
    "ImageLimits",
    "Pixels",
    "check_image",
    "decode_image",
]

Pixels = NDArray[np.uint8]  # (height, width, 3)
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
MAGIC_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")  # of their files
TOO_MANY_BYTES, TOO_MANY_PIXELS = "a picture of too many bytes", "a picture of too many pixels"
TOO_MANY_PARTS = "a picture of too many parts"
TOO_LARGE_REASONS = (TOO_MANY_BYTES, TOO_MANY_PIXELS, TOO_MANY_PARTS)


@dataclass(frozen=True)
class ImageLimits:
    """The most that a picture may have."""

    max_bytes: int = 64 << 20  # bytes of its file
    max_pixels: int = 50_000_000


IMAGE_LIMITS = ImageLimits()


@dataclass(frozen=True, slots=True)
class ImageFile(DataFile):
    """A picture that is there, in a file or inside a .tar, and has not been read yet."""

    description: ClassVar[str] = "picture"

    def decode(
        self, location: str | None = None, limits: ImageLimits = IMAGE_LIMITS
    ) -> Pixels | InvalidExample:
        """Its colours ``(height, width, 3)``, or why there are none."""
        location = location or self.location
        if self.num_bytes > limits.max_bytes:
            return _file_too_large(location, self.num_bytes, limits)
        try:
            data = self.read()
        except InputError as error:
            return InvalidExample(location, "a picture that cannot be read", str(error))
        return decode_image(data, location, limits)

    def load_pixels(self, limits: ImageLimits = IMAGE_LIMITS) -> Pixels:
        """Its colours ``(height, width, 3)``; an error if there are none."""
        found = self.decode(limits=limits)
        if isinstance(found, InvalidExample):
            raise InputError(str(found))
        return found


class ImageFolder(archive.FileFolder[ImageFile]):
    """Pictures in a folder, by their path in it; or by their path as seen from the table ``table_folder`` it."""

    def __init__(self, path: Path, table_folder: Path | None = None) -> None:
        super().__init__(path, ImageFile)
        self.table_folder = table_folder

    def find(self, name: str, location: str) -> ImageFile | InvalidExample:
        found = super().find(name, location)
        if isinstance(found, InvalidExample) and self.table_folder is not None:
            as_seen = archive.FileFolder(self.table_folder, ImageFile).find(name, location)
            return found if isinstance(as_seen, InvalidExample) else as_seen
        return found


class ImageArchive(archive.TarArchive[ImageFile]):
    """Pictures in a .tar, which is not unpacked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ImageFile)


def decode_image(data: bytes, location: str, limits: ImageLimits = IMAGE_LIMITS) -> Pixels | InvalidExample:
    """The colours ``(height, width, 3)`` of a file's bytes, or why there are none."""
    image = _open_image(data, location, limits)
    if isinstance(image, InvalidExample):
        return image
    try:
        return _to_rgb(image, import_optional("PIL.Image", "images"))
    except Exception as error:
        return InvalidExample(location, "a damaged picture", _clean_error_text(error))


def check_image(data: bytes, location: str, limits: ImageLimits = IMAGE_LIMITS) -> InvalidExample | None:
    """What the first bytes of a file tell against it; nothing is decoded."""
    image = _open_image(data, location, limits)
    return image if isinstance(image, InvalidExample) else None


def _open_image(data: bytes, location: str, limits: ImageLimits) -> Any:
    """A picture that has yet to be decoded, or a flaw."""
    if not data:
        return InvalidExample(location, "an empty picture")
    if len(data) > limits.max_bytes:
        return _file_too_large(location, len(data), limits)
    if (excess := check_structure(data)) is not None:
        return InvalidExample(location, TOO_MANY_PARTS, f"{excess}; save it again with an image editor")
    pillow = import_optional("PIL.Image", "images")
    try:
        image = pillow.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):  # which tell of other limits
        told = f"far too many for {len(data)} bytes, and {limits.max_pixels} pixels are the most"
        return InvalidExample(location, TOO_MANY_PIXELS, told)
    except Exception as error:  # of damaged files, Pillow's readers raise a dozen kinds
        if data.startswith(MAGIC_BYTES):
            return InvalidExample(location, "a damaged picture", _clean_error_text(error))
        return InvalidExample(location, "no picture in PNG, JPEG or WebP", f"it begins with {data[:12]!r}")
    width, height = image.size
    if width * height > limits.max_pixels:
        told = f"{width} × {height}, and {limits.max_pixels} pixels are the most"
        return InvalidExample(location, TOO_MANY_PIXELS, told)
    return image


def _to_rgb(image: Any, pillow: Any) -> Pixels:
    image.load()
    with contextlib.suppress(Exception):  # damaged EXIF says nothing
        image = import_optional("PIL.ImageOps", "images").exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow would keep the lower ones
        grey = (np.clip(np.asarray(image), 0, 65535) // 257).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        ground = pillow.new("RGBA", image.size, "white")
        ground.alpha_composite(image.convert("RGBA"))
        image = ground
    return np.array(image.convert("RGB"))


def _file_too_large(location: str, num_bytes: int, limits: ImageLimits) -> InvalidExample:
    return InvalidExample(location, TOO_MANY_BYTES, f"{num_bytes}, and {limits.max_bytes} are the most")


def _clean_error_text(error: Exception) -> str:
    """What Pillow says, without the address of our buffer in memory."""
    return re.sub(r" *<[^<>]* object at 0x[0-9a-fA-F]+>", "", str(error)) or type(error).__name__
