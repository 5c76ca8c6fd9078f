"""Files and folders that are there as a whole or not at all, whenever the power goes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["remove", "remove_leftovers", "sync", "written"]


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Gives another name to write a file or a folder to. It becomes ``path`` when all of it is on the disk.

    >>> with written(Path("numbers.txt")) as part:  # doctest: +SKIP
    ...     part.write_text("1 2 3")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    _delete(part)
    try:
        yield part
    except BaseException:
        _delete(part)
        raise
    for inside in part.rglob("*"):
        sync(inside)
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def remove(path: Path) -> None:
    """Take a file or a folder away: its name at once, so that no half of it is ever found under it."""
    part = path.with_name(f".{path.name}.part")
    _delete(part)
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, part)
    _delete(part)


def remove_leftovers(folder: Path) -> None:
    """Take away what an earlier process had begun to write or to remove when it was killed."""
    for part in folder.glob(".*.part"):
        _delete(part)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    folder = path.is_dir()
    if folder and os.name == "nt":  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
