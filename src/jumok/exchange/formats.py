"""The formats that a run can be written in; docs/export.md tells which model goes to which."""

from __future__ import annotations

import importlib
from pathlib import Path

from jumok import tasks
from jumok.errors import InputError, MissingExtra
from jumok.run import Run

__all__ = ["NAMES", "export"]

NAMES = ("hf", "ctranslate2", "onnx")


def export(
    run: Run, out: Path, to: str = "hf", *, quantization: str | None = None, compare: bool = True
) -> str | None:
    """Write a run in another format, to a folder that is made. Gives what there is to tell of it.

    ``quantization`` and ``compare`` are for CTranslate2: see :func:`jumok.exchange.ctranslate2.export`.
    """
    if to not in NAMES:
        raise InputError(f"--to {to}: it is one of {', '.join(NAMES)}; docs/export.md tells what they take")
    if quantization is not None and to != "ctranslate2":
        raise InputError(f"--quantization {quantization} is for --to ctranslate2, and --to {to} came")
    if to == "ctranslate2":
        from jumok.exchange import ctranslate2

        return ctranslate2.export(run, out, quantization, compare=compare)
    if to == "hf":
        tasks.of(run.recipe.task).load(run, "cpu").export(to, out)
        return None
    try:
        onnx = importlib.import_module("jumok.exchange.onnx")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f'--to onnx needs {error.name}, which is not installed: pip install "jumok[export]"'
        ) from error
    told = onnx.export(run, out)
    return told if isinstance(told, str) else None
