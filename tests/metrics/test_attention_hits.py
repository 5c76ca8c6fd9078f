"""Whether the words with most weight are those that decide, by numbers one can check by hand."""

import numpy as np
import pytest

from jumok import InputError
from jumok.metrics.attention_hits import attention_hit_rates


def test_by_hand() -> None:
    weights = np.array([0.05, 0.3, 0.05, 0.1, 0.5], np.float32)
    rates = attention_hit_rates([(weights, (1, 2), (0, 3, 5)), (weights, (3, 4), (0, 3, 5))])
    assert rates["attention_hits"] == 1  # 4 and 1 have most: one of them decides, in either
    assert rates["attention_precision"] == 0.5
    assert rates["sentence_hits"] == 0.5  # 0.4 against 0.6
    assert rates["attention_hits_by_chance"] == pytest.approx(1 - 3 / 10)  # 3 pairs of the 10 miss both
    assert rates["attention_precision_by_chance"] == pytest.approx(2 / 5)
    assert rates["sentence_hits_by_chance"] == 0.5


def test_chance_level_of_random_weights() -> None:
    chance = np.random.default_rng(1)
    rates = attention_hit_rates([(chance.random(17).astype(np.float32), (3, 4, 5), (0, 3, 8, 17)) for _ in range(4000)])
    assert rates["attention_hits"] == pytest.approx(rates["attention_hits_by_chance"], abs=0.03)
    assert rates["attention_precision"] == pytest.approx(3 / 17, abs=0.02)


def test_no_targets() -> None:
    with pytest.raises(InputError, match="no documents"):
        attention_hit_rates([])
    with pytest.raises(InputError, match=r"the decisive words are \[7\]"):
        attention_hit_rates([(np.ones(2, np.float32), (7,), (0, 2))])
