"""Positions: numbers by hand, and every way to say where the tokens stand."""

from __future__ import annotations

import math

import pytest
import torch

from jumok.attention.kv_cache import KVCache
from jumok.attention.positions import (
    LearnedPositions,
    PositionEmbedding,
    SinusoidalPositions,
    within_documents,
)
from jumok.errors import InputError

B, T, D = 2, 5, 7
kinds = pytest.mark.parametrize(
    "position", [SinusoidalPositions(D), LearnedPositions(31, D)], ids=["sinusoid", "learned"]
)


def test_the_sinusoid_by_hand() -> None:
    """Width 4: wave lengths 2π and 100 · 2π."""
    vectors = SinusoidalPositions(4)(torch.zeros(2, 4, dtype=torch.float64), offset=3)
    by_hand = [[math.sin(n), math.cos(n), math.sin(n / 100), math.cos(n / 100)] for n in (3, 4)]
    torch.testing.assert_close(vectors, torch.tensor(by_hand, dtype=torch.float64), rtol=0, atol=1e-15)
    assert [round(x, 4) for x in vectors[0].tolist()] == [0.1411, -0.9900, 0.0300, 0.9996]


@pytest.mark.parametrize("width", [1, 2, 7, 12])
def test_the_sinusoid_is_the_formula_at_every_width_and_length(width: int) -> None:
    length = 211
    vectors = SinusoidalPositions(width)(torch.zeros(length, width, dtype=torch.float64))
    for place in (0, 1, 13, length - 1):
        for i in range(width):
            wave = math.cos if i % 2 else math.sin
            expected = wave(place / 10000 ** ((i - i % 2) / width))
            assert vectors[place, i].item() == pytest.approx(expected, abs=1e-12)


def test_the_sinusoid_has_no_maximum_and_stays_exact_far_out() -> None:
    far = 1_000_003
    vectors = SinusoidalPositions(2)(torch.zeros(1, 2), offset=far)
    assert vectors[0].tolist() == pytest.approx([math.sin(far), math.cos(far)], abs=1e-7)


@kinds
def test_equal_rows_get_one_table_for_all(position: PositionEmbedding) -> None:
    table = position(torch.zeros(B, T, D))
    assert table.shape == (T, D)
    assert torch.equal(table, position(torch.zeros(T, D)))


@kinds
def test_an_offset_goes_on_where_the_past_ended(position: PositionEmbedding) -> None:
    whole = position(torch.zeros(B, T, D))
    assert torch.equal(whole[3:], position(torch.zeros(B, T - 3, D), offset=3))
    assert torch.equal(whole[3:], position(torch.zeros(B, T - 3, D), offset=torch.tensor(3)))


@kinds
@pytest.mark.parametrize("kind", [tuple, list, torch.tensor])
def test_an_offset_for_each_row(position: PositionEmbedding, kind) -> None:  # type: ignore[no-untyped-def]
    table = position(torch.zeros(31, D))
    vectors = position(torch.zeros(B, T, D), offset=kind([11, 3]))
    assert vectors.shape == (B, T, D)
    assert torch.equal(vectors, torch.stack([table[11:16], table[3:8]]))


@kinds
def test_a_cache_says_its_offset(position: PositionEmbedding) -> None:
    key = torch.zeros(B, 3, 4, 2)
    table = position(torch.zeros(31, D))
    for lengths, expected in (
        (None, table[4:6]),
        ([1, 4], torch.stack([table[1:3], table[4:6]])),
    ):
        cache = KVCache().append(key, key, lengths)
        assert torch.equal(position(torch.zeros(B, 2, D), offset=cache.offset), expected)
    assert torch.equal(position(torch.zeros(B, 2, D), offset=KVCache().offset), table[:2])


@kinds
def test_packed_documents_each_begin_at_zero(position: PositionEmbedding) -> None:
    table = position(torch.zeros(T, D))
    ids = torch.tensor([[5, 5, 5, 2, 2], [1, 4, 4, 4, -1]])
    expected = table[torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 0]])]
    assert torch.equal(position(torch.zeros(B, T, D), positions=within_documents(ids)), expected)
    assert torch.equal(position(torch.zeros(B, T, D), positions=within_documents(ids[0])), expected[0])


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_follows_the_input(position: PositionEmbedding, dtype: torch.dtype) -> None:
    vectors = position(torch.zeros(T, D, dtype=dtype))
    assert vectors.dtype == dtype
    torch.testing.assert_close(vectors, position(torch.zeros(T, D, dtype=torch.float64)).to(dtype))


