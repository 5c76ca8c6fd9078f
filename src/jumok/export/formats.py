"""Export formats of a run. docs/export.md lists the formats of each model."""

from __future__ import annotations

from pathlib import Path

from jumok.errors import InputError
from jumok.run import Run

FORMAT_NAMES = ("hf", "ctranslate2", "onnx")


def export_run(
    run: Run, output_folder: Path, format_name: str = "hf", *, quantization: str | None = None, compare: bool = True
) -> str | None:
    """Export a run to a new folder in another format. Returns a report for the user, if there is one.

    ``quantization`` and ``compare`` are for CTranslate2: see :func:`.ctranslate2.export_ctranslate2`.
    """
    if format_name not in FORMAT_NAMES:
        raise InputError(
            f"--format {format_name}: it is one of {', '.join(FORMAT_NAMES)}; docs/export.md describes them"
        )
    if quantization is not None and format_name != "ctranslate2":
        raise InputError(f"--quantization {quantization} needs --format ctranslate2, not --format {format_name}")
    if format_name == "ctranslate2":
        from jumok.export import ctranslate2

        return ctranslate2.export_ctranslate2(run, output_folder, quantization, compare=compare)
    if format_name == "hf":
        from jumok.tasks import load_predictor

        load_predictor(run, "cpu").export(format_name, output_folder)
        return None
    from jumok.export import onnx

    return onnx.export_onnx(run, output_folder)
