"""``jumok eval`` and ``jumok compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jumok.cli.options import BeamSizeOption, DeviceOption, RunArgument, SplitOption, classification_option, io_option
from jumok.cli.terminal import build_console
from jumok.errors import InputError


def evaluate(
    run: RunArgument,
    split: SplitOption = "test",
    beam_size: BeamSizeOption = None,
    faithfulness: Annotated[
        bool,
        classification_option(
            "--faithfulness", help="Also measure the faithfulness of the word highlights of an attention classifier."
        ),
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Evaluate a run on its test data. Figures and predictions are written to the run folder."""
    from jumok.run import Run
    from jumok.tasks import build_task, evaluation, load_predictor

    opened_run = Run.open(run)
    options = build_task(opened_run).options_type.from_command_line(beam_size=beam_size)
    predictor, console = load_predictor(opened_run, device), build_console()
    if not faithfulness:
        evaluation.evaluate(predictor, split, options, console)
        return
    from jumok.tasks.classify import faithfulness as classify_faithfulness

    classify_faithfulness.check_can_highlight(predictor)
    evaluation.evaluate(predictor, split, options, console)
    classify_faithfulness.evaluate_faithfulness(predictor, split, console)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders. The first is compared with each of the others.")
    ],
    split: SplitOption = "test",
    out: Annotated[Path, io_option(help="Folder for the figure and the table.")] = Path("runs/compare"),
    beam_size: BeamSizeOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Compare runs on the same test data.

    Reports scores with confidence intervals, significance tests, and scores by length.
    """
    from jumok.run import Run
    from jumok.tasks import build_task, comparison

    opened_runs = [Run.open(run) for run in runs]
    if len(opened_runs) < 2:
        raise InputError("compare needs two or more runs; one was given")
    task_names = {run.recipe.task for run in opened_runs}
    if len(task_names) > 1:
        raise InputError(f"these runs have different tasks ({', '.join(sorted(task_names))}); compare runs of one task")
    options = build_task(opened_runs[0]).options_type.from_command_line(beam_size=beam_size)
    comparison.compare(opened_runs, split, options, out, device, build_console())
