"""The text view in a real browser: generated tokens are marked, and a token under the pointer shades its keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jumok.look.viewer.token_marks import LabelledSpan
from jumok.look.viewer.viewer_data import ViewerData

pytestmark = pytest.mark.long


TOKENS = ["<s>", "▁the", "▁cat", "▁sat", "▁down"]
KEYS = "section:last-of-type .jm-token"


def build_generated_data() -> ViewerData:
    """Token n attends to token n - 1; the last two tokens are generated."""
    weights = np.full((2, 5, 5), 0.01, np.float32)
    for head in range(2):
        weights[head] += 0.9 * np.eye(5, k=-1)
    data = ViewerData.from_weights({"layers.0": weights}, row_labels=TOKENS, col_labels=TOKENS, kind="causal self")
    return data.with_layers([replace(layer, first_generated=(3, 3)) for layer in data.layers])


@pytest.mark.parametrize("opener", ["open_served", "open_saved"])
def test_generated_tokens_are_marked_and_show_their_keys(opener: str, request: Any) -> None:
    viewer = request.getfixturevalue(opener)(build_generated_data(), opening=None)
    assert viewer.evaluate("[v.state.view, v.state.head]") == ["text", None]  # the mean of the heads
    viewer.page.wait_for_selector(KEYS)
    assert viewer.get_texts(f"{KEYS}.jm-generated") == ["sat", "down"]
    assert viewer.get_texts(f"{KEYS}.jm-special") == ["<s>"]
    assert viewer.page.locator(".jm-footer > .jm-generated").inner_text() == "generated"
    width = viewer.page.locator(f"{KEYS}.jm-generated").first.evaluate("e => getComputedStyle(e).borderBottomWidth")
    assert width == "3px"

    viewer.page.hover(f'{KEYS}[data-place="4"]')
    darkness = [f'{KEYS}[data-place="{n}"]' for n in range(5)]
    viewer.wait_until(lambda: np.argmax([viewer.get_darkness(key) for key in darkness]) == 3)
    assert viewer.page.inner_text(".jm-lead").startswith("Attention of ·down. Maximum: 0.91")
    assert "attention weight" in viewer.page.inner_text(".jm-legend")
    viewer.page.hover(f'{KEYS}[data-place="3"]')
    viewer.wait_until(lambda: np.argmax([viewer.get_darkness(key) for key in darkness]) == 2)
    viewer.page.hover(".jm-title")
    viewer.wait_until(lambda: np.argmax([viewer.get_darkness(key) for key in darkness]) == 0)
    assert viewer.page.inner_text(".jm-lead").startswith("Each token is shaded by the mean weight it receives")


def test_map_marks_generated_tokens_beside_its_axes(open_saved: Callable[..., Any]) -> None:
    viewer = open_saved(build_generated_data(), color_scheme="dark")
    viewer.press("1")
    viewer.wait_until_idle()
    script = """(() => { const m = v.maps[0], p = m.plot(), d = devicePixelRatio;
        const y = p.y + (args[0] + 0.5 - m.view.y) * m.view.sy;
        return [...m.canvas.getContext("2d").getImageData((p.x - 2.5) * d, y * d, 1, 1).data]; })()"""
    pixels = [viewer.evaluate(script, row) for row in range(5)]
    assert pixels[3] == pixels[4]
    assert pixels[3][:3] == [0x4F, 0xD1, 0xA0]
    assert pixels[2] != pixels[3]


def test_data_without_generated_tokens_has_no_mark(open_saved: Callable[..., Any]) -> None:
    weights = np.full((2, 3), 0.3, np.float32)
    viewer = open_saved(ViewerData.from_weights({"a": weights}, row_labels=["x", "y"], col_labels=["p", "q", "r"]))
    assert viewer.evaluate("v.state.view") == "map"
    assert not viewer.page.locator(".jm-generated").is_visible()


def build_chat_data() -> ViewerData:
    tokens = ["<s>", "<|user|>", "hello", "<|assistant|>", "hi", "there"]
    weights = np.tril(np.ones((2, 6, 6), np.float32)) / np.arange(1, 7, dtype=np.float32)[:, None]
    data = ViewerData.from_weights({"layers.0": weights}, row_labels=tokens, col_labels=tokens, kind="causal self")
    turns = (LabelledSpan(1, 3, "user"), LabelledSpan(3, 6, "assistant"))
    marks = {"first_generated": (4, 4), "row_outputs": [*tokens[1:], ""], "spans": (turns, turns)}
    return data.with_layers([replace(layer, **marks) for layer in data.layers])


@pytest.mark.parametrize("opener", ["open_served", "open_saved"])
def test_chat_turns_and_predicted_tokens_are_named(opener: str, request: Any) -> None:
    viewer = request.getfixturevalue(opener)(build_chat_data(), opening=None)
    viewer.page.wait_for_selector(KEYS)
    assert viewer.get_texts(".jm-turn") == ["user", "assistant"]
    order = 'section:last-of-type :is(.jm-turn, .jm-token[data-place="2"], .jm-token[data-place="3"])'
    assert viewer.get_texts(order) == ["user", "hello", "assistant", "<|assistant|>"]
    viewer.page.hover(f'{KEYS}[data-place="3"]')
    viewer.wait_until(lambda: "predicted: hi" in viewer.page.inner_text(".jm-tooltip"))
    viewer.page.hover(f'{KEYS}[data-place="1"]')
    viewer.wait_until(lambda: "next token: hello" in viewer.page.inner_text(".jm-tooltip"))
    viewer.press("1")
    viewer.wait_until_idle()
    assert "predicted: there" in viewer.hover_cell(4, 2)
    viewer.press("Shift+ArrowDown")
    assert "predicted" not in viewer.page.inner_text("[aria-live]")  # the last token has no successor
    viewer.press("Shift+ArrowUp")
    assert viewer.page.inner_text("[aria-live]").endswith("predicted: there")
    # The bars of the turns, below the map: three columns for two turns and a gap.
    script = """(() => { const m = v.maps[0], p = m.plot(), d = devicePixelRatio;
        const x = p.x + (args[0] + 0.3 - m.view.x) * m.view.sx;
        return [...m.canvas.getContext("2d").getImageData(x * d, (p.y + p.h + 4.5) * d, 1, 1).data]; })()"""
    pixels = [viewer.evaluate(script, col)[:4] for col in range(6)]
    assert pixels[0][3] == 0  # the start token belongs to no turn
    assert pixels[1] == pixels[2] != pixels[3] == pixels[5]


def test_rows_of_cross_attention_are_named_by_what_they_produced(open_saved: Callable[..., Any]) -> None:
    weights = np.array([[0.9, 0.1], [0.2, 0.8]], np.float32)
    data = ViewerData.from_weights({"cross": weights}, row_labels=["<s>", "▁das"], col_labels=["the", "house"])
    data = data.with_layers([replace(layer, row_outputs=["▁das", "▁Haus"]) for layer in data.layers])
    viewer = open_saved(data)
    assert viewer.hover_cell(1, 0).split()[:5] == ["·das", "→", "·Haus", "→", "the"]
    viewer.press("3")
    viewer.page.wait_for_selector(".jm-token")
    assert viewer.get_texts("section:first-of-type .jm-token") == ["das", "Haus"]
