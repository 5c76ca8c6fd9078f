"""Images: files in a folder or in a .tar archive, and their decoding.

An image is PNG, JPEG or WebP. It is decoded to RGB, rotated as its EXIF data says, on a white background if
it is transparent. An image that is missing, damaged, in another format or larger than the limits becomes an
:class:`InvalidExample`. The limits are checked before decoding: a small file may contain an image that fills
all memory or takes minutes to decode (see :mod:`jumok.data.image_structure`).
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
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError

Pixels = NDArray[np.uint8]  # (height, width, 3)
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
MAGIC_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")  # first bytes of their files
TOO_MANY_BYTES, TOO_MANY_PIXELS = "an image of too many bytes", "an image of too many pixels"
TOO_MANY_PARTS = "an image of too many parts"
TOO_LARGE_REASONS = (TOO_MANY_BYTES, TOO_MANY_PIXELS, TOO_MANY_PARTS)


@dataclass(frozen=True)
class ImageLimits:
    """Limits of an image."""

    max_bytes: int = 64 << 20  # of the file
    max_pixels: int = 50_000_000


IMAGE_LIMITS = ImageLimits()


@dataclass(frozen=True, slots=True)
class ImageFile(DataFile):
    """An image, in a file or inside a .tar archive, that is read on demand."""

    description: ClassVar[str] = "image"

    def decode(self, location: str | None = None, limits: ImageLimits = IMAGE_LIMITS) -> Pixels | InvalidExample:
        """The pixels ``(height, width, 3)``; or why it cannot be decoded."""
        location = location or self.location
        if self.num_bytes > limits.max_bytes:
            return _file_too_large(location, self.num_bytes, limits)
        try:
            data = self.read()
        except InputError as error:
            return InvalidExample(location, "an image that cannot be read", str(error))
        return decode_image(data, location, limits)


class ImageFolder(archive.FileFolder[ImageFile]):
    """Images in a folder, by their path relative to it, or relative to ``table_folder``."""

    def __init__(self, path: Path, table_folder: Path | None = None) -> None:
        super().__init__(path, ImageFile)
        self.table_folder = table_folder

    def find(self, name: str, location: str) -> ImageFile | InvalidExample:
        file = super().find(name, location)
        if isinstance(file, InvalidExample) and self.table_folder is not None:
            table_file = archive.FileFolder(self.table_folder, ImageFile).find(name, location)
            return file if isinstance(table_file, InvalidExample) else table_file
        return file


class ImageArchive(archive.TarArchive[ImageFile]):
    """Images in a .tar archive."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ImageFile)


def decode_image(data: bytes, location: str, limits: ImageLimits = IMAGE_LIMITS) -> Pixels | InvalidExample:
    """Decode the bytes of a file to pixels ``(height, width, 3)``; or why that is not possible."""
    image = _open_image(data, location, limits)
    if isinstance(image, InvalidExample):
        return image
    try:
        return _to_rgb(image, import_optional("PIL.Image", "images"))
    except Exception as error:
        return InvalidExample(location, "a damaged image", _clean_error_text(error))


def check_image(data: bytes, location: str, limits: ImageLimits = IMAGE_LIMITS) -> InvalidExample | None:
    """Check the header of a file, without decoding it."""
    image = _open_image(data, location, limits)
    return image if isinstance(image, InvalidExample) else None


def _open_image(data: bytes, location: str, limits: ImageLimits) -> Any:
    """An image that is not decoded yet, or an :class:`InvalidExample`."""
    if not data:
        return InvalidExample(location, "an empty image")
    if len(data) > limits.max_bytes:
        return _file_too_large(location, len(data), limits)
    if (excess := check_structure(data)) is not None:
        return InvalidExample(location, TOO_MANY_PARTS, f"{excess}; save it again with an image editor")
    pillow = import_optional("PIL.Image", "images")
    try:
        image = pillow.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):  # they mention other limits
        detail = f"far too many for {len(data)} bytes; the limit is {limits.max_pixels} pixels"
        return InvalidExample(location, TOO_MANY_PIXELS, detail)
    except Exception as error:  # Pillow raises many types for damaged files
        if data.startswith(MAGIC_BYTES):
            return InvalidExample(location, "a damaged image", _clean_error_text(error))
        return InvalidExample(location, "not an image in PNG, JPEG or WebP", f"it begins with {data[:12]!r}")
    width, height = image.size
    if width * height > limits.max_pixels:
        detail = f"{width} × {height}; the limit is {limits.max_pixels} pixels"
        return InvalidExample(location, TOO_MANY_PIXELS, detail)
    return image


def _to_rgb(image: Any, pillow: Any) -> Pixels:
    image.load()
    with contextlib.suppress(Exception):  # ignore damaged EXIF data
        image = import_optional("PIL.ImageOps", "images").exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit gray, of which Pillow would keep the low byte
        gray = (np.clip(np.asarray(image), 0, 65535) // 257).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        background = pillow.new("RGBA", image.size, "white")
        background.alpha_composite(image.convert("RGBA"))
        image = background
    return np.array(image.convert("RGB"))


def _file_too_large(location: str, num_bytes: int, limits: ImageLimits) -> InvalidExample:
    return InvalidExample(location, TOO_MANY_BYTES, f"{num_bytes}; the limit is {limits.max_bytes}")


def _clean_error_text(error: Exception) -> str:
    """The message of Pillow, without the address of the buffer."""
    return re.sub(r" *<[^<>]* object at 0x[0-9a-fA-F]+>", "", str(error)) or type(error).__name__
