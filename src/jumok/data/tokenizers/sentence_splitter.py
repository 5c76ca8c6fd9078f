"""Rule-based sentence splitter for English and related languages, Korean, Japanese and Chinese.

A sentence ends at a mark (. ! ? … 。) and closing quotes or brackets, followed by a space; in Chinese and
Japanese, by anything. These marks do not end a sentence::

    Dr. King | J. S. Bach | No. 5 | the U.S. Army       abbreviations
    "Stop!" he said                                     a sentence within another
    2010. 5. 3.                                         a date
    "갔다." 라고 말했다 | 「行こう。」と言った          direct speech

but ``in the U.S. The …`` is two sentences, because "The" often begins a sentence. Only white space between
sentences is removed.
"""

from __future__ import annotations

import re

# All patterns take linear time: a run of marks is matched from its first character only, and possessive
# quantifiers (*+) do not backtrack.
CLOSING_SIGNS = r"""[)\]}"'”’»›」』）】》〉]*+"""
# A mark before a space; a Chinese or Japanese mark; a Korean sentence without a space after it.
END_MARK = re.compile(
    rf"(?<![.!?…])[.!?…]++{CLOSING_SIGNS}(?=\s)|[。！？｡]++{CLOSING_SIGNS}|(?<=[다요죠까])[.!?]++(?=[가-힣])"
)
OPENING_SIGNS = "([{\"'“‘«‹「『（【《〈"
INITIALS = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]$")  # U.S, Ph.D, without the last period
# The quotative particle after direct speech.
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
NEVER_END_ABBREVIATIONS = frozenset(NEVER_END_WORDS.split())
# End a sentence unless a number follows: "He said no. Then …"
NUMBER_ABBREVIATIONS = frozenset(NUMBER_WORDS.split())
# End a sentence only before a word that often begins sentences.
AMBIGUOUS_ABBREVIATIONS = frozenset(AMBIGUOUS_WORDS.split())
SENTENCE_STARTERS = frozenset(STARTER_WORDS.split())
# What follows a mark: opening signs, and a word if it is one of SENTENCE_STARTERS.
NEXT_WORD = re.compile(
    rf"\s*+(?P<next>(?=\S)[{re.escape(OPENING_SIGNS)}]*+(?P<word>(?:{'|'.join(sorted(SENTENCE_STARTERS))})(?=,*+(?:\s|\Z)))?)"
)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, stripped of surrounding white space.

    >>> split_sentences('Dr. King spoke. "It was 3.5 km." He left.')
    ['Dr. King spoke.', '"It was 3.5 km."', 'He left.']
    >>> split_sentences("나는 갔다. 그는 왔다.")
    ['나는 갔다.', '그는 왔다.']
    """
    sentences = []
    start = 0
    num_open_quotes = position = 0  # open quotes 「 between ``start`` and ``position``
    for mark in END_MARK.finditer(text):
        num_open_quotes, position = (num_open_quotes + _count_open_quotes(text, position, mark.end()), mark.end())
        if _is_sentence_end(text, start, mark.start(), mark.end(), num_open_quotes > 0):
            sentences.append(text[start : mark.end()].strip())
            start, num_open_quotes = mark.end(), 0
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _count_open_quotes(text: str, begin: int, end: int) -> int:
    """The number of Japanese quotes that are opened between two positions, minus those that are closed."""
    num_opened, num_closed = (sum(text.count(sign, begin, end) for sign in signs) for signs in ("「『", "」』"))
    return num_opened - num_closed


def _is_sentence_end(text: str, begin: int, mark: int, end: int, in_quote: bool) -> bool:
    """Whether the sentence that starts at ``begin`` ends with the mark from ``mark`` to ``end``.

    ``in_quote``: a Japanese quote of this sentence is still open.
    """
    next_match = NEXT_WORD.match(text, end)
    if next_match is None:
        return True
    mark_character = text[mark]
    has_closing_sign = text[end - 1] not in ".!?…。！？｡"
    if mark_character in "。！？｡":
        return not in_quote and not (has_closing_sign and HIRAGANA.match(text, next_match.start("next")))
    index = next_match.end("next") if next_match["word"] is None else next_match.start("word")
    next_character = text[index : index + 1].strip()
    if next_character.islower():
        return False
    previous_character = text[mark - 1] if mark > begin else " "
    if mark_character == "?" and previous_character in " (" and next_character in "~–-—":  # an unknown year of birth
        return False
    if "가" <= previous_character <= "힣":
        return not (has_closing_sign and KOREAN_QUOTATIVE.match(text, next_match.start("next")))
    if mark_character != "." or text[mark + 1] == "." or has_closing_sign:
        return True
    space = text.rfind(" ", begin, mark)
    word = text[max(begin, space + 1) : mark].lstrip(OPENING_SIGNS)
    if word.isdigit():  # a date, or the number of a list item
        return not (next_character.isdigit() or not text[begin : max(begin, space)].strip())
    return not _is_abbreviation(word, next_character, next_match["word"] is not None)


def _is_abbreviation(word: str, next_character: str, next_is_starter: bool) -> bool:
    """Whether the period after a word belongs to an abbreviation and does not end the sentence.

    ``next_character``: the first character of the next word. ``next_is_starter``: that word often begins
    sentences.
    """
    lowercase_word = word.lower()
    if lowercase_word in NEVER_END_ABBREVIATIONS:
        return True
    if lowercase_word in NUMBER_ABBREVIATIONS:
        return next_character.isdigit()
    if lowercase_word in AMBIGUOUS_ABBREVIATIONS or (len(word) == 1 and word.isupper()) or INITIALS.match(word):
        return not next_is_starter
    return False
