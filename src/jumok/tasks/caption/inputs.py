"""Image inputs of ``jumok run`` and ``jumok look``: an image, a folder of images, a list, or a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from jumok.data.builtin.scenes import BuiltinScene
from jumok.data.images import ImageArchive, ImageFile
from jumok.data.readers import captions, tables
from jumok.data.readers.invalid_examples import BLANK_LINE, InvalidExample
from jumok.data.readers.tables import TABLE_SUFFIXES
from jumok.data.readers.text_files import file_suffix
from jumok.errors import InputError
from jumok.inference import line_io
from jumok.tasks.jsonl_input import JsonObject, get_text_field

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
LIST_SUFFIXES = (".txt",)  # one name per line
NAMES_PER_CHUNK = 1024
ARCHIVE_SEPARATOR = ".tar:"  # photos.tar:a/dog.jpg


@contextlib.contextmanager
def read_chunks(text: str | None, *, skip_invalid: bool = False) -> Iterator[Iterator[list[str]]]:
    """Read the names of images in chunks.

    ``text`` is an image, a folder, a list (.txt, one name per line), a table with a column *image* or *picture*, or
    ``scenes:4``, a built-in scene. None means that names come from standard input.
    """
    path = None if text is None else Path(text)
    if path is None or (path.suffix in LIST_SUFFIXES and path.is_file()):
        with line_io.read_chunks(text, skip_invalid=skip_invalid) as chunks:
            yield ([name.strip() for name in names] for names in chunks)
    else:
        yield line_io.iterate_chunks(_list_images(str(text), path), NAMES_PER_CHUNK)


def _list_images(text: str, path: Path) -> Iterator[str]:
    if path.is_dir():
        names = sorted(
            str(file) for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and not file.is_dir()
        )
        if not names:
            raise InputError(f"{path} has no images: files that end in {', '.join(IMAGE_SUFFIXES)}")
        yield from names
    elif path.is_file() and file_suffix(path) in TABLE_SUFFIXES:
        yield from _read_table(path)
    else:
        yield text


def _read_table(path: Path) -> Iterator[str]:
    resolve_path = _make_path_resolver(path)
    seen: set[str] = set()
    for row in tables.open_table(path).read({"image": captions.IMAGE_COLUMN_NAMES}):
        if isinstance(row, InvalidExample):
            if row.reason != BLANK_LINE:
                raise InputError(str(row))
            continue
        name = resolve_path(str(row.values["image"]))
        if name not in seen:  # an image with five captions has five rows
            seen.add(name)
            yield name


def make_image_reader(path: Path) -> Callable[[JsonObject], str]:
    """Return a function that finds the image that an object of a JSONL file names, ``image`` or ``picture``."""
    resolve_path = _make_path_resolver(path)

    def read(json_object: JsonObject) -> str:
        name = get_text_field(json_object, *captions.IMAGE_COLUMN_NAMES)
        return name if BuiltinScene.from_name(name) is not None else resolve_path(name)

    return read


def _make_path_resolver(table: Path) -> Callable[[str], str]:
    """Return a function that resolves the names of images in a table."""
    images = captions.find_images(table)
    if isinstance(images, ImageArchive):
        return lambda name: f"{images.path}:{name}"

    def resolve(name: str) -> str:
        image = images.find(name, name)
        return str(images.path / name if isinstance(image, InvalidExample) else image.path)

    return resolve


class ImageFinder:
    """Finds images by name. The index of a .tar file is read once."""

    def __init__(self) -> None:
        self._archives: dict[str, ImageArchive] = {}

    def __call__(self, name: str) -> ImageFile | BuiltinScene:
        """Return the image; raise an error that starts with its name if there is none."""
        if (scene := BuiltinScene.from_name(name)) is not None:
            return scene
        path = Path(name)
        archive, separator, member = name.partition(ARCHIVE_SEPARATOR)
        if separator and not path.exists():
            tar = f"{archive}.tar"
            if tar not in self._archives:
                self._archives[tar] = ImageArchive(Path(tar))
            image = self._archives[tar].find(member, name)
            if isinstance(image, InvalidExample):
                raise InputError(str(image))
            return image
        if path.is_dir():
            raise InputError(f"{name}: a folder; one image is expected here, as in {path / 'photo.jpg'}")
        if not path.is_file():
            raise InputError(
                f"{name}: there is no such image; expected a file, a folder, a table with a column image, or "
                "scenes:4, a built-in scene"
            )
        return ImageFile.from_path(path)
