"""What BERT's uses have in common: what they begin from, what they learn from, how they are trained.

A use (:mod:`.classify`, :mod:`.tag`, :mod:`.answer`) says how its examples are read, what a model reads of
them, and which head learns it. All else is here. ::

    from      a run of ours, or a Hugging Face folder    ►  sizes, vocabulary, weights of the encoder
              package:NAME, such a folder in a package   ►  the same
              null                                       ►  sizes of ``model:``, a vocabulary learned here
    data      train, valid, test: named, or held out of train by chance
              ►  examples  ►  rows of token ids  ►  batches

What was settled at the beginning lies in the run's folder: ``tokenizer.json``, ``model.json`` (the sizes) and
``labels.json`` where there are classes. So nothing later needs what the run began from.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from rich.console import Console
from torch import nn

from jumok.annotated import Texts
from jumok.data.examples import Examples, Row
from jumok.data.formats import Flaw
from jumok.data.held_out import divided
from jumok.data.sources import OnError, Skipped, usable
from jumok.data.wordpiece import WordPieceConfig, WordPieces
from jumok.errors import InputError
from jumok.files import written
from jumok.models.bert import BertConfig
from jumok.run import Run
from jumok.tasks import common
from jumok.tasks.common import Asked
from jumok.tasks.origin import From, taken
from jumok.training import Report, Summary, joined, load_weights
from jumok.training import train as train_model

__all__ = ["From", "LabelledData", "Named", "Search", "Split", "Use", "load_model", "train"]

CHOSEN = ("dropout", "attention_dropout", "pooling")  # of ``model:``, where a model is taken over
Named = str | list[str]
E = TypeVar("E")  # an example


@dataclass(frozen=True)
class LabelledData:
    """What all ``data:`` sections have. How data is named is told in :mod:`jumok.data.sources`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    train: Named
    valid: Named | None = None  # None: held out of train
    test: Named | None = None
    held_out: int = 1000  # examples for validation, and as many for test, where none are named
    on_error: OnError = "stop"
    longest: int | None = None  # tokens of a text; None: as many as the model has positions
    long: Literal["window", "refuse"] = "window"  # what becomes of a longer one
    stride: int = 128  # tokens from the beginning of one window to that of the next
    packed: Literal["auto"] | bool = "auto"  # texts end to end; auto: where a GPU is faster with it

    def __post_init__(self) -> None:
        for name in ("held_out", "stride", "longest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: 1 or more is expected")


@dataclass(frozen=True)
class Search(Asked):
    """What one may ask of ``jumok run``: so many answers. There is no search through words here."""

    def __post_init__(self) -> None:
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


# ------------------------------------------------------------------------------------------------- a use


