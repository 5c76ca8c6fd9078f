"""Views of attention and what they are chosen by, with numbers that can be checked by hand."""

import doctest
import math

import pytest
import torch

from jumok.look.views import alignment_selection as module
from jumok.look.views.alignment_selection import (
    AlignmentView,
    SentencePairAttention,
    build_links,
    compute_agreement,
    compute_consistency,
    list_alignment_views,
)


def looked(weights: list[list[list[list[float]]]], target: list[int], source: list[int]) -> SentencePairAttention:
    words = (max(target) + 1, max(source) + 1)
    return SentencePairAttention(torch.tensor(weights), target, source, words)


# One layer with two heads; two target pieces and the end, three source pieces.
ONE = [[[[0.6, 0.4, 0.0], [0.0, 0.2, 0.8], [0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0], [0.4, 0.6, 0.0], [1.0, 0.0, 0.0]]]]


def test_the_examples_in_the_docstrings() -> None:
    done = doctest.testmod(module, extraglobs={"torch": torch})
    assert done.failed == 0 < done.attempted


def test_a_view_is_of_one_head_or_the_mean_and_of_this_step_or_the_next() -> None:
    seen = looked(ONE, [0, 1], [0, 1, 2])
    expect = {
        AlignmentView(0, 0): [[0.6, 0.4, 0.0], [0.0, 0.2, 0.8]],
        AlignmentView(0, 1, shift=True): [[0.4, 0.6, 0.0], [1.0, 0.0, 0.0]],
        AlignmentView(0): [[0.3, 0.2, 0.5], [0.2, 0.4, 0.4]],
    }
    for view, right in expect.items():
        torch.testing.assert_close(seen.compute_word_map(view), torch.tensor(right))


def test_pieces_of_a_source_word_are_added_and_those_of_a_target_word_averaged() -> None:
    seen = looked(ONE, [0, 0], [0, 1, 1])
    torch.testing.assert_close(seen.compute_word_map(AlignmentView(0, 0)), torch.tensor([[0.3, 0.7]]))
    torch.testing.assert_close(seen.compute_word_map(AlignmentView(0, 0, shift=True)), torch.tensor([[0.0, 1.0]]))


def test_words_without_pieces_have_no_weight_and_no_link() -> None:
    seen = SentencePairAttention(torch.tensor(ONE), [0, 2], [0, 1, 1], (4, 3))
    found = seen.compute_word_map(AlignmentView(0, 0))
    assert found.shape == (4, 3)
    assert found[1].sum() == found[3].sum() == found[:, 2].sum() == 0
    assert build_links(seen.pick_source_words()[1]) == {(0, 0), (1, 2)}


def test_picks_are_the_strongest_of_every_view_in_order() -> None:
    torch.manual_seed(5)
    seen = SentencePairAttention(torch.rand(3, 2, 8, 5).softmax(-1), [0, 0, 1, 2, 2, 3, 4], [0, 1, 1, 2, 3], (5, 4))
    picks, known = seen.pick_source_words(), list_alignment_views(3, 2)
    assert picks.shape == (len(known), 5) == (18, 5)
    for view, picked in zip(known, picks, strict=True):
        assert picked.tolist() == seen.compute_word_map(view).argmax(1).tolist()


def test_agreement_is_the_f1_of_the_links_of_both_directions() -> None:
    # Two sentences. Forth: a view that links both words rightly and one that always looks at word 0.
    forth = [torch.tensor([[0, 1], [0, 0]]), torch.tensor([[1, 0, 0], [0, 0, 0]])]
    # Back, from 2 and 2 words: a view that returns every link, one that looks at word 1, a silent one.
    back = [torch.tensor([[0, 1], [1, 1], [-1, -1]]), torch.tensor([[1, 0], [1, 1], [-1, -1]])]
    found = compute_agreement(forth, back)
    assert found.shape == (2, 3)
    #       both found   5 links forth, 4 back (0 of the silent view)
    right = [[2 * 4 / 9, 2 * 2 / 9, 0.0], [2 * 2 / 9, 2 * 2 / 9, 0.0]]
    torch.testing.assert_close(found, torch.tensor(right))


def test_a_view_that_abstains_agrees_with_nobody() -> None:
    none = [torch.tensor([[-1, -1]])]
    assert compute_agreement(none, [torch.tensor([[0, 1]])]).tolist() == [[0.0]]
    assert compute_agreement(none, none).tolist() == [[0.0]]


def test_consistency_of_links_that_are_always_the_same_is_what_a_word_can_tell() -> None:
    texts = [(["a", "b"], ["x", "y"])] * 50
    right, crossed = torch.tensor([0, 1]), torch.tensor([1, 0])
    always = compute_consistency([torch.stack([right, crossed])] * 50, texts)
    # Each word has 50 links, all to one word of probability 1/2: 49 others and half a made-up one say so.
    expected = math.log((49 + 0.5) / (49 + 1) / 0.5)
    torch.testing.assert_close(always, torch.tensor([expected, expected]))
    mixed = compute_consistency([torch.stack([right if n % 2 else crossed] * 2) for n in range(50)], texts)
    assert abs(float(mixed[0])) < 0.05  # as good as chance


def test_a_link_that_no_other_supports_counts_against_a_view() -> None:
    found = compute_consistency([torch.tensor([[0], [-1]])], [(["a"], ["x"])])
    # p(x) = 1, and nothing but the made-up link is left: no more and no less than chance.
    assert found.tolist() == [0.0, 0.0]
    rare = compute_consistency([torch.tensor([[0, 1, 2]])], [(["a", "b", "b"], ["x", "y", "z"])])
    assert float(rare) == pytest.approx(2 * math.log((1 / 3) / 2 / (1 / 3)) / 3)


def test_a_step_off_is_less_consistent_and_agrees_less() -> None:
    chance = torch.Generator().manual_seed(3)
    words = [torch.randint(0, 11, (7,), generator=chance).tolist() for _ in range(80)]
    texts = [([f"s{w}" for w in one], [f"t{w}" for w in one]) for one in words]
    straight, off = torch.arange(7), torch.arange(7).add(1).clamp(max=6)
    picks = [torch.stack([straight, off])] * 80
    found = compute_consistency(picks, texts)
    assert found[0] > 2.0 > 0.5 > found[1]
    both = compute_agreement(picks, [torch.stack([straight, off])] * 80)
    assert int(both.argmax()) == 0
    assert both[1, 1] < 0.2  # each is a step off in its own direction: together, two


def test_views_tell_what_they_are() -> None:
    assert str(AlignmentView(2, None, shift=True)) == "layer 2, mean of heads, shifted"
    assert len(list_alignment_views(6, 8)) == 2 * 6 * 9
