"""Fonts that can draw a text: Hangul as Hangul, never as empty boxes.

matplotlib takes a list of font families and looks for a character in one after the other. So all it needs is
a list that covers the text; no setting is changed for good.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterable
from pathlib import Path

__all__ = ["find_font_families"]

DEFAULT_FAMILY = "DejaVu Sans"  # comes with matplotlib
# Good to read, and there on many machines; tried before whatever else is installed.
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
# Carries NanumGothic. It is looked into and never imported, for its import changes matplotlib's settings.
FONT_PACKAGE, PACKAGED_FONT = "koreanize_matplotlib", "fonts/NanumGothic.ttf"


def find_font_families(texts: Iterable[str]) -> list[str]:
    """Font families that together draw all characters of the texts, for ``font.family``.

    What no font here can draw is told in a warning, once, with what to do about it.

    >>> families(["Aufmerksamkeit"])
    ['DejaVu Sans']
    """
    missing = {c for text in texts for c in text if c.isprintable() and not c.isspace()}
    chosen = []
    for name in _iterate_candidates():
        drawn = missing & _load_characters(name)
        if drawn or name == DEFAULT_FAMILY:
            chosen.append(name)
            missing -= drawn
        if not missing:
            return chosen
    _warn_missing_glyphs("".join(sorted(missing)))
    return chosen


def _iterate_candidates() -> Iterable[str]:
    """The names of families, the better ones first; each is looked into only if those before do not do."""
    installed = _list_installed()
    yield DEFAULT_FAMILY
    yield from (name for name in PREFERRED_FAMILIES if name in installed)
    if (carried := _load_packaged_font()) is not None:
        yield carried
    yield from (name for name in installed if name != DEFAULT_FAMILY and name not in PREFERRED_FAMILIES)


def _list_installed() -> list[str]:
    from matplotlib import font_manager

    names = {font.name for font in font_manager.fontManager.ttflist}
    return sorted(name for name in names if not name.startswith("Last Resort"))  # that one has only boxes


@functools.cache
def _load_packaged_font() -> str | None:
    """The family in the Korean package, made known to matplotlib; None if that is not installed."""
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
    """All that a family can draw, in its upright face if it has one."""
    from matplotlib import font_manager

    faces = [font for font in font_manager.fontManager.ttflist if font.name == name]
    face = min(faces, key=lambda font: (font.style != "normal", font.weight != 400))
    try:
        return frozenset(map(chr, font_manager.get_font(face.fname).get_charmap()))
    except (OSError, RuntimeError, ValueError):  # a broken font draws nothing
        return frozenset()


@functools.cache
def _warn_missing_glyphs(characters: str) -> None:
    """Say once what cannot be drawn."""
    korean = any("가" <= c <= "힣" or "ㄱ" <= c <= "ㆎ" for c in characters)
    remedy = "pip install koreanize-matplotlib" if korean else "install one, of the Noto family for example"
    shown = characters if len(characters) <= 20 else f"{characters[:20]}…"
    warnings.warn(
        f"no font here draws {shown!r}, boxes stand for it: {remedy}", stacklevel=6
    )  # whoever asked for the picture
