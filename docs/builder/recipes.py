"""The page of recipes: their descriptions, and the results of their runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from builder import ROOT, table, write_if_changed
from jumok import recipe

RUNS = ROOT / "bench" / "results" / "runs"
# Metrics of `jumok eval`, also of runs that were evaluated with earlier names: key, name, digits.
FIGURES = (
    ("bleu_moses", "BLEU", 1), ("bleu", "BLEU", 1), ("chrf", "chrF", 1), ("perplexity", "perplexity", 2),
    ("alignment.error_rate", "alignment error rate", 3), ("mean_absolute_error", "mean error", 2),
    ("accuracy", "accuracy", 3), ("macro_f1", "macro F1", 3), ("exact_match", "exact match", 3),
    ("exact", "exact match", 3), ("f1", "F1", 3), ("mlm_accuracy", "masked words", 3),
    ("masked_accuracy", "masked words", 3), ("nsp_accuracy", "next sentences", 3),
    ("next_accuracy", "next sentences", 3),
    ("spearman", "Spearman", 3), ("calibration_error", "calibration error", 3),
    ("bleu1_without_brevity", "BLEU-1 without brevity penalty", 1),
    ("bleu4_without_brevity", "BLEU-4 without brevity penalty", 1), ("cider_d", "CIDEr-D", 2),
    ("judges/text", "text recognised", 3), ("judges/speaker", "speaker recognised", 3),
    ("judges/emotion", "emotion recognised", 3), ("mcd", "distortion (dB)", 2),
)  # fmt: skip


def build(into: Path) -> None:
    """Write the generated part of the page of recipes."""
    runs = sorted(path for path in RUNS.iterdir() if path.is_dir())
    lines = [
        "## Results",
        "",
        table(["run", "steps", "training", "on its test data"], [_build_row(one) for one in runs]),
        "",
        "A run with `-random` was initialized randomly; one with `-seed2` has another seed. Training is the "
        "time in `metrics.jsonl`, including validations, mostly on a GPU that also trained other models.",
        "",
    ]
    last = ""
    for name, path in recipe.list_builtin().items():
        model = name.split("/")[0]
        if model != last:
            lines += [f"## {model}", ""]
            last = model
        lines += [f"### {name}", "", *_format_description(path), ""]
    write_if_changed(into / "recipes-generated.txt", "\n".join(lines))


def _format_description(path: Path) -> list[str]:
    """The comment at the start of a recipe, with its commands as code."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line[1:].removeprefix(" "))
    blocks: list[list[str]] = [[]]
    for line in comment:
        if not line.strip():
            blocks.append([])
        elif blocks[-1] and line.startswith("  ") != blocks[-1][-1].startswith("  "):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    lines = []
    for block in filter(None, blocks):
        if block[0].startswith("  "):
            lines += ["```", *(line[2:] for line in block), "```", ""]
        else:
            lines += [" ".join(block), ""]
    return lines


def _build_row(run: Path) -> list[str]:
    tested = run / "test.json"
    figures = json.loads(tested.read_text(encoding="utf-8")) if tested.exists() else {}
    with gzip.open(run / "metrics.jsonl.gz", "rt", encoding="utf-8") as file:
        last = [json.loads(line) for line in file][-1]
    return [
        f"`{run.name}`",
        f"{last['step']:,}",
        _format_duration(last["seconds"]).replace(" ", "\u00a0"),
        _format_metrics(figures) or "–",
    ]


def _format_metrics(figures: dict[str, Any]) -> str:
    told: dict[str, str] = {}
    for key, name, digits in FIGURES:
        value: Any = figures
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        value = value.get("value") if isinstance(value, dict) else value
        if isinstance(value, int | float):
            told.setdefault(name, f"{name} {value:.{digits}f}")
    return ", ".join(told.values())


def _format_duration(seconds: float) -> str:
    """A duration in minutes and seconds.

    >>> _format_duration(144), _format_duration(3)
    ('2 min 24 s', '3 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
