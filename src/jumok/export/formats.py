"""The formats that a run can be written in; docs/export.md tells which model goes to which."""

from __future__ import annotations

import importlib
from pathlib import Path

from jumok import tasks
from jumok.errors import InputError, MissingExtra
from jumok.run import Run

__all__ = ["FORMAT_NAMES", "export_run"]

FORMAT_NAMES = ("hf", "ctranslate2", "onnx")


def export_run(
    run: Run,
    output_folder: Path,
    format_name: str = "hf",
    *,
    quantization: str | None = None,
    compare: bool = True,
) -> str | None:
    """Write a run in another format, to a folder that is made. Gives what there is to tell of it.

    ``quantization`` and ``compare`` are for CTranslate2: see :func:`jumok.exchange.ctranslate2.export_run`.
    """
    if format_name not in FORMAT_NAMES:
        raise InputError(
            f"--to {format_name}: it is one of {', '.join(FORMAT_NAMES)}; docs/export.md tells what they take"
        )
    if quantization is not None and format_name != "ctranslate2":
        raise InputError(
            f"--quantization {quantization} is for --to ctranslate2, and --to {format_name} came"
        )
    if format_name == "ctranslate2":
        from jumok.export import ctranslate2

        return ctranslate2.export_ctranslate2(run, output_folder, quantization, compare=compare)
    if format_name == "hf":
        tasks.get_task_module(run.recipe.task).load(run, "cpu").export(format_name, output_folder)
        return None
    try:
        onnx = importlib.import_module("jumok.export.onnx")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f'--to onnx needs {error.name}, which is not installed: pip install "jumok[export]"'
        ) from error
    told = onnx.export(run, output_folder)
    return told if isinstance(told, str) else None
