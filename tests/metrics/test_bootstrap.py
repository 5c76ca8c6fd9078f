"""The paired bootstrap, against resampling written out, and where its answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from jumok.errors import InputError
from jumok.metrics.bootstrap import BootstrapResult, FigureFunction, bootstrap_models
from jumok.metrics.translation import DEFAULT_BLEU, Bleu, Chrf, TranslationMetric

pytestmark = pytest.mark.long


random = np.random.default_rng(3)
WORDS = [f"w{n}" for n in range(50)]
REFERENCES = [" ".join(random.choice(WORDS, size=random.integers(5, 14))) for _ in range(97)]


def mean(x: np.ndarray) -> FigureFunction:  # type: ignore[type-arg]
    return lambda some: float(x[some].mean())


def test_interval_of_a_proportion_matches_theory() -> None:
    right = np.arange(400) % 4 > 0  # 0.75 of 400: a standard deviation of √(0.75 · 0.25 / 400) = 0.0217
    [one] = bootstrap_models({"a": mean(right)}, 400)
    assert one.value == 0.75
    assert one.low == pytest.approx(0.75 - 1.96 * 0.0217, abs=0.006)
    assert one.high == pytest.approx(0.75 + 1.96 * 0.0217, abs=0.006)
    assert one.p_value is None


def test_equal_and_clearly_different_systems() -> None:
    right = np.arange(300) % 3 > 0
    same, other = bootstrap_models(
        {"a": mean(right), "b": mean(right), "c": mean(right & (np.arange(300) % 2 == 0))}, 300
    )[1:]
    assert same.p_value == 1
    assert other.p_value == pytest.approx(1 / 1001)
    again = bootstrap_models({"a": mean(right), "c": mean(~right)}, 300)
    assert again == bootstrap_models({"a": mean(right), "c": mean(~right)}, 300)  # the same draws every time


def test_empty_inputs() -> None:
    with pytest.raises(InputError, match="0 models on 3 examples"):
        bootstrap_models({}, 3)
    with pytest.raises(InputError, match="num_samples=0"):
        bootstrap_models({"a": mean(np.ones(3))}, 3, num_samples=0)


def test_samples_with_undefined_metrics_are_skipped() -> None:
    def odd(x: float) -> FigureFunction:  # undefined unless the first example is drawn
        return lambda some: x + 0.1 * float(some.mean()) if 0 in some else float("nan")

    one, other = bootstrap_models({"a": odd(0.0), "b": lambda some: 0.1 * float(some.mean())}, 3, num_samples=200)
    assert np.isfinite([one.low, one.high]).all()
    assert other.p_value == 1  # equal wherever both are defined; the undefined draws tell nothing


def test_an_undefined_metric_has_no_p_value() -> None:
    one, other = bootstrap_models({"a": lambda some: 0.5, "b": lambda some: float("nan")}, 3, num_samples=20)
    assert one.p_value is None
    assert np.isnan([other.value, other.low, other.high, other.p_value]).all()


# ----------------------------------------------------------------------------------------------- translations


def worse(share: float, seed: int) -> list[str]:
    """The references with this share of their words wrong."""
    luck = np.random.default_rng(seed)
    return [" ".join("?" if luck.random() < share else w for w in line.split()) for line in REFERENCES]


def compare(
    systems: dict[str, list[str]],
    metric: TranslationMetric = DEFAULT_BLEU,
    num_samples: int = 1000,
    seed: int = 7,
) -> list[BootstrapResult]:
    figures = {name: metric.make_subset_score(outputs, REFERENCES) for name, outputs in systems.items()}
    return bootstrap_models(figures, len(REFERENCES), num_samples=num_samples, seed=seed)


@pytest.mark.parametrize("metric", [Bleu("none"), Chrf()])
def test_samples_in_chunks_are_equal(metric: TranslationMetric) -> None:
    systems = {"a": worse(0.10, 1), "b": worse(0.12, 2), "c": worse(0.3, 3)}
    results = compare(systems, metric, num_samples=50)
    draws = np.random.default_rng(7)
    scores: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(50):
        rows = draws.integers(0, 97, 97)
        for name, outputs in systems.items():
            texts = [outputs[row] for row in rows], [REFERENCES[row] for row in rows]
            scores[name].append(metric.score(*texts).value)
    for result in results:
        values = np.array(scores[result.name])
        assert result.value == pytest.approx(metric.score(systems[result.name], REFERENCES).value)
        assert [result.low, result.high] == pytest.approx(np.percentile(values, [2.5, 97.5]))
        assert result.low < result.value < result.high
        if result.name == "a":
            assert result.p_value is None
            continue
        gap = values - np.array(scores["a"])
        observed = result.value - results[0].value
        as_far = sum(abs(g - gap.mean()) >= abs(observed) for g in gap)
        assert result.p_value == pytest.approx((1 + as_far) / 51)
    assert results[2].p_value == pytest.approx(1 / 51)  # so much worse is no chance


def test_equal_systems_rarely_differ_significantly() -> None:
    results = [compare({"a": worse(0.2, n), "b": worse(0.2, 1000 + n)}, num_samples=200)[1] for n in range(40)]
    p_values = [result.p_value for result in results]
    assert sum(p < 0.05 for p in p_values if p is not None) <= 6  # 2 are expected
    assert 0.3 < np.mean([p for p in p_values if p is not None]) < 0.7


def test_results_depend_on_the_seed() -> None:
    systems = {"a": worse(0.1, 1), "b": worse(0.15, 2)}
    once = compare(systems, num_samples=30)
    assert once == compare(systems, num_samples=30)
    assert once != compare(systems, num_samples=30, seed=1)
