"""Figures for papers and screens: attention maps, scores by length, training curves.

They write an image file and change no setting of matplotlib.
"""

from __future__ import annotations

import itertools
import textwrap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from jumok.errors import InputError, MissingExtra
from jumok.files import atomic_write
from jumok.look.figures import fonts
from jumok.look.viewer.token_marks import LabelledSpan, is_special_token
from jumok.metrics.translation import LengthBin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

# From nearly white to dark blue in equal steps of lightness, so that shades are proportional, also in grey.
SHADES = ("#f4fafe", "#bee1fa", "#8cc6f5", "#61a9ea", "#3f8bd9", "#2b6dc0", "#22519e", "#1c3878", "#15224f")
# Okabe and Ito: distinguishable with any colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, GREY, GOLD = "#22262e", "#7a818c", "#e8590c"
GENERATED_BOX = {"boxstyle": "round,pad=0.12", "facecolor": "#bfe8d5", "edgecolor": "none"}  # behind generated words
SPAN_COLOURS = ("#0b61b8", GREY)  # of turns, alternating
DOTS_PER_INCH = 160
MAX_LINEAR_KEYS, MAX_ROOT_KEYS = 64, 192  # numbers of keys with these scales, as in static/appearance.js
IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
DrawFunction = Callable[["Figure"], None]


class Drawing(ABC):
    """The checked content of a figure."""

    texts: Sequence[str]  # all that is written in the figure, to choose its fonts

    @abstractmethod
    def draw(self, figure: Figure) -> None:
        """Draw the content."""

    def build(self) -> Figure:
        """Return a figure that the caller saves."""
        with _open_figure(self.texts) as figure:
            self.draw(figure)
        return figure

    def save(self, path: str | Path) -> Path:
        """Save the figure as a PNG, SVG or PDF file. Returns the path."""
        return save_figure(self.draw, path, self.texts)


