"""What every task has in common: the protocols ``Task`` and ``Predictor``, and the commands that use them.

A *task* builds everything that a run needs: data, model, tokenizer. A *predictor* is a model with its tokenizer,
ready for use::

    train      task.prepare  ►  task.build_model  ►  task.build_dataset  ►  task.init_weights  ►  training loop
    validate   predictor.load_split("valid")  ►  predictor.validate
    evaluate   predictor.load_split("test")   ►  predictor.score_split  ►  eval/test.json, figures/
    compare    the same for several runs      ►  bootstrap intervals and p-values

This module imports no task. To add a task, write a package with the modules that :mod:`jumok.tasks` lists.
"""

from __future__ import annotations

import dataclasses
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from jumok.data.readers.parallel_corpus import SkippedExamples
from jumok.decoding import StreamListener
from jumok.devices import move_to_device
from jumok.errors import InputError
from jumok.files import read_json, write_json, write_text
from jumok.inference import line_io
from jumok.metrics.bootstrap import BootstrapResult, bootstrap_models
from jumok.run import Run
from jumok.tasks import build_task, jsonl_input
from jumok.tasks.jsonl_input import JsonObject
from jumok.tasks.options import PredictOptions
from jumok.training import (
    DistributedRanks,
    TrainingSummary,
    ValidationReport,
    init_distributed,
    load_weights,
)
from jumok.training import train as train_model
from jumok.training.prefetch import TrainingDataset

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData

SplitName = Literal["valid", "test"]
Statistic = Callable[[NDArray[np.int64]], float]  # a metric of the examples with these indices
E = TypeVar("E")
O = TypeVar("O", bound=PredictOptions)  # noqa: E741
P_co = TypeVar("P_co", bound="Prediction", covariant=True)
O_contra = TypeVar("O_contra", bound=PredictOptions, contravariant=True)
PredictorT = TypeVar("PredictorT", bound="Predictor[Any, Any]")


# ---------------------------------------------------------------------------------------------------- data types


@dataclass(frozen=True)
class DatasetSplit(Generic[E]):
    """Examples for validation or test."""

    name: str
    examples: Sequence[E]
    skipped: SkippedExamples = field(default_factory=SkippedExamples)  # invalid examples that were left out

    @property
    def num_examples(self) -> int:
        return len(self.examples)

    @property
    def description(self) -> str:
        """The size, for people."""
        return f"{self.num_examples:,} examples"

    def comparison_key(self) -> Mapping[str, Any]:
        """What must be equal for runs to be compared. Where the examples were read from does not matter."""
        return {"data": [dataclasses.replace(example, location="") for example in self.examples]}  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class Prediction(ABC):
    """A prediction for one input line."""

    supports_alignments: ClassVar[bool] = False  # whether there are word alignments

    index: int  # of the line, from 0
    input: str  # the line
    finished: bool = field(default=True, kw_only=True)  # False: cut off at the length limit

    @property
    def is_drawable(self) -> bool:
        """Whether there is attention to draw."""
        return bool(self.input.strip())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages about a prediction that may be unusable."""
        return () if self.finished else ("cut off at the length limit",)

    def to_lines(self, *, n_best: bool, alignments: bool, as_json: bool) -> Iterator[str]:
        """The output lines of ``jumok run``."""
        if alignments and not self.supports_alignments:
            raise InputError("--alignments: only translations have word alignments")
        return self.format_lines(n_best=n_best, as_json=as_json)

    @abstractmethod
    def format_lines(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        """The output lines, without word alignments."""


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on a split."""

    metrics: dict[str, Any]  # plain data, written to ``eval/SPLIT.json``
    select_by: str  # the main metric
    statistic: Statistic | None = None  # the main metric on a subset; None: compared without intervals
    outputs: Sequence[str] = ()  # one line per example, written to ``eval/SPLIT.jsonl``
    outputs_suffix: Literal[".jsonl", ".txt"] = ".jsonl"
    samples: Sequence[str] = ()  # a few predictions, for people
    print_samples: bool = False  # print the samples after an evaluation
    rows: Sequence[tuple[str, str, str]] = ()  # table rows (name, value, comment); empty: built from metrics
    notes: Sequence[str] = ()  # lines below the table, such as BLEU signatures
    # Functions that draw figures, by suffix of the file name; "" is the main figure.
    figures: Mapping[str, Callable[[Path], Path]] = field(default_factory=dict)
    # Functions that write further reports: (folder of the run, split name, console).
    reports: Sequence[Callable[[Path, str, Console], None]] = ()
    comparison_columns: Mapping[str, str] = field(default_factory=dict)  # further columns of a comparison
    num_digits: int = 4  # after the decimal point of the main metric
    scoring: Any = None  # the metric object, which the other runs of a comparison use as well


# --------------------------------------------------------------------------------------------------- protocols


