"""What builds the site: pages as they are, pages made from the sources, lessons that are run."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BUILD = Path(os.environ.get("DOCS_BUILD", ROOT / "build" / "docs"))  # elsewhere for a test

placed: set[Path] = set()  # all that this process put somewhere; what else lies there is old


def put(path: Path, text: str | bytes) -> Path:
    """Write a file, unless it holds this already: what did not change is not built again."""
    data = text.encode() if isinstance(text, str) else text
    placed.add(path)
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
