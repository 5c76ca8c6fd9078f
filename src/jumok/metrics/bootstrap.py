"""Paired bootstrap: confidence intervals of a metric, and p-values of the difference between models.

The test set is resampled many times, example by example with replacement. All models get the same samples
(Koehn 2004). The metric may be any function of a set of examples; it need not be a sum over examples.

A metric can be undefined (NaN) on a sample, such as a correlation of equal values. Such samples are skipped:
in the interval those of the model, in the p-value those of either model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError

FigureFunction = Callable[[NDArray[np.int64]], float]  # metric of the examples with these indices, maybe repeated


@dataclass(frozen=True)
class BootstrapResult:
    """The metric of a model, its 95 % confidence interval, and the p-value against the first model.

    The p-value is two-sided: the probability of a difference at least this large if both models were equally
    good. It is None for the first model. All numbers are NaN if the metric is undefined on the test set or on
    every sample.
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

    The differences on the samples are shifted to mean 0, as if both models were equally good. The p-value is
    (1 + n) / (1 + samples), where n counts the shifted differences at least as far from 0 as the observed
    one. It is 1 for two identical models. (The paired bootstrap of sacreBLEU is one-sided: its p-values are
    about half as large, and 0.001 for identical systems.)

    >>> correct = {"one": np.array([1, 1, 0, 1]), "other": np.array([1, 0, 0, 1])}
    >>> models = {name: (lambda indices, x=x: float(x[indices].mean())) for name, x in correct.items()}
    >>> [(result.name, result.value) for result in bootstrap_models(models, 4, num_samples=100)]
    [('one', 0.75), ('other', 0.5)]
    """
    if not figures or num_examples < 1 or num_samples < 1:
        raise InputError(
            f"{len(figures)} models on {num_examples} examples with num_samples={num_samples}: expected at "
            "least one of each"
        )
    rng = np.random.default_rng(seed)
    samples = [rng.integers(0, num_examples, num_examples) for _ in range(num_samples)]
    values = {name: figure(np.arange(num_examples)) for name, figure in figures.items()}
    resampled = {name: np.array([figure(sample) for sample in samples]) for name, figure in figures.items()}
    first = next(iter(figures))
    results = []
    for name, value in values.items():
        low, high = _confidence_interval(resampled[name])
        p_value = None if name == first else _p_value(resampled[name] - resampled[first], value - values[first])
        results.append(BootstrapResult(name, value, low, high, p_value))
    return results


def _confidence_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    values = values[~np.isnan(values)]
    if not values.size:
        return np.nan, np.nan
    low, high = np.percentile(values, [2.5, 97.5]).tolist()
    return low, high


def _p_value(differences: NDArray[np.float64], observed: float) -> float:
    differences = differences[~np.isnan(differences)]
    if np.isnan(observed) or not differences.size:
        return np.nan
    is_as_far = np.abs(differences - differences.mean()) >= abs(observed) - 1e-12
    return float((1 + is_as_far.sum()) / (1 + differences.size))
