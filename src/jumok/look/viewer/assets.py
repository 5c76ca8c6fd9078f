"""Scripts and styles of pages, read from the package: hosts get them as text, and no request names a path.

Scripts are ES modules. A page gets those that it needs as one module, without a build step.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import posixpath
import re
from importlib.resources import files

VIEWER_SCRIPT = "look/viewer/static/viewer.js"
IMPORT_PATTERN = re.compile(r'^import [^;]* from "([^"]*)";\n', re.MULTILINE)


@functools.cache
def read_asset(path: str) -> str:
    """Return the text of a file of the package, as in ``"look/viewer/static/viewer.css"``."""
    return files("jumok").joinpath(path).read_text(encoding="utf-8")


def find_scripts(entry: str) -> list[str]:
    """Return the paths of a script and of all that it imports, each after its own imports."""
    paths: dict[str, None] = {}

    def visit(path: str) -> None:
        if path not in paths:
            for imported in IMPORT_PATTERN.findall(read_asset(path)):
                visit(posixpath.normpath(posixpath.join(posixpath.dirname(path), imported)))
            paths[path] = None

    visit(entry)
    return list(paths)


@functools.cache
def build_script(entry: str = VIEWER_SCRIPT) -> str:
    """Join a script and all that it imports into one ES module, which has the default export of the entry.

    That of the viewer is ``{ render }``, as anywidget requires.
    """
    text = IMPORT_PATTERN.sub("", "\n".join(map(read_asset, find_scripts(entry))))
    return re.sub(r"^export (?!default)", "", text, flags=re.MULTILINE)


def build_style_sheet(*, include_page: bool = False) -> str:
    """Return the style sheet; ``include_page``: with that of a whole page."""
    names = ("page", "viewer") if include_page else ("viewer",)
    return "".join(read_asset(f"look/viewer/static/{name}.css") for name in names)


def render_page(title: str, head: str, body: str) -> str:
    """Render an HTML page; ``title`` is escaped, ``head`` and ``body`` are HTML."""
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
{head}
<body>
{body}
</body>
</html>
"""


def build_source_hash(text: str) -> str:
    """Return the source of a content security policy that allows an inline script or style with this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
