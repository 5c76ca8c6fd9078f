"""Files and folders: atomic writing, and safe reading from untrusted folders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jumok.errors import InputError

TEMPORARY_SUFFIX = ".tmp"  # of a folder that is being written
ABANDONED_SECONDS = 3600.0  # a temporary folder without a write for so long belongs to a dead process


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder. It is renamed to ``path`` when it is synced to disk.

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
        _publish(part, path)


@contextlib.contextmanager
def atomic_write_folder(path: Path, is_current: Callable[[], bool]) -> Iterator[Path]:
    """Yield a temporary folder. It replaces the folder ``path`` when it is synced to disk.

    Several processes may write the same folder at the same time: each has its own temporary folder. If
    ``is_current()`` is true afterwards, the folder of another process that was faster is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=TEMPORARY_SUFFIX, dir=path.parent))
    new, old = temporary / "new", temporary / "old"
    try:
        new.mkdir()
        yield new
        try:
            if path.exists() and not is_current():
                with contextlib.suppress(FileNotFoundError):  # another process has moved it already
                    path.replace(old)
            _publish(new, path)
        except OSError:
            if not is_current():
                if old.exists() and not path.exists():
                    old.replace(path)
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(part: Path, path: Path) -> None:
    """Sync a file or a folder to disk, and rename it."""
    for inside in part.rglob("*"):
        fsync_path(inside)
    fsync_path(part)
    os.replace(part, path)
    fsync_path(path.parent)


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary folders of processes that were killed while they wrote ``path``."""
    for folder in path.parent.glob(f".{path.name}-*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(OSError):  # its process may be renaming it at this moment
            last_write = max(item.stat().st_mtime for item in (folder, *folder.rglob("*")))
            if time.time() - last_write > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


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
    """Open a file. If closing it fails because the disk is full, the error names the file."""
    file = path.open(mode, **options)
    try:
        yield file
    finally:
        with add_filename_to_errors(path):
            file.close()


def check_not_input(output: Path, inputs: Iterable[str | Path | int]) -> None:
    """Raise if ``output`` is one of the inputs (paths or file descriptors), or a link to one."""
    target = _file_identity(output)
    for source in inputs:
        if target is not None and _file_identity(source) == target:
            name = "standard input" if isinstance(source, int) else source
            raise InputError(f"{output} is an input ({name}) and would be overwritten; choose another output")


def _file_identity(path: str | Path | int) -> tuple[int, int] | None:
    """Device and inode of a file or a folder; None for anything else, such as a pipe or a missing file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: not a valid name
        return None
    is_stored = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return (status.st_dev, status.st_ino) if is_stored else None


def remove_atomically(path: Path) -> None:
    """Remove a file or a folder. It is renamed first, so that nobody finds a part of it."""
    part = path.with_name(f".{path.name}.part")
    _delete(part)
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, part)
    _delete(part)


def remove_partial_files(folder: Path) -> None:
    """Remove the temporary files of an earlier process that was killed."""
    for part in folder.glob(".*.part"):
        _delete(part)


def check_symlinks(folder: Path) -> None:
    """Raise if a file of a folder is a symbolic link that leads out of the folder.

    Otherwise, an untrusted folder could have any file of this machine read, shown or copied. Links from a
    snapshot of the Hugging Face hub to its ``blobs`` are accepted, and so are links to folders, which are
    often stored on another disk.
    """
    root = folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in sorted(folder.iterdir()):
        if not path.is_symlink() or path.is_dir():
            continue
        try:
            target = path.resolve()
        except (OSError, RuntimeError):  # a cycle
            continue
        if not any(target.is_relative_to(parent) for parent in allowed):
            raise InputError(
                f"{path} is a symbolic link that leads out of its folder, to {target}; if you trust it, "
                "replace it by a copy of the file"
            )


def read_json(path: Path, expected_type: type) -> Any:
    """Read a JSON file that contains an ``expected_type``, ``list`` or ``dict``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged, it is not JSON: {error}") from None
    if not isinstance(content, expected_type):
        raise InputError(
            f"{path} is damaged: expected a {expected_type.__name__}, it contains a {type(content).__name__}"
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
    """Wait until a file, or the entries of a folder, are on disk."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
