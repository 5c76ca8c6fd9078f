"""The best of a row, in order, and of equals the first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jumok.decoding.topk import stable_topk


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    words=st.integers(1, 1500),
    count=st.integers(1, 40),
    ties=st.sampled_from([0.0, 0.5, 2.0, 1e9]),
)
def test_topk_equals_a_stable_sort(device: str, seed: int, rows: int, words: int, count: int, ties: float) -> None:
    count = min(count, words)
    logp = torch.randn(rows, words, generator=torch.Generator().manual_seed(seed)).mul(3).log_softmax(-1)
    if ties:
        logp = (logp / ties).round() * ties - 1  # two words are never both certain
    logp[:, : words // 3 : 2] = -torch.inf
    values, ids = (x.cpu() for x in stable_topk(logp.to(device), count))
    order, places = logp.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, order[:, :count])
    known = values > -torch.inf  # which of the impossible ones come last is nobody's business
    assert torch.equal(ids[known], places[:, :count][known])


def test_adjacent_float32_values_and_distant_ties() -> None:
    logp = torch.full((1, 100_003), -3.0)
    below = torch.nextafter(torch.tensor(-3.0), torch.tensor(-4.0))
    logp[0, :7] = below
    above = torch.nextafter(torch.tensor(-3.0), torch.tensor(0.0))
    logp[0, 100_002] = above  # in the rest that belongs to no chunk
    values, ids = stable_topk(logp, 3)
    assert ids.tolist() == [[100_002, 7, 8]]
    assert values.tolist() == [[above.item(), -3.0, -3.0]]


def test_a_huge_vocabulary() -> None:
    logp = torch.full((2, 3_000_017), -20.0)
    logp[0, [2_999_999, 5]] = -1.0
    logp[1, 3_000_016] = -1.0
    assert stable_topk(logp, 3)[1].tolist() == [[5, 2_999_999, 0], [3_000_016, 0, 1]]


@pytest.mark.parametrize("words", [3, 3001])
def test_nan_comes_first(words: int) -> None:
    logp = torch.full((1, words), -1.0)
    logp[0, 2] = torch.nan
    assert stable_topk(logp, 2)[0].isnan().any()
