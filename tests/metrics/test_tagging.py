"""Entities found against the true ones: by hand, and the rules of the script ``conlleval`` as oracle."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumok.errors import InputError
from jumok.metrics import tagging as module
from jumok.metrics.tagging import EntityScore, score_tags

TAGS = st.sampled_from(["O", "O", "B-A", "I-A", "B-B", "I-B"])
SENTENCE = st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=12)


def test_the_examples_in_the_docstrings() -> None:
    done = doctest.testmod(module)
    assert (done.failed, done.attempted) == (0, 2)


def test_by_hand() -> None:
    truth = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG", "I-ORG", "I-ORG"]]
    said = [["B-PER", "I-PER", "O", "B-ORG"], ["O", "B-ORG", "I-ORG", "O"]]
    found = score_tags(truth, said)
    assert found.overall == EntityScore(num_correct=1, num_predicted=3, num_gold=3)
    assert found.overall.f1 == pytest.approx(1 / 3)
    assert found.by_type == {
        "LOC": EntityScore(0, 0, 1),
        "ORG": EntityScore(0, 2, 1),
        "PER": EntityScore(1, 1, 1),
    }
    assert found.accuracy == 6 / 8
    assert (found.by_type["LOC"].precision, found.by_type["LOC"].f1) == (0, 0)


def test_both_ways_of_writing_are_the_same() -> None:
    found = score_tags([["I-PER", "B-PER", "O"]], [["B-PER", "B-PER", "O"]])
    assert found.overall == EntityScore(2, 2, 2)
    assert found.accuracy == 1


def official(sentences: list[list[tuple[str, str]]]) -> tuple[int, int, int]:
    """What conlleval counts, word by word as that script goes: right, said, true."""

    def ends(before: str, kind_before: str, tag: str, kind: str) -> bool:
        return before in "BI" and (tag in "BO" or kind_before != kind) and before != "O"

    def starts(before: str, kind_before: str, tag: str, kind: str) -> bool:
        return tag == "B" or (tag == "I" and (before == "O" or kind_before != kind))

    right = said = true = 0
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
            true, said = true + start[0], said + start[1]
            last = list(pair)
    return right, said, true


@given(st.lists(SENTENCE, min_size=1, max_size=4))
def test_like_the_official_script(sentences: list[list[tuple[str, str]]]) -> None:
    found = score_tags([[a for a, _ in one] for one in sentences], [[b for _, b in one] for one in sentences])
    assert (found.overall.num_correct, found.overall.num_predicted, found.overall.num_gold) == official(sentences)


def test_tags_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="sentence 2 has 1 words and 2 predicted tags"):
        score_tags([["O"], ["O"]], [["O"], ["O", "O"]])
    with pytest.raises(InputError, match="a tag is 'PER'"):
        score_tags([["O"]], [["PER"]])
