"""The interface of all tasks: the base classes ``Task`` and ``Predictor``, and the data that they exchange.

A *task* builds everything that a run needs: data, model, tokenizer. A *predictor* is a model with its tokenizer,
ready for use. The commands are written once, for all tasks:

- :mod:`jumok.tasks.training`: ``jumok train``
- :mod:`jumok.tasks.evaluation`: ``jumok eval``
- :mod:`jumok.tasks.comparison`: ``jumok compare``

:mod:`jumok.tasks` describes how to add a task.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from jumok.data.readers.invalid_examples import SkippedExamples
from jumok.decoding import StreamListener
from jumok.errors import InputError
from jumok.inference import line_io
from jumok.run import Run
from jumok.tasks import jsonl_input
from jumok.tasks.jsonl_input import JsonObject
from jumok.tasks.options import PredictOptions
from jumok.training import DistributedRanks, ValidationReport
from jumok.training.prefetch import TrainingDataset

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData

SplitName = Literal["valid", "test"]
Statistic = Callable[[NDArray[np.int64]], float]  # a metric of the examples with these indices
E = TypeVar("E")
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
    alternatives: tuple[Prediction, ...] = field(default=(), kw_only=True)  # the rest of an n-best list

    @property
    def is_drawable(self) -> bool:
        """Whether there is attention to draw."""
        return bool(self.input.strip())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages about a prediction that may be unusable."""
        return () if self.finished else ("cut off at the length limit",)

    def to_lines(self, *, n_best: bool = False, alignments: bool = False, as_json: bool = False) -> Iterator[str]:
        """The output lines of ``jumok run``."""
        if alignments and not self.supports_alignments:
            raise InputError("--alignments: only translations have word alignments")
        return self.to_json_lines(n_best=n_best) if as_json else self.format_lines(n_best=n_best)

    @abstractmethod
    def format_lines(self, *, n_best: bool) -> Iterator[str]:
        """The output lines as text, without word alignments."""

    def to_json_lines(self, *, n_best: bool) -> Iterator[str]:
        """The output lines as JSON: the input and the fields of each prediction."""
        for prediction in (self, *self.alternatives):
            content = {"line": self.index, **self.input_fields, **prediction.to_dict(n_best=n_best)}
            yield json.dumps(content, ensure_ascii=False)

    @property
    def input_fields(self) -> dict[str, Any]:
        """The fields of the input in JSON."""
        return {"text": self.input}

    @abstractmethod
    def to_dict(self, *, n_best: bool = False) -> dict[str, Any]:
        """The fields of the prediction in JSON. The responses of the server have the same fields.

        ``n_best`` adds further predictions, unless they are ``alternatives``, which have lines of their own.
        """


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

    def to_validation_report(self, loss: float) -> ValidationReport:
        """Report the scores to the training loop. The loss decides between equal scores."""
        numbers = {name: value for name, value in self.metrics.items() if isinstance(value, int | float)}
        return ValidationReport(
            {**numbers, "loss": loss}, select_by=self.select_by, tie_breaker="loss", samples=list(self.samples)
        )


# ------------------------------------------------------------------------------------------- base classes


class Predictor(ABC, Generic[P_co, O_contra]):
    """Base class of predictors: a model with its tokenizer, ready for prediction and evaluation."""

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
        self, split: Any, options: O_contra, *, detailed: bool = False, scored_like: Evaluation | None = None
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


class Task(ABC, Generic[PredictorT]):
    """Base class of tasks. Builds everything that a run needs; training calls the methods in this order."""

    description: ClassVar[str]  # what a trained model does, as in "translate a text"
    options_type: ClassVar[type[PredictOptions]]
    checked_splits: ClassVar[tuple[SplitName, ...]] = ("valid", "test")  # read before training, to find errors
    encodes_with_model: ClassVar[bool] = False  # the model moves to its device before ``build_dataset``
    reads_lines: ClassVar[bool] = True  # False: inputs are not lines of text
    writes_files: ClassVar[bool] = False  # True: predictions are files, see ``open_writer``
    recipe: Any

    def __init__(self, run: Run) -> None:
        self.run, self.recipe = run, run.recipe

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


# ---------------------------------------------------------------------------------------------------- messages


def format_model_size(model: nn.Module) -> str:
    """The number of parameters, for people."""
    return f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters"


def format_skipped(split_name: str, skipped: SkippedExamples) -> list[str]:
    """A message about invalid examples that were left out, if there are any."""
    return [f"Of the {split_name} data, {skipped}"] if skipped.total else []


def print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Print lines without wrapping them, so that they can be copied."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=None if style is None else False, soft_wrap=True)
