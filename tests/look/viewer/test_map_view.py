"""The viewer in a real browser: each view shows what it should, and hands, keys and eyes are open_served."""

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

pytestmark = pytest.mark.long


OpenPage = Callable[..., Any]

KOREAN = ["이것은", "예문이다", "</s>"]
ENGLISH = ["this", "is", "an", "example", "</s>"]
MIXED = ["<script>alert(1)</script>", "שלום", "👩‍👩‍👧‍👦", "<b>bold</b>", "日本語"]
# Each query attends mostly to one key: 0 → 0, 1 → 3, 2 → 4.
LINKS = {0: 0, 1: 3, 2: 4}


def build_translation_data(heads: int = 2, label: str = "") -> ViewerData:
    weights = np.full((heads, 3, 5), 0.05, np.float32)
    for head in range(heads):
        for row, col in LINKS.items():
            weights[head, row, (col + head) % 5] = 0.8
    return ViewerData.from_weights(
        {"decoder": weights}, row_labels=KOREAN, col_labels=ENGLISH, title="이것은 예문이다", label=label
    )


def build_layered_data(count: int = 3, heads: int = 4, length: int = 7) -> ViewerData:
    """In layer l and head h, every token attends to token (l + h) mod length."""
    words = [f"w{n}" for n in range(length)]
    weights_by_layer = {}
    for layer in range(count):
        weights = np.zeros((heads, length, length), np.float32)
        for head in range(heads):
            weights[head, :, (layer + head) % length] = 1
        weights_by_layer[f"encoder.layer.{layer}.attention"] = weights
    return ViewerData.from_weights(weights_by_layer, row_labels=words, col_labels=words, kind="self")


def build_huge_data(length: int = 65_536) -> ViewerData:
    words = [f"t{n}" for n in range(length)]
    return ViewerData(
        (ViewerLayer("model.layers.0", "self", (length, length), (0, 1), HugeMap(length, 2), words, words),)
    )


# Arguments of a function of the box of the canvas and of the minimap.
BOX = "(map.canvas.getBoundingClientRect(), map.minimap)"


def compute_darkness(colour: list[int]) -> int:
    return 765 - sum(colour)


# ---------------------------------------------------------------- maps


def test_map_orientation_and_shades(open_served: OpenPage) -> None:
    viewer = open_served(build_translation_data())
    for row, col in LINKS.items():
        others = [compute_darkness(viewer.get_cell_colour(row, other)) for other in range(5) if other != col]
        assert compute_darkness(viewer.get_cell_colour(row, col)) > 300 + max(others)
    assert "3 × 5" in viewer.page.inner_text(".jm-subtitle")


def test_hover_shows_the_pair_and_its_exact_weight(open_served: OpenPage) -> None:
    viewer = open_served(build_translation_data())
    assert viewer.hover_cell(1, 3).split() == ["예문이다", "→", "example", "0.8"]
    assert viewer.hover_cell(0, 1).split()[:3] == ["이것은", "→", "is"]
    odd = np.float32(0.123456)  # a tile rounds it; the exact weight is fetched once the pointer rests
    weights = np.array([[odd, 1 - odd]], np.float32)
    viewer = open_served(ViewerData.from_weights({"a": weights}, row_labels=["q"], col_labels=["k", "l"]))
    viewer.hover_cell(0, 0)
    viewer.page.wait_for_function("() => document.querySelector('.jm-weight').textContent === '0.12346'")
    viewer.page.mouse.move(2, 2)
    viewer.page.wait_for_selector(".jm-tooltip", state="hidden")


def test_click_pins_a_row_and_lists_its_weights(open_served: OpenPage) -> None:
    viewer = open_served(build_translation_data())
    assert not viewer.page.is_visible(".jm-panel")
    viewer.click_cell(1, 0)
    viewer.page.wait_for_selector(".jm-rank li")
    assert viewer.get_texts(".jm-panel-title")[0].split() == ["예문이다", "1"]
    assert viewer.get_texts(".jm-rank .jm-key")[0] == "example"
    assert viewer.get_texts(".jm-rank .jm-values")[0] == "0.8"
    assert len(viewer.get_texts(".jm-rank li")) == 5
    # 0.8 and four times 0.05: 0.8 · log2(1/0.8) + 0.2 · log2(20)
    assert "Entropy 1.12 bits" in viewer.page.inner_text(".jm-panel")
    viewer.press("Escape")
    assert not viewer.page.is_visible(".jm-panel")
    viewer.click_cell(2, 2)
    viewer.page.wait_for_selector(".jm-rank li")
    viewer.click_cell(2, 4)  # the second click unpins
    assert not viewer.page.is_visible(".jm-panel")


