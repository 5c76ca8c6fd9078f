"""What the lessons share: the style and folder of figures, and small models that are trained once.

In a notebook, figures and tables are the output of their cell. In a script, tables are printed, and figures
are written to runs/lessons/figures/.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

import jumok
from jumok.look.figures import fonts
from jumok.look.figures.plots import COLOURS, DOTS_PER_INCH, GREY, INK, SHADES
from jumok.look.viewer import html_file
from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["BLUES", "COLOURS", "GREY", "INK", "at", "figure", "heat", "marked", "show", "table", "trained", "viewer"]

RUNS = Path(__file__).resolve().parents[2] / "runs" / "lessons"
BLUES = LinearSegmentedColormap.from_list("jumok", SHADES)  # the viewer's: more weight is darker, in grey too
SIGNED = LinearSegmentedColormap.from_list("signed", ("#8f3f00", "#e8924a", "#ffffff", "#61a9ea", "#1c3878"))
STYLE = {
    "font.family": fonts.find_font_families(["가나다 abc √·ᵀ−→"]),
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=COLOURS),
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 2,
}
mpl.rcParams.update(STYLE)


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, Any]:
    """A figure of so many inches (7 fill a page), and its axes, as ``plt.subplots`` gives them."""
    fig = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return fig, fig.subplots(rows, columns, **more)


def show(fig: Figure | Path, name: str = "") -> None:
    """Show a figure, or the file of a picture, in a notebook. In a script, write it to ``at(name)``."""
    if _in_notebook():
        from IPython.display import Image, display

        if isinstance(fig, Path):
            data = fig.read_bytes()
            width = int.from_bytes(data[16:20], "big")  # of a PNG, in pixels
            display(Image(data, width=min(760, width * 100 // DOTS_PER_INCH)))
            return
        buffer = io.BytesIO()
        fig.savefig(buffer, dpi=200, format="png", bbox_inches="tight")
        display(Image(buffer.getvalue(), width=round(100 * fig.get_figwidth())))
        return
    path = fig if isinstance(fig, Path) else at(name)
    if isinstance(fig, Figure):
        fig.savefig(path, dpi=100, bbox_inches="tight")
    print("figure:", path.relative_to(RUNS.parents[1]))


def viewer(data: ViewerData | Sequence[ViewerData], name: str, *, heads: html_file.HeadSelection | None = None) -> None:
    """Show the viewer in a frame in a notebook. In a script, write it as an HTML file.

    The frame has a saved page instead of the widget, so that it works in the built site, without Python.
    """
    if _in_notebook():
        from IPython.display import display

        page = escape(html_file.render_html(data, heads=heads))
        size = "width: 100%; height: 620px"  # for a notebook, which has no style sheet of ours
        frame = f'<iframe class="viewer" style="{size}" title="the viewer" srcdoc="{page}"></iframe>'
        display({"text/html": frame}, raw=True)
        return
    path = html_file.save_html(data, at(name).with_suffix(".html"), heads=heads)
    print("viewer:", path.relative_to(RUNS.parents[1]))


def at(name: str) -> Path:
    """The path of the picture NAME of this lesson."""
    folder = RUNS / "figures" / ("notebook" if _in_notebook() else Path(sys.argv[0]).stem)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.png"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Show a table. Format its numbers as text."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    if _in_notebook():
        from IPython.display import Markdown, display

        lines.insert(1, ["---"] * len(header))
        display(Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines)))
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def heat(
    axes: Axes,
    weights: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    top: float = 1.0,
    signed: bool = False,
    numbers: bool = False,
    lean: bool = False,
    title: str = "",
) -> Any:
    """A map (rows, columns) in the viewer's colours: white is 0, the darkest is ``top``.

    ``signed``: negative numbers are orange. ``lean``: the labels along the top are rotated.
    """
    array = np.asarray(weights, float)
    colours, low = (SIGNED, -top) if signed else (BLUES, 0)
    cells = axes.pcolormesh(array, cmap=colours, vmin=low, vmax=top, edgecolors="white", linewidth=1)
    axes.set(xlim=(0, array.shape[1]), ylim=(array.shape[0], 0), aspect="equal")
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=3)
    axes.spines[:].set_visible(False)
    label_style: dict[str, Any] = {"rotation": 50, "ha": "left", "rotation_mode": "anchor"} if lean else {}
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, **label_style)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    if title:
        axes.set_title(title)
    if numbers:
        for (row, column), value in np.ndenumerate(array):
            colour = "white" if abs(value) > 0.55 * top else INK
            label = f"{value:.2f}".replace("-", "−")
            axes.text(column + 0.5, row + 0.5, label, ha="center", va="center", size=9, color=colour)
    return cells


def marked(axes: Axes, words: Sequence[str], weights: Sequence[float] | None = None, size: float = 12) -> None:
    """Words as running text. The more weight a word has, the darker is its background."""
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    fig = axes.figure
    fig.draw_without_rendering()
    frame = axes.get_window_extent()
    max_weight = 1.0 if weights is None else max(weights) or 1.0
    x, y, line = 0.0, 1.0, 2.05 * size / 72 * fig.dpi / frame.height
    for number, word in enumerate(words):
        weight = 0.0 if weights is None else weights[number] / max_weight
        background = {"boxstyle": "round,pad=0.18", "facecolor": BLUES(0.5 * weight), "edgecolor": "none"}
        label = axes.text(x, y, word, size=size, va="top", bbox=background if weight > 0.04 else None)
        width = label.get_window_extent().width / frame.width
        if x + width > 1:
            x, y = 0.0, y - line
            label.set_position((x, y))
        x += width + 0.55 * size / 72 * fig.dpi / frame.width


def trained(**runs: Sequence[str]) -> list[Any]:
    """Load the runs NAME=[recipe, setting, …], after training those that do not exist yet.

    Two are trained at a time, each on one core. Paths in settings are relative to the repository.
    """
    new = [(name, list(settings)) for name, settings in runs.items() if not _is_trained(name, settings)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_train, new))
    return [jumok.load(RUNS / name, "cpu") for name in runs]


def _train(run: tuple[str, list[str]]) -> None:
    name, settings = run
    shutil.rmtree(RUNS / name, ignore_errors=True)
    print("jumok train", *settings, "--out", f"runs/lessons/{name}", flush=True)
    command = [sys.executable, "-m", "jumok", "train", *settings, "train.device=cpu", "--out", str(RUNS / name)]
    one_core = os.environ | {"OMP_NUM_THREADS": "1"}
    piped: Any = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = subprocess.run(command, env=one_core, cwd=RUNS.parents[1], **piped)
    if result.returncode:
        raise RuntimeError(f"training {name} failed:\n{result.stdout}")
    _settings_path(name).write_text("\n".join(settings), encoding="utf-8")


def _settings_path(name: str) -> Path:
    return RUNS / name / "lesson.txt"  # the settings of a run, written when its training is complete


def _is_trained(name: str, settings: Sequence[str]) -> bool:
    with suppress(FileNotFoundError):
        return _settings_path(name).read_text(encoding="utf-8") == "\n".join(settings)
    return False


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules
