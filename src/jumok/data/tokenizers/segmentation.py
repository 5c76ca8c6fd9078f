r"""Word segmentation: regular expressions for the words of a text in any script.

A word is a run of letters, digits and underscores, each with its combining marks, or a single symbol::

    It's 3.5 km.      It's | 3.5 | km | .           hyphens, apostrophes and decimal points inside a word
    हिन्दी, café       हिन्दी | , | café               vowel signs, accents and joiners belong to their letter
    👩‍👩‍👧 👍🏽 🇰🇷          👩‍👩‍👧 | 👍🏽 | 🇰🇷                  an emoji sequence is one symbol
    東京タワーへ        東 | 京 | タワー | へ           one token per character: Han and Hiragana
    สวัสดี, ខ្មែរ        ส | วั | ส | ดี | , | ខ្មែ | រ    one token per syllable sign: Thai, Lao, Khmer, Myanmar

Scripts without spaces between words need a dictionary for word segmentation. Without one, a token is a
character with its marks, which is the default of Unicode (UAX #29). Katakana and Hangul form runs like Latin
letters.

The patterns below are valid for the ``regex`` package (with ``(?V1)``) and for Oniguruma, which the
``tokenizers`` library uses. ``[\p{L}\p{N}_]`` equals ``\w`` of the ``re`` module.
"""

from __future__ import annotations

from collections.abc import Sequence

import regex

SPACELESS_SCRIPTS = r"\p{Han}\p{Hiragana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"  # without spaces between words
# Characters that belong to the previous one: marks, joiners, and the vowel am of Thai and Lao.
COMBINING_MARKS = r"\p{M}\p{Grapheme_Extend}\u200d\u0e33\u0eb3"
LETTERS = rf"\p{{N}}_[\p{{L}}&&[^{SPACELESS_SCRIPTS}]]"  # inside [ ]
NOT_SYMBOL = r"\p{L}\p{N}_\s\x1c-\x1f"
# A letter of a script without spaces, with its marks, the Japanese long vowel mark, and stacked consonants
# (Khmer and Myanmar).
_SPACELESS_LETTER = rf"[\p{{L}}&&[{SPACELESS_SCRIPTS}]]"
SPACELESS_SYLLABLE = rf"{_SPACELESS_LETTER}(?:[{COMBINING_MARKS}\u30fc]|(?<=[\u17d2\u1039]){_SPACELESS_LETTER})*+"
_EMOJI = rf"\p{{Extended_Pictographic}}[{COMBINING_MARKS}\p{{Emoji_Modifier}}]*+"
# Two regional indicators (a flag), or an emoji sequence.
SYMBOL = rf"\p{{RI}}\p{{RI}}|{_EMOJI}(?:(?<=\u200d){_EMOJI})*+"


def build_word_pattern(letters: str, not_symbol: str) -> str:
    """The pattern of a word. Both arguments are contents of a character class: letters, and non-symbols."""
    run = rf"[{letters}][{letters}{COMBINING_MARKS}]*+"
    word = rf"{run}(?:[-'’]{run}|[.,]\d[\d{COMBINING_MARKS}]*+)*+"
    return rf"{word}|{SPACELESS_SYLLABLE}|{SYMBOL}|[^{not_symbol}][{COMBINING_MARKS}]*+"


WORD_REGEX = regex.compile("(?V1)" + build_word_pattern(LETTERS, NOT_SYMBOL))

# Flags come first: in a run of regional indicators, \X scans back to the start of the run at every position.
GRAPHEME_REGEX = regex.compile(r"\p{RI}\p{RI}[\p{GCB=Extend}\p{GCB=ZWJ}\p{GCB=SpacingMark}]*+|\X")
# Characters that can combine with others. In a text without any, every character is a grapheme.
JOINING_CHARACTER_REGEX = regex.compile(r"[^\p{GCB=Other}\p{GCB=LV}\p{GCB=LVT}\p{GCB=Control}\p{GCB=LF}]")


def find_grapheme_boundaries(text: str) -> Sequence[int]:
    """The boundaries of the graphemes (user-perceived characters) of a text.

    >>> list(find_grapheme_boundaries("e\u0301t"))  # é in two code points, and t
    [0, 2, 3]
    """
    if JOINING_CHARACTER_REGEX.search(text) is None:
        return range(len(text) + 1)
    return [0, *(grapheme.end() for grapheme in GRAPHEME_REGEX.finditer(text))]
