"""Sentences of running text, by rules: English and its neighbours, Korean, Japanese and Chinese.

A sentence ends at a mark (. ! ? … 。), with the quotes and brackets that close behind it, before a space; in
Chinese writing before anything. Not every such mark is an end::

    Dr. King | J. S. Bach | No. 5 | the U.S. Army       a point of an abbreviation
    "Stop!" he said                                     a sentence within another one
    2010. 5. 3.                                         a date
    "갔다." 라고 말했다 | 「行こう。」と言った          speech, and who spoke

but ``in the U.S. The …`` is two, for "The" begins sentences. Text is never changed, only cut: of what was
given nothing is missing but white space between sentences.
"""

from __future__ import annotations

import re

__all__ = ["split_sentences"]

# All patterns take linear time: a run of marks is tried from its first character only, and a possessive
# quantifier (*+) never gives back what it took.
CLOSING_SIGNS = r"""[)\]}"'”’»›」』）】》〉]*+"""
# A mark before a space; a mark of Chinese writing; a Korean sentence to which the next was put without space.
END_MARK = re.compile(
    rf"(?<![.!?…])[.!?…]++{CLOSING_SIGNS}(?=\s)|[。！？｡]++{CLOSING_SIGNS}|(?<=[다요죠까])[.!?]++(?=[가-힣])"
)
OPENING_SIGNS = "([{\"'“‘«‹「『（【《〈"
INITIALS = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]$")  # U.S, Ph.D without its last point
# Who said it, behind what was said.
KOREAN_QUOTATIVE = re.compile(r"(?:이?라[고는며면]|하[고며는]|[고며는]\s)")
HIRAGANA = re.compile(r"[ぁ-ゟ]")

NEVER_END_WORDS = """
    mr mrs ms mx dr prof st ste sts gen sen rep rev hon gov pres lt col sgt cpl capt cmdr maj adm brig fr msgr
    mt ft v vs cf viz e.g i.e approx esp incl messrs mme mlle
"""
NUMBER_WORDS = "no nos nr vol vols p pp ch chap fig figs sec art op ca c bk pt ver"
AMBIGUOUS_WORDS = """
    jr sr esq inc ltd co corp bros etc al dept univ assn ave blvd rd jan feb mar apr jun jul aug sep sept oct
    nov dec ed eds trans est sq km cm mm kg lb lbs oz min max
"""
STARTER_WORDS = """
    A After All Also Although An And Another As At Because Before Both But By Despite Due During Each Early
    For From He Her His However I If In Initially It Its Later Many Most No On One Originally Other She Since
    So Some Such That The Their Then There These They This Those Though Through To Today Two Under Until Upon
    We When Where Whether While With Within You
"""
NEVER_END_ABBREVIATIONS = frozenset(NEVER_END_WORDS.split())  # never an end
NUMBER_ABBREVIATIONS = frozenset(
    NUMBER_WORDS.split()
)  # an end before anything but a number: "He said no. Then …"
AMBIGUOUS_ABBREVIATIONS = frozenset(
    AMBIGUOUS_WORDS.split()
)  # an end only before a word that often begins sentences
SENTENCE_STARTERS = frozenset(STARTER_WORDS.split())
# What comes after a mark: its first character, and behind opening signs a word of STARTERS if it is one.
NEXT_WORD = re.compile(
    rf"\s*+(?P<next>(?=\S)[{re.escape(OPENING_SIGNS)}]*+(?P<word>(?:{'|'.join(sorted(SENTENCE_STARTERS))})(?=,*+(?:\s|\Z)))?)"
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without white space around them.

    >>> split_sentences('Dr. King spoke. "It was 3.5 km." He left.')
    ['Dr. King spoke.', '"It was 3.5 km."', 'He left.']
    >>> split_sentences("나는 갔다. 그는 왔다.")
    ['나는 갔다.', '그는 왔다.']
    """
    found = []
    begin = 0
    quotes = counted = 0  # how many 「 are open since ``begin``, up to ``counted``
    for mark in END_MARK.finditer(text):
        quotes, counted = quotes + _count_open_quotes(text, counted, mark.end()), mark.end()
        if _is_sentence_end(text, begin, mark.start(), mark.end(), quotes > 0):
            found.append(text[begin : mark.end()].strip())
            begin, quotes = mark.end(), 0
    found.append(text[begin:].strip())
    return [one for one in found if one]


def _count_open_quotes(text: str, begin: int, end: int) -> int:
    """How many Japanese quotes are opened between two places, less those that are closed."""
    up, down = (sum(text.count(sign, begin, end) for sign in signs) for signs in ("「『", "」』"))
    return up - down


def _is_sentence_end(text: str, begin: int, mark: int, end: int, in_quote: bool) -> bool:
    """Whether the sentence from ``begin`` ends with the mark at ``mark``, which reaches to ``end``.

    ``in_quote``: a Japanese quote that began in this sentence is still open.
    """
    behind = NEXT_WORD.match(text, end)
    if behind is None:
        return True
    sign = text[mark]
    closed = text[end - 1] not in ".!?…。！？｡"
    if sign in "。！？｡":
        return not in_quote and not (closed and HIRAGANA.match(text, behind.start("next")))
    at = behind.end("next") if behind["word"] is None else behind.start("word")
    first = text[at : at + 1].strip()
    if first.islower():
        return False
    before = text[mark - 1] if mark > begin else " "
    if sign == "?" and before in " (" and first in "~–-—":  # the year of a birth that nobody knows
        return False
    if "가" <= before <= "힣":
        return not (closed and KOREAN_QUOTATIVE.match(text, behind.start("next")))
    if sign != "." or text[mark + 1] == "." or closed:
        return True
    space = text.rfind(" ", begin, mark)
    word = text[max(begin, space + 1) : mark].lstrip(OPENING_SIGNS)
    if word.isdigit():  # a date, or the number before an item of a list
        return not (first.isdigit() or not text[begin : max(begin, space)].strip())
    return not _is_abbreviation(word, first, behind["word"] is not None)


def _is_abbreviation(word: str, next_character: str, next_is_starter: bool) -> bool:
    """Whether a point between two words means no end.

    ``next_character`` is the first character of the second one; ``next_is_starter``: it is one that often begins sentences.
    """
    low = word.lower()
    if low in NEVER_END_ABBREVIATIONS:
        return True
    if low in NUMBER_ABBREVIATIONS:
        return next_character.isdigit()
    if low in AMBIGUOUS_ABBREVIATIONS or (len(word) == 1 and word.isupper()) or INITIALS.match(word):
        return not next_is_starter
    return False
