"""Labels against the truth: by hand, and scikit-learn as oracle."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from jumok.errors import InputError
from jumok.metrics import classification as module
from jumok.metrics.classification import calibration_error, compute_calibration, score_classification


def test_the_examples_in_the_docstrings() -> None:
    done = doctest.testmod(module)
    assert (done.failed, done.attempted) == (0, 3)


def test_the_picture_of_the_module() -> None:
    truth = ["good"] * 10 + ["bad"] * 10
    said = ["good"] * 8 + ["bad"] * 2 + ["good"] + ["bad"] * 9
    names = ["good", "bad"]
    found = score_classification([names.index(x) for x in truth], [names.index(x) for x in said], names)
    assert found.confusion.tolist() == [[8, 2], [1, 9]]
    good = found.classes[0]
    assert (good.name, good.recall, good.count) == ("good", 0.8, 10)
    assert good.precision == pytest.approx(8 / 9)
    assert found.f1("good") == pytest.approx(16 / 19)
    assert found.accuracy == 0.85


@given(st.integers(2, 5).flatmap(lambda c: st.lists(st.tuples(*[st.integers(0, c - 1)] * 2), min_size=1)))
def test_like_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    truth, said = [a for a, _ in pairs], [b for _, b in pairs]
    found = score_classification(truth, said, "abcde")
    labels = list(range(5))
    p, r, f, n = sklearn.precision_recall_fscore_support(truth, said, labels=labels, zero_division=0.0)
    assert [one.precision for one in found.classes] == pytest.approx(list(p))
    assert [one.recall for one in found.classes] == pytest.approx(list(r))
    assert [one.f1 for one in found.classes] == pytest.approx(list(f))
    assert [one.count for one in found.classes] == list(n)
    assert found.macro_f1 == pytest.approx(f.mean())
    assert found.accuracy == pytest.approx(sklearn.accuracy_score(truth, said))
    assert found.confusion.tolist() == sklearn.confusion_matrix(truth, said, labels=labels).tolist()


@pytest.mark.parametrize(("truth", "said"), [([0, 1], [0]), ([], []), ([0, 2], [0, 1]), ([0, -1], [0, 1])])
def test_labels_that_do_not_fit(truth: list[int], said: list[int]) -> None:
    with pytest.raises(InputError, match=r"labels|targets"):
        score_classification(truth, said, ["a", "b"])


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


def test_what_is_right_as_often_as_it_says_is_calibrated() -> None:
    random = np.random.default_rng(1)
    good = random.uniform(0.5, 1, 20_000)
    shares = np.stack([good, 1 - good], 1)
    truth = (random.uniform(size=20_000) > good).astype(int)
    assert calibration_error(truth, shares) < 0.02
    assert calibration_error(1 - truth, shares) > 0.4
