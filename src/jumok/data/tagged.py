"""Sentences whose words have tags, as in CoNLL-2003: a word a line, its columns between spaces or tabs. ::

    EU      NNP  I-NP  I-ORG         word, …, tag: the first column and the last, or those that one names
    rejects VBZ  I-VP  O
    German  JJ   I-NP  I-MISC
                                     an empty line between sentences
    -DOCSTART- -X- O O               and such a one between documents, which is no sentence

Tags tell *entities*, runs of words with a kind. They do it in one of two ways::

            U.N.   official  Ekeus  heads  for  Baghdad   |   Mr  Smith  Ann  left   (two people side by side)
    IOB1    I-ORG  O         I-PER  O      O    I-LOC     |   O   I-PER  B-PER  O
    IOB2    B-ORG  O         B-PER  O      O    B-LOC     |   O   B-PER  B-PER  O

``any`` reads both as they come, as the official scorer does: ``B-`` begins an entity, and so does ``I-``
behind ``O`` or behind another kind. ``iob1`` and ``iob2`` check each tag. What comes out is IOB2 always.

A model reads pieces of words. A word's label is that of its first piece, and the others have none::

    words     Ekeus         heads  for  Baghdad
    pieces    e ##ke ##us   heads  for  bagh ##dad
    labels    B-PER  ·  ·   O      O    B-LOC  ·
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from jumok.batch import IGNORE
from jumok.data import sources
from jumok.data.files import lines
from jumok.data.formats import Flaw, clean, too_long
from jumok.errors import InputError

__all__ = [
    "ENDINGS",
    "Entity",
    "Scheme",
    "Sentence",
    "entities",
    "first_pieces",
    "iob2",
    "labels_of",
    "read",
]

ENDINGS = (".txt", ".conll", ".iob", ".bio", ".tsv")
Scheme = Literal["any", "iob1", "iob2"]
DOCUMENT = "-DOCSTART-"


@dataclass(frozen=True, slots=True)
class Sentence:
    """Words with their tags, in IOB2, and where the first was found: ``file:line``."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    where: str


def read(
    where: str | Sequence[str],
    *,
    word: int = 1,
    tag: int = -1,
    scheme: Scheme = "any",
    split: str | None = None,
) -> Iterator[Sentence | Flaw]:
    """The sentences of the files that a recipe means; a flaw in the place of one that cannot be used.

    ``word`` and ``tag`` are numbers of columns, counted from 1, or from the end: -1 is the last.
    """
    if 0 in (word, tag):
        raise InputError("columns are counted from 1, or from the end: -1 is the last; 0 came")
    for path in sources.files(where, ENDINGS, split):
        for block in _blocks(path):
            found = _sentence(path, block, word, tag, scheme)
            if found is not None:
                yield found


def _blocks(path: Path) -> Iterator[list[tuple[int, str | None]]]:
    """The lines between empty ones, with their numbers."""
    block: list[tuple[int, str | None]] = []
    for number, line in enumerate(lines(path), 1):
        if line is None or line.strip():
            block.append((number, line))
        elif block:
            yield block
            block = []
    if block:
        yield block


def _sentence(
    path: Path, block: list[tuple[int, str | None]], word: int, tag: int, scheme: Scheme
) -> Sentence | Flaw | None:
    words, tags, first = [], [], 0
    before = "O"
    for number, line in block:
        where = f"{path}:{number}"
        if line is None:
            return too_long(path, number)
        # Only spaces and tabs divide columns: a word may hold other white space.
        cells = [cell for cell in line.replace("\t", " ").split(" ") if cell]
        if cells[0] == DOCUMENT:
            continue
        if max(_least(word), _least(tag), 2) > len(cells):
            told = f"{line[:80]!r} has {len(cells)}; a word and its tag are expected"
            return Flaw(where, "too few columns", told)
        said, mark = (cells[n - 1 if n > 0 else n] for n in (word, tag))
        checked = clean(said, "word", where)
        if isinstance(checked, Flaw):
            return checked
        fault = _fault(mark, before, scheme)
        if fault:
            return Flaw(where, fault, f"{mark!r} of the word {checked!r}, behind {before!r}")
        first = first or number
        words.append(checked)
        tags.append(mark)
        before = mark
    return Sentence(tuple(words), tuple(iob2(tags)), f"{path}:{first}") if words else None


def _least(column: int) -> int:
    """How many columns there must be for this one to be there."""
    return column if column > 0 else -column


def _fault(tag: str, before: str, scheme: Scheme) -> str | None:
    """What is wrong with a tag."""
    mark, _, kind = tag.partition("-")
    if tag != "O" and not (mark in ("B", "I") and kind):
        return "a tag that is neither O nor B-KIND nor I-KIND"
    last = before.partition("-")[2]  # the kind of the word before, "" if it has none
    if scheme == "iob1" and mark == "B" and kind != last:
        return "a tag that breaks IOB1: there B- stands behind an entity of the same kind only"
    if scheme == "iob2" and mark == "I" and kind != last:
        return "a tag that breaks IOB2: there every entity begins with B-"
    return None


class Entity(NamedTuple):
    """The words ``begin`` up to, not including, ``end``."""

    kind: str
    begin: int
    end: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence.

    >>> entities(["I-PER", "I-PER", "B-PER", "O"])
    [Entity(kind='PER', begin=0, end=2), Entity(kind='PER', begin=2, end=3)]
    """
    found: list[Entity] = []
    going: str | None = None  # the kind of the entity at hand, which began at ``begin``
    begin = 0
    for place, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        if mark not in ("B", "I", "O") or (mark == "O") != (not kind):
            raise InputError(f"the tag {tag!r} came; expected O, B-KIND or I-KIND")
        if going is not None and (mark != "I" or kind != going):
            found.append(Entity(going, begin, place))
            going = None
        if going is None and mark != "O":
            going, begin = kind, place
    return found


def iob2(tags: Sequence[str]) -> list[str]:
    """The same entities, each beginning with ``B-``.

    >>> iob2(["I-PER", "I-PER", "B-PER", "O", "I-LOC"])
    ['B-PER', 'I-PER', 'B-PER', 'O', 'B-LOC']
    """
    written = ["O"] * len(tags)
    for kind, begin, end in entities(tags):
        written[begin:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - begin - 1)]
    return written


def labels_of(kinds: Sequence[str]) -> list[str]:
    """All tags for entities of these kinds.

    >>> labels_of(["PER", "LOC"])
    ['O', 'B-PER', 'I-PER', 'B-LOC', 'I-LOC']
    """
    return ["O", *(f"{mark}-{kind}" for kind in kinds for mark in "BI")]


def first_pieces(words: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """A label for each piece: that of its word for the first of a word, IGNORE for the others.

    ``words`` has the number of each piece's word; None is a piece of no word.

    >>> first_pieces([None, 0, 0, 1, None], [3, 5])
    [-100, 3, -100, 5, -100]
    """
    before: int | None = None
    found = []
    for word in words:
        found.append(IGNORE if word is None or word == before else labels[word])
        before = word
    return found
