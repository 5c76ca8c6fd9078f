"""Whether two rows of numbers rise and fall together: what is said of regression (STS: Spearman, Pearson).

Pearson's correlation asks for a straight line, Spearman's only that a larger one goes with a larger one: it
is Pearson's of the *ranks*. Equal numbers share the mean of their ranks. ::

    numbers   10  20  20  70
    ranks      1  2.5 2.5  4
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jumok.errors import InputError

__all__ = ["average_ranks", "pearson", "spearman"]


def pearson(first: ArrayLike, second: ArrayLike) -> float:
    """From -1 to 1; NaN if one of them is the same number throughout.

    >>> round(pearson([1, 2, 3], [1, 3, 2]), 6)
    0.5
    """
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise InputError(f"{x.shape} and {y.shape} numbers: a correlation needs two rows, equally long")
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    # Each divided by its own length first: so neither tiny nor huge numbers leave the range of float64.
    return float(np.clip(x / np.linalg.norm(x) @ (y / np.linalg.norm(y)), -1, 1))


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """The same of the ranks.

    >>> round(spearman([1, 2, 3, 4], [1, 10, 100, 1000]), 6)
    1.0
    """
    return pearson(average_ranks(first), average_ranks(second))


def average_ranks(values: ArrayLike) -> NDArray[np.float64]:
    """The place of each number in their order, from 1 on; equal ones share the mean of their places.

    >>> average_ranks([20, 10, 20, 70]).tolist()
    [2.5, 1.0, 2.5, 4.0]
    """
    _, which, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[which], np.float64)