def test_weights_in_cells_and_saving_the_map(open_served: OpenPage) -> None:
    viewer = open_served(build_translation_data())
    with viewer.page.expect_download() as download:
        viewer.page.click('[aria-label="Save as image"]')
    data = download.value.path().read_bytes()
    assert data.startswith(b"\x89PNG")
    assert download.value.suggested_filename == "decoder-head-0.png"
    before = viewer.evaluate("map.canvas.toDataURL()")
    viewer.press("n")
    viewer.wait_until_idle()
    assert viewer.evaluate("map.canvas.toDataURL()") != before


def test_curve_and_colours_can_be_selected(open_served: OpenPage) -> None:
    viewer = open_served(build_translation_data())
    pale = compute_darkness(viewer.get_cell_colour(0, 1))
    viewer.page.select_option('[aria-label="Curve of the scale"]', "log")
    assert compute_darkness(viewer.get_cell_colour(0, 1)) > pale + 100
    viewer.page.select_option('[aria-label="Colours"]', "grey")
    assert len(set(viewer.get_cell_colour(0, 0))) == 1


# ---------------------------------------------------------------- zoom


def test_huge_map_zooms_to_single_words(open_served: OpenPage) -> None:
    urls: list[str] = []
    viewer = open_served(build_huge_data(), before=lambda page: page.on("request", lambda r: urls.append(r.url)))
    spans = {re.search(r"rows=(\d+)%2C(\d+)", url).groups() for url in urls if "/tiles" in url}  # type: ignore[union-attr]
    assert spans == {("0", "65536")}  # one tile shows all of it
    assert viewer.hover_cell(40_000, 8_000).startswith("rows 39,936 to 40,191")
    row, col = 30_000, 29_995
    for _ in range(60):
        viewer.page.mouse.move(*viewer.locate_cell(row, col))
        viewer.page.mouse.wheel(0, -400)
        if viewer.evaluate("map.view.sx") > 40:
            break
        viewer.page.wait_for_timeout(15)
    viewer.wait_until_idle()
    assert viewer.evaluate("map.view.sx") > 40
    tooltip = viewer.hover_cell(row, col).split()
    assert tooltip[:3] == ["t30000", "→", "t29995"]
    expected = HugeMap(65_536, 2).weights(0, slice(row, row + 1), slice(col, col + 1))[0, 0]
    assert float(tooltip[3]) == pytest.approx(expected, rel=2e-3)
    assert len([url for url in urls if "/tiles" in url]) < 400
    viewer.press("0")
    viewer.wait_until_idle()
    assert viewer.evaluate("map.isWhole()")


def test_tiles_load_nearest_first_and_are_aborted(open_served: OpenPage) -> None:
    viewer = open_served(build_huge_data())
    order = viewer.evaluate(
        """(async () => {
            const requested = [], aborted = [], host = v.store.host;
            v.store.parallel = 1;
            v.store.host = (request, signal) => new Promise((resolve, reject) => {
                requested.push([request.rows, request.cols].map(([first, last]) => (first + last) / 2));
                signal.addEventListener("abort", () => {
                    aborted.push(1);
                    reject(new DOMException("", "AbortError"));
                });
                setTimeout(() => host(request, signal).then(resolve, reject), 30);
            });
            const wait = (ms) => new Promise((done) => setTimeout(done, ms));
            map.view.sx = map.view.sy = 0.6; map.view.x = 20000; map.view.y = 30000; map.moved();
            await wait(800);
            const { view } = map, plot = map.plot();
            const middle = [view.y + plot.h / view.sy / 2, view.x + plot.w / view.sx / 2];
            const first = requested.map(([y, x]) => Math.hypot(y - middle[0], x - middle[1]));
            requested.length = 0;
            map.view.x = 50000; map.view.y = 52000; map.moved();
            await wait(45);
            map.view.x = 1000; map.view.y = 9000; map.moved();
            await wait(900);
            const left = requested.filter(([y]) => y > 45000).length;
            return { first, left, aborted: aborted.length };
        })()"""
    )
    assert len(order["first"]) >= 4
    assert order["first"] == sorted(order["first"])
    assert order["aborted"] >= 1
    assert order["left"] <= 3  # of dozens of visible tiles, only requests in progress


