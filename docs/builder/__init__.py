"""Builds the site: pages, pages generated from the sources, and executed lessons."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BUILD = Path(os.environ.get("DOCS_BUILD", ROOT / "build" / "docs"))  # set by a test

written_paths: set[Path] = set()  # files written by this process; others in the site are outdated


def write_if_changed(path: Path, text: str | bytes) -> Path:
    """Write a file, unless it has this content already, so that it is not built again."""
    data = text.encode() if isinstance(text, str) else text
    written_paths.add(path)
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return path


def table(heads: list[str], rows: list[list[str]]) -> str:
    r"""A table in Markdown.

    >>> print(table(["a", "b"], [["1", "x|y"]]))
    | a | b |
    | --- | --- |
    | 1 | x\|y |
    """
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
