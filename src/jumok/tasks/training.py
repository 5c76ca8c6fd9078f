"""Training: the same for all tasks.

::

    task.prepare  ►  task.build_model  ►  task.build_dataset  ►  task.init_weights  ►  training loop
    Validator:  predictor.load_split("valid")  ►  predictor.validate
"""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from rich.console import Console
from torch import nn

from jumok.errors import InputError
from jumok.files import read_json, write_json
from jumok.run import Run
from jumok.tasks.base import DatasetSplit, FingerprintedDataset, Predictor, Task, format_skipped, print_lines
from jumok.training import TrainingSummary, ValidationReport, init_distributed
from jumok.training import train as train_model


def train(task: Task[Any], console: Console) -> TrainingSummary:
    """Train the model of a run. If the run has a checkpoint, resume training."""
    run, config = task.run, task.run.recipe.train
    with init_distributed(config.device) as ranks:
        messages: list[str] = []
        if ranks.is_main:
            messages += task.prepare(console)
        ranks.barrier()
        torch.manual_seed(config.seed)
        model, tokenizer = task.build_model()
        if task.encodes_with_model:
            model.to(ranks.device)
        predictor = task.build_predictor(model, tokenizer)
        with _show_status(console, task.dataset_message) if ranks.is_main else nullcontext():
            dataset, skipped = task.build_dataset(predictor, ranks)
        messages += format_skipped("training", skipped)
        if ranks.is_main:
            _check_unchanged(run, dataset)
            for name in task.checked_splits:  # an error in them appears now, not after an hour
                messages += format_skipped(name, predictor.load_split(name).skipped)
        if not run.has_checkpoint:
            messages += task.init_weights(model, tokenizer)
        if ranks.is_main:
            print_lines(console, [*messages, task.describe_model(model, tokenizer, dataset)])
        summary = train_model(
            model, dataset, config, run.folder, validate=Validator(task, tokenizer), console=console, ranks=ranks
        )
    if ranks.is_main:
        print_lines(console, _format_next_commands(task))
    return summary


class Validator:
    """Validates a model during training. The data is read at the first call, by the process that validates."""

    def __init__(self, task: Task[Any], tokenizer: Any) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._model: nn.Module | None = None
        self._predictor: Predictor[Any, Any] | None = None  # reused for the same model, with its CUDA graphs
        self._split: DatasetSplit[Any] | None = None

    def __call__(self, model: nn.Module) -> ValidationReport:
        if self._predictor is None or self._model is not model:
            self._model, self._predictor = model, self._task.build_predictor(model, self._tokenizer)
        if self._split is None:
            self._split = self._predictor.load_split("valid")
        return self._predictor.validate(self._split)


def _check_unchanged(run: Run, dataset: FingerprintedDataset) -> None:
    """Store the fingerprint of the training data. Raise if the data of a run with a checkpoint changed."""
    path = run.folder / "data" / "train.json"
    content = {"num_rows": len(dataset), "fingerprint": dataset.fingerprint}
    if not (run.has_checkpoint and path.is_file()):
        write_json(path, content)
    elif read_json(path, dict) != content:
        raise InputError(
            f"the data has changed since the training of {run.folder} started; restore it, or start a new run "
            "in another folder with --out"
        )


def _format_next_commands(task: Task[Any]) -> list[str]:
    """Commands to use the trained run with."""
    folder = shlex.quote(str(task.run.folder))
    return [
        "Next:",
        f'  jumok run {folder} "{task.input_example}"    {task.description}, a file or standard input',
        f"  jumok eval {folder}       score it on the test data",
    ]


def _show_status(console: Console, message: str | None) -> AbstractContextManager[Any]:
    """Show a message while something runs: on a terminal as a status, elsewhere as a line."""
    if message is None or console.is_terminal:
        return nullcontext() if message is None else console.status(message)
    console.print(f"{message} …", markup=False)
    return nullcontext()