def test_drag_pans_and_minimap_moves(open_served: OpenPage) -> None:
    viewer = open_served(build_huge_data())
    viewer.evaluate("map.zoom(40)")
    viewer.wait_until_idle()
    x, y = viewer.evaluate(
        "(() => { const b = map.canvas.getBoundingClientRect(); return [b.left + 300, b.top + 200]; })()"
    )
    before = viewer.evaluate("[map.view.x, map.view.y, map.view.sx]")
    viewer.page.mouse.move(x, y)
    viewer.page.mouse.down()
    viewer.page.mouse.move(x - 90, y - 60, steps=4)
    viewer.page.mouse.up()
    viewer.wait_until_idle()
    after = viewer.evaluate("[map.view.x, map.view.y, map.view.sx]")
    assert after[0] - before[0] == pytest.approx(90 / before[2], rel=0.02)
    assert after[1] - before[1] == pytest.approx(60 / before[2], rel=0.02)
    assert not viewer.page.is_visible(".jm-panel")  # a drag does not pin
    box = viewer.evaluate("((b, o) => [b.left + o.x, b.top + o.y, o.w, o.h])" + BOX)
    viewer.page.mouse.click(box[0] + 0.25 * box[2], box[1] + 0.75 * box[3])
    viewer.wait_until_idle()
    middle = viewer.evaluate("((p, w) => [w.x + p.w / w.sx / 2, w.y + p.h / w.sy / 2])(map.plot(), map.view)")
    assert middle == pytest.approx([0.25 * 65_536, 0.75 * 65_536], rel=0.03)


def test_server_errors_are_reported_and_retried(open_served: OpenPage) -> None:
    viewer = open_served(build_layered_data())
    failing = True

    def answer(route: Any) -> None:
        if failing:
            route.fulfill(status=503, json={"error": "the device is busy."})
        else:
            route.continue_()

    viewer.page.route("**/tiles?*", answer)
    viewer.page.reload()  # so that nothing is cached
    viewer.page.wait_for_selector(".jm-error:not([hidden])")
    viewer.press("ArrowRight")
    viewer.page.wait_for_selector(".jm-error:not([hidden])")
    assert "the device is busy." in viewer.page.inner_text(".jm-error")
    failing = False
    viewer.page.wait_for_selector(".jm-error", state="hidden")
    viewer.wait_until_idle()
    assert compute_darkness(viewer.get_cell_colour(0, 1)) > 300
    assert all("503" in complaint for complaint in viewer.errors)  # the message of the browser
    viewer.errors.clear()


# ---------------------------------------------------------------- arcs, heads and text


def test_arcs_connect_queries_and_keys(open_served: OpenPage) -> None:
    viewer = open_served(build_translation_data())
    viewer.press("2")
    viewer.page.wait_for_selector(".jm-arcs svg path")
    assert viewer.get_texts(".jm-word[data-side=rows] text") == KOREAN
    assert viewer.get_texts(".jm-word[data-side=cols] text") == ENGLISH
    paths = viewer.page.locator(".jm-arcs svg path")
    assert paths.count() == 15  # 0.05 is above the threshold
    viewer.page.locator('[aria-label="Minimum weight of an arc"]').fill("0.1")
    assert paths.count() == 3
    viewer.page.hover('.jm-word[data-side="rows"][data-place="1"]')
    strong = [float(path.get_attribute("stroke-opacity")) > 0.5 for path in paths.all()]
    assert sum(strong) == 1
    viewer.page.click('.jm-word[data-side="rows"][data-place="1"]')
    viewer.page.wait_for_selector(".jm-rank li")
    assert viewer.get_texts(".jm-rank .jm-key")[0] == "example"
    with viewer.page.expect_download() as download:
        viewer.page.click('[aria-label="Save as image"]')
    svg = download.value.path().read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert "예문이다" in svg


def test_arcs_of_a_long_input_are_paged(open_served: OpenPage) -> None:
    viewer = open_served(build_layered_data(1, 1, 401))
    viewer.press("2")
    viewer.page.wait_for_selector(".jm-arcs svg path")
    assert "0 to 159 of 401" in viewer.page.inner_text(".jm-pager")
    viewer.page.click('[aria-label="Next queries"]')
    viewer.page.wait_for_selector('.jm-word[data-side="rows"][data-place="239"]')
    assert viewer.get_texts(".jm-word[data-side=rows] text")[0] == "w80"
    assert viewer.get_texts(".jm-word[data-side=cols] text")[0] == "w0"


