"""Every character has a font, or somebody is told."""

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
def _nothing_told_yet():
    fonts._warn_missing_glyphs.cache_clear()
    yield
    fonts._warn_missing_glyphs.cache_clear()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with matplotlib's own fonts only."""
    monkeypatch.setattr(fonts, "_load_packaged_font", lambda: None)
    monkeypatch.setattr(fonts, "_list_installed", lambda: ["DejaVu Sans", "STIXGeneral", "cmr10"])


def drawn(names: list[str], text: str) -> bool:
    """Whether the fonts that matplotlib takes by these names have all characters."""
    paths = [font_manager.findfont(name, fallback_to_default=False) for name in names]
    known = {chr(code) for path in paths for code in font_manager.get_font(path).get_charmap()}
    return set(text) <= known


def test_latin_needs_nothing_else() -> None:
    assert find_font_families(["Größe", "naïve café, œuvre", "Ελλάδα", "Москва", "→ ␣ ▁"]) == ["DejaVu Sans"]
    assert find_font_families([]) == find_font_families([""]) == find_font_families(["\n\t \u200b"]) == ["DejaVu Sans"]


@korean
def test_hangul_is_drawn_and_no_setting_changes() -> None:
    before = dict(matplotlib.rcParams)
    text = "주목은한국어로뷁힣ㄱㅏ"
    names = find_font_families([text, "attention"])
    assert names[0] == "DejaVu Sans"
    assert len(names) == 2
    assert drawn(names, text)
    assert dict(matplotlib.rcParams) == before
    assert fonts.FONT_PACKAGE not in sys.modules  # its import would have changed them


@korean
def test_the_carried_font_is_found_on_a_machine_without_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_list_installed", lambda: ["DejaVu Sans"])
    assert find_font_families(["예문"]) == ["DejaVu Sans", "NanumGothic"]


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fonts._load_packaged_font.cache_clear()
    for name in ("no_such_package_at_all", "json", "no_such.thing"):
        monkeypatch.setattr(fonts, "FONT_PACKAGE", name)
        assert fonts._load_packaged_font() is None
        fonts._load_packaged_font.cache_clear()


@pytest.mark.usefixtures("bare")
def test_what_no_font_draws_is_told_once_with_the_remedy() -> None:
    with pytest.warns(UserWarning, match=r"no installed font has '문예'.*pip install koreanize-matplotlib"):
        assert find_font_families(["예문", "ok"]) == ["DejaVu Sans"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_font_families(["문예"])  # the same characters
    with pytest.warns(UserWarning, match=r"'漢'.*Noto"):
        find_font_families(["漢"])


@pytest.mark.usefixtures("bare")
def test_a_long_list_is_cut() -> None:
    with pytest.warns(UserWarning, match=r"'.{20}…'"):
        find_font_families(["".join(map(chr, range(0xAC00, 0xAC60)))])


def test_any_font_is_better_than_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"DejaVu Sans": "ab", "Noto Sans KR": "주목", "Aaa": "주목漢", "Zzz": "漢"}
    monkeypatch.setattr(fonts, "_load_packaged_font", lambda: None)
    monkeypatch.setattr(fonts, "_list_installed", lambda: sorted(known))
    monkeypatch.setattr(fonts, "_load_characters", lambda name: frozenset(known[name]))
    assert find_font_families(["a주"]) == ["DejaVu Sans", "Noto Sans KR"]  # a good one before any other
    assert find_font_families(["목漢"]) == ["DejaVu Sans", "Noto Sans KR", "Aaa"]


def test_a_broken_font_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str):
        raise RuntimeError

    monkeypatch.setattr(font_manager, "get_font", broken)
    assert fonts._load_characters.__wrapped__("DejaVu Sans") == frozenset()


def test_the_font_of_last_resort_does_not_count() -> None:
    assert not any("Last Resort" in name for name in fonts._list_installed())
