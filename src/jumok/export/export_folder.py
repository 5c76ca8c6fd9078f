"""Export folders: written atomically, and never over a folder that is not an earlier export."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jumok.errors import InputError

MARKER_FILE = "jumok.json"  # marks an export, which may be overwritten
FORMAT_VERSION = 2


@contextlib.contextmanager
def create_export_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write to. Afterwards it becomes ``folder`` and replaces an earlier export."""
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        new = Path(temporary, "new")
        new.mkdir()
        yield new
        write_json(new / MARKER_FILE, {"created_by": "jumok", "format": FORMAT_VERSION})
        _swap_folders(folder, new, Path(temporary, "old"))


def check_replaceable(folder: Path) -> None:
    """Raise if the folder holds anything but an earlier export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the name of a new folder")
    if any(folder.iterdir()) and not (folder / MARKER_FILE).is_file():
        raise InputError(f"{folder} exists and is not an earlier export; give another folder, or remove it")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON."""
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
