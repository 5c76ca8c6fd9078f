"""What builds the site: lessons, links, maths, pages made from results."""

from __future__ import annotations

import doctest
import importlib
import json
import shutil
from pathlib import Path

import jupytext
import nbformat
import pytest
from builder import benchmarks, lessons, maths, pages, recipes, reference
from docs_parts import DOCS, ROOT
from sphinx.errors import SphinxError

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
RUN_HERE = ("02", "03")  # the quickest; `make docs` runs all of them


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


@pytest.mark.parametrize("path", lessons.find_lessons(DOCS / "lessons"), ids=lambda path: path.stem)
def test_every_text_of_every_lesson_is_there_in_both_languages(path: Path) -> None:
    notebook = jupytext.read(path)
    lessons.check_languages(notebook, path.name)
    for lang in lessons.LANGUAGES:
        assert lessons.get_title(notebook, lang)
        assert lessons.get_lead(notebook, lang)


@pytest.mark.parametrize("number", RUN_HERE)
def test_lessons_run(number: str, tmp_path: Path) -> None:
    found = [path for path in lessons.find_lessons(DOCS / "lessons") if path.stem.startswith(number)]
    if not found:
        pytest.skip(f"there is no lesson {number}")
    for path in (found[0], *found[0].parent.glob("_*.py")):
        shutil.copy(path, tmp_path)  # what it makes stays there
    notebook = jupytext.read(tmp_path / found[0].name)
    lessons.execute(notebook, tmp_path / found[0].name)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)


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