def draw_heat_map(
    weights: Tensor | NDArray[np.floating],
    rows: Sequence[str],
    columns: Sequence[str],
    path: str | Path,
    *,
    title: str = "",
    subtitle: Sequence[str] = (),
    gold_links: Iterable[tuple[int, int]] = (),
    first_generated: tuple[int | None, int | None] = (None, None),
    spans: tuple[Sequence[LabelledSpan], Sequence[LabelledSpan]] = ((), ()),
    hidden_columns: Sequence[int] = (),
) -> Path:
    """Draw one map ``(Q, K)``: queries (target words), ``rows``, down the left, keys (source words) along the top.

    The darker a cell, the higher the weight; the scale is that of the viewer (see :func:`choose_scale`).
    ``gold_links`` (source word, target word) are outlined. Words from the row and the column of
    ``first_generated`` on are marked as generated, special tokens are small, ``spans`` of the rows and of the
    columns, such as the turns of a chat, are bars at the right and at the bottom. ``hidden_columns`` are those
    whose weights were left out. Returns the path.

    >>> draw_heat_map(torch.eye(2), ["이것은", "예문이다"], ["this", "example"], "map.png")  # doctest: +SKIP
    """
    array = _to_array(weights, len(rows), len(columns))
    links = _check_links(gold_links, len(rows), len(columns))
    is_special = [[is_special_token(word) for word in words] for words in (rows, columns)]
    rows, columns = shorten_words(rows), shorten_words(columns)
    max_length = max(array.shape)
    cell = min(0.46, max(0.19, 10 / max_length), 40 / max_length)  # inches: readable, but limited in total
    font_size = min(13.0, 72 * 0.62 * cell)  # points
    width = max(52, int(9 * cell * len(columns)))  # characters
    headings = textwrap.wrap(title, width), textwrap.wrap(" · ".join(subtitle), int(1.5 * width))

    def draw(figure: Figure) -> None:
        from matplotlib.patches import Rectangle

        width, height = cell * array.shape[1], cell * array.shape[0]
        figure.set_size_inches(width, height)  # labels are added when it is saved
        axes = figure.add_axes((0, 0, 1, 1))
        norm, scale_name = choose_scale(array)
        mesh = axes.pcolormesh(array, cmap=create_colormap(SHADES), norm=norm, edgecolors="white", linewidth=cell * 2)
        label_cells(figure, axes, rows, columns, cell, font_size, pad=3)
        labels = axes.get_yticklabels(), axes.get_xticklabels()
        generated = [
            label
            for texts, first in zip(labels, first_generated, strict=True)
            for label in ([] if first is None else texts[first:])
        ]
        for label in generated:
            label.set_bbox(GENERATED_BOX)
        for texts, flags in zip(labels, is_special, strict=True):
            for label in itertools.compress(texts, flags):
                label.set(size=0.76 * font_size, style="italic", color=GREY)
        for column in hidden_columns:
            axes.axvspan(column, column + 1, facecolor="none", edgecolor="#c9ced6", hatch="////", linewidth=0)
        axes.set_ylabel("← queries", size=8, color=GREY)
        axes.set_xlabel("attend to keys →", size=8, color=GREY)
        for source, target in links:
            outline = Rectangle((source + 0.09, target + 0.09), 0.82, 0.82, fill=False, edgecolor=GOLD)
            outline.set_linewidth(max(0.9, 3.6 * cell))
            axes.add_patch(outline)
        _draw_heading(figure, axes, [(headings[1], 9.0, GREY), (headings[0], font_size + 1.5, INK)])
        if links:
            annotate(axes, "□ gold link", (0, len(rows)), (2, -5), va="top", size=8, color=GOLD)
        span_width = _draw_spans(figure, axes, spans, array.shape)
        if generated:
            style = {"ha": "right", "va": "top", "size": 8, "color": INK, "bbox": GENERATED_BOX}
            annotate(axes, "generated", (len(columns), len(rows)), (0, -7 - 72 * span_width), **style)
        bar_height = min(height, 2.0)
        bar_axes = add_panel(figure, width + 0.22 + span_width, 0, 0.09, bar_height)
        draw_colour_bar(bar_axes, mesh, 4 if bar_height > 1 else 1)
        if bar_height > 1:
            name = "weight of the rest" if len(hidden_columns) else "attention weight"
            bar_axes.set_ylabel(f"{name} ({scale_name})", size=8, color=GREY, labelpad=5)

    names = [span.name for axis in spans for span in axis]
    return save_figure(draw, path, [*rows, *columns, title, *subtitle, *names])


def choose_scale(array: NDArray[np.float64]) -> tuple[Normalize, str]:
    """Return the scale of the colours of a map and its name, by the rule of the viewer.

    It begins at 0 and ends at 1, so that maps compare, unless all weights are small. With many keys, square
    roots make small weights visible, with very many logarithms.
    """
    from matplotlib.colors import LogNorm, Normalize, PowerNorm

    num_keys, max_weight = array.shape[1], max(float(array.max()), 1e-6)
    scale_max = 1.0 if max_weight > 0.5 else max_weight
    end = "" if scale_max == 1 else ", of this map"
    if num_keys <= MAX_LINEAR_KEYS:
        return Normalize(0, scale_max), f"linear{end}"
    if num_keys <= MAX_ROOT_KEYS:
        return PowerNorm(0.5, 0, scale_max), f"square root{end}"
    return LogNorm(min(0.2 / num_keys, max_weight / 100), max_weight, clip=True), "logarithmic, of this map"


def _draw_heading(figure: Figure, axes: Axes, parts: Iterable[tuple[Sequence[str], float, str]]) -> None:
    """Write lines above the words of a map, from below: of each part the lines, their size and colour."""
    for lines, size, colour in parts:
        figure.draw_without_rendering()
        box = axes.get_tightbbox()  # of all that is there
        if lines and box is not None:
            top = float(axes.transAxes.inverted().transform((0, box.y1))[1])
            style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
            axes.annotate("\n".join(lines), (0, top), (0, 7), annotation_clip=False, size=size, color=colour, **style)


