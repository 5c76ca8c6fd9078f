"""Images that a user names: their pixels for a model, and files for the viewer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jumok.data.images import ImageFile, Pixels
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError
from jumok.look.viewer.attended_image import encode_png

MAX_SHOWN_SIDE = 1280  # pixels of the longer side of an image in the viewer
MAX_PNG_PIXELS = 256 * 256  # above, the image in the viewer is a JPEG


def load_images(paths: Sequence[str | Path]) -> list[Pixels]:
    """Return the pixels ``(height, width, 3)`` of PNG, JPEG or WebP files; their limits are checked before decoding."""
    images = []
    for path in map(Path, paths):
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "does not exist"
            raise InputError(f"--image {path}: {reason}; expected a PNG, JPEG or WebP file")
        pixels = ImageFile.from_path(path).decode()
        if isinstance(pixels, InvalidExample):
            raise InputError(str(pixels))
        images.append(pixels)
    return images


def to_pillow(pixels: Pixels) -> Any:
    """Return an image of Pillow, as processors take it."""
    return import_optional("PIL.Image", "images").fromarray(pixels)


def encode_for_viewer(pixels: Pixels) -> bytes:
    """Return a file of an image for the viewer, not larger than it is shown."""
    image = to_pillow(pixels)
    image.thumbnail((MAX_SHOWN_SIDE, MAX_SHOWN_SIDE))
    if image.width * image.height <= MAX_PNG_PIXELS:
        return encode_png(np.array(image))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()
