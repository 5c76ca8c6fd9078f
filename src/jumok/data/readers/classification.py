"""Texts with a label each: single sentences or pairs, of classes or with a number.

A recipe says where they are (see ``sources.py``) and which columns hold what::

    train: sst2/train                      rows such as    label    sentence
    text: [sentence, content]                              0        contains no wit , only labored gags
    label: label
    labels: {0: negative, 1: positive}     how the data writes a class, and what it is called

Without ``labels``, classes are called as they are written, and numbered in the order in which the training
data first has them. A row that cannot be used is a *flaw*: it stops the reading, or is skipped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jumok.data.readers import tables
from jumok.data.readers.formats import InvalidExample, clean_text
from jumok.data.readers.tables import ColumnSpec, TableRecord
from jumok.errors import InputError

__all__ = [
    "ClassificationColumns",
    "ClassificationExample",
    "LabelSet",
    "read_classification_examples",
    "unescape_treebank",
]

MAX_LABELS = 1000  # as many classes are no classes: a wrong column was named
MAX_LABELS_SHOWN = 20  # of them in a message
# How the Penn Treebank writes what it uses for itself; in small letters, too.
TREEBANK_ESCAPES = {
    "-LRB-": "(",
    "-RRB-": ")",
    "-LSB-": "[",
    "-RSB-": "]",
    "-LCB-": "{",
    "-RCB-": "}",
    r"\/": "/",
    r"\*": "*",
}


@dataclass(frozen=True, slots=True)
class ClassificationExample:
    """A text or two, what is to be said of them, and where they were found: ``file:line``.

    ``label`` is a class as the data writes it, or a number for regression.
    """

    text: str
    pair: str | None
    label: str | float
    location: str


@dataclass(frozen=True)
class LabelSet:
    """The classes, numbered in this order: as the data writes them, and as they are called.

    >>> labels = LabelSet.from_config({"0": "bad", "1": "good"})
    >>> labels.index("1"), labels.names[1]
    (1, 'good')
    """

    raw_labels: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def from_config(cls, labels: Mapping[str, str] | Sequence[str]) -> LabelSet:
        """As a recipe says them."""
        called = labels if isinstance(labels, Mapping) else {one: one for one in labels}
        if len(called) < len(labels) or len(set(called.values())) < len(called):
            raise InputError(f"data.label_names: a label occurs twice in {list(labels)} or their names")
        return cls(tuple(map(str, called)), tuple(map(str, called.values())))

    @classmethod
    def from_examples(cls, examples: Iterable[ClassificationExample]) -> LabelSet:
        """Those of the samples, in order of first sight."""
        found: dict[str, str] = {}
        for sample in examples:
            found.setdefault(str(sample.label), sample.location)
            if len(found) > MAX_LABELS:
                raise InputError(
                    f"{sample.location}: more than {MAX_LABELS} different labels; is {sample.label!r} a label? "
                    "data.label_column names the column, and for numbers: data.regression=true"
                )
        if len(found) == 1:
            raise InputError(
                f"all examples have the one label {next(iter(found))!r}: nothing is to be learned"
            )
        return cls(tuple(found), tuple(found))

    def index(self, label: str | float) -> int:
        """Of a class as the data writes it."""
        return self.raw_labels.index(str(label))

    def check_examples(
        self, examples: Iterable[ClassificationExample | InvalidExample]
    ) -> Iterator[ClassificationExample | InvalidExample]:
        """The same samples, with a flaw for each whose label is none of these."""
        known = set(self.raw_labels)
        listed = ", ".join(self.raw_labels[:MAX_LABELS_SHOWN]) + (
            ", …" if len(self.raw_labels) > MAX_LABELS_SHOWN else ""
        )
        for one in examples:
            if isinstance(one, ClassificationExample) and one.label not in known:
                one = InvalidExample(one.location, "an unknown label", f"{one.label!r}; known are: {listed}")
            yield one

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class ClassificationColumns:
    """Which columns hold what; ``pair`` is the second text."""

    text: ColumnSpec
    label: ColumnSpec
    pair: ColumnSpec | None = None
    header: bool | None = None  # whether the first line names the columns; None: if they are told by name


def read_classification_examples(
    dataset: str | Sequence[str],
    columns: ClassificationColumns,
    *,
    regression: bool = False,
    split: str | None = None,
) -> Iterator[ClassificationExample | InvalidExample]:
    """The samples of the tables that a recipe means, and flaws in the place of what cannot be used."""
    wanted = [columns.text, columns.label, *([] if columns.pair is None else [columns.pair])]
    for record in tables.read_tables(dataset, wanted, split=split, header=columns.header):
        yield record if isinstance(record, InvalidExample) else _make_example(record, regression)


def unescape_treebank(text: str) -> str:
    """A text as people write it, where it comes from a treebank.

    >>> unescape_treebank("-lrb- a -rrb- lovely film")
    '( a ) lovely film'
    """
    for escape, sign in TREEBANK_ESCAPES.items():
        text = text.replace(escape, sign).replace(escape.lower(), sign)
    return text


def _make_example(record: TableRecord, regression: bool) -> ClassificationExample | InvalidExample:
    text, label, *pair = record.values
    where = record.location
    texts = [clean_text(text, "text", where)]
    if pair:
        texts = [clean_text(text, "first text", where), clean_text(pair[0], "second text", where)]
    said: str | float | InvalidExample
    said = _parse_number(label, where) if regression else _parse_class(label, where)
    for one in (*texts, said):
        if isinstance(one, InvalidExample):
            return one
    assert not isinstance(said, InvalidExample)
    return ClassificationExample(str(texts[0]), str(texts[1]) if pair else None, said, where)


def _parse_class(label: object, location: str) -> str | InvalidExample:
    """A class as text: JSON and Parquet may have a number or a truth. The numbers 1 and 1.0 are one class."""
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return clean_text(str(label) if isinstance(label, int | float) else label, "label", location)


def _parse_number(label: object, location: str) -> float | InvalidExample:
    try:
        number = float(label)  # type: ignore[arg-type]  # whatever it is
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    return InvalidExample(location, "a label that is no number", f"it is {label!r}"[:80])
