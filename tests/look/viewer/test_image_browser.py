"""The picture view in a real browser: words and their places, places and their words, by any hand."""

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
from jumok.look.viewer import assets
from jumok.look.viewer.attended_image import AttendedImage
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer, build_manifest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from example_images import corners, drawing
from test_viewer_scripts import module

Show = Callable[..., Any]
SCRIPT = "<script>alert(1)</script>"


def loaded(shown: Any) -> Any:
    shown.page.wait_for_function("() => document.querySelector('#viewer').jumok.views.image.loaded")
    return shown


def light(shown: Any, canvas: str = ".jm-overlay") -> list[int]:
    """Of the overlay in the middle of the six cells of `corners`."""
    script = """(() => { const c = document.querySelector(given[0]), g = c.getContext("2d");
        return [0, 1, 2, 3, 4, 5].map((n) => { const x = (n % 3 + 0.5) / 3, y = (n > 2 ? 0.75 : 0.25);
            const d = g.getImageData(c.width * x, c.height * y, 1, 1).data;
            return d[0] + d[1] + d[2]; }); })()"""
    return [int(value) for value in shown.ask(script, canvas)]


def word(n: int) -> str:
    return f'.jm-caption .jm-token[data-place="{n}"]'


def tint(shown: Any, selector: str) -> int:
    """How dark it is behind a word."""
    colour = shown.page.locator(selector).evaluate("e => getComputedStyle(e).backgroundColor")
    red, green, blue, *alpha = (float(part) for part in colour[colour.index("(") + 1 : -1].split(","))
    return 0 if alpha == [0.0] else round(765 - red - green - blue)


def point(shown: Any, row: float, col: float) -> tuple[float, float]:
    box = shown.page.locator(".jm-frame").bounding_box()
    return box["x"] + box["width"] * col, box["y"] + box["height"] * row


RIGHT, LEFT = (0.25, 5 / 6), (0.75, 1 / 6)


# ------------------------------------------------------------------------------------------ words and places


def test_it_opens_with_the_mean_and_a_word_shows_its_places(served: Show) -> None:
    shown = loaded(served(corners()))
    assert shown.text(".jm-tabs [role=tab]") == ["Image", "Map", "Arcs", "Text", "Heads"]
    assert "2 words·2 × 3 patches" in shown.page.inner_text(".jm-subtitle")
    assert shown.text(".jm-caption .jm-token") == ["right", "left"]
    # 0.625 at the upper right and 0.375 at the lower left, on average.
    shown.until(lambda: shown.page.inner_text(".jm-current").startswith("Mean of 2 words"))
    assert "row 1, column 3: 0.625" in shown.page.inner_text(".jm-current")
    mean = light(shown)
    assert mean[2] > mean[3] > mean[0] + 60
    assert mean[1] == pytest.approx(mean[0], abs=9)
    shown.page.hover(word(1))
    left = light(shown)
    assert left[3] > left[2] + 60 > left[0] + 90
    assert "row 2, column 1: 0.75" in shown.page.inner_text(".jm-current")
    assert shown.page.get_attribute(".jm-legend-bar", "aria-label").endswith("from 0 to 0.75")
    assert "left: maximum at row 2, column 1" in shown.page.get_attribute(".jm-overlay", "aria-label")
    shown.page.mouse.move(5, 5)
    assert light(shown) == mean


def test_a_place_shades_its_words_and_tells_their_weights(served: Show) -> None:
    shown = loaded(served(corners(("right", "left", "even"))))
    assert [tint(shown, word(n)) for n in range(3)] == [0, 0, 0]
    shown.page.mouse.move(*point(shown, *RIGHT))
    shades = [tint(shown, word(n)) for n in range(3)]  # 1, 0.25 and 0.167
    assert shades[0] > shades[1] + 150
    assert shades[1] > shades[2] > 10
    assert [tint(shown, f".jm-thumbnail >> nth={n} >> .jm-thumbnail-word") for n in range(3)] == shades
    assert shown.page.inner_text(".jm-tooltip").split("\n") == [
        "row 1, column 3", "right", "1", "left", "0.25", "even", "0.167",
    ]  # fmt: skip
    cell, frame = (shown.page.locator(name).bounding_box() for name in (".jm-cell", ".jm-frame"))
    assert cell["x"] == pytest.approx(frame["x"] + frame["width"] * 2 / 3, abs=1)
    assert cell["height"] == pytest.approx(frame["height"] / 2, abs=1)
    shown.page.mouse.move(*point(shown, 0.75, 5 / 6))  # nobody looked here more than by chance
    assert [tint(shown, word(n)) > 0 for n in range(3)] == [False, False, True]
    assert tint(shown, word(2)) < 250
    shown.page.mouse.move(*point(shown, 0.5, 1.2))
    assert [tint(shown, word(n)) for n in range(3)] == [0, 0, 0]
    assert shown.page.is_hidden(".jm-tooltip")
    assert shown.page.is_hidden(".jm-cell")


