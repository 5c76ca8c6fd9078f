"""Tests of heat maps and curves."""

from __future__ import annotations

import builtins
import colorsys
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from jumok.errors import InputError, MissingExtra
from jumok.look.figures import fonts, plots
from jumok.look.figures.plots import draw_heat_map, draw_scores_by_length, draw_training_curves
from jumok.look.viewer.token_marks import LabelledSpan
from jumok.metrics.translation import LengthBin

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:no installed font has"),
]  # where no Korean font is installed


def read_pixels(path: Path) -> np.ndarray:
    return imread(path)[..., :3]


def find_colour(image: np.ndarray, colour: str, tolerance: float = 0.02) -> np.ndarray:
    """Return where an image has this colour."""
    return (np.abs(image - matplotlib.colors.to_rgb(colour)) < tolerance).all(-1)


def build_words(count: int) -> list[str]:
    return [f"w{n}" for n in range(count)]


def draw_map(weights: Any, path: str | Path, **options: Any) -> Path:
    """Draw a map with a label for each row and column."""
    return draw_heat_map(weights, *map(build_words, weights.shape), path, **options)


def test_heat_map_orientation(tmp_path: Path) -> None:
    # The second of three target words attends to the last of five source words.
    weights = torch.zeros(3, 5)
    weights[1, 4] = 1.0
    path = draw_map(weights, tmp_path / "new" / "map.png")
    assert path == tmp_path / "new" / "map.png"
    image = read_pixels(path)
    # Light and dark cells show where the map is; the thin scale at its right has dark pixels too.
    light = np.argwhere(find_colour(image, plots.SHADES[0]))
    dark = np.argwhere(find_colour(image, plots.SHADES[-1]))
    (top, left), (bottom, right) = light.min(0), light.max(0)
    row, column = np.median(dark, axis=0)
    assert top + (bottom - top) / 3 < row < top + 2 * (bottom - top) / 3
    assert column > left + 0.7 * (right - left)


def test_gold_links_are_outlined(tmp_path: Path) -> None:
    weights = torch.full((2, 3), 1 / 3)
    plain = read_pixels(draw_map(weights, tmp_path / "plain.png"))
    assert not find_colour(plain, plots.GOLD).any()
    image = read_pixels(draw_map(weights, tmp_path / "gold.png", gold_links={(2, 0)}))
    orange = np.argwhere(find_colour(image, plots.GOLD))
    cell = 0.46 * plots.DOTS_PER_INCH
    outline = orange[orange[:, 1] > orange[:, 1].max() - cell]
    height, width = outline.max(0) - outline.min(0)
    assert height == pytest.approx(0.82 * cell, abs=4)
    assert width == pytest.approx(0.82 * cell, abs=4)


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (7, 9), (3, 61), (59, 2), (60, 60)])
def test_heat_map_of_any_size(tmp_path: Path, shape: tuple[int, int]) -> None:
    image = read_pixels(draw_map(torch.rand(shape), tmp_path / "map.png"))
    height, width, _ = image.shape
    assert min(height, width) > 100
    assert max(height, width) < 2500
    light = find_colour(image, "#ffffff")
    assert light[0].all()
    assert light[-1].all()
    assert light[:, 0].all()
    assert light[:, -1].all()  # nothing is clipped


def test_wide_heat_map_is_limited_in_size(tmp_path: Path) -> None:
    path = draw_heat_map(np.full((3, 400), 1 / 400), build_words(3), [""] * 400, tmp_path / "map.png")
    assert read_pixels(path).shape[1] < 8000


def test_long_column_labels_are_rotated(tmp_path: Path) -> None:
    short = read_pixels(draw_heat_map(torch.eye(3), ["a", "b", "c"], ["a", "b", "c"], tmp_path / "short.png"))
    long = read_pixels(
        draw_heat_map(torch.eye(3), ["a", "b", "c"], ["a", "Mitentscheidung", "c"], tmp_path / "long.png")
    )
    assert long.shape[0] > short.shape[0] + 50
    endless = read_pixels(
        draw_heat_map(torch.eye(3), ["a", "b", "c"], ["a", "x" * 5000, "c\nd"], tmp_path / "endless.png")
    )
    assert endless.shape[0] < 900


def test_labels_are_not_parsed_as_formulas(tmp_path: Path) -> None:
    names = ["$x_1$", "$", r"\frac{", "^_", "<b>", "%", "&"]
    draw_heat_map(torch.eye(7), names, names, tmp_path / "map.png", title=r"$\nosuch{$")
    draw_scores_by_length({"$\\nosuch{$": [LengthBin(1, 10, 3, 5.0)]}, tmp_path / "curves.png", title="$a$")


