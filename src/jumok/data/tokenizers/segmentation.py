r"""Word segmentation: regular expressions for the words of a text in any script.

A word is a run of letters, digits and underscores, each with its combining marks; or a single sign::

    It's 3.5 km.      It's | 3.5 | km | .           hyphens, apostrophes and decimal points inside a word stay
    हिन्दी, café       हिन्दी | , | café               vowel signs, accents and joiners belong to their letter
    👩‍👩‍👧 👍🏽 🇰🇷          👩‍👩‍👧 | 👍🏽 | 🇰🇷                  an emoji sequence is one sign
    東京タワーへ        東 | 京 | タワー | へ           one token per character: Han and Hiragana
    สวัสดี, ខ្មែរ        ส | วั | ส | ดี | , | ខ្មែ | រ    one token per syllable sign: Thai, Lao, Khmer, Myanmar

Scripts that put no spaces between words need a dictionary to find them. Without one, a token is a character
with its marks, which is the default of Unicode (UAX #29); Katakana and Hangul form runs like Latin letters.

The fragments below are understood by the ``regex`` package (with ``(?V1)``) and by Oniguruma, which the
``tokenizers`` library uses. ``[\p{L}\p{N}_]`` is exactly the ``\w`` of Python's ``re``.
"""

from __future__ import annotations

from collections.abc import Sequence

import regex

__all__ = [
    "COMBINING_MARKS",
    "LETTERS",
    "NOT_SYMBOL",
    "SPACELESS_SCRIPTS",
    "SPACELESS_SYLLABLE",
    "SYMBOL",
    "WORD_REGEX",
    "build_word_pattern",
    "find_grapheme_boundaries",
]

SPACELESS_SCRIPTS = r"\p{Han}\p{Hiragana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"  # without spaces between words
# What joins the character before it: marks, joiners, and the vowel am of Thai and Lao.
COMBINING_MARKS = r"\p{M}\p{Grapheme_Extend}\u200d\u0e33\u0eb3"
LETTERS = rf"\p{{N}}_[\p{{L}}&&[^{SPACELESS_SCRIPTS}]]"  # inside [ ]
NOT_SYMBOL = r"\p{L}\p{N}_\s\x1c-\x1f"
# A letter of a script without spaces, with its marks, the Japanese sign for a long vowel, and a second
# consonant that is stacked on it (Khmer and Myanmar).
SPACELESS_SYLLABLE = rf"[\p{{L}}&&[{SPACELESS_SCRIPTS}]](?:[{COMBINING_MARKS}\u30fc]|(?<=[\u17d2\u1039])[\p{{L}}&&[{SPACELESS_SCRIPTS}]])*+"
_EMOJI = rf"\p{{Extended_Pictographic}}[{COMBINING_MARKS}\p{{Emoji_Modifier}}]*+"
# Two regional indicators (a flag), or an emoji with all that is joined to it.
SYMBOL = rf"\p{{RI}}\p{{RI}}|{_EMOJI}(?:(?<=\u200d){_EMOJI})*+"


def build_word_pattern(letters: str, not_symbol: str) -> str:
    """The pattern of a word. Both are the inside of a character class: letters, and all that is no sign."""
    run = rf"[{letters}][{letters}{COMBINING_MARKS}]*+"
    return rf"{run}(?:[-'’]{run}|[.,]\d[\d{COMBINING_MARKS}]*+)*+|{SPACELESS_SYLLABLE}|{SYMBOL}|[^{not_symbol}][{COMBINING_MARKS}]*+"


WORD_REGEX = regex.compile("(?V1)" + build_word_pattern(LETTERS, NOT_SYMBOL))

# A flag comes first: in a run of regional indicators, \X counts back to its beginning at every place.
GRAPHEME_REGEX = regex.compile(r"\p{RI}\p{RI}[\p{GCB=Extend}\p{GCB=ZWJ}\p{GCB=SpacingMark}]*+|\X")
# A character that can join another one. In a text without any, every character is a grapheme.
JOINING_CHARACTER_REGEX = regex.compile(r"[^\p{GCB=Other}\p{GCB=LV}\p{GCB=LVT}\p{GCB=Control}\p{GCB=LF}]")


def find_grapheme_boundaries(text: str) -> Sequence[int]:
    """Where the graphemes of a text begin and end: what a reader takes for one character is never cut.

    >>> list(find_grapheme_boundaries("e\u0301t"))  # é in two code points, and t
    [0, 2, 3]
    """
    if JOINING_CHARACTER_REGEX.search(text) is None:
        return range(len(text) + 1)
    return [0, *(grapheme.end() for grapheme in GRAPHEME_REGEX.finditer(text))]
