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

from jumok.data.formats import Flaw
from jumok.data.held_out import divided, keep, kept
from jumok.data.sources import OnError, Skipped, usable
from jumok.errors import InputError
from jumok.files import read_json, written
from jumok.run import Run
from jumok.tasks import common
from jumok.tasks.common import Asked
from jumok.training import Ranks, Report, Summary, joined, load_weights
from jumok.training import train as train_model
from jumok.training.prefetch import Data

__all__ = ["LabelledData", "Learnable", "Named", "Search", "Split", "Use", "load_model", "train", "write"]

Named = str | list[str]
E = TypeVar("E")  # an example
T = TypeVar("T")


@dataclass(frozen=True)
class LabelledData:
    """What all ``data:`` sections have. How data is named is told in :mod:`jumok.data.sources`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    train: Named
    valid: Named | None = None  # None: held out of train
    test: Named | None = None
    held_out: int = 1000  # examples for validation, and as many for test, where none are named
    on_error: OnError = "stop"

    def __post_init__(self) -> None:
        if self.held_out < 1:
            raise ValueError(f"held_out={self.held_out}: 1 or more is expected")


@dataclass(frozen=True)
class Search(Asked):
    """What one may ask of ``jumok run``: so many answers. There is no search through words here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = (self.beam, self.sample, self.temperature, self.top_k, self.top_p)
        if asked != (None, False, 1.0, 0, 1.0):
            raise InputError(
                "--beam, --sample and their like are for models that write text; this one decides"
            )


@dataclass(frozen=True)
class Split(Generic[E]):
    """Examples to validate or test with."""

    name: str
    examples: list[E]
    skipped: Skipped


class Learnable(Data, Protocol):
    """Examples as the training loop takes them; ``fingerprint`` is another one for other examples."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...


# ------------------------------------------------------------------------------------------------- a use


class Use(ABC, Generic[E]):
    """One way to use a model, for one run."""

    does: ClassVar[str]  # what a trained run does, as in "label a text"
    kind: ClassVar[type]  # of its examples: a dataclass
    encodes_with_model: ClassVar[bool] = False  # so that it goes to its device before it is trained
    readies: str | None = None  # what is told while batches are made of the data, if that takes long

    def __init__(self, run: Run) -> None:
        self.run = run
        self.recipe: Any = run.recipe
        self._left_out: dict[str, None] = {}  # an ordered set

    # What is read.

    @abstractmethod
    def read(self, named: Named, split: str) -> Iterator[E | Flaw]:
        """The examples of some data."""

    def noted(self, found: Iterable[T | Flaw]) -> Iterator[T | Flaw]:
        """The same; what is left out is written down by name, all of it, in ``data/left_out.txt``."""
        for one in found:
            if isinstance(one, Flaw):
                self._left_out.setdefault(str(one))
            yield one
        if self._left_out:
            with written(self.run.folder / "data" / "left_out.txt") as part:
                part.write_text("".join(f"{line}\n" for line in self._left_out), encoding="utf-8")

    @abstractmethod
    def key(self, example: E) -> str:
        """Examples of one key are on the same side of what is held out."""

    @abstractmethod
    def settle(self, examples: Sequence[E]) -> list[str]:
        """The names of the classes, from the training data; none where there are none."""

    # What reads it.

    @abstractmethod
    def prepare(self, train: Split[E]) -> None:
        """Settle in the run's folder what the model and its tokenizer are made from."""

    @abstractmethod
    def made(self) -> tuple[Any, Any]:
        """The model with new weights, and its tokenizer, from what was settled."""

    @abstractmethod
    def begin(self, model: Any, tokenizer: Any) -> str | None:
        """Give a new model what it begins from, if that is not chance; what there is to tell about it."""

    @abstractmethod
    def predictor(self, model: Any, tokenizer: Any) -> Any:
        """The model at work, a :class:`jumok.tasks.reader.Reader`."""

    @abstractmethod
    def learnable(self, encoded: Sequence[Any], model: Any, ranks: Ranks) -> Learnable:
        """What the predictor's ``encode`` made of the training examples, as batches."""

    @abstractmethod
    def told(self, model: nn.Module, tokenizer: Any, texts: int) -> str:
        """A line about the model."""

    # What follows from it.

    @property
    def example(self) -> str:
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
    def _whole(self) -> tuple[list[E], Skipped]:
        return self._read(self.recipe.data.train, "train")

    @property
    def whole(self) -> list[E]:
        """The training data, and what is held out of it."""
        return self._whole[0]

    def train(self) -> Split[E]:
        """What is learned from, without what is held out."""
        whole, skipped = self._whole
        data: LabelledData = self.recipe.data
        if data.valid is not None and data.test is not None:
            return Split("train", whole, skipped)
        parts = divided(whole, self.key, data.held_out)
        named = [one for name in ("valid", "test") if getattr(data, name) is not None for one in parts[name]]
        return Split("train", parts["train"] + named, skipped)

    def valid(self) -> Split[E]:
        """What training is watched with."""
        return self._split("valid")

    def test(self) -> Split[E]:
        """What results are given on."""
        return self._split("test")

    def _split(self, name: str) -> Split[E]:
        named: Named | None = getattr(self.recipe.data, name)
        if named is not None:
            return Split(name, *self._read(named, name))
        if (path := self._kept(name)).is_file():
            return Split(name, kept(path, self.kind), Skipped())
        if "fingerprint" in _told_of(self.run):
            raise InputError(f"{path} is missing: the examples that training held out; train again")
        whole, skipped = self._whole  # a run of an earlier version has kept nothing
        return Split(name, divided(whole, self.key, self.recipe.data.held_out)[name], skipped)

    def hold_out(self) -> None:
        """Keep what is held out in the run's folder: data may change, what was learned from does not."""
        data: LabelledData = self.recipe.data
        names = [name for name in ("valid", "test") if getattr(data, name) is None]
        parts = divided(self.whole, self.key, data.held_out) if names else {}
        for name in names:
            keep(self._kept(name), parts[name])

    def _kept(self, name: str) -> Path:
        return self.run.folder / "data" / f"{name}.jsonl"

    def readable(self, name: str, encode: Callable[[Sequence[E]], Iterator[Any]]) -> Split[E]:
        """The validation or test data, without what the model cannot read, if such may be left out."""
        given = self._split(name)
        skipped = copy.deepcopy(given.skipped)
        encoded = zip(given.examples, encode(given.examples), strict=True)
        found = (read if isinstance(read, Flaw) else one for one, read in encoded)
        examples = list(usable(found, self.recipe.data.on_error, skipped))
        if not examples:
            raise InputError(f"data.{name}: no examples that can be read; {skipped}")
        return Split(name, examples, skipped)

    def _read(self, named: Named, split: str) -> tuple[list[E], Skipped]:
        skipped = Skipped()
        found = list(usable(self.read(named, split), self.recipe.data.on_error, skipped))
        if not found:
            raise InputError(f"data.{split}: {named}: no examples; {skipped}")
        return found, skipped


