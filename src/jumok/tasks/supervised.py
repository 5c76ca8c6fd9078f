"""Tasks with labelled data: reading it, splitting it, and encoding it for training.

A subclass says how examples are read, which model is trained on them, and how they are encoded for that model::

    data    train, valid, test: named by the recipe, or held out of train
            ►  examples  ►  encoded examples  ►  batches

The folder of a run holds everything that was decided at the start: the vocabulary, the class names in
``labels.json``, and the examples that were held out in ``data/valid.jsonl`` and ``data/test.jsonl``. Nothing later
depends on the training data, only on data that the recipe names for validation or test.
"""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rich.console import Console

from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples, skip_invalid
from jumok.data.splits import read_examples, split_held_out, write_examples
from jumok.errors import InputError
from jumok.files import read_json, write_json, write_text
from jumok.run import Run
from jumok.tasks.base import DatasetSplit, FingerprintedDataset, Task, format_skipped
from jumok.tasks.config import DataConfig, DataSource
from jumok.training import DistributedRanks

if TYPE_CHECKING:
    from jumok.tasks.predictors import SupervisedPredictor

E = TypeVar("E")  # an example
T = TypeVar("T")
SupervisedPredictorT = TypeVar("SupervisedPredictorT", bound="SupervisedPredictor[Any, Any]")


class SupervisedTask(Task[SupervisedPredictorT], Generic[E, SupervisedPredictorT]):
    """A task with labelled data."""

    example_type: ClassVar[type]  # the dataclass of its examples

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._skipped_messages: dict[str, None] = {}  # an ordered set

    # Data.

    @abstractmethod
    def read_examples(self, data_source: DataSource, split_name: str) -> Iterator[E | InvalidExample]:
        """Read the examples of a data source."""

    @abstractmethod
    def get_split_key(self, example: E) -> str:
        """Examples with the same key are never divided between training data and held-out data."""

    def collect_labels(self, examples: Sequence[E]) -> list[str]:
        """Collect the class names from the training data; empty if the task has no classes."""
        return []

    def log_skipped(self, examples: Iterable[T | InvalidExample]) -> Iterator[T | InvalidExample]:
        """Pass the examples on, and write a message for each invalid one to ``data/skipped.txt``."""
        for example in examples:
            if isinstance(example, InvalidExample):
                self._skipped_messages.setdefault(str(example))
            yield example
        if self._skipped_messages:
            lines = "".join(f"{line}\n" for line in self._skipped_messages)
            write_text(self.run.folder / "data" / "skipped.txt", lines)

    @functools.cached_property
    def labels(self) -> list[str]:
        """The class names that were stored when the run started."""
        path = self.run.folder / "labels.json"
        labels: list[str] = read_json(path, list)
        if not labels or not all(isinstance(label, str) for label in labels):
            raise InputError(f"{path} is damaged: expected names of classes")
        return labels

    @functools.cached_property
    def _train_data(self) -> tuple[list[E], SkippedExamples]:
        return self._read_valid_examples(self.recipe.data.train, "train")

    @property
    def all_examples(self) -> list[E]:
        """The examples of ``data.train``, including those that are held out."""
        return self._train_data[0]

    def train_split(self) -> DatasetSplit[E]:
        """The training examples, without those that are held out."""
        examples, skipped = self._train_data
        data: DataConfig = self.recipe.data
        if data.valid is not None and data.test is not None:
            return DatasetSplit("train", examples, skipped)
        parts = split_held_out(examples, self.get_split_key, data.held_out_size)
        unused = [example for name in ("valid", "test") if getattr(data, name) is not None for example in parts[name]]
        return DatasetSplit("train", parts["train"] + unused, skipped)

    def load_split(self, split_name: str) -> DatasetSplit[E]:
        """The validation or test data: named by the recipe, or held out when the run started."""
        data_source: DataSource | None = getattr(self.recipe.data, split_name)
        if data_source is not None:
            return DatasetSplit(split_name, *self._read_valid_examples(data_source, split_name))
        path = self._held_out_path(split_name)
        if not path.is_file():
            raise InputError(f"{path} is missing: the examples that training held out; train again")
        examples: list[E] = read_examples(path, self.example_type)
        return DatasetSplit(split_name, examples)

    def write_held_out(self) -> None:
        """Write the held-out examples to the folder of the run, so that later changes of the data do not matter."""
        data: DataConfig = self.recipe.data
        names = [name for name in ("valid", "test") if getattr(data, name) is None]
        parts = split_held_out(self.all_examples, self.get_split_key, data.held_out_size) if names else {}
        for name in names:
            write_examples(self._held_out_path(name), parts[name])

    def _held_out_path(self, split_name: str) -> Path:
        return self.run.folder / "data" / f"{split_name}.jsonl"

    def load_readable_split(self, split_name: str, encode: Callable[[Sequence[E]], Iterator[Any]]) -> DatasetSplit[E]:
        """The validation or test data without examples that cannot be encoded, if the recipe allows skipping."""
        split = self.load_split(split_name)
        skipped = copy.deepcopy(split.skipped)
        readable = (
            encoded if isinstance(encoded, InvalidExample) else example
            for example, encoded in zip(split.examples, encode(split.examples), strict=True)
        )
        examples = list(skip_invalid(readable, self.recipe.data.on_error, skipped))
        if not examples:
            raise InputError(f"data.{split_name}: no examples that can be read; {skipped}")
        return DatasetSplit(split_name, examples, skipped)

    def _read_valid_examples(self, data_source: DataSource, split_name: str) -> tuple[list[E], SkippedExamples]:
        skipped = SkippedExamples()
        examples = list(skip_invalid(self.read_examples(data_source, split_name), self.recipe.data.on_error, skipped))
        if not examples:
            raise InputError(f"data.{split_name}: {data_source}: no examples; {skipped}")
        return examples, skipped

    # Training.

    def prepare(self, console: Console) -> list[str]:
        with console.status("reading the training data"):
            split = self.train_split()
            if not self.run.has_checkpoint:
                labels = self.collect_labels(self.all_examples)
                self.write_artifacts(split)
                if labels:
                    write_json(self.run.folder / "labels.json", labels)
                self.write_held_out()
        return format_skipped("training", split.skipped)

    @abstractmethod
    def write_artifacts(self, train_split: DatasetSplit[E]) -> None:
        """Write to the folder of a new run what the model and its tokenizer are built from."""

    def build_dataset(
        self, predictor: SupervisedPredictorT, ranks: DistributedRanks
    ) -> tuple[FingerprintedDataset, SkippedExamples]:
        skipped = SkippedExamples()
        encoded = list(skip_invalid(predictor.encode(self.train_split().examples), self.recipe.data.on_error, skipped))
        return self.build_batcher(encoded, predictor.model, ranks), skipped

    @abstractmethod
    def build_batcher(self, encoded: Sequence[Any], model: Any, ranks: DistributedRanks) -> FingerprintedDataset:
        """Build batches of encoded training examples."""
