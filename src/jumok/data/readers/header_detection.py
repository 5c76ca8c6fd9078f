"""Whether the first line of a table looks like the names of its columns, or is a pair like the others."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

__all__ = ["NUM_SAMPLED_LINES", "differs_from_rows", "look_like_column_names"]

NUM_SAMPLED_LINES = 100  # of a table, to tell whether its first is like the others, …
MIN_LINES = 10  # … which so few do not tell
# What columns are called: such words, in any case, also put together with - or _.
USUAL_NAMES_TEXT = """
    source target src tgt input output original translation sentence text
    arabic chinese czech danish dutch english finnish french german greek hindi italian japanese korean polish
    portuguese russian spanish swedish turkish ukrainian vietnamese deutsch englisch 영어 한국어
    ar bg bn ca cs da de el en es et eu fa fi fr ga he hi hr hu id is it ja ko lt lv ms nl no pl pt ro ru sk
    sl sr sv sw ta th tr uk ur vi zh eng deu ger fra fre kor jpn spa ita rus zho chi
"""
USUAL_COLUMN_NAMES = frozenset(USUAL_NAMES_TEXT.split())


def look_like_column_names(first_row: Sequence[str], requested: Sequence[str]) -> bool:
    """Whether the cells are usual names of columns, or much like the names ``requested``.

    >>> look_like_column_names(["en", "ko"], requested=[]), look_like_column_names(["dog", "개"], requested=["english", "korean"])
    (True, False)
    """
    if not _are_single_words(first_row) or len(set(first_row)) < len(first_row):
        return False
    lower = [cell.lower() for cell in first_row]
    if all(USUAL_COLUMN_NAMES.intersection(re.split("[-_]", cell)) for cell in lower):
        return True
    # Of three letters, too many words are alike.
    return any(
        difflib.get_close_matches(name.lower(), lower, cutoff=0.7) for name in requested if len(name) > 3
    )


def differs_from_rows(first_row: Sequence[str], rows: Iterable[Sequence[str]]) -> bool:
    """Whether the cells of the first of a table's ``rows`` are a word each, as in none of the others.

    >>> differs_from_rows(["ours", "theirs"], [["ours", "theirs"], *[["a dog", "ein Hund"]] * 10])
    True
    """
    if not _are_single_words(first_row) or len(set(first_row)) < len(first_row):
        return False
    words = [_are_single_words(cells) for cells in rows if all(cells)]
    return len(words) > MIN_LINES and sum(words) == 1


def _are_single_words(cells: Sequence[str]) -> bool:
    return all(re.fullmatch(r"\w[\w-]*", cell) for cell in cells)
