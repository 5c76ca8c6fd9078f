"""The viewer's own files, read from the package: hosts take them as texts, and no request names a path."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib.resources import files

__all__ = ["joined", "modules", "read", "script", "style"]

# Each imports only what stands before it, so that all of them can be put one after the other.
MODULES = (
    *("dom", "colours", "about", "text", "tiles", "look", "cells", "map", "arcs", "heads", "reading"),
    *("overview", "passage", "telling", "document", "overlay", "gaze", "caption"),
    *("strip", "picture", "alignment", "sound", "spectrum", "style", "speech", "panel", "frame", "viewer"),
    "remote",
)


@functools.cache
def read(name: str) -> str:
    """One of our files."""
    return (files("jumok.look") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def script(boot: str | None = None) -> str:
    """The viewer as one ES module: its files joined, without the imports between them.

    Alone it exports ``{ render }``, as anywidget wants it; with the name of a ``boot`` file it starts itself.
    """
    if boot:
        return joined([*modules(), read(f"{boot}.js")])
    return f"{joined(modules())}\nexport default {{ render }};\n"


def modules() -> list[str]:
    """The viewer's files, in the order in which they can be joined."""
    return [read(f"{name}.js") for name in MODULES]


def joined(parts: Sequence[str]) -> str:
    """Modules as one that exports nothing."""
    text = "\n".join(re.sub(r"^import [^;]*;\n", "", part, flags=re.MULTILINE) for part in parts)
    text = re.sub(r"^export default .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^export ", "", text, flags=re.MULTILINE)


def style(*, page: bool = False) -> str:
    """The style sheet; with that of a page of our own."""
    return read("page.css") + read("viewer.css") if page else read("viewer.css")
