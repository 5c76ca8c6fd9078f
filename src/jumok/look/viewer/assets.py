"""The viewer's static files, read from the package: hosts get them as text, and no request names a path."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
from collections.abc import Sequence
from importlib.resources import files

# Each script imports only from those before it, so that they can be concatenated.
SCRIPT_NAMES = (
    "dom", "colours", "controls", "manifest", "token_text", "tiles", "weight_range", "appearance", "map_painter",
    "map_view", "maps_view", "arcs_view", "heads_view", "text_view", "minimap", "document_weights", "descriptions",
    "document_view", "overlay", "image_weights", "caption", "thumbnails", "image_view", "alignment", "audio_player",
    "spectrogram_painter", "style_panel", "speech_view", "pin_panel", "layout", "viewer", "remote",
)  # fmt: skip
BOOT_SCRIPTS = {"boot_page": ("boot_page",), "boot_file": ("saved_weights", "boot_file")}


@functools.cache
def read_asset(name: str) -> str:
    """Return the text of a static file."""
    return (files("jumok.look.viewer") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def build_script(boot_script: str | None = None) -> str:
    """Return the viewer as one ES module: its scripts concatenated, without the imports between them.

    Without a boot script it exports ``{ render }``, as anywidget requires; with the name of a
    ``boot_script`` file it starts itself.
    """
    if boot_script:
        return join_scripts([*read_scripts(), *(read_asset(f"{name}.js") for name in BOOT_SCRIPTS[boot_script])])
    return f"{join_scripts(read_scripts())}\nexport default {{ render }};\n"


def read_scripts() -> list[str]:
    """Return the viewer's scripts, in the order in which they can be concatenated."""
    return [read_asset(f"{name}.js") for name in SCRIPT_NAMES]


def join_scripts(scripts: Sequence[str]) -> str:
    """Concatenate modules to one that exports nothing."""
    text = "\n".join(re.sub(r"^import [^;]*;\n", "", script, flags=re.MULTILINE) for script in scripts)
    text = re.sub(r"^export default .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^export ", "", text, flags=re.MULTILINE)


def build_style_sheet(*, include_page: bool = False) -> str:
    """Return the style sheet; ``include_page``: with that of a whole page."""
    return read_asset("page.css") + read_asset("viewer.css") if include_page else read_asset("viewer.css")


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
