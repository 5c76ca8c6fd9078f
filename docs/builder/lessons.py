"""Lessons: executed, cached, and written as two notebooks, one in English and one in Korean.

A lesson is a file ``NN_name.py`` in jupytext's percent format. Each text is a cell with ``lang="en"``,
followed by the same with ``lang="ko"``. Executed notebooks are cached by a hash of the lesson and the sources
that it depends on.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from builder import ROOT, write_if_changed

CELL_TIMEOUT = 1200  # seconds, on a busy machine; on an idle one, a whole lesson takes under 300
LANGUAGES, NAMES = ("en", "ko"), ("English", "한국어")
RETINA_FIGURES = "%config InlineBackend.figure_formats = ['retina']"
Notebook = Any


class LessonError(Exception):
    """A lesson is invalid or failed. The message names the lesson and the cell."""


def find_lessons(folder: Path) -> list[Path]:
    """The lessons of a folder, in their order."""
    return sorted(folder.glob("[0-9][0-9]_*.py"))


def check_languages(notebook: Notebook, name: str) -> None:
    """Check that every text is there in English and directly after it in Korean."""
    expected = LANGUAGES[0]
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            lang = cell.metadata.get("lang")
            if lang != expected:
                told = "a text without lang" if lang is None else f'a text with lang="{lang}"'
                raise LessonError(f'{name}, cell {number}: {told} is invalid; expected lang="{expected}"')
            expected = LANGUAGES[1 - LANGUAGES.index(lang)]
        elif expected != LANGUAGES[0]:
            raise LessonError(f"{name}, cell {number}: code is invalid; expected the Korean of the text above it")
    if expected != LANGUAGES[0]:
        raise LessonError(f"{name}: its last text is not there in Korean")


def compute_key(path: Path, sources: Iterable[Path]) -> str:
    """Hash of everything that the outputs of a lesson depend on."""
    import torch

    digest = hashlib.sha256(f"{sys.version} {torch.__version__}".encode())
    for one in (path, *sorted(sources)):
        digest.update(one.name.encode() + b"\0" + one.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def list_package_files() -> list[Path]:
    """The sources of jumok."""
    return [one for one in (ROOT / "src").rglob("*") if one.suffix in (".py", ".yaml", ".js", ".css")]


def list_dependencies(folder: Path) -> list[Path]:
    """The files that all lessons depend on: their shared code, and jumok."""
    return [*folder.glob("_*.py"), *list_package_files()]


def execute_cached(path: Path, cache: Path, sources: Iterable[Path]) -> Notebook:
    """A lesson with its outputs, from the folder ``cache`` if nothing has changed."""
    file = cache / f"{path.stem}-{compute_key(path, sources)}.ipynb"
    if file.is_file():
        return nbformat.read(file, as_version=4)
    notebook, begin = jupytext.read(path), time.monotonic()
    execute(notebook, path)
    for old in cache.glob(f"{path.stem}-*.ipynb"):
        old.unlink()
    write_if_changed(file, nbformat.writes(notebook))
    print(f"{path.name}: run in {time.monotonic() - begin:.0f} s", flush=True)
    return notebook


def execute(notebook: Notebook, path: Path) -> None:
    """Execute all cells of a notebook in a new kernel."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # or threads of torch wait for each other by spinning
    notebook.cells.insert(0, nbformat.v4.new_code_cell(RETINA_FIGURES))
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            try:
                client.execute_cell(cell, number)
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                begin = cell.source.strip().partition("\n")[0]
                message = _strip_colours(str(error))
                raise LessonError(f"{path.name}, cell {number} (`{begin}`): {message}") from None
    del notebook.cells[0]


