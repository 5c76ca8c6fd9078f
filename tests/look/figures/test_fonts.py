"""Tests of the choice of fonts."""

from __future__ import annotations

import importlib.util
import sys
import warnings

import matplotlib
import pytest
from matplotlib import font_manager

from jumok.look.figures import fonts
from jumok.look.figures.fonts import find_font_families

korean = pytest.mark.skipif(
    importlib.util.find_spec(fonts.FONT_PACKAGE) is None, reason="needs pip install koreanize-matplotlib"
)


@pytest.fixture(autouse=True)
def clear_warnings():
    fonts._warn_missing_glyphs.cache_clear()
    yield
    fonts._warn_missing_glyphs.cache_clear()


@pytest.fixture
def only_default_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the fonts of matplotlib are installed."""
    monkeypatch.setattr(fonts, "_load_packaged_font", lambda: None)
    monkeypatch.setattr(fonts, "_list_installed", lambda: ["DejaVu Sans", "STIXGeneral", "cmr10"])


def covers_text(names: list[str], text: str) -> bool:
    """Return whether the fonts that matplotlib finds by these names have all characters."""
    paths = [font_manager.findfont(name, fallback_to_default=False) for name in names]
    known = {chr(code) for path in paths for code in font_manager.get_font(path).get_charmap()}
    return set(text) <= known


def test_default_font_covers_latin() -> None:
    assert find_font_families(["Größe", "naïve café, œuvre", "Ελλάδα", "Москва", "→ ␣ ▁"]) == ["DejaVu Sans"]
    assert find_font_families([]) == find_font_families([""]) == find_font_families(["\n\t \u200b"]) == ["DejaVu Sans"]


@korean
def test_hangul_is_covered_without_changing_settings() -> None:
    before = dict(matplotlib.rcParams)
    text = "주목은한국어로뷁힣ㄱㅏ"
    names = find_font_families([text, "attention"])
    assert names[0] == "DejaVu Sans"
    assert len(names) == 2
    assert covers_text(names, text)
    assert dict(matplotlib.rcParams) == before
    assert fonts.FONT_PACKAGE not in sys.modules  # its import would change them


@korean
def test_packaged_font_is_used_if_no_other_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_list_installed", lambda: ["DejaVu Sans"])
    assert find_font_families(["예문"]) == ["DejaVu Sans", "NanumGothic"]


def test_missing_font_package(monkeypatch: pytest.MonkeyPatch) -> None:
    fonts._load_packaged_font.cache_clear()
    for name in ("no_such_package_at_all", "json", "no_such.thing"):
        monkeypatch.setattr(fonts, "FONT_PACKAGE", name)
        assert fonts._load_packaged_font() is None
        fonts._load_packaged_font.cache_clear()


@pytest.mark.usefixtures("only_default_fonts")
def test_missing_glyphs_are_reported_once_with_a_remedy() -> None:
    with pytest.warns(UserWarning, match=r"no installed font has '문예'.*pip install koreanize-matplotlib"):
        assert find_font_families(["예문", "ok"]) == ["DejaVu Sans"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_font_families(["문예"])  # the same characters
    with pytest.warns(UserWarning, match=r"'漢'.*Noto"):
        find_font_families(["漢"])


@pytest.mark.usefixtures("only_default_fonts")
def test_long_list_of_missing_glyphs_is_truncated() -> None:
    with pytest.warns(UserWarning, match=r"'.{20}…'"):
        find_font_families(["".join(map(chr, range(0xAC00, 0xAC60)))])


def test_other_installed_fonts_are_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"DejaVu Sans": "ab", "Noto Sans KR": "주목", "Aaa": "주목漢", "Zzz": "漢"}
    monkeypatch.setattr(fonts, "_load_packaged_font", lambda: None)
    monkeypatch.setattr(fonts, "_list_installed", lambda: sorted(known))
    monkeypatch.setattr(fonts, "_load_characters", lambda name: frozenset(known[name]))
    assert find_font_families(["a주"]) == ["DejaVu Sans", "Noto Sans KR"]  # preferred fonts come first
    assert find_font_families(["목漢"]) == ["DejaVu Sans", "Noto Sans KR", "Aaa"]


def test_broken_font_has_no_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str):
        raise RuntimeError

    monkeypatch.setattr(font_manager, "get_font", fail)
    assert fonts._load_characters.__wrapped__("DejaVu Sans") == frozenset()


def test_last_resort_font_is_ignored() -> None:
    assert not any("Last Resort" in name for name in fonts._list_installed())