class Predictor(Protocol[P_co, O_contra]):
    """A model with its tokenizer, ready for prediction and evaluation. Implementations subclass it."""

    run: Run
    model: Any  # an nn.Module, or an engine's replacement with the same methods
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        weight: Tensor = next(iter(self.model.parameters()))
        return weight.device

    @property
    def labels(self) -> Sequence[str]:
        """The names of the classes, if there are any."""
        return ()

    @property
    def has_attention(self) -> bool:
        """Whether the model has attention to show."""
        return True

    def check_has_attention(self) -> None:
        """Raise if the model has no attention."""
        if not self.has_attention:
            raise InputError(
                "this model has no attention (a fixed context), so it has no word alignments and no attention map"
            )

    @abstractmethod
    def predict(
        self,
        lines: Iterable[str],
        options: O_contra,
        *,
        with_attention: bool = False,
        first_index: int = 0,
        listener: StreamListener | None = None,
    ) -> Iterator[P_co]:
        """Predict for lines, in their order. ``first_index`` is the index of the first line.

        A task that streams reports partial predictions to the ``listener``; other tasks ignore it.
        """

    @abstractmethod
    def draw_attention(self, prediction: Any, path: Path, title: str = "") -> Path:
        """Draw the attention of a prediction."""

    @abstractmethod
    def build_viewer_data(
        self,
        text: str,
        target: str | None = None,
        *,
        options: O_contra | None = None,
        ablations: Ablations | None = None,
    ) -> list[ViewerData]:
        """Capture the attention of the model for the viewer; with ``ablations``, a second time with those."""

    @abstractmethod
    def load_split(self, name: SplitName) -> DatasetSplit[Any]:
        """Read the validation or test data of the run."""

    @abstractmethod
    def score_split(
        self,
        split: Any,
        options: O_contra,
        *,
        detailed: bool = False,
        scored_like: Evaluation | None = None,
    ) -> Evaluation:
        """Score the model on a split.

        ``detailed`` adds everything that ``jumok eval`` shows: figures, reports, metrics that take long.
        ``scored_like`` is the evaluation of another run whose metric is to be used.
        """

    @abstractmethod
    def validate(self, split: Any) -> ValidationReport:
        """Score the model during training."""

    def export(self, format_name: str, folder: Path) -> None:
        """Write the model in another format."""
        raise InputError(
            f"--format {format_name}: a {self.run.recipe.model.type} model cannot be exported to other formats"
        )