@kinds
def test_no_tokens(position: PositionEmbedding) -> None:
    assert position(torch.zeros(B, 0, D)).shape == (0, D)
    assert position(torch.zeros(B, 0, D), offset=[1, 2]).shape == (B, 0, D)


@kinds
def test_nothing_is_kept_between_calls(position: PositionEmbedding) -> None:
    before = dict(position.__dict__), list(position.state_dict())
    with torch.inference_mode():
        position(torch.zeros(T, D), offset=2)
    assert (dict(position.__dict__), list(position.state_dict())) == before


def test_the_sinusoid_has_no_weights() -> None:
    assert SinusoidalPositions(D).state_dict() == {}


def test_learned_vectors_learn_at_the_positions_that_were_used() -> None:
    position = LearnedPositions(11, D)
    position(torch.zeros(B, T, D), offset=[3, 4]).sum().backward()
    assert position.table.weight.grad is not None
    assert position.table.weight.grad[:, 0].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 1, 0, 0]


@kinds
def test_no_graph_break_when_compiled(position: PositionEmbedding) -> None:
    """Checked by tracing alone, which is where a look at a tensor's numbers would break the graph."""
    compiled = torch.compile(position, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(B, T, D)), position(torch.zeros(B, T, D)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SinusoidalPositions(0), "width=0"),
        (lambda: LearnedPositions(0, D), "max_positions=0"),
        (
            lambda: SinusoidalPositions(D)(torch.zeros(B, T, D + 1)),
            r"\(2, 5, 8\); expected \(tokens, 7\)",
        ),
        (lambda: SinusoidalPositions(D)(torch.zeros(D)), r"has shape \(7,\)"),
        (lambda: SinusoidalPositions(D)(torch.zeros(B, T, D), offset=[1, 2, 3]), "one for each row"),
        (lambda: SinusoidalPositions(D)(torch.zeros(T, D), offset=[1, 2]), "one for each row"),
        (lambda: SinusoidalPositions(D)(torch.zeros(B, T, D), offset=[1.5, 2.0]), "expected an integer"),
        (lambda: SinusoidalPositions(D)(torch.zeros(B, T, D), positions=torch.zeros(T)), "float32"),
        (
            lambda: SinusoidalPositions(D)(torch.zeros(B, T, D), positions=torch.zeros(T, B).long()),
            r"\(batch, tokens\)",
        ),
        (
            lambda: SinusoidalPositions(D)(torch.zeros(T, D), offset=1, positions=torch.arange(T)),
            "only one of them",
        ),
        (
            lambda: LearnedPositions(5, D)(torch.zeros(B, 6, D)),
            "position 5, only for 0 … 4.*larger max_positions.*SinusoidalPositions",
        ),
        (lambda: LearnedPositions(5, D)(torch.zeros(B, 2, D), offset=4), "position 5"),
        (lambda: LearnedPositions(5, D)(torch.zeros(B, 2, D), offset=[0, 4]), "position 5"),
        (lambda: LearnedPositions(5, D)(torch.zeros(B, 2, D), offset=-1), "position -1"),
        (lambda: LearnedPositions(5, D)(torch.zeros(2, D), positions=torch.tensor([0, 7])), "position 7"),
    ],
)
def test_errors_say_what_came_and_what_was_expected(wrong, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        wrong()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@kinds
def test_the_gpu_is_never_waited_for(position: PositionEmbedding) -> None:
    position.to("cuda")
    x, ids = torch.zeros(B, T, D, device="cuda"), torch.zeros(T, device="cuda").long()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for arguments in ({}, {"offset": 3}, {"offset": [3, 1]}, {"positions": within_documents(ids)}):
            assert position(x, **arguments).device == x.device
    finally:
        torch.cuda.set_sync_debug_mode("default")
        position.to("cpu")
