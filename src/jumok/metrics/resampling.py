"""Whether one model is better than another by any figure, or only luckier on this test set.

The test set is drawn anew many times, example by example with replacement, and every model gets the same
draws (paired bootstrap): here for figures that are no sums over examples, as a correlation is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError

__all__ = ["Figure", "Resampled", "resampled"]

Figure = Callable[[NDArray[np.int64]], float]  # of the examples with these numbers, some of them repeated


@dataclass(frozen=True)
class Resampled:
    """One model: its figure, the interval that holds 95 % of those of the redrawn test sets, and p.

    ``p`` is how often a difference to the first model as large as the one found would come by chance, were
    the two equally good, in either direction; None for the first one itself.
    """

    name: str
    value: float
    low: float
    high: float
    p: float | None


def resampled(
    models: Mapping[str, Figure], examples: int, *, samples: int = 1000, seed: int = 12345
) -> list[Resampled]:
    """Compare models, by name, with the first one.

    >>> right = {"one": np.array([1, 1, 0, 1]), "other": np.array([1, 0, 0, 1])}
    >>> models = {name: (lambda some, x=x: float(x[some].mean())) for name, x in right.items()}
    >>> [(one.name, one.value) for one in resampled(models, 4, samples=100)]
    [('one', 0.75), ('other', 0.5)]
    """
    if not models or examples < 1:
        raise InputError(f"{len(models)} models on {examples} examples: one of each is needed at least")
    random = np.random.default_rng(seed)
    draws = [random.integers(0, examples, examples) for _ in range(samples)]
    whole = {name: figure(np.arange(examples)) for name, figure in models.items()}
    drawn = {name: np.array([figure(draw) for draw in draws]) for name, figure in models.items()}
    first = next(iter(models))
    found = []
    for name, value in whole.items():
        low, high = np.nanpercentile(drawn[name], [2.5, 97.5])
        p = None
        if name != first:
            apart = drawn[name] - drawn[first]
            as_far = np.abs(apart - np.nanmean(apart)) >= abs(value - whole[first]) - 1e-12
            p = float((1 + as_far.sum()) / (1 + samples))
        found.append(Resampled(name, value, float(low), float(high), p))
    return found
