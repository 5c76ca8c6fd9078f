"""What builds the site: lessons, links, maths, pages made from results."""

from __future__ import annotations

import ast
import collections
import doctest
import functools
import importlib
import itertools
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jupytext
import matplotlib as mpl
import matplotlib.patches
import nbformat
import numpy as np
import pytest
import torch
import transformers
from builder import benchmarks, lessons, maths, pages, recipes, reference
from docs_parts import DOCS, ROOT
from matplotlib.figure import Figure
from sphinx.errors import SphinxError
from torch import Tensor

pytestmark = pytest.mark.long


TINY = """# %% [markdown] lang="en"
# # One and one
#
# A sum, and its root.
# %% [markdown] lang="ko"
# # 하나 더하기 하나
#
# 덧셈입니다.
# %%
print(1 + 1)
# %% [markdown] lang="en"
# And that is all.
# %% [markdown] lang="ko"
# 이것으로 끝입니다.
"""
LESSONS = lessons.find_lessons(DOCS / "lessons")
QUICK_LESSONS = ("02", "03")  # the others train models; `make docs` runs all of them, too


# Attributes of other packages that list_known_names does not find.
OTHER_ATTRIBUTES = (
    *("_attn_implementation", "cls_token_id", "cross_attentions", "decoder_attentions", "disable_progress_bar"),
    *("encoder_attentions", "from_pretrained", "get_total_flops", "last_hidden_state", "max_position_embeddings"),
    *("next_functions", "sep_token_id", "set_attn_implementation"),
)


def iter_defined_names(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes, fields, constants and assigned attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=targets):
                yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


@functools.cache
def list_known_names() -> frozenset[str]:
    """The attributes that jumok defines, and those of the libraries and types that lessons use."""
    figure = Figure()
    axes = figure.subplots()
    modules = (torch, torch.autograd, torch.nn, torch.nn.functional, torch.optim, torch.special, torch.testing, np)
    modules += (np.testing, mpl, matplotlib.patches, transformers, collections, json, random, sys, time)
    objects = (figure, axes, axes.xaxis, axes.yaxis, axes.spines, axes.spines["left"], torch.optim.Adam, Path)
    objects += (torch.finfo, torch.nn.Module, Tensor, np.ndarray, random.Random, collections.Counter, str, list, dict)
    ours = (name for path in (ROOT / "src").rglob("*.py") for name in iter_defined_names(ast.parse(path.read_bytes())))
    return frozenset({*itertools.chain(*map(dir, (*modules, *objects)), ours), *OTHER_ATTRIBUTES})


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "lessons" / "01_tiny.py"
    path.parent.mkdir()
    path.write_text(TINY, encoding="utf-8")
    return path


@pytest.mark.parametrize("part", ["", ".maths", ".recipes", ".benchmarks", ".reference"])
def test_examples_in_the_docstrings(part: str) -> None:
    assert doctest.testmod(importlib.import_module(f"builder{part}")).failed == 0


# ---------------------------------------------------------------------------------------------- lessons


def test_a_lesson_becomes_two_notebooks_that_name_each_other(tiny: Path, tmp_path: Path) -> None:
    into, kept = tmp_path / "source", tmp_path / "kept"
    assert lessons.build(tiny.parent, kept, into) == ["01_tiny"]
    english = nbformat.read(into / "lessons" / "01_tiny.ipynb", 4)
    korean = nbformat.read(into / "ko" / "lessons" / "01_tiny.ipynb", 4)
    assert [one.cell_type for one in english.cells] == ["markdown", "code", "markdown"]
    assert english.cells[1].outputs[0]["text"] == "2\n"
    assert korean.cells[1].outputs == english.cells[1].outputs
    assert english.cells[0].source.startswith("# One and one\n")
    assert "[한국어](../ko/lessons/01_tiny.ipynb)" in english.cells[0].source
    assert "[English](../../lessons/01_tiny.ipynb)" in korean.cells[0].source
    assert korean.cells[2].source == "이것으로 끝입니다."
    listed = (into / "lessons" / "index.md").read_text(encoding="utf-8")
    assert "[One and one](01_tiny.ipynb)" in listed
    assert "A sum, and" in listed

    # The second time nothing is run, and no file changes.
    before = {path: path.stat().st_mtime_ns for path in into.rglob("*.ipynb")}
    (one,) = kept.iterdir()
    one.write_text(one.read_text().replace('"2\\n"', '"kept\\n"'))
    lessons.build(tiny.parent, kept, into)
    assert "kept" in (into / "lessons" / "01_tiny.ipynb").read_text()
    one.write_text(one.read_text().replace('"kept\\n"', '"2\\n"'))
    assert set(before) == set(into.rglob("*.ipynb"))


