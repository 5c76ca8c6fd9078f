"""Words taken away: models whose probabilities a person can work out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.metrics.faithfulness import TextSentences, measure_faithfulness

pytestmark = pytest.mark.long


Array = NDArray[np.float64]


def flat(text: TextSentences) -> list[str]:
    return [word for sentence in text for word in sentence]


def bag(texts: Sequence[TextSentences]) -> Array:
    """p(good) = 0.5 + 0.1 for each "good" − 0.1 for each "bad"."""
    counts = np.array([flat(text).count("good") - flat(text).count("bad") for text in texts])
    return np.stack([0.5 - 0.1 * counts, 0.5 + 0.1 * counts], axis=1)


def test_probability_drops_by_hand() -> None:
    # 10 words, 3 of them "good": p = 0.8. The attention knows them.
    text = [["a", "good", "and", "good"], ["it", "was", "a", "good", "film", "."]]
    weights = np.array([0, 0.3, 0, 0.3, 0, 0, 0, 0.4, 0, 0])
    report = measure_faithfulness([text], [weights], bag, num_draws=7)
    assert report.probability == pytest.approx(0.8)
    words = {one.share: one.mean_words for one in report.shares}
    assert words == {0.01: 1, 0.05: 1, 0.1: 1, 0.2: 2, 0.5: 5}
    gone = [one.comprehensiveness.probability.attended for one in report.shares]
    np.testing.assert_allclose(gone, [0.1, 0.1, 0.1, 0.2, 0.3])  # one, one, one, two, all three of them
    alone = [one.sufficiency.probability.attended for one in report.shares]
    np.testing.assert_allclose(alone, [0.2, 0.2, 0.2, 0.1, 0.0], atol=1e-12)  # 0.8 − 0.6, …, 0.8 − 0.8
    assert report.comprehensiveness.probability.attended == pytest.approx(0.8 / 5)
    assert report.sufficiency.probability.attended == pytest.approx(0.7 / 5)
    # In log-odds: without all three p is 0.5, of which the log-odds are 0.
    assert report.shares[-1].comprehensiveness.log_odds.attended == pytest.approx(np.log(0.8 / 0.2))
    # Five random words of ten and the five others: what one loses is what the other keeps.
    half = report.shares[-1]
    assert half.comprehensiveness.probability.random + half.sufficiency.probability.random == pytest.approx(0.3)


def test_random_words_have_the_expected_drop() -> None:
    # 2 of 10 words at random hit the one good word in 2 of 10 draws: 0.2 × 0.1 are lost.
    text = [["good", *"abcdefghi"]]
    report = measure_faithfulness([text] * 300, [np.arange(10, 0, -1)] * 300, bag, shares=[0.2], num_draws=5)
    [one] = report.shares
    assert one.comprehensiveness.probability.random == pytest.approx(0.02, abs=0.003)
    assert one.sufficiency.probability.random == pytest.approx(0.08, abs=0.003)
    difference = one.comprehensiveness.probability
    assert difference.difference == pytest.approx(0.1 - difference.random)
    assert difference.low < difference.difference < difference.high
    assert difference.high - difference.low < 0.01


def test_drops_are_measured_for_the_predicted_class() -> None:
    report = measure_faithfulness([[["bad", "bad", "good", "x"]]], [[4, 3, 2, 1]], bag, shares=[0.5])
    assert report.probability == pytest.approx(0.6)  # of bad
    assert report.shares[0].comprehensiveness.probability.attended == pytest.approx(0.2)  # then 0.4
    assert report.shares[0].sufficiency.probability.attended == pytest.approx(-0.1)  # then 0.7: surer than before


def test_weights_are_averaged_over_hops() -> None:
    text = [["good", "a", "good", "b"]]
    hops = [[0.5, 0.4, 0.1, 0.0], [0.0, 0.3, 0.7, 0.0]]  # means: 0.25, 0.35, 0.4, 0
    report = measure_faithfulness([text], [hops], bag, shares=[0.25, 0.5])
    gone = [one.comprehensiveness.probability.attended for one in report.shares]
    np.testing.assert_allclose(gone, [0.1, 0.1])


def test_texts_of_fewer_than_two_words_are_skipped() -> None:
    seen: list[TextSentences] = []

    def watched(texts: Sequence[TextSentences]) -> Array:
        seen.extend(texts)
        return bag(texts)

    texts: list[Any] = [[["one"]], [], [[]], [["good", "x"]], [[], ["good"], [], ["x", "y"]]]
    weights: list[Any] = [[1], [], [], [0.9, 0.1], [0.8, 0.1, 0.1]]
    report = measure_faithfulness(texts, weights, watched, shares=[0.01, 0.99])
    assert (report.num_texts, report.num_skipped) == (2, 3)
    assert [one.mean_words for one in report.shares] == [1.0, 1.5]  # of two words one, of three one and two
    assert seen
    assert all(text and all(text) for text in seen)
    assert [["good"], ["x", "y"]] in seen
    assert len(seen) <= 3 + 7  # all that two and three words can make: what is the same is read once
    with pytest.raises(InputError, match="has two words"):
        measure_faithfulness(texts[:3], weights[:3], bag)


def planted(count: int) -> tuple[list[TextSentences], list[Array]]:
    """Texts of 20 words, one of them decisive, and weights that point at it."""
    chance = np.random.default_rng(5)
    texts: list[TextSentences] = []
    weights = []
    for _ in range(count):
        place = int(chance.integers(20))
        words = ["x"] * 20
        words[place] = "good"
        texts.append([words[:7], words[7:]])
        weights.append(chance.random(20) * 0.1 + (np.arange(20) == place))
    return texts, weights


def decided(texts: Sequence[TextSentences]) -> Array:
    has = np.array(["good" in flat(text) for text in texts])
    good = np.where(has, 0.9, 0.5)
    return np.stack([1 - good, good], axis=1)


def test_faithful_weights() -> None:
    report = measure_faithfulness(*planted(40), decided)
    at = {one.share: one for one in report.shares}[0.1]
    gone = at.comprehensiveness.probability
    assert gone.attended == pytest.approx(0.4)
    assert gone.random == pytest.approx(0.04, abs=0.02)  # 2 of 20 words
    assert gone.low > 0.3
    assert at.sufficiency.probability.attended == pytest.approx(0)
    assert at.sufficiency.probability.high < 0
    assert report.verdict.startswith("Removing the 10 % most attended words lowers the probability by 0.40")
    assert "the highlight is meaningful." in report.verdict
    assert "the probability is 0.90 instead of 0.90; for random words it is 0.5" in report.verdict


def test_unfaithful_weights() -> None:
    texts, _ = planted(200)
    chance = np.random.default_rng(6)
    report = measure_faithfulness(texts, [chance.random(20) for _ in texts], decided)
    gone = {one.share: one for one in report.shares}[0.1].comprehensiveness.probability
    assert gone.low < 0 < gone.high
    assert "no more than random words: do not trust the highlight" in report.verdict


def test_misleading_weights() -> None:
    texts, weights = planted(200)
    report = measure_faithfulness(texts, [-one for one in weights], decided)
    assert "less than random words: the highlight is misleading" in report.verdict


def test_a_constant_model_shows_no_difference() -> None:
    texts, weights = planted(30)
    report = measure_faithfulness(texts, weights, lambda calls: np.tile([0.3, 0.7], (len(calls), 1)))
    for one in (report.comprehensiveness, report.sufficiency, report.shares[2].comprehensiveness):
        assert (one.probability.difference, one.probability.low, one.probability.high) == (0, 0, 0)
        assert one.log_odds.difference == 0
    assert "do not trust the highlight" in report.verdict


def test_few_texts_are_inconclusive() -> None:
    assert "too few texts (3) for a verdict" in measure_faithfulness(*planted(3), decided).verdict
    texts, weights = planted(25)
    unsure = measure_faithfulness(texts, [one if n < 3 else -one for n, one in enumerate(weights)], decided)
    assert "the difference is between -0.0" in unsure.verdict
    assert "use more texts" in unsure.verdict


def test_saturated_probabilities() -> None:
    def sure(texts: Sequence[TextSentences]) -> Array:
        good = np.where(["good" in flat(text) for text in texts], 1 - 1e-5, 1 - 1e-3)
        return np.stack([1 - good, good], axis=1)

    report = measure_faithfulness(*planted(40), sure)
    gone = report.shares[2].comprehensiveness
    assert report.confident_share == 1
    assert gone.probability.attended < 0.001
    assert gone.log_odds.attended == pytest.approx(4.606, abs=0.01)
    assert "the log-odds drop far more than for random words: the highlight is meaningful" in report.verdict
    assert "above 0.99 for 100 % of the texts" in report.verdict
    # At 1 itself, log-odds end.
    ends = measure_faithfulness(*planted(40), lambda texts: np.round(sure(texts)))
    assert ends.comprehensiveness.log_odds.attended == 0


def test_equal_weights_are_ranked_at_random() -> None:
    # What decides stands first. Were ties kept in order, equal weights would look wise.
    texts = [[["good", *["x"] * 19]]] * 300
    report = measure_faithfulness(texts, [np.full(20, 0.05)] * 300, decided)
    gone = report.shares[2].comprehensiveness.probability
    assert gone.low < 0 < gone.high


def test_results_depend_on_the_seed_only() -> None:
    texts, weights = planted(30)
    one, again, other = (measure_faithfulness(texts, weights, decided, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    done: list[int] = []
    measure_faithfulness(*planted(70), decided, shares=[0.1], on_progress=done.append)
    assert done == [32, 64, 70]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_properties(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=3), max_size=4))
    texts.append([["a", "b"]])
    weight = st.floats(0, 1, width=32)
    sizes = [sum(map(len, text)) for text in texts]
    weights = [data.draw(st.lists(weight, min_size=size, max_size=size)) for size in sizes]
    shares = data.draw(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=3, unique=True))
    value = {"a": 0.3, "b": -0.2, "c": 0.05}

    def linear(calls: Sequence[TextSentences]) -> Array:
        lengths = [len(flat(text)) for text in calls]
        assert min(lengths) >= 1
        assert max(lengths) <= max(sizes)
        good = np.array([0.5 + 0.01 * sum(value[word] for word in flat(text)) for text in calls])
        return np.stack([good, 1 - good], axis=1)

    report = measure_faithfulness(texts, weights, linear, shares=shares, num_draws=2)
    assert report.num_texts + report.num_skipped == len(texts)
    whole = np.array([linear([text])[0].max() for text in texts if len(flat(text)) > 1])
    assert report.probability == pytest.approx(whole.mean())
    for one in report.shares:
        for drop in (one.comprehensiveness.probability, one.sufficiency.probability):
            assert drop.low - 1e-12 <= drop.difference <= drop.high + 1e-12
            assert drop.difference == pytest.approx(drop.attended - drop.random)
            assert -0.2 < drop.attended < 0.2
        # A linear model: what words cost when taken away and what they cost when kept is all above one half.
        both = one.comprehensiveness.probability.attended + one.sufficiency.probability.attended
        assert both == pytest.approx((whole - 0.5).mean())
    mean = np.mean([one.sufficiency.probability.random for one in report.shares])
    assert report.sufficiency.probability.random == pytest.approx(mean)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": []}, "1 texts and weights of 0"),
        ({"weights": [[1, 2]]}, r"text 1 has 3 words, and weights of shape \(2,\)"),
        ({"weights": [[1, 2, float("nan")]]}, "finite"),
        ({"weights": [np.zeros((0, 3))]}, "for each hop"),
        ({"texts": ["a b"]}, "not a list of sentences"),
        ({"texts": [["a b"]]}, "not a list of sentences"),
        ({"shares": [0.1, 1.0]}, "between 0 and 1"),
        ({"shares": []}, "between 0 and 1"),
        ({"num_draws": 0}, "at least one draw"),
        ({"predict": lambda texts: np.zeros(len(texts))}, "shape"),
        ({"predict": lambda texts: np.ones((len(texts), 1))}, "shape"),
        ({"predict": lambda texts: np.zeros((len(texts), 2))}, "add up to 1"),
        ({"predict": lambda texts: np.full((len(texts), 2), np.nan)}, "add up to 1"),
    ],
)
def test_invalid_inputs_raise(change: dict[str, Any], message: str) -> None:
    calls: dict[str, Any] = {
        "texts": [[["a", "b", "c"]]],
        "weights": [[1, 2, 3]],
        "predict": bag,
    } | change
    with pytest.raises(InputError, match=message):
        measure_faithfulness(**calls)
