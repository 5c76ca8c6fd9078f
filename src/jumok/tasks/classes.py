"""Classes, or a number, for texts and pairs of texts: what all models that say them have in common.

How a model reads a text is its own: :mod:`.classify` has BERT's way, :mod:`.attentive` that of models of
words.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from jumok.data import decisive, labelled
from jumok.data.formats import Flaw
from jumok.data.labelled import Columns, Labels, Sample, unescaped
from jumok.errors import InputError
from jumok.metrics.correlation import pearson, spearman
from jumok.tasks import judging
from jumok.tasks.reader import Prediction, Reader, texts_of
from jumok.tasks.supervised import LabelledData, Named, Search, Use
from jumok.tasks.verdicts import Judgement

__all__ = ["AT_ONCE", "ClassReader", "Classes", "Labelling", "ScoreConfig", "TextData"]

Column = str | int | list[str | int]
AT_ONCE = 1024  # texts that are read together
SHOWN = 3  # sample labels a validation
SEED = 1  # of the built-in data


@dataclass(frozen=True)
class TextData(LabelledData):
    """What the ``data:`` sections of classification have. Columns are told as in :mod:`jumok.data.tables`."""

    text: Column = "text"
    pair: Column | None = None  # the second text
    label: Column = "label"
    header: bool | None = None  # whether the first line of a table names its columns; null: if they are named
    labels: list[str] | dict[str, str] | None = (
        None  # how classes are written, and called; null: as they come
    )
    regression: bool = False  # labels are numbers
    unescape: bool = False  # -lrb- is read as (, and so on: some data is from a treebank
    documents: int = 4000  # of the built-in data, see jumok.data.decisive

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regression and self.labels is not None:
            raise ValueError("regression has no classes: leave labels out")
        if self.documents < 1:
            raise ValueError(f"documents={self.documents}: 1 or more is expected")


@dataclass(frozen=True)
class ScoreConfig:
    """The ``score:`` section: the figure that decides which weights are best."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    best: Literal["auto", "accuracy", "f1", "macro_f1", "spearman", "pearson"] = "auto"
    positive: str | None = None  # the class whose F1 is told; null: with two classes, the second


# ------------------------------------------------------------------------------------------------- the use


class Classes(Use[Sample]):
    """Labels of texts, for one run."""

    does = "label a text"
    kind = Sample

    @property
    def example(self) -> str:
        return "…" if self.recipe.data.pair is None else "… ||| …"

    @functools.cached_property
    def known(self) -> Labels:
        """The classes; one that stands for a number, in regression."""
        said = self.recipe.data.labels
        return Labels.named(self.labels if said is None else said)

    @property
    def outputs(self) -> int:
        """How many numbers a model says of a text."""
        return 1 if self.recipe.data.regression else len(self.known)

    def read(self, named: Named, split: str) -> Iterator[Sample | Flaw]:
        data: TextData = self.recipe.data
        if isinstance(named, str) and named in decisive.LANGUAGES:
            found = _built_in(named, data)
        else:
            columns = Columns(data.text, data.label, data.pair, data.header)
            found = labelled.find(named, columns, regression=data.regression, split=split)
        if data.regression or (split == "train" and data.labels is None and not self.run.has_begun):
            return found
        return self.known.check(found)

    def key(self, example: Sample) -> str:
        return f"{example.text}\t{example.pair or ''}"

    def texts(self, example: Sample) -> Iterable[str]:
        """One text or two, as a model gets them."""
        texts = [example.text] if example.pair is None else [example.text, example.pair]
        return map(unescaped, texts) if self.recipe.data.unescape else texts

    def settle(self, examples: Sequence[Sample]) -> list[str]:
        data: TextData = self.recipe.data
        if data.regression:
            return []
        known = Labels.seen(examples) if data.labels is None else Labels.named(data.labels)
        positive = self.recipe.score.positive
        if positive is not None and positive not in known.names:
            raise InputError(f"score.positive is {positive!r}; the classes are {', '.join(known.names)}")
        return list(known.names)

    def number(self, example: Sample) -> int | float:
        """The label as a model learns it."""
        return example.label if isinstance(example.label, float) else self.known.number(example.label)


def _built_in(name: str, data: TextData) -> Iterator[Sample | Flaw]:
    if data.pair is not None or data.regression:
        raise InputError(f"data: {name} are single texts with classes: leave pair and regression out")
    for number, made in enumerate(decisive.documents(SEED, data.documents, name), 1):
        yield Sample(made.text, None, made.label, f"{name}:{number}")


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
        return next(self.label([(text, pair)]))

    def label(self, texts: Sequence[tuple[str, str | None]]) -> Iterator[Labelling]:
        """The same for many of them, in their order; each comes with its second text, or None."""
        return self._labelled([self._sample(*both) for both in texts], [text for text, _ in texts])

    def length(self, text: str, pair: str | None = None) -> int:
        """How many tokens the model reads of a text, or of two; what it cannot read is an error."""
        raise NotImplementedError

    def predict(
        self, lines: Iterable[str], search: Search, *, align: bool = False, first: int = 0
    ) -> Iterator[Labelling]:
        """A label for every line, in their order. The two texts of a pair have a tab or ||| between them."""
        if search.n_best > 1 and self.use.recipe.data.regression:
            raise InputError("--n-best: this model says one number of a text")
        numbered = enumerate(lines, first)
        while window := list(itertools.islice(numbered, AT_ONCE)):
            samples = [self.of_line(line, number) for number, line in window]
            for one in self._labelled(samples, [line for _, line in window], window[0][0]):
                most = search.n_best if search.n_best > 1 else len(one.classes)
                yield replace(one, classes=one.classes[:most])

    def said(self, samples: Sequence[Sample], first: int | None) -> NDArray[np.float64]:
        """``(N, C)``: probabilities, or the number said; ``first`` is the number of the first line."""
        raise NotImplementedError

    def judge(self, examples: Sequence[Sample]) -> Judgement:
        said = self.said(examples, None)
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

    def of_line(self, line: str, number: int = 0) -> Sample:
        """A line as an example, whose label nobody looks at."""
        if self.use.recipe.data.pair is None:
            return self._sample(line, None)
        texts = texts_of(line)
        if len(texts) != 2:
            raise InputError(
                f"line {number + 1} has {len(texts)} text{'s' * (len(texts) != 1)}; this model reads two, "
                "with a tab or ||| between them"
            )
        return self._sample(*texts)

    def _labelled(
        self, samples: Sequence[Sample], lines: Sequence[str], first: int = 0
    ) -> Iterator[Labelling]:
        for number, (line, said) in enumerate(zip(lines, self.said(samples, first), strict=True), first):
            if self.use.recipe.data.regression:
                yield Labelling(number, line, value=float(said[0]))
            else:
                order = np.argsort(-said, kind="stable")
                names = self.use.known.names
                yield Labelling(number, line, tuple((names[at], float(said[at])) for at in order))

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
