"""Tests of the viewer in one HTML file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huge_map import HugeMap

from jumok.errors import InputError
from jumok.look.viewer import html_file
from jumok.look.viewer.attended_image import AttendedImage
from jumok.look.viewer.preparation import add_layer_means
from jumok.look.viewer.synthesized_speech import SynthesizedSpeech
from jumok.look.viewer.tiles import TileRequest
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer, compute_cells

pytestmark = pytest.mark.long


OpenPage = Callable[..., Any]

WORDS = ["</script><script>alert(1)</script>", "<!--", "שלום", "예문이다", "👩‍👩‍👧‍👦"]


def build_weights(*shape: int) -> np.ndarray:
    cells = np.random.default_rng(3).random(shape, np.float32) ** 4
    return cells / cells.sum(-1, keepdims=True)


def build_small_data() -> ViewerData:
    return ViewerData.from_weights(
        {"encoder.0": build_weights(2, 5, 5), "encoder.1": build_weights(2, 5, 5)},
        row_labels=WORDS,
        col_labels=WORDS,
        kind="self",
        title="</title><script>alert(2)</script>",
    )


def build_long_data(length: int = 3001) -> ViewerData:
    return ViewerData((ViewerLayer("long", "self", (length, length), (0, 1, 2), HugeMap(length, 3)),))


def read_json(text: str, name: str) -> Any:
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]


def test_tokens_cannot_end_their_element() -> None:
    text = html_file.render_html(build_small_data())
    assert text.count("</script>") == 4  # manifest, index, weights and the viewer
    assert "alert(2)" not in text.split("<style>")[0].replace("&lt;/title&gt;&lt;script&gt;alert(2)", "")
    assert read_json(text, "manifest")["texts"] == [WORDS]


def test_content_security_policy_allows_only_own_script_and_style() -> None:
    text = html_file.render_html(build_small_data())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]  # type: ignore[index]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_only_selected_heads_are_in_the_file() -> None:
    manifest = read_json(html_file.render_html(build_small_data(), heads={"encoder.1": [1]}), "manifest")
    assert [(layer["name"], layer["heads"], layer["has_mean"]) for layer in manifest["data"][0]["layers"]] == [
        ("encoder.1", [1], False)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": {"encoder.7": [0]}}, "no layer is called 'encoder.7'; there are: encoder.0, encoder.1"),
        ({"heads": {"encoder.0": [2]}}, "it has 0 to 1"),
        ({"heads": {"encoder.0": []}}, "heads \\[\\]"),
        ({"detail": 100}, "at least 256"),
    ],
)
def test_invalid_selection_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        html_file.render_html(build_small_data(), **options)


def test_huge_selection_is_rejected_before_computation() -> None:
    class UnusedSource:
        def pooled_map(self, *_: Any) -> Any:
            raise AssertionError("computed")

        weights = received_weight = pooled_map

    data = ViewerData((ViewerLayer("long", "self", (10**5, 10**5), tuple(range(64)), UnusedSource()),))
    with pytest.raises(InputError, match=r"32 of these heads fit.*heads=\{\"long\": \[0, 3\]\}"):
        html_file.render_html(data, heads={"long": range(64)})


def test_file_of_too_many_heads_has_an_overview_and_the_most_telling_heads(
    open_saved: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_file, "MAX_CELLS", 900_000)
    monkeypatch.setattr(html_file, "MAX_DETAILED_CELLS", 700_000)
    length, focused = 701, 3
    weights = np.tril(np.ones((6, length, length), np.float32))
    weights[focused] = 0.01 * weights[0] + 200 * np.eye(length, k=-70, dtype=np.float32)
    weights /= weights.sum(-1, keepdims=True)
    data = ViewerData.from_weights({"a": weights[:3], "b": weights[3:]}, kind="causal self")
    viewer = open_saved(data, opening=None)
    layers = viewer.evaluate("v.manifest.data[0].layers")
    assert [layer["detailed_heads"] for layer in layers] == [[], [0], []]  # the last one is the mean over both
    assert viewer.evaluate("[v.state.layer, v.state.head]") == [1, 0]
    row = viewer.page.evaluate("document.querySelector('#viewer').jumok.row(600).then((row) => [...row.values])")
    assert np.argmax(row) == 530
    viewer.press("h")  # another head, of which the file has an overview
    viewer.wait_until_idle()
    assert "64 × 64 cells" in viewer.hover_cell(500, 100)
    total = viewer.evaluate("map.cellAt(500, 100).weight")
    cells = viewer.evaluate("map.cellAt(500, 100).rows")
    expected = weights[1, cells[0] : cells[1], 100].mean() * (cells[1] - cells[0])
    assert total == pytest.approx(expected, rel=0.25)
    assert "head 0 in detail" in viewer.page.locator(".jm-file-note").text_content()
    viewer.press("4")
    viewer.wait_until_idle()
    assert viewer.page.locator(".jm-head-map").count() == 6
    thumbnail = {"rows": (0, length), "cols": (0, length), "size": 64}
    request = TileRequest(2, None, **thumbnail)  # type: ignore[arg-type]
    mean = viewer.page.evaluate(
        "(request) => document.querySelector('#viewer').jumok.store.host(request)"
        ".then((buffer) => [...new Float32Array(buffer, 16)])",
        {"data": 0, "layer": 2, "head": None, "quantity": "pooled_map", "without_sinks": 0, **thumbnail},
    )
    assert np.allclose(mean, compute_cells(add_layer_means(data).layers[2], request).ravel(), rtol=5e-3, atol=1e-4)


def test_file_of_too_many_heads_has_all_heads_of_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_file, "MAX_CELLS", 300_000)
    monkeypatch.setattr(html_file, "MAX_DETAILED_CELLS", 250_000)
    weights = np.tril(np.ones((2, 2, 300, 300), np.float32))
    weights[1] += 200 * np.eye(300, k=-70, dtype=np.float32)  # both heads of layer b
    weights /= weights.sum(-1, keepdims=True)
    data = ViewerData.from_weights({"a": weights[0], "b": weights[1]}, kind="causal self")
    item = read_json(html_file.render_html(data), "manifest")["data"][0]
    assert (item["opening"]["layer"], item["opening"]["head"]) == (1, None)
    assert [layer["detailed_heads"] for layer in item["layers"]] == [[], [0, 1], []]


def test_long_map_is_a_pyramid_of_pooled_tiles() -> None:
    text = html_file.render_html(build_long_data(), detail=512, heads={"long": [0]})
    manifest, index = read_json(text, "manifest"), read_json(text, "index")
    assert manifest["data"][0]["layers"][0]["finest_zoom"] == 3  # 3,001 tokens at 8 a cell are 375 cells
    assert sum(key.startswith("pooled_map/") and key.endswith("/256") for key in index) == 4
    assert len(text) < 1_200_000


def test_file_is_written_atomically(tmp_path: Path) -> None:
    path = html_file.save_html(build_small_data(), tmp_path / "new" / "map.html")
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert [item.name for item in path.parent.iterdir()] == ["map.html"]


def test_file_opens_offline_in_every_view(open_saved: OpenPage) -> None:
    viewer = open_saved(build_small_data())
    assert viewer.page.title() == "</title><script>alert(2)</script> · jumok"
    weight = float(viewer.hover_cell(3, 1).split()[-1])
    assert weight == pytest.approx(build_weights(2, 5, 5)[0, 3, 1], rel=1e-3)
    viewer.click_cell(3, 1)
    viewer.page.wait_for_selector(".jm-rank li")
    assert len(viewer.get_texts(".jm-rank li")) == 5
    viewer.press("2")
    viewer.page.wait_for_selector(".jm-arcs svg path")
    viewer.press("3")
    viewer.page.wait_for_selector(".jm-token")
    assert viewer.get_texts(".jm-token") == WORDS
    viewer.press("4")
    viewer.wait_until_idle()
    assert viewer.page.locator(".jm-head-map").count() == 4
    viewer.page.click(".jm-head-map >> nth=3")
    viewer.wait_until_idle()
    assert viewer.evaluate("[v.state.layer, v.state.head]") == [1, 1]
    viewer.press("ArrowRight")  # the mean
    viewer.wait_until_idle()
    assert viewer.evaluate("v.state.head") is None


def test_rows_are_assembled_from_several_tiles(open_saved: OpenPage) -> None:
    cells = build_weights(1, 300, 523)
    viewer = open_saved(ViewerData.from_weights({"a": cells}))
    values = viewer.page.evaluate("document.querySelector('#viewer').jumok.row(299).then((row) => [...row.values])")
    assert np.allclose(values, cells[0, 299], rtol=1e-3, atol=1e-8)


def test_large_file_is_rounded_to_fit_and_states_the_bound(
    open_saved: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_file, "TARGET_BYTES", 300_000)
    cells = build_weights(4, 300, 523)
    cells[:, :, 500:] = 0
    viewer = open_saved(ViewerData.from_weights({"a": cells}))
    assert (tmp_path / "map.html").stat().st_size < 1.24 * 300_000 + 300_000  # the viewer takes the rest
    rounding = viewer.evaluate("v.manifest.rounding")
    assert 0 < rounding < 0.5
    values = viewer.page.evaluate(
        "Promise.all([0, 1, 2, 3].map((head) => document.querySelector('#viewer').jumok.store.host("
        "{data: 0, layer: 0, head, rows: [0, 300], cols: [0, 523], size: 256, quantity: 'weights'})"
        ".then((buffer) => [...new Float32Array(buffer, 16)])))"
    )
    decoded = np.array(values).reshape(cells.shape)
    assert np.array_equal(decoded == 0, cells == 0)
    step = rounding * np.sqrt(cells.mean(axis=(1, 2), keepdims=True))
    errors = np.abs(np.sqrt(decoded) - np.sqrt(cells))
    assert (errors <= np.where(np.sqrt(cells) < step / 2, step, step / 2) * 1.001).all()


def test_browser_pools_and_averages_as_python_does(open_saved: OpenPage) -> None:
    cells = build_weights(3, 300, 523)
    data = ViewerData.from_weights({"a": cells})
    viewer = open_saved(data)
    for request in (
        TileRequest(0, None, (0, 300), (0, 523), 64),
        TileRequest(0, 2, (44, 300), (11, 523), 100),
        TileRequest(0, None, (0, 300), (0, 523), quantity="received_weight"),
    ):
        answer = viewer.page.evaluate(
            "(r) => document.querySelector('#viewer').jumok.store.host(r)"
            ".then((buffer) => [...new Float32Array(buffer, 16)])",
            {
                "data": 0,
                **{name: getattr(request, name) for name in ("layer", "head", "rows", "cols", "size", "quantity")},
            },
        )
        expected = compute_cells(data.layers[0], request)
        assert np.allclose(np.reshape(answer, expected.shape), expected, rtol=2e-3, atol=1e-7)


def test_long_file_reports_missing_weights(open_saved: OpenPage) -> None:
    viewer = open_saved(build_long_data(), detail=512, heads={"long": [1]})
    viewer.evaluate("map.zoom(1000)")
    viewer.wait_until_idle()
    assert viewer.evaluate("map.zoomLevel()") == 3
    assert viewer.hover_cell(*viewer.evaluate("[Math.floor(map.view.y) + 3, Math.floor(map.view.x) + 3]")).startswith(
        "rows "
    )
    viewer.page.mouse.click(
        *viewer.locate_cell(*viewer.evaluate("[Math.floor(map.view.y) + 1, Math.floor(map.view.x) + 1]"))
    )
    viewer.page.wait_for_selector(".jm-panel:not([hidden])")
    viewer.page.wait_for_function("() => document.querySelector('.jm-panel').textContent.includes('pooled maps')")
    viewer.press("2")
    viewer.page.wait_for_selector(".jm-note")
    assert "pooled maps" in viewer.page.inner_text(".jm-note")
    viewer.press("3")
    viewer.page.wait_for_selector(".jm-lead")
    assert "pooled maps" in viewer.page.inner_text(".jm-lead")  # because a row is pinned
    viewer.press("Escape")
    viewer.page.wait_for_selector(".jm-token")


def test_image_and_speech_are_in_the_file(open_saved: OpenPage) -> None:
    data = ViewerData.from_weights(
        {"a": build_weights(1, 4, 6)},
        row_labels=list("wxyz"),
        speech=SynthesizedSpeech(build_weights(8, 3), frames_per_step=2),
        image=AttendedImage.from_pixels(np.full((20, 30, 3), 99, np.uint8), (2, 3)),
    )
    viewer = open_saved([data, data])
    viewer.page.wait_for_function("() => document.querySelector('.jm-overlay').width > 10")
    viewer.press("2")
    viewer.page.wait_for_function("() => document.querySelector('#viewer').jumok.views.speech.box")


def test_few_words_over_many_patches_are_not_pooled() -> None:
    grid = (40, 41)
    image = AttendedImage.from_pixels(np.full((20, 30, 3), 99, np.uint8), grid)
    data = ViewerData.from_weights({"a": build_weights(1, 5, 1640)}, row_labels=list("vwxyz"), image=image)
    assert read_json(html_file.render_html(data), "manifest")["data"][0]["layers"][0]["finest_zoom"] == 0


def test_file_in_a_frame_does_not_scroll_the_page(browser: Any, tmp_path: Path) -> None:
    html_file.save_html(build_small_data(), tmp_path / "map.html")
    frame = '<iframe src="map.html" style="width: 100%; height: 600px"></iframe>'
    (tmp_path / "page.html").write_text(f'<p style="height: 3000px">above</p>{frame}')
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.frame_locator("iframe").locator(".jumok .jm-on").first.wait_for()
    page.wait_for_timeout(100)
    assert page.evaluate("scrollY") == 0
    page.close()
