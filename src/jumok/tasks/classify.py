"""The task of classification: a label, or a number, for a text or for a pair of texts.

::

    a film that makes you happy          →   positive  0.98         single sentence (SST-2, NSMC)
    He is old.   ⇥   He is young.        →   different  0.91        pair (MRPC, RTE)
    A man eats.  ⇥   Somebody eats.      →   3.8                    pair, ``regression`` (STS)

A text longer than the model reads is refused, or read in windows whose probabilities are averaged; each
window is then learned from as a text of its own.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from jumok.annotated import Labelled
from jumok.data import labelled
from jumok.data.examples import Row
from jumok.data.formats import Flaw
from jumok.data.labelled import Columns, Labels, Sample, unescaped
from jumok.data.windows import windows
from jumok.data.wordpiece import WordPieceConfig, WordPieces
from jumok.errors import InputError
from jumok.metrics.correlation import pearson, spearman
from jumok.models.bert import BertConfig, Classifier
from jumok.run import Run
from jumok.tasks import fine_tuning, judging, verdicts
from jumok.tasks.fine_tuning import From, LabelledData, Named, Search, Use
from jumok.tasks.reader import Prediction, Reader, texts_of
from jumok.tasks.verdicts import Judgement
from jumok.training import Settings, Summary

__all__ = ["Recipe", "Search", "compare", "evaluate", "load", "train"]

Column = str | int | list[str | int]
AT_ONCE = 1024  # texts that are tokenised together
SHOWN = 3  # sample labels a validation


@dataclass(frozen=True)
class DataConfig(LabelledData):
    """The ``data:`` section. Columns are told as in :mod:`jumok.data.tables`."""

    text: Column = "text"
    pair: Column | None = None  # the second text
    label: Column = "label"
    header: bool | None = None  # whether the first line of a table names its columns; null: if they are named
    labels: list[str] | dict[str, str] | None = (
        None  # how classes are written, and called; null: as they come
    )
    regression: bool = False  # labels are numbers
    unescape: bool = False  # -lrb- is read as (, and so on: some data is from a treebank
    long: Literal["window", "refuse"] = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regression and self.labels is not None:
            raise ValueError("regression has no classes: leave labels out")


@dataclass(frozen=True)
class ScoreConfig:
    """The ``score:`` section: the figure that decides which weights are best."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    best: Literal["auto", "accuracy", "f1", "macro_f1", "spearman", "pearson"] = "auto"
    positive: str | None = None  # the class whose F1 is told; null: with two classes, the second


