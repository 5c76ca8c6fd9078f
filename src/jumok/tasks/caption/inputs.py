"""The pictures that ``jumok run`` and ``jumok look`` are given: one, a folder of them, a list, a table."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from jumok.data.builtin.scenes import BuiltinScene
from jumok.data.images import ImageArchive, ImageFile
from jumok.data.readers import captions, tables
from jumok.data.readers import formats as readers_formats
from jumok.data.readers.formats import InvalidExample
from jumok.errors import InputError
from jumok.inference import line_io
from jumok.tasks import jsonl_input

__all__ = ["ARCHIVE_SEPARATOR", "ImageFinder", "make_image_reader", "read_chunks", "read_text"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
LIST_SUFFIXES = (".txt",)  # a name a line
NAMES_PER_CHUNK = 1024
ARCHIVE_SEPARATOR = ".tar:"  # photos.tar:a/dog.jpg


@contextlib.contextmanager
def read_chunks(text: str | None, *, skip_invalid: bool = False) -> Iterator[Iterator[list[str]]]:
    """The names of pictures, so many at a time.

    ``text`` is a picture, a folder, a list (.txt, a name a line), a table with a column *image* or *picture*,
    or ``scenes:4``, a built-in one; None: names come from standard input.
    """
    path = None if text is None else Path(text)
    if path is None or (path.suffix in LIST_SUFFIXES and path.is_file()):
        with line_io.read_chunks(text, skip_invalid=skip_invalid) as some:
            yield ([name.strip() for name in names] for names in some)
    else:
        yield _split_into_chunks(_list_images(str(text), path))


def read_text(text: str) -> str:
    """The name of a picture is read as it is."""
    return text


def _list_images(text: str, path: Path) -> Iterator[str]:
    if path.is_dir():
        all_in_it = path.rglob("*")
        found = sorted(
            str(one) for one in all_in_it if one.suffix.lower() in IMAGE_SUFFIXES and not one.is_dir()
        )
        if not found:
            raise InputError(f"{path} has no pictures, files that end in {', '.join(IMAGE_SUFFIXES)}")
        yield from found
    elif path.is_file() and readers_formats.file_suffix(path) in readers_formats.TABLE_READERS:
        yield from _read_table(path)
    else:
        yield text


def _read_table(path: Path) -> Iterator[str]:
    place = _make_path_resolver(path)
    seen: set[str] = set()
    for record in tables.read_table(path, [captions.IMAGE_COLUMN_NAMES]):
        if isinstance(record, InvalidExample):
            if record.reason != readers_formats.BLANK_LINE:
                raise InputError(str(record))
            continue
        where = place(str(record.values[0]))
        if where not in seen:  # a picture with five captions has five rows
            seen.add(where)
            yield where


def make_image_reader(path: Path) -> Callable[[jsonl_input.JsonObject], str]:
    """The picture that an object of a JSONL file names, ``image`` or ``picture``: beside the file, say."""
    place = _make_path_resolver(path)

    def made(told: jsonl_input.JsonObject) -> str:
        name = jsonl_input.get_text_field(told, *captions.IMAGE_COLUMN_NAMES)
        return name if BuiltinScene.from_name(name) is not None else place(name)

    return made


def _make_path_resolver(table: Path) -> Callable[[str], str]:
    """How the pictures that a table speaks of are called."""
    pictures = captions.find_images(table)
    if isinstance(pictures, ImageArchive):
        return lambda name: f"{pictures.path}:{name}"

    def named(name: str) -> str:
        found = pictures.find(name, name)
        return str(pictures.path / name if isinstance(found, InvalidExample) else found.path)

    return named


def _split_into_chunks(names: Iterator[str]) -> Iterator[list[str]]:
    while some := list(itertools.islice(names, NAMES_PER_CHUNK)):
        yield some


class ImageFinder:
    """Pictures by name. What a .tar holds is found out once."""

    def __init__(self) -> None:
        self._archives: dict[str, ImageArchive] = {}

    def __call__(self, name: str) -> ImageFile | BuiltinScene:
        """The picture; an error that begins with its name if there is none."""
        if (scene := BuiltinScene.from_name(name)) is not None:
            return scene
        path = Path(name)
        archive, inside, member = name.partition(ARCHIVE_SEPARATOR)
        if inside and not path.exists():
            tar = f"{archive}.tar"
            if tar not in self._archives:
                self._archives[tar] = ImageArchive(Path(tar))
            found = self._archives[tar].find(member, name)
            if isinstance(found, InvalidExample):
                raise InputError(str(found))
            return found
        if path.is_dir():
            raise InputError(f"{name}: a folder; one picture is expected here, as in {path / 'photo.jpg'}")
        if not path.is_file():
            raise InputError(
                f"{name}: there is no such picture; expected a file, a folder, a table with a column image, "
                "or scenes:4, a built-in one"
            )
        return ImageFile.from_path(path)
