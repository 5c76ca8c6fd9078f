"""What all uses of labelled data have in common, whichever model learns it: data, splits, training.

A *use* says how examples are read, which model learns them and how that model reads them. All else is here::

    data      train, valid, test: named, or held out of train by chance
              ►  examples  ►  what the model reads of each  ►  batches

What was settled at the beginning (a vocabulary, the names of the classes in ``labels.json``) lies in the
run's folder, and what was held out (``data/valid.jsonl``, ``data/test.jsonl``). So nothing later needs what
the run began from, but for data that the recipe names to validate or to test with.
"""

from __future__ import annotations

import copy
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from rich.console import Console
from torch import nn

from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.parallel_corpus import OnError, SkippedExamples, skip_invalid
from jumok.data.splits import read_examples, split_held_out, write_examples
from jumok.errors import InputError
from jumok.files import atomic_write, read_json
from jumok.run import Run
from jumok.tasks import common
from jumok.tasks.common import PredictOptions
from jumok.training import (
    DistributedRanks,
    TrainingSummary,
    ValidationReport,
    init_distributed,
    load_weights,
)
from jumok.training import train as train_model
from jumok.training.prefetch import TrainingDataset

__all__ = [
    "DataSource",
    "DatasetSplit",
    "FingerprintedDataset",
    "NBestOptions",
    "SupervisedDataConfig",
    "SupervisedTask",
    "load_trained_model",
    "train",
    "write_json",
]

DataSource = str | list[str]
E = TypeVar("E")  # an example
T = TypeVar("T")


@dataclass(frozen=True)
class SupervisedDataConfig:
    """What all ``data:`` sections have. How data is named is told in :mod:`jumok.data.readers.formats`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    train: DataSource
    valid: DataSource | None = None  # None: held out of train
    test: DataSource | None = None
    held_out_size: int = 1000  # examples for validation, and as many for test, where none are named
    on_error: OnError = "stop"

    def __post_init__(self) -> None:
        if self.held_out_size < 1:
            raise ValueError(f"held_out_size={self.held_out_size}: 1 or more is expected")


@dataclass(frozen=True)
class NBestOptions(PredictOptions):
    """What one may ask of ``jumok run``: so many answers. There is no search through words here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = (self.beam_size, self.sample, self.temperature, self.top_k, self.top_p)
        if asked != (None, False, 1.0, 0, 1.0):
            raise InputError(
                "--beam, --sample and their like are for models that write text; this one decides"
            )


@dataclass(frozen=True)
class DatasetSplit(Generic[E]):
    """Examples to validate or test with."""

    name: str
    examples: list[E]
    skipped: SkippedExamples


