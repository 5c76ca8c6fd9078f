"""``jumok export`` and ``jumok convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from jumok.cli.options import RunArgument, ctranslate2_option
from jumok.cli.terminal import build_console
from jumok.files import check_not_input


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    format_name: Annotated[
        Literal["hf", "ctranslate2", "onnx"],
        typer.Option("--format", help="Output format. hf is Hugging Face. See docs/export.md."),
    ] = "hf",
    quantization: Annotated[
        str | None, ctranslate2_option(help="Quantization: int8, float16, … Defaults to float32.")
    ] = None,
    verify: Annotated[
        bool, ctranslate2_option(help="Translate validation data with both engines and compare the results.")
    ] = True,
) -> None:
    """Export a run to another format."""
    from jumok.export import formats
    from jumok.run import Run

    opened_run = Run.open(run)
    check_not_input(out, [run])
    with build_console().status("exporting"):
        report = formats.export_run(opened_run, out, format_name, quantization=quantization, compare=verify)
    print(f"written to {out}")
    if report:
        print(report)


def convert(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Hugging Face folder with pytorch_model.bin.")],
    out: Annotated[Path, typer.Option(help="Folder to create.")],
) -> None:
    """Convert Hugging Face weights from pickle to safetensors."""
    from jumok.export.safetensors_converter import convert_to_safetensors

    check_not_input(out, [folder])
    print(f"written to {convert_to_safetensors(folder, out)}")
