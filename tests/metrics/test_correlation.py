"""Correlations: by hand, and SciPy as oracle."""

from __future__ import annotations

import math

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from jumok.errors import InputError
from jumok.metrics.correlation import average_ranks, pearson, spearman

FEW = st.integers(-3, 3).map(float)  # so that there are ties
MANY = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))
ROWS = st.lists(st.tuples(FEW | MANY, FEW | MANY), min_size=2, max_size=40)


def test_by_hand() -> None:
    assert average_ranks([10, 20, 20, 70]).tolist() == [1, 2.5, 2.5, 4]
    assert pearson([1, 2, 3, 4], [2, 4, 6, 8]) == pytest.approx(1)
    assert pearson([1, 2, 3, 4], [8, 6, 4, 2]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826817)
    assert math.isnan(pearson([1, 1], [1, 2]))


@given(ROWS)
def test_like_scipy(rows: list[tuple[float, float]]) -> None:
    x, y = [a for a, _ in rows], [b for _, b in rows]
    assert average_ranks(x).tolist() == scipy.stats.rankdata(x).tolist()
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(pearson(x, y))
        return
    assert spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-9)
    assert pearson(x, y) == pytest.approx(scipy.stats.pearsonr(x, y).statistic, abs=1e-6)


@pytest.mark.parametrize(("x", "y"), [([1], [1]), ([1, 2], [1]), ([], [])])
def test_invalid_rows_raise(x: list[float], y: list[float]) -> None:
    with pytest.raises(InputError, match="at least two"):
        pearson(x, y)
