"""Evaluation of a run: the same for all tasks.

::

    predictor.load_split("test")  ►  predictor.score_split  ►  eval/test.json, figures/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jumok.errors import InputError
from jumok.files import write_json, write_text
from jumok.tasks.base import DatasetSplit, Evaluation, Predictor, format_skipped, print_lines
from jumok.tasks.options import PredictOptions

O = TypeVar("O", bound=PredictOptions)  # noqa: E741


def evaluate(predictor: Predictor[Any, O], split_name: str, options: O, console: Console) -> Evaluation:
    """Score a run on its test or validation data, print the result, and write it to the folder of the run."""
    split = load_split(predictor, split_name)
    with console.status(f"scoring {split.description}"):
        result = predictor.score_split(split, options, detailed=True)
    folder = predictor.run.folder
    if result.outputs:
        lines = "".join(f"{line}\n" for line in result.outputs)
        write_text(folder / "eval" / f"{split_name}{result.outputs_suffix}", lines)
    content = {
        "split": split_name,
        "num_examples": split.num_examples,
        "num_skipped": split.skipped.total,
        "options": asdict(options),
        **result.metrics,
    }
    write_json(folder / "eval" / f"{split_name}.json", content)
    _print_metrics(result, f"{split_name}, {split.description}", console)
    print_lines(console, format_skipped(split_name, split.skipped))
    for report in result.reports:
        report(folder, split_name, console)
    for suffix, draw in result.figures.items():
        name = f"{split_name}-{suffix}" if suffix else split_name
        try:
            message = f"figure: {draw(folder / 'figures' / f'{name}.png')}"
        except InputError as error:  # for example, an image file that was deleted after it was cached
            message = f"no figure: {error}"
        print_lines(console, [message])
    if result.print_samples:
        print_lines(console, result.samples)
    return result


def load_split(predictor: Predictor[Any, Any], split_name: str) -> DatasetSplit[Any]:
    """Load the split that ``--split`` names."""
    if split_name not in ("valid", "test"):
        raise InputError(f"--split {split_name}: it is test or valid")
    return predictor.load_split("valid" if split_name == "valid" else "test")


def _print_metrics(result: Evaluation, title: str, console: Console) -> None:
    table = Table("metric", "value", *([""] if result.rows else []), title=title)
    for row in result.rows:
        table.add_row(*row)
    metrics = {} if result.rows else result.metrics
    for name, value in metrics.items():
        if isinstance(value, float):
            table.add_row(name, f"{value:.4f}")
        elif isinstance(value, str):
            table.add_row(name, Text(value))
    console.print(table)
    for name, rows in metrics.items():
        if isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
            inner = Table(*rows[0], title=name)
            for row in rows:
                inner.add_row(*(f"{x:.4f}" if isinstance(x, float) else Text(str(x)) for x in row.values()))
            console.print(inner)
    print_lines(console, result.notes, style="dim")
