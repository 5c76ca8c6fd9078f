"""Figures for papers and screens: attention maps, scores by length, training curves.

They write an image file and change no setting of matplotlib.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from jumok.errors import InputError, MissingExtra
from jumok.files import atomic_write
from jumok.look.figures import fonts
from jumok.metrics.translation import LengthBin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

# From nearly white to dark blue in equal steps of lightness, so that shades are proportional, also in grey.
SHADES = ("#f4fafe", "#bee1fa", "#8cc6f5", "#61a9ea", "#3f8bd9", "#2b6dc0", "#22519e", "#1c3878", "#15224f")
# Okabe and Ito: distinguishable with any colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, GREY, GOLD = "#22262e", "#7a818c", "#e8590c"
DOTS_PER_INCH = 160
IMAGE_SUFFIXES = (".png", ".svg", ".pdf")


def draw_heat_map(
    weights: Tensor | NDArray[np.floating],
    rows: Sequence[str],
    columns: Sequence[str],
    path: str | Path,
    *,
    title: str = "",
    gold_links: Iterable[tuple[int, int]] = (),
) -> Path:
    """Draw one map ``(Q, K)``: target words, ``rows``, down the left, source words along the top.

    The darker a cell, the higher the weight. ``gold_links`` (source word, target word) are outlined. Returns
    the path.

    >>> draw_heat_map(torch.eye(2), ["이것은", "예문이다"], ["this", "example"], "map.png")  # doctest: +SKIP
    """
    array = _to_array(weights, len(rows), len(columns))
    links = _check_links(gold_links, len(rows), len(columns))
    rows, columns = shorten_words(rows), shorten_words(columns)
    max_length = max(array.shape)
    cell = min(0.46, max(0.19, 10 / max_length), 40 / max_length)  # inches: readable, but limited in total
    font_size = min(13.0, 72 * 0.62 * cell)  # points

    def draw(figure: Figure) -> None:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.patches import Rectangle

        width, height = cell * array.shape[1], cell * array.shape[0]
        figure.set_size_inches(width, height)  # labels are added when it is saved
        axes = figure.add_axes((0, 0, 1, 1))
        colormap = LinearSegmentedColormap.from_list("jumok", SHADES)
        mesh = axes.pcolormesh(
            array, cmap=colormap, vmin=0, vmax=_get_scale_max(array), edgecolors="white", linewidth=cell * 2
        )
        axes.set(xlim=(0, array.shape[1]), ylim=(array.shape[0], 0))
        axes.xaxis.tick_top()
        axes.tick_params(length=0, pad=3, labelsize=font_size, labelcolor=INK)
        axes.spines[:].set_visible(False)
        axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
        axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
        rotate_long_labels(figure, axes, cell)
        for source, target in links:
            outline = Rectangle((source + 0.09, target + 0.09), 0.82, 0.82, fill=False, edgecolor=GOLD)
            outline.set_linewidth(max(0.9, 3.6 * cell))
            axes.add_patch(outline)
        if title:
            axes.set_title(title, size=font_size + 1.5, color=INK, loc="left", pad=12)
        if links:
            axes.annotate("□ gold link", (0, len(rows)), (2, -5), textcoords="offset points", va="top",
                          size=8, color=GOLD, annotation_clip=False)  # fmt: skip
        _draw_colour_bar(figure, mesh, width, height)

    return save_figure(draw, path, [*rows, *columns, title])


def draw_scores_by_length(
    curves: Mapping[str, Sequence[LengthBin]], path: str | Path, *, metric: str = "BLEU", title: str = ""
) -> Path:
    """Draw the scores of systems, by name, by source length, with the numbers of sentences.

    All are of one test set (see :func:`jumok.metrics.translation.score_by_length`). Returns the path.
    """
    bins = _merge_bins(curves)
    bin_indices = {(b.min_words, b.max_words): n for n, b in enumerate(bins)}

    def draw(figure: Figure) -> None:
        figure.set_size_inches(max(5.0, 1.6 + 0.9 * len(bins)), 4.2)
        counts = figure.add_axes((0, 0, 1, 1))
        axes = figure.add_axes((0, 0, 1, 1), sharex=counts)
        axes.patch.set_visible(False)
        _draw_counts(counts, bins)
        ends = []
        for n, (name, curve) in enumerate(curves.items()):
            points = sorted((bin_indices[b.min_words, b.max_words], b.score) for b in curve)
            x, y = [index for index, _ in points], [score for _, score in points]
            colour, mark = COLOURS[n % len(COLOURS)], "osD^vPX"[n % 7]
            axes.plot(x, y, color=colour, marker=mark, markersize=6, linewidth=2.2, markeredgecolor="white",
                      markeredgewidth=0.8, clip_on=False, zorder=3)  # fmt: skip
            ends.append((y[-1], name, colour))
        max_score = max(b.score for curve in curves.values() for b in curve)
        axes.set(xlim=(-0.55, len(bins) - 0.45), ylim=(0, max(1.0, 1.08 * max_score)))
        _label_curves(axes, ends)
        _style_axes(axes, "words in the source sentence", metric, title)
        axes.set_xticks(range(len(bins)), [b.label for b in bins])

    return save_figure(draw, path, [*curves, metric, title])


def draw_training_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], path: str | Path, *, title: str = ""
) -> Path:
    """Draw training metrics, by name, each as points (step, value). Returns the path.

    >>> draw_training_curves({"accuracy": [(100, 0.2), (200, 0.4)]}, "progress.png")  # doctest: +SKIP
    """

    def draw(figure: Figure) -> None:
        figure.set_size_inches(6.5, 4.2)
        axes = figure.add_axes((0, 0, 1, 1))
        ends = []
        for n, (name, points) in enumerate(curves.items()):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=COLOURS[n % len(COLOURS)], marker="o", markersize=4, linewidth=2, zorder=3)
            ends.append((y[-1], name, COLOURS[n % len(COLOURS)]))
        last_step = max(x for points in curves.values() for x, _ in points)
        max_value = max(y for points in curves.values() for _, y in points)
        axes.set(xlim=(0, last_step), ylim=(0, 1.08 * max_value or 1.0))
        _label_curves(axes, ends)
        _style_axes(axes, "step", "", title)

    return save_figure(draw, path, [*curves, title])


def _style_axes(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    """Style axes so that the curves stand out."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.grid(axis="y", color="#e6e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=10.5, labelcolor=INK)
    axes.set_xlabel(x_label, size=11, color=INK, labelpad=8)
    axes.set_ylabel(y_label, size=11, color=INK, labelpad=8)
    axes.set_title(title, size=12.5, color=INK, loc="left", pad=16)


