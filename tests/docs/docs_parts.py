"""The pages, and what stands in them: links, blocks of code. Used by the tests of the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

KOREAN = {ROOT / "README.md": ROOT / "README.ko.md"} | {
    DOCS / page.name: page for page in sorted((DOCS / "ko").glob("*.md"))
}  # the pages that are there in both languages
PAGES = sorted({*KOREAN.keys(), *KOREAN.values(), ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")})
# Pages of the site that are made when it is built.
MADE = (
    "results.md",
    "lessons/index.md",
    "api/",
    "beyond.ipynb",
    "viewer/",
    "results-table.txt",
    "where-table.txt",
)


class Block(NamedTuple):
    page: str
    line: int
    kind: str  # what stands behind the ```
    text: str


def blocks(page: Path) -> list[Block]:
    """The blocks of code of a page."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.S | re.M)
    return [Block(page.name, text[: one.start()].count("\n") + 1, one[1].strip(), one[2]) for one in found]


def every_block() -> list[Block]:
    return [one for page in PAGES for one in blocks(page)]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it.

    >>> slug("How `requests` are answered, today")
    'how-requests-are-answered-today'
    """
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(one) for one in re.findall(r"^#+ (.+)$", prose(page), re.M)}
