"""Tests of the image view in a real browser."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.data.builtin import scenes
from jumok.look.figures.caption_figure import OVERLAY_COLOURS
from jumok.look.viewer.attended_image import AttendedImage
from jumok.look.viewer.tiles import TileRequest
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer, answer_request, build_manifest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from example_images import build_corner_data, build_drawing_data
from test_assets import evaluate_module

pytestmark = pytest.mark.long


OpenPage = Callable[..., Any]
SCRIPT = "<script>alert(1)</script>"


def wait_for_weights(viewer: Any) -> Any:
    viewer.page.wait_for_function("() => document.querySelector('#viewer').jumok.views.image.loaded")
    return viewer


def get_brightness(viewer: Any, canvas: str = ".jm-overlay") -> list[int]:
    """Return the brightness of a canvas in the middle of the six patches of `build_corner_data`."""
    script = """(() => { const c = document.querySelector(args[0]), g = c.getContext("2d");
        return [0, 1, 2, 3, 4, 5].map((n) => { const x = (n % 3 + 0.5) / 3, y = (n > 2 ? 0.75 : 0.25);
            const d = g.getImageData(c.width * x, c.height * y, 1, 1).data;
            return d[0] + d[1] + d[2]; }); })()"""
    return [int(value) for value in viewer.evaluate(script, canvas)]


def locate_word(n: int) -> str:
    return f'.jm-caption .jm-token[data-place="{n}"]'


def locate_point(viewer: Any, row: float, col: float) -> tuple[float, float]:
    box = viewer.page.locator(".jm-frame").bounding_box()
    return box["x"] + box["width"] * col, box["y"] + box["height"] * row


RIGHT, LEFT = (0.25, 5 / 6), (0.75, 1 / 6)
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


# ---------------------------------------------------------------- words and patches


def test_opens_with_the_mean_and_hover_shows_a_word(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_corner_data()))
    assert viewer.get_texts(".jm-tabs [role=tab]") == ["Image", "Map", "Arcs", "Text", "Heads"]
    assert "2 words·2 × 3 patches" in viewer.page.inner_text(".jm-subtitle")
    assert viewer.get_texts(".jm-caption .jm-token") == ["right", "left"]
    # 0.625 at the upper right and 0.375 at the lower left, on average.
    viewer.wait_until(lambda: viewer.page.inner_text(".jm-current").startswith("Mean of 2 words"))
    assert "maximum 0.625 at row 1, column 3" in viewer.page.inner_text(".jm-current")
    mean = get_brightness(viewer)
    assert mean[2] > mean[3] > mean[0] + 60
    assert mean[1] == pytest.approx(mean[0], abs=9)
    viewer.page.hover(locate_word(1))
    left = get_brightness(viewer)
    assert left[3] > left[2] + 60 > left[0] + 90
    assert "maximum 0.75 at row 2, column 1" in viewer.page.inner_text(".jm-current")
    assert viewer.page.get_attribute(".jm-legend-bar", "aria-label").endswith("from 0 to 0.75")
    assert "left: maximum 0.75 at row 2, column 1" in viewer.page.get_attribute(".jm-overlay", "aria-label")
    viewer.page.mouse.move(5, 5)
    assert get_brightness(viewer) == mean


def test_hovering_a_patch_shades_words_and_lists_weights(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_corner_data(("right", "left", "even"))))
    assert [viewer.get_darkness(locate_word(n)) for n in range(3)] == [0, 0, 0]
    viewer.page.mouse.move(*locate_point(viewer, *RIGHT))
    shades = [viewer.get_darkness(locate_word(n)) for n in range(3)]  # 1, 0.25 and 0.167
    assert shades[0] > shades[1] + 150
    assert shades[1] > shades[2] > 10
    assert [viewer.get_darkness(f".jm-thumbnail >> nth={n} >> .jm-thumbnail-word") for n in range(3)] == shades
    assert viewer.page.inner_text(".jm-tooltip").split("\n") == [
        "row 1, column 3", "right", "1", "left", "0.25", "even", "0.167",
    ]  # fmt: skip
    cell, frame = (viewer.page.locator(name).bounding_box() for name in (".jm-cell", ".jm-frame"))
    assert cell["x"] == pytest.approx(frame["x"] + frame["width"] * 2 / 3, abs=1)
    assert cell["height"] == pytest.approx(frame["height"] / 2, abs=1)
    viewer.page.mouse.move(*locate_point(viewer, 0.75, 5 / 6))  # no weight is above chance
    assert [viewer.get_darkness(locate_word(n)) > 0 for n in range(3)] == [False, False, True]
    assert viewer.get_darkness(locate_word(2)) < 250
    viewer.page.mouse.move(*locate_point(viewer, 0.5, 1.2))
    assert [viewer.get_darkness(locate_word(n)) for n in range(3)] == [0, 0, 0]
    assert viewer.page.is_hidden(".jm-tooltip")
    assert viewer.page.is_hidden(".jm-cell")


def test_click_pins_a_word(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_corner_data()))
    mean = get_brightness(viewer)
    viewer.page.click(locate_word(1))
    viewer.page.wait_for_selector(f"{locate_word(1)}.jm-is-pinned")
    viewer.page.mouse.move(5, 5)
    pinned = get_brightness(viewer)
    assert pinned[3] > pinned[2] + 60
    assert viewer.page.get_attribute(locate_word(1), "aria-pressed") == "true"
    viewer.page.hover(locate_word(0))
    assert get_brightness(viewer)[2] > get_brightness(viewer)[3] + 60  # while it is hovered
    viewer.page.mouse.move(5, 5)
    assert get_brightness(viewer) == pinned
    assert viewer.page.is_hidden(".jm-panel")  # the panel would move the image
    viewer.page.click(locate_word(1))
    viewer.page.mouse.move(5, 5)
    assert get_brightness(viewer) == mean


def test_hovering_does_not_move_the_layout(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_drawing_data(num_heads=2)))
    boxes = """["jm-frame", "jm-caption", "jm-thumbnails", "jm-footer", "jm-current"].map((name) => {
        const { x, y, width, height } = document.querySelector(`.${name}`).getBoundingClientRect();
        return [x, y, width, height]; })"""
    before = viewer.evaluate(boxes)
    for n in (0, 1, 5):
        viewer.page.hover(locate_word(n))
        assert viewer.evaluate(boxes)[:4] == before[:4]
    viewer.page.mouse.move(*locate_point(viewer, 0.4, 0.4))
    assert viewer.evaluate(boxes)[:4] == before[:4]
    viewer.page.click(locate_word(2))
    assert viewer.evaluate(boxes)[:4] == before[:4]


def test_overlay_is_brightest_at_the_described_object(open_served: OpenPage) -> None:
    data = build_drawing_data(0)
    viewer = wait_for_weights(open_served(data))
    words = viewer.get_texts(".jm-caption .jm-token")
    assert " ".join(words) == data.title
    viewer.page.hover(locate_word(words.index("square")))
    brightest = """(() => { const c = v.views.image.overlay, d = c.getContext("2d"); let best = [-1];
        const { data } = d.getImageData(0, 0, c.width, c.height);
        for (let n = 0; n < data.length; n += 4)
            if (data[n] > best[0]) best = [data[n], (n / 4 % c.width) / c.width, n / 4 / c.width / c.height];
        return best.slice(1); })()"""
    x, y = viewer.evaluate(brightest)
    left, top, right, bottom = scenes.draw_scene(5, 0).boxes[words.index("square")] or (0, 0, 0, 0)
    assert left < scenes.IMAGE_SIZE * x < right
    assert top < scenes.IMAGE_SIZE * y < bottom


# ---------------------------------------------------------------- thumbnails


def test_each_word_has_a_thumbnail(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_corner_data(("right", "left", "even"))))
    assert viewer.get_texts(".jm-thumbnail") == ["right", "left", "even"]
    viewer.wait_until(lambda: viewer.page.locator(".jm-thumbnail canvas").first.bounding_box()["width"] > 60)
    first, second = (get_brightness(viewer, f'.jm-thumbnail[data-word="{n}"] canvas') for n in (0, 1))
    assert first[2] > first[3] + 60
    assert second[3] > second[2] + 60
    viewer.page.hover(".jm-thumbnail >> nth=1")
    assert get_brightness(viewer)[3] > get_brightness(viewer)[2] + 60
    viewer.page.click(".jm-thumbnail >> nth=0")
    viewer.page.wait_for_selector(f"{locate_word(0)}.jm-is-pinned")
    assert viewer.page.get_attribute(".jm-thumbnail >> nth=0", "aria-pressed") == "true"
    with viewer.page.expect_download() as waiting:
        viewer.page.click('[aria-label="Save as image"]')
    assert waiting.value.path().read_bytes().startswith(b"\x89PNG")


def test_shared_scale_and_overlay_strength(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_corner_data(("right", "left", "even"))))
    own = get_brightness(viewer, '.jm-thumbnail[data-word="2"] canvas')
    viewer.page.click('[data-scale="all"]')
    shared = get_brightness(viewer, '.jm-thumbnail[data-word="2"] canvas')
    assert min(own) > max(shared) + 60  # a sixth of the shared scale
    viewer.page.locator('[aria-label="Strength of the overlay"]').fill("0")
    assert get_brightness(viewer, '.jm-thumbnail[data-word="2"] canvas') == [3 * 128] * 6


@pytest.mark.parametrize(("count", "shape"), [(1, (400, 40)), (8, (40, 400)), (40, (107, 160))])
def test_any_number_of_words_and_image_shape_fit(open_served: OpenPage, count: int, shape: tuple[int, int]) -> None:
    words = tuple(f"word{n}" for n in range(count))
    image = AttendedImage.from_pixels(np.full((*shape, 3), 90, np.uint8), (2, 3))
    viewer = wait_for_weights(open_served(replace(build_corner_data(words), image=image)))
    for width in (390, 1100):
        viewer.page.set_viewport_size({"width": width, "height": 800})
        assert viewer.evaluate("document.documentElement.scrollWidth") <= width
        assert viewer.page.locator(".jm-thumbnail").count() == count
        inside = """[...document.querySelectorAll(".jm-thumbnail, .jm-token, .jm-frame")].every((e) => {
            const b = e.getBoundingClientRect(); return b.left >= 0 && b.right <= innerWidth; })"""
        assert viewer.evaluate(inside)
        box = viewer.page.locator(".jm-frame").bounding_box()
        assert box["height"] / box["width"] == pytest.approx(shape[0] / shape[1], rel=0.05)
        assert box["height"] < 600


# ---------------------------------------------------------------- keys and touch


def test_arrow_keys_move_between_words(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_corner_data(("right", "left", "even"))))
    mean = get_brightness(viewer)
    viewer.press("ArrowRight")
    assert viewer.page.inner_text("[aria-live]") == "right: maximum 1 at row 1, column 3"
    assert viewer.evaluate("document.activeElement.textContent") == "right"
    viewer.press("ArrowRight")
    assert get_brightness(viewer)[3] > get_brightness(viewer)[2] + 60
    assert viewer.page.inner_text(".jm-current").startswith("left")
    viewer.press("End", "ArrowRight")
    assert viewer.evaluate("document.activeElement.textContent") == "even"
    viewer.press("Home", "ArrowRight", "Enter")
    viewer.page.wait_for_selector(f"{locate_word(1)}.jm-is-pinned")
    viewer.press("Escape")
    viewer.wait_until(lambda: get_brightness(viewer) == mean)
    assert viewer.evaluate("v.state.pinned") is None


def test_shift_and_arrow_keys_move_between_patches(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_corner_data()))
    viewer.press("Shift+ArrowLeft")  # starts at the highest weight
    assert viewer.page.inner_text("[aria-live]") == "row 1, column 3: right 1, left 0.25"
    assert viewer.get_darkness(locate_word(0)) > 200
    viewer.press("Shift+ArrowDown", "Shift+ArrowLeft", "Shift+ArrowLeft", "Shift+ArrowLeft")
    assert viewer.page.inner_text("[aria-live]") == "row 2, column 1: left 0.75, right 0"
    viewer.press("Escape")
    assert viewer.get_darkness(locate_word(0)) == 0


def test_heads_and_layers_are_selected(open_served: OpenPage) -> None:
    # A Transformer: patches of the encoder attend to patches, words of the decoder to words and to patches.
    data = build_drawing_data(num_heads=2, num_layers=2)
    words = data.layers[0].shape[0]
    causal = ViewerLayer(
        "decoder", "causal self", (words, words), (0,), ArrayWeightSource(np.eye(words, dtype=np.float32))
    )
    encoder = ViewerLayer(
        "encoder", "self", (56, 56), (0, 1), ArrayWeightSource(np.full((2, 56, 56), 1 / 56, np.float32))
    )
    viewer = wait_for_weights(open_served(replace(data, layers=(causal, encoder, *data.layers))))
    assert viewer.evaluate("[v.state.view, v.state.layer, v.state.head]") == ["image", 3, None]
    assert viewer.get_texts('[aria-label="Layer"] option') == [
        "encoder",
        *(layer.name for layer in data.layers),
        "mean of decoder.*.source_attention",
    ]
    most = "Math.max(...v.views.image.weights(1))"
    mean = viewer.evaluate(most)
    viewer.page.click('[data-head="0"]')
    viewer.wait_until(lambda: bool(viewer.evaluate(most) > 1.5 * mean))
    viewer.press("h")
    viewer.wait_until(lambda: viewer.evaluate(most) == pytest.approx(1 / 56, rel=1e-3))
    viewer.press("ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp")  # layers that do not match the image are skipped
    assert viewer.evaluate("[v.state.view, v.state.layer]") == ["image", 1]
    viewer.wait_until(lambda: viewer.page.inner_text(".jm-current").startswith("Mean of all patches"))
    assert viewer.page.locator(".jm-thumbnail").count() == 0
    viewer.press("ArrowDown")
    viewer.wait_until(lambda: viewer.page.locator(".jm-thumbnail").count() == words)


def test_touch_pins_words_and_shows_patches(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_corner_data(), **PHONE))
    viewer.page.tap(locate_word(1))
    viewer.page.wait_for_selector(f"{locate_word(1)}.jm-is-pinned")
    assert get_brightness(viewer)[3] > get_brightness(viewer)[2] + 60
    viewer.page.touchscreen.tap(*locate_point(viewer, *RIGHT))
    viewer.wait_until(lambda: viewer.get_darkness(locate_word(0)) > viewer.get_darkness(locate_word(1)) + 100)
    assert "row 1, column 3" in viewer.page.inner_text(".jm-tooltip")  # it stays after the touch
    viewer.page.tap(".jm-title")
    viewer.wait_until(lambda: viewer.get_darkness(locate_word(0)) == 0)


# ---------------------------------------------------------------- comparisons and hosts


def test_two_images_are_compared(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served([build_drawing_data(0), build_drawing_data(1, language="ko")]))
    viewer.press("c")
    korean = build_drawing_data(1, language="ko").layers[0].row_labels
    viewer.wait_until(lambda: viewer.get_texts(".jm-thumbnail") == list(korean or ()))
    assert viewer.get_texts(".jm-caption .jm-token") == list(korean or ())
    viewer.page.hover(locate_word(1))
    viewer.press("c")
    viewer.wait_until(lambda: " ".join(viewer.get_texts(".jm-caption .jm-token")) == build_drawing_data(0).title)


def test_file_is_complete_and_words_are_text(open_saved: OpenPage) -> None:
    viewer = wait_for_weights(open_saved(build_corner_data((SCRIPT, "<b>bold</b>", "שלום")), color_scheme="dark"))
    assert viewer.get_texts(".jm-caption .jm-token") == [SCRIPT, "<b>bold</b>", "שלום"]
    assert viewer.page.locator(".jm-image :is(script, b, img:not(.jm-photo))").count() == 0
    viewer.page.hover(locate_word(1))
    assert get_brightness(viewer)[3] > get_brightness(viewer)[2] + 60
    viewer.page.mouse.move(*locate_point(viewer, *RIGHT))
    assert SCRIPT in viewer.page.inner_text(".jm-tooltip")
    assert viewer.find_unnamed_controls() == []


def test_notebook_requests_tiles_by_messages(new_page: OpenPage) -> None:
    data = build_corner_data()

    def answer(content: Any) -> tuple[Any, list[bytes]]:
        return {"id": content["id"]}, [answer_request([data], TileRequest.from_mapping(content["request"]))]

    viewer = wait_for_weights(new_page().open_widget(build_manifest([data]), answer))
    viewer.page.hover(locate_word(1))
    viewer.wait_until(lambda: get_brightness(viewer)[3] > get_brightness(viewer)[2] + 60)
    assert viewer.page.locator(".jm-thumbnail").count() == 2


# ---------------------------------------------------------------- patches, regions and errors


def test_self_attention_over_patches(open_served: OpenPage) -> None:
    # A class token and 2 × 3 patches: each patch attends to the next one, the class token to the fourth.
    weights = np.zeros((7, 7), np.float32)
    for n in range(1, 7):
        weights[n, n % 6 + 1] = 1
    weights[0, 4] = 1
    image = AttendedImage.from_pixels(np.full((200, 300, 3), 128, np.uint8), (2, 3), 1)
    names = ["[CLS]", *(f"p{n}" for n in range(6))]
    viewer = wait_for_weights(
        open_served(ViewerData.from_weights({"vit": weights}, row_labels=names, kind="self", image=image))
    )
    assert viewer.page.inner_text(".jm-current").startswith("Mean of all patches")
    assert viewer.page.locator(".jm-thumbnail").count() == 0
    viewer.page.mouse.click(*locate_point(viewer, *RIGHT))
    viewer.wait_until(lambda: "Patch at row 1, column 3" in viewer.page.inner_text(".jm-current"))
    viewer.wait_until(
        lambda: get_brightness(viewer)[3] > max(get_brightness(viewer)[4:]) + 60
    )  # the third attends to the fourth
    viewer.page.mouse.move(*locate_point(viewer, *LEFT))
    viewer.wait_until(lambda: viewer.page.inner_text(".jm-tooltip").split("\n") == ["row 2, column 1", "1"])
    assert viewer.get_texts(".jm-caption .jm-token") == ["[CLS]"]
    viewer.page.click(locate_word(0))
    viewer.wait_until(lambda: viewer.page.inner_text(".jm-current").startswith("[CLS]"))
    assert get_brightness(viewer)[3] > get_brightness(viewer)[2] + 60


def test_grid_may_cover_part_of_the_image(open_served: OpenPage) -> None:
    # The model saw the middle third, so that "right" is at its upper right: a bit right of the middle.
    viewer = wait_for_weights(open_served(build_corner_data(region=(1 / 3, 0.0, 2 / 3, 1.0))))
    viewer.page.mouse.move(*locate_point(viewer, 0.25, 0.61))
    assert viewer.page.inner_text(".jm-tooltip").startswith("row 1, column 3")
    viewer.page.mouse.move(*locate_point(viewer, 0.25, 0.9))
    assert viewer.page.is_hidden(".jm-tooltip")
    viewer.page.hover(locate_word(0))
    script = """[0.1, 0.61, 0.9].map((x) => { const c = v.views.image.overlay;
        const d = c.getContext("2d").getImageData(c.width * x, c.height / 4, 1, 1).data;
        return [d[0] + d[1] + d[2], d[3]]; })"""
    (dim, cover), (bright, _), (also_dim, _) = viewer.evaluate(script)
    assert bright > dim + 200
    assert dim == also_dim
    assert cover == pytest.approx(255 * 0.7 * 0.88, abs=2)  # outside of the region the overlay is dark but transparent


def test_failed_request_is_reported(open_served: OpenPage) -> None:
    def refuse(page: Any) -> None:
        page.route("**/tiles?*quantity=weights*", lambda route: route.fulfill(status=400, json={"error": "busy."}))

    viewer = open_served(build_corner_data(), before=refuse)
    viewer.wait_until(lambda: viewer.page.inner_text(".jm-current") == "busy.")
    viewer.page.hover(locate_word(1))
    viewer.press("ArrowRight", "Shift+ArrowRight")
    assert all("400" in complaint for complaint in viewer.errors)  # the message of the browser
    viewer.errors.clear()


def test_damaged_image_is_reported(open_served: OpenPage) -> None:
    data = build_corner_data()
    viewer = open_served(replace(data, image=AttendedImage(b"\x89PNG" + bytes(40), (2, 3))))
    viewer.wait_until(lambda: "cannot show the image" in viewer.page.inner_text(".jm-current"))
    viewer.page.hover(locate_word(1))
    assert viewer.get_texts(".jm-thumbnail") == ["right", "left"]


def test_overlay_colours_equal_those_of_the_figure(new_page: OpenPage) -> None:
    colours = evaluate_module(new_page(), "colours.js", "m.getScale('overlay', 'dark')")
    hexes = ["#" + "".join(f"{value:02x}" for value in colours[n]) for n in (0, 32, 64, 96, 128, 160, 191, 223, 255)]
    assert tuple(hexes) == OVERLAY_COLOURS
