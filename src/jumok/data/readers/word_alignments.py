"""Reader of gold word alignments, for the alignment error rate.

There are two formats, gzipped or not. The first line determines which one a file has::

    0-0 1p2 1-1        Pharaoh, one line per sentence pair: i-j is a sure link, ipj or i?j a possible one
    17 3 4 P           one line per link: sentence pair (from 1), two words, and S (sure, the default) or P

Words are numbered from 0 or from 1. A 0 anywhere in the file means from 0; pass ``first_index`` if this guess
is not safe. The returned indices start at 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jumok.data.readers.dataset_files import rank_by_similarity, search_paths
from jumok.data.readers.text_files import read_lines
from jumok.errors import InputError

PHARAOH_PATTERN = re.compile(r"(\d{1,9})([-p?])(\d{1,9})")
NUMBERED_PATTERN = re.compile(r"(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})(?:\s+([SP]))?(?:\s+[\d.]+)?")


AlignmentLinks = frozenset[tuple[int, int]]  # (source word, target word), from 0


@dataclass(frozen=True)
class GoldAlignment:
    """Gold links of a sentence pair: the sure links, and the possible links, which include the sure ones."""

    sure: AlignmentLinks
    possible: AlignmentLinks = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "possible", self.possible | self.sure)

    def swap_sides(self) -> GoldAlignment:
        """Swap source and target."""
        return GoldAlignment(*(frozenset((j, i) for i, j in links) for links in (self.sure, self.possible)))


def find_alignment_file(name: str) -> Path:
    """Find a file of links by its path, or by its split: ``europarl/gold`` has ``gold.links.txt.gz``."""
    for path in search_paths(name):
        for suffix in ("", ".links", ".links.txt", ".links.gz", ".links.txt.gz"):
            if (candidate := path.parent / f"{path.name}{suffix}").is_file():
                return candidate
    folder = next((path.parent for path in search_paths(name) if path.parent.is_dir()), Path())
    similar = rank_by_similarity(f"{Path(name).name}.links", [path.name for path in folder.iterdir() if path.is_file()])
    raise InputError(
        f"there is no file {name} or {name}.links.txt; {folder} contains: {', '.join(similar[:10]) or 'nothing'}"
    )


def read_alignments(path: Path, *, first_index: int | None = None, num_pairs: int | None = None) -> list[GoldAlignment]:
    """The links of every sentence pair, in order.

    ``first_index``: the number of the first word of a sentence, 0 or 1. ``num_pairs``: the number of sentence
    pairs, because the last ones may have no links.
    """
    count, records = _read_links(path)
    if num_pairs is not None:
        if count > num_pairs:
            raise InputError(f"{path} has links for pair {count}, and there are {num_pairs} pairs")
        count = num_pairs
    if first_index is None:
        first_index = min((1, *(min(record.source, record.target) for record in records)))
    sure: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    possible: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    for record in records:
        link = record.source - first_index, record.target - first_index
        if min(link) < 0:
            raise InputError(f"{path}:{record.line}: a word is 0, but words start at {first_index}")
        possible[record.pair].add(link)
        if record.sure:
            sure[record.pair].add(link)
    return [
        GoldAlignment(frozenset(sure_links), frozenset(possible_links))
        for sure_links, possible_links in zip(sure, possible, strict=True)
    ]


class LinkRecord(NamedTuple):
    """A link of a file. ``pair`` starts at 0; words are numbered as in the file."""

    line: int
    pair: int
    source: int
    target: int
    sure: bool


def _read_links(path: Path) -> tuple[int, list[LinkRecord]]:
    """The number of sentence pairs, and all links."""
    records: list[LinkRecord] = []
    is_numbered: bool | None = None
    num_pairs = line_number = 0
    for line_number, line in enumerate(read_lines(path), 1):
        words = (line or "").split()
        if is_numbered is None and words:
            is_numbered = NUMBERED_PATTERN.fullmatch(" ".join(words)) is not None
        if is_numbered:
            records += _parse_numbered(path, line_number, words)
            num_pairs = max([num_pairs, *(record.pair + 1 for record in records[-1:])])
        else:
            records += (_parse_pharaoh(path, line_number, word) for word in words)
    if not line_number:
        raise InputError(f"{path} is empty")
    return (num_pairs if is_numbered else line_number), records


def _parse_numbered(path: Path, line_number: int, words: list[str]) -> list[LinkRecord]:
    if not words:
        return []
    match = NUMBERED_PATTERN.fullmatch(" ".join(words))
    if match is None or match[1] == "0":
        raise InputError(
            f"{path}:{line_number}: {' '.join(words)!r}; expected a link such as 17 3 4 S, with pairs from 1"
        )
    return [LinkRecord(line_number, int(match[1]) - 1, int(match[2]), int(match[3]), match[4] != "P")]


def _parse_pharaoh(path: Path, line_number: int, word: str) -> LinkRecord:
    match = PHARAOH_PATTERN.fullmatch(word)
    if match is None:
        raise InputError(f"{path}:{line_number}: {word!r}; expected a link such as 3-4, or 3p4 if it is only possible")
    return LinkRecord(line_number, line_number - 1, int(match[1]), int(match[3]), match[2] == "-")
