"""Export folders: written atomically, and never over a folder that is not an earlier export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from jumok.errors import InputError
from jumok.files import atomic_write_folder, write_json
from jumok.run import Run

MARKER_FILE = "jumok.json"  # marks an export, which may be overwritten
FORMAT_VERSION = 2


@contextlib.contextmanager
def create_export_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write to. Afterwards it becomes ``folder`` and replaces an earlier export."""
    check_replaceable(folder)
    with atomic_write_folder(folder, is_current=lambda: False) as new:
        yield new
        write_json(new / MARKER_FILE, {"created_by": "jumok", "format": FORMAT_VERSION})


def check_replaceable(folder: Path) -> None:
    """Raise if the folder holds anything but an earlier export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the name of a new folder")
    if any(folder.iterdir()) and not (folder / MARKER_FILE).is_file():
        raise InputError(f"{folder} exists and is not an earlier export; give another folder, or remove it")


def check_finite(model: nn.Module) -> None:
    """Raise if a weight is NaN or infinite, which other engines do not report."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(f"{name} contains NaN or infinity: the training has diverged; use earlier weights")


def find_tokenizer_files(run: Run) -> tuple[str, str]:
    """Return the names of the tokenizer files of a translation run: for the source and for the target."""
    if (run.folder / "tokenizer.source.json").exists():
        return "tokenizer.source.json", "tokenizer.target.json"
    return "tokenizer.json", "tokenizer.json"
