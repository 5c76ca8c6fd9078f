"""How good answers are that were found in a text: *exact match* and *F1*, as each data set's script counts.

Exact match is the share of answers that are the very answer of a person. F1 gives credit for a part: both
answers are bags of units, and F1 is the harmonic mean of precision and recall of the units they share. Where
people gave several answers the best counts. What a unit is, and what is left out before, each data set says:

==========  ==========================================================================  ================
convention  before                                                                      a unit
==========  ==========================================================================  ================
squad       small letters, no ASCII punctuation, no a/an/the, single spaces             a word
korquad     spaces for ' " 《 》 < > 〈 〉 ( ) ‘ ’, small letters, no other ASCII        a character that
            punctuation, single spaces                                                  is no space
jaquad      nothing                                                                     the same
==========  ==========================================================================  ================

Japanese has no spaces, and Korean words carry particles (서울, 서울에서): so their scripts count characters.
Exact match compares what is left, with its spaces; only JaQuAD's script calls an answer exact if its F1 is 1.
Only SQuAD 2's script leaves out answers of people that normalise to nothing ("the", "!").
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jumok.errors import InputError

__all__ = [
    "AnswerConvention",
    "AnswerScore",
    "answer_f1",
    "is_exact_match",
    "score_answers",
    "select_gold_answers",
]

AnswerConvention = Literal["squad", "korquad", "jaquad"]

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
KOREAN_SIGNS = str.maketrans(dict.fromkeys("'\"《》<>〈〉()‘’", " "))


@dataclass(frozen=True)
class AnswerScore:
    """Means over questions, from 0 to 1."""

    exact_match: float
    f1: float
    count: int


def score_answers(
    predictions: Sequence[str], gold: Sequence[Sequence[str]], convention: AnswerConvention
) -> AnswerScore:
    """Of one answer to each question, and all that people gave. If they gave none, "" is right.

    >>> score_answers(["the Eiffel tower", "1889"], [["Eiffel Tower"], ["in 1889", "1890"]], "squad")
    AnswerScore(exact_match=0.5, f1=0.8333333333333333, count=2)
    """
    if len(predictions) != len(gold) or not predictions:
        raise InputError(f"{len(predictions)} answers to {len(gold)} questions: one to each is needed")
    exact = f1 = 0.0
    for answer, right in zip(predictions, gold, strict=True):
        usable = select_gold_answers(right, convention)
        exact += max(is_exact_match(answer, one, convention) for one in usable)
        f1 += max(answer_f1(answer, one, convention) for one in usable)
    return AnswerScore(exact / len(predictions), f1 / len(predictions), len(predictions))


def select_gold_answers(gold: Sequence[str], convention: AnswerConvention) -> list[str]:
    """The answers of people that an answer is compared with; if there are none, "" is right.

    >>> select_gold_answers(["the", "The cat"], "squad"), select_gold_answers(["!"], "squad")
    (['The cat'], [''])
    """
    if convention == "squad":
        gold = [one for one in gold if _normalize(one, convention)]
    return list(gold) or [""]


def is_exact_match(prediction: str, gold: str, convention: AnswerConvention) -> bool:
    """Whether it is the answer.

    >>> is_exact_match("《태백산맥》", "태백산맥", "korquad"), is_exact_match("《태백산맥》", "태백산맥", "jaquad")
    (True, False)
    """
    if convention == "jaquad":
        return answer_f1(prediction, gold, convention) == 1
    return _normalize(prediction, convention) == _normalize(gold, convention)


def answer_f1(prediction: str, gold: str, convention: AnswerConvention) -> float:
    """F1 of the units of two answers.

    >>> answer_f1("서울에서", "서울", "korquad")
    0.6666666666666666
    """
    one, other = _split_units(prediction, convention), _split_units(gold, convention)
    if not one or not other:
        return float(one == other)
    shared = (Counter(one) & Counter(other)).total()
    return 2 * shared / (len(one) + len(other))


def _normalize(text: str, convention: AnswerConvention) -> str:
    if convention == "squad":
        text = ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION))
    elif convention == "korquad":
        text = text.translate(KOREAN_SIGNS).lower().translate(NO_PUNCTUATION)
    return " ".join(text.split())


def _split_units(text: str, convention: AnswerConvention) -> list[str]:
    words = _normalize(text, convention).split()
    return words if convention == "squad" else list("".join(words))
