"""Tests of the figures of classification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jumok.errors import InputError
from jumok.look.figures import classification_figures
from jumok.look.figures.classification_figures import draw_confusion_matrix, draw_reliability_diagram
from jumok.metrics.classification import CalibrationBin, compute_calibration

pytestmark = pytest.mark.filterwarnings("ignore:no installed font has")  # where no Korean font is installed


def read_svg(path: Path) -> str:
    """Return an SVG, which contains all texts of the figure."""
    return path.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def write_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write letters to SVG files instead of their outlines."""
    from matplotlib import style

    original = style.context
    monkeypatch.setattr(style, "context", lambda settings: original([*settings, {"svg.fonttype": "none"}]))


def test_confusion_matrix_shows_counts_shares_and_totals(tmp_path: Path) -> None:
    counts = [[1203, 4, 0], [30, 70, 0], [0, 1, 999]]
    path = draw_confusion_matrix(counts, ["bad", "so so", "좋음"], tmp_path / "new" / "c.svg", title="test, 0.97")
    svg = read_svg(path)
    parts = ">1,203< >&gt;99 &lt;1 >30 >70 >1,207< >100< >1,233< >75<"
    for part in parts.split():
        assert part in svg, part
    for part in ("so so", "좋음", "true class", "predicted class", "test, 0.97"):
        assert part in svg
    assert ">0 %<" not in svg
    assert ">0<" not in svg


@pytest.mark.parametrize("count", [1, 2, 11, 30])
def test_confusion_matrix_of_any_size(tmp_path: Path, count: int) -> None:
    generator = np.random.default_rng(count)
    counts = generator.integers(0, 9, (count, count)) + 20_000 * np.eye(count, dtype=int)
    path = draw_confusion_matrix(counts, [f"a class {n}" for n in range(count)], tmp_path / "c.png")
    from matplotlib.image import imread

    height, width = imread(path).shape[:2]
    assert 150 < height < 2600
    assert 150 < width < 2600


def test_confusion_matrix_with_empty_class(tmp_path: Path) -> None:
    assert draw_confusion_matrix([[0, 0], [3, 2]], ["a", "b"], tmp_path / "c.png").stat().st_size > 1000


@pytest.mark.parametrize("counts", [[[1, 2]], [[1, -2], [0, 1]], np.zeros((31, 31))])
def test_invalid_counts_are_rejected(tmp_path: Path, counts: Any) -> None:
    with pytest.raises(InputError, match="1 to 30 classes"):
        draw_confusion_matrix(counts, ["x"] * len(counts[-1]), tmp_path / "c.png")


def test_reliability_diagram(tmp_path: Path) -> None:
    truth = [0] * 80 + [1] * 20 + [1] * 30
    shares = [[0.8, 0.2]] * 100 + [[0.03, 0.97]] * 30
    path = draw_reliability_diagram(
        compute_calibration(truth, shares), tmp_path / "r.svg", calibration_error=0.0069, title="test"
    )
    svg = read_svg(path)
    for part in ("test, expected calibration error 0.007", "overconfident", ">100<", ">130<", "texts"):
        assert part in svg, part
    assert draw_reliability_diagram([CalibrationBin(0.9, 1.0, 1, 1.0, 0.0)], tmp_path / "r.png").stat().st_size > 1000
    with pytest.raises(InputError, match="no bins"):
        draw_reliability_diagram([], tmp_path / "r.png")


def test_wilson_interval() -> None:
    low, high = classification_figures._compute_wilson_interval(CalibrationBin(0, 1, 10, 0.5, 0.9))  # 9 of 10
    assert (low, high) == (pytest.approx(0.596, abs=1e-3), pytest.approx(0.982, abs=1e-3))
    low, high = classification_figures._compute_wilson_interval(CalibrationBin(0, 1, 3, 0.5, 1.0))
    assert low == pytest.approx(0.4385, abs=1e-3)
    assert high == pytest.approx(1)
