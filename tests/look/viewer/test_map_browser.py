"""The viewer in a real browser: each view shows what it should, and hands, keys and eyes are served."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from huge_map import HugeMap

from jumok.look.viewer import assets
from jumok.look.viewer.tiles import TileRequest
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer, answer_request, build_manifest

Show = Callable[..., Any]

KOREAN = ["이것은", "예문이다", "</s>"]
ENGLISH = ["this", "is", "an", "example", "</s>"]
MIXED = ["<script>alert(1)</script>", "שלום", "👩‍👩‍👧‍👦", "<b>bold</b>", "日本語"]
# Each query looks mostly at one key: 0 → 0, 1 → 3, 2 → 4.
LINKS = {0: 0, 1: 3, 2: 4}


def translation(heads: int = 2, label: str = "") -> ViewerData:
    weights = np.full((heads, 3, 5), 0.05, np.float32)
    for head in range(heads):
        for row, col in LINKS.items():
            weights[head, row, (col + head) % 5] = 0.8
    return ViewerData.from_weights(
        {"decoder": weights}, row_labels=KOREAN, col_labels=ENGLISH, title="이것은 예문이다", label=label
    )


def layers(count: int = 3, heads: int = 4, length: int = 7) -> ViewerData:
    """Layer l, head h: every token looks at token (l + h) mod length."""
    words = [f"w{n}" for n in range(length)]
    found = {}
    for layer in range(count):
        weights = np.zeros((heads, length, length), np.float32)
        for head in range(heads):
            weights[head, :, (layer + head) % length] = 1
        found[f"encoder.layer.{layer}.attention"] = weights
    return ViewerData.from_weights(found, row_labels=words, col_labels=words, kind="self")


def huge(length: int = 65_536) -> ViewerData:
    words = [f"t{n}" for n in range(length)]
    return ViewerData(
        (ViewerLayer("model.layers.0", "self", (length, length), (0, 1), HugeMap(length, 2), words, words),)
    )


# The arguments of a function of the canvas' place and the overview's.
BOX = "(map.canvas.getBoundingClientRect(), map.minimap)"


def darkness(colour: list[int]) -> int:
    return 765 - sum(colour)


# ----------------------------------------------------------------------------------------- the map


def test_the_map_is_the_right_way_round_and_darker_is_more(served: Show) -> None:
    shown = served(translation())
    for row, col in LINKS.items():
        others = [darkness(shown.colour(row, other)) for other in range(5) if other != col]
        assert darkness(shown.colour(row, col)) > 300 + max(others)
    assert "3 × 5" in shown.page.inner_text(".jm-subtitle")


def test_hovering_shows_the_pair_and_its_exact_weight(served: Show) -> None:
    shown = served(translation())
    assert shown.hover(1, 3).split() == ["예문이다", "→", "example", "0.8"]
    assert shown.hover(0, 1).split()[:3] == ["이것은", "→", "is"]
    odd = np.float32(0.123456)  # the tile rounds it; what is asked for once the pointer rests does not
    weights = np.array([[odd, 1 - odd]], np.float32)
    shown = served(ViewerData.from_weights({"a": weights}, row_labels=["q"], col_labels=["k", "l"]))
    shown.hover(0, 0)
    shown.page.wait_for_function("() => document.querySelector('.jm-weight').textContent === '0.12346'")
    shown.page.mouse.move(2, 2)
    shown.page.wait_for_selector(".jm-tooltip", state="hidden")


def test_clicking_pins_a_row_and_lists_what_it_looks_at(served: Show) -> None:
    shown = served(translation())
    assert not shown.page.is_visible(".jm-panel")
    shown.click(1, 0)
    shown.page.wait_for_selector(".jm-rank li")
    assert shown.text(".jm-panel-title")[0].split() == ["예문이다", "1"]
    assert shown.text(".jm-rank .jm-key")[0] == "example"
    assert shown.text(".jm-rank .jm-values")[0] == "0.8"
    assert len(shown.text(".jm-rank li")) == 5
    # 0.8 and four times 0.05: 0.8 · log2(1/0.8) + 0.2 · log2(20)
    assert "Entropy 1.12 bits" in shown.page.inner_text(".jm-panel")
    shown.press("Escape")
    assert not shown.page.is_visible(".jm-panel")
    shown.click(2, 2)
    shown.page.wait_for_selector(".jm-rank li")
    shown.click(2, 4)  # once more: unpinned
    assert not shown.page.is_visible(".jm-panel")


def test_numbers_can_stand_in_the_cells_and_a_map_can_be_saved(served: Show) -> None:
    shown = served(translation())
    with shown.page.expect_download() as waiting:
        shown.page.click('[aria-label="Save as image"]')
    data = waiting.value.path().read_bytes()
    assert data.startswith(b"\x89PNG")
    assert waiting.value.suggested_filename == "decoder-head-0.png"
    before = shown.ask("map.canvas.toDataURL()")
    shown.press("n")
    shown.rest()
    assert shown.ask("map.canvas.toDataURL()") != before


def test_a_curve_and_a_scale_can_be_chosen(served: Show) -> None:
    shown = served(translation())
    pale = darkness(shown.colour(0, 1))
    shown.page.select_option('[aria-label="Curve of the scale"]', "log")
    assert darkness(shown.colour(0, 1)) > pale + 100
    shown.page.select_option('[aria-label="Colours"]', "grey")
    assert len(set(shown.colour(0, 0))) == 1


# ----------------------------------------------------------------------------------------- deep zoom


def test_a_map_of_four_billion_weights_is_zoomed_into_down_to_its_words(served: Show) -> None:
    asked: list[str] = []
    shown = served(huge(), before=lambda page: page.on("request", lambda r: asked.append(r.url)))
    spans = {re.search(r"rows=(\d+)%2C(\d+)", url).groups() for url in asked if "/tiles" in url}  # type: ignore[union-attr]
    assert spans == {("0", "65536")}  # one tile shows all of it
    assert shown.hover(40_000, 8_000).startswith("rows 39,936 to 40,191")
    row, col = 30_000, 29_995
    for _ in range(60):
        shown.page.mouse.move(*shown.cell(row, col))
        shown.page.mouse.wheel(0, -400)
        if shown.ask("map.view.sx") > 40:
            break
        shown.page.wait_for_timeout(15)
    shown.rest()
    assert shown.ask("map.view.sx") > 40
    told = shown.hover(row, col).split()
    assert told[:3] == ["t30000", "→", "t29995"]
    expected = HugeMap(65_536, 2).weights(0, slice(row, row + 1), slice(col, col + 1))[0, 0]
    assert float(told[3]) == pytest.approx(expected, rel=2e-3)
    assert len([url for url in asked if "/tiles" in url]) < 400
    shown.press("0")
    shown.rest()
    assert shown.ask("map.isWhole()")


def test_tiles_come_nearest_first_and_are_given_up_when_left(served: Show) -> None:
    shown = served(huge())
    order = shown.ask(
        """(async () => {
            const asked = [], given_up = [], host = v.store.host;
            v.store.parallel = 1;
            v.store.host = (request, signal) => new Promise((resolve, reject) => {
                asked.push([request.rows, request.cols].map(([first, last]) => (first + last) / 2));
                signal.addEventListener("abort", () => {
                    given_up.push(1);
                    reject(new DOMException("", "AbortError"));
                });
                setTimeout(() => host(request, signal).then(resolve, reject), 30);
            });
            const wait = (ms) => new Promise((done) => setTimeout(done, ms));
            map.view.sx = map.view.sy = 0.6; map.view.x = 20000; map.view.y = 30000; map.moved();
            await wait(800);
            const { view } = map, plot = map.plot();
            const middle = [view.y + plot.h / view.sy / 2, view.x + plot.w / view.sx / 2];
            const first = asked.map(([y, x]) => Math.hypot(y - middle[0], x - middle[1]));
            asked.length = 0;
            map.view.x = 50000; map.view.y = 52000; map.moved();
            await wait(45);
            map.view.x = 1000; map.view.y = 9000; map.moved();
            await wait(900);
            const left = asked.filter(([y]) => y > 45000).length;
            return { first, left, given_up: given_up.length };
        })()"""
    )
    assert len(order["first"]) >= 4
    assert order["first"] == sorted(order["first"])
    assert order["given_up"] >= 1
    assert order["left"] <= 3  # of dozens in sight there: what was under way when it was left


def test_dragging_pans_and_the_overview_shows_where_one_is(served: Show) -> None:
    shown = served(huge())
    shown.ask("map.zoom(40)")
    shown.rest()
    x, y = shown.ask("(() => { const b = map.canvas.getBoundingClientRect(); return [b.left + 300, b.top + 200]; })()")
    before = shown.ask("[map.view.x, map.view.y, map.view.sx]")
    shown.page.mouse.move(x, y)
    shown.page.mouse.down()
    shown.page.mouse.move(x - 90, y - 60, steps=4)
    shown.page.mouse.up()
    shown.rest()
    after = shown.ask("[map.view.x, map.view.y, map.view.sx]")
    assert after[0] - before[0] == pytest.approx(90 / before[2], rel=0.02)
    assert after[1] - before[1] == pytest.approx(60 / before[2], rel=0.02)
    assert not shown.page.is_visible(".jm-panel")  # a drag pins nothing
    box = shown.ask("((b, o) => [b.left + o.x, b.top + o.y, o.w, o.h])" + BOX)
    shown.page.mouse.click(box[0] + 0.25 * box[2], box[1] + 0.75 * box[3])
    shown.rest()
    middle = shown.ask("((p, w) => [w.x + p.w / w.sx / 2, w.y + p.h / w.sy / 2])(map.plot(), map.view)")
    assert middle == pytest.approx([0.25 * 65_536, 0.75 * 65_536], rel=0.03)


def test_a_server_that_fails_is_told_of_and_asked_again(served: Show) -> None:
    shown = served(layers())
    failing = True

    def answer(route: Any) -> None:
        if failing:
            route.fulfill(status=503, json={"error": "the device is busy."})
        else:
            route.continue_()

    shown.page.route("**/tiles?*", answer)
    shown.page.reload()  # so that nothing was asked for before
    shown.page.wait_for_selector(".jm-error:not([hidden])")
    shown.press("ArrowRight")
    shown.page.wait_for_selector(".jm-error:not([hidden])")
    assert "the device is busy." in shown.page.inner_text(".jm-error")
    failing = False
    shown.page.wait_for_selector(".jm-error", state="hidden")
    shown.rest()
    assert darkness(shown.colour(0, 1)) > 300
    assert all("503" in complaint for complaint in shown.complaints)  # the browser's own word for it
    shown.complaints.clear()


# ----------------------------------------------------------------------------------------- other views


def test_arcs_join_queries_and_keys(served: Show) -> None:
    shown = served(translation())
    shown.press("2")
    shown.page.wait_for_selector(".jm-arcs svg path")
    assert shown.text(".jm-word[data-side=rows] text") == KOREAN
    assert shown.text(".jm-word[data-side=cols] text") == ENGLISH
    paths = shown.page.locator(".jm-arcs svg path")
    assert paths.count() == 15  # 0.05 is above the threshold
    shown.page.locator('[aria-label="Minimum weight of an arc"]').fill("0.1")
    assert paths.count() == 3
    shown.page.hover('.jm-word[data-side="rows"][data-place="1"]')
    strong = [float(path.get_attribute("stroke-opacity")) > 0.5 for path in paths.all()]
    assert sum(strong) == 1
    shown.page.click('.jm-word[data-side="rows"][data-place="1"]')
    shown.page.wait_for_selector(".jm-rank li")
    assert shown.text(".jm-rank .jm-key")[0] == "example"
    with shown.page.expect_download() as waiting:
        shown.page.click('[aria-label="Save as image"]')
    saved = waiting.value.path().read_text(encoding="utf-8")
    assert saved.startswith("<svg") and "예문이다" in saved  # noqa: PT018


def test_arcs_of_a_long_input_show_a_part_of_it(served: Show) -> None:
    shown = served(layers(1, 1, 401))
    shown.press("2")
    shown.page.wait_for_selector(".jm-arcs svg path")
    assert "0 to 159 of 401" in shown.page.inner_text(".jm-pager")
    shown.page.click('[aria-label="Next queries"]')
    shown.page.wait_for_selector('.jm-word[data-side="rows"][data-place="239"]')
    assert shown.text(".jm-word[data-side=rows] text")[0] == "w80"
    assert shown.text(".jm-word[data-side=cols] text")[0] == "w0"


def test_all_heads_are_small_maps_and_open_when_clicked(served: Show) -> None:
    shown = served(layers())
    shown.press("4")
    shown.rest()
    assert shown.page.locator(".jm-head-map").count() == 12
    assert shown.text(".jm-heads-name")[1:] == ["layer 0", "layer 1", "layer 2"]
    # In layer 2, head 1 all look at token 3 of 7: its column is dark in the small map.
    script = """(() => {
        const c = document.querySelector('.jm-head-map[data-layer="2"][data-head="1"] canvas');
        const g = c.getContext("2d"), w = c.width;
        const at = (n) => [...g.getImageData(Math.floor((n + 0.5) * w / 7), 20, 1, 1).data];
        return [0, 1, 2, 3, 4, 5, 6].map(at); })()"""
    shown.until(lambda: np.argmax([darkness(colour[:3]) for colour in shown.ask(script)]) == 3)
    shown.page.click('.jm-head-map[data-layer="2"][data-head="1"]')
    shown.rest()
    assert shown.ask("[v.state.view, v.state.layer, v.state.head]") == ["map", 2, 1]
    assert darkness(shown.colour(5, 3)) > 300


def test_the_text_is_tinted_by_what_it_receives(served: Show) -> None:
    weights = np.array([[0.1, 0.8, 0.1], [0.0, 0.9, 0.1], [0.2, 0.4, 0.4]], np.float32)
    words = ["나는", "학교에", "간다"]
    shown = served(ViewerData.from_weights({"a": weights}, row_labels=words, col_labels=words, kind="self"))
    shown.press("3")
    shown.page.wait_for_selector(".jm-token")
    tint = "e => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)"

    def tints() -> list[int]:
        return [darkness(token.evaluate(tint)[:3]) for token in shown.page.locator(".jm-token").all()]

    assert shown.text(".jm-token") == words
    assert np.argsort(tints()).tolist() == [0, 2, 1]  # 0.1, 0.2 and 0.7 on average
    shown.page.hover(".jm-token >> nth=1")
    assert shown.page.inner_text(".jm-tooltip").split() == ["학교에", "1", "0.7"]
    shown.page.click(".jm-token >> nth=2")
    shown.page.wait_for_selector(".jm-token.jm-is-pinned")
    assert "Attention of 간다" in shown.page.inner_text(".jm-lead")
    assert np.argmin(tints()) == 0


def test_queries_and_keys_of_two_texts_are_two_blocks(served: Show) -> None:
    shown = served(translation())
    shown.press("3")
    shown.page.wait_for_selector(".jm-token")
    assert shown.text(".jm-token[data-axis=rows]") == KOREAN
    assert shown.text(".jm-token[data-axis=cols]") == ENGLISH


def test_a_long_text_comes_in_pages(served: Show) -> None:
    shown = served(huge(20_000))
    shown.press("3")
    shown.page.wait_for_selector(".jm-token")
    assert shown.page.locator(".jm-token").count() == 1200
    shown.page.click('[aria-label="Next tokens"]')
    assert shown.text(".jm-token >> nth=0") == ["t1200"]
    shown.page.click(".jm-strip", position={"x": 500, "y": 10})
    assert 5_000 < int(shown.text(".jm-token >> nth=0")[0][1:]) < 15_000


def test_before_and_after_are_compared(served: Show) -> None:
    cells = np.zeros((2, 3, 5), np.float32)
    cells[:, :, 1:] = 0.25
    after = ViewerData.from_weights({"decoder": cells}, row_labels=KOREAN, col_labels=ENGLISH, label="After")
    shown = served([translation(label="Before"), after])
    assert shown.text(".jm-comparisons button") == ["Before", "After", "Both", "Difference"]
    assert darkness(shown.colour(0, 0)) > darkness(shown.colour(0, 1)) + 200
    shown.press("c")
    assert shown.ask("v.state.comparison") == 1
    assert darkness(shown.colour(0, 0)) < darkness(shown.colour(0, 1))
    shown.press("c")
    shown.rest()
    assert shown.text(".jm-caption-line") == ["Before", "After"]
    assert darkness(shown.colour(0, 0, 0)) > darkness(shown.colour(0, 0, 1)) + 200
    shown.ask("v.maps[0].zoom(1.3)")
    assert shown.ask("v.maps[0].view.sx === v.maps[1].view.sx")
    shown.press("c")
    shown.rest()
    red, _, blue = shown.colour(0, 0)  # 0.8 less: orange
    assert red > blue + 60
    red, _, blue = shown.colour(0, 1)  # 0.2 more: blue
    assert blue > red + 30
    shown.click(0, 2)
    shown.page.wait_for_selector(".jm-rank li")
    assert shown.text(".jm-rank .jm-values >> nth=0 >> span") == ["0.8", "0"]


# ----------------------------------------------------------------------------------------- hands and eyes


def test_keys_choose_layers_and_heads_and_move_over_the_map(served: Show) -> None:
    shown = served(layers())
    shown.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight")
    shown.rest()
    assert shown.ask("[v.state.layer, v.state.head]") == [2, 1]
    assert shown.page.input_value('[aria-label="Layer"]') == "2"
    assert shown.page.locator('[role=radio][aria-checked="true"]').inner_text() == "1"
    assert darkness(shown.colour(4, 3)) > 300
    assert "encoder.layer.2.attention, head 1" in shown.page.inner_text("[aria-live]")
    shown.press("ArrowUp", "ArrowLeft", "ArrowLeft")
    assert shown.ask("[v.state.layer, v.state.head]") == [1, 0]
    shown.rest()
    shown.press("Shift+ArrowRight", "Shift+ArrowRight", "Shift+ArrowDown")
    assert shown.page.inner_text("[aria-live]") == "w1 to w1: 1"
    shown.press("Enter")
    shown.page.wait_for_selector(".jm-rank li")
    assert shown.text(".jm-panel-title")[0].split() == ["w1", "1"]
    shown.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight")
    assert shown.ask("v.state.head") is None  # the mean of all heads, after the last
    shown.press("?")
    assert shown.page.is_visible("dialog.jm-help")
    shown.press("Escape")
    assert not shown.page.is_visible("dialog.jm-help")


def test_arrows_stay_with_a_box_that_has_the_focus(served: Show) -> None:
    shown = served(layers())
    shown.page.focus('[aria-label="Contrast"]')
    shown.press("ArrowRight")
    assert shown.ask("[v.state.layer, v.state.head]") == [0, 0]


def test_light_and_dark_follow_the_system_until_one_chooses(served: Show) -> None:
    shown = served(translation(), color_scheme="dark")
    assert shown.ask("v.layout.root.dataset.theme") == "dark"
    assert darkness(shown.colour(0, 0)) + 250 < darkness(shown.colour(0, 1))  # in the dark, more is lighter
    shown.page.emulate_media(color_scheme="light")
    shown.page.wait_for_selector(".jumok[data-theme=light]")
    shown.press("t")
    assert shown.ask("v.layout.root.dataset.theme") == "dark"
    shown.page.emulate_media(color_scheme="dark")
    shown.page.emulate_media(color_scheme="light")
    assert shown.ask("v.layout.root.dataset.theme") == "dark"


def test_tokens_are_text_whatever_they_hold(served: Show) -> None:
    weights = np.full((2, 5, 5), 0.2, np.float32)
    scene = ViewerData.from_weights(
        {"<i>layer</i>": weights},
        row_labels=MIXED,
        col_labels=MIXED,
        kind="self",
        title="<img src=x onerror=alert(1)>",
    )
    shown = served(scene)
    assert shown.page.inner_text(".jm-title") == "<img src=x onerror=alert(1)>"
    assert shown.hover(0, 3).split()[:3] == ["<script>alert(1)</script>", "→", "<b>bold</b>"]
    shown.click(0, 1)
    shown.page.wait_for_selector(".jm-rank li")
    assert set(shown.text(".jm-rank .jm-key")) == set(MIXED)
    assert shown.page.locator(".jm-rank .jm-key").first.evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"
    shown.press("2")
    shown.page.wait_for_selector(".jm-word")
    assert shown.text(".jm-word[data-side=cols] title") == MIXED
    assert shown.text(".jm-word[data-side=cols] text")[1:] == MIXED[1:]
    shown.press("3")
    shown.page.wait_for_selector(".jm-token")
    assert shown.text(".jm-token") == MIXED
    assert shown.page.locator(".jumok :is(b, i, img[src=x], script)").count() == 0


@pytest.mark.parametrize("width", [360, 390, 768, 1400])
def test_it_fits_the_screen(served: Show, width: int) -> None:
    shown = served([layers(), layers()], viewport={"width": width, "height": 760})
    for key in "1234":
        shown.press(key)
        shown.rest()
        assert shown.ask("document.documentElement.scrollWidth") <= width
    shown.press("1")
    shown.click(1, 1)
    shown.page.wait_for_selector(".jm-rank li")
    assert shown.ask("document.documentElement.scrollWidth") <= width


def test_everything_one_can_press_has_a_name(served: Show) -> None:
    shown = served([layers(), layers()])
    nameless = """[...document.querySelectorAll("button, select, input, canvas[role=img]")]
        .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.closest("label")))
        .map((e) => e.outerHTML)"""
    for key in "1234":
        shown.press(key)
        shown.rest()
        assert shown.page.evaluate(nameless) == []
    assert shown.page.locator('[role=tab][aria-selected="true"]').inner_text() == "Heads"


def test_the_files_run_unjoined_too(new_page: Show) -> None:
    scene = layers()

    def serve(route: Any) -> None:
        url = urlsplit(route.request.url)
        if url.path == "/":
            text = '<main id="viewer" data-base=""></main><script type="module" src="/boot_page.js"></script>'
            route.fulfill(body=f"<!doctype html><body>{text}", content_type="text/html")
        elif url.path == "/manifest.json":
            route.fulfill(json=build_manifest([scene]))
        elif url.path == "/tiles":
            wanted = TileRequest.from_mapping({name: values[0] for name, values in parse_qs(url.query).items()})
            route.fulfill(body=answer_request([scene], wanted))
        elif url.path.endswith(".js"):
            route.fulfill(body=assets.read_asset(url.path[1:]), content_type="text/javascript")
        else:
            route.fulfill(status=204)

    shown = new_page()
    shown.page.route("**/*", serve)
    shown.page.goto("http://jumok.test/")
    shown.ready()
    for key in "1234":
        shown.press(key)
        shown.rest()
    shown.press("1")
    shown.hover(2, 0)
    shown.click(2, 0)
    shown.page.wait_for_selector(".jm-rank li")
