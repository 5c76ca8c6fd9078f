"""Correlation coefficients of Pearson and Spearman, the metrics of regression (such as STS).

Pearson's coefficient measures a linear relation, Spearman's a monotonic one: it is Pearson's coefficient of
the
*ranks*. Equal numbers share the mean of their ranks. ::

    numbers   10  20  20  70
    ranks      1  2.5 2.5  4
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jumok.errors import InputError


def pearson(first: ArrayLike, second: ArrayLike) -> float:
    """Pearson's coefficient, from -1 to 1; NaN if all numbers on one side are equal.

    >>> round(pearson([1, 2, 3], [1, 3, 2]), 6)
    0.5
    """
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise InputError(
            f"there are {x.shape} and {y.shape} numbers; a correlation needs the same number of both, at least two"
        )
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    # Normalize each side first, so that neither tiny nor huge numbers leave the range of float64.
    return float(np.clip(x / np.linalg.norm(x) @ (y / np.linalg.norm(y)), -1, 1))


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's coefficient: Pearson's coefficient of the ranks.

    >>> round(spearman([1, 2, 3, 4], [1, 10, 100, 1000]), 6)
    1.0
    """
    return pearson(average_ranks(first), average_ranks(second))


def average_ranks(values: ArrayLike) -> NDArray[np.float64]:
    """The rank of each number, starting at 1. Equal numbers share the mean of their ranks.

    >>> average_ranks([20, 10, 20, 70]).tolist()
    [2.5, 1.0, 2.5, 4.0]
    """
    _, inverse, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    return np.asarray((last_ranks - (counts - 1) / 2)[inverse], np.float64)
