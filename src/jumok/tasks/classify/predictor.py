"""Predictors of classification: what those of all models have in common."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.readers.classification import ClassificationExample
from jumok.errors import InputError
from jumok.metrics.correlation import pearson, spearman
from jumok.tasks.base import Evaluation, Prediction
from jumok.tasks.classify import metrics as classify_metrics
from jumok.tasks.classify.data import ClassificationTask
from jumok.tasks.jsonl_input import split_pair
from jumok.tasks.options import NBestOptions
from jumok.tasks.predictors import ChunkedPredictor, SupervisedPredictor

TEXTS_PER_CHUNK = 1024  # texts that are encoded together


@dataclass(frozen=True)
class ClassificationPrediction(Prediction):
    """The classes of a line with their probabilities, likeliest first; or a number."""

    classes: tuple[tuple[str, float], ...] = ()
    value: float | None = None

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.classes[0][0]

    def to_dict(self, *, n_best: bool = False) -> dict[str, Any]:
        if self.value is not None:
            return {"value": self.value}
        return {"label": self.label, "probability": self.classes[0][1], "classes": dict(self.classes)}

    def format_lines(self, *, n_best: bool) -> Iterator[str]:
        """The class and its probability, or the number."""
        if self.value is not None:
            yield f"{self.value:.4f}"
        elif n_best:
            yield from (f"{self.index} ||| {name} ||| {probability:.4f}" for name, probability in self.classes)
        else:
            yield f"{self.label}\t{self.classes[0][1]:.4f}"


class ClassificationPredictor(
    SupervisedPredictor[ClassificationPrediction, NBestOptions],
    ChunkedPredictor[ClassificationPrediction, NBestOptions],
):
    """A model that classifies texts.

    >>> classifier = jumok.load("runs/bert-sst2")  # doctest: +SKIP
    >>> classifier.classify("a film that makes you happy").label  # doctest: +SKIP
    'positive'
    """

    task: ClassificationTask[Any]

    @property
    def labels(self) -> Sequence[str]:
        return () if self.task.data_config.regression else self.task.label_set.names

    def classify(self, text: str, text_pair: str | None = None) -> ClassificationPrediction:
        """Classify one text or text pair. For many texts use :meth:`classify_texts` or :meth:`predict`."""
        return next(self.classify_texts([(text, text_pair)]))

    def classify_texts(self, texts: Sequence[tuple[str, str | None]]) -> Iterator[ClassificationPrediction]:
        """Classify texts, each given with its second text or None, in their order."""
        examples = [self._build_example(*pair) for pair in texts]
        return self._build_predictions(examples, [text for text, _ in texts])

    @abstractmethod
    def count_tokens(self, text: str, text_pair: str | None = None) -> int:
        """The number of tokens of a text or text pair. Raise if it is invalid."""

    @abstractmethod
    def predict_outputs(self, samples: Sequence[ClassificationExample], first_index: int | None) -> NDArray[np.float64]:
        """Probabilities ``(N, C)``, or numbers ``(N, 1)``. ``first_index`` is the index of the first line."""

    def predict_chunk(
        self, lines: Sequence[str], options: NBestOptions, first_index: int
    ) -> Iterator[ClassificationPrediction]:
        if options.n_best > 1 and self.task.data_config.regression:
            raise InputError("--n-best: this model predicts one number for a text")
        examples = [self.parse_line(line, index) for index, line in enumerate(lines, first_index)]
        for prediction in self._build_predictions(examples, lines, first_index):
            count = options.n_best if options.n_best > 1 else len(prediction.classes)
            yield replace(prediction, classes=prediction.classes[:count])

    def parse_line(self, line: str, index: int = 0) -> ClassificationExample:
        """Parse a line as an example with an arbitrary label. A tab or ||| separates the two texts of a pair."""
        if not self.task.has_pairs:
            return self._build_example(line, None)
        texts = split_pair(line)
        if len(texts) != 2:
            raise InputError(
                f"line {index + 1} has {len(texts)} text{'s' * (len(texts) != 1)}; this model reads two, "
                "separated by a tab or |||"
            )
        return self._build_example(*texts)

    def _build_example(self, text: str, text_pair: str | None) -> ClassificationExample:
        if self.task.has_pairs != (text_pair is not None):
            raise InputError(
                "this model reads two texts, but got one"
                if self.task.has_pairs
                else "this model reads one text, but got two"
            )
        label = 0.0 if self.task.data_config.regression else self.task.label_set.raw_labels[0]
        second = None if text_pair is None else text_pair.strip()
        return ClassificationExample(text.strip(), second, label, "")

    def _build_predictions(
        self, examples: Sequence[ClassificationExample], lines: Sequence[str], first_index: int = 0
    ) -> Iterator[ClassificationPrediction]:
        outputs = self.predict_outputs(examples, first_index)
        for index, (line, row) in enumerate(zip(lines, outputs, strict=True), first_index):
            if self.task.data_config.regression:
                yield ClassificationPrediction(index, line, value=float(row[0]))
            else:
                names = self.task.label_set.names
                order = np.argsort(-row, kind="stable")
                yield ClassificationPrediction(index, line, tuple((names[i], float(row[i])) for i in order))

    # ---------------------------------------------------------------------------------------------------- scores

    def score_examples(
        self, examples: Sequence[ClassificationExample], options: NBestOptions | None = None, *, detailed: bool = False
    ) -> Evaluation:
        outputs = self.predict_outputs(examples, None)
        if self.task.data_config.regression:
            return self._score_regression(examples, outputs[:, 0])
        label_set, config = self.task.label_set, self.task.recipe.evaluation
        evaluation = classify_metrics.score_classes(
            examples,
            np.array([label_set.index(str(example.label)) for example in examples]),
            outputs,
            label_set.names,
            select_by=config.select_by,
            positive_label=config.positive_label,
            detailed=detailed,
        )
        if not detailed:
            return evaluation
        from jumok.tasks.classify.error_analysis import find_errors, report_errors

        errors = find_errors(examples, outputs, label_set)
        report = functools.partial(report_errors, self, errors, len(examples))
        return replace(evaluation, reports=[report])

    def _score_regression(
        self, examples: Sequence[ClassificationExample], predictions: NDArray[np.float64]
    ) -> Evaluation:
        targets = np.array([example.label for example in examples], np.float64)
        metrics = {
            "spearman": spearman(targets, predictions),
            "pearson": pearson(targets, predictions),
            "root_mean_squared_error": math.sqrt(((targets - predictions) ** 2).mean()),
        }
        setting = self.task.recipe.evaluation.select_by
        select_by = "spearman" if setting == "auto" else setting
        if select_by not in ("spearman", "pearson"):
            raise InputError(f"evaluation.select_by is {select_by!r}; for numbers it is spearman or pearson")
        correlation = {"spearman": spearman, "pearson": pearson}[select_by]
        return Evaluation(
            metrics,
            select_by,
            statistic=lambda indices: correlation(targets[indices], predictions[indices]),
            outputs=[
                classify_metrics.format_output_line(example, float(value), example.label)
                for example, value in zip(examples, predictions, strict=True)
            ],
            samples=[
                f"  {classify_metrics.format_sample(example)}  prediction {value:.2f}, target {example.label}"
                for example, value in zip(examples[: classify_metrics.NUM_SAMPLES], predictions, strict=False)
            ],
        )