def test_matplotlib_settings_are_neither_used_nor_changed(tmp_path: Path) -> None:
    expected = draw_map(torch.eye(3), tmp_path / "expected.png", title="주목").read_bytes()
    with matplotlib.rc_context():
        matplotlib.style.use("dark_background")
        matplotlib.rcParams["font.size"] = 31
        before = dict(matplotlib.rcParams)
        styled = draw_map(torch.eye(3), tmp_path / "styled.png", title="주목").read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert styled == expected


def test_figure_is_drawn_despite_missing_fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_load_packaged_font", lambda: None)
    monkeypatch.setattr(fonts, "_list_installed", lambda: ["DejaVu Sans"])
    assert draw_heat_map(torch.eye(2), ["이것은", "예문"], ["this", "is"], tmp_path / "map.png").is_file()


def test_tensor_and_array_inputs_give_equal_figures(tmp_path: Path) -> None:
    weights = torch.rand(2, 3, requires_grad=True)
    from_float = draw_map(weights.to(torch.bfloat16).float(), tmp_path / "a.png").read_bytes()
    from_bfloat = draw_map(weights.to(torch.bfloat16), str(tmp_path / "b.png")).read_bytes()
    from_array = draw_map(weights.detach().to(torch.bfloat16).float().numpy(), tmp_path / "c.png").read_bytes()
    assert from_float == from_bfloat == from_array


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (torch.rand(2, 3).T, {}, r"shape \(3, 2\) given with 2 rows and 3 columns"),
        (torch.rand(1, 2, 3), {}, "expected one map"),
        (torch.tensor([[0.0, 1.0, torch.nan]] * 2), {}, "NaN"),
        (torch.rand(2, 3), {"gold_links": [(0, 2)]}, "gold link 0-2 lies outside 3 source and 2 target words"),
        (torch.rand(2, 3), {"gold_links": [(-1, 0)]}, "gold link -1-0"),
    ],
)
def test_invalid_heat_maps_are_rejected(tmp_path: Path, weights: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw_heat_map(weights, build_words(2), build_words(3), tmp_path / "map.png", **options)
    assert not list(tmp_path.iterdir())


def test_empty_heat_map_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one of both"):
        draw_heat_map(torch.zeros(0, 3), [], build_words(3), tmp_path / "map.png")


def test_shades_have_equal_lightness_steps() -> None:
    def lightness(colour: str) -> float:  # of CIELAB
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                  for c in matplotlib.colors.to_rgb(colour)]  # fmt: skip
        y = np.dot(linear, [0.2126, 0.7152, 0.0722])
        return 116 * np.cbrt(y) - 16 if y > 0.008856 else 903.3 * y

    steps = -np.diff([lightness(shade) for shade in plots.SHADES])
    assert steps.min() > 0.8 * steps.mean()
    assert steps.max() < 1.2 * steps.mean()
    assert steps.sum() > 75
    assert len({round(colorsys.rgb_to_hsv(*matplotlib.colors.to_rgb(s))[0], 1) for s in plots.SHADES[1:]}) == 1


BINS = [LengthBin(1, 10, 40, 20.0), LengthBin(11, 20, 90, 25.0), LengthBin(51, None, 7, 15.0)]


def test_curves_have_their_colours(tmp_path: Path) -> None:
    path = draw_scores_by_length(
        {
            "fixed": [LengthBin(b.min_words, b.max_words, b.count, b.score / 2) for b in BINS],
            "바다나우": BINS[::-1],
            "one": BINS[1:2],
        },
        tmp_path / "curves.png",
        title="BLEU by length",
    )
    image = read_pixels(path)
    for colour in plots.COLOURS[:3]:
        assert find_colour(image, colour).sum() > 100
    assert find_colour(image, "#eef0f4").sum() > 1000  # the bars


@pytest.mark.parametrize("count", [1, 9])
def test_any_number_of_curves_and_bins(tmp_path: Path, count: int) -> None:
    bins = [LengthBin(1 + 10 * n, 10 + 10 * n, 5, 0.0) for n in range(count)]
    image = read_pixels(draw_scores_by_length({f"system {n}": bins for n in range(count)}, tmp_path / "curves.png"))
    assert find_colour(image, "#ffffff")[:, -1].all()


