"""The scores and weights of a captured attention are those of the formula, for every part and order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention

B, H, G, Q, K, D = 2, 6, 3, 5, 7, 11
ALL = slice(None)


def random_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, Q, D, dtype=dtype), torch.randn(B, G, K, D, dtype=dtype)


def reference_scores(query: Tensor, key: Tensor, scale: float = 1.0) -> Tensor:
    return scale * query.double() @ key.double().repeat_interleave(H // G, 1).mT


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1).nan_to_num(0)


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(Q)[:, None], torch.arange(K)


def test_three_keys_by_hand() -> None:
    """One query [0, 1], scores 0, 1, 1: e⁰ = 1 and 2.718 twice, of 6.437."""
    query = torch.tensor([[[[0.0, 1.0]]]])
    key = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]]])
    weights = CapturedAttention(query, key).compute_weights(0, ALL, ALL, ALL)
    torch.testing.assert_close(weights, torch.tensor([[[0.1554, 0.4223, 0.4223]]]), rtol=0, atol=1e-4)
    capped = CapturedAttention(query, key, scale=2.0, softcap=1.0).compute_scores(0, ALL, ALL, ALL)
    torch.testing.assert_close(capped, torch.tensor([[[0.0, 0.9640, 0.9640]]]), rtol=0, atol=1e-4)


def test_masks_and_grouped_heads() -> None:
    query, key = random_inputs()
    i, j = positions()
    s = reference_scores(query, key, 0.3)
    capped = 2 * torch.tanh(s / 2)
    allowed = torch.rand(B, 1, Q, K) < 0.6
    allowed[0, 0, 2] = False
    bias = torch.randn(H, Q, K, dtype=torch.float64)
    keys = allowed[:, :, :1]
    changed = s + torch.arange(B)[:, None, None, None] - torch.arange(H)[:, None, None]
    changed = changed.masked_fill(j > i, -torch.inf)
    hole = bias.masked_fill(torch.rand(H, Q, K) < 0.3, -torch.inf)
    cases = [
        ({}, s),
        ({"softcap": 2.0}, capped),
        ({"diagonal": 0}, s.masked_fill(j > i, -torch.inf)),
        ({"diagonal": 2, "window": 3}, s.masked_fill((j > i + 2) | (j <= i - 1), -torch.inf)),
        ({"diagonal": -2}, s.masked_fill(j > i - 2, -torch.inf)),
        ({"mask": allowed}, s.masked_fill(~allowed, -torch.inf)),
        ({"mask": bias}, s + bias),
        ({"mask": hole}, s + hole),
        ({"mask": keys, "diagonal": 3}, s.masked_fill(~keys | (j > i + 3), -torch.inf)),
        ({"mask": bias, "softcap": 2.0}, capped + bias),
        ({"score_mod": lambda s, b, h, q, k: torch.where(k <= q, s + b - h, -torch.inf)}, changed),
    ]
    for options, expected in cases:
        attention = CapturedAttention(query, key, scale=0.3, **options)
        for b in range(B):
            torch.testing.assert_close(attention.compute_scores(b, ALL, ALL, ALL), expected[b])
            torch.testing.assert_close(attention.compute_weights(b, ALL, ALL, ALL), softmax(expected[b]))
            torch.testing.assert_close(
                attention.compute_scores(b, slice(1, 5), slice(1, 4), slice(2, 6)), expected[b, 1:5, 1:4, 2:6]
            )


PARTS = [
    (slice(0, 2), slice(0, 5), slice(0, 7)),
    (slice(2, 3), slice(1, 4), slice(3, 5)),
    (slice(1, 6), slice(4, 5), slice(0, 1)),
    (torch.tensor([5, 0, 3]), slice(0, 3), torch.tensor([6, 0, 0])),
    (torch.tensor([4]), torch.tensor([3, 1, 1]), slice(2, 7)),
    (slice(0, 6), torch.tensor([2, 0]), torch.tensor([1])),
    (torch.tensor([2, 1]), torch.tensor([4, 0, 2]), slice(0, 7)),
    (slice(0, 6), slice(2, 2), slice(0, 7)),
]


@pytest.mark.parametrize("options", [{}, {"diagonal": 1, "window": 4}], ids=["all", "windowed"])
def test_parts_in_any_order(options: dict[str, int]) -> None:
    query, key = random_inputs()
    whole = torch.stack([CapturedAttention(query, key, **options).compute_weights(b, ALL, ALL, ALL) for b in range(B)])
    for order in (PARTS, PARTS[::-1]):
        attention = CapturedAttention(query, key, **options)
        for _ in range(2):  # the second time from cached row sums
            for heads, rows, cols in order:
                expected = whole[1][heads][:, rows][..., cols]
                torch.testing.assert_close(attention.compute_weights(1, heads, rows, cols), expected)


def test_row_sums_are_cached() -> None:
    query, key = random_inputs()
    calls = []

    def score(q: Tensor, k: Tensor) -> Tensor:
        calls.append(q.shape[2])
        return q @ k.repeat_interleave(H // G, 1).mT

    attention = CapturedAttention(query, key, score_function=score)
    first = attention.compute_weights(0, slice(0, 2), slice(1, 4), slice(2, 3))
    assert attention.get_lse(0, slice(0, 2), slice(1, 4)) is not None
    assert attention.get_lse(0, slice(0, 3), slice(1, 4)) is None
    assert attention.get_lse(1, slice(0, 2), slice(1, 4)) is None
    torch.testing.assert_close(attention.compute_weights(0, slice(0, 2), slice(1, 4), slice(2, 3)), first)
    expected = reference_scores(query, key)[0, :2, 1:4].logsumexp(-1)
    torch.testing.assert_close(attention.get_lse(0, slice(0, 2), slice(1, 4)), expected)
    assert calls == [3, 3]


def test_row_sums_of_the_kernel_are_used() -> None:
    query, key = random_inputs()
    i, j = positions()
    s = reference_scores(query, key).masked_fill(j > i - 1, -torch.inf)  # the first row has no key
    for empty in (-torch.inf, torch.inf):
        lse = s.logsumexp(-1).where(torch.arange(Q) > 0, empty)
        attention = CapturedAttention(query, key, diagonal=-1, lse=lse)
        torch.testing.assert_close(attention.compute_weights(1, ALL, ALL, slice(2, 5)), softmax(s)[1, :, :, 2:5])
    wrong_lse = reference_scores(query, key).logsumexp(-1) + 1
    expected = reference_scores(query, key)[0].softmax(-1) / torch.e
    attention = CapturedAttention(query, key, lse=wrong_lse)
    torch.testing.assert_close(attention.compute_weights(0, ALL, ALL, ALL), expected)
    attention = CapturedAttention(query, key)
    attention.store_lse(0, ALL, ALL, wrong_lse[0])
    torch.testing.assert_close(attention.compute_weights(0, ALL, ALL, ALL), expected)


def test_score_function_gets_the_whole_batch_and_all_keys() -> None:
    import jumok

    additive = jumok.scores.Additive(D, D, 3).double()
    query, key = torch.randn(B, 1, Q, D).double(), torch.randn(B, 1, K, D).double()
    attention = CapturedAttention(query, key, score_function=additive)
    expected = jumok.weights(query, key, score=additive).detach()
    torch.testing.assert_close(attention.compute_weights(1, ALL, slice(1, 4), slice(2, 5)), expected[1, :, 1:4, 2:5])
    offset = torch.randn(B, H, 1, K).double()  # differs between batch indices, heads and keys
    queries, keys = random_inputs()
    attention = CapturedAttention(
        queries, keys, score_function=lambda q, k: q @ k.repeat_interleave(H // G, 1).mT + offset
    )
    expected = (reference_scores(queries, keys) + offset).softmax(-1)
    torch.testing.assert_close(
        attention.compute_weights(1, slice(4, 5), slice(1, 4), slice(2, 5)), expected[1, 4:5, 1:4, 2:5]
    )


def test_tensors_of_the_caller_are_not_modified() -> None:
    query, key = random_inputs()
    owned = torch.randn(B, H, Q, K, dtype=torch.float64)
    before = owned.clone()
    CapturedAttention(query, key, score_function=lambda q, k: owned).compute_weights(0, ALL, ALL, ALL)
    CapturedAttention(query, key, score_mod=lambda s, b, h, q, k: owned[0]).compute_weights(0, ALL, ALL, ALL)
    CapturedAttention(query, key, mask=owned).compute_weights(0, ALL, ALL, ALL)
    torch.testing.assert_close(owned, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    query, key = (x.to(dtype) for x in random_inputs())
    for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
        with context:  # neither may change the result
            weights = CapturedAttention(query, key, scale=0.3).compute_weights(0, ALL, ALL, ALL)
        assert weights.dtype == torch.float32
        exact = reference_scores(query, key, 0.3)[0].softmax(-1)
        torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-7)


def test_weights_need_no_gradient() -> None:
    query, key = random_inputs()
    assert not CapturedAttention(query.requires_grad_(), key).compute_weights(0, ALL, ALL, ALL).requires_grad


def test_lowest_number_masks_like_infinity() -> None:
    query, key = random_inputs(torch.float32)
    mask = torch.zeros(B, 1, Q, K)
    mask[..., 3:] = torch.finfo(torch.float32).min
    weights = CapturedAttention(query, key, mask=mask).compute_weights(0, ALL, ALL, ALL)
    torch.testing.assert_close(weights[..., :3], reference_scores(query, key)[0, ..., :3].softmax(-1).float())
    assert not weights[..., 3:].any()
    assert (
        not CapturedAttention(query, key, mask=torch.full_like(mask, torch.finfo(torch.float32).min))
        .compute_weights(0, ALL, ALL, ALL)
        .any()
    )
    # A number that is only large does not mask: rows sum to one.
    attention = CapturedAttention(query, key, mask=torch.full_like(mask, -1e9))
    for _ in range(2):
        torch.testing.assert_close(attention.compute_weights(0, ALL, ALL, ALL).sum(-1), torch.ones(H, Q))


def test_masked_keys_may_be_nan() -> None:
    query, key = random_inputs()
    visible = torch.arange(K) < 4
    numbers = torch.zeros(K).masked_fill(~visible, torch.finfo(torch.float32).min)
    clean = CapturedAttention(query, key, mask=visible).compute_weights(0, ALL, ALL, ALL)
    key = key.clone()
    key[:, :, 4:] = torch.nan
    for mask in (visible, numbers, numbers.masked_fill(~visible, -torch.inf)):
        torch.testing.assert_close(CapturedAttention(query, key, mask=mask).compute_weights(0, ALL, ALL, ALL), clean)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": torch.ones(2, 3, 5)}, "unsqueeze"),
        ({"query": torch.ones(2, 5, 3, 11)}, "multiple"),
        ({"query": torch.ones(3, 6, 3, 11)}, "same batch"),
        ({"query": torch.ones(2, 6, 5, 4)}, "width 4"),
        ({"mask": torch.ones(5, 6)}, "does not broadcast"),
        ({"mask": torch.ones(1, 2, 6, 5, 7)}, "does not broadcast"),
        ({"mask": torch.ones(7, dtype=torch.long)}, "int64"),
        ({"window": 3}, "diagonal"),
        ({"window": 0, "diagonal": 0}, "at least one key"),
        ({"lse": torch.ones(2, 6, 5, 1)}, r"\(2, 6, 5\) is expected"),
    ],
)
def test_invalid_arguments(options: dict[str, object], message: str) -> None:
    query, key = random_inputs(torch.float32)
    with pytest.raises(InputError, match=message):
        CapturedAttention(**{"query": query, "key": key} | options)


def test_slice_with_a_step_is_an_error() -> None:
    with pytest.raises(InputError, match="step"):
        CapturedAttention(*random_inputs()).compute_scores(0, ALL, slice(0, 5, 2), ALL)


def test_row_sums_cached_in_inference_mode() -> None:
    query, key = random_inputs()
    attention = CapturedAttention(query, key)
    with torch.inference_mode():
        attention.compute_weights(0, ALL, slice(0, 2), ALL)
    weights = attention.compute_weights(0, ALL, ALL, ALL)
    torch.testing.assert_close(weights, softmax(reference_scores(query, key))[0])


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((1, 3), (2, 3)),
        ((2, 3), (1, 3)),
        ((1, 6), (2, 3)),
        ((2, 6), (1, 1)),
        ((2, 1), (2, 3)),
        ((1, 1), (2, 3)),
    ],
)
def test_batch_of_one_and_single_head_are_expanded(query: tuple[int, int], key: tuple[int, int]) -> None:
    queries, keys = torch.randn(*query, Q, D), torch.randn(*key, K, D)
    batch, heads = max(query[0], key[0]), max(query[1], key[1])
    attention = CapturedAttention(queries, keys, scale=0.3)
    assert attention.shape == (batch, heads, Q, K)
    expanded_keys = keys.repeat_interleave(heads // key[1], 1).expand(batch, -1, -1, -1)
    expected = (0.3 * queries.expand(batch, heads, -1, -1) @ expanded_keys.mT).softmax(-1)
    for row in range(batch):
        torch.testing.assert_close(attention.compute_weights(row, ALL, ALL, ALL), expected[row])


def test_batches_that_do_not_broadcast_are_an_error() -> None:
    with pytest.raises(InputError, match="one of them a batch of 1"):
        CapturedAttention(torch.randn(2, 1, Q, D), torch.randn(3, 1, K, D))


def test_sparse_weights() -> None:
    rows, keys = torch.tensor([5, 0, 5, 2]), torch.tensor([6, 1, 0, 3])  # of 1 · 2 · 3 rows, and 7 keys
    weights = torch.tensor([0.25, 1.0, 0.5, 0.125])
    attention = CapturedAttention.from_sparse_weights(rows, keys, weights, (1, 2, 3, 7))
    whole = torch.zeros(2, 3, 7)
    whole[0, 0, 1], whole[0, 2, 3], whole[1, 2, 0], whole[1, 2, 6] = 1.0, 0.125, 0.5, 0.25
    assert attention.shape == (1, 2, 3, 7)
    everything = attention.compute_weights(0, slice(0, 2), slice(0, 3), slice(0, 7))
    torch.testing.assert_close(everything, whole)
    part = attention.compute_weights(0, torch.tensor([1]), torch.tensor([2, 0]), slice(5, 7))
    torch.testing.assert_close(part, whole[1:, [2, 0], 5:])