class FingerprintedDataset(TrainingDataset, Protocol):
    """Examples as the training loop takes them; ``fingerprint`` is another one for other examples."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...


# ------------------------------------------------------------------------------------------------- a use


class SupervisedTask(ABC, Generic[E]):
    """One way to use a model, for one run."""

    description: ClassVar[str]  # what a trained run does, as in "label a text"
    example_type: ClassVar[type]  # of its examples: a dataclass
    encodes_with_model: ClassVar[bool] = False  # so that it goes to its device before it is trained
    dataset_message: str | None = None  # what is told while batches are made of the data, if that takes long

    def __init__(self, run: Run) -> None:
        self.run = run
        self.recipe: Any = run.recipe
        self._skipped_messages: dict[str, None] = {}  # an ordered set

    # What is read.

    @abstractmethod
    def read_examples(self, data_source: DataSource, split_name: str) -> Iterator[E | InvalidExample]:
        """The examples of some data."""

    def log_skipped(self, examples: Iterable[T | InvalidExample]) -> Iterator[T | InvalidExample]:
        """The same; what is left out is written down by name, all of it, in ``data/skipped.txt``."""
        for one in examples:
            if isinstance(one, InvalidExample):
                self._skipped_messages.setdefault(str(one))
            yield one
        if self._skipped_messages:
            with atomic_write(self.run.folder / "data" / "skipped.txt") as part:
                part.write_text("".join(f"{line}\n" for line in self._skipped_messages), encoding="utf-8")

    @abstractmethod
    def get_split_key(self, example: E) -> str:
        """Examples of one key are on the same side of what is held out."""

    @abstractmethod
    def collect_labels(self, examples: Sequence[E]) -> list[str]:
        """The names of the classes, from the training data; none where there are none."""

    # What reads it.

    @abstractmethod
    def prepare(self, train: DatasetSplit[E]) -> None:
        """Settle in the run's folder what the model and its tokenizer are made from."""

    @abstractmethod
    def build_model(self) -> tuple[Any, Any]:
        """The model with new weights, and its tokenizer, from what was settled."""

    @abstractmethod
    def init_weights(self, model: Any, tokenizer: Any) -> str | None:
        """Give a new model what it begins from, if that is not chance; what there is to tell about it."""

    @abstractmethod
    def build_predictor(self, model: Any, tokenizer: Any) -> Any:
        """The model at work, a :class:`jumok.tasks.reader.Reader`."""

    @abstractmethod
    def build_dataset(
        self, encoded: Sequence[Any], model: Any, ranks: DistributedRanks
    ) -> FingerprintedDataset:
        """What the predictor's ``encode`` made of the training examples, as batches."""

    @abstractmethod
    def describe_model(self, model: nn.Module, tokenizer: Any, num_examples: int) -> str:
        """A line about the model."""

    # What follows from it.

    @property
    def input_example(self) -> str:
        """What a line to predict for looks like."""
        return "…"

    @functools.cached_property
    def labels(self) -> list[str]:
        """The names of the classes, as they were settled."""
        path = self.run.folder / "labels.json"
        labels: list[str] = read_json(path, list)
        if not labels or not all(isinstance(label, str) for label in labels):
            raise InputError(f"{path} is damaged: expected names of classes")
        return labels

    @functools.cached_property
    def _train_data(self) -> tuple[list[E], SkippedExamples]:
        return self._read_usable(self.recipe.data.train, "train")

    @property
    def all_examples(self) -> list[E]:
        """The training data, and what is held out of it."""
        return self._train_data[0]

    def train_split(self) -> DatasetSplit[E]:
        """What is learned from, without what is held out."""
        whole, skipped = self._train_data
        data: SupervisedDataConfig = self.recipe.data
        if data.valid is not None and data.test is not None:
            return DatasetSplit("train", whole, skipped)
        parts = split_held_out(whole, self.get_split_key, data.held_out_size)
        named = [one for name in ("valid", "test") if getattr(data, name) is not None for one in parts[name]]
        return DatasetSplit("train", parts["train"] + named, skipped)

    def valid_split(self) -> DatasetSplit[E]:
        """What training is watched with."""
        return self._load_split("valid")

    def test_split(self) -> DatasetSplit[E]:
        """What results are given on."""
        return self._load_split("test")

    def _load_split(self, split_name: str) -> DatasetSplit[E]:
        named: DataSource | None = getattr(self.recipe.data, split_name)
        if named is not None:
            return DatasetSplit(split_name, *self._read_usable(named, split_name))
        if (path := self._held_out_path(split_name)).is_file():
            return DatasetSplit(split_name, read_examples(path, self.example_type), SkippedExamples())
        if "fingerprint" in _read_train_info(self.run):
            raise InputError(f"{path} is missing: the examples that training held out; train again")
        whole, skipped = self._train_data  # a run of an earlier version has kept nothing
        return DatasetSplit(
            split_name,
            split_held_out(whole, self.get_split_key, self.recipe.data.held_out_size)[split_name],
            skipped,
        )

    def write_held_out(self) -> None:
        """Keep what is held out in the run's folder: data may change, what was learned from does not."""
        data: SupervisedDataConfig = self.recipe.data
        names = [name for name in ("valid", "test") if getattr(data, name) is None]
        parts = split_held_out(self.all_examples, self.get_split_key, data.held_out_size) if names else {}
        for name in names:
            write_examples(self._held_out_path(name), parts[name])

    def _held_out_path(self, split_name: str) -> Path:
        return self.run.folder / "data" / f"{split_name}.jsonl"

    def load_readable_split(
        self, split_name: str, encode: Callable[[Sequence[E]], Iterator[Any]]
    ) -> DatasetSplit[E]:
        """The validation or test data, without what the model cannot read, if such may be left out."""
        given = self._load_split(split_name)
        skipped = copy.deepcopy(given.skipped)
        encoded = zip(given.examples, encode(given.examples), strict=True)
        found = (read if isinstance(read, InvalidExample) else one for one, read in encoded)
        examples = list(skip_invalid(found, self.recipe.data.on_error, skipped))
        if not examples:
            raise InputError(f"data.{split_name}: no examples that can be read; {skipped}")
        return DatasetSplit(split_name, examples, skipped)

    def _read_usable(self, data_source: DataSource, split_name: str) -> tuple[list[E], SkippedExamples]:
        skipped = SkippedExamples()
        found = list(
            skip_invalid(self.read_examples(data_source, split_name), self.recipe.data.on_error, skipped)
        )
        if not found:
            raise InputError(f"data.{split_name}: {data_source}: no examples; {skipped}")
        return found, skipped


