"""The pictures that ``jumok run`` and ``jumok look`` are given: one, a folder of them, a list, a table."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from jumok import lines
from jumok.data import captioned, formats, tables
from jumok.data.drawn import Drawn
from jumok.data.formats import Flaw
from jumok.data.pictures import Archive, PictureFile
from jumok.errors import InputError
from jumok.tasks import objects

__all__ = ["INSIDE", "Finder", "objects_of", "whole", "windows"]

PICTURES = (".jpg", ".jpeg", ".png", ".webp")
LISTS = (".txt",)  # a name a line
AT_ONCE = 1024
INSIDE = ".tar:"  # photos.tar:a/dog.jpg


@contextlib.contextmanager
def windows(text: str | None, *, skip: bool = False) -> Iterator[Iterator[list[str]]]:
    """The names of pictures, so many at a time.

    ``text`` is a picture, a folder, a list (.txt, a name a line), a table with a column *image* or *picture*,
    or ``scenes:4``, a built-in one; None: names come from standard input.
    """
    path = None if text is None else Path(text)
    if path is None or (path.suffix in LISTS and path.is_file()):
        with lines.windows(text, skip=skip) as some:
            yield ([name.strip() for name in names] for names in some)
    else:
        yield _some_at_a_time(_names(str(text), path))


def whole(text: str) -> str:
    """The name of a picture is read as it is."""
    return text


def _names(text: str, path: Path) -> Iterator[str]:
    if path.is_dir():
        all_in_it = path.rglob("*")
        found = sorted(str(one) for one in all_in_it if one.suffix.lower() in PICTURES and not one.is_dir())
        if not found:
            raise InputError(f"{path} has no pictures, files that end in {', '.join(PICTURES)}")
        yield from found
    elif path.is_file() and formats.ending(path) in formats.TABLES:
        yield from _of_table(path)
    else:
        yield text


def _of_table(path: Path) -> Iterator[str]:
    place = _place(path)
    seen: set[str] = set()
    for record in tables.read(path, [captioned.PICTURE]):
        if isinstance(record, Flaw):
            if record.reason != formats.BLANK:
                raise InputError(str(record))
            continue
        where = place(str(record.values[0]))
        if where not in seen:  # a picture with five captions has five rows
            seen.add(where)
            yield where


def objects_of(path: Path) -> Callable[[objects.Told], str]:
    """The picture that an object of a JSONL file names, ``image`` or ``picture``: beside the file, say."""
    place = _place(path)

    def made(told: objects.Told) -> str:
        name = objects.field(told, *captioned.PICTURE)
        return name if Drawn.named(name) is not None else place(name)

    return made


def _place(table: Path) -> Callable[[str], str]:
    """How the pictures that a table speaks of are called."""
    pictures = captioned.pictures_of(table)
    if isinstance(pictures, Archive):
        return lambda name: f"{pictures.path}:{name}"

    def named(name: str) -> str:
        found = pictures.find(name, name)
        return str(pictures.path / name if isinstance(found, Flaw) else found.path)

    return named


def _some_at_a_time(names: Iterator[str]) -> Iterator[list[str]]:
    while some := list(itertools.islice(names, AT_ONCE)):
        yield some


class Finder:
    """Pictures by name. What a .tar holds is found out once."""

    def __init__(self) -> None:
        self._archives: dict[str, Archive] = {}

    def __call__(self, name: str) -> PictureFile | Drawn:
        """The picture; an error that begins with its name if there is none."""
        if (scene := Drawn.named(name)) is not None:
            return scene
        path = Path(name)
        archive, inside, member = name.partition(INSIDE)
        if inside and not path.exists():
            tar = f"{archive}.tar"
            if tar not in self._archives:
                self._archives[tar] = Archive(Path(tar))
            found = self._archives[tar].find(member, name)
            if isinstance(found, Flaw):
                raise InputError(str(found))
            return found
        if path.is_dir():
            raise InputError(f"{name}: a folder; one picture is expected here, as in {path / 'photo.jpg'}")
        if not path.is_file():
            raise InputError(
                f"{name}: there is no such picture; expected a file, a folder, a table with a column image, "
                "or scenes:4, a built-in one"
            )
        return PictureFile.of(path)
