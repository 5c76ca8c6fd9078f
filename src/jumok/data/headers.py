"""Whether the first line of a table looks like the names of its columns, or is a pair like the others."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

__all__ = ["LINES", "are_names", "stands_out"]

LINES = 100  # of a table, to tell whether its first is like the others, …
TOO_FEW = 10  # … which so few do not tell
# What columns are called: such words, in any case, also put together with - or _.
USUAL = """
    source target src tgt input output original translation sentence text
    arabic chinese czech danish dutch english finnish french german greek hindi italian japanese korean polish
    portuguese russian spanish swedish turkish ukrainian vietnamese deutsch englisch 영어 한국어
    ar bg bn ca cs da de el en es et eu fa fi fr ga he hi hr hu id is it ja ko lt lv ms nl no pl pt ro ru sk
    sl sr sv sw ta th tr uk ur vi zh eng deu ger fra fre kor jpn spa ita rus zho chi
"""
NAMES = frozenset(USUAL.split())


def are_names(first: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the cells are usual names of columns, or much like the names ``wanted``.

    >>> are_names(["en", "ko"], wanted=[]), are_names(["dog", "개"], wanted=["english", "korean"])
    (True, False)
    """
    if not _are_words(first) or len(set(first)) < len(first):
        return False
    lower = [cell.lower() for cell in first]
    if all(NAMES.intersection(re.split("[-_]", cell)) for cell in lower):
        return True
    # Of three letters, too many words are alike.
    return any(difflib.get_close_matches(name.lower(), lower, cutoff=0.7) for name in wanted if len(name) > 3)


def stands_out(first: Sequence[str], lines: Iterable[Sequence[str]]) -> bool:
    """Whether the cells of the first of a table's ``lines`` are a word each, as in none of the others.

    >>> stands_out(["ours", "theirs"], [["ours", "theirs"], *[["a dog", "ein Hund"]] * 10])
    True
    """
    if not _are_words(first) or len(set(first)) < len(first):
        return False
    words = [_are_words(cells) for cells in lines if all(cells)]
    return len(words) > TOO_FEW and sum(words) == 1


def _are_words(cells: Sequence[str]) -> bool:
    return all(re.fullmatch(r"\w[\w-]*", cell) for cell in cells)