def test_heads_are_thumbnails_that_open_maps(open_served: OpenPage) -> None:
    viewer = open_served(build_layered_data())
    viewer.press("4")
    viewer.wait_until_idle()
    assert viewer.page.locator(".jm-head-map").count() == 12
    assert viewer.get_texts(".jm-heads-name")[1:] == ["layer 0", "layer 1", "layer 2"]
    # In layer 2, head 1, all attend to token 3 of 7: its column is dark in the small map.
    script = """(() => {
        const c = document.querySelector('.jm-head-map[data-layer="2"][data-head="1"] canvas');
        const g = c.getContext("2d"), w = c.width;
        const at = (n) => [...g.getImageData(Math.floor((n + 0.5) * w / 7), 20, 1, 1).data];
        return [0, 1, 2, 3, 4, 5, 6].map(at); })()"""
    viewer.wait_until(lambda: np.argmax([compute_darkness(colour[:3]) for colour in viewer.evaluate(script)]) == 3)
    viewer.page.click('.jm-head-map[data-layer="2"][data-head="1"]')
    viewer.wait_until_idle()
    assert viewer.evaluate("[v.state.view, v.state.layer, v.state.head]") == ["map", 2, 1]
    assert compute_darkness(viewer.get_cell_colour(5, 3)) > 300


def test_text_is_shaded_by_received_weight(open_served: OpenPage) -> None:
    weights = np.array([[0.1, 0.8, 0.1], [0.0, 0.9, 0.1], [0.2, 0.4, 0.4]], np.float32)
    words = ["나는", "학교에", "간다"]
    viewer = open_served(ViewerData.from_weights({"a": weights}, row_labels=words, col_labels=words, kind="self"))
    viewer.press("3")
    viewer.page.wait_for_selector(".jm-token")

    def get_shades() -> list[int]:
        return [viewer.get_darkness(f".jm-token >> nth={n}") for n in range(3)]

    assert viewer.get_texts(".jm-token") == words
    assert np.argsort(get_shades()).tolist() == [0, 2, 1]  # 0.1, 0.2 and 0.7 on average
    viewer.page.hover(".jm-token >> nth=1")
    assert viewer.page.inner_text(".jm-tooltip").split() == ["학교에", "1", "0.7", "mean", "weight", "received"]
    viewer.page.click(".jm-token >> nth=2")
    viewer.page.wait_for_selector(".jm-token.jm-is-pinned")
    assert "Attention of 간다" in viewer.page.inner_text(".jm-lead")
    assert np.argmin(get_shades()) == 0


def test_cross_attention_shows_queries_and_keys(open_served: OpenPage) -> None:
    viewer = open_served(build_translation_data())
    viewer.press("3")
    viewer.page.wait_for_selector(".jm-token")
    assert viewer.get_texts(".jm-token[data-axis=rows]") == KOREAN
    assert viewer.get_texts(".jm-token[data-axis=cols]") == ENGLISH


def test_long_text_is_paged(open_served: OpenPage) -> None:
    viewer = open_served(build_huge_data(20_000))
    viewer.press("3")
    viewer.page.wait_for_selector(".jm-token")
    assert viewer.page.locator(".jm-token").count() == 1200
    viewer.page.click('[aria-label="Next tokens"]')
    assert viewer.get_texts(".jm-token >> nth=0") == ["t1200"]
    viewer.page.click(".jm-strip", position={"x": 500, "y": 10})
    assert 5_000 < int(viewer.get_texts(".jm-token >> nth=0")[0][1:]) < 15_000


