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
behind ``O`` or behind another kind. ``iob1`` and ``convert_to_iob2`` check each tag. What comes out is IOB2 always.

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

from jumok.batches.tokens import IGNORE
from jumok.data.readers import parallel_corpus
from jumok.data.readers.formats import InvalidExample, clean_text, line_too_long
from jumok.data.readers.text_files import read_lines
from jumok.errors import InputError

__all__ = [
    "TAGGING_SUFFIXES",
    "Entity",
    "TagScheme",
    "TaggingExample",
    "convert_to_iob2",
    "extract_entities",
    "label_first_pieces",
    "make_iob2_labels",
    "read_tagging_examples",
]

TAGGING_SUFFIXES = (".txt", ".conll", ".iob", ".bio", ".tsv")
TagScheme = Literal["any", "iob1", "iob2"]
DOCUMENT_START = "-DOCSTART-"


@dataclass(frozen=True, slots=True)
class TaggingExample:
    """Words with their tags, in IOB2, and where the first was found: ``file:line``."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    location: str


def read_tagging_examples(
    dataset: str | Sequence[str],
    *,
    word_column: int = 1,
    tag_column: int = -1,
    scheme: TagScheme = "any",
    split: str | None = None,
) -> Iterator[TaggingExample | InvalidExample]:
    """The sentences of the files that a recipe means; a flaw in the place of one that cannot be used.

    ``word_column`` and ``tag_column`` are numbers of columns, counted from 1, or from the end: -1 is the last.
    """
    if 0 in (word_column, tag_column):
        raise InputError("columns are counted from 1, or from the end: -1 is the last; 0 came")
    for path in parallel_corpus.find_files(dataset, TAGGING_SUFFIXES, split):
        for block in _iter_blocks(path):
            found = _parse_sentence(path, block, word_column, tag_column, scheme)
            if found is not None:
                yield found


def _iter_blocks(path: Path) -> Iterator[list[tuple[int, str | None]]]:
    """The lines between empty ones, with their numbers."""
    block: list[tuple[int, str | None]] = []
    for number, line in enumerate(read_lines(path), 1):
        if line is None or line.strip():
            block.append((number, line))
        elif block:
            yield block
            block = []
    if block:
        yield block


def _parse_sentence(
    path: Path, block: list[tuple[int, str | None]], word_column: int, tag_column: int, scheme: TagScheme
) -> TaggingExample | InvalidExample | None:
    words, tags, first = [], [], 0
    before = "O"
    for number, line in block:
        where = f"{path}:{number}"
        if line is None:
            return line_too_long(path, number)
        # Only spaces and tabs divide columns: a word may hold other white space.
        cells = [cell for cell in line.replace("\t", " ").split(" ") if cell]
        if cells[0] == DOCUMENT_START:
            continue
        if max(_min_columns(word_column), _min_columns(tag_column), 2) > len(cells):
            told = f"{line[:80]!r} has {len(cells)}; a word and its tag are expected"
            return InvalidExample(where, "too few columns", told)
        said, mark = (cells[n - 1 if n > 0 else n] for n in (word_column, tag_column))
        checked = clean_text(said, "word", where)
        if isinstance(checked, InvalidExample):
            return checked
        fault = _find_tag_error(mark, before, scheme)
        if fault:
            return InvalidExample(where, fault, f"{mark!r} of the word {checked!r}, behind {before!r}")
        first = first or number
        words.append(checked)
        tags.append(mark)
        before = mark
    return TaggingExample(tuple(words), tuple(convert_to_iob2(tags)), f"{path}:{first}") if words else None


def _min_columns(column: int) -> int:
    """How many columns there must be for this one to be there."""
    return column if column > 0 else -column


def _find_tag_error(tag: str, previous: str, scheme: TagScheme) -> str | None:
    """What is wrong with a tag."""
    mark, _, kind = tag.partition("-")
    if tag != "O" and not (mark in ("B", "I") and kind):
        return "a tag that is neither O nor B-KIND nor I-KIND"
    last = previous.partition("-")[2]  # the kind of the word before, "" if it has none
    if scheme == "iob1" and mark == "B" and kind != last:
        return "a tag that breaks IOB1: there B- stands behind an entity of the same kind only"
    if scheme == "iob2" and mark == "I" and kind != last:
        return "a tag that breaks IOB2: there every entity begins with B-"
    return None


class Entity(NamedTuple):
    """The words ``begin`` up to, not including, ``end``."""

    type: str
    begin: int
    end: int


def extract_entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence.

    >>> extract_entities(["I-PER", "I-PER", "B-PER", "O"])
    [Entity(type='PER', begin=0, end=2), Entity(type='PER', begin=2, end=3)]
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


def convert_to_iob2(tags: Sequence[str]) -> list[str]:
    """The same entities, each beginning with ``B-``.

    >>> convert_to_iob2(["I-PER", "I-PER", "B-PER", "O", "I-LOC"])
    ['B-PER', 'I-PER', 'B-PER', 'O', 'B-LOC']
    """
    written = ["O"] * len(tags)
    for kind, begin, end in extract_entities(tags):
        written[begin:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - begin - 1)]
    return written


def make_iob2_labels(entity_types: Sequence[str]) -> list[str]:
    """All tags for entities of these kinds.

    >>> make_iob2_labels(["PER", "LOC"])
    ['O', 'B-PER', 'I-PER', 'B-LOC', 'I-LOC']
    """
    return ["O", *(f"{mark}-{kind}" for kind in entity_types for mark in "BI")]


def label_first_pieces(word_ids: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """A label for each piece: that of its word for the first of a word, IGNORE for the others.

    ``word_ids`` has the number of each piece's word; None is a piece of no word.

    >>> label_first_pieces([None, 0, 0, 1, None], [3, 5])
    [-100, 3, -100, 5, -100]
    """
    before: int | None = None
    found = []
    for word in word_ids:
        found.append(IGNORE if word is None or word == before else labels[word])
        before = word
    return found
