"""How good a fine-tuned run is: its figures on a split, written down and shown; against other runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jumok.errors import InputError
from jumok.files import atomic_write
from jumok.look.viewer.error_page import MisclassifiedText
from jumok.metrics.bootstrap import FigureFunction, bootstrap_models
from jumok.run import Run
from jumok.tasks.classify.error_analysis import report_errors
from jumok.training import ValidationReport

__all__ = ["Evaluation", "build_validation_report", "compare", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """What a model comes to on some examples.

    ``metrics`` are plain data; those that are numbers are shown. ``select_by`` is the one that decides, and ``of``
    gives it for some of the examples. ``outputs`` has a line for each example, ``samples`` a few to read.
    ``main_figure`` makes the main picture, ``extra_figures`` others, each by the end of its name. ``errors`` are wrong
    labels, for the uses that have labels.
    """

    metrics: dict[str, Any]
    select_by: str
    statistic: FigureFunction
    outputs: list[str]
    samples: list[str] = field(default_factory=list)
    main_figure: Callable[[Path], Path] | None = None
    extra_figures: Mapping[str, Callable[[Path], Path]] = field(default_factory=dict)
    errors: Sequence[MisclassifiedText] | None = None


def build_validation_report(evaluation: Evaluation, loss: float) -> ValidationReport:
    """For the training loop. Of weights that score the same, the loss decides."""
    numbers = {name: value for name, value in evaluation.metrics.items() if isinstance(value, int | float)}
    return ValidationReport(
        {**numbers, "loss": loss},
        select_by=evaluation.select_by,
        tie_breaker="loss",
        samples=evaluation.samples,
    )


def evaluate(predictor: Any, split_name: str, console: Console) -> Evaluation:
    """Score a run on its test or validation data, show it, and keep it in the run's folder."""
    split = _load_split(predictor, split_name)
    with console.status(f"reading {len(split.examples):,} examples"):
        found: Evaluation = predictor.score_examples(split.examples)
    folder = predictor.run.folder
    _write_text(folder / "eval" / f"{split_name}.jsonl", "".join(f"{line}\n" for line in found.outputs))
    told = {
        "split": split_name,
        "num_examples": len(split.examples),
        "num_skipped": split.skipped.total,
        **found.metrics,
    }
    _write_text(folder / "eval" / f"{split_name}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    _print_metrics(found.metrics, f"{split_name}, {len(split.examples):,} examples", console)
    if split.skipped.total:
        console.print(f"Of the {split_name} data, {split.skipped}", markup=False, soft_wrap=True)
    if found.errors is not None:
        report_errors(predictor, found.errors, len(split.examples), folder, split_name, console)
    drawn = {} if found.main_figure is None else {split_name: found.main_figure}
    for file, draw in (
        drawn | {f"{split_name}-{end}": one for end, one in found.extra_figures.items()}
    ).items():
        try:
            made = f"figure: {draw(folder / 'figures' / f'{file}.png')}"
        except InputError as error:  # a file that was judged by what is kept of it, and is gone
            made = f"no figure: {error}"
        console.print(made, markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run],
    load_predictor: Callable[[Run, str], Any],
    split_name: str,
    output_folder: Path,
    device: str,
    console: Console,
) -> None:
    """Several runs on the same examples: the figure that decides, its interval, and significance."""
    names = [str(run.folder) for run in runs]
    if len(set(names)) < len(names):
        raise InputError(f"a run comes twice: {', '.join(names)}; compare different ones")
    found: dict[str, Evaluation] = {}
    first: list[Any] = []
    for name, run in zip(names, runs, strict=True):
        predictor = load_predictor(run, device)
        examples = _load_split(predictor, split_name).examples
        first = first or examples
        if list(map(_drop_location, examples)) != list(map(_drop_location, first)):
            raise InputError(
                f"{name} has other {split_name} data than {names[0]}; compare on the same examples"
            )
        with console.status(f"reading with {name}"):
            found[name] = predictor.score_examples(examples)
    best = {one.select_by for one in found.values()}
    if len(best) > 1:
        raise InputError(f"these runs are judged by different figures: {', '.join(sorted(best))}")
    compared = bootstrap_models({name: one.statistic for name, one in found.items()}, len(first))
    table = Table("run", best.pop(), "95 %", "p", title=f"{split_name}, {len(first):,} examples")
    for one in compared:
        p = "" if one.p_value is None else f"{one.p_value:.3f}"
        table.add_row(Text(one.name), f"{one.value:.4f}", f"{one.low:.3f}–{one.high:.3f}", p)
    console.print(table)
    told = [{**dataclasses.asdict(one), **found[one.name].metrics} for one in compared]
    _write_text(output_folder / f"{split_name}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    console.print(f"data: {output_folder / f'{split_name}.json'}", markup=False, soft_wrap=True)


def _load_split(predictor: Any, split_name: str) -> Any:
    if split_name not in ("valid", "test"):
        raise InputError(f"--split {split_name}: it is test or valid")
    return predictor.load_split(split_name)


def _drop_location(example: Any) -> Any:
    """An example without where it was read: the same data may lie in two places."""
    return dataclasses.replace(example, location="")


def _print_metrics(metrics: Mapping[str, Any], title: str, console: Console) -> None:
    table = Table("figure", "value", title=title)
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


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