# ---------------------------------------------------------------------------------------------- training


def train(use: Use[Any], console: Console) -> Summary:
    """Train the model of a run, or go on with it, and say what comes next."""
    run, recipe = use.run, use.recipe
    with joined(recipe.train.device) as ranks:
        notes: list[str | None] = []
        if ranks.main:
            with console.status("reading the training data"):
                notes.append(_prepared(use))
        ranks.wait()
        torch.manual_seed(recipe.train.seed)
        model, tokenizer = use.made()
        if use.encodes_with_model:
            model.to(ranks.device)
        reader = use.predictor(model, tokenizer)
        skipped = Skipped()
        with _told(console, use.readies) if ranks.main else nullcontext():
            encoded = list(usable(reader.encode(use.train().examples), recipe.data.on_error, skipped))
            data = use.learnable(encoded, model, ranks)
        notes.append(f"Of the training data, {skipped}" if skipped.total else None)
        if ranks.main:
            _check_unchanged(run, data)
            for name in ("valid", "test"):
                left_out = reader.split(name).skipped  # a flaw in it is told now, not after an hour
                notes.append(f"Of the {name} data, {left_out}" if left_out.total else None)
        if not run.has_begun:
            notes.append(use.begin(model, tokenizer))
        if ranks.main:
            for line in (*notes, use.told(model, tokenizer, len(data))):
                if line:
                    console.print(line, markup=False, soft_wrap=True)
        summary = train_model(
            model,
            data,
            recipe.train,
            run.folder,
            validate=_Validation(use, tokenizer),
            console=console,
            ranks=ranks,
        )
    if ranks.main:
        console.print(common.next_commands(run, use.does, use.example), markup=False, soft_wrap=True)
    return summary


def _told(console: Console, what: str | None) -> AbstractContextManager[Any]:
    """That something takes long: while it does on a terminal, once elsewhere."""
    if what is None or console.is_terminal:
        return nullcontext() if what is None else console.status(what)
    console.print(f"{what} …", markup=False)
    return nullcontext()


def load_model(use: Use[Any], device: str = "auto") -> tuple[Any, Any]:
    """The trained model of a run and its tokenizer."""
    model, tokenizer = use.made()
    load_weights(model, use.run.weights)
    return common.placed(model, device), tokenizer


class _Validation:
    def __init__(self, use: Use[Any], tokenizer: Any) -> None:
        self.use, self.tokenizer = use, tokenizer
        self.split: Split[Any] | None = None  # read when first asked, by the process that validates

    def __call__(self, model: nn.Module) -> Report:
        predictor = self.use.predictor(model, self.tokenizer)
        if self.split is None:
            self.split = predictor.split("valid")
        report: Report = predictor.report(self.split.examples)
        return report


def _prepared(use: Use[Any]) -> str | None:
    """Settle all that is to be, unless that is done; what was left out of the data."""
    train = use.train()
    if not use.run.has_begun:
        labels = use.settle(use.whole)
        use.prepare(train)
        if labels:
            write(use.run.folder / "labels.json", labels)
        use.hold_out()
    return f"Of the training data, {train.skipped}" if train.skipped.total else None


def _check_unchanged(run: Run, data: Learnable) -> None:
    """Refuse to go on with other data than the run began with."""
    told = {"rows": len(data), "fingerprint": data.fingerprint}
    if run.has_begun and (before := _told_of(run)):
        if any(before.get(name, value) != value for name, value in told.items()):  # older runs tell less
            raise InputError(
                f"the data has changed since {run.folder} began with it; bring it back, or begin anew: --out"
            )
        return
    write(_train_json(run), told)


def _told_of(run: Run) -> dict[str, Any]:
    """What is known of the data that a run began with; nothing, before it did."""
    path = _train_json(run)
    found: dict[str, Any] = read_json(path, dict) if path.is_file() else {}
    return found


def _train_json(run: Run) -> Path:
    return run.folder / "data" / "train.json"


def write(path: Path, content: Any) -> None:
    """As JSON, whole or not at all."""
    with written(path) as part:
        part.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
