"""Entities found against the true ones: by hand, and the rules of the script ``conlleval`` as oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.errors import InputError
from jumok.metrics.tagging import EntityScore, score_tags

TAGS = st.sampled_from(["O", "O", "B-A", "I-A", "B-B", "I-B"])
SENTENCE = st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=12)


def test_by_hand() -> None:
    truth = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG", "I-ORG", "I-ORG"]]
    predictions = [["B-PER", "I-PER", "O", "B-ORG"], ["O", "B-ORG", "I-ORG", "O"]]
    scores = score_tags(truth, predictions)
    assert scores.overall == EntityScore(num_correct=1, num_predicted=3, num_gold=3)
    assert scores.overall.f1 == pytest.approx(1 / 3)
    assert scores.by_type == {
        "LOC": EntityScore(0, 0, 1),
        "ORG": EntityScore(0, 2, 1),
        "PER": EntityScore(1, 1, 1),
    }
    assert scores.accuracy == 6 / 8
    assert (scores.by_type["LOC"].precision, scores.by_type["LOC"].f1) == (0, 0)


def test_both_tag_formats_score_equally() -> None:
    scores = score_tags([["I-PER", "B-PER", "O"]], [["B-PER", "B-PER", "O"]])
    assert scores.overall == EntityScore(2, 2, 2)
    assert scores.accuracy == 1


def official(sentences: list[list[tuple[str, str]]]) -> tuple[int, int, int]:
    """What conlleval counts, word by word as that script goes: right, said, true."""

    def ends(before: str, kind_before: str, tag: str, kind: str) -> bool:
        return before in "BI" and (tag in "BO" or kind_before != kind) and before != "O"

    def starts(before: str, kind_before: str, tag: str, kind: str) -> bool:
        return tag == "B" or (tag == "I" and (before == "O" or kind_before != kind))

    right = predictions = true = 0
    last = ["O", "O"]
    going = False
    for words in [*sentences, []]:
        for pair in [*words, ("O", "O")]:
            old = [(tag[:1], tag[2:]) for tag in last]
            new = [(tag[:1], tag[2:]) for tag in pair]
            end = [ends(*old[side], *new[side]) for side in (0, 1)]
            start = [starts(*old[side], *new[side]) for side in (0, 1)]
            if going:
                if end[0] and end[1] and old[0][1] == old[1][1]:
                    going, right = False, right + 1
                elif end[0] != end[1] or new[0][1] != new[1][1]:
                    going = False
            if start[0] and start[1] and new[0][1] == new[1][1]:
                going = True
            true, predictions = true + start[0], predictions + start[1]
            last = list(pair)
    return right, predictions, true


@given(st.lists(SENTENCE, min_size=1, max_size=4))
def test_scores_equal_the_conll_script(sentences: list[list[tuple[str, str]]]) -> None:
    scores = score_tags([[a for a, _ in one] for one in sentences], [[b for _, b in one] for one in sentences])
    assert (scores.overall.num_correct, scores.overall.num_predicted, scores.overall.num_gold) == official(sentences)


def test_invalid_tags_raise() -> None:
    with pytest.raises(InputError, match="sentence 2 has 1 words and 2 predicted tags"):
        score_tags([["O"], ["O"]], [["O"], ["O", "O"]])
    with pytest.raises(InputError, match="a tag is 'PER'"):
        score_tags([["O"]], [["PER"]])
