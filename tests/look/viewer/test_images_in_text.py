"""Tests of images whose patches lie between the tokens of a text: placements, files, figures, and a real browser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.errors import InputError
from jumok.look.figures.caption_figure import CaptionFigure
from jumok.look.viewer import view_writer
from jumok.look.viewer.attended_image import AttendedImages, encode_png
from jumok.look.viewer.image_placement import ImageGrid, ImagePlacement, find_spans
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer, build_manifest
from jumok.look.viewer.word_merging import merge_into_words

pytestmark = pytest.mark.long
OpenPage = Callable[..., Any]
GREY = encode_png(np.full((60, 90, 3), 128, np.uint8))
#         0    1-6: image 1 (2 × 3)  7      8-9: image 2 (1 × 2)  10     11     12
LABELS = ["<s>", *["[image 1]"] * 6, "and", *["[image 2]"] * 2, "▁is", "▁a", "▁cat"]
NUM_TOKENS = len(LABELS)


def build_placement(num_before: int = 0) -> ImagePlacement:
    grids = (
        ImageGrid(np.arange(1, 7).reshape(2, 3) + num_before, image=0),
        ImageGrid(np.arange(8, 10).reshape(1, 2) + num_before, image=1),
    )
    images = [*[-1] * num_before, -1, *[0] * 6, -1, 1, 1, -1, -1, -1]
    return ImagePlacement(grids, find_spans(images), num_before + NUM_TOKENS, has_text=True)


def build_data(num_before: int = 0) -> ViewerData:
    """Return a decoder whose word "cat" gives 0.3 to the upper right of image 1 and 0.1 to the right of image 2.

    ``num_before`` tokens come before.
    """
    length = num_before + NUM_TOKENS
    weights = np.zeros((length, length), np.float32)
    weights[:, 0] = 1
    weights[-1, [0, num_before + 3, num_before + 9]] = [0.6, 0.3, 0.1]
    weights[-2, [0, num_before + 4]] = [0.5, 0.5]
    labels = [*["x"] * num_before, *LABELS]
    first = num_before + 11
    layer = ViewerLayer(
        "decoder", "causal self", (length, length), (0,), ArrayWeightSource(weights), labels, labels, (first, first)
    )
    return ViewerData((layer,), "cat", image=AttendedImages((GREY, GREY), {"decoder": build_placement(num_before)}))


def get_brightness(viewer: Any, image: int, x: float, y: float) -> int:
    script = """(() => { const c = document.querySelectorAll(".jm-overlay")[args[0]], g = c.getContext("2d");
        const d = g.getImageData(c.width * args[1], c.height * args[2], 1, 1).data; return d[0] + d[1] + d[2]; })()"""
    return int(viewer.evaluate(script, image, x, y))


def wait_for_weights(viewer: Any) -> Any:
    viewer.page.wait_for_function("() => document.querySelector('#viewer').jumok.views.image.loaded")
    return viewer


def test_words_are_the_queries_that_see_an_image() -> None:
    data = build_data()
    assert data.image is not None
    assert data.image.list_word_rows(data.layers[0]) == [(7, 8), (10, 13)]
    assert data.image.list_figure_rows(data.layers[0]) == [11, 12]  # those that were generated
    bidirectional = replace(data.layers[0], kind="self")
    assert data.image.list_word_rows(bidirectional) == [(0, 1), (7, 8), (10, 13)]
    tiles = replace(build_placement(), spans=find_spans([-1, 0, 0, 0, -1, 0, 0, -1, 1, 1, -1, -1, -1]))
    assert tiles.list_word_rows(13, is_self=True, is_causal=True) == [(7, 8), (10, 13)]  # 4 separates two tiles


def test_words_show_both_images(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_data()))
    assert viewer.get_texts(".jm-caption .jm-token") == ["and", "is", "a", "cat"]
    assert viewer.page.locator(".jm-caption .jm-generated").count() == 2
    assert viewer.page.locator(".jm-frame").count() == 2
    assert viewer.get_texts(".jm-thumbnail") == ["a", "cat"]
    viewer.page.hover('.jm-caption .jm-token[data-place="3"]')
    viewer.wait_until(lambda: viewer.page.inner_text(".jm-current").startswith("cat"))
    assert "40 % on the images, maximum 0.3 at row 1, column 3, image 1" in viewer.page.inner_text(".jm-current")
    assert viewer.get_texts(".jm-image-share") == ["Image 1: 30 % of the attention", "Image 2: 10 % of the attention"]
    upper_right = get_brightness(viewer, 0, 5 / 6, 0.25)
    assert upper_right > get_brightness(viewer, 0, 1 / 6, 0.75) + 60
    assert upper_right > get_brightness(viewer, 1, 0.75, 0.5) + 60 > get_brightness(viewer, 1, 0.25, 0.5) + 90


def test_patches_show_their_words_and_can_be_held(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_data()))
    box = viewer.page.locator(".jm-frame").nth(1).bounding_box()
    viewer.page.mouse.click(box["x"] + 0.75 * box["width"], box["y"] + 0.5 * box["height"])
    assert viewer.page.inner_text(".jm-tooltip").split("\n")[:3] == ["row 1, column 2, image 2", "cat", "0.1"]
    cat = '.jm-caption .jm-token[data-place="3"]'
    assert viewer.get_darkness(cat) > 50
    viewer.page.mouse.move(5, 5)
    assert viewer.get_darkness(cat) > 50  # it is held
    viewer.press("Escape")
    viewer.wait_until(lambda: viewer.get_darkness(cat) == 0)


def test_text_view_shows_an_image_as_one_token(open_served: OpenPage) -> None:
    viewer = wait_for_weights(open_served(build_data()))
    viewer.page.get_by_role("tab", name="Text").click()
    viewer.wait_until(lambda: viewer.page.locator(".jm-image-token").count() == 2)
    assert viewer.get_texts(".jm-text-view .jm-text:visible .jm-token") == [
        "<s>", "image 1: 6 tokens", "and", "image 2: 2 tokens", "is", "a", "cat",
    ]  # fmt: skip
    viewer.page.get_by_text("cat", exact=True).last.click()
    viewer.wait_until(
        lambda: viewer.page.locator(".jm-image-token").nth(0).get_attribute("title") == "total weight: 0.3"
    )


def test_file_of_a_long_text_has_every_weight_of_words(open_saved: OpenPage) -> None:
    viewer = wait_for_weights(open_saved(build_data(1100)))  # above 1,024 tokens, a file has pooled maps
    viewer.page.hover('.jm-caption .jm-token[data-place="3"]')
    viewer.wait_until(lambda: viewer.page.inner_text(".jm-current").startswith("cat"))
    assert "maximum 0.3 at row 1, column 3, image 1" in viewer.page.inner_text(".jm-current")


def test_overview_and_tiles_are_shown_together_or_alone(open_served: OpenPage) -> None:
    grids = (
        ImageGrid(np.array([[1]]), name="overview"),
        ImageGrid(np.arange(2, 6).reshape(2, 2), name="tiles"),
    )
    weights = np.eye(7, dtype=np.float32)
    weights[6] = [0, 0.6, 0, 0, 0, 0.4, 0]
    placement = ImagePlacement(grids, find_spans([-1, 0, 0, 0, 0, 0, -1]), 7, has_text=True)
    labels = ["a", *["[image 1]"] * 5, "b"]
    layer = ViewerLayer("d", "causal self", (7, 7), (0,), ArrayWeightSource(weights), labels, labels)
    viewer = wait_for_weights(open_served(ViewerData((layer,), image=AttendedImages((GREY,), {"d": placement}))))
    # The overview spreads 0.6 over four tiles: 0.15 each, and 0.55 at the lower right.
    assert get_brightness(viewer, 0, 0.8, 0.8) > get_brightness(viewer, 0, 0.2, 0.2) + 60
    viewer.page.get_by_role("button", name="overview").click()
    viewer.wait_until(lambda: abs(get_brightness(viewer, 0, 0.8, 0.8) - get_brightness(viewer, 0, 0.2, 0.2)) < 5)


def test_figure_shows_generated_words_with_the_share_of_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[CaptionFigure] = []
    monkeypatch.setattr(CaptionFigure, "save", lambda self, path: saved.append(self) or path)
    view_writer.save_view(build_data(), tmp_path / "cat.png")
    (figure,) = saved
    assert figure.words == ["a", "cat"]
    assert figure.captions == ["a  50 %", "cat  40 %"]
    panels = [np.asarray(axes.images[0].get_array()).astype(int).sum(2) for axes in figure.build().axes][:-1]
    assert len(panels) == 3
    height, width = panels[2].shape
    assert panels[2][height // 4, int(width * 0.4)] > panels[2][3 * height // 4, int(width * 0.1)] + 60


def test_layers_share_one_placement_in_the_manifest() -> None:
    data = build_data()
    both = replace(
        data,
        layers=(*data.layers, replace(data.layers[0], name="second")),
        image=AttendedImages((GREY, GREY), {name: build_placement() for name in ("decoder", "second")}),
    )
    (item,) = build_manifest([both])["data"]
    assert len(item["image_layers"]) == 1
    assert [layer["image_layer"] for layer in item["layers"]] == [0, 0]
    assert item["image_layers"][0]["grids"][0]["keys"] == 1  # the first of consecutive keys


def test_merged_words_keep_the_patches() -> None:
    data = build_data()
    labels = [*LABELS[:11], "▁c", "at"]
    layer = replace(data.layers[0], row_labels=labels, col_labels=labels)
    merged = merge_into_words(replace(data, layers=(layer,)))
    (words,) = merged.layers
    assert words.shape == (12, 12)
    assert merged.image is not None
    placement = merged.image.find_placement(words)
    assert placement is not None
    assert [grid.keys.ravel().tolist() for grid in placement.grids] == [[1, 2, 3, 4, 5, 6], [8, 9]]
    assert words.row_texts[-1] == "cat"
    assert words.compute_weights(0)[-1, 3] == pytest.approx(0.15)  # the mean over its two tokens


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ImageGrid(np.array([1, 2])), r"keys of shape \(2,\).*\(rows, columns\)"),
        (lambda: ImageGrid(np.array([[-1]])), "are invalid"),
        (lambda: ImagePlacement((), (), 3), "at least one grid"),
        (lambda: ImagePlacement((ImageGrid(np.array([[5]])),), (), 3), "key 5, and the layer has 3 keys"),
        (lambda: AttendedImages((GREY,), {"d": build_placement()}), "d has patches of image 1, and there are 1"),
        (lambda: AttendedImages((b"GIF",), {}), "neither PNG nor JPEG nor WebP"),
        (lambda: replace(build_data(), image=AttendedImages((GREY,) * 2, {"x": build_placement()})), "placed in x 13"),
    ],
)
def test_invalid_placements_are_rejected(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()
