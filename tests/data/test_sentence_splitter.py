"""Sentences: what ends one and what does not, in English, Korean and Japanese."""

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jumok.data.tokenizers.sentence_splitter as module
from jumok.data.tokenizers.sentence_splitter import (
    AMBIGUOUS_ABBREVIATIONS,
    HIRAGANA,
    INITIALS,
    KOREAN_QUOTATIVE,
    NEVER_END_ABBREVIATIONS,
    NUMBER_ABBREVIATIONS,
    OPENING_SIGNS,
    SENTENCE_STARTERS,
    split_sentences,
)

# Each case is written with | where it is to be cut.
CASES = {
    "plain": "The dog barked.| The cat ran!| Did it?| Yes.",
    "title": "Dr. King met Mrs. Parks and Gen. Lee.| They spoke.",
    "initials": "J. S. Bach wrote it.| George W. Bush heard it.",
    "country": "He joined the U.S. Army in the U.S.| The army left.",
    "a letter that ends a sentence": "They lacked vitamin C.| The cause was clear.",
    "junior": "Andrew Jefferson, Jr. Andrew Leon was a judge for Smith Inc.| He retired.",
    "decimals": "It weighs 3.5 kg, costs $1.20 and runs v2.0.1 of it.| Good.",
    "numbers": "See No. 5 and pp. 3 to 7.| He said no.| Then he left in 1952.| It was cold.",
    "a list's number": "1. Introduction to it.| 2. The rest.",
    "speech": '"Stop!" he said.| He said, "Go."| She went.| “Why?” she asked.',
    "brackets": "(He left early.)| She stayed [for now].| It ended (in 1990).| So be it.",
    "ellipsis": "He waited... and waited...| Then it came.",
    "small letters": "It was e.g. green, i.e. not red. the end",
    "no mark at the end": "A title without a mark",
    "address": "Visit www.example.com.| It is at example.com/a.b?c=d today.",
    "Korean": "나는 학교에 갔다.| 그는 집에 왔어요.| 정말 그럴까?| 그렇지!",
    "Korean without a space": "그는 갔다.|그녀는 왔다.| 끝.",
    "Korean dates": "2010. 5. 3.에 시작했다.| 1999년 12월 25일이다.",
    "Korean speech": '그는 "나는 갔다." 라고 말했다.| 그녀는 "갔다."고 했다.| "왔다."| 그가 웃었다.',
    "Korean numbers": "원주율은 3.14이다.| 인구는 1,200명이다.",
    "Korean with English": "그는 U.S. Army에 있었다.| IBM은 회사이다.| 1952년이다.",
    "an unknown year": "김씨(金氏, ? ~ 1592년)는 조선의 무신이다.| 본관은 김해이다.",
    "Japanese": "私は行った。|彼は来た！|「行こう。」と言った。|「はい。そうです。」|終わり。",
    "nothing": " ",
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_cut_where_its_sentences_end(name: str) -> None:
    wanted = [one.strip() for one in CASES[name].split("|")]
    assert split_sentences(CASES[name].replace("|", "")) == [one for one in wanted if one]


@given(st.text(st.sampled_from("aA.!?… \"')(1다。「」\t"), max_size=40))
def test_nothing_is_lost_but_white_space(text: str) -> None:
    found = split_sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(one and one == one.strip() for one in found)


# ------------------------------------------------------------------ the same as before it took linear time

CLOSING = r"""[)\]}"'”’»›」』）】》〉]*"""
MARK = re.compile(rf"[.!?…]+{CLOSING}(?=\s)|[。！？｡]+{CLOSING}|(?<=[다요죠까])[.!?]+(?=[가-힣])")
NEXT = re.compile(r"\s*(\S+)")
PARTS = [
    *".!?…。！？｡, \t\n\"')」』(「『“”’aAZ19다요가라고하は行と-~",
    " The ",
    " The,",
    "Mr",
    "no",
    "U.S",
    "etc",
    ". ",
]


def reference(text: str) -> list[str]:
    """The splitter as it was, in quadratic time."""
    found = []
    begin = 0
    for mark in MARK.finditer(text):
        if _reference_ends(text, begin, mark.start(), mark.end()):
            found.append(text[begin : mark.end()].strip())
            begin = mark.end()
    found.append(text[begin:].strip())
    return [one for one in found if one]


def _reference_ends(text: str, begin: int, mark: int, end: int) -> bool:
    """Whether the sentence from ``begin`` ends with the mark at ``mark``, which reaches to ``end``."""
    behind = NEXT.match(text, end)
    if behind is None:
        return True
    following = behind[1]
    sign = text[mark]
    closed = text[end - 1] not in ".!?…。！？｡"
    if sign in "。！？｡":
        quoted = text.count("「", begin, end) + text.count("『", begin, end)
        if quoted > text.count("」", begin, end) + text.count("』", begin, end):
            return False
        return not (closed and HIRAGANA.match(following))
    first = following.lstrip(OPENING_SIGNS)[:1]
    if first.islower():
        return False
    before = text[mark - 1] if mark > begin else " "
    if sign == "?" and before in " (" and first in "~–-—":  # the year of a birth that nobody knows
        return False
    if "가" <= before <= "힣":
        return not (closed and KOREAN_QUOTATIVE.match(text, behind.start(1)))
    if sign != "." or text[mark + 1] == "." or closed:
        return True
    space = text.rfind(" ", begin, mark)
    word = text[max(begin, space + 1) : mark].lstrip(OPENING_SIGNS)
    if word.isdigit():  # a date, or the number before an item of a list
        return not (first.isdigit() or not text[begin : max(begin, space)].strip())
    return not _reference_abbreviates(word, following.lstrip(OPENING_SIGNS).rstrip(","))


def _reference_abbreviates(word: str, following: str) -> bool:
    """Whether a point between these two words means no end."""
    low = word.lower()
    if low in NEVER_END_ABBREVIATIONS:
        return True
    if low in NUMBER_ABBREVIATIONS:
        return following[:1].isdigit()
    if low in AMBIGUOUS_ABBREVIATIONS or (len(word) == 1 and word.isupper()) or INITIALS.match(word):
        return following not in SENTENCE_STARTERS
    return False


@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join))
def test_sentences_are_those_of_the_quadratic_splitter(text: str) -> None:
    assert split_sentences(text) == reference(text)


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module).failed == 0
