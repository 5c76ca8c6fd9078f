"""Header detection: whether the first line of a table looks like column names rather than a row."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

NUM_SAMPLED_LINES = 100  # lines that the first one is compared with
MIN_LINES = 10  # fewer lines are not enough to decide
# Common column names, in any case, also combined with - or _.
USUAL_NAMES_TEXT = """
    source target src tgt input output original translation sentence text
    arabic chinese czech danish dutch english finnish french german greek hindi italian japanese korean polish
    portuguese russian spanish swedish turkish ukrainian vietnamese deutsch englisch 영어 한국어
    ar bg bn ca cs da de el en es et eu fa fi fr ga he hi hr hu id is it ja ko lt lv ms nl no pl pt ro ru sk
    sl sr sv sw ta th tr uk ur vi zh eng deu ger fra fre kor jpn spa ita rus zho chi
"""
USUAL_COLUMN_NAMES = frozenset(USUAL_NAMES_TEXT.split())


def look_like_column_names(first_row: Sequence[str], requested: Sequence[str]) -> bool:
    """Whether the cells are common column names, or similar to the ``requested`` names.

    >>> look_like_column_names(["en", "ko"], requested=[])
    True
    >>> look_like_column_names(["dog", "개"], requested=["english", "korean"])
    False
    """
    if not _are_single_words(first_row) or len(set(first_row)) < len(first_row):
        return False
    lower = [cell.lower() for cell in first_row]
    if all(USUAL_COLUMN_NAMES.intersection(re.split("[-_]", cell)) for cell in lower):
        return True
    # Too many words of three letters are similar.
    return any(difflib.get_close_matches(name.lower(), lower, cutoff=0.7) for name in requested if len(name) > 3)


def differs_from_rows(first_row: Sequence[str], rows: Iterable[Sequence[str]]) -> bool:
    """Whether all cells of the first of ``rows`` are single words, unlike those of all other rows.

    >>> differs_from_rows(["ours", "theirs"], [["ours", "theirs"], *[["a dog", "ein Hund"]] * 10])
    True
    """
    if not _are_single_words(first_row) or len(set(first_row)) < len(first_row):
        return False
    is_single_words = [_are_single_words(cells) for cells in rows if all(cells)]
    return len(is_single_words) > MIN_LINES and sum(is_single_words) == 1


def _are_single_words(cells: Sequence[str]) -> bool:
    return all(re.fullmatch(r"\w[\w-]*", cell) for cell in cells)
