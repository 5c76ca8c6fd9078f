"""Fonts that can draw a text: Hangul as Hangul, never as empty boxes.

matplotlib takes a list of font families and searches them in order for each character. It needs only a list
that covers the text; no setting is changed permanently.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterable
from pathlib import Path

DEFAULT_FAMILY = "DejaVu Sans"  # comes with matplotlib
# Readable and widely available; tried before other installed fonts.
PREFERRED_FAMILIES = (
    "Noto Sans KR",
    "Noto Sans CJK KR",
    "Apple SD Gothic Neo",
    "Malgun Gothic",
    "NanumGothic",
    "Noto Sans JP",
    "Noto Sans CJK JP",
    "Hiragino Sans",
    "Yu Gothic",
    "Noto Sans SC",
    "Noto Sans CJK SC",
    "PingFang SC",
    "Microsoft YaHei",
    "Noto Sans",
    "Arial Unicode MS",
)
# Contains NanumGothic. The package is searched but never imported: its import changes matplotlib's settings.
FONT_PACKAGE, PACKAGED_FONT = "koreanize_matplotlib", "fonts/NanumGothic.ttf"


def find_font_families(texts: Iterable[str]) -> list[str]:
    """Return font families that together draw all characters of the texts, for ``font.family``.

    Characters that no font can draw are reported in a warning, once, with a remedy.

    >>> find_font_families(["Aufmerksamkeit"])
    ['DejaVu Sans']
    """
    missing = {c for text in texts for c in text if c.isprintable() and not c.isspace()}
    selected = []
    for name in _iterate_candidates():
        covered = missing & _load_characters(name)
        if covered or name == DEFAULT_FAMILY:
            selected.append(name)
            missing -= covered
        if not missing:
            return selected
    _warn_missing_glyphs("".join(sorted(missing)))
    return selected


def _iterate_candidates() -> Iterable[str]:
    """Iterate over the names of families, preferred ones first; each is loaded only if it is needed."""
    installed = _list_installed()
    yield DEFAULT_FAMILY
    yield from (name for name in PREFERRED_FAMILIES if name in installed)
    if (packaged := _load_packaged_font()) is not None:
        yield packaged
    yield from (name for name in installed if name != DEFAULT_FAMILY and name not in PREFERRED_FAMILIES)


def _list_installed() -> list[str]:
    from matplotlib import font_manager

    names = {font.name for font in font_manager.fontManager.ttflist}
    return sorted(name for name in names if not name.startswith("Last Resort"))  # it has only boxes


@functools.cache
def _load_packaged_font() -> str | None:
    """Register the font of the Korean package with matplotlib. Returns its family; None if missing."""
    from matplotlib import font_manager

    try:
        package = importlib.util.find_spec(FONT_PACKAGE)
    except (ImportError, ValueError):
        return None
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / PACKAGED_FONT
        if path.is_file():
            font_manager.fontManager.addfont(path)
            return font_manager.get_font(str(path)).family_name
    return None


@functools.cache
def _load_characters(name: str) -> frozenset[str]:
    """Return all characters of a family, in its upright face if it has one."""
    from matplotlib import font_manager

    faces = [font for font in font_manager.fontManager.ttflist if font.name == name]
    face = min(faces, key=lambda font: (font.style != "normal", font.weight != 400))
    try:
        return frozenset(map(chr, font_manager.get_font(face.fname).get_charmap()))
    except (OSError, RuntimeError, ValueError):  # a broken font draws nothing
        return frozenset()


@functools.cache
def _warn_missing_glyphs(characters: str) -> None:
    """Warn once about characters that cannot be drawn."""
    is_korean = any("가" <= c <= "힣" or "ㄱ" <= c <= "ㆎ" for c in characters)
    remedy = "pip install koreanize-matplotlib" if is_korean else "install one, of the Noto family for example"
    listed = characters if len(characters) <= 20 else f"{characters[:20]}…"
    # The stack level is that of the caller of the drawing function.
    warnings.warn(f"no installed font has {listed!r}, boxes are drawn instead: {remedy}", stacklevel=6)
