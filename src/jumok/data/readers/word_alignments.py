"""Which words translate which, as people marked it: gold links for the alignment error rate.

Two kinds of file are read, gzipped or not, and told apart by their first line::

    0-0 1p2 1-1        a line a pair (Pharaoh): i-j is a sure link, ipj or i?j a possible one
    17 3 4 P           a line a link: the pair, counted from 1, two words, and S (sure, also if left out) or P

Words are counted from 0 or from 1, and both are found in the wild. A 0 anywhere in the file says that it is
from 0; say ``first_index`` where that is not to be guessed. What is returned counts from 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jumok.data.readers.formats import rank_by_similarity
from jumok.data.readers.text_files import data_folder, read_lines
from jumok.errors import InputError

__all__ = ["AlignmentLinks", "GoldAlignment", "find_alignment_file", "read_alignments"]

PHARAOH_PATTERN = re.compile(r"(\d{1,9})([-p?])(\d{1,9})")
NUMBERED_PATTERN = re.compile(r"(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})(?:\s+([SP]))?(?:\s+[\d.]+)?")


AlignmentLinks = frozenset[tuple[int, int]]  # (source word, target word), counted from 0


@dataclass(frozen=True)
class GoldAlignment:
    """Links by people: those that they were sure of; those that they held possible, sure ones included."""

    sure: AlignmentLinks
    possible: AlignmentLinks = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "possible", self.possible | self.sure)

    def swap_sides(self) -> GoldAlignment:
        """The same for the other direction of translation."""
        return GoldAlignment(*(frozenset((j, i) for i, j in links) for links in (self.sure, self.possible)))


def find_alignment_file(name: str) -> Path:
    """A file of links by its path, or that of a split: ``europarl/gold`` has ``gold.links.txt.gz``."""
    for path in (Path(name), data_folder() / name):
        for ending in ("", ".links", ".links.txt", ".links.gz", ".links.txt.gz"):
            if (found := path.parent / f"{path.name}{ending}").is_file():
                return found
    folder = next((one for one in (Path(name).parent, (data_folder() / name).parent) if one.is_dir()), Path())
    there = rank_by_similarity(
        f"{Path(name).name}.links", [path.name for path in folder.iterdir() if path.is_file()]
    )
    raise InputError(
        f"there are no links {name} or {name}.links.txt; {folder} holds: {', '.join(there[:10]) or 'nothing'}"
    )


def read_alignments(
    path: Path, *, first_index: int | None = None, num_pairs: int | None = None
) -> list[GoldAlignment]:
    """The links of every pair of sentences, in order.

    ``first_index`` is the number of a sentence's first word, 0 or 1; ``num_pairs`` how many pairs there are, where the
    last of them may have no links.
    """
    count, found = _read_links(path)
    if num_pairs is not None:
        if count > num_pairs:
            raise InputError(f"{path} has links for pair {count}, and there are {num_pairs} pairs")
        count = num_pairs
    if first_index is None:
        first_index = min((1, *(min(mark.source, mark.target) for mark in found)))
    sure: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    possible: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    for mark in found:
        link = mark.source - first_index, mark.target - first_index
        if min(link) < 0:
            raise InputError(f"{path}:{mark.line}: a word 0, where words are counted from {first_index}")
        possible[mark.pair].add(link)
        if mark.sure:
            sure[mark.pair].add(link)
    return [
        GoldAlignment(frozenset(one), frozenset(other)) for one, other in zip(sure, possible, strict=True)
    ]


class LinkRecord(NamedTuple):
    """One link as it stands in the file; the pair is counted from 0."""

    line: int
    pair: int
    source: int
    target: int
    sure: bool


def _read_links(path: Path) -> tuple[int, list[LinkRecord]]:
    """The number of pairs, and all links."""
    marks: list[LinkRecord] = []
    numbered: bool | None = None
    count = number = 0
    for number, line in enumerate(read_lines(path), 1):
        words = (line or "").split()
        if numbered is None and words:
            numbered = NUMBERED_PATTERN.fullmatch(" ".join(words)) is not None
        if numbered:
            marks += _parse_numbered(path, number, words)
            count = max([count, *(mark.pair + 1 for mark in marks[-1:])])
        else:
            marks += (_parse_pharaoh(path, number, word) for word in words)
    if not number:
        raise InputError(f"{path} is empty")
    return (count if numbered else number), marks


def _parse_numbered(path: Path, line_number: int, words: list[str]) -> list[LinkRecord]:
    if not words:
        return []
    match = NUMBERED_PATTERN.fullmatch(" ".join(words))
    if match is None or match[1] == "0":
        raise InputError(
            f"{path}:{line_number}: {' '.join(words)!r}; a link is written as in 17 3 4 S, pairs from 1"
        )
    return [LinkRecord(line_number, int(match[1]) - 1, int(match[2]), int(match[3]), match[4] != "P")]


def _parse_pharaoh(path: Path, line_number: int, word: str) -> LinkRecord:
    match = PHARAOH_PATTERN.fullmatch(word)
    if match is None:
        raise InputError(
            f"{path}:{line_number}: {word!r}; a link is written as in 3-4, or 3p4 if it is only possible"
        )
    return LinkRecord(line_number, line_number - 1, int(match[1]), int(match[3]), match[2] == "-")
