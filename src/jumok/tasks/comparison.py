"""Comparison of runs on the same examples, with bootstrap intervals and p-values: the same for all tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jumok.errors import InputError
from jumok.files import write_json
from jumok.metrics.bootstrap import BootstrapResult, bootstrap_models
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.base import Evaluation, print_lines
from jumok.tasks.evaluation import load_split
from jumok.tasks.options import PredictOptions


def compare(
    runs: Sequence[Run], split_name: str, options: PredictOptions, output_folder: Path, device: str, console: Console
) -> list[BootstrapResult]:
    """Score several runs on the same examples: the main metric with confidence intervals and p-values.

    The p-values are for the difference to the first run.
    """
    names = [str(run.folder) for run in runs]
    if len(set(names)) < len(names):
        raise InputError(f"a run is listed twice: {', '.join(names)}; compare different runs")
    evaluations: dict[str, Evaluation] = {}
    first_key: Mapping[str, Any] = {}
    description, num_examples = "", 0
    for name, run in zip(names, runs, strict=True):
        predictor = load_predictor(run, device)
        split = load_split(predictor, split_name)
        key = split.comparison_key()
        first_key = first_key or key
        for part, value in key.items():
            if value != first_key[part]:
                raise InputError(
                    f"{name} has other {split_name} {part} than {names[0]}; compare runs on the same examples"
                )
        description, num_examples = split.description, split.num_examples
        with console.status(f"scoring {name}"):
            first = next(iter(evaluations.values()), None)
            evaluations[name] = predictor.score_split(split, options, scored_like=first)
    metrics = {result.select_by for result in evaluations.values()}
    if len(metrics) > 1:
        raise InputError(f"these runs have different main metrics: {', '.join(sorted(metrics))}")
    results = _bootstrap(evaluations, num_examples)
    console.print(_build_comparison_table(evaluations, results, f"{split_name}, {description}"))
    first = evaluations[names[0]]
    print_lines(console, first.notes, style="dim")
    path = output_folder / f"{split_name}.json"
    by_name = {result.name: asdict(result) for result in results}
    write_json(path, [{"name": name, **by_name.get(name, {}), **x.metrics} for name, x in evaluations.items()])
    figure = build_task(runs[0]).draw_comparison(evaluations, output_folder / f"{split_name}-by-length.png")
    print_lines(console, [*([] if figure is None else [f"figure: {figure}"]), f"data: {path}"])
    return results


def _bootstrap(evaluations: Mapping[str, Evaluation], num_examples: int) -> list[BootstrapResult]:
    """Confidence intervals and p-values; empty if a metric has no statistic."""
    statistics = {name: result.statistic for name, result in evaluations.items()}
    functions = {name: statistic for name, statistic in statistics.items() if statistic is not None}
    return bootstrap_models(functions, num_examples) if len(functions) == len(statistics) else []


def _build_comparison_table(
    evaluations: Mapping[str, Evaluation], results: Sequence[BootstrapResult], title: str
) -> Table:
    first = next(iter(evaluations.values()))
    intervals = ("95 %", "p") if results else ()
    table = Table("run", first.select_by, *intervals, *first.comparison_columns, title=title)
    by_name = {result.name: result for result in results}
    for name, evaluation in evaluations.items():
        digits = evaluation.num_digits
        if (result := by_name.get(name)) is None:
            cells = [f"{evaluation.metrics[evaluation.select_by]:.{digits}f}"]
        else:
            interval = f"{result.low:.{digits - 1}f}–{result.high:.{digits - 1}f}"
            p_value = "" if result.p_value is None else f"{result.p_value:.3f}"
            cells = [f"{result.value:.{digits}f}", interval, p_value]
        table.add_row(Text(name), *cells, *evaluation.comparison_columns.values())
    return table