def test_two_runs_are_compared(open_served: OpenPage) -> None:
    cells = np.zeros((2, 3, 5), np.float32)
    cells[:, :, 1:] = 0.25
    after = ViewerData.from_weights({"decoder": cells}, row_labels=KOREAN, col_labels=ENGLISH, label="After")
    viewer = open_served([build_translation_data(label="Before"), after])
    assert viewer.get_texts(".jm-comparisons button") == ["Before", "After", "Both", "Difference"]
    assert compute_darkness(viewer.get_cell_colour(0, 0)) > compute_darkness(viewer.get_cell_colour(0, 1)) + 200
    viewer.press("c")
    assert viewer.evaluate("v.state.comparison") == 1
    assert compute_darkness(viewer.get_cell_colour(0, 0)) < compute_darkness(viewer.get_cell_colour(0, 1))
    viewer.press("c")
    viewer.wait_until_idle()
    assert viewer.get_texts(".jm-caption-line") == ["Before", "After"]
    assert compute_darkness(viewer.get_cell_colour(0, 0, 0)) > compute_darkness(viewer.get_cell_colour(0, 0, 1)) + 200
    viewer.evaluate("v.maps[0].zoom(1.3)")
    assert viewer.evaluate("v.maps[0].view.sx === v.maps[1].view.sx")
    viewer.press("c")
    viewer.wait_until_idle()
    red, _, blue = viewer.get_cell_colour(0, 0)  # 0.8 less: orange
    assert red > blue + 60
    red, _, blue = viewer.get_cell_colour(0, 1)  # 0.2 more: blue
    assert blue > red + 30
    viewer.click_cell(0, 2)
    viewer.page.wait_for_selector(".jm-rank li")
    assert viewer.get_texts(".jm-rank .jm-values >> nth=0 >> span") == ["0.8", "0"]


# ---------------------------------------------------------------- keys, theme and accessibility


def test_keys_select_layers_and_heads_and_move_between_cells(open_served: OpenPage) -> None:
    viewer = open_served(build_layered_data())
    viewer.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown")  # the mean over all layers, after the last
    assert viewer.evaluate("[v.state.layer, v.state.head]") == [3, None]
    assert "mean of all 3 layers: 7 queries" in viewer.page.inner_text("[aria-live]")
    viewer.press("ArrowUp", "h", "ArrowLeft", "ArrowLeft", "ArrowLeft")
    viewer.wait_until_idle()
    assert viewer.evaluate("[v.state.layer, v.state.head]") == [2, 1]
    assert viewer.page.input_value('[aria-label="Layer"]') == "2"
    assert viewer.page.locator('[role=radio][aria-checked="true"]').inner_text() == "1"
    assert compute_darkness(viewer.get_cell_colour(4, 3)) > 300
    assert "encoder.layer.2.attention, head 1" in viewer.page.inner_text("[aria-live]")
    viewer.press("ArrowUp", "ArrowLeft", "ArrowLeft")
    assert viewer.evaluate("[v.state.layer, v.state.head]") == [1, 0]
    viewer.wait_until_idle()
    viewer.press("Shift+ArrowRight", "Shift+ArrowRight", "Shift+ArrowDown")
    assert viewer.page.inner_text("[aria-live]") == "w1 to w1: 1"
    viewer.press("Enter")
    viewer.page.wait_for_selector(".jm-rank li")
    assert viewer.get_texts(".jm-panel-title")[0].split() == ["w1", "1"]
    viewer.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight")
    assert viewer.evaluate("v.state.head") is None  # the mean of all heads, after the last
    viewer.press("?")
    assert viewer.page.is_visible("dialog.jm-help")
    viewer.press("Escape")
    assert not viewer.page.is_visible("dialog.jm-help")


def test_arrow_keys_stay_with_a_focused_slider(open_served: OpenPage) -> None:
    viewer = open_served(build_layered_data())
    viewer.page.focus('[aria-label="Contrast"]')
    viewer.press("ArrowRight")
    assert viewer.evaluate("[v.state.layer, v.state.head]") == [0, 0]


def test_theme_follows_the_system_until_selected(open_served: OpenPage) -> None:
    viewer = open_served(build_translation_data(), color_scheme="dark")
    assert viewer.evaluate("v.layout.root.dataset.theme") == "dark"
    assert compute_darkness(viewer.get_cell_colour(0, 0)) + 250 < compute_darkness(
        viewer.get_cell_colour(0, 1)
    )  # in the dark, more is lighter
    viewer.page.emulate_media(color_scheme="light")
    viewer.page.wait_for_selector(".jumok[data-theme=light]")
    viewer.press("t")
    assert viewer.evaluate("v.layout.root.dataset.theme") == "dark"
    viewer.page.emulate_media(color_scheme="dark")
    viewer.page.emulate_media(color_scheme="light")
    assert viewer.evaluate("v.layout.root.dataset.theme") == "dark"