class Use(ABC, Generic[E]):
    """One way to use BERT, for one run."""

    does: ClassVar[str]  # what a trained run does, as in "label a text"
    batch: ClassVar[type[Texts]]

    def __init__(self, run: Run) -> None:
        self.run = run
        self.recipe: Any = run.recipe

    # What the tasks say.

    @abstractmethod
    def read(self, named: Named, split: str) -> Iterator[E | Flaw]:
        """The examples of some data."""

    @abstractmethod
    def key(self, example: E) -> str:
        """Examples of one key are on the same side of what is held out."""

    @abstractmethod
    def texts(self, example: E) -> Iterable[str]:
        """What a vocabulary is learned from."""

    @abstractmethod
    def settle(self, examples: Sequence[E]) -> list[str]:
        """The names of the classes, from the training data; none where there are none."""

    @abstractmethod
    def head(self, config: BertConfig, vocabulary: int) -> nn.Module:
        """A new model."""

    @abstractmethod
    def rows(self, examples: Sequence[E], pieces: WordPieces, longest: int) -> Iterator[list[Row] | Flaw]:
        """What a model reads of each example: one row, or several windows."""

    @abstractmethod
    def predictor(self, model: nn.Module, pieces: WordPieces) -> Any:
        """The model at work; it has ``report(examples)``."""

    # What follows from it.

    @property
    def example(self) -> str:
        """What a line to predict for looks like."""
        return "…"

    @functools.cached_property
    def labels(self) -> list[str]:
        """The names of the classes, as they were settled."""
        found: list[str] = json.loads((self.run.folder / "labels.json").read_text(encoding="utf-8"))
        return found

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
        whole, skipped = self._whole
        return Split(name, divided(whole, self.key, self.recipe.data.held_out)[name], skipped)

    def readable(self, name: str, pieces: WordPieces, longest: int) -> Split[E]:
        """The validation or test data, without what is too long for the model, if such may be left out."""
        given = self._split(name)
        skipped = copy.deepcopy(given.skipped)
        encoded = zip(given.examples, self.rows(given.examples, pieces, longest), strict=True)
        found = (rows if isinstance(rows, Flaw) else one for one, rows in encoded)
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

    def longest(self, config: BertConfig) -> int:
        """The most tokens that are read at once, [CLS] and [SEP] included."""
        asked: int | None = self.recipe.data.longest
        if asked is not None and asked > config.positions:
            raise InputError(
                f"data.longest is {asked}, and the model has {config.positions} positions; "
                "data.longest=null takes as many"
            )
        return asked or config.positions


# ---------------------------------------------------------------------------------------------- training


def train(use: Use[Any], console: Console) -> Summary:
    """Train the model of a run, or go on with it, and say what comes next."""
    run, recipe = use.run, use.recipe
    with joined(recipe.train.device) as ranks:
        if ranks.main:
            with console.status("reading the training data"):
                told = _prepare(use)
            for line in told:
                console.print(line, markup=False, soft_wrap=True)
        ranks.wait()
        config, vocabulary, pieces = _settled(run.folder)
        longest = use.longest(config)
        skipped = Skipped()
        encoded = usable(use.rows(use.train().examples, pieces, longest), recipe.data.on_error, skipped)
        rows = [row for some in encoded for row in some]
        layout = common.layout(run, ranks, _is_packed(recipe, config, rows, ranks.device))
        data = Examples(
            use.batch, rows, tokens=recipe.train.tokens, seed=recipe.train.seed, longest=longest, **layout
        )
        if ranks.main:
            _check_unchanged(run, data)
            use.readable("valid", pieces, longest)  # a flaw in it is told now, not after an hour
        torch.manual_seed(recipe.train.seed)
        model = use.head(config, vocabulary)
        if not run.has_begun:
            new = _begin(model, recipe)
            if ranks.main and new:
                console.print(f"New, as {recipe.from_} has none: {', '.join(new)}", markup=False)
        if ranks.main:
            if skipped.total:
                console.print(f"Of the training data, {skipped}", markup=False, soft_wrap=True)
            console.print(_told(use, model, vocabulary, len(rows)), markup=False, soft_wrap=True)
        summary = train_model(
            model,
            data,
            recipe.train,
            run.folder,
            validate=_Validation(use, pieces),
            console=console,
            ranks=ranks,
        )
    if ranks.main:
        console.print(common.next_commands(run, use.does, use.example), markup=False, soft_wrap=True)
    return summary


def load_model(use: Use[Any], device: str = "auto") -> tuple[nn.Module, WordPieces]:
    """The trained model of a run and its tokenizer."""
    config, vocabulary, pieces = _settled(use.run.folder)
    model = use.head(config, vocabulary)
    load_weights(model, use.run.weights)
    return common.placed(model, device), pieces


class _Validation:
    def __init__(self, use: Use[Any], pieces: WordPieces) -> None:
        self.use, self.pieces = use, pieces
        self.split: Split[Any] | None = None  # read when first asked, by the process that validates

    def __call__(self, model: nn.Module) -> Report:
        predictor = self.use.predictor(model, self.pieces)
        if self.split is None:
            self.split = predictor.split("valid")
        report: Report = predictor.report(self.split.examples)
        return report


