"""Lessons: run once, kept, and written as two notebooks, one in English and one in Korean.

A lesson is a file ``NN_name.py`` in jupytext's percent format. Its code is written once; each of its texts
is a cell with ``lang="en"``, followed by the same with ``lang="ko"``. What a run gave is kept under a name
made of the lesson and all sources that it may depend on, so that nothing is run twice without need.
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

from builder import ROOT, put

SECONDS = 1200  # that one cell may take on a busy machine; on a quiet one, a lesson takes under 300 in all
LANGUAGES, NAMES = ("en", "ko"), ("English", "한국어")
SHARP = "%config InlineBackend.figure_formats = ['retina']"
Notebook = Any


class LessonError(Exception):
    """A lesson is not as it should be, or did not run; the message names the lesson and the cell."""


def found(folder: Path) -> list[Path]:
    """The lessons of a folder, in their order."""
    return sorted(folder.glob("[0-9][0-9]_*.py"))


def check(notebook: Notebook, name: str) -> None:
    """Every text is there in English and, right behind it, in Korean."""
    expected = LANGUAGES[0]
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            lang = cell.metadata.get("lang")
            if lang != expected:
                told = "a text without lang" if lang is None else f'a text with lang="{lang}"'
                raise LessonError(f'{name}, cell {number}: {told} came; expected lang="{expected}"')
            expected = LANGUAGES[1 - LANGUAGES.index(lang)]
        elif expected != LANGUAGES[0]:
            raise LessonError(f"{name}, cell {number}: code came; expected the Korean of the text above it")
    if expected != LANGUAGES[0]:
        raise LessonError(f"{name}: its last text is not there in Korean")


def key(path: Path, sources: Iterable[Path]) -> str:
    """Of all that a lesson's outputs may depend on: itself, what lies beside it, the package, and torch."""
    import torch

    digest = hashlib.sha256(f"{sys.version} {torch.__version__}".encode())
    for one in (path, *sorted(sources)):
        digest.update(one.name.encode() + b"\0" + one.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def package() -> list[Path]:
    """The sources of jumok."""
    return [one for one in (ROOT / "src").rglob("*") if one.suffix in (".py", ".yaml", ".js", ".css")]


def sources(folder: Path) -> list[Path]:
    """What lessons depend on besides themselves: what they share, and jumok."""
    return [*folder.glob("_*.py"), *package()]


def executed(path: Path, kept: Path, sources: Iterable[Path]) -> Notebook:
    """A lesson with its outputs, from ``kept`` if it was run as it is, with these sources."""
    file = kept / f"{path.stem}-{key(path, sources)}.ipynb"
    if file.is_file():
        return nbformat.read(file, as_version=4)
    notebook, begin = jupytext.read(path), time.monotonic()
    run(notebook, path)
    for old in kept.glob(f"{path.stem}-*.ipynb"):
        old.unlink()
    put(file, nbformat.writes(notebook))
    print(f"{path.name}: run in {time.monotonic() - begin:.0f} s", flush=True)
    return notebook


def run(notebook: Notebook, path: Path) -> None:
    """Run all cells of a notebook in a new kernel; its outputs are put into it."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # or threads of torch wait for each other by spinning
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SHARP))
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
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
                raise LessonError(f"{path.name}, cell {number} (`{begin}`): {_plain(str(error))}") from None
    del notebook.cells[0]


def in_language(notebook: Notebook, lang: str, other: str) -> Notebook:
    """The notebook with its texts in one language; ``other`` is the address of the other one."""
    made = tidy(notebook, lang)
    made.cells = [one for one in made.cells if one.metadata.get("lang") in (None, lang)]
    first = next(one for one in made.cells if one.cell_type == "markdown")
    heading, _, rest = first.source.partition("\n")
    name = NAMES[1 - LANGUAGES.index(lang)]
    first.source = f"{heading}\n\n{{.language}}\n[{name}]({other})\n{rest}"
    for cell in made.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((\d\d_\w+)\.py", r"](\1.ipynb", cell.source)  # to another lesson
            if lang != LANGUAGES[0] and cell is not first:
                cell.source = cell.source.replace("](../", "](../../")  # one folder further down
    return made


def tidy(notebook: Notebook, name: str) -> Notebook:
    """A copy that is the same whenever it is made, its figures as large as they were meant to be."""
    made = copy.deepcopy(notebook)
    made.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(made.cells):
        cell.id = f"{name}-{number}"  # else a new one each time
        for output in cell.get("outputs", ()):
            size = output.get("metadata", {}).get("image/png", {})
            if "width" in size:
                cell.metadata["mystnb"] = {"image": {"width": f"{size['width']}px"}}
    return made


def title(notebook: Notebook, lang: str) -> str:
    """The heading of its first text."""
    first = next(one.source for one in notebook.cells if one.metadata.get("lang") == lang)
    if not (heading := re.match(r"# (.+)", first)):
        raise LessonError(f'the first text with lang="{lang}" does not begin with a heading, "# …"')
    return heading[1].strip()


def lead(notebook: Notebook, lang: str) -> str:
    """The first paragraph below that heading; none if there is something else."""
    first = next(one.source for one in notebook.cells if one.metadata.get("lang") == lang)
    paragraphs = [part.strip() for part in first.split("\n\n")]
    plain = [part for part in paragraphs if part and not re.match(r"[#|>`!\-]", part)]
    return " ".join(plain[0].split()) if plain else ""


def build(folder: Path, kept: Path, into: Path, only: Sequence[str] | None = None) -> list[str]:
    """Write the lessons of a folder, in both languages, and the pages that list them; their names.

    ``only`` are the numbers of those that are wanted.
    """
    paths = [path for path in found(folder) if only is None or path.stem[:2] in only]
    for path in paths:
        check(jupytext.read(path), path.name)  # all of them, before minutes are spent on the first
    depends = sources(folder)
    notebooks = {path.stem: executed(path, kept, depends) for path in paths}
    for name, notebook in notebooks.items():
        for lang, there in zip(LANGUAGES, ("../ko/lessons", "../../lessons"), strict=True):
            page = in_language(notebook, lang, f"{there}/{name}.ipynb")
            put(_folder(into, lang) / f"{name}.ipynb", nbformat.writes(page))
    for lang, heading, text in zip(LANGUAGES, ("Lessons", "강의"), LISTED, strict=True):
        lines = [f"# {heading}", "", text, ""]
        for name, notebook in notebooks.items():
            lines += [f"**[{title(notebook, lang)}]({name}.ipynb)**  ", lead(notebook, lang), ""]
        lines += ["```{toctree}", ":hidden:", *notebooks, "```", ""]
        put(_folder(into, lang) / "index.md", "\n".join(lines))
    return list(notebooks)


def page(path: Path, kept: Path, into: Path, depends: Iterable[Path] = ()) -> None:
    """Write a page that is run as lessons are, in one language."""
    notebook = executed(path, kept, depends)
    put(into / f"{path.stem}.ipynb", nbformat.writes(tidy(notebook, path.stem)))


LISTED = (
    "Attention from its reasons to its uses. Every figure and number was made by the code beside it when "
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


def _plain(text: str) -> str:
    """Without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