# ---------------------------------------------------------------------------------------------- training


def train(task: SupervisedTask[Any], console: Console) -> TrainingSummary:
    """Train the model of a run, or go on with it, and say what comes next."""
    run, recipe = task.run, task.recipe
    with init_distributed(recipe.train.device) as ranks:
        notes: list[str | None] = []
        if ranks.is_main:
            with console.status("reading the training data"):
                notes.append(_prepare_run(task))
        ranks.barrier()
        torch.manual_seed(recipe.train.seed)
        model, tokenizer = task.build_model()
        if task.encodes_with_model:
            model.to(ranks.device)
        reader = task.build_predictor(model, tokenizer)
        skipped = SkippedExamples()
        with _show_status(console, task.dataset_message) if ranks.is_main else nullcontext():
            encoded = list(
                skip_invalid(reader.encode(task.train_split().examples), recipe.data.on_error, skipped)
            )
            data = task.build_dataset(encoded, model, ranks)
        notes.append(f"Of the training data, {skipped}" if skipped.total else None)
        if ranks.is_main:
            _check_unchanged(run, data)
            for name in ("valid", "test"):
                left_out = reader.load_split(name).skipped  # a flaw in it is told now, not after an hour
                notes.append(f"Of the {name} data, {left_out}" if left_out.total else None)
        if not run.has_checkpoint:
            notes.append(task.init_weights(model, tokenizer))
        if ranks.is_main:
            for line in (*notes, task.describe_model(model, tokenizer, len(data))):
                if line:
                    console.print(line, markup=False, soft_wrap=True)
        summary = train_model(
            model,
            data,
            recipe.train,
            run.folder,
            validate=_SupervisedValidation(task, tokenizer),
            console=console,
            ranks=ranks,
        )
    if ranks.is_main:
        console.print(
            common.format_next_commands(run, task.description, task.input_example),
            markup=False,
            soft_wrap=True,
        )
    return summary


def _show_status(console: Console, message: str | None) -> AbstractContextManager[Any]:
    """That something takes long: while it does on a terminal, once elsewhere."""
    if message is None or console.is_terminal:
        return nullcontext() if message is None else console.status(message)
    console.print(f"{message} …", markup=False)
    return nullcontext()


def load_trained_model(task: SupervisedTask[Any], device: str = "auto") -> tuple[Any, Any]:
    """The trained model of a run and its tokenizer."""
    model, tokenizer = task.build_model()
    load_weights(model, task.run.weights_path)
    return common.move_to_device(model, device), tokenizer


class _SupervisedValidation:
    def __init__(self, task: SupervisedTask[Any], tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.split: DatasetSplit[Any] | None = None  # read when first asked, by the process that validates

    def __call__(self, model: nn.Module) -> ValidationReport:
        predictor = self.task.build_predictor(model, self.tokenizer)
        if self.split is None:
            self.split = predictor.load_split("valid")
        report: ValidationReport = predictor.validate(self.split.examples)
        return report


def _prepare_run(task: SupervisedTask[Any]) -> str | None:
    """Settle all that is to be, unless that is done; what was left out of the data."""
    train = task.train_split()
    if not task.run.has_checkpoint:
        labels = task.collect_labels(task.all_examples)
        task.prepare(train)
        if labels:
            write_json(task.run.folder / "labels.json", labels)
        task.write_held_out()
    return f"Of the training data, {train.skipped}" if train.skipped.total else None


def _check_unchanged(run: Run, dataset: FingerprintedDataset) -> None:
    """Refuse to go on with other data than the run began with."""
    told = {"num_rows": len(dataset), "fingerprint": dataset.fingerprint}
    if run.has_checkpoint and (before := _read_train_info(run)):
        if any(before.get(name, value) != value for name, value in told.items()):  # older runs tell less
            raise InputError(
                f"the data has changed since {run.folder} began with it; bring it back, or begin anew: --out"
            )
        return
    write_json(_train_info_path(run), told)


def _read_train_info(run: Run) -> dict[str, Any]:
    """What is known of the data that a run began with; nothing, before it did."""
    path = _train_info_path(run)
    found: dict[str, Any] = read_json(path, dict) if path.is_file() else {}
    return found


def _train_info_path(run: Run) -> Path:
    return run.folder / "data" / "train.json"


def write_json(path: Path, content: Any) -> None:
    """As JSON, whole or not at all."""
    with atomic_write(path) as part:
        part.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
