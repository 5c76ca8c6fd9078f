"""Pages of docs/, with links adapted to the site.

The same Markdown is read on a forge, where links lead to files. In the site, a link to a source file leads to
a page that shows it, a link to another file to a copy of it, and a link to a folder to the page about it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from builder import DOCS, ROOT, write_if_changed

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


def map_prose(text: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to a text outside of its code blocks."""
    parts, at = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(text[at:])])


class SiteSource:
    """The folder that Sphinx reads."""

    def __init__(self, into: Path) -> None:
        self.into = into
        self.shown: set[str] = set()  # source files that have a page

    def add_pages(self) -> None:
        """Add all pages and images of docs/."""
        for path in sorted(DOCS.rglob("*")):
            inside = path.relative_to(DOCS)
            if inside.parts[0] in ("builder", "lessons") or not path.is_file():
                continue
            if path.suffix == ".md":
                self.add(inside.as_posix(), path.read_text(encoding="utf-8"), path)
            elif path.suffix in PICTURES:
                write_if_changed(self.into / inside, path.read_bytes())

    def add(self, name: str, text: str, origin: Path) -> None:
        """Add a page. The links of its text are relative to the file ``origin``."""
        linked = map_prose(text, lambda prose: self._adapt_links(prose, name, origin))
        root = os.path.relpath(ROOT, (self.into / name).parent)
        text = linked.replace("{literalinclude} ../", f"{{literalinclude}} {root}/")
        write_if_changed(self.into / name, text)

    def add_sources(self) -> None:
        """Add a page for every source file that another page links to."""
        for name in sorted(self.shown):
            above = "../" * (name.count("/") + 1)
            kind = {".py": "python", ".yaml": "yaml", ".js": "js"}.get(Path(name).suffix, "text")
            shown = os.path.relpath(ROOT / name, (self.into / "source" / name).parent)
            write_if_changed(
                self.into / "source" / f"{name}.md",
                f"---\norphan: true\n---\n# {name}\n\n[jumok]({above}index.md)\n\n"
                f"```{{literalinclude}} {shown}\n:language: {kind}\n```\n",
            )

    def _adapt_links(self, text: str, name: str, origin: Path) -> str:
        def changed(link: re.Match[str]) -> str:
            to, hash_, part = link["to"].partition("#")
            if "://" in to or to.startswith("mailto:") or not to:
                return link[0]
            path = Path(os.path.normpath(origin.parent / to))
            if not path.exists():
                return link[0]  # a generated page, or a dead link, which Sphinx reports
            there = self._locate(path.relative_to(ROOT).as_posix(), path)
            return f"({os.path.relpath(there, Path(name).parent)}{hash_}{part})"

        return LINK.sub(changed, text)

    def _locate(self, name: str, path: Path) -> str:
        """The path in the site of a file of the repository."""
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
        write_if_changed(self.into / "files" / name, path.read_bytes())
        return f"files/{name}"


def extract_section(text: str, heading: str) -> str:
    """The text under a heading of a page, up to the next heading of its level."""
    level = heading.split()[0]
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^{level} |\Z)", text, re.S | re.M)
    if found is None:
        raise ValueError(f"there is no heading {heading!r}")
    return found[1].strip()


def extract_first_table(text: str) -> str:
    """The first table of a text."""
    found = re.search(r"(?:^\|.*\n)+", text, re.M)
    if found is None:
        raise ValueError("there is no table")
    return found[0]
