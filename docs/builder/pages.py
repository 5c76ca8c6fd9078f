"""Pages as they are: gathered from docs/, their links made to lead to places of the site.

The same Markdown is read on a forge, where links lead to files. In the site a link to a page stays one, a
link to a source file leads to a page that shows it, one to another file to a copy of it, and one to a folder
to the page that tells of what it holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from builder import DOCS, ROOT, put

LINK = re.compile(r"(?<=\])\((?P<to>[^()\s]+)\)")
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1`*\s*$", re.S | re.M)
FOLDERS = {
    "docs/lessons": "lessons/index.md",
    "bench/results/runs": "recipes.md",
    "bench/results": "benchmarks.md",
    "bench": "benchmarks.md",
}
PAGES = {"README.md": "index.md", "README.ko.md": "ko/index.md"}
PICTURES = (".png", ".svg", ".jpg")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with its prose changed, and its blocks of code as they are."""
    parts, at = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(text[at:])])


class Gathered:
    """What has been gathered into a folder that Sphinx reads."""

    def __init__(self, into: Path) -> None:
        self.into = into
        self.shown: set[str] = set()  # source files that a page is made for

    def pages(self) -> None:
        """Everything under docs/ that is a page or a picture."""
        for path in sorted(DOCS.rglob("*")):
            inside = path.relative_to(DOCS)
            if inside.parts[0] in ("builder", "lessons") or not path.is_file():
                continue
            if path.suffix == ".md":
                self.add(inside.as_posix(), path.read_text(encoding="utf-8"), path)
            elif path.suffix in PICTURES:
                put(self.into / inside, path.read_bytes())

    def add(self, name: str, text: str, origin: Path) -> None:
        """A page of the site, from text whose links are those of the file ``origin``."""
        linked = outside_code(text, lambda prose: self._linked(prose, name, origin))
        root = os.path.relpath(ROOT, (self.into / name).parent)
        put(self.into / name, linked.replace("{literalinclude} ../", f"{{literalinclude}} {root}/"))

    def sources(self) -> None:
        """A page for every source file that another page names."""
        for name in sorted(self.shown):
            above = "../" * (name.count("/") + 1)
            kind = {".py": "python", ".yaml": "yaml", ".js": "js"}.get(Path(name).suffix, "text")
            shown = os.path.relpath(ROOT / name, (self.into / "source" / name).parent)
            put(
                self.into / "source" / f"{name}.md",
                f"---\norphan: true\n---\n# {name}\n\n[jumok]({above}index.md)\n\n"
                f"```{{literalinclude}} {shown}\n:language: {kind}\n```\n",
            )

    def _linked(self, text: str, name: str, origin: Path) -> str:
        def changed(link: re.Match[str]) -> str:
            to, hash_, part = link["to"].partition("#")
            if "://" in to or to.startswith("mailto:") or not to:
                return link[0]
            path = Path(os.path.normpath(origin.parent / to))
            if not path.exists():
                return link[0]  # to a page that is made, or nowhere: Sphinx tells
            there = self._place(path.relative_to(ROOT).as_posix(), path)
            return f"({os.path.relpath(there, Path(name).parent)}{hash_}{part})"

        return LINK.sub(changed, text)

    def _place(self, name: str, path: Path) -> str:
        """Where in the site a file of the repository is."""
        if path.is_dir():
            return FOLDERS.get(name, "index.md")
        if name in PAGES:
            return PAGES[name]
        if name.startswith("docs/"):
            return name.removeprefix("docs/")
        if path.suffix in (".py", ".yaml", ".js"):
            self.shown.add(name)
            return f"source/{name}.md"
        if path.suffix == ".md":
            self.add(f"files/{name}", f"---\norphan: true\n---\n{path.read_text(encoding='utf-8')}", path)
            return f"files/{name}"
        put(self.into / "files" / name, path.read_bytes())
        return f"files/{name}"


def section(text: str, heading: str) -> str:
    """What stands under a heading of a page, up to the next of its level."""
    level = heading.split()[0]
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^{level} |\Z)", text, re.S | re.M)
    if found is None:
        raise ValueError(f"there is no heading {heading!r}")
    return found[1].strip()


def first_table(text: str) -> str:
    """The first table of a text."""
    found = re.search(r"(?:^\|.*\n)+", text, re.M)
    if found is None:
        raise ValueError("there is no table")
    return found[0]
