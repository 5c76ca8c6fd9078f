"""Inference engines: PyTorch, or an engine that is faster at prediction.

The predictor of an engine has the methods of the task's own predictor. What an engine cannot do raises an error that
names the alternative. The files of an engine are built from the run when they are first needed, and cached::

    ~/.cache/jumok/engines/ctranslate2/demo-1f0c93ab52e7/6f1c0c4f2b7a9e01/

The name of the first folder identifies the folder of the run, that of the second is a digest of its recipe, tokenizer
and weights: after more training new files are built, and the old ones are removed. The files are never read from the
folder of the run, because the author of an untrusted run could have put the graph of another model there.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jumok.errors import InputError
from jumok.files import TEMPORARY_SUFFIX, atomic_write_folder, get_cache_folder
from jumok.run import Run

if TYPE_CHECKING:
    from jumok.tasks.base import Predictor

ENGINE_NAMES = ("torch", "ctranslate2", "onnx")


def check_engine(engine: str) -> None:
    """Raise if there is no such engine."""
    if engine not in ENGINE_NAMES:
        raise InputError(f"--engine {engine}: it is one of {', '.join(ENGINE_NAMES)}")


def load_predictor(run: Run, engine: str = "torch", device: str = "auto") -> Predictor[Any, Any]:
    """Load the predictor of a run with an engine."""
    check_engine(engine)
    if engine == "torch":
        from jumok import tasks

        return tasks.load_predictor(run, device)
    engine_module = importlib.import_module(f"jumok.inference.{engine}_engine")
    predictor: Predictor[Any, Any] = engine_module.load(run, device)
    return predictor


def get_engine_files(run: Run, engine: str, build_files: Callable[[Path], None]) -> Path:
    """Return the folder with the files of an engine for a run. If it does not exist, ``build_files(folder)`` fills it.

    Its name is the digest of the run. Several processes may build it at the same time.
    """
    home = get_engine_cache_folder(run, engine)
    folder = home / compute_run_digest(run)
    if not folder.is_dir():
        with atomic_write_folder(folder, folder.is_dir) as new:
            build_files(new)
        for other in home.iterdir():
            if other != folder and not other.name.endswith(TEMPORARY_SUFFIX):
                shutil.rmtree(other, ignore_errors=True)
    return folder


def get_engine_cache_folder(run: Run, engine: str) -> Path:
    """The folder for the files of an engine for the run in this folder."""
    folder = run.folder.resolve()
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return get_cache_folder() / "engines" / engine / f"{folder.name}-{digest}"


def compute_run_digest(run: Run) -> str:
    """Identify the files that an engine's files are made of: recipe, tokenizer and weights."""
    digest = hashlib.sha256()
    for path in run.model_files:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


class RunChangedError(InputError):
    """The weights of a run were replaced or deleted after an engine loaded them."""


def load_torch_predictor(run: Run, digest: str, device: str) -> Predictor[Any, Any]:
    """Load the PyTorch predictor of a run that an engine loaded earlier, whose files have that ``digest``.

    The digest is computed after the weights are read, so a replacement in between is found as well.
    """
    from jumok import tasks

    try:
        predictor = tasks.load_predictor(run, device)
        unchanged = compute_run_digest(run) == digest
    except (InputError, OSError):
        unchanged = False
    if not unchanged:
        raise RunChangedError(
            "the files of this run were changed or deleted after it was loaded; alignments and attention "
            "maps need its weights again: reload the run (restart the server)"
        )
    return predictor
