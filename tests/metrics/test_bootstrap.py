"""Any figure on redrawn test sets."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from jumok.errors import InputError
from jumok.metrics import bootstrap as module
from jumok.metrics.bootstrap import FigureFunction, bootstrap_models


def mean(x: np.ndarray) -> FigureFunction:  # type: ignore[type-arg]
    return lambda some: float(x[some].mean())


def test_the_examples_in_the_docstrings() -> None:
    done = doctest.testmod(module)
    assert (done.failed, done.attempted) == (0, 3)


def test_the_interval_of_a_share_is_the_one_of_theory() -> None:
    right = np.arange(400) % 4 > 0  # 0.75 of 400: a standard deviation of √(0.75 · 0.25 / 400) = 0.0217
    [one] = bootstrap_models({"a": mean(right)}, 400)
    assert one.value == 0.75
    assert one.low == pytest.approx(0.75 - 1.96 * 0.0217, abs=0.006)
    assert one.high == pytest.approx(0.75 + 1.96 * 0.0217, abs=0.006)
    assert one.p_value is None


def test_the_same_twice_is_no_difference_and_a_clear_one_is() -> None:
    right = np.arange(300) % 3 > 0
    same, other = bootstrap_models(
        {"a": mean(right), "b": mean(right), "c": mean(right & (np.arange(300) % 2 == 0))}, 300
    )[1:]
    assert same.p_value == 1
    assert other.p_value == pytest.approx(1 / 1001)
    again = bootstrap_models({"a": mean(right), "c": mean(~right)}, 300)
    assert again == bootstrap_models({"a": mean(right), "c": mean(~right)}, 300)  # the same draws every time


def test_nothing_to_compare() -> None:
    with pytest.raises(InputError, match="0 models on 3 examples"):
        bootstrap_models({}, 3)


def test_draws_on_which_a_figure_is_undefined_are_left_out() -> None:
    def odd(x: float) -> FigureFunction:  # undefined unless the first example is drawn
        return lambda some: x + 0.1 * float(some.mean()) if 0 in some else float("nan")

    one, other = bootstrap_models(
        {"a": odd(0.0), "b": lambda some: 0.1 * float(some.mean())}, 3, num_samples=200
    )
    assert np.isfinite([one.low, one.high]).all()
    assert other.p_value == 1  # equal wherever both are defined; the undefined draws tell nothing


def test_a_figure_that_is_undefined_has_no_p() -> None:
    one, other = bootstrap_models({"a": lambda some: 0.5, "b": lambda some: float("nan")}, 3, num_samples=20)
    assert one.p_value is None
    assert np.isnan([other.value, other.low, other.high, other.p_value]).all()
