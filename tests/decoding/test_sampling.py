"""Sampling: as often as the probabilities say, from the sets that the cuts leave."""

from __future__ import annotations

import math

import pytest
import torch

from jumok.batches.tokens import EOS, Tokens
from jumok.decoding import greedy_search, sample
from jumok.decoding.sampling import sample_tokens
from jumok.errors import InputError

SHARES = torch.tensor([0.02, 0.4, 0.08, 0.3, 0.05, 0.15])
MANY = 20_000


def drawn(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> torch.Tensor:
    """How often each of the six words was drawn."""
    luck = torch.rand(MANY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    words = sample_tokens(SHARES.log().expand(MANY, -1), luck, temperature, top_k, top_p)
    return words.bincount(minlength=len(SHARES))


# Chi-square that one in a hundred exceeds by chance, from a table, for 1 to 5 degrees of freedom.
RARELY = [6.635, 9.210, 11.345, 13.277, 15.086]


def agree(counts: torch.Tensor, shares: torch.Tensor) -> bool:
    """Pearson's chi-square test at the level of 1 %."""
    expected = counts.sum() * shares.double() / shares.double().sum()
    return bool(((counts - expected) ** 2 / expected).sum() < RARELY[len(counts) - 2])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_frequencies(temperature: float) -> None:
    counts = drawn(temperature)
    assert agree(counts, SHARES ** (1 / temperature))
    if temperature != 1.0:  # the test can fail
        assert not agree(counts, SHARES)


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [
        (1, None, [1]),
        (3, None, [1, 3, 5]),
        (6, None, [0, 1, 2, 3, 4, 5]),
        (99, None, [0, 1, 2, 3, 4, 5]),
        (None, 0.01, [1]),
        (None, 0.39, [1]),
        (None, 0.41, [1, 3]),
        (None, 0.69, [1, 3]),
        (None, 0.71, [1, 3, 5]),
        (None, 0.97, [1, 2, 3, 4, 5]),
        (None, 1.0, [0, 1, 2, 3, 4, 5]),
        (3, 0.8, [1, 3]),  # of 0.85, 0.4 + 0.3 are 82 %: first the one cut, then the other
        (2, 0.99, [1, 3]),
    ],
)
def test_top_k_and_top_p_by_hand(top_k: int | None, top_p: float | None, left: list[int]) -> None:
    counts = drawn(1.0, top_k, top_p)
    assert counts.nonzero().flatten().tolist() == left
    if len(left) > 1:
        assert agree(counts[left], SHARES[left])


def test_temperature_is_applied_before_top_p() -> None:
    # At 0.5, shares 0.4² and 0.3² of 0.2818 in all: 57 % and 32 %.
    assert drawn(0.5, None, 0.56).nonzero().flatten().tolist() == [1]
    assert drawn(0.5, None, 0.58).nonzero().flatten().tolist() == [1, 3]


def test_ties_keep_the_lowest_ids() -> None:
    logp = torch.full((1000, 7), 1 / 7).log()
    luck = torch.rand(1000, dtype=torch.float64)
    assert sample_tokens(logp, luck, 1.0, 3, None).unique().tolist() == [0, 1, 2]
    assert sample_tokens(logp, luck, 1.0, None, 0.5).unique().tolist() == [0, 1, 2, 3]


def test_extreme_values() -> None:
    logp = torch.tensor([[0.0, 0.25, 0.75, 0.0]]).log().expand(4, -1)
    luck = torch.tensor([0.0, 0.2499, 0.2501, math.nextafter(1.0, 0)], dtype=torch.float64)
    assert sample_tokens(logp, luck, 1.0, None, None).tolist() == [1, 1, 2, 2]
    assert sample_tokens(logp, luck, 1.0, None, 0.9).tolist() == [2, 2, 2, 1]
    assert sample_tokens(logp, luck, 1e-3, None, None).tolist() == [2] * 4  # all but greedy
    assert sample_tokens(logp, luck, 1e6, None, None).tolist() == [
        1,
        1,
        1,
        2,
    ]  # all but even, and nothing impossible


def test_results_depend_on_the_generator_not_on_removed_rows(table_model, random_scores, sentences, sync_every) -> None:
    scores, source = random_scores(11, seed=2), sentences(*range(20, 43))

    def run(seed: int) -> list:
        return sample(table_model(scores), source, max_length=9, generator=torch.Generator().manual_seed(seed))

    results = run(5)
    assert len({len(h.ids) for h in results}) > 5
    assert run(5) == results != run(6)
    for interval in (2, 8):
        sync_every(interval)
        assert run(5) == results
    torch.manual_seed(3)
    first = sample(table_model(scores), source, max_length=9)
    torch.manual_seed(3)
    assert sample(table_model(scores), source, max_length=9) == first


def test_logprob_is_that_of_the_model(table_model, random_scores, sentences) -> None:
    model = table_model(random_scores(11, seed=3))
    results = sample(model, sentences(30, 31, 32), temperature=2.0, top_k=5, top_p=0.9, max_length=40)
    for n, h in zip((30, 31, 32), results, strict=True):
        assert h.finished
        assert h.logprob == h.score == pytest.approx(model.logprob(n, (*h.ids, EOS)), abs=1e-5)


def test_top_k_1_is_greedy(table_model, random_scores, sentences) -> None:
    scores, source = random_scores(11, seed=4, steps=1.0), sentences(*range(20, 37))
    assert sample(table_model(scores), source, top_k=1, max_length=9) == greedy_search(
        table_model(scores), source, max_length=9
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0}, "temperature: 0 is invalid.*greedy"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k: 0 is invalid"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0.0}, "top_p: 0.0 is invalid"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
    ],
)
def test_invalid_arguments_raise(table_model, random_scores, arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sample(table_model(random_scores(7, seed=0)), Tokens.pad([[7, EOS]]), **arguments)
