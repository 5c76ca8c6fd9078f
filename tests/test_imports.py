"""Who may import whom, and what `import jumok` may cost."""

import ast
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import jumok

SRC = Path(__file__).parents[1] / "src"

# The rooms on the left may import, of ours, only the rooms on the right (and themselves).
ONLY = {
    "attention": {"errors"},
    "models": {"attention", "batch", "annotated", "pictures", "speech"},
}
# The rooms on the left may be imported, of ours, only by the rooms on the right (and themselves).
ONLY_BY = {
    "cli": {"__main__"},  # so that `python -m jumok` works
    "serve": {"cli"},  # someone has to start it
}


def imported(path: Path, src: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of all that a file imports, wherever in the file it does so."""
    package = path.relative_to(src).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            for alias in node.names:
                yield node.lineno, ".".join([*above, *filter(None, [node.module]), alias.name])


def violations(src: Path) -> list[str]:
    """One line for each import in src/jumok that the rules forbid."""
    found = []
    for path in sorted(src.glob("jumok/**/*.py")):
        here = path.relative_to(src / "jumok").with_suffix("").parts[0]
        for line, name in imported(path, src):
            top, _, rest = name.partition(".")
            there = rest.partition(".")[0]  # "" is `import jumok`: everything at once
            if top != "jumok" or there == here:
                continue
            if (here in ONLY and there not in ONLY[here]) or (
                there in ONLY_BY and here not in ONLY_BY[there]
            ):
                found.append(f"{path.relative_to(src)}:{line} imports {name}")
    return found


def test_every_import_keeps_to_the_rules() -> None:
    assert list(SRC.glob("jumok/attention/*.py")), "nothing to check: the sources have moved"
    assert violations(SRC) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("attention/core.py", "import jumok"),
        ("attention/core.py", "from jumok import attend"),
        ("attention/core.py", "from jumok.models.bert import Bert"),
        ("attention/core.py", "from ..models import bert"),
        ("attention/core.py", "from .. import batch"),
        ("attention/kernels/additive.py", "from ...look import watch"),
        ("attention/core.py", "def later():\n    import jumok.data.text"),
        ("models/bert.py", "from jumok.errors import JumokError"),
        ("models/bert.py", "from jumok.training import loop"),
        ("data/text.py", "from jumok import cli"),
        ("look/page.py", "import jumok.serve.app as app"),
        ("__init__.py", "from . import serve"),
    ],
)
def test_the_checker_sees_a_forbidden_import(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / "jumok" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("attention/core.py", "import torch"),
        ("attention/core.py", "from ..errors import MaskError"),
        ("attention/core.py", "from . import masks"),
        ("attention/kernels/additive.py", "from jumok.attention import masks"),
        ("models/bert.py", "from jumok.attention.heads import MultiHead"),
        ("models/bert.py", "from jumok.batch import TextBatch"),
        ("serve/app.py", "from .batcher import Batcher"),
        ("cli.py", "from jumok.serve import app"),
        ("__init__.py", "from .attention.core import attend"),
    ],
)
def test_the_checker_lets_a_good_import_pass(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / "jumok" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert violations(tmp_path) == []


def test_importing_jumok_imports_nothing_heavy_that_torch_does_not() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import jumok
heavy = {"matplotlib", "transformers", "triton", "onnx"}
print(*sorted(heavy & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", jumok.__all__)
def test_every_public_name_is_there_and_has_a_docstring(name: str) -> None:
    thing = getattr(jumok, name)
    if isinstance(thing, types.ModuleType | types.FunctionType | type):
        doc = thing.__doc__ or ""
        # A dataclass without a docstring is given its signature for one: that does not count.
        assert doc.strip()
        assert not doc.startswith(f"{name}(")