def select_language(notebook: Notebook, lang: str, other: str) -> Notebook:
    """The notebook in one language; ``other`` is the path of the other one."""
    result = normalize_notebook(notebook, lang)
    result.cells = [one for one in result.cells if one.metadata.get("lang") in (None, lang)]
    first = next(one for one in result.cells if one.cell_type == "markdown")
    heading, _, rest = first.source.partition("\n")
    name = NAMES[1 - LANGUAGES.index(lang)]
    first.source = f"{heading}\n\n{{.language}}\n[{name}]({other})\n{rest}"
    for cell in result.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((\d\d_\w+)\.py", r"](\1.ipynb", cell.source)  # to another lesson
            if lang != LANGUAGES[0] and cell is not first:
                cell.source = cell.source.replace("](../", "](../../")  # one folder further down
    return result


def normalize_notebook(notebook: Notebook, name: str) -> Notebook:
    """A reproducible copy with the intended sizes of figures."""
    result = copy.deepcopy(notebook)
    result.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(result.cells):
        cell.id = f"{name}-{number}"  # else a new one each time
        for output in cell.get("outputs", ()):
            size = output.get("metadata", {}).get("image/png", {})
            if "width" in size:
                cell.metadata["mystnb"] = {"image": {"width": f"{size['width']}px"}}
    return result


def get_title(notebook: Notebook, lang: str) -> str:
    """The heading of its first text."""
    first = next(one.source for one in notebook.cells if one.metadata.get("lang") == lang)
    if not (heading := re.match(r"# (.+)", first)):
        raise LessonError(f'the first text with lang="{lang}" does not begin with a heading, "# …"')
    return heading[1].strip()


def get_lead(notebook: Notebook, lang: str) -> str:
    """The first paragraph below that heading; none if there is something else."""
    first = next(one.source for one in notebook.cells if one.metadata.get("lang") == lang)
    paragraphs = [part.strip() for part in first.split("\n\n")]
    plain = [part for part in paragraphs if part and not re.match(r"[#|>`!\-]", part)]
    return " ".join(plain[0].split()) if plain else ""


def build(folder: Path, cache: Path, into: Path, only: Sequence[str] | None = None) -> list[str]:
    """Write the lessons of a folder in both languages, and the pages that list them. Returns their names.

    ``only`` selects lessons by number.
    """
    paths = [path for path in find_lessons(folder) if only is None or path.stem[:2] in only]
    for path in paths:
        check_languages(jupytext.read(path), path.name)  # all of them, before minutes are spent on the first
    depends = list_dependencies(folder)
    notebooks = {path.stem: execute_cached(path, cache, depends) for path in paths}
    for name, notebook in notebooks.items():
        for lang, there in zip(LANGUAGES, ("../ko/lessons", "../../lessons"), strict=True):
            page = select_language(notebook, lang, f"{there}/{name}.ipynb")
            write_if_changed(_folder(into, lang) / f"{name}.ipynb", nbformat.writes(page))
    for lang, heading, text in zip(LANGUAGES, ("Lessons", "강의"), LISTED, strict=True):
        lines = [f"# {heading}", "", text, ""]
        for name, notebook in notebooks.items():
            lines += [f"**[{get_title(notebook, lang)}]({name}.ipynb)**  ", get_lead(notebook, lang), ""]
        lines += ["```{toctree}", ":hidden:", *notebooks, "```", ""]
        write_if_changed(_folder(into, lang) / "index.md", "\n".join(lines))
    return list(notebooks)


def build_page(path: Path, cache: Path, into: Path, depends: Iterable[Path] = ()) -> None:
    """Write a page in one language that is executed like a lesson."""
    notebook = execute_cached(path, cache, depends)
    write_if_changed(into / f"{path.stem}.ipynb", nbformat.writes(normalize_notebook(notebook, path.stem)))


LISTED = (
    "Attention from its reasons to its uses. Every figure and number was computed by the code beside it when "
    "this site was built. Each lesson is a file of `docs/lessons`: run it (`python docs/lessons/02_….py`) or "
    "open it as a notebook.\n\n{.language}\n[한국어](../ko/lessons/index.md)",
    "어텐션이 왜 필요한지부터 어디에 쓰이는지까지 차례로 다룹니다. "
    "그림과 숫자는 모두 이 사이트를 만들 때 바로 옆의 코드를 실행해서 얻은 것입니다. "
    "각 강의는 `docs/lessons`에 있는 파일 하나이며, "
    "그대로 실행하거나(`python docs/lessons/02_….py`) 노트북으로 열어 볼 수 있습니다."
    "\n\n{.language}\n[English](../../lessons/index.md)",
)


def _folder(into: Path, lang: str) -> Path:
    return into / ("lessons" if lang == "en" else "ko/lessons")


def _strip_colours(text: str) -> str:
    """Without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
