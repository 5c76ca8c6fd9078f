"""The effect of each style token on a voice, as a figure: pitch, energy and duration, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jumok.errors import InputError
from jumok.look.figures.plots import COLOURS, GREY, INK, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {"pitch": "pitch, Hz", "energy": "energy, dB", "seconds": "duration, s"}


def draw_style_effects(rows: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "") -> Path:
    """Draw rows with ``token``, and ``pitch``, ``energy``, ``seconds``, each with ``… ±``.

    A dot is the mean over texts, with its 95 % confidence interval; a grey line is the mean of all tokens.
    """
    if not rows:
        raise InputError("no style tokens given; expected a row for each")

    def draw(figure: Figure) -> None:
        figure.set_size_inches(8.4, 0.32 * len(rows) + 1.2)
        names = [f"token {row['token']}" for row in rows]
        positions = np.arange(len(rows))[::-1]
        for i, (name, label) in enumerate(PANELS.items()):
            axes = figure.add_subplot(1, len(PANELS), i + 1)
            values = np.array([row[name] for row in rows], float)
            widths = np.nan_to_num(np.array([row[f"{name} ±"] for row in rows], float))
            is_finite = np.isfinite(values)
            if is_finite.any():
                axes.axvline(float(values[is_finite].mean()), color=GREY, linewidth=0.8, zorder=1)
            axes.errorbar(values[is_finite], positions[is_finite], xerr=widths[is_finite], fmt="o", color=COLOURS[i],
                          markersize=5, linewidth=1.6, zorder=2)  # fmt: skip
            axes.set_yticks(positions, names if i == 0 else [""] * len(rows))
            axes.set_ylim(-0.7, len(rows) - 0.3)
            axes.set_xlabel(label, color=INK)
            style_axes(axes, grid="x", label_size=10)
            axes.spines["bottom"].set(visible=True, color=GREY)
        if title:
            figure.suptitle(title, color=INK)
        figure.tight_layout()

    return save_figure(draw, path, [title])