def test_a_click_pins_a_word_until_the_next_one(served: Show) -> None:
    shown = loaded(served(corners()))
    mean = light(shown)
    shown.page.click(word(1))
    shown.page.wait_for_selector(f"{word(1)}.jm-is-pinned")
    shown.page.mouse.move(5, 5)
    pinned = light(shown)
    assert pinned[3] > pinned[2] + 60
    assert shown.page.get_attribute(word(1), "aria-pressed") == "true"
    shown.page.hover(word(0))
    assert light(shown)[2] > light(shown)[3] + 60  # for as long as one points
    shown.page.mouse.move(5, 5)
    assert light(shown) == pinned
    assert shown.page.is_hidden(".jm-panel")  # nothing moves
    shown.page.click(word(1))
    shown.page.mouse.move(5, 5)
    assert light(shown) == mean


def test_nothing_moves_while_one_points(served: Show) -> None:
    shown = loaded(served(drawing(heads=2)))
    boxes = """["jm-frame", "jm-caption", "jm-thumbnails", "jm-footer", "jm-current"].map((name) => {
        const { x, y, width, height } = document.querySelector(`.${name}`).getBoundingClientRect();
        return [x, y, width, height]; })"""
    before = shown.ask(boxes)
    for n in (0, 1, 5):
        shown.page.hover(word(n))
        assert shown.ask(boxes)[:4] == before[:4]
    shown.page.mouse.move(*point(shown, 0.4, 0.4))
    assert shown.ask(boxes)[:4] == before[:4]
    shown.page.click(word(2))
    assert shown.ask(boxes)[:4] == before[:4]


def test_a_drawing_is_lit_where_its_words_tell_of(served: Show) -> None:
    scene = drawing(0)
    shown = loaded(served(scene))
    words = shown.text(".jm-caption .jm-token")
    assert " ".join(words) == scene.title
    shown.page.hover(word(words.index("square")))
    brightest = """(() => { const c = v.views.image.overlay, d = c.getContext("2d"); let best = [-1];
        const { data } = d.getImageData(0, 0, c.width, c.height);
        for (let n = 0; n < data.length; n += 4)
            if (data[n] > best[0]) best = [data[n], (n / 4 % c.width) / c.width, n / 4 / c.width / c.height];
        return best.slice(1); })()"""
    x, y = shown.ask(brightest)
    left, top, right, bottom = scenes.draw_scene(5, 0).boxes[words.index("square")] or (0, 0, 0, 0)
    assert left < scenes.IMAGE_SIZE * x < right
    assert top < scenes.IMAGE_SIZE * y < bottom


# ------------------------------------------------------------------------------------------------- the strip


def test_the_strip_has_a_small_picture_for_each_word(served: Show) -> None:
    shown = loaded(served(corners(("right", "left", "even"))))
    assert shown.text(".jm-thumbnail") == ["right", "left", "even"]
    shown.until(lambda: shown.page.locator(".jm-thumbnail canvas").first.bounding_box()["width"] > 60)
    first, second = (light(shown, f'.jm-thumbnail[data-word="{n}"] canvas') for n in (0, 1))
    assert first[2] > first[3] + 60
    assert second[3] > second[2] + 60
    shown.page.hover(".jm-thumbnail >> nth=1")
    assert light(shown)[3] > light(shown)[2] + 60
    shown.page.click(".jm-thumbnail >> nth=0")
    shown.page.wait_for_selector(f"{word(0)}.jm-is-pinned")
    assert shown.page.get_attribute(".jm-thumbnail >> nth=0", "aria-pressed") == "true"
    with shown.page.expect_download() as waiting:
        shown.page.click('[aria-label="Save as image"]')
    assert waiting.value.path().read_bytes().startswith(b"\x89PNG")


def test_all_words_may_share_a_scale_and_the_overlay_can_be_weaker(served: Show) -> None:
    shown = loaded(served(corners(("right", "left", "even"))))
    own = light(shown, '.jm-thumbnail[data-word="2"] canvas')
    shown.page.click('[data-scale="all"]')
    shared = light(shown, '.jm-thumbnail[data-word="2"] canvas')
    assert min(own) > max(shared) + 60  # a sixth of the scale, and no longer the most of its own
    shown.page.locator('[aria-label="Strength of the overlay"]').fill("0")
    assert light(shown, '.jm-thumbnail[data-word="2"] canvas') == [3 * 128] * 6


@pytest.mark.parametrize(("count", "shape"), [(1, (400, 40)), (8, (40, 400)), (40, (107, 160))])
def test_any_number_of_words_and_any_shape_of_picture_fit(served: Show, count: int, shape: tuple[int, int]) -> None:
    words = tuple(f"word{n}" for n in range(count))
    picture = AttendedImage.from_pixels(np.full((*shape, 3), 90, np.uint8), (2, 3))
    shown = loaded(served(replace(corners(words), image=picture)))
    for width in (390, 1100):
        shown.page.set_viewport_size({"width": width, "height": 800})
        assert shown.ask("document.documentElement.scrollWidth") <= width
        assert shown.page.locator(".jm-thumbnail").count() == count
        inside = """[...document.querySelectorAll(".jm-thumbnail, .jm-token, .jm-frame")].every((e) => {
            const b = e.getBoundingClientRect(); return b.left >= 0 && b.right <= innerWidth; })"""
        assert shown.ask(inside)
        box = shown.page.locator(".jm-frame").bounding_box()
        assert box["height"] / box["width"] == pytest.approx(shape[0] / shape[1], rel=0.05)
        assert box["height"] < 600


# ------------------------------------------------------------------------------------------- keys and touch


def test_arrows_go_from_word_to_word(served: Show) -> None:
    shown = loaded(served(corners(("right", "left", "even"))))
    mean = light(shown)
    shown.press("ArrowRight")
    assert shown.page.inner_text("[aria-live]") == "right: maximum at row 1, column 3, 1"
    assert shown.ask("document.activeElement.textContent") == "right"
    shown.press("ArrowRight")
    assert light(shown)[3] > light(shown)[2] + 60
    assert shown.page.inner_text(".jm-current").startswith("left")
    shown.press("End", "ArrowRight")
    assert shown.ask("document.activeElement.textContent") == "even"
    shown.press("Home", "ArrowRight", "Enter")
    shown.page.wait_for_selector(f"{word(1)}.jm-is-pinned")
    shown.press("Escape")
    shown.until(lambda: light(shown) == mean)
    assert shown.ask("v.state.pinned") is None


def test_shift_and_arrows_go_from_place_to_place(served: Show) -> None:
    shown = loaded(served(corners()))
    shown.press("Shift+ArrowLeft")  # begins where most is
    assert shown.page.inner_text("[aria-live]") == "row 1, column 3: right 1, left 0.25"
    assert tint(shown, word(0)) > 200
    shown.press("Shift+ArrowDown", "Shift+ArrowLeft", "Shift+ArrowLeft", "Shift+ArrowLeft")
    assert shown.page.inner_text("[aria-live]") == "row 2, column 1: left 0.75, right 0"
    shown.press("Escape")
    assert tint(shown, word(0)) == 0


def test_heads_and_layers_are_chosen_as_elsewhere(served: Show) -> None:
    # A Transformer: its encoder's patches look at patches, its decoder's words at words and at patches.
    scene = drawing(heads=2, layers=2)
    words = scene.layers[0].shape[0]
    told = ViewerLayer("told", "causal self", (words, words), (0,), ArrayWeightSource(np.eye(words, dtype=np.float32)))
    seen = ViewerLayer("encoder", "self", (56, 56), (0, 1), ArrayWeightSource(np.full((2, 56, 56), 1 / 56, np.float32)))
    shown = loaded(served(replace(scene, layers=(told, seen, *scene.layers))))
    assert shown.ask("[v.state.view, v.state.layer, v.state.head]") == ["image", 3, None]
    assert shown.text('[aria-label="Layer"] option') == ["encoder", *(layer.name for layer in scene.layers)]
    most = "Math.max(...v.views.image.weights(1))"
    mean = shown.ask(most)
    shown.page.click('[data-head="0"]')
    shown.until(lambda: bool(shown.ask(most) > 1.5 * mean))
    shown.press("h")
    shown.until(lambda: shown.ask(most) == pytest.approx(1 / 56, rel=1e-3))
    shown.press("ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp")  # what is over no picture is passed over
    assert shown.ask("[v.state.view, v.state.layer]") == ["image", 1]
    shown.until(lambda: shown.page.inner_text(".jm-current").startswith("Mean of all patches"))
    assert shown.page.locator(".jm-thumbnail").count() == 0
    shown.press("ArrowDown")
    shown.until(lambda: shown.page.locator(".jm-thumbnail").count() == words)


