"""Metrics of extractive question answering: *exact match* and *F1*, as in the script of each data set.

Exact match is the share of answers that equal a gold answer. F1 gives partial credit: both answers are bags
of units, and F1 is the harmonic mean of precision and recall of these units. If there are several gold
answers, the best one counts. The data sets differ in their normalization and in the unit:

==========  ==========================================================================  ================
convention  normalization                                                               unit
==========  ==========================================================================  ================
squad       lower case, no ASCII punctuation, no a/an/the, single spaces                word
korquad     spaces for ' " 《 》 < > 〈 〉 ( ) ‘ ’, lower case, no other ASCII           character other
            punctuation, single spaces                                                  than a space
jaquad      none                                                                        character other
                                                                                        than a space
==========  ==========================================================================  ================

Japanese has no spaces, and Korean words carry particles (서울, 서울에서), so their scripts count characters.
Exact match compares normalized answers including spaces; only the script of JaQuAD calls an answer exact if
its F1 is 1. Only the script of SQuAD 2 ignores gold answers that are empty after normalization ("the", "!").
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jumok.errors import InputError

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
    """Score one answer to each question against all gold answers. If there are none, "" is correct.

    >>> score_answers(["the Eiffel tower", "1889"], [["Eiffel Tower"], ["in 1889", "1890"]], "squad")
    AnswerScore(exact_match=0.5, f1=0.8333333333333333, count=2)
    """
    if len(predictions) != len(gold) or not predictions:
        raise InputError(
            f"there are {len(predictions)} answers to {len(gold)} questions; expected one answer to each question"
        )
    exact_match = f1 = 0.0
    for prediction, question_gold in zip(predictions, gold, strict=True):
        gold_answers = select_gold_answers(question_gold, convention)
        exact_match += max(is_exact_match(prediction, answer, convention) for answer in gold_answers)
        f1 += max(answer_f1(prediction, answer, convention) for answer in gold_answers)
    return AnswerScore(exact_match / len(predictions), f1 / len(predictions), len(predictions))


def select_gold_answers(gold: Sequence[str], convention: AnswerConvention) -> list[str]:
    """The gold answers that a prediction is compared with; ``[""]`` if there are none.

    >>> select_gold_answers(["the", "The cat"], "squad"), select_gold_answers(["!"], "squad")
    (['The cat'], [''])
    """
    if convention == "squad":
        gold = [answer for answer in gold if _normalize(answer, convention)]
    return list(gold) or [""]


def is_exact_match(prediction: str, gold: str, convention: AnswerConvention) -> bool:
    """Whether a prediction equals a gold answer.

    >>> [is_exact_match("《태백산맥》", "태백산맥", convention) for convention in ("korquad", "jaquad")]
    [True, False]
    """
    if convention == "jaquad":
        return answer_f1(prediction, gold, convention) == 1
    return _normalize(prediction, convention) == _normalize(gold, convention)


def answer_f1(prediction: str, gold: str, convention: AnswerConvention) -> float:
    """F1 of the units of two answers.

    >>> answer_f1("서울에서", "서울", "korquad")
    0.6666666666666666
    """
    predicted_units, gold_units = _split_units(prediction, convention), _split_units(gold, convention)
    if not predicted_units or not gold_units:
        return float(predicted_units == gold_units)
    num_shared = (Counter(predicted_units) & Counter(gold_units)).total()
    return 2 * num_shared / (len(predicted_units) + len(gold_units))


def _normalize(text: str, convention: AnswerConvention) -> str:
    if convention == "squad":
        text = ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION))
    elif convention == "korquad":
        text = text.translate(KOREAN_SIGNS).lower().translate(NO_PUNCTUATION)
    return " ".join(text.split())


def _split_units(text: str, convention: AnswerConvention) -> list[str]:
    words = _normalize(text, convention).split()
    return words if convention == "squad" else list("".join(words))
