"""The page of benchmarks: every file of bench/results as a figure and a table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from builder import ROOT, table, write_if_changed

RESULTS = ROOT / "bench" / "results"
# What is measured, by the key of an implementation: (unit, whether more is better). The first that a row has is shown.
MEASURES = {
    "sentences_s": ("sentences a second", True),
    "documents_s": ("documents a second", True),
    "requests_s": ("requests a second", True),
    "tokens_s": ("tokens a second", True),
    "frames_s": ("frames a second", True),
    "ms": ("milliseconds", False),
    "error_rate": ("alignment error rate", False),
    "accuracy": ("accuracy", True),
}
# By the beginning of the file's name: the heading, and what it is about.
ABOUT = {
    "attention-additive": (
        "Additive attention, many queries",
        "Scores of Bahdanau's kind for all queries: a Triton kernel, plain PyTorch and `torch.compile`.",
    ),
    "attention-dot": (
        "Dot product with structured masks",
        "Masks that stay structured take a fast path; SDPA's kernels get the same mask as a tensor.",
    ),
    "attention-step": (
        "Additive attention, step by step",
        "Fifty steps of an RNN decoder over prepared keys, with padding, forward and backward.",
    ),
    "training-bahdanau": ("Training Bahdanau's model", "Beside the usual Python loop over the steps."),
    "training-transformer": (
        "Training the Transformer",
        "Beside Marian of transformers, with equal weights at the start.",
    ),
    "bert-pretraining": (
        "Pretraining BERT",
        "Beside `BertForPreTraining` of transformers, counting real tokens only.",
    ),
    "bert-inference": ("Reading with MiniLM on two CPU cores", "Beside `BertModel`, on batches of 32 texts."),
    "classify-inference": (
        "Reading documents on two CPU cores",
        "The hierarchical network beside a padded one.",
    ),
    "classify-baselines": (
        "Baselines of classification",
        "TF-IDF with logistic regression, tuned on held-out training data.",
    ),
    "decoding": ("Decoding", "Beside `generate` of transformers on the exported model."),
    "look": (
        "Looking",
        "Maps of 1,024 × 1,024 cells of twelve heads at 131,072 tokens, beside the forward pass alone.",
    ),
    "align": (
        "Word alignment",
        "Links of the two directions and their ways to be one, beside eflomal; lower is better.",
    ),
    "speech": ("Speech", "Learning and speaking, beside the usual loop over the frames."),
    "serving": ("Serving", "Requests of many clients, and the same translator without a server."),
}
SHARES = ("error_rate", "accuracy")  # these mean the same in all panels, which then have one scale
PEERS = ("eflomal",)  # cases that are another's as a whole
OWN = (  # what our implementations are called, up to a comma
    *(
        "ours",
        "graphed",
        "chosen",
        "tile",
        "maps",
        "forward",
        "with sums",
        "sums unknown",
    ),
    *(
        "attention",
        "forward",
        "backward",
        "product",
        "intersection",
        "union",
        "grow-diag",
        "grow-diag-final-and",
    ),
    *("server", "torch", "ctranslate2 by jumok"),
)
MOST_PANELS = 12
OURS, THEIRS = "#0072b2", "#b5bcc6"


def build(into: Path) -> None:
    """Write the page and its figures."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        lines += _build_section(path, into)
    write_if_changed(into / "benchmarks-generated.txt", "\n".join(lines))


def _build_section(path: Path, into: Path) -> list[str]:
    told = json.loads(path.read_text(encoding="utf-8"))
    heading, about = next((text for name, text in ABOUT.items() if path.stem.startswith(name)), (path.stem, ""))
    machine = told["machine"]
    where = machine.get("gpu") or f"{machine['cores']} cores of an {machine['cpu']}"
    write_if_changed(into / "files" / "bench" / "results" / path.name, path.read_bytes())
    rows = [one for one in told["rows"] if _find_measure(one) is not None]
    if path.stem.startswith("align"):
        rows = [one for one in rows if one["section"] != "views"]
    name = f"figures/{path.stem}.svg"
    write_if_changed(into / name, draw_panels(rows[:MOST_PANELS]))
    more = f" The first {MOST_PANELS} of {len(rows)} are drawn." if len(rows) > MOST_PANELS else ""
    return [
        f"## {heading}",
        "",
        f"{about}{more} {where}, torch {machine['torch']}, commit {told['commit']}, {told['date'][:10]}: "
        f"[{path.name}](files/bench/results/{path.name})",
        "",
        f"![{heading}: bars of each implementation]({name}){{.wide}}",
        "",
        "<details><summary>The figures as a table</summary>",
        "",
        _build_table(rows),
        "",
        "</details>",
        "",
    ]


def _find_measure(row: dict[str, Any]) -> str | None:
    """The first measure that an implementation of this row has."""
    results = row["implementations"].values()
    return next((key for key in MEASURES if any(key in result for result in results)), None)


def _format_label(row: dict[str, Any]) -> str:
    return ", ".join(str(row[key]) for key in ("case", "pass") if row.get(key))


def _build_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        key = _find_measure(row)
        for result, found in row["implementations"].items():
            if key in found:
                lines.append([_format_label(row), result, f"{found[key]:,.4g}", MEASURES[str(key)][0]])
    return table(["what", "implementation", "", ""], lines)


def draw_panels(rows: list[dict[str, Any]]) -> bytes:
    """A panel for each row, a bar for each implementation: SVG, the same for the same rows."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = 2 if len(rows) > 1 else 1
    lines = -(-len(rows) // columns)
    most = max(len(_list_bars(row)) for row in rows)
    style = {"font.size": 9, "svg.hashsalt": "jumok", "svg.fonttype": "path", "axes.titlesize": 9}
    with mpl.rc_context(style):
        figure = Figure(figsize=(5.0 * columns, (0.24 * most + 0.75) * lines), layout="constrained")
        for place, row in enumerate(rows):
            axes = figure.add_subplot(lines, columns, place + 1)
            bars = _list_bars(row)
            key = str(_find_measure(row))
            others = row.get("case") in PEERS
            colours = [OURS if _is_ours(name) and not others else THEIRS for name, _ in bars]
            axes.barh(range(len(bars)), [value for _, value in bars], color=colours, height=0.72)
            axes.set_yticks(range(len(bars)), [name for name, _ in bars])
            axes.invert_yaxis()
            top = max(value for one in (rows if key in SHARES else [row]) for _, value in _list_bars(one))
            for y, (_, value) in enumerate(bars):
                axes.text(value + top * 0.015, y, _format_number(value), va="center", fontsize=8)
            axes.set_xlim(0, top * 1.2)
            axes.set_xticks([])
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.tick_params(length=0)
            unit, more = MEASURES[key]
            axes.set_title(f"{_format_label(row)}\n{unit}{'' if more else ' (less is better)'}", loc="left")
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _list_bars(row: dict[str, Any]) -> list[tuple[str, float]]:
    key = str(_find_measure(row))
    return [(name, result[key]) for name, result in row["implementations"].items() if key in result]


def _is_ours(result: str) -> bool:
    """Whether an implementation is ours, and not another's."""
    return result.split(",")[0].split(" + ")[0] in OWN


def _format_number(value: float) -> str:
    """Three digits.

    >>> _format_number(839830.0), _format_number(0.13574), _format_number(54.067)
    ('840,000', '0.136', '54.1')
    """
    if value >= 1000:
        digits = len(str(int(value))) - 3
        return f"{round(value, -digits):,.0f}"
    return f"{value:.3g}"
