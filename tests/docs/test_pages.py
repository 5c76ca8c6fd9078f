"""The pages of docs/ and the READMEs: their links, code, commands and quoted errors are right."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_parts import DOCS, KOREAN, MADE, PAGES, ROOT, Block, anchors, blocks, every_block, prose
from typer._click.exceptions import MissingParameter
from typer.main import get_command

from jumok import recipe
from jumok.cli.app import app
from jumok.errors import InputError

pytestmark = pytest.mark.long


PYTHON = [one for one in every_block() if one.kind == "python"]
# Blocks that need a trained run, a server, or a model or file of the reader's are compiled only.
NEEDS = re.compile(r"runs/|httpx2|from_pretrained|ctranslate2|Path\(|\bmodel\b|\bseen\b|show\.save|jumok\.load")


# ------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for to in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
        path, _, anchor = to.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        if path.startswith(MADE) and page.parent == DOCS:
            continue
        there = Path(os.path.normpath(page.parent / path)) if path else page
        if not there.exists():
            missing.append(to)
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            missing.append(f"{to}: no such heading; there are {sorted(anchors(there))}")
    assert not missing


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set(re.findall(r"^[\w/-]+$", (DOCS / "index.md").read_text(encoding="utf-8"), re.M))
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= listed


# ------------------------------------------------------------------------------------------------ python


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page}:{block.line}")
def test_python_compiles_and_what_can_run_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(block.text, f"{block.page}:{block.line}", "exec")
    if block.page == "slips.md" or not NEEDS.search(block.text):
        monkeypatch.chdir(tmp_path)
        exec(code, {"__name__": "page"})


def test_some_blocks_do_run() -> None:
    run = [one for one in PYTHON if one.page == "slips.md" or not NEEDS.search(one.text)]
    assert len(run) >= 10
    assert any(one.page == "tour.md" for one in run)


# ---------------------------------------------------------------------------------------------- commands


def _commands() -> Iterator[tuple[str, int, list[str]]]:
    """Every jumok command of a page: in its blocks of shell, and in its tables and sentences."""
    for page in PAGES:
        lines = [
            (one.line + number, line)
            for one in blocks(page)
            if one.kind in ("", "sh", "console")
            for number, line in enumerate(one.text.replace("\\\n", " ").splitlines(), 1)
        ]
        lines += [(0, code) for code in re.findall(r"`(jumok [^`…]+)`", prose(page))]
        for number, line in lines:
            said = re.match(r"^(?:\$ )?(?:torchrun .*?-m )?(jumok .*)", line.strip())
            if said is None or "[--" in line:  # what may be left out stands in brackets there
                continue
            words = shlex.split(said[1], comments=True)
            for one in _apart(words):
                yield page.name, number, one


def _apart(words: list[str]) -> Iterator[list[str]]:
    """One command after the other, what is piped or written somewhere left out."""
    ends = [n for n, word in enumerate(words) if word in ("&&", "|", ">")] + [len(words)]
    if words[: ends[0]]:
        yield words[1 : ends[0]]
    for end, after in itertools.pairwise(ends):
        if words[end] == "&&" and words[end + 1] == "jumok":
            yield words[end + 2 : after]


# Each once: the sentences that name a command again are many.
COMMANDS = [
    (page, line, words)
    for words, (page, line) in {tuple(words): (page, line) for page, line, words in _commands()}.items()
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 100
    assert {words[0] for _, _, words in COMMANDS if words} >= {
        "train",
        "run",
        "eval",
        "look",
        "serve",
        "export",
    }


@pytest.mark.parametrize(("page", "line", "words"), COMMANDS, ids=[f"{one[0]}:{one[1]}" for one in COMMANDS])
def test_commands_are_those_of_the_program(page: str, line: int, words: tuple[str, ...]) -> None:
    words = tuple(word for word in words if word not in ("…", "..."))
    if len(words) < 2 or words[0].isupper():
        return
    command = get_command(app)
    for name in words[:2] if words[0] == "data" else words[:1]:
        assert name in command.commands, f"{page}:{line}: no command {name}"
        command = command.commands[name]
    rest = list(words[2:] if words[0] == "data" else words[1:])
    try:
        command.make_context(words[0], rest)  # an option that is not there raises
    except MissingParameter:
        assert line == 0, f"{page}:{line}: something is missing"  # a sentence may name a part of a command
    if words[0] == "train" and not words[1].endswith((".yaml", "NAME", "RECIPE")):
        keys = [word for word in words[2:] if "=" in word and not word.startswith("-")]
        try:
            recipe.load(words[1], [key for key in keys if "…" not in key])
        except InputError as error:
            pytest.fail(f"{page}:{line}: {error}")


# ------------------------------------------------------------------------------------------------ errors


@functools.cache
def _messages() -> list[str]:
    """All texts of the sources, what is filled in as …"""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(x.value if isinstance(x, ast.Constant) else "…" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


QUOTED = blocks(DOCS / "errors.md")


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: str(block.line))
def test_quoted_errors_are_messages_of_the_program(block: Block) -> None:
    parts = re.split("…+", block.text.strip())
    asked = re.compile(".*?".join(map(re.escape, parts)), re.S)
    likely = [one for one in _messages() if all(part in one for part in parts)]
    assert any(asked.search(one) for one in likely), block.text


def test_every_quoted_error_has_words_of_its_own() -> None:
    assert len(QUOTED) > 25
    assert all(max(map(len, block.text.split("…"))) > 12 for block in QUOTED)


# ------------------------------------------------------------------------------------------- two languages


def _figures(page: Path) -> list[list[str]]:
    """The numbers and commands of each line of a page's tables; each language has its own order within it."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [sorted(re.findall(r"`[^`]+`|\d[\d,.]*\d|\d", line)) for line in lines]


def _pictures(page: Path) -> list[Path]:
    found = re.findall(r"!\[.*?\]\((.+?)\)", page.read_text(encoding="utf-8"))
    return [(page.parent / one).resolve() for one in found]


def _code(page: Path) -> list[int]:
    """The lines of each block of code; what Sphinx puts in has none."""
    return [one.text.count("\n") for one in blocks(page) if not one.kind.startswith("{")]


@pytest.mark.parametrize(("english", "korean"), KOREAN.items(), ids=lambda page: page.name)
def test_a_korean_page_has_the_figures_of_the_english_one(english: Path, korean: Path) -> None:
    for one, other in zip(_figures(english), _figures(korean), strict=True):
        assert one == other
    assert _pictures(english) == _pictures(korean)
    assert _code(english) == _code(korean)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "README.ko.md"], ids=lambda page: page.name)
def test_the_readme_is_short_and_answers_the_first_questions(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lead = text.partition("\n## ")[0]
    assert len(lead.splitlines()) <= 30
    assert len(_pictures(page)) == 1
    (commands,) = blocks(page)
    assert "jumok train transformer data.train=my.tsv" in commands.text  # how do I train on my TSV?
    assert "jumok look path/to/a/hugging-face-folder" in commands.text  # how do I see my model's attention?
