"""The viewer's files by themselves: texts, numbers, colours, and what none of them does."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jumok.look.viewer import assets

Show = Callable[..., Any]


def module(shown: Any, name: str, call: str) -> Any:
    """The value of an expression over one of the viewer's files, `m`."""
    source = base64.b64encode(assets.read_asset(name).encode()).decode()
    return shown.page.evaluate(f"import('data:text/javascript;base64,{source}').then((m) => {call})")


def test_texts_are_cut_between_what_one_reads_as_characters(new_page: Show) -> None:
    shown = new_page()

    def short(text: str, most: int) -> str:
        return str(module(shown, "token_text.js", f"m.truncateText({text!r}, {most})"))

    assert short("한국어입니다", 4) == "한국어…"
    assert short("👩‍👩‍👧‍👦🇰🇷👍🏽a", 3) == "👩‍👩‍👧‍👦🇰🇷…"
    assert short("e\u0301te\u0301s", 3) == "e\u0301t…"
    assert [short(text, 9) for text in ("", "\n", "  ", "a\u202eb", "▁the", "Ġthe")] == [
        "∅",
        "⏎",
        "␣␣",
        "a�b",
        "·the",
        "·the",
    ]
    assert module(shown, "token_text.js", "['שלום', '(مرحبا)', 'abc שלום', '한국'].map(m.isRightToLeft)") == [
        True,
        True,
        False,
        False,
    ]
    names = "m.shortNames(['encoder.layer.0.attention.self', 'encoder.layer.11.attention.self'])"
    assert module(shown, "token_text.js", names) == ["layer 0", "layer 11"]
    assert module(shown, "token_text.js", "m.shortNames(['a.b', 'a.c.d'])") == ["b", "c d"]
    joined = "m.joinTokens(['play', '##ing', 'now']).map((t) => (t.blank ? ' ' : '') + t.text).join('')"
    assert module(shown, "token_text.js", joined) == "playing now"


def test_weights_are_written_for_people(new_page: Show) -> None:
    told = "[1, 0.83124, 0.00421, 0.0000312, 0, 1e-10].map((w) => m.formatWeight(w))"
    assert module(new_page(), "colours.js", told) == ["1", "0.831", "0.00421", "3.1×10⁻⁵", "0", "1.0×10⁻¹⁰"]


def matrix(numbers: str) -> np.ndarray:
    return np.array(numbers.split(), float).reshape(3, 3)


TO_CONES = matrix(
    "0.4122214708 0.5363325363 0.0514459929 0.2119034982 0.6806995451 0.1073969566 "
    "0.0883024619 0.2817188376 0.6299787005"
)
FROM_CONES = matrix(
    "0.2104542553 0.7936177850 -0.0040720468 1.9779984951 -2.4285922050 0.4505937099 "
    "0.0259040371 0.7827717662 -0.8086757660"
)


def lab(colours: np.ndarray) -> np.ndarray:
    """sRGB in 0 to 1 to OKLab."""
    x = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    lms = x @ TO_CONES.T
    return np.asarray(np.cbrt(lms) @ FROM_CONES.T)


# How colours look without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
BLIND = {
    "none": np.eye(3),
    "protan": matrix("0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998"),
    "deutan": matrix("0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881"),
    "tritan": matrix("1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900"),
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("scale", ["blue", "dusk", "overlay", "grey"])
def test_colours_are_even_and_rise_for_every_kind_of_eye(new_page: Show, scale: str, theme: str) -> None:
    colours = np.array(module(new_page(), "colours.js", f"m.getScale('{scale}', '{theme}')")) / 255
    assert colours.shape == (256, 3)
    for name, matrix in BLIND.items():
        linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
        seen = np.clip(linear @ matrix.T, 0, 1)
        seen = np.where(seen <= 0.0031308, 12.92 * seen, 1.055 * seen ** (1 / 2.4) - 0.055)
        places = lab(seen)
        lightness = places[::8, 0] if theme == "dark" else places[::-8, 0]
        assert (np.diff(lightness) > 0).all(), name
        steps = np.linalg.norm(np.diff(places[::15], axis=0), axis=1)  # 17 steps, above what 8 bits round away
        assert steps.max() / steps.min() < (1.35 if name == "none" else 2.5), name
    assert abs(places[-1, 0] - places[0, 0]) > 0.6


def test_less_and_more_are_told_apart_by_every_kind_of_eye(new_page: Show) -> None:
    for theme in ("light", "dark"):
        colours = np.array(module(new_page(), "colours.js", f"m.getDivergingScale('{theme}')")) / 255
        linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
        for matrix in BLIND.values():
            seen = lab(np.clip(linear @ matrix.T, 0, 1) ** (1 / 2.2))
            for n in (20, 60):
                assert np.linalg.norm(seen[n] - seen[255 - n]) > 0.08


def test_no_file_fetches_evaluates_or_parses_html() -> None:
    everything = (
        assets.build_script("boot_page")
        + assets.build_script("boot_file")
        + assets.build_style_sheet(include_page=True)
    )
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "@import",
        "url(",
    ):
        assert word not in everything
    assert set(re.findall(r"https?://[\w./]+", everything)) == {"http://www.w3.org/2000/svg"}


def test_the_files_are_real_modules_and_can_be_joined() -> None:
    names = re.compile(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
    seen: dict[str, str] = {}
    before: list[str] = []
    for name in assets.SCRIPT_NAMES:
        source = assets.read_asset(f"{name}.js")
        for found in names.findall(source):
            assert found not in seen, f"{found} is in {name} and {seen[found]}"
            seen[found] = name
        body = re.sub(r"^import [^;]*;\n", "", source, flags=re.MULTILINE)
        for wanted, other in re.findall(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', source, re.MULTILINE):
            assert other in before, f"{name} imports {other}, which stands after it"
            for word in filter(None, re.split(r"[\s,]+", wanted)):
                assert re.search(rf"^export .*\b{word}\b", assets.read_asset(f"{other}.js"), re.MULTILINE), word
                assert re.search(rf"\b{word}\b", body), f"{name} imports {word} and does not use it"
        before.append(name)
