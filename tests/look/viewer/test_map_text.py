"""Tests of the text beside a long map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from huge_map import HugeMap

from jumok.look.viewer.token_marks import LabelledSpan
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer

pytestmark = pytest.mark.long

LENGTH = 100_003
QUERIES, KEYS = (f".jm-map-text-pane:nth-of-type({n}) .jm-token" for n in (1, 2))


class BackMap(HugeMap):
    """Each token attends to the token 5,000 before it, and to the first one."""

    def weights(self, head: int, rows: slice, cols: slice) -> Any:
        row, col = np.ogrid[rows, cols]
        return (0.7 * (col == np.maximum(row - 5000, 1)) + 0.2 * (col == 0)).astype(np.float32)


def build_data(length: int = LENGTH) -> ViewerData:
    words = [f"▁w{n}" if n % 30 else f"▁w{n}\n" for n in range(length)]
    layer = ViewerLayer("layers.0", "causal self", (length, length), (0,), BackMap(length, 1), words, words)
    return ViewerData((layer,), title="A book")


def get_visible_tokens(viewer: Any, selector: str) -> list[int]:
    """Return the numbers of the tokens that are visible in a pane."""
    script = """(selector) => [...document.querySelectorAll(selector)].filter((e) => {
        const box = e.closest(".jm-flow").getBoundingClientRect(), own = e.getBoundingClientRect();
        return own.top >= box.top - 1 && own.bottom <= box.bottom + 1;
    }).map((e) => Number(e.dataset.n))"""
    return list(viewer.page.evaluate(script, selector))


def test_text_follows_the_map_and_the_map_follows_the_text(open_served: Any) -> None:
    viewer = open_served(build_data())
    viewer.page.wait_for_selector(QUERIES)
    assert get_visible_tokens(viewer, QUERIES)[0] == 0
    assert viewer.page.locator(".jm-flow .jm-token").count() < 3000

    viewer.page.mouse.move(*viewer.locate_cell(80_000, 30_000))
    viewer.wait_until(lambda: any(79_700 < n <= 80_000 for n in get_visible_tokens(viewer, QUERIES)))
    viewer.wait_until(lambda: any(29_700 < n <= 30_000 for n in get_visible_tokens(viewer, KEYS)))
    assert viewer.page.locator(f"{KEYS}.jm-is-pointed").count() > 100

    row = get_visible_tokens(viewer, QUERIES)[3]
    viewer.page.hover(f'{QUERIES}[data-n="{row}"]')
    key = f'{KEYS}[data-n="{row - 5000}"]'
    viewer.page.wait_for_selector(key)
    viewer.wait_until(lambda: viewer.get_darkness(key) > 100)
    lead = viewer.page.inner_text(".jm-map-text-lead")
    assert lead == f"·w{row} {row:,} attended most to ·w{row - 5000} {row - 5000:,} (0.7), ·w0⏎ 0 (0.2)"

    viewer.page.click(f'{QUERIES}[data-n="{row}"]')
    viewer.wait_until_idle()
    top, tall = viewer.evaluate("[map.view.y, map.plot().h / map.view.sy]")
    assert top < row < top + tall < LENGTH / 2 + row
    assert viewer.evaluate("v.state.pinned") == row
    viewer.page.click(key)
    viewer.wait_until_idle()
    left, wide = viewer.evaluate("[map.view.x, map.plot().w / map.view.sx]")
    assert left < row - 5000 < left + wide

    viewer.press("x")
    assert not viewer.page.is_visible(".jm-map-text")


def test_saved_pyramid_shows_the_cells_of_a_query(open_saved: Any) -> None:
    viewer = open_saved(build_data(3001), detail=512)
    viewer.page.wait_for_selector(QUERIES)
    viewer.page.hover(f'{QUERIES}[data-n="7"]')
    viewer.page.wait_for_function(
        "() => document.querySelector('.jm-map-text-lead').textContent.includes('its part of the map attended')"
    )
    values = viewer.page.evaluate(
        "document.querySelector('#viewer').jumok.maps[0].fetchPooledRow(1999).then(({ values }) => [...values])"
    )
    expected = BackMap(3001, 1).pooled_map(0, slice(1953, 2001), slice(0, 3001), 1)
    assert sum(values) == pytest.approx(float(expected.sum()), rel=0.05)


def test_minimap_scrolls_the_text(open_served: Any) -> None:
    viewer = open_served(build_data(20_011))
    viewer.page.wait_for_selector(QUERIES)
    strip = viewer.page.locator(".jm-map-text-pane .jm-minimap").first
    viewer.wait_until(lambda: strip.bounding_box()["height"] > 100)
    strip.click(position={"x": 5, "y": strip.bounding_box()["height"] / 2})
    viewer.wait_until(lambda: any(abs(n - 10_005) < 100 for n in get_visible_tokens(viewer, QUERIES)))


def test_short_maps_have_their_words_on_the_axes(open_saved: Any) -> None:
    weights = np.full((2, 3), 0.3, np.float32)
    viewer = open_saved(ViewerData.from_weights({"a": weights}, row_labels=["x", "y"], col_labels=["p", "q", "r"]))
    assert not viewer.page.is_visible(".jm-map-text")
    assert not viewer.page.is_visible('[title="Show the text (x)"]')


def test_text_shows_turns_special_tokens_outputs_and_weights_without_sinks(open_served: Any) -> None:
    length = 240
    words = ["<|user|>", *(f"▁w{n}" for n in range(1, length))]
    layer = ViewerLayer(
        "layers.0",
        "causal self",
        (length, length),
        (0,),
        ArrayWeightSource(np.tril(np.where(np.arange(length) == 0, length, 1)) / (length + np.arange(length))[:, None]),
        words,
        words,
        first_generated=(200, 200),
        row_outputs=[*words[1:], ""],
        spans=((LabelledSpan(0, 180, "user"), LabelledSpan(180, length, "assistant")),) * 2,
    )
    viewer = open_served(ViewerData((layer,), title="A chat"), opening=None)
    viewer.press("1")
    viewer.page.wait_for_selector(QUERIES)
    assert viewer.get_texts(".jm-map-text-pane:nth-of-type(1) .jm-turn")[0] == "user"
    assert viewer.page.locator(f"{KEYS}.jm-special").all_text_contents() == ["<|user|>"]
    viewer.evaluate("v.set({ pinned: 210 })")
    lead = viewer.page.locator(".jm-map-text-lead")
    viewer.wait_until(lambda: "predicted: ·w211" in lead.inner_text())
    assert "attended most to <|user|> 0 (0.53)" in lead.inner_text()
    viewer.press("f")
    viewer.wait_until(lambda: "attended most to ·w1 1 (0.0048)" in lead.inner_text())  # 1 / 210
