"""Pictures: written, the right way round, and leaving matplotlib as it was."""

from __future__ import annotations

import builtins
import colorsys
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from jumok.errors import InputError, MissingExtra
from jumok.look.figures import fonts, plots
from jumok.look.figures.plots import draw_heat_map, draw_scores_by_length, draw_training_curves
from jumok.metrics.translation import LengthBin

pytestmark = pytest.mark.filterwarnings("ignore:no installed font has")  # where no Korean font is installed


def pixels(path: Path) -> np.ndarray:
    return imread(path)[..., :3]


def near(image: np.ndarray, colour: str, within: float = 0.02) -> np.ndarray:
    """Where a picture has this colour."""
    return (np.abs(image - matplotlib.colors.to_rgb(colour)) < within).all(-1)


def words(count: int) -> list[str]:
    return [f"w{n}" for n in range(count)]


def test_a_map_is_the_right_way_round(tmp_path: Path) -> None:
    # One target word, the second of three, looks at the last of five source words.
    weights = torch.zeros(3, 5)
    weights[1, 4] = 1.0
    path = draw_heat_map(weights, words(3), words(5), tmp_path / "new" / "map.png")
    assert path == tmp_path / "new" / "map.png"
    image = pixels(path)
    # Where the map is: cells, light or dark; the scale at the right of it has dark ones too, in a thin line.
    light = np.argwhere(near(image, plots.SHADES[0]))
    dark = np.argwhere(near(image, plots.SHADES[-1]))
    (top, left), (bottom, right) = light.min(0), light.max(0)
    row, column = np.median(dark, axis=0)
    assert top + (bottom - top) / 3 < row < top + 2 * (bottom - top) / 3
    assert column > left + 0.7 * (right - left)


def test_gold_links_are_outlined(tmp_path: Path) -> None:
    weights = torch.full((2, 3), 1 / 3)
    plain = pixels(draw_heat_map(weights, words(2), words(3), tmp_path / "plain.png"))
    assert not near(plain, plots.GOLD).any()
    image = pixels(draw_heat_map(weights, words(2), words(3), tmp_path / "gold.png", gold_links={(2, 0)}))
    orange = np.argwhere(near(image, plots.GOLD))
    cell = 0.46 * plots.DOTS_PER_INCH
    outline = orange[orange[:, 1] > orange[:, 1].max() - cell]
    height, width = outline.max(0) - outline.min(0)
    assert height == pytest.approx(0.82 * cell, abs=4)
    assert width == pytest.approx(0.82 * cell, abs=4)


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (7, 9), (3, 61), (59, 2), (60, 60)])
def test_any_size(tmp_path: Path, shape: tuple[int, int]) -> None:
    image = pixels(draw_heat_map(torch.rand(shape), words(shape[0]), words(shape[1]), tmp_path / "map.png"))
    height, width, _ = image.shape
    assert min(height, width) > 100
    assert max(height, width) < 2500
    light = near(image, "#ffffff")
    assert light[0].all()
    assert light[-1].all()
    assert light[:, 0].all()
    assert light[:, -1].all()  # nothing is cut off


def test_a_giant_is_still_drawn(tmp_path: Path) -> None:
    path = draw_heat_map(np.full((3, 400), 1 / 400), words(3), [""] * 400, tmp_path / "map.png")
    assert pixels(path).shape[1] < 8000


def test_long_words_lean_and_short_ones_stand(tmp_path: Path) -> None:
    short = pixels(draw_heat_map(torch.eye(3), ["a", "b", "c"], ["a", "b", "c"], tmp_path / "short.png"))
    long = pixels(draw_heat_map(torch.eye(3), ["a", "b", "c"], ["a", "Mitentscheidung", "c"], tmp_path / "long.png"))
    assert long.shape[0] > short.shape[0] + 50
    endless = pixels(draw_heat_map(torch.eye(3), ["a", "b", "c"], ["a", "x" * 5000, "c\nd"], tmp_path / "endless.png"))
    assert endless.shape[0] < 900


def test_words_are_no_formulas(tmp_path: Path) -> None:
    names = ["$x_1$", "$", r"\frac{", "^_", "<b>", "%", "&"]
    draw_heat_map(torch.eye(7), names, names, tmp_path / "map.png", title=r"$\nosuch{$")
    draw_scores_by_length({"$\\nosuch{$": [LengthBin(1, 10, 3, 5.0)]}, tmp_path / "curves.png", title="$a$")