def test_an_error_names_the_lesson_and_the_cell(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(TINY.replace("print(1 + 1)", "one = 1\n# %%\nprint(one + two)"), encoding="utf-8")
    told = r"(?s)01_tiny\.py, cell 4 \(`print\(one \+ two\)`\).*NameError"
    with pytest.raises(lessons.LessonError, match=told) as error:
        lessons.build(tiny.parent, tmp_path / "kept", tmp_path / "source")
    assert "\x1b" not in str(error.value)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('lang="ko"\n# # 하', "\n# # 하"), "cell 2: a text without lang"),
        (('# %% [markdown] lang="ko"\n# 이것으로 끝입니다.\n', ""), "its last text is not there in Korean"),
        (('# %% [markdown] lang="ko"\n# # 하나 더하기 하나\n#\n# 덧셈입니다.\n', ""), "cell 2: code is invalid"),
    ],
)
def test_a_text_in_one_language_only_is_told(change: tuple[str, str], told: str) -> None:
    with pytest.raises(lessons.LessonError, match=told):
        lessons.check_languages(jupytext.reads(TINY.replace(*change), "py:percent"), "01_tiny.py")


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_text_of_every_lesson_is_there_in_both_languages(path: Path) -> None:
    notebook = jupytext.read(path)
    lessons.check_languages(notebook, path.name)
    for lang in lessons.LANGUAGES:
        assert lessons.get_title(notebook, lang)
        assert lessons.get_lead(notebook, lang)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem.startswith(QUICK_LESSONS) else pytest.mark.slow, id=path.stem)
        for path in LESSONS
    ],
)
def test_lessons_run(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "lessons"  # what a lesson writes stays in tmp_path
    folder.mkdir(parents=True)
    for file in (path, *path.parent.glob("_*.py")):
        shutil.copy(file, folder)
    notebook = jupytext.read(folder / path.name)
    lessons.execute(notebook, folder / path.name)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_attributes_that_lessons_use_exist(path: Path) -> None:
    """Most lessons take minutes to run, so a renamed attribute is found by its name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert used - list_known_names() - set(iter_defined_names(tree)) == set()


def test_the_page_of_arithmetic_runs() -> None:
    code = [cell.source for cell in jupytext.read(DOCS / "beyond.py").cells if cell.cell_type == "code"]
    exec(compile("\n".join(code), "beyond.py", "exec"), {"__name__": "beyond"})


# ------------------------------------------------------------------------------------------ pages and maths


def test_links_of_a_page_lead_to_places_of_the_site(tmp_path: Path) -> None:
    site = pages.SiteSource(tmp_path)
    text = (
        "[a](src/jumok/run.py) [b](docs/bert.md#x) [c](bench/results/runs) [d](https://x.org) "
        "![e](docs/look.png)\n```\n[f](src/jumok/run.py)\n```\n[g](bench/results/README.md)\n"
    )
    site.add("ko/index.md", text, ROOT / "README.md")
    site.add_sources()
    assert (tmp_path / "ko" / "index.md").read_text() == (
        "[a](../source/src/jumok/run.py.md) [b](../bert.md#x) [c](../recipes.md) [d](https://x.org) "
        "![e](../look.png)\n"
        "```\n[f](src/jumok/run.py)\n```\n[g](../files/bench/results/README.md)\n"
    )
    shown = (tmp_path / "source" / "src" / "jumok" / "run.py.md").read_text()
    named = shown.partition("{literalinclude} ")[2].partition("\n")[0]
    assert (tmp_path / "source" / "src" / "jumok" / named).resolve() == ROOT / "src" / "jumok" / "run.py"


def test_maths_is_mathml_and_what_is_no_latex_is_told() -> None:
    made = maths.latex_to_mathml(r"\mathrm{softmax}\left(\frac{QK^\top}{\sqrt{d}}\right)V", "block")
    assert made.startswith("<math")
    assert "<mfrac>" in made
    assert "<msqrt>" in made
    assert maths.FONT.is_file()
    with pytest.raises(SphinxError, match="no LaTeX that can be drawn"):
        maths.latex_to_mathml(r"\left( x")
    with pytest.raises(SphinxError, match=r"\\unheard of .* is nothing that can be drawn"):
        maths.latex_to_mathml(r"\unheard{x}")


def test_pages_are_made_of_results_recipes_commands_and_settings(tmp_path: Path) -> None:
    recipes.build(tmp_path)
    told = (tmp_path / "recipes-generated.txt").read_text(encoding="utf-8")
    assert "### transformer/multi30k-en-de" in told
    assert "| `transformer-multi30k-en-de` | 16,000 |" in told
    assert "BLEU 41.3" in told
    reference.build(tmp_path)
    commands = (tmp_path / "cli-generated.txt").read_text(encoding="utf-8")
    assert "## `jumok train`" in commands
    assert "--help" not in commands
    settings = (tmp_path / "settings-generated.txt").read_text(encoding="utf-8")
    assert "| `train.learning_rate` | `0.001` | peak, reached after the warm-up |" in settings
    assert ".. autofunction:: jumok.masks.causal" in (tmp_path / "api" / "masks.md").read_text(encoding="utf-8")


def test_a_benchmark_becomes_a_figure_and_a_table(tmp_path: Path) -> None:
    path = ROOT / "bench" / "results" / "training-transformer-nvidia-h200.json"
    told = json.loads(path.read_text())
    text = "\n".join(benchmarks._build_section(path, tmp_path))
    assert f"commit {told['commit']}" in text
    assert "| marian | 2.326e+05 | tokens a second |" in text
    figure = (tmp_path / "figures" / f"{path.stem}.svg").read_bytes()
    assert figure.startswith(b"<?xml")
    assert figure == benchmarks.draw_panels(told["rows"])  # reproducible
