"""The paired bootstrap, against draws written out one by one, and where its answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from jumok.errors import InputError
from jumok.metrics.translation import Bleu, Chrf
from jumok.metrics.translation_bootstrap import bootstrap_translations

random = np.random.default_rng(3)
WORDS = [f"w{n}" for n in range(50)]
REFERENCES = [" ".join(random.choice(WORDS, size=random.integers(5, 14))) for _ in range(97)]


def worse(share: float, seed: int) -> list[str]:
    """The references with so many of their words wrong."""
    luck = np.random.default_rng(seed)
    return [" ".join("?" if luck.random() < share else w for w in line.split()) for line in REFERENCES]


@pytest.mark.parametrize("metric", [Bleu("none"), Chrf()])
def test_one_draw_after_the_other(metric) -> None:
    systems = {"a": worse(0.10, 1), "b": worse(0.12, 2), "c": worse(0.3, 3)}
    found = bootstrap_translations(systems, REFERENCES, metric=metric, num_samples=50, seed=7)
    draws = np.random.default_rng(7)
    scores: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(50):
        times = draws.multinomial(97, np.full(97, 1 / 97))
        rows = np.repeat(np.arange(97), times)
        for name, outputs in systems.items():
            texts = [outputs[row] for row in rows], [REFERENCES[row] for row in rows]
            scores[name].append(metric.score(*texts).value)
    for compared in found:
        values = np.array(scores[compared.name])
        assert compared.score == metric.score(systems[compared.name], REFERENCES)
        assert [compared.low, compared.high] == pytest.approx(np.percentile(values, [2.5, 97.5]))
        assert compared.low < compared.score.value < compared.high
        if compared.name == "a":
            assert compared.p_value is None
            continue
        gap = values - np.array(scores["a"])
        real = compared.score.value - found[0].score.value
        chance = sum(abs(g - gap.mean()) >= abs(real) for g in gap)
        assert compared.p_value == pytest.approx((1 + chance) / 51)
    assert found[2].p_value == pytest.approx(1 / 51)  # so much worse is no chance


def test_the_same_outputs_twice_do_not_differ() -> None:
    outputs = worse(0.2, 1)
    first, second = bootstrap_translations(
        {"one": outputs, "two": list(outputs)}, REFERENCES, num_samples=100
    )
    assert second.p_value == 1.0
    assert (first.low, first.high, first.score) == (second.low, second.high, second.score)


def test_equally_good_systems_are_seldom_told_apart() -> None:
    pvalues = [
        bootstrap_translations({"a": worse(0.2, n), "b": worse(0.2, 1000 + n)}, REFERENCES, num_samples=200)[
            1
        ].p_value
        for n in range(40)
    ]
    assert sum(p < 0.05 for p in pvalues) <= 6  # 2 are expected
    assert 0.3 < np.mean(pvalues) < 0.7


def test_the_same_seed_gives_the_same_numbers() -> None:
    systems = {"a": worse(0.1, 1), "b": worse(0.15, 2)}
    once = bootstrap_translations(systems, REFERENCES, num_samples=30)
    assert once == bootstrap_translations(systems, REFERENCES, num_samples=30)
    assert once != bootstrap_translations(systems, REFERENCES, num_samples=30, seed=1)


def test_one_system_alone_has_an_interval() -> None:
    [only] = bootstrap_translations({"a": worse(0.2, 1)}, REFERENCES, num_samples=100)
    assert only.low < only.score.value < only.high
    assert only.p_value is None
    [one] = bootstrap_translations({"a": ["a b c d"]}, ["a b c d"], num_samples=3)
    assert (one.low, one.high) == pytest.approx((100.0, 100.0))


def test_bad_input() -> None:
    with pytest.raises(InputError, match="no systems came"):
        bootstrap_translations({}, REFERENCES)
    with pytest.raises(InputError, match="samples=0 came"):
        bootstrap_translations({"a": REFERENCES}, REFERENCES, num_samples=0)
    with pytest.raises(InputError, match="1 hypotheses and 97 references"):
        bootstrap_translations({"a": REFERENCES, "b": ["a"]}, REFERENCES)
    with pytest.raises(InputError, match="no sentences"):
        bootstrap_translations({"a": []}, [])
