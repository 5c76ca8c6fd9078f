"""Tests of pooled maps that are computed from a sample of the queries."""

from __future__ import annotations

import pytest
import torch

from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.views.sampling import compute_sampled_map, compute_sampled_received_weight
from jumok.look.views.statistics import compute_pooled_map, compute_received_weight

N, D = 307, 5


@pytest.fixture
def attention() -> CapturedAttention:
    """Neighbouring queries are similar, as in a text."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, N, D).cumsum(2) / 3, torch.randn(1, 2, N, D)
    return CapturedAttention(query, key, scale=0.3, diagonal=0)


def test_sample_of_all_queries_is_exact(attention: CapturedAttention) -> None:
    rows, cols = slice(40, 299), slice(11, 200)
    sampled = compute_sampled_map(attention, 0, 1, rows, cols, 13, rows_per_cell=99)
    assert torch.allclose(sampled, compute_pooled_map(attention, head=1, rows=rows, cols=cols, size=13), atol=1e-6)
    received = compute_sampled_received_weight(attention, 0, 1, slice(0, N), 10_000)
    assert torch.allclose(received, compute_received_weight(attention, head=1), atol=1e-4)


def test_rows_of_a_sampled_map_sum_to_one(attention: CapturedAttention) -> None:
    sampled = compute_sampled_map(attention, 0, 0, slice(0, N), slice(0, N), 11, rows_per_cell=4)
    assert torch.allclose(sampled.sum(1), torch.ones(11), atol=1e-5)
    exact = compute_pooled_map(attention, head=0, size=11)
    one = compute_sampled_map(attention, 0, 0, slice(0, N), slice(0, N), 11, rows_per_cell=1)
    assert (sampled - exact).norm() < 0.5 * (one - exact).norm()


def test_first_row_of_each_cell_is_in_its_middle(attention: CapturedAttention) -> None:
    sampled = compute_sampled_map(attention, 0, 0, slice(0, N), slice(0, N), 3, rows_per_cell=1)
    weights = attention.compute_weights(0, slice(0, 1), torch.tensor([51, 153, 255]), slice(0, N))[0]
    assert torch.allclose(sampled[:, 0], weights[:, :102].sum(1), atol=1e-6)