def test_a_finger_does_it_too(served: Show) -> None:
    shown = loaded(served(corners(), viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True))
    shown.page.tap(word(1))
    shown.page.wait_for_selector(f"{word(1)}.jm-is-pinned")
    assert light(shown)[3] > light(shown)[2] + 60
    shown.page.touchscreen.tap(*point(shown, *RIGHT))
    shown.until(lambda: tint(shown, word(0)) > tint(shown, word(1)) + 100)
    assert "row 1, column 3" in shown.page.inner_text(".jm-tooltip")  # and it stays when the finger is gone
    shown.page.tap(".jm-title")
    shown.until(lambda: tint(shown, word(0)) == 0)


# ------------------------------------------------------------------------------- other pictures, other hosts


def test_two_pictures_are_switched_between(served: Show) -> None:
    shown = loaded(served([drawing(0), drawing(1, language="ko")]))
    shown.press("c")
    korean = drawing(1, language="ko").layers[0].row_labels
    shown.until(lambda: shown.text(".jm-thumbnail") == list(korean or ()))
    assert shown.text(".jm-caption .jm-token") == list(korean or ())
    shown.page.hover(word(1))
    shown.press("c")
    shown.until(lambda: " ".join(shown.text(".jm-caption .jm-token")) == drawing(0).title)


def test_a_file_has_all_of_it_and_a_word_is_text(saved: Show) -> None:
    shown = loaded(saved(corners((SCRIPT, "<b>bold</b>", "שלום")), color_scheme="dark"))
    assert shown.text(".jm-caption .jm-token") == [SCRIPT, "<b>bold</b>", "שלום"]
    assert shown.page.locator(".jm-image :is(script, b, img:not(.jm-photo))").count() == 0
    shown.page.hover(word(1))
    assert light(shown)[3] > light(shown)[2] + 60
    shown.page.mouse.move(*point(shown, *RIGHT))
    assert SCRIPT in shown.page.inner_text(".jm-tooltip")
    nameless = """[...document.querySelectorAll("button, select, input, canvas[role=img], img")].filter((e) =>
        !(e.getAttribute("aria-label") || e.alt || e.textContent.trim() || e.closest("label")))"""
    assert shown.ask(f"{nameless}.length") == 0


def test_in_a_notebook_it_is_asked_for_by_messages(new_page: Show) -> None:
    """As anywidget has it: a model with `get`, `on` and `send`, here answered from a picture of our own."""
    scene = corners()
    weights = scene.layers[0].source.weights(0, slice(0, 2), slice(0, 6))
    shown = new_page()
    shown.page.set_content("<div id=viewer></div>")
    shown.page.add_style_tag(content=assets.build_style_sheet())
    shown.page.evaluate(
        """async ([script, manifest, weights]) => {
            const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
            const { default: { render } } = await import(url);
            let heard = () => {};
            const on = (name, f) => name === "msg:custom" && (heard = f);
            const model = { get: (name) => ({ manifest })[name], on, off: () => {},
                send: ({ id, request: { rows, cols } }) => {
                    const [tall, wide] = [rows[1] - rows[0], cols[1] - cols[0]];
                    const data = new ArrayBuffer(16 + 4 * tall * wide), head = new DataView(data);
                    [tall, wide, 1].forEach((n, k) => head.setUint32(4 * k, n, true));
                    head.setFloat32(12, 1, true);
                    new Float32Array(data, 16).set(weights.slice(rows[0], rows[1]).flat());
                    setTimeout(() => heard({ id }, [new DataView(data)]));
                } };
            render({ model, el: document.querySelector("#viewer") });
        }""",
        [assets.build_script(), build_manifest([scene]), np.asarray(weights).tolist()],
    )
    loaded(shown)
    shown.page.hover(word(1))
    shown.until(lambda: light(shown)[3] > light(shown)[2] + 60)
    assert shown.page.locator(".jm-thumbnail").count() == 2