# ------------------------------------------------------------------------------------- what it begins from


def _prepare(use: Use[Any]) -> list[str]:
    """Settle the sizes, the vocabulary and the classes in the run's folder, unless that is done; notes."""
    run, recipe = use.run, use.recipe
    train = use.train()
    notes = [f"Of the training data, {train.skipped}"] if train.skipped.total else []
    if run.has_begun:
        return notes
    if recipe.from_ is None:
        if recipe.scratch:
            raise InputError(
                "scratch: true takes over sizes and vocabulary, but from: is null, which begins with new "
                "weights anyway; leave scratch out, or name what to take them from"
            )
        config = recipe.model
        pieces = _vocabulary(use, train.examples)
        vocabulary = pieces.size
    else:
        bert, pieces = taken(recipe.from_)
        chosen = {name: getattr(recipe.model, name) for name in CHOSEN}
        config = replace(bert.config, pooler=True, **chosen)
        vocabulary = bert.word_embedding.num_embeddings
    use.longest(config)  # told before anything is written
    labels = use.settle(use.whole)
    pieces.save(run.folder)
    _write(run.folder / "model.json", {"vocabulary": vocabulary, **asdict(config)})
    if labels:
        _write(run.folder / "labels.json", labels)
    return notes


def _vocabulary(use: Use[Any], examples: Sequence[Any]) -> WordPieces:
    text: WordPieceConfig = use.recipe.text
    if text.folder is not None:
        return WordPieces.load(Path(text.folder))
    texts = [one for example in examples[: text.documents] for one in use.texts(example)]
    return WordPieces.train(
        texts,
        text.size,
        lower=text.lower,
        strip_accents=text.strip_accents,
        characters=text.characters,
    )


def _settled(folder: Path) -> tuple[BertConfig, int, WordPieces]:
    """What ``_prepare`` wrote."""
    try:
        told: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        vocabulary: int = told.pop("vocabulary")
        config = BertConfig(**told)
    except FileNotFoundError:
        raise InputError(f"{folder} has no model.json yet: its training has hardly begun") from None
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{folder / 'model.json'} does not describe a BERT: {error}") from None
    return config, vocabulary, WordPieces.load(folder)


def _begin(model: Any, recipe: Any) -> list[str]:
    """Take over the encoder's weights, if the recipe says from where. What of it stays new."""
    if recipe.from_ is None or recipe.scratch:
        return []
    bert, _ = taken(recipe.from_)
    new: list[str] = model.bert.begin_from(bert)
    return new


def _is_packed(recipe: Any, config: BertConfig, rows: Sequence[Row], device: torch.device) -> bool:
    asked: Literal["auto"] | bool = recipe.data.packed
    if asked == "auto":
        longest = max((len(row.ids) for row in rows), default=0)
        return common.packs_fast(config, longest, recipe.train, device)
    return asked


def _check_unchanged(run: Run, data: Examples) -> None:
    """Refuse to go on with other data than the run began with."""
    path = run.folder / "data" / "train.json"
    told = {"rows": len(data), "sha256": hashlib.sha256(data.ids.tobytes()).hexdigest()}
    if run.has_begun and path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != told:
            raise InputError(
                f"the data has changed since {run.folder} began with it; bring it back, or begin anew: --out"
            )
        return
    _write(path, told)


def _write(path: Path, content: Any) -> None:
    with written(path) as part:
        part.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _told(use: Use[Any], model: nn.Module, vocabulary: int, rows: int) -> str:
    weights = sum(weight.numel() for weight in model.parameters())
    origin = use.recipe.from_ if use.recipe.from_ and not use.recipe.scratch else "new weights"
    return f"bert: {weights / 1e6:.1f} M weights ({origin}), vocabulary of {vocabulary:,}, {rows:,} texts"
