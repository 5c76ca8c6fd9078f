"""Whether one model is better than another by any figure, or only luckier on this test set.

The test set is drawn anew many times, example by example with replacement, and every model gets the same
draws (paired bootstrap): here for figures that are no sums over examples, as a correlation is none.

A figure can be undefined (NaN) on a draw, as a correlation is where all values are the same. Such draws are
left out: of the interval those of the model, of p those of either model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError

__all__ = ["BootstrapResult", "FigureFunction", "bootstrap_models"]

FigureFunction = Callable[
    [NDArray[np.int64]], float
]  # of the examples with these numbers, some of them repeated


@dataclass(frozen=True)
class BootstrapResult:
    """One model: its figure, the interval that holds 95 % of those of the redrawn test sets, and p.

    ``p`` is how often a difference to the first model as large as the one found would come by chance, were
    the two equally good, in either direction; None for the first one itself. All of these are NaN where the
    figure is undefined on the whole test set, or on every draw.
    """

    name: str
    value: float
    low: float
    high: float
    p_value: float | None


def bootstrap_models(
    figures: Mapping[str, FigureFunction], num_examples: int, *, num_samples: int = 1000, seed: int = 12345
) -> list[BootstrapResult]:
    """Compare models, by name, with the first one.

    >>> right = {"one": np.array([1, 1, 0, 1]), "other": np.array([1, 0, 0, 1])}
    >>> models = {name: (lambda some, x=x: float(x[some].mean())) for name, x in right.items()}
    >>> [(one.name, one.value) for one in bootstrap_models(models, 4, num_samples=100)]
    [('one', 0.75), ('other', 0.5)]
    """
    if not figures or num_examples < 1:
        raise InputError(f"{len(figures)} models on {num_examples} examples: one of each is needed at least")
    random = np.random.default_rng(seed)
    draws = [random.integers(0, num_examples, num_examples) for _ in range(num_samples)]
    whole = {name: figure(np.arange(num_examples)) for name, figure in figures.items()}
    drawn = {name: np.array([figure(draw) for draw in draws]) for name, figure in figures.items()}
    first = next(iter(figures))
    found = []
    for name, value in whole.items():
        low, high = _confidence_interval(drawn[name])
        p = None if name == first else _p_value(drawn[name] - drawn[first], value - whole[first])
        found.append(BootstrapResult(name, value, low, high, p))
    return found


def _confidence_interval(figures: NDArray[np.float64]) -> tuple[float, float]:
    figures = figures[~np.isnan(figures)]
    if not figures.size:
        return np.nan, np.nan
    low, high = np.percentile(figures, [2.5, 97.5]).tolist()
    return low, high


def _p_value(differences: NDArray[np.float64], observed: float) -> float:
    differences = differences[~np.isnan(differences)]
    if np.isnan(observed) or not differences.size:
        return np.nan
    as_far = np.abs(differences - differences.mean()) >= abs(observed) - 1e-12
    return float((1 + as_far.sum()) / (1 + differences.size))
