"""Folders that we write for others: there as a whole or not at all, never in the place of somebody's own."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jumok.errors import InputError

__all__ = ["check_replaceable", "create_export_folder", "write_json"]

MARKER_FILE = "jumok.json"  # tells an earlier export, which may be written over, from somebody's folder
FORMAT_VERSION = 1


@contextlib.contextmanager
def create_export_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to write to. Afterwards it is ``folder``, in the place of an earlier export."""
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        new = Path(made, "new")
        new.mkdir()
        yield new
        write_json(new / MARKER_FILE, {"made by": "jumok", "format": FORMAT_VERSION})
        _swap_folders(folder, new, Path(made, "old"))


def check_replaceable(folder: Path) -> None:
    """Raise if the folder holds anything but an earlier export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder to be made")
    if any(folder.iterdir()) and not (folder / MARKER_FILE).is_file():
        raise InputError(
            f"{folder} exists and is no earlier export; it is left alone. Name another folder, or remove it"
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As text that people can read."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _swap_folders(folder: Path, new: Path, old: Path) -> None:
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