def save_figure(draw: Callable[[Figure], None], path: str | Path, texts: Sequence[str]) -> Path:
    """Draw with fonts that have all characters of the texts, and save the figure."""
    path = Path(path)
    with _open_figure(texts) as figure:
        draw(figure)
        with atomic_write(path) as temporary:
            figure.savefig(
                temporary,
                dpi=DOTS_PER_INCH,
                bbox_inches="tight",
                pad_inches=0.18,
                format=_get_image_format(path),
            )
    return path


def build_figure(draw: Callable[[Figure], None], texts: Sequence[str]) -> Figure:
    """Draw a figure that the caller saves."""
    with _open_figure(texts) as figure:
        draw(figure)
    return figure


def _open_figure(texts: Sequence[str]) -> AbstractContextManager[Figure]:
    """Return a context with a figure and matplotlib's default settings, with fonts for all the characters."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtra('figures need matplotlib, which is not installed: pip install "jumok[look]"') from error
    # Start from matplotlib's defaults, so that no style interferes; a dollar sign in a word is not a formula.
    settings = {"font.family": fonts.find_font_families(texts), "text.parse_math": False}

    @contextmanager
    def open_figure() -> Iterator[Figure]:
        with style.context(["default", settings]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph .* missing", UserWarning)  # reported already
            yield Figure(facecolor="white")

    return open_figure()


def check_image_path(path: Path) -> None:
    """Raise an error for a path without an image suffix."""
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        raise InputError(f"{path}: the name of an image ends in {', '.join(IMAGE_SUFFIXES)}")


def _get_image_format(path: Path) -> str:
    return path.suffix.lower().removeprefix(".") if path.suffix.lower() in IMAGE_SUFFIXES else "png"


def rotate_long_labels(figure: Figure, axes: Axes, cell_inches: float) -> None:
    """Rotate the words along the top if one is wider than its column."""
    figure.draw_without_rendering()
    words = axes.get_xticklabels()
    if all(word.get_window_extent().width < 0.92 * cell_inches * figure.dpi for word in words):
        return
    for word in words:
        word.set(rotation=52, rotation_mode="anchor", ha="left", va="center")


def _draw_colour_bar(figure: Figure, cells: QuadMesh, width: float, height: float) -> None:
    """Draw a thin colour bar at the right."""
    from matplotlib.ticker import MaxNLocator

    bar_height = min(height, 2.0)
    bar_axes = figure.add_axes((1 + 0.22 / width, 1 - bar_height / height, 0.09 / width, bar_height / height))
    bar = figure.colorbar(cells, cax=bar_axes, ticks=MaxNLocator(4 if bar_height > 1 else 1))
    bar.outline.set_visible(False)
    bar_axes.tick_params(length=0, labelsize=8, labelcolor=GREY, pad=3)
    if bar_height > 1:
        bar_axes.set_ylabel("attention weight", size=8, color=GREY, labelpad=5)


def _draw_counts(axes: Axes, bins: Sequence[LengthBin]) -> None:
    """Draw the numbers of sentences in a light colour in the lower third."""
    counts = [b.count for b in bins]
    axes.bar(range(len(bins)), counts, width=0.82, color="#eef0f4", zorder=0)
    axes.set_ylim(0, 3 * max(counts))
    for n, count in enumerate(counts):
        text = f"{count:,}" if n else f"{count:,} sentences"
        axes.annotate(text, (n, 0), (0, 3), textcoords="offset points", ha="center", size=8, color=GREY)
    axes.set_axis_off()


def _label_curves(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Draw the name of each curve at its right end, moved apart where ends are close together."""
    ends = sorted(ends)
    low, high = axes.get_ylim()
    min_distance, right = 0.06 * (high - low), axes.get_xlim()[1]
    heights = [score for score, _, _ in ends]
    for _ in range(100):  # neighbours push each other until all fit
        for n in range(len(heights) - 1):
            overlap = max(0.0, min_distance - (heights[n + 1] - heights[n]))
            heights[n] -= overlap / 2
            heights[n + 1] += overlap / 2
    for (_, name, colour), y in zip(ends, heights, strict=True):
        axes.annotate(name, (right, y), (4, 0), textcoords="offset points", va="center",
                      size=11, color=colour, annotation_clip=False)  # fmt: skip


