"""What computes a run's predictions: PyTorch, or an engine that is made for nothing else and faster at it.

An engine's predictor has the methods of the task's own, so that whoever uses it sees no difference; what the
engine cannot do it refuses, with the way to have it done. The files that an engine reads are made of the run
when they are first needed, and kept in the user's cache::

    ~/.cache/jumok/engines/ctranslate2/demo-1f0c93ab52e7/6f1c0c4f2b7a9e01/

The first folder is named after the run and its place, the second after a digest of its recipe, tokenizer and
weights: a run that was trained further gets new files, and the old ones are removed. The run's folder is not
used for them: the author of a run could have put the graph of another model there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jumok import tasks
from jumok.errors import InputError, MissingExtra
from jumok.files import fsync_path
from jumok.run import Run
from jumok.tasks.common import get_cache_folder

__all__ = [
    "ENGINE_NAMES",
    "RunChangedError",
    "check_engine",
    "compute_run_digest",
    "get_engine_cache_folder",
    "get_engine_files",
    "load_predictor",
    "load_torch_predictor",
]

ENGINE_NAMES = ("torch", "ctranslate2", "onnx")


def check_engine(engine: str) -> None:
    """Raise if there is no such engine."""
    if engine not in ENGINE_NAMES:
        raise InputError(f"--engine {engine}: it is one of {', '.join(ENGINE_NAMES)}")


def load_predictor(run: Run, engine: str = "torch", device: str = "auto") -> Any:
    """The predictor of a run, its predictions computed by this engine."""
    check_engine(engine)
    if engine == "torch":
        return tasks.get_task_module(run.recipe.task).load(run, device)
    try:
        by = importlib.import_module(f"jumok.inference.{engine}_engine")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f'--engine {engine} needs {error.name}, which is not installed: pip install "jumok[export]"'
        ) from error
    return by.load(run, device)


def get_engine_files(run: Run, engine: str, build_files: Callable[[Path], None]) -> Path:
    """The folder with an engine's files of this run; if there is none yet, ``build_files(folder)`` fills it.

    It is there whole or not at all, whoever else makes it at the same time.
    """
    home, digest = get_engine_cache_folder(run, engine), compute_run_digest(run)
    folder = home / digest
    if not folder.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=".part-") as part:
            new = Path(part, digest)
            new.mkdir()
            build_files(new)
            for inside in new.rglob("*"):
                fsync_path(inside)
            with contextlib.suppress(OSError):  # somebody else was faster: theirs are as good
                os.rename(new, folder)
        for old in home.iterdir():
            if old != folder and not old.name.startswith(".part-"):
                shutil.rmtree(old, ignore_errors=True)
    if not folder.is_dir():
        raise InputError(f"{folder} cannot be made; is there another file of this name?")
    return folder


def get_engine_cache_folder(run: Run, engine: str) -> Path:
    """The folder for an engine's files of the run in this place."""
    place = run.folder.resolve()
    digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:12]
    return get_cache_folder() / "engines" / engine / f"{place.name}-{digest}"


def compute_run_digest(run: Run) -> str:
    """Identify the files that an engine's files are made of: recipe, tokenizer and weights."""
    digest = hashlib.sha256()
    for path in run.model_files:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


class RunChangedError(InputError):
    """The weights of a run were replaced or deleted after an engine loaded them."""


def load_torch_predictor(run: Run, digest: str, device: str) -> Any:
    """The PyTorch predictor of a run that an engine loaded earlier, whose files have that ``digest``.

    The digest is computed after the weights are read, so a replacement in between is found as well.
    """
    try:
        predictor = tasks.get_task_module(run.recipe.task).load(run, device)
        unchanged = compute_run_digest(run) == digest
    except (InputError, OSError):
        unchanged = False
    if not unchanged:
        raise RunChangedError(
            "the files of this run were changed or deleted after it was loaded; alignments and attention "
            "maps need its weights again: reload the run (restart the server)"
        )
    return predictor