def test_no_setting_gets_in_or_out(tmp_path: Path) -> None:
    usual = draw_heat_map(torch.eye(3), words(3), words(3), tmp_path / "usual.png", title="주목").read_bytes()
    with matplotlib.rc_context():
        matplotlib.style.use("dark_background")
        matplotlib.rcParams["font.size"] = 31
        before = dict(matplotlib.rcParams)
        styled = draw_heat_map(torch.eye(3), words(3), words(3), tmp_path / "styled.png", title="주목").read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert styled == usual


def test_a_missing_font_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_load_packaged_font", lambda: None)
    monkeypatch.setattr(fonts, "_list_installed", lambda: ["DejaVu Sans"])
    assert draw_heat_map(torch.eye(2), ["이것은", "예문"], ["this", "is"], tmp_path / "map.png").is_file()


def test_what_may_be_drawn(tmp_path: Path) -> None:
    weights = torch.rand(2, 3, requires_grad=True)
    one = draw_heat_map(weights.to(torch.bfloat16).float(), words(2), words(3), tmp_path / "a.png").read_bytes()
    two = draw_heat_map(weights.to(torch.bfloat16), words(2), words(3), str(tmp_path / "b.png")).read_bytes()
    three = draw_heat_map(
        weights.detach().to(torch.bfloat16).float().numpy(), tuple(words(2)), words(3), tmp_path / "c.png"
    ).read_bytes()
    assert one == two == three


@pytest.mark.parametrize(
    ("weights", "more", "message"),
    [
        (torch.rand(2, 3).T, {}, r"shape \(3, 2\) came with 2 rows and 3 columns"),
        (torch.rand(1, 2, 3), {}, "expected one map"),
        (torch.tensor([[0.0, 1.0, torch.nan]] * 2), {}, "NaN"),
        (
            torch.rand(2, 3),
            {"gold_links": [(0, 2)]},
            "gold link 0-2 lies outside 3 source and 2 target words",
        ),
        (torch.rand(2, 3), {"gold_links": [(-1, 0)]}, "gold link -1-0"),
    ],
)
def test_bad_maps(tmp_path: Path, weights: torch.Tensor, more: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw_heat_map(weights, words(2), words(3), tmp_path / "map.png", **more)
    assert not list(tmp_path.iterdir())


def test_an_empty_map(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one of both"):
        draw_heat_map(torch.zeros(0, 3), [], words(3), tmp_path / "map.png")


def test_the_shades_are_equally_far_apart() -> None:
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


def test_curves_are_drawn_in_their_colours(tmp_path: Path) -> None:
    path = draw_scores_by_length(
        {
            "fixed": [LengthBin(b.min_words, b.max_words, b.count, b.score / 2) for b in BINS],
            "바다나우": BINS[::-1],
            "one": BINS[1:2],
        },
        tmp_path / "curves.png",
        title="BLEU by length",
    )
    image = pixels(path)
    for colour in plots.COLOURS[:3]:
        assert near(image, colour).sum() > 100
    assert near(image, "#eef0f4").sum() > 1000  # the bars


@pytest.mark.parametrize("count", [1, 9])
def test_any_number_of_curves_and_bins(tmp_path: Path, count: int) -> None:
    bins = [LengthBin(1 + 10 * n, 10 + 10 * n, 5, 0.0) for n in range(count)]
    image = pixels(draw_scores_by_length({f"system {n}": bins for n in range(count)}, tmp_path / "curves.png"))
    assert near(image, "#ffffff")[:, -1].all()


def test_names_keep_apart() -> None:
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
        ({}, "no curves came"),
        ({"a": []}, "'a' has no bins"),
        (
            {"a": BINS, "b": [LengthBin(1, 10, 41, 3.0)]},
            "'b' has 41 sentences of 1–10 words where another has 40",
        ),
    ],
)
def test_bad_curves(tmp_path: Path, curves: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw_scores_by_length(curves, tmp_path / "curves.png")


def test_progress_is_drawn_from_zero_to_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []

    def savefig(self: Figure, path: Path, **_: object) -> None:
        path.touch()
        drawn.append(self)

    monkeypatch.setattr(Figure, "savefig", savefig)
    draw_training_curves({"words": [(10, 0.1), (30, 0.5)], "next": [(10, 0.5)]}, tmp_path / "curves.png", title="t")
    (axes,) = drawn[0].axes
    assert axes.get_xlim() == (0, 30)
    assert axes.get_ylim() == (0, pytest.approx(0.54))
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[10, 0.1], [30, 0.5]], [[10, 0.5]]]
    assert {text.get_text() for text in axes.texts} == {"words", "next"}


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest, **more):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "matplotlib")
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[look\]"'):
        draw_heat_map(torch.eye(2), words(2), words(2), tmp_path / "map.png")
    with pytest.raises(MissingExtra, match="matplotlib"):
        draw_scores_by_length({"a": BINS}, tmp_path / "curves.png")
