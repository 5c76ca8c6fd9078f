"""Tests of image captions as figures."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jumok.errors import InputError
from jumok.look.figures.caption_figure import CaptionFigure, CaptionLayout, overlay_weights
from jumok.look.viewer import view_writer
from jumok.look.viewer.attended_image import AttendedImage
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_images import build_corner_data, build_drawing_data

GREY = AttendedImage.from_pixels(np.full((20, 30, 3), 128, np.uint8), (2, 3))
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:no installed font has"),
]  # where no Korean font is installed


def build_uniform_weights(num_words: int, num_patches: int = 6) -> np.ndarray:
    return np.full((num_words, num_patches), 1 / num_patches, np.float32)


def get_panels(figure: Figure) -> list[np.ndarray]:
    """Return the pixels of the panels, without the scale after them."""
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes][:-1]


def get_words(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_image_is_followed_by_a_panel_for_each_word() -> None:
    data = build_drawing_data(1, language="ko")
    assert data.image is not None
    weights = data.layers[0].source.weights(0, slice(0, 7), slice(0, 56))
    figure = CaptionFigure(data.image, data.layers[0].row_texts, weights, title=data.title).build()
    assert isinstance(figure, Figure)
    assert get_words(figure) == ["보라색", "세모", "위에", "있는", "작은", "보라색", "별"]
    assert figure.texts[0].get_text() == "보라색 세모 위에 있는 작은 보라색 별"
    first, *others = get_panels(figure)
    assert len(others) == 7
    heights = [np.unravel_index(other.sum(2).argmax(), other.shape[:2])[0] / len(other) for other in others]
    assert heights[1] > 0.4 > heights[6]  # the triangle is below the star
    assert first.mean() > others[1].mean() + 20


def test_overlay_is_brightest_at_the_highest_weight() -> None:
    data = build_corner_data()
    weights = np.asarray(data.layers[0].source.weights(0, slice(0, 2), slice(0, 6)))
    photo = np.full((200, 300, 3), 128, np.uint8)
    right, left = (overlay_weights(photo, row, GREY.placement.grids).sum(2).astype(int) for row in weights)
    middles = [(50, 50), (50, 150), (50, 250), (150, 50), (150, 150), (150, 250)]
    assert np.argmax([right[place] for place in middles]) == 2
    assert np.argsort([left[place] for place in middles])[-2:].tolist() == [2, 3]
    # The lightest colour at the maximum, the darkest at 0; the image shows through both.
    light, dark, grey = np.array([252, 229, 132]), np.array([16, 22, 33]), 128
    assert overlay_weights(photo, weights[0], GREY.placement.grids)[50, 250] == pytest.approx(
        grey + 0.7 * 0.42 * (light - grey), abs=2
    )
    assert overlay_weights(photo, weights[0], GREY.placement.grids)[150, 50] == pytest.approx(
        grey + 0.7 * 0.88 * (dark - grey), abs=2
    )
    steps = np.abs(np.diff(right, axis=1)).max()
    assert steps < 20  # smooth: a patch is 100 pixels wide


def test_grid_may_cover_part_of_the_image() -> None:
    weights = np.array([0, 0, 1, 0, 0, 0], np.float32)
    photo = np.full((200, 300, 3), 128, np.uint8)
    light = overlay_weights(photo, weights, replace(GREY, region=(1 / 3, 0.0, 2 / 3, 1.0)).placement.grids).sum(2)
    assert np.unravel_index(light.argmax(), light.shape)[1] == pytest.approx(183, abs=16)
    assert len(np.unique(light[:, 205:])) == 1  # outside of the region
    padded = overlay_weights(photo, weights, replace(GREY, region=(0.0, -1.0, 1.0, 1.0)).placement.grids).sum(2)
    assert padded.argmax() // 300 == 0  # the upper row of the grid lies above the image


@pytest.mark.parametrize("count", [1, 2, 8, 40])
@pytest.mark.parametrize("size", [(30, 30), (107, 160), (20, 400), (400, 20)])
def test_layout_for_any_number_of_words_and_image_shape(size: tuple[int, int], count: int) -> None:
    layout = CaptionLayout.from_aspect_ratio(count + 1, size[1] / size[0], has_title=True)
    wide, tall = layout.figure_size
    assert 3 < wide < 24
    assert tall < 24
    assert layout.panel_width / layout.panel_height == pytest.approx(size[1] / size[0])
    assert layout.num_rows * layout.num_columns >= count + 1 > (layout.num_rows - 1) * layout.num_columns
    last = layout.locate_panel(count)
    assert last[0] + layout.panel_width < wide
    assert last[1] + layout.panel_height < tall


@pytest.mark.parametrize(("size", "count"), [((107, 160), 40), ((12, 200), 3), ((200, 12), 1)])
def test_texts_are_neither_clipped_nor_overlapping(size: tuple[int, int], count: int) -> None:
    words = [*("Donaudampfschifffahrtsgesellschaftskapitänsmütze", "예문이다", "i" * 9000), *"abcdefg" * 9][:count]
    image = AttendedImage.from_pixels(np.full((*size, 3), 200, np.uint8), (2, 3))
    figure = CaptionFigure(image, words, build_uniform_weights(count), title="A title that is long " * 20).build()
    for text in (*figure.texts, *(text for axes in figure.axes for text in axes.texts)):
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height
    boxes = sorted((a.texts[0].get_window_extent() for a in figure.axes if a.texts), key=lambda b: (b.y0, b.x0))
    for left, right in pairwise(boxes):
        assert left.x1 <= right.x0 or abs(left.y0 - right.y0) > 5  # words do not overlap


@pytest.mark.parametrize("name", ["strip.png", "strip.svg", "new/strip.pdf"])
def test_caption_is_saved_without_changing_settings(tmp_path: Path, name: str) -> None:
    with mpl.rc_context({"font.family": "monospace", "figure.dpi": 31}):
        before = dict(mpl.rcParams)
        words = ["$x_1$", "<script>", "\u202e\n"]
        path = CaptionFigure(GREY, words, build_uniform_weights(3), title="한국어").save(tmp_path / name)
        assert dict(mpl.rcParams) == before
    data = path.read_bytes()
    signature = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[path.suffix]
    assert data.startswith(signature)
    if path.suffix == ".svg":
        assert data.count(b"<image") == 5  # four panels and the scale
        assert b"<script" not in data
    if path.suffix == ".png":
        image = imread(path)
        assert (image[0] == 1).all()
        assert (image[:, -1] == 1).all()


def test_figure_can_be_saved_by_the_caller() -> None:
    file = io.BytesIO()
    CaptionFigure(GREY, ["a"], build_uniform_weights(1)).build().savefig(file, format="svg")
    assert file.getvalue().count(b"<image") == 3


def test_save_view_draws_captions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[tuple[list[str], np.ndarray]] = []

    def save(self: CaptionFigure, path: Path) -> Path:
        saved.append((self.words, self.weights))
        return path

    monkeypatch.setattr(CaptionFigure, "save", save)
    data = build_drawing_data(num_heads=2)
    caption = list(data.layers[0].row_labels or [])
    own = ViewerLayer("self", "causal self", (7, 7), (0,), ArrayWeightSource(np.eye(7, dtype=np.float32)))
    both = replace(data, layers=(*data.layers, own))
    view_writer.save_view(both, tmp_path / "mean.png")
    view_writer.save_view(both, tmp_path / "head.svg", head=1, layer="decoder")
    (words, mean), (_, head) = saved
    assert words == caption
    assert head == pytest.approx(np.full_like(head, 1 / 56))
    assert mean.max() > 2 * head.max()
    view_writer.save_view(both, tmp_path / "map.png", layer="self")  # this layer is drawn as a map
    assert len(saved) == 2
    assert (tmp_path / "map.png").exists()


def test_weights_may_include_prefix_keys() -> None:
    image = replace(GREY, num_prefix_keys=1)
    weights = np.concatenate([[[0.5], [0.2]], build_uniform_weights(2) * 0.5], axis=1)
    assert get_words(CaptionFigure(image, ["a", "b"], weights).build()) == ["a", "b"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CaptionFigure(GREY, ["a"], build_uniform_weights(2)), "2, 6.*1 words and a grid of 2 × 3"),
        (lambda: CaptionFigure(GREY, ["a"], build_uniform_weights(1, 5)), "6 patches"),
        (lambda: CaptionFigure(GREY, [], build_uniform_weights(0)), "0 words"),
        (lambda: CaptionFigure(GREY, ["a"], build_uniform_weights(1) * np.nan), "NaN"),
        (lambda: CaptionFigure(GREY, ["a"], -build_uniform_weights(1)), "negative"),
        (lambda: CaptionFigure(GREY, ["a"] * 201, build_uniform_weights(201)), "too many"),
        (lambda: CaptionFigure(AttendedImage(b"\x89PNG", (2, 3)), ["a"], build_uniform_weights(1)), "damaged"),
        (lambda: replace(GREY, region=(0.5, 0, 0.5, 1)), "region="),
        (lambda: replace(GREY, region=(0, 0, 1, float("nan"))), "region="),
        (lambda: replace(GREY, region=(1.5, 0, 2, 1)), "region="),
    ],
)
def test_invalid_input_is_rejected(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


def test_manifest_contains_the_region() -> None:
    from jumok.look.viewer.viewer_data import build_manifest

    data = ViewerData.from_weights({"a": build_uniform_weights(1)}, image=replace(GREY, region=(0, 0.25, 1, 0.75)))
    (entry,) = build_manifest([data])["data"][0]["image_layers"]
    assert entry["grids"][0]["region"] == [0, 0.25, 1, 0.75]
