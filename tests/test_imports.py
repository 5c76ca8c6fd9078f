"""Which packages may import which, what `import jumok` may load, and rules of names and docstrings."""

import ast
import functools
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import jumok

pytestmark = pytest.mark.long


SRC = Path(__file__).parents[1] / "src"

# A package may import, of jumok, only these (and itself).
BASICS = {"config", "devices", "errors", "files", "progress", "text_checks"}  # modules that depend on no package
ONLY = {
    "attention": {"errors"},
    "batches": {"attention", "errors"},
    "models": {"attention", "batches", "config"},
    "decoding": {"batches", *BASICS},
    "data": {"batches", *BASICS},
    "metrics": {"data", *BASICS},
    "training": {"attention", "metrics", *BASICS},
    "look": {"attention", "data", "metrics", *BASICS},
    "run": {"recipe", *BASICS},
    "recipe": {"tasks", *BASICS},
    **dict.fromkeys(BASICS, BASICS),
}
# A package may be imported, of jumok, only by these (and itself).
ONLY_BY = {
    "cli": {"__main__"},  # so that `python -m jumok` works
    "serve": {"cli"},
    "export": {"__init__", "cli", "inference", "tasks"},
    "inference": {"cli", "export", "serve", "tasks"},
}


def list_imports(path: Path, src: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every import of a file, also inside functions."""
    package = path.relative_to(src).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            for alias in node.names:
                yield node.lineno, ".".join([*above, *filter(None, [node.module]), alias.name])


def find_violations(src: Path) -> list[str]:
    """One line for each import in src/jumok that the rules forbid."""
    violations = []
    for path in sorted(src.glob("jumok/**/*.py")):
        here = path.relative_to(src / "jumok").with_suffix("").parts[0]
        for line, name in list_imports(path, src):
            top, _, rest = name.partition(".")
            there = rest.partition(".")[0]  # "" is `import jumok`: everything at once
            if top != "jumok" or there == here:
                continue
            if (here in ONLY and there not in ONLY[here]) or (there in ONLY_BY and here not in ONLY_BY[there]):
                violations.append(f"{path.relative_to(src)}:{line} imports {name}")
    return violations


def test_every_import_follows_the_rules() -> None:
    assert list(SRC.glob("jumok/attention/*.py")), "no sources were found"
    assert find_violations(SRC) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("attention/core.py", "import jumok"),
        ("attention/core.py", "from jumok import attend"),
        ("attention/core.py", "from jumok.models.bert import Bert"),
        ("attention/core.py", "from ..models import bert"),
        ("attention/core.py", "from .. import batches"),
        ("attention/kernels/additive.py", "from ...look import watch"),
        ("attention/core.py", "def later():\n    import jumok.data.audio"),
        ("models/bert.py", "from jumok.errors import JumokError"),
        ("models/bert.py", "from jumok.training import loop"),
        ("data/audio.py", "from jumok import cli"),
        ("decoding/beam.py", "from jumok.models import transformer"),
        ("training/loop.py", "from jumok.tasks import base"),
        ("files.py", "from jumok.data import audio"),
        ("look/viewer/page.py", "import jumok.serve.app as app"),
        ("__init__.py", "from . import serve"),
    ],
)
def test_the_checker_finds_a_forbidden_import(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / "jumok" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(find_violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("attention/core.py", "import torch"),
        ("attention/core.py", "from ..errors import MaskError"),
        ("attention/core.py", "from . import masks"),
        ("attention/kernels/additive.py", "from jumok.attention import masks"),
        ("models/bert.py", "from jumok.attention.heads import MultiHead"),
        ("models/bert.py", "from jumok.batches.text import TextBatch"),
        ("serve/app.py", "from .batcher import Batcher"),
        ("cli/serving.py", "from jumok.serve import app"),
        ("__init__.py", "from .attention.core import attend"),
    ],
)
def test_the_checker_accepts_an_allowed_import(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / "jumok" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert find_violations(tmp_path) == []


IMPORT_CODE = """
import importlib, sys, torch
before = set(sys.modules)
import jumok
print(*(set(sys.modules) - before))
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


def test_heavy_and_optional_modules_are_imported_where_they_are_used() -> None:
    process = subprocess.run([sys.executable, "-c", IMPORT_CODE], capture_output=True, text=True, check=True)
    of_jumok, of_all_tasks = (set(line.split()) for line in process.stdout.splitlines())
    assert "jumok" in of_jumok
    assert of_jumok & {"matplotlib", "transformers", "triton", "onnx"} == set()
    assert "jumok.inference.engines" in of_all_tasks
    assert of_all_tasks & OPTIONAL_MODULES == set()


@pytest.mark.parametrize("name", jumok.__all__)
def test_every_public_name_is_there_and_has_a_docstring(name: str) -> None:
    thing = getattr(jumok, name)
    if isinstance(thing, types.ModuleType | types.FunctionType | type):
        doc = thing.__doc__ or ""
        # A dataclass without a docstring is given its signature for one: that does not count.
        assert doc.strip()
        assert not doc.startswith(f"{name}(")


# -------------------------------------------------------------------------------- names and docstrings


@functools.cache
def parse_modules() -> list[tuple[Path, ast.Module]]:
    """Parse all modules of the package."""
    paths = sorted(SRC.glob("jumok/**/*.py"))
    return [(path.relative_to(SRC), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def test_no_two_classes_have_the_same_name() -> None:
    locations = defaultdict(list)
    for path, tree in parse_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                locations[node.name].append(f"{path}:{node.lineno}")
    assert {name: lines for name, lines in locations.items() if len(lines) > 1} == {}


def test_every_public_function_and_class_has_a_docstring() -> None:
    missing = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in parse_modules()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert missing == []


def test_every_module_with_code_has_a_docstring() -> None:
    assert [str(path) for path, tree in parse_modules() if tree.body and not ast.get_docstring(tree)] == []