def _merge_bins(curves: Mapping[str, Sequence[LengthBin]]) -> list[LengthBin]:
    """Return the bins of all curves, in order; each has the same number of sentences in all of them."""
    merged: dict[tuple[int, int | None], LengthBin] = {}
    for name, curve in curves.items():
        if not curve:
            raise InputError(f"the curve {name!r} has no bins; expected at least one")
        for b in curve:
            first = merged.setdefault((b.min_words, b.max_words), b)
            if first.count != b.count:
                raise InputError(
                    f"the curve {name!r} has {b.count} sentences of {b.label} words where another has "
                    f"{first.count}; curves in one figure must be of one test set"
                )
    if not merged:
        raise InputError("no curves came; expected {name of a system: its bins}")
    return [merged[key] for key in sorted(merged, key=lambda key: key[0])]


def _check_links(gold_links: Iterable[tuple[int, int]], num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    links = sorted(gold_links)
    for source, target in links:
        if not (0 <= source < num_columns and 0 <= target < num_rows):
            raise InputError(
                f"the gold link {source}-{target} lies outside {num_columns} source and {num_rows} target "
                "words; links are (source word, target word), counted from 0"
            )
    return links


def shorten_words(words: Sequence[str]) -> list[str]:
    """Return each word on one line, truncated."""
    lines = [" ".join(word.split()) for word in words]
    return [line if len(line) <= 32 else f"{line[:31]}…" for line in lines]


def _get_scale_max(weights: NDArray[np.float64]) -> float:
    """Return the end of the scale: 1, so that maps compare, unless all weights are small."""
    max_weight = float(weights.max())
    return 1.0 if max_weight > 0.5 else max(max_weight, 1e-6)


def _to_array(weights: Tensor | NDArray[np.floating], num_rows: int, num_columns: int) -> NDArray[np.float64]:
    array = weights.detach().double().cpu().numpy() if isinstance(weights, Tensor) else np.asarray(weights, float)
    if array.shape != (num_rows, num_columns) or not array.size:
        raise InputError(
            f"weights of shape {array.shape} came with {num_rows} rows and {num_columns} columns; expected "
            "one map (rows, columns), with a word for each, and at least one of both"
        )
    if not np.isfinite(array).all():
        raise InputError("the weights contain NaN or infinity, which a map cannot show")
    return array
