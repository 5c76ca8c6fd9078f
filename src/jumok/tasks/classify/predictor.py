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

from jumok.data.builtin import decisive_words
from jumok.data.readers import classification
from jumok.data.readers.classification import (
    ClassificationColumns,
    ClassificationExample,
    LabelSet,
    unescape_treebank,
)
from jumok.data.readers.formats import InvalidExample
from jumok.errors import InputError
from jumok.metrics.correlation import pearson, spearman
from jumok.tasks.base import Evaluation
from jumok.tasks.classify import metrics as classify_metrics
from jumok.tasks.predictors import Prediction, SupervisedPredictor, split_pair
from jumok.tasks.supervised import DataSource, NBestOptions, SupervisedDataConfig, SupervisedTask

__all__ = [
    "TEXTS_PER_CHUNK",
    "ClassificationDataConfig",
    "ClassificationEvaluationConfig",
    "ClassificationPrediction",
    "ClassificationPredictor",
    "ClassificationTask",
]

ColumnName = str | int | list[str | int]
TEXTS_PER_CHUNK = 1024  # texts that are read together
NUM_SAMPLES = 3  # sample labels a validation
BUILTIN_SEED = 1  # of the built-in data


@dataclass(frozen=True)
class ClassificationDataConfig(SupervisedDataConfig):
    """What the ``data:`` sections of classification have. Columns are told as in :mod:`jumok.data.readers.tables`."""

    text_column: ColumnName = "text"
    pair_column: ColumnName | None = None  # the second text
    label_column: ColumnName = "label"
    has_header: bool | None = (
        None  # whether the first line of a table names its columns; null: if they are named
    )
    label_names: list[str] | dict[str, str] | None = (
        None  # how classes are written, and called; null: as they come
    )
    regression: bool = False  # labels are numbers
    unescape_treebank: bool = False  # -lrb- is read as (, and so on: some data is from a treebank
    builtin_size: int = 4000  # of the built-in data, see jumok.data.builtin.decisive_words

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regression and self.label_names is not None:
            raise ValueError("regression has no classes: leave label_names out")
        if self.builtin_size < 1:
            raise ValueError(f"builtin_size={self.builtin_size}: 1 or more is expected")


