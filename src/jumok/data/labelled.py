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

from jumok.data import tables
from jumok.data.formats import Flaw, clean
from jumok.data.tables import Column, Record
from jumok.errors import InputError

__all__ = ["Columns", "Labels", "Sample", "find", "unescaped"]

MOST_LABELS = 1000  # as many classes are no classes: a wrong column was named
SHOWN = 20  # of them in a message
# How the Penn Treebank writes what it uses for itself; in small letters, too.
ESCAPES = {
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
class Sample:
    """A text or two, what is to be said of them, and where they were found: ``file:line``.

    ``label`` is a class as the data writes it, or a number for regression.
    """

    text: str
    pair: str | None
    label: str | float
    where: str


@dataclass(frozen=True)
class Labels:
    """The classes, numbered in this order: as the data writes them, and as they are called.

    >>> labels = Labels.named({"0": "bad", "1": "good"})
    >>> labels.number("1"), labels.names[1]
    (1, 'good')
    """

    written: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def named(cls, labels: Mapping[str, str] | Sequence[str]) -> Labels:
        """As a recipe says them."""
        called = labels if isinstance(labels, Mapping) else {one: one for one in labels}
        if len(called) < len(labels) or len(set(called.values())) < len(called):
            raise InputError(f"data.labels: a label comes twice in {list(labels)} or their names")
        return cls(tuple(map(str, called)), tuple(map(str, called.values())))

    @classmethod
    def seen(cls, samples: Iterable[Sample]) -> Labels:
        """Those of the samples, in order of first sight."""
        found: dict[str, str] = {}
        for sample in samples:
            found.setdefault(str(sample.label), sample.where)
            if len(found) > MOST_LABELS:
                raise InputError(
                    f"{sample.where}: more than {MOST_LABELS} different labels; is {sample.label!r} a label? "
                    "data.label names the column, and for numbers: data.regression=true"
                )
        if len(found) == 1:
            raise InputError(
                f"all examples have the one label {next(iter(found))!r}: nothing is to be learned"
            )
        return cls(tuple(found), tuple(found))

    def number(self, label: str | float) -> int:
        """Of a class as the data writes it."""
        return self.written.index(str(label))

    def check(self, found: Iterable[Sample | Flaw]) -> Iterator[Sample | Flaw]:
        """The same samples, with a flaw for each whose label is none of these."""
        known = set(self.written)
        listed = ", ".join(self.written[:SHOWN]) + (", …" if len(self.written) > SHOWN else "")
        for one in found:
            if isinstance(one, Sample) and one.label not in known:
                one = Flaw(one.where, "an unknown label", f"{one.label!r}; known are: {listed}")
            yield one

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; ``pair`` is the second text."""

    text: Column
    label: Column
    pair: Column | None = None
    header: bool | None = None  # whether the first line names the columns; None: if they are told by name


def find(
    where: str | Sequence[str], columns: Columns, *, regression: bool = False, split: str | None = None
) -> Iterator[Sample | Flaw]:
    """The samples of the tables that a recipe means, and flaws in the place of what cannot be used."""
    wanted = [columns.text, columns.label, *([] if columns.pair is None else [columns.pair])]
    for record in tables.find(where, wanted, split=split, header=columns.header):
        yield record if isinstance(record, Flaw) else _sample(record, regression)


def unescaped(text: str) -> str:
    """A text as people write it, where it comes from a treebank.

    >>> unescaped("-lrb- a -rrb- lovely film")
    '( a ) lovely film'
    """
    for escape, sign in ESCAPES.items():
        text = text.replace(escape, sign).replace(escape.lower(), sign)
    return text


def _sample(record: Record, regression: bool) -> Sample | Flaw:
    text, label, *pair = record.values
    where = record.where
    texts = [clean(text, "text", where)]
    if pair:
        texts = [clean(text, "first text", where), clean(pair[0], "second text", where)]
    said: str | float | Flaw
    said = _number(label, where) if regression else _class(label, where)
    for one in (*texts, said):
        if isinstance(one, Flaw):
            return one
    assert not isinstance(said, Flaw)
    return Sample(str(texts[0]), str(texts[1]) if pair else None, said, where)


def _class(label: object, where: str) -> str | Flaw:
    """A class as text: JSON and Parquet may have a number or a truth. The numbers 1 and 1.0 are one class."""
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return clean(str(label) if isinstance(label, int | float) else label, "label", where)


def _number(label: object, where: str) -> float | Flaw:
    try:
        number = float(label)  # type: ignore[arg-type]  # whatever it is
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    return Flaw(where, "a label that is no number", f"it is {label!r}"[:80])
