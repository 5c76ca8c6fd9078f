"""Answers as each data set's script counts them, by hand."""

from __future__ import annotations

import doctest

import pytest

from jumok.errors import InputError
from jumok.metrics import answers as module
from jumok.metrics.answers import answer_score, is_exact, overlap


def test_the_examples_in_the_docstrings() -> None:
    done = doctest.testmod(module)
    assert (done.failed, done.attempted) == (0, 4)


@pytest.mark.parametrize(
    ("said", "right", "exact", "f1"),
    [
        ("the Cat,", "cat", True, 1),
        ("a cat sat", "the cat", False, 2 / 3),  # cat, sat against cat
        ("U.S.", "us", True, 1),
        ("x-ray", "xray", True, 1),
        ("cat cat", "cat", False, 2 / 3),  # a bag: the second cat is too many
        ("dog", "cat", False, 0),
        ("the", "", True, 1),  # nothing is left of it
        ("the", "cat", False, 0),
        ("theatre  in\tAnkara", "Theatre in Ankara", True, 1),  # articles are whole words only
    ],
)
def test_english_answers_by_hand(said: str, right: str, exact: bool, f1: float) -> None:
    assert is_exact(said, right, "squad") is exact
    assert overlap(said, right, "squad") == overlap(right, said, "squad") == pytest.approx(f1)


def test_korean_answers_are_compared_by_character() -> None:
    # 세종대왕 and 세종: 2 of 4 characters right, all of 2 found: 2 · 2 / (4 + 2).
    assert overlap("세종대왕", "세종", "korquad") == pytest.approx(4 / 6)
    assert overlap("대왕 세종", "세종 대왕", "korquad") == 1  # a bag of characters
    assert not is_exact("대왕 세종", "세종 대왕", "korquad")
    assert not is_exact("세종 대왕", "세종대왕", "korquad")  # spaces count for that
    assert is_exact("'BTS'", "〈bts〉", "korquad")
    assert is_exact("1,000명", "1000명", "korquad")
    assert overlap("서울에서", "서울", "squad") == 0  # by words there is nothing in common


def test_japanese_answers_stay_as_they_are() -> None:
    assert is_exact("東 京", "東京", "jaquad")
    assert is_exact("京東", "東京", "jaquad")  # that script compares bags of characters
    assert not is_exact("「東京」", "東京", "jaquad")
    assert overlap("「東京」", "東京", "jaquad") == pytest.approx(4 / 6)
    assert not is_exact("NHK", "nhk", "jaquad")


def test_the_best_of_several_and_of_none() -> None:
    found = answer_score(["blue", "", "red"], [["green", "deep blue"], [], []], "squad")
    assert (found.exact, found.count) == (pytest.approx(1 / 3), 3)
    assert found.f1 == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_one_answer_to_each_question() -> None:
    with pytest.raises(InputError, match="1 answers to 2 questions"):
        answer_score(["a"], [["a"], ["b"]], "squad")


def test_gold_answers_that_normalise_to_nothing_are_left_out_as_by_the_script_of_squad_2() -> None:
    gold = [["the", "a cat"]] * 2 + [["!", "the"]] * 2
    assert (
        answer_score(["", "cat", "", "cat"], gold, "squad").exact == 2 / 4
    )  # "" is right where nothing is left
    assert answer_score(["the"], [["the", "cat"]], "squad").f1 == 0
    assert answer_score(["()"], [["()", "서울"]], "korquad").exact == 1  # that script leaves none out