def test_tokens_are_never_parsed_as_html(open_served: OpenPage) -> None:
    weights = np.full((2, 5, 5), 0.2, np.float32)
    data = ViewerData.from_weights(
        {"<i>layer</i>": weights}, row_labels=MIXED, col_labels=MIXED, kind="self", title="<img src=x onerror=alert(1)>"
    )
    viewer = open_served(data)
    assert viewer.page.inner_text(".jm-title") == "<img src=x onerror=alert(1)>"
    assert viewer.hover_cell(0, 3).split()[:3] == ["<script>alert(1)</script>", "→", "<b>bold</b>"]
    viewer.click_cell(0, 1)
    viewer.page.wait_for_selector(".jm-rank li")
    assert set(viewer.get_texts(".jm-rank .jm-key")) == set(MIXED)
    assert viewer.page.locator(".jm-rank .jm-key").first.evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"
    viewer.press("2")
    viewer.page.wait_for_selector(".jm-word")
    assert viewer.get_texts(".jm-word[data-side=cols] title") == MIXED
    assert viewer.get_texts(".jm-word[data-side=cols] text")[1:] == MIXED[1:]
    viewer.press("3")
    viewer.page.wait_for_selector(".jm-token")
    assert viewer.get_texts(".jm-token") == MIXED
    assert viewer.page.locator(".jumok :is(b, i, img[src=x], script)").count() == 0


@pytest.mark.parametrize("width", [360, 390, 768, 1400])
def test_page_fits_the_screen(open_served: OpenPage, width: int) -> None:
    viewer = open_served([build_layered_data(), build_layered_data()], viewport={"width": width, "height": 760})
    for key in "1234":
        viewer.press(key)
        viewer.wait_until_idle()
        assert viewer.evaluate("document.documentElement.scrollWidth") <= width
    viewer.press("1")
    viewer.click_cell(1, 1)
    viewer.page.wait_for_selector(".jm-rank li")
    assert viewer.evaluate("document.documentElement.scrollWidth") <= width


def test_controls_have_accessible_names(open_served: OpenPage) -> None:
    viewer = open_served([build_layered_data(), build_layered_data()])
    for key in "1234":
        viewer.press(key)
        viewer.wait_until_idle()
        assert viewer.find_unnamed_controls() == []
    assert viewer.page.locator('[role=tab][aria-selected="true"]').inner_text() == "Heads"


def test_scripts_run_as_separate_modules(new_page: OpenPage) -> None:
    data = build_layered_data()

    def serve(route: Any) -> None:
        url = urlsplit(route.request.url)
        if url.path == "/":
            text = '<main id="viewer" data-base=""></main><script type="module" src="/boot_page.js"></script>'
            route.fulfill(body=f"<!doctype html><body>{text}", content_type="text/html")
        elif url.path == "/manifest.json":
            route.fulfill(json=build_manifest([data]))
        elif url.path == "/tiles":
            request = TileRequest.from_mapping({name: values[0] for name, values in parse_qs(url.query).items()})
            route.fulfill(body=answer_request([data], request))
        elif url.path.endswith(".js"):
            route.fulfill(body=assets.read_asset(f"look/viewer/static{url.path}"), content_type="text/javascript")
        else:
            route.fulfill(status=204)

    viewer = new_page()
    viewer.page.route("**/*", serve)
    viewer.page.goto("http://jumok.test/")
    viewer.wait_until_ready()
    for key in "1234":
        viewer.press(key)
        viewer.wait_until_idle()
    viewer.press("1")
    viewer.hover_cell(2, 0)
    viewer.click_cell(2, 0)
    viewer.page.wait_for_selector(".jm-rank li")


def test_column_words_are_not_clipped(open_served: OpenPage) -> None:
    # The height limits the cells here, so that upright words do not fit into the columns.
    viewer = open_served(build_layered_data(1, 1, 16), viewport={"width": 1000, "height": 420})
    viewer.wait_until_idle()
    margin, is_upright, cell_width, word_width = viewer.evaluate("[map.top, map.isUpright, map.view.sx, map.wordWidth]")
    assert is_upright == (cell_width >= word_width + 10)
    assert not is_upright
    assert margin > word_width * np.sin(np.radians(52)) + 20


def test_smooth_zoom_reaches_its_factor(open_served: OpenPage) -> None:
    viewer = open_served(build_huge_data())
    factor = viewer.evaluate(
        """(async () => { const before = map.view.sx; map.zoomSmoothly(2);
            await new Promise((done) => setTimeout(done, 500)); return map.view.sx / before; })()"""
    )
    assert factor == pytest.approx(2, rel=1e-6)
