"""How good labels are: accuracy, precision, recall and F1 of each class; and whether to trust probabilities.

All of it comes from the *confusion matrix*: how often a text of one class was given each label. ::

                  said
                  good  bad
    is    good      8     2        of 10 good ones, 8 were found (recall 0.8);
          bad       1     9        of 9 called good, 8 are (precision 0.89)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jumok.errors import InputError

__all__ = [
    "CalibrationBin",
    "ClassificationScore",
    "PerClassScore",
    "calibration_error",
    "compute_calibration",
    "score_classification",
]

NUM_BINS = 15  # of confidence: as in Guo et al. 2017, "On Calibration of Modern Neural Networks"


@dataclass(frozen=True)
class PerClassScore:
    """Of one class. What would be 0 / 0 is 0: a class that is never said has precision 0."""

    name: str
    precision: float
    recall: float
    f1: float
    count: int  # how many texts are of it


@dataclass(frozen=True, eq=False)
class ClassificationScore:
    """What labels came to. ``confusion[i, j]`` is how often a text of class i was given label j.

    >>> found = score_classification([0, 0, 1, 1, 1], [0, 1, 1, 1, 0], ["bad", "good"])
    >>> found.accuracy, found.f1("good"), found.confusion.tolist()
    (0.6, 0.6666666666666666, [[1, 1], [1, 2]])
    """

    names: tuple[str, ...]
    confusion: NDArray[np.int64]

    @property
    def count(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The share of right labels."""
        return float(np.trace(self.confusion) / self.count)

    @property
    def classes(self) -> list[PerClassScore]:
        """Precision, recall and F1 of each class, in the order of the names."""
        right = np.diagonal(self.confusion)
        is_, said = self.confusion.sum(1), self.confusion.sum(0)
        columns = _safe_divide(right, said), _safe_divide(right, is_), _safe_divide(2 * right, is_ + said)
        return [
            PerClassScore(name, float(p), float(r), float(f), int(n))
            for name, p, r, f, n in zip(self.names, *columns, is_, strict=True)
        ]

    @property
    def macro_f1(self) -> float:
        """The mean of the classes' F1: a rare class counts as much as a frequent one."""
        return float(np.mean([one.f1 for one in self.classes]))

    def f1(self, name: str) -> float:
        """F1 of one class: with two classes, that of the one that is looked for ("positive")."""
        return self.classes[self.names.index(name)].f1


def score_classification(
    targets: ArrayLike, predictions: ArrayLike, class_names: Sequence[str]
) -> ClassificationScore:
    """From the numbers of the true classes and of the labels given, both ``(N,)``."""
    is_, given = np.asarray(targets, np.int64), np.asarray(predictions, np.int64)
    if is_.shape != given.shape or is_.ndim != 1 or not len(is_):
        raise InputError(f"{is_.shape} true labels and {given.shape} given ones: equally many are needed")
    classes = len(class_names)
    for these in (is_, given):
        if these.min() < 0 or these.max() >= classes:
            raise InputError(f"labels from {these.min()} to {these.max()} came; there are {classes} classes")
    confusion = np.bincount(is_ * classes + given, minlength=classes * classes)
    return ClassificationScore(tuple(class_names), confusion.reshape(classes, classes))


@dataclass(frozen=True)
class CalibrationBin:
    """Texts whose labels were given with like probability."""

    low: float
    high: float
    count: int
    confidence: float  # the mean of those probabilities
    accuracy: float  # the share of right labels


def compute_calibration(
    targets: ArrayLike, probabilities: ArrayLike, num_bins: int = NUM_BINS
) -> list[CalibrationBin]:
    """How often the likeliest class is right, by how likely it was said to be; empty bins are left out.

    ``probabilities`` is ``(N, C)``. A bin has its upper edge, not its lower one: (0, 1/15], (1/15, 2/15], …
    """
    shares = np.asarray(probabilities, np.float64)
    confidence, right = shares.max(1), shares.argmax(1) == np.asarray(targets)
    place = np.clip(np.ceil(confidence * num_bins).astype(np.int64) - 1, 0, num_bins - 1)
    found = []
    for number in np.unique(place):
        here = place == number
        means = float(confidence[here].mean()), float(right[here].mean())
        found.append(CalibrationBin(number / num_bins, (number + 1) / num_bins, int(here.sum()), *means))
    return found


def calibration_error(targets: ArrayLike, probabilities: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """The expected calibration error: how far confidence and accuracy are apart, on average over the texts.

    0: of what is said with 80 %, 80 % is right.

    >>> round(calibration_error([0, 0, 1, 0], [[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.3, 0.7]]), 3)
    0.35
    """
    found = compute_calibration(targets, probabilities, num_bins)
    whole = sum(one.count for one in found)
    return sum(one.count * abs(one.accuracy - one.confidence) for one in found) / whole


def _safe_divide(numerator: NDArray[np.int64], denominator: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)