@dataclass(frozen=True)
class Recipe:
    """Everything that a classification run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["classify"]
    data: DataConfig
    # A run or a Hugging Face folder; null: new weights, and a vocabulary learned from the data.
    from_: From = None
    scratch: bool = False  # take over sizes and vocabulary only: new weights, to compare with
    model: BertConfig = field(default_factory=BertConfig)  # with ``from``, only dropouts and pooling count
    text: WordPieceConfig = field(default_factory=WordPieceConfig)
    train: Settings = field(default_factory=Settings)
    score: ScoreConfig = field(default_factory=ScoreConfig)


def train(run: Run, console: Console) -> Summary:
    """Train the model of a run, or go on with it."""
    return fine_tuning.train(Classify(run), console)


def load(run: Run, device: str = "auto") -> ClassReader:
    """The trained model of a run, ready to label texts."""
    use = Classify(run)
    return ClassReader(use, *fine_tuning.load_model(use, device))


def evaluate(predictor: ClassReader, split: str, search: Search, console: Console) -> Judgement:
    """Score a run, and keep what it said."""
    return verdicts.evaluate(predictor, split, console)


def compare(
    runs: Sequence[Run], split: str, search: Search, out: Path, device: str, console: Console
) -> None:
    """Runs on the same data."""
    verdicts.compare(runs, load, split, out, device, console)


# ------------------------------------------------------------------------------------------------- the use


class Classify(Use[Sample]):
    """Labels of texts, for one run."""

    does = "label a text"
    batch = Labelled

    @property
    def example(self) -> str:
        return "…" if self.recipe.data.pair is None else "… ||| …"

    @functools.cached_property
    def known(self) -> Labels:
        """The classes; one that stands for a number, in regression."""
        said = self.recipe.data.labels
        return Labels.named(self.labels if said is None else said)

    def read(self, named: Named, split: str) -> Iterator[Sample | Flaw]:
        data: DataConfig = self.recipe.data
        columns = Columns(data.text, data.label, data.pair, data.header)
        found = labelled.find(named, columns, regression=data.regression, split=split)
        if data.regression or (split == "train" and data.labels is None and not self.run.has_begun):
            return found
        return self.known.check(found)

    def key(self, example: Sample) -> str:
        return f"{example.text}\t{example.pair or ''}"

    def texts(self, example: Sample) -> Iterable[str]:
        texts = [example.text] if example.pair is None else [example.text, example.pair]
        return map(unescaped, texts) if self.recipe.data.unescape else texts

    def settle(self, examples: Sequence[Sample]) -> list[str]:
        data: DataConfig = self.recipe.data
        if data.regression:
            return []
        known = Labels.seen(examples) if data.labels is None else Labels.named(data.labels)
        positive = self.recipe.score.positive
        if positive is not None and positive not in known.names:
            raise InputError(f"score.positive is {positive!r}; the classes are {', '.join(known.names)}")
        return list(known.names)

    def head(self, config: BertConfig, vocabulary: int) -> nn.Module:
        classes = 1 if self.recipe.data.regression else len(self.known)
        try:
            return Classifier(config, vocabulary, classes)
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
                label = one.label if isinstance(one.label, float) else self.known.number(one.label)
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
            return Flaw(where, "a text that is too long", f"{over}; data.long=window reads it in windows")
        longer = max(range(len(given)), key=lambda n: len(given[n]))
        left = room - (length - len(given[longer]))
        if left < min(len(given[longer]), room // 4):
            return Flaw(where, "two texts that are too long", f"{over}, windows of the longer one included")
        parts = windows(len(given[longer]), left, data.stride)
        return [
            [text[begin:end] if n == longer else text for n, text in enumerate(given)] for begin, end in parts
        ]

    def predictor(self, model: nn.Module, pieces: WordPieces) -> ClassReader:
        return ClassReader(self, model, pieces)


# ------------------------------------------------------------------------------------------------- at work


@dataclass(frozen=True)
class Labelling(Prediction):
    """What is said of a line: classes, the likeliest first, with their probabilities; or a number."""

    classes: tuple[tuple[str, float], ...] = ()
    value: float | None = None

    @property
    def label(self) -> str:
        return self.classes[0][0]

    def written(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        if as_json:
            known: dict[str, Any] = {"line": self.number, "text": self.text}
            if self.value is None:
                known |= {"label": self.label, "probability": self.classes[0][1]}
                known["classes"] = dict(self.classes)
            else:
                known["value"] = self.value
            yield json.dumps(known, ensure_ascii=False)
        elif self.value is not None:
            yield f"{self.value:.4f}"
        elif n_best:
            yield from (f"{self.number} ||| {name} ||| {share:.4f}" for name, share in self.classes)
        else:
            yield f"{self.label}\t{self.classes[0][1]:.4f}"


class ClassReader(Reader):
    """A model that labels texts.

    >>> reader = jumok.load("runs/bert-sst2")  # doctest: +SKIP
    >>> reader.classify("a film that makes you happy").label  # doctest: +SKIP
    'positive'
    """

    @property
    def labels(self) -> Sequence[str]:
        return () if self.use.recipe.data.regression else self.use.known.names

    def classify(self, text: str, pair: str | None = None) -> Labelling:
        """One text, or a pair; many of them by :meth:`predict`."""
        return next(self._said([self._sample(text, pair)], [text]))

    def predict(
        self, lines: Iterable[str], search: Search, *, align: bool = False, first: int = 0
    ) -> Iterator[Labelling]:
        """A label for every line, in their order. The two texts of a pair have a tab or ||| between them."""
        if search.n_best > 1 and self.use.recipe.data.regression:
            raise InputError("--n-best: this model says one number of a text")
        numbered = enumerate(lines, first)
        while window := list(itertools.islice(numbered, AT_ONCE)):
            samples = [self._of_line(line, number) for number, line in window]
            for one in self._said(samples, [line for _, line in window], window[0][0]):
                most = search.n_best if search.n_best > 1 else len(one.classes)
                yield replace(one, classes=one.classes[:most])

    def row(self, text: str) -> Row:
        [rows] = self.encoded(self.use.rows([self._of_line(text, 0)], self.tokenizer, self.longest))
        first: Row = rows[0]
        return first

    def judge(self, examples: Sequence[Sample]) -> Judgement:
        said = self._numbers(examples, None)
        if self.use.recipe.data.regression:
            return self._judge_numbers(examples, said[:, 0])
        return self._judge_classes(examples, said)

    # ------------------------------------------------------------------------------------------------------

    def _sample(self, text: str, pair: str | None) -> Sample:
        wants = self.use.recipe.data.pair is not None
        if wants != (pair is not None):
            raise InputError(
                "this model reads two texts" if wants else "this model reads one text, and two came"
            )
        label = 0.0 if self.use.recipe.data.regression else self.use.known.written[0]  # not looked at
        return Sample(text.strip(), None if pair is None else pair.strip(), label, "")

    def _of_line(self, line: str, number: int) -> Sample:
        if self.use.recipe.data.pair is None:
            return self._sample(line, None)
        texts = texts_of(line)
        if len(texts) != 2:
            raise InputError(
                f"line {number + 1} has {len(texts)} text{'s' * (len(texts) != 1)}; this model reads two, "
                "with a tab or ||| between them"
            )
        return self._sample(*texts)

    def _said(self, samples: Sequence[Sample], lines: Sequence[str], first: int = 0) -> Iterator[Labelling]:
        for number, (line, said) in enumerate(zip(lines, self._numbers(samples, first), strict=True), first):
            if self.use.recipe.data.regression:
                yield Labelling(number, line, value=float(said[0]))
            else:
                order = np.argsort(-said, kind="stable")
                names = self.use.known.names
                yield Labelling(number, line, tuple((names[at], float(said[at])) for at in order))

    def _numbers(self, samples: Sequence[Sample], first: int | None) -> NDArray[np.float64]:
        """``(N, C)``: probabilities, or the number said; the mean over the windows of a text."""
        rows = self.encoded(self.use.rows(samples, self.tokenizer, self.longest), first)
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

    def _judge_numbers(self, examples: Sequence[Sample], said: NDArray[np.float64]) -> Judgement:
        truth = np.array([one.label for one in examples], np.float64)
        figures = {
            "spearman": spearman(truth, said),
            "pearson": pearson(truth, said),
            "root_mean_squared_error": math.sqrt(((truth - said) ** 2).mean()),
        }
        asked = self.use.recipe.score.best
        best = "spearman" if asked == "auto" else asked
        if best not in figures:
            raise InputError(f"score.best is {best!r}; of numbers there are spearman and pearson")
        measure = {"spearman": spearman, "pearson": pearson}[best]
        return Judgement(
            figures,
            best,
            lambda some: measure(truth[some], said[some]),
            [judging.line(one, float(value), one.label) for one, value in zip(examples, said, strict=True)],
            [
                f"  {judging.shown(one)}  said {value:.2f}, wanted {one.label}"
                for one, value in zip(examples[:SHOWN], said, strict=False)
            ],
        )

    def _judge_classes(self, examples: Sequence[Sample], shares: NDArray[np.float64]) -> Judgement:
        known: Labels = self.use.known
        truth = np.array([known.number(one.label) for one in examples])
        score: ScoreConfig = self.use.recipe.score
        return judging.judge(examples, truth, shares, known.names, best=score.best, positive=score.positive)
