"""The viewer in one file: whole, safe, of a decent size, and open without any network."""

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
from jumok.look.viewer.synthesized_speech import SynthesizedSpeech
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer

Show = Callable[..., Any]

WORDS = ["</script><script>alert(1)</script>", "<!--", "שלום", "예문이다", "👩‍👩‍👧‍👦"]


def rows_of_one(*shape: int) -> np.ndarray:
    cells = np.random.default_rng(3).random(shape, np.float32) ** 4
    return cells / cells.sum(-1, keepdims=True)


def small() -> ViewerData:
    return ViewerData.from_weights(
        {"encoder.0": rows_of_one(2, 5, 5), "encoder.1": rows_of_one(2, 5, 5)},
        row_labels=WORDS,
        col_labels=WORDS,
        kind="self",
        title="</title><script>alert(2)</script>",
    )


def long(length: int = 3001) -> ViewerData:
    return ViewerData((ViewerLayer("long", "self", (length, length), (0, 1, 2), HugeMap(length, 3)),))


def part(text: str, name: str) -> Any:
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]


def test_no_token_can_end_the_element_it_stands_in() -> None:
    text = html_file.render_html(small())
    assert text.count("</script>") == 4  # manifest, index, numbers, the viewer itself
    assert "alert(2)" not in text.split("<style>")[0].replace("&lt;/title&gt;&lt;script&gt;alert(2)", "")
    assert part(text, "manifest")["texts"] == [WORDS]