class FingerprintedDataset(TrainingDataset, Protocol):
    """Training batches. ``fingerprint`` identifies the examples."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...


class PredictionWriter(Protocol):
    """Writes the file of a prediction, and returns the prediction with the path of the file."""

    def __call__(self, prediction: Any) -> Any: ...


class Task(Protocol[PredictorT]):
    """Builds everything that a run needs. The methods are in the order in which :func:`train` calls them.

    Implementations subclass it.
    """

    description: ClassVar[str]  # what a trained model does, as in "translate a text"
    options_type: ClassVar[type[PredictOptions]]
    checked_splits: ClassVar[tuple[SplitName, ...]] = (
        "valid",
        "test",
    )  # read before training, to find errors
    encodes_with_model: ClassVar[bool] = False  # the model moves to its device before ``build_dataset``
    reads_lines: ClassVar[bool] = True  # False: inputs are not lines of text
    writes_files: ClassVar[bool] = False  # True: predictions are files, see ``open_writer``
    run: Run
    recipe: Any

    @property
    def input_example(self) -> str:
        """An input line, for the hint after training."""
        return "…"

    @property
    def dataset_message(self) -> str | None:
        """A message to show while ``build_dataset`` runs, if that takes long."""
        return None

    # Training.

    @abstractmethod
    def prepare(self, console: Console) -> list[str]:
        """Write vocabulary, labels and held-out data to the folder of a new run. Returns messages.

        Only the main process calls it.
        """

    @abstractmethod
    def build_model(self) -> tuple[Any, Any]:
        """Build the model with random weights, and its tokenizer, from what ``prepare`` wrote."""

    @abstractmethod
    def build_predictor(self, model: Any, tokenizer: Any) -> PredictorT: ...

    @abstractmethod
    def build_dataset(
        self, predictor: PredictorT, ranks: DistributedRanks
    ) -> tuple[FingerprintedDataset, SkippedExamples]:
        """Build the training batches. Also returns the examples that were left out."""

    def init_weights(self, model: Any, tokenizer: Any) -> list[str]:
        """Initialize a new run from pretrained weights, if the recipe says so. Returns messages."""
        return []

    @abstractmethod
    def describe_model(self, model: nn.Module, tokenizer: Any, dataset: FingerprintedDataset) -> str:
        """One line about the model and its training data."""

    # Inputs and outputs of ``jumok run``.

    @staticmethod
    def read_chunks(text: str | None, *, skip_invalid: bool = False) -> AbstractContextManager[Iterator[list[str]]]:
        """Read the inputs in chunks: from a text, a file, or standard input (None)."""
        return line_io.read_chunks(text, skip_invalid=skip_invalid)

    @staticmethod
    def read_text(text: str) -> str:
        """Read one input: the text itself, or the content of the file of that name."""
        return line_io.read_text(text)

    @staticmethod
    def make_jsonl_reader(path: Path) -> Callable[[JsonObject], str]:
        """Return a function that makes an input line of an object of the JSONL file at ``path``."""
        return jsonl_input.make_text_reader(path)

    @staticmethod
    def open_writer(output_path: Path | None, *, overwrite: bool = False) -> PredictionWriter | None:
        """Return the writer of predictions that are files; None: predictions are lines."""
        return None

    # Comparison.

    def draw_comparison(self, evaluations: Mapping[str, Evaluation], path: Path) -> Path | None:
        """Draw the evaluations of several runs, by name, if there is a figure for that."""
        return None


# ---------------------------------------------------------------------------------------------------- training


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
            _print_lines(console, [*messages, task.describe_model(model, tokenizer, dataset)])
        summary = train_model(
            model,
            dataset,
            config,
            run.folder,
            validate=Validator(task, tokenizer),
            console=console,
            ranks=ranks,
        )
    if ranks.is_main:
        _print_lines(console, format_next_commands(run, task.description, task.input_example))
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


def load_predictor(run: Run, device: str = "auto") -> Predictor[Any, Any]:
    """Load the trained model of a run."""
    task = build_task(run)
    model, tokenizer = task.build_model()
    load_weights(model, run.weights_path)
    predictor: Predictor[Any, Any] = task.build_predictor(move_to_device(model, device), tokenizer)
    return predictor


def build_validation_report(evaluation: Evaluation, loss: float) -> ValidationReport:
    """Report an evaluation to the training loop. The loss decides between equal scores."""
    numbers = {name: value for name, value in evaluation.metrics.items() if isinstance(value, int | float)}
    return ValidationReport(
        {**numbers, "loss": loss},
        select_by=evaluation.select_by,
        tie_breaker="loss",
        samples=list(evaluation.samples),
    )


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


# -------------------------------------------------------------------------------------------------- evaluation


def evaluate(predictor: Predictor[Any, O], split_name: str, options: O, console: Console) -> Evaluation:
    """Score a run on its test or validation data, print the result, and write it to the folder of the run."""
    split = _load_split(predictor, split_name)
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
    _print_lines(console, format_skipped(split_name, split.skipped))
    for report in result.reports:
        report(folder, split_name, console)
    for suffix, draw in result.figures.items():
        name = f"{split_name}-{suffix}" if suffix else split_name
        try:
            message = f"figure: {draw(folder / 'figures' / f'{name}.png')}"
        except InputError as error:  # for example, an image file that was deleted after it was cached
            message = f"no figure: {error}"
        _print_lines(console, [message])
    if result.print_samples:
        _print_lines(console, result.samples)
    return result


def compare(
    runs: Sequence[Run],
    split_name: str,
    options: PredictOptions,
    output_folder: Path,
    device: str,
    console: Console,
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
        split = _load_split(predictor, split_name)
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
    _print_notes(first.notes, console)
    path = output_folder / f"{split_name}.json"
    by_name = {result.name: asdict(result) for result in results}
    write_json(path, [{"name": name, **by_name.get(name, {}), **x.metrics} for name, x in evaluations.items()])
    figure = build_task(runs[0]).draw_comparison(evaluations, output_folder / f"{split_name}-by-length.png")
    _print_lines(console, [*([] if figure is None else [f"figure: {figure}"]), f"data: {path}"])
    return results


def _load_split(predictor: Predictor[Any, Any], split_name: str) -> DatasetSplit[Any]:
    if split_name not in ("valid", "test"):
        raise InputError(f"--split {split_name}: it is test or valid")
    return predictor.load_split("valid" if split_name == "valid" else "test")


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
    _print_notes(result.notes, console)


# ---------------------------------------------------------------------------------------------------- messages


def format_model_size(model: nn.Module) -> str:
    """The number of parameters, for people."""
    return f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters"


def format_skipped(split_name: str, skipped: SkippedExamples) -> list[str]:
    """A message about invalid examples that were left out, if there are any."""
    return [f"Of the {split_name} data, {skipped}"] if skipped.total else []


def format_next_commands(run: Run, description: str, input_example: str = "…") -> list[str]:
    """Commands to use a trained run with."""
    folder = shlex.quote(str(run.folder))
    return [
        "Next:",
        f'  jumok run {folder} "{input_example}"    {description}, a file or standard input',
        f"  jumok eval {folder}       score it on the test data",
    ]


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _print_notes(notes: Iterable[str], console: Console) -> None:
    for note in notes:  # each on one line, to be copied
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


def _show_status(console: Console, message: str | None) -> AbstractContextManager[Any]:
    """Show a message while something runs: on a terminal as a status, elsewhere as a line."""
    if message is None or console.is_terminal:
        return nullcontext() if message is None else console.status(message)
    console.print(f"{message} …", markup=False)
    return nullcontext()
