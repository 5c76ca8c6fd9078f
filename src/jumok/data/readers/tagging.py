"""Reader of tagged sentences, as in CoNLL-2003: one word per line, columns separated by spaces or tabs. ::

    EU      NNP  I-NP  I-ORG         word, …, tag: by default the first and the last column
    rejects VBZ  I-VP  O
    German  JJ   I-NP  I-MISC
                                     an empty line between sentences
    -DOCSTART- -X- O O               a line between documents, which is no sentence

Tags describe *entities*, spans of words with a type, in one of two schemes::

            U.N.   official  Ekeus  heads  for  Baghdad   |   Mr  Smith  Ann  left   (two people side by side)
    IOB1    I-ORG  O         I-PER  O      O    I-LOC     |   O   I-PER  B-PER  O
    IOB2    B-ORG  O         B-PER  O      O    B-LOC     |   O   B-PER  B-PER  O

``any`` accepts both, like the official scorer: ``B-`` begins an entity, and so does ``I-`` after ``O`` or
after another type. ``iob1`` and ``iob2`` check each tag. The result is always in IOB2.

A model reads pieces of words. The first piece has the label of the word, and the other pieces have none::

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
from jumok.data.readers.dataset_files import find_files
from jumok.data.readers.invalid_examples import InvalidExample, clean_text, line_too_long
from jumok.data.readers.text_files import read_lines
from jumok.errors import InputError

TAGGING_SUFFIXES = (".txt", ".conll", ".iob", ".bio", ".tsv")
TagScheme = Literal["any", "iob1", "iob2"]
DOCUMENT_START = "-DOCSTART-"


@dataclass(frozen=True, slots=True)
class TaggingExample:
    """Words with tags in IOB2, and the location of the first word, ``file:line``."""

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
    """Read the files that a recipe names. A sentence that cannot be used is an :class:`InvalidExample`.

    ``word_column`` and ``tag_column`` are column numbers, starting at 1, or at -1 for the last column.
    """
    if 0 in (word_column, tag_column):
        raise InputError("a column is 0; columns start at 1, or at -1 for the last one")
    for path in find_files(dataset, TAGGING_SUFFIXES, split):
        for block in _iter_blocks(path):
            example = _parse_sentence(path, block, word_column, tag_column, scheme)
            if example is not None:
                yield example


def _iter_blocks(path: Path) -> Iterator[list[tuple[int, str | None]]]:
    """Blocks of lines between empty lines, with line numbers."""
    block: list[tuple[int, str | None]] = []
    for line_number, line in enumerate(read_lines(path), 1):
        if line is None or line.strip():
            block.append((line_number, line))
        elif block:
            yield block
            block = []
    if block:
        yield block


def _parse_sentence(
    path: Path, block: list[tuple[int, str | None]], word_column: int, tag_column: int, scheme: TagScheme
) -> TaggingExample | InvalidExample | None:
    words, tags, first_line = [], [], 0
    previous = "O"
    for line_number, line in block:
        location = f"{path}:{line_number}"
        if line is None:
            return line_too_long(path, line_number)
        # Only spaces and tabs separate columns: a word may contain other white space.
        cells = [cell for cell in line.replace("\t", " ").split(" ") if cell]
        if cells[0] == DOCUMENT_START:
            continue
        if max(_min_columns(word_column), _min_columns(tag_column), 2) > len(cells):
            detail = f"{line[:80]!r} has {len(cells)}; expected a word and its tag"
            return InvalidExample(location, "too few columns", detail)
        word, tag = (cells[column - 1 if column > 0 else column] for column in (word_column, tag_column))
        cleaned = clean_text(word, "word", location)
        if isinstance(cleaned, InvalidExample):
            return cleaned
        error = _find_tag_error(tag, previous, scheme)
        if error:
            return InvalidExample(location, error, f"{tag!r} of the word {cleaned!r}, after {previous!r}")
        first_line = first_line or line_number
        words.append(cleaned)
        tags.append(tag)
        previous = tag
    return TaggingExample(tuple(words), tuple(convert_to_iob2(tags)), f"{path}:{first_line}") if words else None


def _min_columns(column: int) -> int:
    """The number of columns that a line needs to have this one."""
    return column if column > 0 else -column


def _find_tag_error(tag: str, previous: str, scheme: TagScheme) -> str | None:
    """What is wrong with a tag; None if it is valid."""
    prefix, _, entity_type = tag.partition("-")
    if tag != "O" and not (prefix in ("B", "I") and entity_type):
        return "a tag that is neither O nor B-TYPE nor I-TYPE"
    previous_type = previous.partition("-")[2]  # "" if the previous word is outside
    if scheme == "iob1" and prefix == "B" and entity_type != previous_type:
        return "a tag that violates IOB1, where B- only follows an entity of the same type"
    if scheme == "iob2" and prefix == "I" and entity_type != previous_type:
        return "a tag that violates IOB2, where every entity begins with B-"
    return None


class Entity(NamedTuple):
    """An entity of the words from ``begin`` to ``end``, exclusive."""

    type: str
    begin: int
    end: int


def extract_entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence.

    >>> extract_entities(["I-PER", "I-PER", "B-PER", "O"])
    [Entity(type='PER', begin=0, end=2), Entity(type='PER', begin=2, end=3)]
    """
    entities: list[Entity] = []
    open_type: str | None = None  # the type of the current entity, which began at ``start``
    start = 0
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, entity_type = tag.partition("-")
        if prefix not in ("B", "I", "O") or (prefix == "O") != (not entity_type):
            raise InputError(f"a tag is {tag!r}; expected O, B-TYPE or I-TYPE")
        if open_type is not None and (prefix != "I" or entity_type != open_type):
            entities.append(Entity(open_type, start, index))
            open_type = None
        if open_type is None and prefix != "O":
            open_type, start = entity_type, index
    return entities


def convert_to_iob2(tags: Sequence[str]) -> list[str]:
    """Tags of the same entities in IOB2, where each begins with ``B-``.

    >>> convert_to_iob2(["I-PER", "I-PER", "B-PER", "O", "I-LOC"])
    ['B-PER', 'I-PER', 'B-PER', 'O', 'B-LOC']
    """
    converted = ["O"] * len(tags)
    for entity_type, start, end in extract_entities(tags):
        converted[start:end] = [f"B-{entity_type}", *[f"I-{entity_type}"] * (end - start - 1)]
    return converted


def make_iob2_labels(entity_types: Sequence[str]) -> list[str]:
    """All tags for entities of these types.

    >>> make_iob2_labels(["PER", "LOC"])
    ['O', 'B-PER', 'I-PER', 'B-LOC', 'I-LOC']
    """
    return ["O", *(f"{prefix}-{entity_type}" for entity_type in entity_types for prefix in "BI")]


def label_first_pieces(word_ids: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """Labels of pieces: the first piece of a word has the label of the word, the others have IGNORE.

    ``word_ids`` gives the index of the word of each piece; None for a piece of no word.

    >>> label_first_pieces([None, 0, 0, 1, None], [3, 5])
    [-100, 3, -100, 5, -100]
    """
    previous: int | None = None
    piece_labels = []
    for word in word_ids:
        piece_labels.append(IGNORE if word is None or word == previous else labels[word])
        previous = word
    return piece_labels
