"""Figures of classification: the confusion matrix and the reliability diagram.

They write a PNG, SVG or PDF file and change no setting of matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jumok.errors import InputError
from jumok.look.figures.plots import (
    COLOURS,
    GREY,
    INK,
    SHADES,
    annotate,
    create_colormap,
    label_cells,
    save_figure,
    shorten_words,
    style_axes,
)
from jumok.metrics.classification import CalibrationBin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CLASSES = 30  # more are unreadable
SMALL_FONT_SIZE = 9  # points: with smaller fonts, shares below 1 % are left out
UNDERCONFIDENT_COLOUR, OVERCONFIDENT_COLOUR = COLOURS[0], COLOURS[1]


def draw_confusion_matrix(
    counts_matrix: ArrayLike, class_names: Sequence[str], path: str | Path, *, title: str = ""
) -> Path:
    """Draw how often a text of one class (row) got each label (column): shares of the row, and counts.

    The darker a cell, the larger its share of the texts of that class; cells without texts stay empty. Totals
    are at the right and below. Returns the path.

    >>> draw_confusion_matrix([[8, 2], [1, 9]], ["good", "bad"], "confusion.png")  # doctest: +SKIP
    """
    counts = np.asarray(counts_matrix, np.int64)
    num_classes = len(class_names)
    if counts.shape != (num_classes, num_classes) or not 1 <= num_classes <= MAX_CLASSES or (counts < 0).any():
        raise InputError(
            f"counts of shape {counts.shape} given for {num_classes} classes; expected a row and a column "
            f"each for 1 to {MAX_CLASSES} classes, and no negative count"
        )
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    labels = shorten_words(class_names)
    cell = min(1.05, max(0.4, 6.4 / num_classes))  # inches
    font_size = min(15.0, 72 * cell * 0.24)  # points

    def draw(figure: Figure) -> None:
        figure.set_size_inches(cell * num_classes, cell * num_classes)  # labels are added when it is saved
        axes = figure.add_axes((0, 0, 1, 1))
        axes.pcolormesh(shares, cmap=create_colormap(SHADES), vmin=0, vmax=1, edgecolors="white", linewidth=2 * cell)
        label_cells(figure, axes, labels, labels, cell, min(12.0, max(8.5, font_size)), pad=4)
        for row, column in np.argwhere(counts > 0):
            _draw_cell(axes, int(row), int(column), float(shares[row, column]), int(counts[row, column]), font_size)
        _draw_totals(axes, counts, min(9.5, max(6.5, 0.7 * font_size)))
        axes.set_xlabel("predicted class", size=10.5, color=GREY, labelpad=8)
        axes.set_ylabel("true class", size=10.5, color=GREY, labelpad=8)
        if title:
            axes.set_title(title, size=12.5, color=INK, loc="left", pad=14)

    return save_figure(draw, path, [*labels, title])


def draw_reliability_diagram(
    bins: Sequence[CalibrationBin], path: str | Path, *, calibration_error: float | None = None, title: str = ""
) -> Path:
    """Draw a reliability diagram: the accuracy of labels by the confidence of the model.

    For a calibrated model the points lie on the diagonal: of the labels with a probability of 80 %, 80 % are
    correct. A point is one bin (see :func:`jumok.metrics.classification.compute_calibration`), with the 95 %
    confidence interval of its accuracy, and the bars below are the numbers of texts. ``calibration_error`` is
    the expected calibration error. Returns the path.
    """
    if not bins:
        raise InputError("no bins given: there is nothing to draw")

    if calibration_error is not None:
        title = f"{title}{', ' if title else ''}expected calibration error {calibration_error:.3f}"

    def draw(figure: Figure) -> None:
        figure.set_size_inches(4.6, 5.8)
        axes = figure.add_axes((0, 0.24, 1, 0.76))
        counts_axes = figure.add_axes((0, 0, 1, 0.19), sharex=axes)
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1.1, dashes=(4, 3), zorder=1)
        points = [(item.confidence, item.accuracy) for item in bins]
        for item, point in zip(bins, points, strict=True):
            colour = OVERCONFIDENT_COLOUR if item.accuracy < item.confidence else UNDERCONFIDENT_COLOUR
            bar: dict[str, Any] = {"align": "edge", "color": colour, "alpha": 0.16, "linewidth": 0, "zorder": 0}
            axes.bar(item.low, max(point) - min(point), item.high - item.low, min(point), **bar)
            interval = _compute_wilson_interval(item)
            axes.plot([item.confidence] * 2, interval, color=INK, linewidth=0.9, alpha=0.55, zorder=2)
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=INK, linewidth=1.2, alpha=0.3, zorder=2)
        axes.plot(x, y, color=INK, marker="o", markersize=6, linewidth=0, markeredgecolor="white",
                  markeredgewidth=0.8, zorder=3, clip_on=False)  # fmt: skip
        axes.set(xlim=(0, 1), ylim=(0, 1))
        _style_axes(axes)
        axes.set_ylabel("accuracy", size=11, color=INK, labelpad=8)
        axes.tick_params(labelbottom=False)
        axes.annotate("underconfident", (0.035, 0.965), va="top", size=9, color=UNDERCONFIDENT_COLOUR)
        axes.annotate("overconfident", (0.965, 0.035), ha="right", size=9, color=OVERCONFIDENT_COLOUR)
        axes.set_title(title, size=12.5, color=INK, loc="left", pad=12)
        _draw_counts(counts_axes, bins)

    return save_figure(draw, path, [title])


def _draw_cell(axes: Axes, row: int, column: int, share: float, count: int, size: float) -> None:
    ink = "white" if share > 0.45 else INK
    share_text = "<1 %" if share < 0.01 else ">99 %" if 0.99 < share < 1 else f"{100 * share:.0f} %"
    middle = column + 0.5
    if share < 0.01 and size < SMALL_FONT_SIZE:
        axes.text(middle, row + 0.5, f"{count:,}", ha="center", va="center", size=0.8 * size, color=GREY)
        return
    axes.text(middle, row + 0.43, share_text, ha="center", va="center", size=size, color=ink)
    count_size = max(5.2, 0.68 * size)
    axes.text(middle, row + 0.72, f"{count:,}", ha="center", va="center", size=count_size, color=ink, alpha=0.8)


def _draw_totals(axes: Axes, counts: NDArray[np.int64], size: float) -> None:
    n = len(counts)
    for i, (num_texts, num_predicted) in enumerate(zip(counts.sum(1), counts.sum(0), strict=True)):
        annotate(axes, f"{num_texts:,}", (n, i + 0.5), (5, 0), va="center", size=size, color=GREY)
        annotate(axes, f"{num_predicted:,}", (i + 0.5, n), (0, -5), va="top", ha="center", size=size, color=GREY)


def _draw_counts(axes: Axes, bins: Sequence[CalibrationBin]) -> None:
    """Draw the number of texts in each bin."""
    for item in bins:
        axes.bar(item.low, item.count, item.high - item.low, align="edge", color="#b9c0cb", edgecolor="white")
    largest = max(bins, key=lambda item: item.count)
    num_texts = sum(item.count for item in bins)
    axes.set_ylim(0, 1.35 * largest.count)
    middle = (largest.low + largest.high) / 2
    annotate(axes, f"{largest.count:,}", (middle, largest.count), (0, 2), ha="center", size=8, color=GREY)
    _style_axes(axes)
    axes.grid(visible=False)
    axes.set_yticks([])
    axes.set_xlabel("confidence", size=11, color=INK, labelpad=8)
    axes.set_ylabel(f"{num_texts:,}\ntexts", size=9, color=GREY, labelpad=8, rotation=0, ha="right", va="center")


def _style_axes(axes: Axes) -> None:
    style_axes(axes, grid="both", label_size=10)
    axes.set_facecolor("none")
    ticks = np.linspace(0, 1, 6)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _compute_wilson_interval(item: CalibrationBin) -> tuple[float, float]:
    """Return the 95 % Wilson interval of the accuracy of a bin, valid for few texts and near 0 and 1."""
    n, accuracy, z2 = item.count, item.accuracy, 1.96**2
    middle = (accuracy + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * (accuracy * (1 - accuracy) / n + z2 / (4 * n**2))) / (1 + z2 / n)
    return float(middle - half), float(middle + half)
