"""The examples in the docstrings of ``jumok.data`` are correct."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import jumok

ROOT = Path(jumok.__file__).parent.parent
FILES = [path for path in sorted((ROOT / "jumok/data").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_docstring_examples(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert doctest.testmod(module).failed == 0
