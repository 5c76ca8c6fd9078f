"""Alignment views and the criteria that select one, with numbers checked by hand."""

import math

import pytest
import torch

from jumok.look.views.alignment_selection import (
    AlignmentView,
    SentencePairAttention,
    build_links,
    compute_agreement,
    compute_consistency,
    list_alignment_views,
)


def build_attention(
    weights: list[list[list[list[float]]]], target: list[int], source: list[int]
) -> SentencePairAttention:
    words = (max(target) + 1, max(source) + 1)
    return SentencePairAttention(torch.tensor(weights), target, source, words)


# One layer with two heads; two target tokens and the end, three source tokens.
WEIGHTS = [[[[0.6, 0.4, 0.0], [0.0, 0.2, 0.8], [0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0], [0.4, 0.6, 0.0], [1.0, 0.0, 0.0]]]]


def test_word_maps_of_views() -> None:
    attention = build_attention(WEIGHTS, [0, 1], [0, 1, 2])
    expected_maps = {
        AlignmentView(0, 0): [[0.6, 0.4, 0.0], [0.0, 0.2, 0.8]],
        AlignmentView(0, 1, shift=True): [[0.4, 0.6, 0.0], [1.0, 0.0, 0.0]],
        AlignmentView(0): [[0.3, 0.2, 0.5], [0.2, 0.4, 0.4]],
    }
    for view, expected in expected_maps.items():
        torch.testing.assert_close(attention.compute_word_map(view), torch.tensor(expected))


def test_source_tokens_are_summed_and_target_tokens_averaged() -> None:
    attention = build_attention(WEIGHTS, [0, 0], [0, 1, 1])
    torch.testing.assert_close(attention.compute_word_map(AlignmentView(0, 0)), torch.tensor([[0.3, 0.7]]))
    torch.testing.assert_close(attention.compute_word_map(AlignmentView(0, 0, shift=True)), torch.tensor([[0.0, 1.0]]))


def test_words_without_tokens_have_no_links() -> None:
    attention = SentencePairAttention(torch.tensor(WEIGHTS), [0, 2], [0, 1, 1], (4, 3))
    result = attention.compute_word_map(AlignmentView(0, 0))
    assert result.shape == (4, 3)
    assert result[1].sum() == result[3].sum() == result[:, 2].sum() == 0
    assert build_links(attention.pick_source_words()[1]) == {(0, 0), (1, 2)}


def test_picked_words_have_the_highest_weight() -> None:
    torch.manual_seed(5)
    attention = SentencePairAttention(
        torch.rand(3, 2, 8, 5).softmax(-1), [0, 0, 1, 2, 2, 3, 4], [0, 1, 1, 2, 3], (5, 4)
    )
    picks, views = attention.pick_source_words(), list_alignment_views(3, 2)
    assert picks.shape == (len(views), 5) == (18, 5)
    for view, view_picks in zip(views, picks, strict=True):
        assert view_picks.tolist() == attention.compute_word_map(view).argmax(1).tolist()


def test_agreement_is_the_f1_of_both_directions() -> None:
    # Two sentences. A view that links the words in order, and one that always selects word 0.
    forward = [torch.tensor([[0, 1], [0, 0]]), torch.tensor([[1, 0, 0], [0, 0, 0]])]
    # The other direction: a view with the same links, one that always selects word 1, one without links.
    backward = [torch.tensor([[0, 1], [1, 1], [-1, -1]]), torch.tensor([[1, 0], [1, 1], [-1, -1]])]
    result = compute_agreement(forward, backward)
    assert result.shape == (2, 3)
    # F1 = 2 · common / (5 links forward + 4 backward); the last view has no links.
    expected = [[2 * 4 / 9, 2 * 2 / 9, 0.0], [2 * 2 / 9, 2 * 2 / 9, 0.0]]
    torch.testing.assert_close(result, torch.tensor(expected))


def test_agreement_of_a_view_without_links() -> None:
    no_links = [torch.tensor([[-1, -1]])]
    assert compute_agreement(no_links, [torch.tensor([[0, 1]])]).tolist() == [[0.0]]
    assert compute_agreement(no_links, no_links).tolist() == [[0.0]]


def test_consistency_of_constant_links() -> None:
    texts = [(["a", "b"], ["x", "y"])] * 50
    straight, crossed = torch.tensor([0, 1]), torch.tensor([1, 0])
    consistent = compute_consistency([torch.stack([straight, crossed])] * 50, texts)
    # Each word has 50 links to one word of probability 1/2: 49 other links, and half of the pseudocount.
    expected = math.log((49 + 0.5) / (49 + 1) / 0.5)
    torch.testing.assert_close(consistent, torch.tensor([expected, expected]))
    mixed = compute_consistency([torch.stack([straight if n % 2 else crossed] * 2) for n in range(50)], texts)
    assert abs(float(mixed[0])) < 0.05  # as good as chance


def test_consistency_of_unsupported_links() -> None:
    result = compute_consistency([torch.tensor([[0], [-1]])], [(["a"], ["x"])])
    # p(x) = 1, and without this link only the pseudocount is left: equal to chance.
    assert result.tolist() == [0.0, 0.0]
    rare = compute_consistency([torch.tensor([[0, 1, 2]])], [(["a", "b", "b"], ["x", "y", "z"])])
    assert float(rare) == pytest.approx(2 * math.log((1 / 3) / 2 / (1 / 3)) / 3)


def test_shifted_links_are_less_consistent_and_agree_less() -> None:
    generator = torch.Generator().manual_seed(3)
    words = [torch.randint(0, 11, (7,), generator=generator).tolist() for _ in range(80)]
    texts = [([f"s{w}" for w in sentence], [f"t{w}" for w in sentence]) for sentence in words]
    correct, shifted = torch.arange(7), torch.arange(7).add(1).clamp(max=6)
    picks = [torch.stack([correct, shifted])] * 80
    result = compute_consistency(picks, texts)
    assert result[0] > 2.0 > 0.5 > result[1]
    agreement = compute_agreement(picks, [torch.stack([correct, shifted])] * 80)
    assert int(agreement.argmax()) == 0
    assert agreement[1, 1] < 0.2  # both are shifted, in opposite directions


def test_names_of_views() -> None:
    assert str(AlignmentView(2, None, shift=True)) == "layer 2, mean of heads, shifted"
    assert len(list_alignment_views(6, 8)) == 2 * 6 * 9
