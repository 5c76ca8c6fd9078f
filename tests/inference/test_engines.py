"""Engines and export formats are imported only by their own commands."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.long


IMPORT_CODE = """
import importlib, sys
import jumok.cli.app, jumok.serve.server, jumok.export.formats, jumok.inference.batch_inference
from jumok.tasks import TASK_NAMES
for task in TASK_NAMES:
    for module in ("task", "predictor", "api"):
        importlib.import_module(f"jumok.tasks.{task}.{module}")
print(*sys.modules)
"""
OPTIONAL_MODULES = {
    "ctranslate2", "onnx", "onnxruntime", "onnxscript", "ray", "transformers",
    "jumok.export.bert", "jumok.export.ctranslate2", "jumok.export.marian", "jumok.export.onnx",
    "jumok.inference.ctranslate2_engine", "jumok.inference.onnx_engine", "jumok.inference.ray_engine",
}  # fmt: skip


def test_optional_engines_and_formats_are_not_imported_by_others() -> None:
    process = subprocess.run([sys.executable, "-c", IMPORT_CODE], capture_output=True, text=True, check=True)
    modules = set(process.stdout.split())
    assert "jumok.inference.engines" in modules
    assert modules & OPTIONAL_MODULES == set()
