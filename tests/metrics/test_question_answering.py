"""Answers as each data set's script counts them, by hand."""

from __future__ import annotations

import pytest

from jumok.errors import InputError
from jumok.metrics.question_answering import answer_f1, is_exact_match, score_answers


@pytest.mark.parametrize(
    ("predictions", "right", "exact", "f1"),
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
def test_english_answers_by_hand(predictions: str, right: str, exact: bool, f1: float) -> None:
    assert is_exact_match(predictions, right, "squad") is exact
    assert answer_f1(predictions, right, "squad") == answer_f1(right, predictions, "squad") == pytest.approx(f1)


def test_korean_answers_are_compared_by_character() -> None:
    # 세종대왕 and 세종: 2 of 4 characters right, all of 2 found: 2 · 2 / (4 + 2).
    assert answer_f1("세종대왕", "세종", "korquad") == pytest.approx(4 / 6)
    assert answer_f1("대왕 세종", "세종 대왕", "korquad") == 1  # a bag of characters
    assert not is_exact_match("대왕 세종", "세종 대왕", "korquad")
    assert not is_exact_match("세종 대왕", "세종대왕", "korquad")  # spaces count for that
    assert is_exact_match("'BTS'", "〈bts〉", "korquad")
    assert is_exact_match("1,000명", "1000명", "korquad")
    assert answer_f1("서울에서", "서울", "squad") == 0  # by words there is nothing in common


def test_japanese_answers_stay_as_they_are() -> None:
    assert is_exact_match("東 京", "東京", "jaquad")
    assert is_exact_match("京東", "東京", "jaquad")  # that script compares bags of characters
    assert not is_exact_match("「東京」", "東京", "jaquad")
    assert answer_f1("「東京」", "東京", "jaquad") == pytest.approx(4 / 6)
    assert not is_exact_match("NHK", "nhk", "jaquad")


def test_several_and_no_gold_answers() -> None:
    scores = score_answers(["blue", "", "red"], [["green", "deep blue"], [], []], "squad")
    assert (scores.exact_match, scores.count) == (pytest.approx(1 / 3), 3)
    assert scores.f1 == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_the_number_of_answers_must_match() -> None:
    with pytest.raises(InputError, match="1 answers to 2 questions"):
        score_answers(["a"], [["a"], ["b"]], "squad")


def test_empty_normalised_gold_answers_are_skipped_as_in_squad_2() -> None:
    gold = [["the", "a cat"]] * 2 + [["!", "the"]] * 2
    assert (
        score_answers(["", "cat", "", "cat"], gold, "squad").exact_match == 2 / 4
    )  # "" is right where nothing is left
    assert score_answers(["the"], [["the", "cat"]], "squad").f1 == 0
    assert score_answers(["()"], [["()", "서울"]], "korquad").exact_match == 1  # that script leaves none out
