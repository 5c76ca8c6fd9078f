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
from jumok.files import written
from jumok.look.mistakes import Mistake
from jumok.metrics.resampling import Figure, resampled
from jumok.run import Run
from jumok.tasks.highlights import tell_mistakes
from jumok.training import Report

__all__ = ["Judgement", "compare", "evaluate", "report"]


@dataclass(frozen=True)
class Judgement:
    """What a model comes to on some examples.

    ``figures`` are plain data; those that are numbers are shown. ``best`` is the one that decides, and ``of``
    gives it for some of the examples. ``outputs`` has a line for each example, ``samples`` a few to read.
    ``draw`` makes the main picture, ``drawings`` others, each by the end of its name. ``mistakes`` are wrong
    labels, for the uses that have labels.
    """

    figures: dict[str, Any]
    best: str
    of: Figure
    outputs: list[str]
    samples: list[str] = field(default_factory=list)
    draw: Callable[[Path], Path] | None = None
    drawings: Mapping[str, Callable[[Path], Path]] = field(default_factory=dict)
    mistakes: Sequence[Mistake] | None = None


def report(found: Judgement, loss: float) -> Report:
    """For the training loop. Of weights that score the same, the loss decides."""
    numbers = {name: value for name, value in found.figures.items() if isinstance(value, int | float)}
    return Report({**numbers, "loss": loss}, best=found.best, tie="loss", samples=found.samples)


def evaluate(predictor: Any, name: str, console: Console) -> Judgement:
    """Score a run on its test or validation data, show it, and keep it in the run's folder."""
    split = _split(predictor, name)
    with console.status(f"reading {len(split.examples):,} examples"):
        found: Judgement = predictor.judge(split.examples)
    folder = predictor.run.folder
    _write(folder / "eval" / f"{name}.jsonl", "".join(f"{line}\n" for line in found.outputs))
    told = {"split": name, "examples": len(split.examples), "left_out": split.skipped.total, **found.figures}
    _write(folder / "eval" / f"{name}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    _show(found.figures, f"{name}, {len(split.examples):,} examples", console)
    if split.skipped.total:
        console.print(f"Of the {name} data, {split.skipped}", markup=False, soft_wrap=True)
    if found.mistakes is not None:
        tell_mistakes(predictor, found.mistakes, len(split.examples), folder, name, console)
    drawn = {} if found.draw is None else {name: found.draw}
    for file, draw in (drawn | {f"{name}-{end}": one for end, one in found.drawings.items()}).items():
        try:
            made = f"figure: {draw(folder / 'figures' / f'{file}.png')}"
        except InputError as error:  # a file that was judged by what is kept of it, and is gone
            made = f"no figure: {error}"
        console.print(made, markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run], load: Callable[[Run, str], Any], split: str, out: Path, device: str, console: Console
) -> None:
    """Several runs on the same examples: the figure that decides, its interval, and significance."""
    names = [str(run.folder) for run in runs]
    if len(set(names)) < len(names):
        raise InputError(f"a run comes twice: {', '.join(names)}; compare different ones")
    found: dict[str, Judgement] = {}
    first: list[Any] = []
    for name, run in zip(names, runs, strict=True):
        predictor = load(run, device)
        examples = _split(predictor, split).examples
        first = first or examples
        if list(map(_content, examples)) != list(map(_content, first)):
            raise InputError(f"{name} has other {split} data than {names[0]}; compare on the same examples")
        with console.status(f"reading with {name}"):
            found[name] = predictor.judge(examples)
    best = {one.best for one in found.values()}
    if len(best) > 1:
        raise InputError(f"these runs are judged by different figures: {', '.join(sorted(best))}")
    compared = resampled({name: one.of for name, one in found.items()}, len(first))
    table = Table("run", best.pop(), "95 %", "p", title=f"{split}, {len(first):,} examples")
    for one in compared:
        p = "" if one.p is None else f"{one.p:.3f}"
        table.add_row(Text(one.name), f"{one.value:.4f}", f"{one.low:.3f}–{one.high:.3f}", p)
    console.print(table)
    told = [{**dataclasses.asdict(one), **found[one.name].figures} for one in compared]
    _write(out / f"{split}.json", json.dumps(told, ensure_ascii=False, indent=1) + "\n")
    console.print(f"data: {out / f'{split}.json'}", markup=False, soft_wrap=True)


def _split(predictor: Any, name: str) -> Any:
    if name not in ("valid", "test"):
        raise InputError(f"--split {name}: it is test or valid")
    return predictor.split(name)


def _content(example: Any) -> Any:
    """An example without where it was read: the same data may lie in two places."""
    return dataclasses.replace(example, where="")


def _show(figures: Mapping[str, Any], title: str, console: Console) -> None:
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        if isinstance(value, float):
            table.add_row(name, f"{value:.4f}")
        elif isinstance(value, str):
            table.add_row(name, Text(value))
    console.print(table)
    for name, rows in figures.items():
        if isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
            inner = Table(*rows[0], title=name)
            for row in rows:
                inner.add_row(*(f"{x:.4f}" if isinstance(x, float) else Text(str(x)) for x in row.values()))
            console.print(inner)


def _write(path: Path, text: str) -> None:
    with written(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
