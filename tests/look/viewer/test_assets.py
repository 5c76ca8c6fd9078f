"""Tests of single scripts of the viewer: texts, numbers, colours."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jumok.look.viewer import assets

pytestmark = pytest.mark.long


OpenPage = Callable[..., Any]


def evaluate_module(viewer: Any, name: str, expression: str) -> Any:
    """Evaluate an expression in which ``m`` is a module of the viewer."""
    source = base64.b64encode(assets.read_asset(f"look/viewer/static/{name}").encode()).decode()
    return viewer.page.evaluate(f"import('data:text/javascript;base64,{source}').then((m) => {expression})")


def test_texts_are_truncated_between_graphemes(new_page: OpenPage) -> None:
    viewer = new_page()

    def truncate(text: str, max_length: int) -> str:
        return str(evaluate_module(viewer, "token_text.js", f"m.truncateText({text!r}, {max_length})"))

    assert truncate("한국어입니다", 4) == "한국어…"
    assert truncate("👩‍👩‍👧‍👦🇰🇷👍🏽a", 3) == "👩‍👩‍👧‍👦🇰🇷…"
    assert truncate("e\u0301te\u0301s", 3) == "e\u0301t…"
    assert [truncate(text, 9) for text in ("", "\n", "  ", "a\u202eb", "▁the", "Ġthe")] == [
        "∅",
        "⏎",
        "␣␣",
        "a�b",
        "·the",
        "·the",
    ]
    assert evaluate_module(viewer, "token_text.js", "['שלום', '(مرحبا)', 'abc שלום', '한국'].map(m.isRightToLeft)") == [
        True,
        True,
        False,
        False,
    ]
    names = "m.shortNames(['encoder.layer.0.attention.self', 'encoder.layer.11.attention.self'])"
    assert evaluate_module(viewer, "token_text.js", names) == ["layer 0", "layer 11"]
    assert evaluate_module(viewer, "token_text.js", "m.shortNames(['a.b', 'a.c.d'])") == ["b", "c d"]
    joined = "m.joinTokens(['play', '##ing', 'now']).map((t) => (t.blank ? ' ' : '') + t.text).join('')"
    assert evaluate_module(viewer, "token_text.js", joined) == "playing now"


def test_weights_are_formatted(new_page: OpenPage) -> None:
    script = "[1, 0.83124, 0.00421, 0.0000312, 0, 1e-10].map((w) => m.formatWeight(w))"
    assert evaluate_module(new_page(), "colours.js", script) == ["1", "0.831", "0.00421", "3.1×10⁻⁵", "0", "1.0×10⁻¹⁰"]


def parse_matrix(numbers: str) -> np.ndarray:
    return np.array(numbers.split(), float).reshape(3, 3)


TO_CONES = parse_matrix(
    "0.4122214708 0.5363325363 0.0514459929 0.2119034982 0.6806995451 0.1073969566 "
    "0.0883024619 0.2817188376 0.6299787005"
)
FROM_CONES = parse_matrix(
    "0.2104542553 0.7936177850 -0.0040720468 1.9779984951 -2.4285922050 0.4505937099 "
    "0.0259040371 0.7827717662 -0.8086757660"
)


def convert_to_oklab(colours: np.ndarray) -> np.ndarray:
    """Convert sRGB, 0 to 1, to OKLab."""
    x = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    lms = x @ TO_CONES.T
    return np.asarray(np.cbrt(lms) @ FROM_CONES.T)


# Colours as perceived without one type of cone (Machado, Oliveira and Fernandes 2009, severity 1).
COLOUR_VISION = {
    "none": np.eye(3),
    "protan": parse_matrix("0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998"),
    "deutan": parse_matrix("0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881"),
    "tritan": parse_matrix("1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900"),
}


@pytest.mark.parametrize(
    ("scale", "theme"), [*itertools.product(["blue", "dusk", "grey"], ["light", "dark"]), ("overlay", "dark")]
)
def test_scales_are_even_and_monotonic_for_all_colour_vision(new_page: OpenPage, scale: str, theme: str) -> None:
    colours = np.array(evaluate_module(new_page(), "colours.js", f"m.getScale('{scale}', '{theme}')")) / 255
    assert colours.shape == (256, 3)
    for name, matrix in COLOUR_VISION.items():
        linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
        perceived = np.clip(linear @ matrix.T, 0, 1)
        perceived = np.where(perceived <= 0.0031308, 12.92 * perceived, 1.055 * perceived ** (1 / 2.4) - 0.055)
        lab_colours = convert_to_oklab(perceived)
        lightness = lab_colours[::8, 0] if theme == "dark" else lab_colours[::-8, 0]
        assert (np.diff(lightness) > 0).all(), name
        steps = np.linalg.norm(np.diff(lab_colours[::15], axis=0), axis=1)  # 17 steps, above what 8 bits round away
        assert steps.max() / steps.min() < (1.35 if name == "none" else 2.5), name
    assert abs(lab_colours[-1, 0] - lab_colours[0, 0]) > 0.6


def test_diverging_scale_is_distinguishable_for_all_colour_vision(new_page: OpenPage) -> None:
    for theme in ("light", "dark"):
        colours = np.array(evaluate_module(new_page(), "colours.js", f"m.getDivergingScale('{theme}')")) / 255
        linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
        for matrix in COLOUR_VISION.values():
            perceived = convert_to_oklab(np.clip(linear @ matrix.T, 0, 1) ** (1 / 2.2))
            for n in (20, 60):
                assert np.linalg.norm(perceived[n] - perceived[255 - n]) > 0.08