def test_only_its_own_script_and_style_may_run() -> None:
    text = html_file.render_html(small())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]  # type: ignore[index]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_chosen_heads_alone_are_in_the_file() -> None:
    told = part(html_file.render_html(small(), heads={"encoder.1": [1]}), "manifest")
    assert [(layer["name"], layer["heads"], layer["has_mean"]) for layer in told["data"][0]["layers"]] == [
        ("encoder.1", [1], False)
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heads": {"encoder.7": [0]}}, "no layer is called 'encoder.7'; there are: encoder.0, encoder.1"),
        ({"heads": {"encoder.0": [2]}}, "it has 0 to 1"),
        ({"heads": {"encoder.0": []}}, "heads \\[\\]"),
        ({"detail": 100}, "at least 256"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        html_file.render_html(small(), **options)


def test_a_file_that_would_be_giant_is_refused_before_anything_is_computed() -> None:
    class Never:
        def map(self, *_: Any) -> Any:
            raise AssertionError("computed")

        weights = received = map

    scene = ViewerData((ViewerLayer("long", "self", (10**5, 10**5), tuple(range(64)), Never()),))
    with pytest.raises(InputError, match="select some heads"):
        html_file.render_html(scene)


def test_a_long_map_is_a_pyramid_of_pooled_tiles() -> None:
    text = html_file.render_html(long(), detail=512, heads={"long": [0]})
    told, index = part(text, "manifest"), part(text, "index")
    assert told["data"][0]["layers"][0]["finest_zoom"] == 3  # 3,001 tokens at 8 a cell are 375 cells
    assert sum(key.startswith("pooled_map/") and key.endswith("/256") for key in index) == 4
    assert len(text) < 1_200_000


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    path = html_file.save_html(small(), tmp_path / "new" / "map.html")
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert [item.name for item in path.parent.iterdir()] == ["map.html"]


def test_it_opens_without_a_network_and_every_view_works(saved: Show) -> None:
    shown = saved(small())
    assert shown.page.title() == "</title><script>alert(2)</script> · jumok"
    weight = float(shown.hover(3, 1).split()[-1])
    assert weight == pytest.approx(rows_of_one(2, 5, 5)[0, 3, 1], rel=1e-3)
    shown.click(3, 1)
    shown.page.wait_for_selector(".jm-rank li")
    assert len(shown.text(".jm-rank li")) == 5
    shown.press("2")
    shown.page.wait_for_selector(".jm-arcs svg path")
    shown.press("3")
    shown.page.wait_for_selector(".jm-token")
    assert shown.text(".jm-token") == WORDS
    shown.press("4")
    shown.rest()
    assert shown.page.locator(".jm-head-map").count() == 4
    shown.page.click(".jm-head-map >> nth=3")
    shown.rest()
    assert shown.ask("[v.state.layer, v.state.head]") == [1, 1]
    shown.press("ArrowRight")  # the mean
    shown.rest()
    assert shown.ask("v.state.head") is None


def test_weights_of_more_than_one_tile_are_put_together(saved: Show) -> None:
    cells = rows_of_one(1, 300, 523)
    shown = saved(ViewerData.from_weights({"a": cells}))
    values = shown.page.evaluate("document.querySelector('#viewer').jumok.row(299).then((row) => [...row.values])")
    assert np.allclose(values, cells[0, 299], rtol=1e-3, atol=1e-8)


def test_a_long_file_zooms_as_far_as_it_has_tiles_and_says_what_it_lacks(saved: Show) -> None:
    shown = saved(long(), detail=512, heads={"long": [1]})
    shown.ask("map.zoom(1000)")
    shown.rest()
    assert shown.ask("map.zoomLevel()") == 3
    assert shown.hover(*shown.ask("[Math.floor(map.view.y) + 3, Math.floor(map.view.x) + 3]")).startswith("rows ")
    shown.page.mouse.click(*shown.cell(*shown.ask("[Math.floor(map.view.y) + 1, Math.floor(map.view.x) + 1]")))
    shown.page.wait_for_selector(".jm-panel:not([hidden])")
    shown.page.wait_for_function("() => document.querySelector('.jm-panel').textContent.includes('pooled maps')")
    shown.press("2")
    shown.page.wait_for_selector(".jm-note")
    assert "pooled maps" in shown.page.inner_text(".jm-note")
    shown.press("3")
    shown.page.wait_for_selector(".jm-lead")
    assert "pooled maps" in shown.page.inner_text(".jm-lead")  # of the pinned row; unpinned, the text is there
    shown.press("Escape")
    shown.page.wait_for_selector(".jm-token")


def test_pictures_and_speech_are_in_the_file(saved: Show) -> None:
    scene = ViewerData.from_weights(
        {"a": rows_of_one(1, 4, 6)},
        row_labels=list("wxyz"),
        speech=SynthesizedSpeech(rows_of_one(8, 3), frames_per_step=2),
        image=AttendedImage.from_pixels(np.full((20, 30, 3), 99, np.uint8), (2, 3)),
    )
    shown = saved([scene, scene])
    shown.page.wait_for_function("() => document.querySelector('.jm-overlay').width > 10")
    shown.press("2")
    shown.page.wait_for_function("() => document.querySelector('#viewer').jumok.views.speech.box")


def test_a_few_words_over_many_places_are_there_as_they_are() -> None:
    grid = (40, 41)
    picture = AttendedImage.from_pixels(np.full((20, 30, 3), 99, np.uint8), grid)
    scene = ViewerData.from_weights({"a": rows_of_one(1, 5, 1640)}, row_labels=list("vwxyz"), image=picture)
    assert part(html_file.render_html(scene), "manifest")["data"][0]["layers"][0]["finest_zoom"] == 0


def test_in_a_frame_the_page_around_it_stays_where_it_is(browser: Any, tmp_path: Path) -> None:
    html_file.save_html(small(), tmp_path / "map.html")
    frame = '<iframe src="map.html" style="width: 100%; height: 600px"></iframe>'
    (tmp_path / "page.html").write_text(f'<p style="height: 3000px">above</p>{frame}')
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.frame_locator("iframe").locator(".jumok .jm-on").first.wait_for()
    page.wait_for_timeout(100)
    assert page.evaluate("scrollY") == 0
    page.close()
