"""What BERT's uses have in common: what they begin from, and how long texts are read.

A use (:mod:`.classify`, :mod:`.tag`, :mod:`.answer`) says which head learns its examples, and what a model
reads of them. The rest is here, and what other models have too in :mod:`.supervised`. ::

    from      a run of ours, or a Hugging Face folder    ►  sizes, vocabulary, weights of the encoder
              package:NAME, such a folder in a package   ►  the same
              null                                       ►  sizes of ``model:``, a vocabulary learned here

In the run's folder lie ``tokenizer.json`` and ``model.json`` (the sizes).
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import pydantic
import torch
from torch import nn

from jumok.annotated import Texts
from jumok.data.examples import Examples, Row
from jumok.data.formats import Flaw
from jumok.data.wordpiece import WordPieceConfig, WordPieces
from jumok.errors import InputError
from jumok.files import read_json
from jumok.models.bert import BertConfig
from jumok.tasks import common, supervised
from jumok.tasks.origin import From, taken
from jumok.tasks.supervised import Named, Search, Split, Use, load_model, train
from jumok.training import Ranks

__all__ = ["TOO_LONG", "BertUse", "From", "LabelledData", "Named", "Search", "Split", "load_model", "train"]

TOO_LONG = "shorten it, or train with data.long=window, which reads it in windows"  # a text is
CHOSEN = (
    "dropout",
    "attention_dropout",
    "pooling",
    "adversarial",
)  # of ``model:``, where a model is taken over
E = TypeVar("E")  # an example


@dataclass(frozen=True)
class LabelledData(supervised.LabelledData):
    """What the ``data:`` sections of BERT's uses have: a model reads so many tokens, and no more."""

    longest: int | None = None  # tokens of a text; None: as many as the model has positions
    long: Literal["window", "refuse"] = "window"  # what becomes of a longer one
    stride: int = 128  # tokens from the beginning of one window to that of the next
    packed: Literal["auto"] | bool = "auto"  # texts end to end; auto: where a GPU is faster with it

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("stride", "longest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: 1 or more is expected")


class BertUse(Use[E]):
    """One way to use BERT, for one run."""

    batch: ClassVar[type[Texts]]

    @abstractmethod
    def texts(self, example: E) -> Iterable[str]:
        """What a vocabulary is learned from."""

    @abstractmethod
    def head(self, config: BertConfig, vocabulary: int) -> nn.Module:
        """A new model."""

    @abstractmethod
    def rows(self, examples: Sequence[E], pieces: WordPieces, longest: int) -> Iterator[list[Row] | Flaw]:
        """What a model reads of each example: one row, or several windows."""

    def longest(self, config: BertConfig) -> int:
        """The most tokens that are read at once, [CLS] and [SEP] included."""
        asked: int | None = self.recipe.data.longest
        if asked is not None and asked > config.positions:
            raise InputError(
                f"data.longest is {asked}, and the model has {config.positions} positions; "
                "data.longest=null takes as many"
            )
        return asked or config.positions

    def prepare(self, train: Split[E]) -> None:
        recipe, folder = self.recipe, self.run.folder
        if recipe.from_ is None:
            if recipe.scratch:
                raise InputError(
                    "scratch: true takes over sizes and vocabulary, but from: is null, which begins with new "
                    "weights anyway; leave scratch out, or name what to take them from"
                )
            config = recipe.model
            pieces = self._vocabulary(train.examples)
            vocabulary = pieces.size
        else:
            bert, pieces = taken(recipe.from_)
            chosen = {name: getattr(recipe.model, name) for name in CHOSEN}
            config = replace(bert.config, pooler=True, **chosen)
            vocabulary = bert.word_embedding.num_embeddings
        self.longest(config)  # told before anything is written
        pieces.save(folder)
        supervised.write(folder / "model.json", {"vocabulary": vocabulary, **asdict(config)})

    def _vocabulary(self, examples: Sequence[E]) -> WordPieces:
        text: WordPieceConfig = self.recipe.text
        if text.folder is not None:
            return WordPieces.load(Path(text.folder))
        texts = [one for example in examples[: text.documents] for one in self.texts(example)]
        return WordPieces.train(
            texts,
            text.size,
            lower=text.lower,
            strip_accents=text.strip_accents,
            characters=text.characters,
        )

    def made(self) -> tuple[nn.Module, WordPieces]:
        config, vocabulary, pieces = _settled(self.run.folder)
        return self.head(config, vocabulary), pieces

    def begin(self, model: Any, tokenizer: WordPieces) -> str | None:
        if self.recipe.from_ is None or self.recipe.scratch:
            return None
        bert, _ = taken(self.recipe.from_)
        new: list[str] = model.bert.begin_from(bert)
        return f"New, as {self.recipe.from_} has none: {', '.join(new)}" if new else None

    def learnable(self, encoded: Sequence[list[Row]], model: Any, ranks: Ranks) -> Examples:
        config: BertConfig = model.bert.config
        rows = [row for some in encoded for row in some]
        layout = common.layout(self.run, ranks, _is_packed(self.recipe, config, rows, ranks.device))
        train = self.recipe.train
        return Examples(
            self.batch, rows, tokens=train.tokens, seed=train.seed, longest=self.longest(config), **layout
        )

    def told(self, model: nn.Module, tokenizer: WordPieces, texts: int) -> str:
        weights = sum(weight.numel() for weight in model.parameters())
        origin = self.recipe.from_ if self.recipe.from_ and not self.recipe.scratch else "new weights"
        vocabulary = _settled(self.run.folder)[1]
        return (
            f"bert: {weights / 1e6:.1f} M weights ({origin}), vocabulary of {vocabulary:,}, {texts:,} texts"
        )


def _settled(folder: Path) -> tuple[BertConfig, int, WordPieces]:
    """What ``prepare`` wrote."""
    path = folder / "model.json"
    if not path.is_file():
        raise InputError(f"{folder} has no model.json yet: its training has hardly begun")
    told: dict[str, Any] = read_json(path, dict)
    try:
        vocabulary = operator.index(told.pop("vocabulary"))
        config = pydantic.TypeAdapter(BertConfig).validate_python(told)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} does not describe a BERT: {error}") from None
    return config, vocabulary, WordPieces.load(folder)


def _is_packed(recipe: Any, config: BertConfig, rows: Sequence[Row], device: torch.device) -> bool:
    asked: Literal["auto"] | bool = recipe.data.packed
    if asked == "auto":
        longest = max((len(row.ids) for row in rows), default=0)
        return common.packs_fast(config, longest, recipe.train, device)
    return asked
