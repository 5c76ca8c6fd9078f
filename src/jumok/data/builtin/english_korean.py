"""English–Korean sentence pairs with gold word alignments.

>>> for pair in read_pairs("valid", 1):
...     print(pair.english, "→", pair.korean)
your son drew haeun and chose hyunwoo's interesting book → 너의 아들은 하은을 그리고 현우의 재미있는 책을 골랐다
>>> next(read_pairs("test", 1)).sure_links
((0, 0), (1, 2), (2, 1))

A synchronous grammar generated both sides together, so that the Korean is correct, an English sentence has only
one translation, and the links are known. English is in lower case without punctuation, so that every word has one
form. Words are separated by spaces in both languages. Korean is in the plain written style (-다), with a particle
on each noun. Sentences have 3 to 50 words, most of them 5 to 20; the long ones are clauses joined by *and*, *but*,
*because*, *when* and *if*. A few short training sentences occur twice.

The corpus file is compressed text. Its first line is a vocabulary, and each further line is a sentence: the
character with code ``32 + n`` stands for entry ``n`` of the vocabulary. An entry is an English word, and what it
contributes to the Korean sentence:

=============  =====================================================================================================
``the``        nothing
``boy=소년은``  its translation; it follows the translation of the previous word. ``-1``: one place earlier; ``+1``:
               one place later; and so on. ``_`` joins several Korean words
``week^``      nothing of its own: it has the same translation as the previous word
``in~``        a possible link to the next translation. ``~-1``: to the previous one; ``~+1``: to the one after the
               next; and so on
=============  =====================================================================================================
"""

from __future__ import annotations

import bz2
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from jumok.errors import InputError

__all__ = ["SPLITS", "SentencePair", "read_pairs"]

CORPUS_FILE = Path(__file__).with_suffix(".txt.bz2")
SPLITS = {"valid": range(2_000), "test": range(2_000, 4_000), "train": range(4_000, 104_000)}  # lines of sentences
FIRST_CODE = 32
ENTRY = re.compile(r"([a-z']+)(?:=([가-힣_]+)|(\^)|(~))?([-+]\d+)?")

Link = tuple[int, int]  # (index of an English word, index of a Korean word)


@dataclass(frozen=True)
class SentencePair:
    """A sentence, its translation, and links (English word, Korean word) between their words.

    A link is sure between words with the same meaning. Every Korean word has a sure link, and nearly always just
    one. A link is possible between a preposition, an auxiliary verb or a conjunction and the Korean word whose
    particle or ending expresses it: *at* and 학교에서, *did* and 않았다. Articles have no link, and neither has a
    repeated subject that Korean omits.
    """

    english: str
    korean: str
    sure_links: tuple[Link, ...]
    possible_links: tuple[Link, ...] = ()


def read_pairs(split: Literal["train", "valid", "test"], count: int) -> Iterator[SentencePair]:
    """Read the first ``count`` pairs of a split. No sentence is in two splits."""
    lines = SPLITS[split]
    if not 0 <= count <= len(lines):
        option = "data.builtin_size" if split == "train" else "data.held_out_size"
        raise InputError(
            f"{count:,} {split} pairs were requested, but the built-in English-Korean corpus has {len(lines):,}; "
            f"set {option} to at most {len(lines)}"
        )
    return _read_lines(lines[:count])


def _read_lines(numbers: range) -> Iterator[SentencePair]:
    with bz2.open(CORPUS_FILE, "rt", encoding="utf-8", newline="\n") as lines:
        vocabulary = [_VocabularyEntry.parse(entry) for entry in next(lines).split()]
        for line in itertools.islice(lines, numbers.start, numbers.stop):
            yield _build_pair([vocabulary[ord(character) - FIRST_CODE] for character in line[:-1]])


class _VocabularyEntry(NamedTuple):
    english: str
    korean: tuple[str, ...]
    is_continuation: bool
    has_possible_link: bool
    offset: int

    @classmethod
    def parse(cls, entry: str) -> _VocabularyEntry:
        english, korean, continuation, possible, offset = ENTRY.fullmatch(entry).groups()  # type: ignore[union-attr]
        words = tuple(korean.split("_")) if korean else ()
        return cls(english, words, bool(continuation), bool(possible), int(offset or 0))


def _build_pair(entries: Sequence[_VocabularyEntry]) -> SentencePair:
    """The pair of the entries of a sentence. Translations are numbered in the order of English."""
    translations: list[tuple[str, ...]] = []
    order: list[int] = []  # the numbers of the translations, in the order of Korean
    sure: list[Link] = []  # (index of an English word, number of a translation)
    possible: list[Link] = []
    place = -1
    for i, entry in enumerate(entries):
        if entry.korean:
            place += 1 + entry.offset
            order.insert(place, len(translations))
            translations.append(entry.korean)
        if entry.korean or entry.is_continuation:
            sure.append((i, len(translations) - 1))
        elif entry.has_possible_link:
            possible.append((i, len(translations) + entry.offset))
    starts = {}
    korean: list[str] = []
    for number in order:
        starts[number] = len(korean)
        korean += translations[number]
    return SentencePair(
        " ".join(entry.english for entry in entries),
        " ".join(korean),
        tuple((i, starts[n] + j) for i, n in sure for j in range(len(translations[n]))),
        tuple((i, starts[n] + len(translations[n]) - 1) for i, n in possible),
    )
