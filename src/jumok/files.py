"""Files: written whole or not at all, and read from folders that may come from strangers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jumok.errors import InputError

__all__ = [
    "add_filename_to_errors",
    "atomic_write",
    "check_not_input",
    "check_symlinks",
    "fsync_path",
    "get_cache_folder",
    "open_for_writing",
    "read_json",
    "remove_atomically",
    "remove_partial_files",
    "write_json",
    "write_text",
]


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Gives another name to write a file or a folder to. It becomes ``path`` when all of it is on the disk.

    >>> with atomic_write(Path("numbers.txt")) as part:  # doctest: +SKIP
    ...     part.write_text("1 2 3")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    _delete(part)
    with add_filename_to_errors(path):
        try:
            yield part
        except BaseException:
            _delete(part)
            raise
        for inside in part.rglob("*"):
            fsync_path(inside)
        fsync_path(part)
        os.replace(part, path)
        fsync_path(path.parent)


@contextlib.contextmanager
def add_filename_to_errors(path: Path | str) -> Iterator[None]:
    """Add the name of a file to an ``OSError`` without one, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def open_for_writing(path: Path, mode: str, **options: Any) -> Iterator[Any]:
    """Open a file. If closing it fails, because the rest of its buffer does not fit, the error names it."""
    file = path.open(mode, **options)
    try:
        yield file
    finally:
        with add_filename_to_errors(path):
            file.close()


def check_not_input(output: Path, inputs: Iterable[str | Path | int]) -> None:
    """Raise if ``output`` is one of the inputs, files by name or descriptor; links to one of them count."""
    target = _file_identity(output)
    for one in inputs:
        if target is not None and _file_identity(one) == target:
            what = "standard input" if isinstance(one, int) else one
            raise InputError(f"{output} is an input ({what}) and would be overwritten; choose another output")


def _file_identity(path: str | Path | int) -> tuple[int, int] | None:
    """Identify a file or a folder; None for anything else, such as a pipe, and for what does not exist."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):  # a text that could not be a name
        return None
    is_stored = stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)
    return (facts.st_dev, facts.st_ino) if is_stored else None


def remove_atomically(path: Path) -> None:
    """Take a file or a folder away: its name at once, so that no half of it is ever found under it."""
    part = path.with_name(f".{path.name}.part")
    _delete(part)
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, part)
    _delete(part)


def remove_partial_files(folder: Path) -> None:
    """Take away what an earlier process had begun to write or to remove when it was killed."""
    for part in folder.glob(".*.part"):
        _delete(part)


def check_symlinks(folder: Path) -> None:
    """Raise if a file of a folder is a symbolic link that leads out of the folder.

    A folder from a stranger could otherwise have any file of this machine read, shown or copied. Links from a
    snapshot of the Hugging Face hub to the ``blobs`` beside it are accepted. Links to folders are accepted,
    too: people keep large ones on another disk.
    """
    home = folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    for path in sorted(folder.iterdir()):
        if not path.is_symlink() or path.is_dir():
            continue
        try:
            target = path.resolve()
        except (OSError, RuntimeError):  # a circle, which leads nowhere
            continue
        if not any(target.is_relative_to(one) for one in homes):
            raise InputError(
                f"{path} is a symbolic link that leads out of its folder, to {target}; if you trust it, "
                "put a copy of the file in its place"
            )


def read_json(path: Path, expected_type: type) -> Any:
    """Return the content of a JSON file that holds a ``expected_type``, ``list`` or ``dict``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged, it is not JSON: {error}") from None
    if not isinstance(content, expected_type):
        raise InputError(
            f"{path} is damaged: expected a {expected_type.__name__}, it holds {type(content).__name__}"
        )
    return content


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def get_cache_folder() -> Path:
    """The folder for files that all runs share: ``JUMOK_CACHE``, or ``~/.cache/jumok``."""
    return Path(os.environ.get("JUMOK_CACHE") or Path.home() / ".cache" / "jumok")


def fsync_path(path: Path) -> None:
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
