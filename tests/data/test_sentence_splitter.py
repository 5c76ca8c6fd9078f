"""Sentence boundaries in English, Korean and Japanese."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

# Each case is written with | at its sentence boundaries.
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
def test_split_sentences(name: str) -> None:
    expected = [sentence.strip() for sentence in CASES[name].split("|") if sentence.strip()]
    assert split_sentences(CASES[name].replace("|", "")) == expected


@given(st.text(st.sampled_from("aA.!?… \"')(1다。「」\t"), max_size=40))
def test_only_white_space_is_removed(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)


# ------------------------------------------------------------- comparison with a splitter in quadratic time

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


def split_quadratically(text: str) -> list[str]:
    sentences = []
    begin = 0
    for mark in MARK.finditer(text):
        if _is_sentence_end(text, begin, mark.start(), mark.end()):
            sentences.append(text[begin : mark.end()].strip())
            begin = mark.end()
    sentences.append(text[begin:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_sentence_end(text: str, begin: int, mark: int, end: int) -> bool:
    """Whether the sentence from ``begin`` ends with the mark at ``mark``, which reaches to ``end``."""
    next_match = NEXT.match(text, end)
    if next_match is None:
        return True
    next_word = next_match[1]
    mark_character = text[mark]
    has_closing_sign = text[end - 1] not in ".!?…。！？｡"
    if mark_character in "。！？｡":
        quoted = text.count("「", begin, end) + text.count("『", begin, end)
        if quoted > text.count("」", begin, end) + text.count("』", begin, end):
            return False
        return not (has_closing_sign and HIRAGANA.match(next_word))
    first = next_word.lstrip(OPENING_SIGNS)[:1]
    if first.islower():
        return False
    before = text[mark - 1] if mark > begin else " "
    if mark_character == "?" and before in " (" and first in "~–-—":  # an unknown year of birth
        return False
    if "가" <= before <= "힣":
        return not (has_closing_sign and KOREAN_QUOTATIVE.match(text, next_match.start(1)))
    if mark_character != "." or text[mark + 1] == "." or has_closing_sign:
        return True
    space = text.rfind(" ", begin, mark)
    word = text[max(begin, space + 1) : mark].lstrip(OPENING_SIGNS)
    if word.isdigit():  # a date, or the number of a list item
        return not (first.isdigit() or not text[begin : max(begin, space)].strip())
    return not _is_abbreviation(word, next_word.lstrip(OPENING_SIGNS).rstrip(","))


def _is_abbreviation(word: str, following: str) -> bool:
    """Whether a period between these two words does not end a sentence."""
    low = word.lower()
    if low in NEVER_END_ABBREVIATIONS:
        return True
    if low in NUMBER_ABBREVIATIONS:
        return following[:1].isdigit()
    if low in AMBIGUOUS_ABBREVIATIONS or (len(word) == 1 and word.isupper()) or INITIALS.match(word):
        return following not in SENTENCE_STARTERS
    return False


@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join))
def test_sentences_equal_those_of_the_quadratic_splitter(text: str) -> None:
    assert split_sentences(text) == split_quadratically(text)