def _draw_spans(
    figure: Figure, axes: Axes, spans: tuple[Sequence[LabelledSpan], Sequence[LabelledSpan]], shape: tuple[int, ...]
) -> float:
    """Draw the spans of the rows as bars at the right, those of the columns at the bottom. Returns their width."""
    from matplotlib.transforms import offset_copy

    right, bottom = shape[1], shape[0]
    for n, span in enumerate(spans[0]):
        colour = SPAN_COLOURS[n % len(SPAN_COLOURS)]
        transform = offset_copy(axes.transData, figure, 5, 0, units="points")
        axes.plot([right, right], [span.start + 0.1, span.stop - 0.1], transform=transform, **_style_bar(colour))
        style = {"size": 8, "color": colour, "va": "center", "ha": "center", "rotation": -90}
        annotate(axes, span.name, (right, (span.start + span.stop) / 2), (13, 0), **style)
    for n, span in enumerate(spans[1]):
        colour = SPAN_COLOURS[n % len(SPAN_COLOURS)]
        transform = offset_copy(axes.transData, figure, 0, -5, units="points")
        axes.plot([span.start + 0.1, span.stop - 0.1], [bottom, bottom], transform=transform, **_style_bar(colour))
        style = {"size": 8, "color": colour, "va": "center", "ha": "center"}
        annotate(axes, span.name, ((span.start + span.stop) / 2, bottom), (0, -13), **style)
    return 0.26 if any(spans) else 0.0


def _style_bar(colour: str) -> dict[str, Any]:
    return {
        "color": colour,
        "linewidth": 3,
        "clip_on": False,
        "solid_capstyle": "butt",
        "scalex": False,
        "scaley": False,
    }


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
        _style_curves(axes, "words in the source sentence", metric, title)
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
            colour = COLOURS[n % len(COLOURS)]
            axes.plot(x, y, color=colour, marker="o", markersize=4, linewidth=2, zorder=3, clip_on=False)
            ends.append((y[-1], name, colour))
        last_step = max(x for points in curves.values() for x, _ in points)
        max_value = max(y for points in curves.values() for _, y in points)
        axes.set(xlim=(0, last_step), ylim=(0, 1.08 * max_value or 1.0))
        _label_curves(axes, ends)
        _style_curves(axes, "step", "", title)

    return save_figure(draw, path, [*curves, title])


