"""The task of classification: a label, or a number, for a text or for a pair of texts.

::

    a film that makes you happy          →   positive  0.98         single sentence (SST-2, NSMC)
    He is old.   ⇥   He is young.        →   different  0.91        pair (MRPC, RTE)
    A man eats.  ⇥   Somebody eats.      →   3.8                    pair, ``regression`` (STS)

Which model reads the texts, ``model.kind`` says: bert (if none is said), selfattentive or hierarchical. Their
recipes differ in what a text is to them. To BERT, pieces: a text longer than the model reads is refused, or
read in windows whose probabilities are averaged; each window is then learned from as a text of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from jumok.annotated import Labelled
from jumok.data.examples import Row
from jumok.data.formats import Flaw
from jumok.data.labelled import Sample
from jumok.data.windows import windows
from jumok.data.wordpiece import WordPieceConfig, WordPieces
from jumok.errors import InputError
from jumok.models.bert import BertConfig, Classifier
from jumok.run import Run
from jumok.tasks import attentive, supervised, verdicts
from jumok.tasks.attentive import Attentive
from jumok.tasks.classes import AT_ONCE, Classes, ClassReader, ScoreConfig, TextData
from jumok.tasks.fine_tuning import TOO_LONG, BertUse, From, LabelledData, Search
from jumok.tasks.objects import of_pairs as objects_of
from jumok.tasks.reader import BertReader
from jumok.tasks.verdicts import Judgement
from jumok.training import Settings, Summary

__all__ = ["BertRecipe", "Recipe", "Search", "compare", "evaluate", "load", "objects_of", "train"]


@dataclass(frozen=True)
class DataConfig(TextData, LabelledData):
    """The ``data:`` section."""

    long: Literal["window", "refuse"] = "refuse"
    both_ways: bool = False  # a pair is read both ways round: learned from twice, and labelled by the mean

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.both_ways and self.pair is None:
            raise ValueError("both_ways: only pairs can be read so; name the second text with pair")


@dataclass(frozen=True)
class BertRecipe:
    """Everything that a classification run of BERT's depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["classify"]
    data: DataConfig
    # A run or a Hugging Face folder; null: new weights, and a vocabulary learned from the data.
    from_: From = None
    scratch: bool = False  # take over sizes and vocabulary only: new weights, to compare with
    model: BertConfig = field(
        default_factory=BertConfig
    )  # with ``from``, only dropouts, pooling and adversarial count
    text: WordPieceConfig = field(default_factory=WordPieceConfig)
    train: Settings = field(default_factory=Settings)
    score: ScoreConfig = field(default_factory=ScoreConfig)


# By the kind of the model; the first is meant where none is said.
Recipe: dict[str, type] = {"bert": BertRecipe, **attentive.RECIPES}


def train(run: Run, console: Console) -> Summary:
    """Train the model of a run, or go on with it."""
    return supervised.train(_use(run), console)


def load(run: Run, device: str = "auto") -> ClassReader:
    """The trained model of a run, ready to label texts."""
    use = _use(run)
    return use.predictor(*supervised.load_model(use, device))


def evaluate(predictor: ClassReader, split: str, search: Search, console: Console) -> Judgement:
    """Score a run, and keep what it said."""
    return verdicts.evaluate(predictor, split, console)


def compare(
    runs: Sequence[Run], split: str, search: Search, out: Path, device: str, console: Console
) -> None:
    """Runs on the same data."""
    verdicts.compare(runs, load, split, out, device, console)


def _use(run: Run) -> Classify | Attentive:
    return Classify(run) if isinstance(run.recipe, BertRecipe) else Attentive(run)


# ---------------------------------------------------------------------------------------------- BERT's way


class Classify(Classes, BertUse[Sample]):
    """BERT's labels of texts, for one run."""

    batch = Labelled

    def head(self, config: BertConfig, vocabulary: int) -> nn.Module:
        try:
            return Classifier(config, vocabulary, self.outputs)
        except ValueError as error:
            raise InputError(f"model: {error}") from None

    def rows(
        self, examples: Iterable[Sample], pieces: WordPieces, longest: int
    ) -> Iterator[list[Row] | Flaw]:
        examples = iter(examples)
        while some := list(itertools.islice(examples, AT_ONCE)):
            encoded = iter(pieces.encode([text for one in some for text in self.texts(one)]))
            for one in some:
                given = [next(encoded) for _ in self.texts(one)]
                found = self._windows(given, longest, one.where)
                if isinstance(found, Flaw):
                    yield found
                    continue
                label = self.number(one)
                if self.recipe.data.both_ways:
                    found = [*found, *([second, first] for first, second in found)]
                yield [Row(*pieces.joined(*each), {"labels": label}) for each in found]

    def _windows(self, given: list[list[int]], longest: int, where: str) -> list[list[list[int]]] | Flaw:
        """One or two texts as they fit into the model, in several windows if need be."""
        room = longest - 1 - len(given)
        length = sum(map(len, given))
        if length <= room:
            return [given]
        data: DataConfig = self.recipe.data
        over = f"{length + longest - room} tokens, and {longest} are read at once"
        if data.long == "refuse":
            return Flaw(where, "a text that is too long", f"{over}; {TOO_LONG}")
        longer = max(range(len(given)), key=lambda n: len(given[n]))
        left = room - (length - len(given[longer]))
        if left < min(len(given[longer]), room // 4):
            return Flaw(where, "two texts that are too long", f"{over}, windows of the longer one included")
        parts = windows(len(given[longer]), left, data.stride)
        return [
            [text[begin:end] if n == longer else text for n, text in enumerate(given)] for begin, end in parts
        ]

    def predictor(self, model: nn.Module, tokenizer: WordPieces) -> BertClassReader:
        return BertClassReader(self, model, tokenizer)


class BertClassReader(ClassReader, BertReader):
    """A BERT that labels texts."""

    def windows(self, text: str) -> list[Row]:
        rows: list[Row]
        [rows] = self.encoded(self.encode([self.of_line(text)]))
        return rows

    def length(self, text: str, pair: str | None = None) -> int:
        [rows] = self.encoded(self.encode([self._sample(text, pair)]))
        return sum(len(row.ids) for row in rows)

    def said(self, samples: Sequence[Sample], first: int | None) -> NDArray[np.float64]:
        """Of a text in several windows, or read both ways, the mean over these."""
        rows = self.encoded(self.encode(samples), first)
        said = iter(
            self.outputs([row for some in rows for row in some], lambda batch: [self.model.logits(batch)])
        )
        found = []
        for some in rows:
            logits = np.array([next(said)[0].double().numpy() for _ in some])
            if not self.use.recipe.data.regression:
                logits = np.exp(logits - logits.max(1, keepdims=True))
                logits /= logits.sum(1, keepdims=True)
            found.append(logits.mean(0))
        return np.array(found)
