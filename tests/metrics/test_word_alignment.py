"""Links, their format and their error rate, by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jumok.data.readers.word_alignments import GoldAlignment
from jumok.errors import InputError
from jumok.metrics.word_alignment import (
    argmax_links,
    format_links,
    mutual_argmax_links,
    pool_to_words,
    score_alignment,
    swap_links,
)

MAP = torch.tensor(
    [
        [0.7, 0.2, 0.1],
        [0.1, 0.5, 0.4],
        [0.6, 0.1, 0.3],
        [0.0, 0.0, 0.0],
        [0.3, 0.3, 0.4],
    ]
)


def test_pieces_to_words_by_hand() -> None:
    # Target: word 0 of two pieces, word 1 of one, EOS. Source: word 0 of one, word 1 of two, EOS.
    weights = torch.tensor(
        [
            [0.1, 0.2, 0.3, 0.4],
            [0.5, 0.1, 0.1, 0.3],
            [0.0, 0.6, 0.2, 0.2],
            [0.0, 0.0, 0.0, 1.0],
        ]
    )
    words = pool_to_words(weights, [0, 0, 1, None], [0, 1, 1, None])
    assert words.tolist() == [pytest.approx([0.3, 0.35]), pytest.approx([0.0, 0.8])]


def test_pieces_to_words_keeps_mass_heads_and_gaps() -> None:
    weights = torch.rand(2, 3, 7, 5).softmax(-1)
    words = pool_to_words(weights, [0, 0, 0, 1, 2, 2, 4], [0, 1, 1, 3, 3])
    assert words.shape == (2, 3, 5, 4)
    assert torch.allclose(words.sum(-1)[..., [0, 1, 2, 4]], torch.ones(2, 3, 4))
    assert not words[..., 3, :].any()  # nobody belongs to word 3
    assert not words[..., :, 2].any()
    assert torch.equal(words[1, 2], pool_to_words(weights[1, 2], [0, 0, 0, 1, 2, 2, 4], [0, 1, 1, 3, 3]))
    assert torch.equal(pool_to_words(weights, range(7), range(5)), weights)


def test_pieces_that_belong_to_no_word() -> None:
    assert pool_to_words(torch.ones(2, 1), [None, None], [None]).shape == (0, 0)
    assert pool_to_words(torch.ones(0, 3), [], [0, 1, 1]).shape == (0, 2)


def test_links_by_hand() -> None:
    assert argmax_links(MAP) == {(0, 0), (1, 1), (0, 2), (2, 4)}
    assert argmax_links(MAP, min_weight=0.5) == {(0, 0), (1, 1), (0, 2)}
    # The source's favourites: word 0 row 0, word 1 row 1, word 2 row 1 (0.4, before the 0.4 of row 4).
    assert mutual_argmax_links(MAP) == {(0, 0), (1, 1)}
    assert argmax_links(torch.tensor([[0.5, 0.5]])) == {(0, 0)}
    assert (
        argmax_links(torch.zeros(3, 0))
        == argmax_links(torch.zeros(0, 3))
        == mutual_argmax_links(torch.zeros(0, 3))
        == frozenset()
    )
    assert swap_links(frozenset({(1, 2)})) == {(2, 1)}


def test_links_need_a_single_map() -> None:
    for make in (argmax_links, mutual_argmax_links):
        with pytest.raises(InputError, match="one map"):
            make(MAP[None])


LINKS = st.frozensets(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=20)


def test_pharaoh_format() -> None:
    assert format_links(frozenset()) == ""
    assert format_links(frozenset({(3, 11), (10, 2), (3, 2)})) == "3-2 3-11 10-2"


def test_the_error_rate_by_hand() -> None:
    # A = {00, 11, 22, 03}; S = {00, 11, 44}; P = S and {22, 33}.
    result = frozenset({(0, 0), (1, 1), (2, 2), (0, 3)})
    gold = GoldAlignment(frozenset({(0, 0), (1, 1), (4, 4)}), frozenset({(2, 2), (3, 3)}))
    score = score_alignment([result], [gold])
    assert score.precision == 3 / 4
    assert score.recall == 2 / 3
    assert score.error_rate == pytest.approx(1 - (2 + 3) / (4 + 3))
    assert score.f1 == pytest.approx(2 * 0.75 * (2 / 3) / (0.75 + 2 / 3))
    assert (score.num_links, score.num_sure_links) == (4, 3)


def test_counts_are_summed_before_division() -> None:
    result = [frozenset({(0, 0)}), frozenset({(0, 0), (1, 1), (2, 2)}), frozenset()]
    gold = [
        GoldAlignment(frozenset({(0, 1)})),
        GoldAlignment(frozenset({(0, 0), (1, 1), (2, 2)})),
        GoldAlignment(frozenset({(5, 5)})),
    ]
    score = score_alignment(result, gold)
    assert (score.precision, score.recall) == (3 / 4, 3 / 5)
    assert score.error_rate == pytest.approx(1 - 6 / 9)
    assert score.f1 == pytest.approx(1 - score.error_rate)  # where all links are sure


def test_empty_alignments() -> None:
    nothing, one = frozenset(), frozenset({(0, 0)})
    assert score_alignment([nothing], [GoldAlignment(one)]).error_rate == 1.0
    assert score_alignment([nothing], [GoldAlignment(nothing)]).error_rate == 0.0
    assert score_alignment([one], [GoldAlignment(nothing)]).error_rate == 1.0
    assert score_alignment([one], [GoldAlignment(nothing, one)]).error_rate == 0.0
    assert score_alignment([one], [GoldAlignment(frozenset({(1, 1)}))]).f1 == 0.0
    for some in ([], [GoldAlignment(one)] * 2):
        with pytest.raises(InputError, match="links of 1 sentences and gold links of"):
            score_alignment([one], some)
    with pytest.raises(InputError, match="at least one"):
        score_alignment([], [])


@given(LINKS, LINKS, LINKS)
def test_the_error_rate_is_between_0_and_1(result, sure, possible) -> None:
    score = score_alignment([result], [GoldAlignment(sure, possible)])
    assert 0 <= score.error_rate <= 1
    assert 0 <= score.f1 <= 1
    assert score_alignment([sure], [GoldAlignment(sure, possible)]).error_rate == 0