def _style_curves(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    """Style axes so that the curves stand out."""
    style_axes(axes, grid="y", label_size=10.5)
    axes.spines["bottom"].set(visible=True, color=GREY)
    axes.set_xlabel(x_label, size=11, color=INK, labelpad=8)
    axes.set_ylabel(y_label, size=11, color=INK, labelpad=8)
    axes.set_title(title, size=12.5, color=INK, loc="left", pad=16)


def style_axes(axes: Axes, *, grid: Literal["x", "y", "both"], label_size: float) -> None:
    """Replace the frame and the tick marks of axes by light grid lines."""
    axes.spines[:].set_visible(False)
    axes.grid(axis=grid, color="#e6e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=label_size, labelcolor=INK)


def create_colormap(colours: Sequence[str]) -> LinearSegmentedColormap:
    """Return a colormap that passes through these colours."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("jumok", colours)


def add_panel(figure: Figure, left: float, top: float, width: float, height: float, **options: Any) -> Axes:
    """Add axes to a figure. All in inches; ``top`` is counted from the upper edge."""
    figure_width, figure_height = figure.get_size_inches()
    box = (left / figure_width, 1 - (top + height) / figure_height, width / figure_width, height / figure_height)
    return figure.add_axes(box, **options)


def annotate(axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Write a text at an offset in points from a point of the axes, also outside of them."""
    axes.annotate(text, point, offset, textcoords="offset points", annotation_clip=False, **style)


def draw_colour_bar(axes: Axes, cells: ScalarMappable, ticks: int | Sequence[float]) -> None:
    """Draw a thin colour bar; ``ticks`` are their maximum number or their values."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    bar = axes.figure.colorbar(
        cells, cax=axes, ticks=MaxNLocator(ticks) if isinstance(ticks, int) else FixedLocator(ticks)
    )
    bar.outline.set_visible(False)
    axes.tick_params(length=0, labelsize=8, labelcolor=GREY, pad=3)


def label_cells(
    figure: Figure,
    axes: Axes,
    rows: Sequence[str],
    columns: Sequence[str],
    cell_inches: float,
    font_size: float,
    *,
    pad: float,
) -> None:
    """Label the rows of a map at the left and its columns at the top, rotated if one is wider than its column."""
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0, pad=pad, labelsize=font_size, labelcolor=INK)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    figure.draw_without_rendering()
    labels = axes.get_xticklabels()
    if any(label.get_window_extent().width >= 0.92 * cell_inches * figure.dpi for label in labels):
        for label in labels:
            label.set(rotation=52, rotation_mode="anchor", ha="left", va="center")


def save_figure(draw: DrawFunction, path: str | Path, texts: Sequence[str]) -> Path:
    """Draw with fonts that have all characters of the texts, and save the figure."""
    path = Path(path)
    with _open_figure(texts) as figure:
        draw(figure)
        with atomic_write(path) as temporary:
            figure.savefig(
                temporary, dpi=DOTS_PER_INCH, bbox_inches="tight", pad_inches=0.18, format=_get_image_format(path)
            )
    return path


@contextmanager
def _open_figure(texts: Sequence[str]) -> Iterator[Figure]:
    """Create a figure with matplotlib's default settings, and with fonts for all the characters."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtra('figures need matplotlib, which is not installed: pip install "jumok[look]"') from error
    # Start from matplotlib's defaults, so that no style interferes; a dollar sign in a word is not a formula.
    settings = {"font.family": fonts.find_font_families(texts), "text.parse_math": False}
    with style.context(["default", settings]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing", UserWarning)  # reported already
        yield Figure(facecolor="white")


def check_image_path(path: Path) -> None:
    """Raise an error for a path without an image suffix."""
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        raise InputError(f"{path}: the name of an image ends in {', '.join(IMAGE_SUFFIXES)}")


def _get_image_format(path: Path) -> str:
    return path.suffix.lower().removeprefix(".") if path.suffix.lower() in IMAGE_SUFFIXES else "png"


def _draw_counts(axes: Axes, bins: Sequence[LengthBin]) -> None:
    """Draw the numbers of sentences in a light colour in the lower third."""
    counts = [b.count for b in bins]
    axes.bar(range(len(bins)), counts, width=0.82, color="#eef0f4", zorder=0)
    axes.set_ylim(0, 3 * max(counts))
    for n, count in enumerate(counts):
        annotate(axes, f"{count:,}" if n else f"{count:,} sentences", (n, 0), (0, 3), ha="center", size=8, color=GREY)
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
        annotate(axes, name, (right, y), (4, 0), va="center", size=11, color=colour)


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
        raise InputError("no curves given; expected {name of a system: its bins}")
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


def to_single_line(text: str) -> str:
    """Return the text on one line, without control characters."""
    return replace_unprintable(" ".join(text.split())) or "∅" * bool(text)


def replace_unprintable(text: str) -> str:
    """Replace blanks by spaces and control characters by a visible mark."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def _to_array(weights: Tensor | NDArray[np.floating], num_rows: int, num_columns: int) -> NDArray[np.float64]:
    array = weights.detach().double().cpu().numpy() if isinstance(weights, Tensor) else np.asarray(weights, float)
    if array.shape != (num_rows, num_columns) or not array.size:
        raise InputError(
            f"weights of shape {array.shape} given with {num_rows} rows and {num_columns} columns; expected "
            "one map (rows, columns), with a word for each, and at least one of both"
        )
    if not np.isfinite(array).all():
        raise InputError("the weights contain NaN or infinity, which a map cannot show")
    return array