def test_curve_labels_do_not_overlap() -> None:
    axes = Figure().add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 1), ylim=(0, 100))
    plots._label_curves(axes, [(50.0, "b", "k"), (49.0, "a", "k"), (51.0, "c", "k"), (90.0, "d", "k")])
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert heights["a"] == pytest.approx(44, abs=0.1)
    assert heights["b"] == pytest.approx(50, abs=0.1)
    assert heights["c"] == pytest.approx(56, abs=0.1)
    assert heights["d"] == 90


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ({}, "no curves given"),
        ({"a": []}, "'a' has no bins"),
        ({"a": BINS, "b": [LengthBin(1, 10, 41, 3.0)]}, "'b' has 41 sentences of 1–10 words where another has 40"),
    ],
)
def test_invalid_curves_are_rejected(tmp_path: Path, curves: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw_scores_by_length(curves, tmp_path / "curves.png")


def test_training_curves_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []

    def savefig(self: Figure, path: Path, **_: object) -> None:
        path.touch()
        figures.append(self)

    monkeypatch.setattr(Figure, "savefig", savefig)
    draw_training_curves({"words": [(10, 0.1), (30, 0.5)], "next": [(10, 0.5)]}, tmp_path / "curves.png", title="t")
    (axes,) = figures[0].axes
    assert axes.get_xlim() == (0, 30)
    assert axes.get_ylim() == (0, pytest.approx(0.54))
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[10, 0.1], [30, 0.5]], [[10, 0.5]]]
    assert {text.get_text() for text in axes.texts} == {"words", "next"}


def test_missing_matplotlib_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def import_without(name: str, *arguments, **options):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", import_without)
    monkeypatch.delitem(sys.modules, "matplotlib")
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[look\]"'):
        draw_map(torch.eye(2), tmp_path / "map.png")
    with pytest.raises(MissingExtra, match="matplotlib"):
        draw_scores_by_length({"a": BINS}, tmp_path / "curves.png")


class SavedFigure:
    """The figure that was saved last."""

    figure: Figure


@pytest.fixture
def saved_figure(monkeypatch: pytest.MonkeyPatch) -> SavedFigure:
    saved, save = SavedFigure(), Figure.savefig

    def savefig(figure: Figure, *args: Any, **options: Any) -> None:
        saved.figure = figure
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def find_text(figure: Figure, text: str) -> Any:
    """Return the text of a figure, with its colour and position."""
    (match,) = [x for x in figure.findobj(matplotlib.text.Text) if x.get_text() == text and x.get_visible()]
    return match


@pytest.mark.parametrize(
    ("num_keys", "most", "name", "middle"),
    [(5, 0.9, "linear", 0.5), (5, 0.2, "linear, of this map", 0.1), (67, 0.9, "square root", 0.25)],
)
def test_scale_follows_the_rule_of_the_viewer(num_keys: int, most: float, name: str, middle: float) -> None:
    norm, scale_name = plots.choose_scale(np.full((2, num_keys), most))
    assert scale_name == name
    assert float(norm(middle)) == pytest.approx(0.5)


def test_logarithmic_scale_of_many_keys(tmp_path: Path) -> None:
    weights = np.full((2, 211), 1e-4)
    weights[:, 0] = 1 - 210e-4
    norm, name = plots.choose_scale(weights)
    assert name == "logarithmic, of this map"
    assert float(norm(weights.max())) == pytest.approx(1)
    assert float(norm(0.0)) == 0  # masked keys
    draw_map(weights, tmp_path / "map.png")


def test_map_explains_itself(tmp_path: Path, saved_figure: SavedFigure) -> None:
    words = ["<s>", "hello", "there", "</s>", "hi"]
    turns = [LabelledSpan(1, 4, "user"), LabelledSpan(4, 5, "assistant")]
    weights = np.tril(np.ones((5, 5)))
    title = "a title of several lines " * 6
    draw_heat_map(
        weights / weights.sum(1, keepdims=True), words, words, tmp_path / "map.svg", title=title,
        subtitle=["layer 3", "without sinks"], spans=(turns[:1], turns), hidden_columns=(0, 3),
    )  # fmt: skip
    figure = saved_figure.figure
    assert find_text(figure, "← queries").axes is find_text(figure, "attend to keys →").axes
    assert find_text(figure, "weight of the rest (linear)")
    figure.draw_without_rendering()
    (heading,) = [x for x in figure.findobj(matplotlib.text.Text) if x.get_text().startswith("a title")]
    assert heading.get_text().count("\n") >= 2
    subtitle = find_text(figure, "layer 3 · without sinks")
    top = max(x.get_window_extent().y1 for x in heading.axes.get_xticklabels())
    assert top < subtitle.get_window_extent().y0 < subtitle.get_window_extent().y1 < heading.get_window_extent().y0
    special, plain = heading.axes.get_yticklabels()[3], heading.axes.get_yticklabels()[2]
    assert special.get_size() < plain.get_size()
    names = [x.get_text() for x in figure.findobj(matplotlib.text.Text)]
    assert (names.count("user"), names.count("assistant")) == (2, 1)