@dataclass(frozen=True)
class ClassificationEvaluationConfig:
    """The ``evaluation:`` section: the figure that decides which weights are best."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    select_by: Literal["auto", "accuracy", "f1", "macro_f1", "spearman", "pearson"] = "auto"
    positive_label: str | None = None  # the class whose F1 is told; null: with two classes, the second


# ------------------------------------------------------------------------------------------------- the use


class ClassificationTask(SupervisedTask[ClassificationExample]):
    """Labels of texts, for one run."""

    description = "label a text"
    example_type = ClassificationExample

    @property
    def input_example(self) -> str:
        return "…" if self.recipe.data.pair_column is None else "… ||| …"

    @functools.cached_property
    def label_set(self) -> LabelSet:
        """The classes; one that stands for a number, in regression."""
        said = self.recipe.data.label_names
        return LabelSet.from_config(self.labels if said is None else said)

    @property
    def num_outputs(self) -> int:
        """How many numbers a model says of a text."""
        return 1 if self.recipe.data.regression else len(self.label_set)

    def read_examples(
        self, data_source: DataSource, split_name: str
    ) -> Iterator[ClassificationExample | InvalidExample]:
        data: ClassificationDataConfig = self.recipe.data
        if isinstance(data_source, str) and data_source in decisive_words.LANGUAGES:
            found = _read_builtin(data_source, data)
        else:
            columns = ClassificationColumns(
                data.text_column, data.label_column, data.pair_column, data.has_header
            )
            found = classification.read_classification_examples(
                data_source, columns, regression=data.regression, split=split_name
            )
        if data.regression or (
            split_name == "train" and data.label_names is None and not self.run.has_checkpoint
        ):
            return found
        return self.label_set.check_examples(found)

    def get_split_key(self, example: ClassificationExample) -> str:
        return f"{example.text}\t{example.pair or ''}"

    def get_texts(self, example: ClassificationExample) -> Iterable[str]:
        """One text or two, as a model gets them."""
        texts = [example.text] if example.pair is None else [example.text, example.pair]
        return map(unescape_treebank, texts) if self.recipe.data.unescape_treebank else texts

    def collect_labels(self, examples: Sequence[ClassificationExample]) -> list[str]:
        data: ClassificationDataConfig = self.recipe.data
        if data.regression:
            return []
        known = (
            LabelSet.from_examples(examples)
            if data.label_names is None
            else LabelSet.from_config(data.label_names)
        )
        positive = self.recipe.evaluation.positive_label
        if positive is not None and positive not in known.names:
            raise InputError(f"evaluation.positive_label is {positive!r}; the classes are {', '.join(known.names)}")
        return list(known.names)

    def get_target(self, example: ClassificationExample) -> int | float:
        """The label as a model learns it."""
        return example.label if isinstance(example.label, float) else self.label_set.index(example.label)


def _read_builtin(
    name: str, config: ClassificationDataConfig
) -> Iterator[ClassificationExample | InvalidExample]:
    if config.pair_column is not None or config.regression:
        raise InputError(f"data: {name} are single texts with classes: leave pair_column and regression out")
    for number, made in enumerate(
        decisive_words.generate_documents(BUILTIN_SEED, config.builtin_size, name), 1
    ):
        yield ClassificationExample(made.text, None, made.label, f"{name}:{number}")


# ------------------------------------------------------------------------------------------------- at work


@dataclass(frozen=True)
class ClassificationPrediction(Prediction):
    """What is said of a line: classes, the likeliest first, with their probabilities; or a number."""

    classes: tuple[tuple[str, float], ...] = ()
    value: float | None = None

    @property
    def label(self) -> str:
        return self.classes[0][0]

    def format_lines(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        if as_json:
            known: dict[str, Any] = {"line": self.index, "text": self.input}
            if self.value is None:
                known |= {"label": self.label, "probability": self.classes[0][1]}
                known["classes"] = dict(self.classes)
            else:
                known["value"] = self.value
            yield json.dumps(known, ensure_ascii=False)
        elif self.value is not None:
            yield f"{self.value:.4f}"
        elif n_best:
            yield from (f"{self.index} ||| {name} ||| {share:.4f}" for name, share in self.classes)
        else:
            yield f"{self.label}\t{self.classes[0][1]:.4f}"


class ClassificationPredictor(SupervisedPredictor):
    """A model that labels texts.

    >>> reader = jumok.load("runs/bert-sst2")  # doctest: +SKIP
    >>> reader.classify("a film that makes you happy").label  # doctest: +SKIP
    'positive'
    """

    @property
    def labels(self) -> Sequence[str]:
        return () if self.task.recipe.data.regression else self.task.label_set.names

    def classify(self, text: str, text_pair: str | None = None) -> ClassificationPrediction:
        """One text, or a pair; many of them by :meth:`predict`."""
        return next(self.classify_texts([(text, text_pair)]))

    def classify_texts(self, texts: Sequence[tuple[str, str | None]]) -> Iterator[ClassificationPrediction]:
        """The same for many of them, in their order; each comes with its second text, or None."""
        return self._build_predictions(
            [self._build_sample(*both) for both in texts], [text for text, _ in texts]
        )

    def count_tokens(self, text: str, text_pair: str | None = None) -> int:
        """How many tokens the model reads of a text, or of two; what it cannot read is an error."""
        raise NotImplementedError

    def predict(
        self,
        lines: Iterable[str],
        options: NBestOptions,
        *,
        with_attention: bool = False,
        first_index: int = 0,
    ) -> Iterator[ClassificationPrediction]:
        """A label for every line, in their order. The two texts of a pair have a tab or ||| between them."""
        if options.n_best > 1 and self.task.recipe.data.regression:
            raise InputError("--n-best: this model says one number of a text")
        numbered = enumerate(lines, first_index)
        while window := list(itertools.islice(numbered, TEXTS_PER_CHUNK)):
            samples = [self.parse_line(line, number) for number, line in window]
            for one in self._build_predictions(samples, [line for _, line in window], window[0][0]):
                most = options.n_best if options.n_best > 1 else len(one.classes)
                yield replace(one, classes=one.classes[:most])

    def predict_outputs(
        self, samples: Sequence[ClassificationExample], first_index: int | None
    ) -> NDArray[np.float64]:
        """``(N, C)``: probabilities, or the number said; ``first_index`` is the number of the first line."""
        raise NotImplementedError

    def score_examples(self, examples: Sequence[ClassificationExample]) -> Evaluation:
        said = self.predict_outputs(examples, None)
        if self.task.recipe.data.regression:
            return self._score_regression(examples, said[:, 0])
        return self._score_classes(examples, said)

    # ------------------------------------------------------------------------------------------------------

    def _build_sample(self, text: str, text_pair: str | None) -> ClassificationExample:
        wants = self.task.recipe.data.pair_column is not None
        if wants != (text_pair is not None):
            raise InputError(
                "this model reads two texts" if wants else "this model reads one text, and two came"
            )
        label = 0.0 if self.task.recipe.data.regression else self.task.label_set.raw_labels[0]  # not looked at
        return ClassificationExample(
            text.strip(), None if text_pair is None else text_pair.strip(), label, ""
        )

    def parse_line(self, line: str, index: int = 0) -> ClassificationExample:
        """A line as an example, whose label nobody looks at."""
        if self.task.recipe.data.pair_column is None:
            return self._build_sample(line, None)
        texts = split_pair(line)
        if len(texts) != 2:
            raise InputError(
                f"line {index + 1} has {len(texts)} text{'s' * (len(texts) != 1)}; this model reads two, "
                "with a tab or ||| between them"
            )
        return self._build_sample(*texts)

    def _build_predictions(
        self, samples: Sequence[ClassificationExample], lines: Sequence[str], first_index: int = 0
    ) -> Iterator[ClassificationPrediction]:
        for number, (line, said) in enumerate(
            zip(lines, self.predict_outputs(samples, first_index), strict=True), first_index
        ):
            if self.task.recipe.data.regression:
                yield ClassificationPrediction(number, line, value=float(said[0]))
            else:
                order = np.argsort(-said, kind="stable")
                names = self.task.label_set.names
                yield ClassificationPrediction(
                    number, line, tuple((names[at], float(said[at])) for at in order)
                )

    def _score_regression(
        self, examples: Sequence[ClassificationExample], predictions: NDArray[np.float64]
    ) -> Evaluation:
        truth = np.array([one.label for one in examples], np.float64)
        figures = {
            "spearman": spearman(truth, predictions),
            "pearson": pearson(truth, predictions),
            "root_mean_squared_error": math.sqrt(((truth - predictions) ** 2).mean()),
        }
        asked = self.task.recipe.evaluation.select_by
        best = "spearman" if asked == "auto" else asked
        if best not in figures:
            raise InputError(f"evaluation.select_by is {best!r}; of numbers there are spearman and pearson")
        measure = {"spearman": spearman, "pearson": pearson}[best]
        return Evaluation(
            figures,
            best,
            lambda some: measure(truth[some], predictions[some]),
            [
                classify_metrics.format_output_line(one, float(value), one.label)
                for one, value in zip(examples, predictions, strict=True)
            ],
            [
                f"  {classify_metrics.format_sample(one)}  said {value:.2f}, wanted {one.label}"
                for one, value in zip(examples[:NUM_SAMPLES], predictions, strict=False)
            ],
        )

    def _score_classes(
        self, examples: Sequence[ClassificationExample], probabilities: NDArray[np.float64]
    ) -> Evaluation:
        known: LabelSet = self.task.label_set
        truth = np.array([known.index(one.label) for one in examples])
        score: ClassificationEvaluationConfig = self.task.recipe.evaluation
        return classify_metrics.score_classes(
            examples,
            truth,
            probabilities,
            known.names,
            select_by=score.select_by,
            positive_label=score.positive_label,
        )
