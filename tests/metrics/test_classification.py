"""Labels against the truth: by hand, and scikit-learn as oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from jumok.errors import InputError
from jumok.metrics.classification import calibration_error, compute_calibration, score_classification


def test_confusion_matrix_example() -> None:
    truth = ["good"] * 10 + ["bad"] * 10
    predictions = ["good"] * 8 + ["bad"] * 2 + ["good"] + ["bad"] * 9
    names = ["good", "bad"]
    result = score_classification([names.index(x) for x in truth], [names.index(x) for x in predictions], names)
    assert result.confusion.tolist() == [[8, 2], [1, 9]]
    good = result.classes[0]
    assert (good.name, good.recall, good.count) == ("good", 0.8, 10)
    assert good.precision == pytest.approx(8 / 9)
    assert result.f1("good") == pytest.approx(16 / 19)
    assert result.accuracy == 0.85


@given(st.integers(2, 5).flatmap(lambda c: st.lists(st.tuples(*[st.integers(0, c - 1)] * 2), min_size=1)))
def test_like_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    truth, predictions = [a for a, _ in pairs], [b for _, b in pairs]
    result = score_classification(truth, predictions, "abcde")
    labels = list(range(5))
    p, r, f, n = sklearn.precision_recall_fscore_support(truth, predictions, labels=labels, zero_division=0.0)
    assert [one.precision for one in result.classes] == pytest.approx(list(p))
    assert [one.recall for one in result.classes] == pytest.approx(list(r))
    assert [one.f1 for one in result.classes] == pytest.approx(list(f))
    assert [one.count for one in result.classes] == list(n)
    assert result.macro_f1 == pytest.approx(f.mean())
    assert result.accuracy == pytest.approx(sklearn.accuracy_score(truth, predictions))
    assert result.confusion.tolist() == sklearn.confusion_matrix(truth, predictions, labels=labels).tolist()


@pytest.mark.parametrize(("truth", "predictions"), [([0, 1], [0]), ([], []), ([0, 2], [0, 1]), ([0, -1], [0, 1])])
def test_invalid_labels_raise(truth: list[int], predictions: list[int]) -> None:
    with pytest.raises(InputError, match=r"labels|targets"):
        score_classification(truth, predictions, ["a", "b"])


def test_calibration_by_hand() -> None:
    # Two bins of 10: (0.6, 0.7] with 0.7, 0.65 (one right), and (0.9, 1] with 1.0 (right).
    shares = [[0.7, 0.3], [0.35, 0.65], [0.0, 1.0]]
    bins = compute_calibration([0, 0, 1], shares, num_bins=10)
    assert [(one.count, round(one.low, 1), round(one.high, 1)) for one in bins] == [
        (2, 0.6, 0.7),
        (1, 0.9, 1.0),
    ]
    assert [one.accuracy for one in bins] == [0.5, 1.0]
    assert bins[0].confidence == pytest.approx(0.675)
    assert calibration_error([0, 0, 1], shares, num_bins=10) == pytest.approx(2 / 3 * 0.175)


def test_calibrated_probabilities_have_no_error() -> None:
    random = np.random.default_rng(1)
    good = random.uniform(0.5, 1, 20_000)
    shares = np.stack([good, 1 - good], 1)
    truth = (random.uniform(size=20_000) > good).astype(int)
    assert calibration_error(truth, shares) < 0.02
    assert calibration_error(1 - truth, shares) > 0.4