# ----------------------------------------------------------------------------------- patches, parts, trouble


def test_patches_look_at_patches(served: Show) -> None:
    # A class token and 2 × 3 patches: each patch looks at the one after it, the class token at the fourth.
    weights = np.zeros((7, 7), np.float32)
    for n in range(1, 7):
        weights[n, n % 6 + 1] = 1
    weights[0, 4] = 1
    picture = AttendedImage.from_pixels(np.full((200, 300, 3), 128, np.uint8), (2, 3), 1)
    names = ["[CLS]", *(f"p{n}" for n in range(6))]
    shown = loaded(served(ViewerData.from_weights({"vit": weights}, row_labels=names, kind="self", image=picture)))
    assert shown.page.inner_text(".jm-current").startswith("Mean of all patches")
    assert shown.page.locator(".jm-thumbnail").count() == 0
    shown.page.mouse.click(*point(shown, *RIGHT))
    shown.until(lambda: "Patch at row 1, column 3" in shown.page.inner_text(".jm-current"))
    shown.until(lambda: light(shown)[3] > max(light(shown)[4:]) + 60)  # the third looks at the fourth
    shown.page.mouse.move(*point(shown, *LEFT))
    shown.until(lambda: shown.page.inner_text(".jm-tooltip").split("\n") == ["row 2, column 1", "1"])
    assert shown.text(".jm-caption .jm-token") == ["[CLS]"]
    shown.page.click(word(0))
    shown.until(lambda: shown.page.inner_text(".jm-current").startswith("[CLS]"))
    assert light(shown)[3] > light(shown)[2] + 60


def test_a_grid_may_cover_a_part_of_the_picture(served: Show) -> None:
    # The model saw the middle third, so that "right" is at its upper right: a bit right of the middle.
    shown = loaded(served(corners(part=(1 / 3, 0.0, 2 / 3, 1.0))))
    shown.page.mouse.move(*point(shown, 0.25, 0.61))
    assert shown.page.inner_text(".jm-tooltip").startswith("row 1, column 3")
    shown.page.mouse.move(*point(shown, 0.25, 0.9))
    assert shown.page.is_hidden(".jm-tooltip")
    shown.page.hover(word(0))
    script = """[0.1, 0.61, 0.9].map((x) => { const c = v.views.image.overlay;
        const d = c.getContext("2d").getImageData(c.width * x, c.height / 4, 1, 1).data;
        return [d[0] + d[1] + d[2], d[3]]; })"""
    (dim, cover), (bright, _), (also_dim, _) = shown.ask(script)
    assert bright > dim + 200
    assert dim == also_dim
    assert cover == pytest.approx(255 * 0.7 * 0.88, abs=2)  # never seen, and still to be seen


def test_what_does_not_come_is_told(served: Show) -> None:
    def refuse(page: Any) -> None:
        page.route("**/tiles?*quantity=weights*", lambda route: route.fulfill(status=400, json={"error": "busy."}))

    shown = served(corners(), before=refuse)
    shown.until(lambda: shown.page.inner_text(".jm-current") == "busy.")
    shown.page.hover(word(1))
    shown.press("ArrowRight", "Shift+ArrowRight")
    assert all("400" in complaint for complaint in shown.complaints)  # the browser's own word for it
    shown.complaints.clear()


def test_a_damaged_picture_is_told_and_the_words_are_there(served: Show) -> None:
    scene = corners()
    shown = served(replace(scene, image=AttendedImage(b"\x89PNG" + bytes(40), (2, 3))))
    shown.until(lambda: "cannot show the image" in shown.page.inner_text(".jm-current"))
    shown.page.hover(word(1))
    assert shown.text(".jm-thumbnail") == ["right", "left"]


def test_the_colours_are_those_of_the_figure(new_page: Show) -> None:
    colours = module(new_page(), "colours.js", "m.getScale('overlay', 'dark')")
    hexes = ["#" + "".join(f"{value:02x}" for value in colours[n]) for n in (0, 32, 64, 96, 128, 160, 191, 223, 255)]
    assert tuple(hexes) == OVERLAY_COLOURS
