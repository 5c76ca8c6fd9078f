"""Metrics of classification: accuracy, precision, recall and F1 per class, and calibration.

All but the calibration follow from the *confusion matrix*: the counts of target and predicted classes. ::

                     predicted
                     good  bad
    target   good      8     2        8 of 10 targets were found (recall 0.8);
             bad       1     9        8 of 9 predictions are correct (precision 0.89)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jumok.errors import InputError

NUM_BINS = 15  # bins of confidence, as in Guo et al. 2017, "On Calibration of Modern Neural Networks"


@dataclass(frozen=True)
class PerClassScore:
    """Scores of one class. 0 / 0 counts as 0: a class that is never predicted has precision 0."""

    name: str
    precision: float
    recall: float
    f1: float
    count: int  # number of texts of this class


@dataclass(frozen=True, eq=False)
class ClassificationScore:
    """Scores of predicted classes. ``confusion[i, j]`` counts texts of class i with prediction j.

    >>> score = score_classification([0, 0, 1, 1, 1], [0, 1, 1, 1, 0], ["bad", "good"])
    >>> score.accuracy, score.f1("good"), score.confusion.tolist()
    (0.6, 0.6666666666666666, [[1, 1], [1, 2]])
    """

    names: tuple[str, ...]
    confusion: NDArray[np.int64]

    @property
    def count(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return float(np.trace(self.confusion) / self.count)

    @property
    def classes(self) -> list[PerClassScore]:
        """Precision, recall and F1 of each class, in the order of the names."""
        correct = np.diagonal(self.confusion)
        target, predicted = self.confusion.sum(1), self.confusion.sum(0)
        precision, recall = _safe_divide(correct, predicted), _safe_divide(correct, target)
        f1 = _safe_divide(2 * correct, target + predicted)
        return [
            PerClassScore(name, float(p), float(r), float(f), int(n))
            for name, p, r, f, n in zip(self.names, precision, recall, f1, target, strict=True)
        ]

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes: a rare class counts as much as a frequent one."""
        return float(np.mean([score.f1 for score in self.classes]))

    def f1(self, name: str) -> float:
        """F1 of one class. With two classes, this is usually the F1 of the positive class."""
        return self.classes[self.names.index(name)].f1


def score_classification(targets: ArrayLike, predictions: ArrayLike, class_names: Sequence[str]) -> ClassificationScore:
    """Score predicted class indices against the targets, both ``(N,)``."""
    target, predicted = np.asarray(targets, np.int64), np.asarray(predictions, np.int64)
    if target.shape != predicted.shape or target.ndim != 1 or not len(target):
        raise InputError(
            f"there are {target.shape} targets and {predicted.shape} predictions; expected the same number of both"
        )
    num_classes = len(class_names)
    for labels in (target, predicted):
        if labels.min() < 0 or labels.max() >= num_classes:
            raise InputError(f"there are labels from {labels.min()} to {labels.max()}; expected 0 to {num_classes - 1}")
    confusion = np.bincount(target * num_classes + predicted, minlength=num_classes * num_classes)
    return ClassificationScore(tuple(class_names), confusion.reshape(num_classes, num_classes))


@dataclass(frozen=True)
class CalibrationBin:
    """Texts whose predictions have a similar probability."""

    low: float
    high: float
    count: int
    confidence: float  # the mean of those probabilities
    accuracy: float  # the share of correct predictions


def compute_calibration(targets: ArrayLike, probabilities: ArrayLike, num_bins: int = NUM_BINS) -> list[CalibrationBin]:
    """The accuracy of predictions, by their probability. Empty bins are left out.

    ``probabilities`` is ``(N, C)``. Bins include their upper edge: (0, 1/15], (1/15, 2/15], …
    """
    probability = np.asarray(probabilities, np.float64)
    confidence, is_correct = probability.max(1), probability.argmax(1) == np.asarray(targets)
    bin_indices = np.clip(np.ceil(confidence * num_bins).astype(np.int64) - 1, 0, num_bins - 1)
    bins = []
    for index in np.unique(bin_indices):
        inside = bin_indices == index
        means = float(confidence[inside].mean()), float(is_correct[inside].mean())
        bins.append(CalibrationBin(index / num_bins, (index + 1) / num_bins, int(inside.sum()), *means))
    return bins


def calibration_error(targets: ArrayLike, probabilities: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """The expected calibration error: the mean difference between confidence and accuracy.

    It is 0 if 80 % of the predictions with probability 0.8 are correct, and so on.

    >>> round(calibration_error([0, 0, 1, 0], [[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.3, 0.7]]), 3)
    0.35
    """
    bins = compute_calibration(targets, probabilities, num_bins)
    total = sum(item.count for item in bins)
    return sum(item.count * abs(item.accuracy - item.confidence) for item in bins) / total


def _safe_divide(numerator: NDArray[np.int64], denominator: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)
