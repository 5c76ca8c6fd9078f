"""Reader of classification and regression data: texts or text pairs with a label each.

A recipe names the data (see ``tables.py``) and its columns::

    train: sst2/train                          rows such as    label    sentence
    text_column: [sentence, content]                           0        contains no wit , only labored gags
    label_column: label
    label_names: {0: negative, 1: positive}    the label in the data, and the name of the class

Without ``label_names``, classes are named like their labels and numbered in the order in which they first
occur in the training data. A row that cannot be used is an :class:`InvalidExample`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jumok.data.readers import tables
from jumok.data.readers.invalid_examples import InvalidExample, clean_text
from jumok.data.readers.tables import ColumnSpec, TableRow
from jumok.errors import InputError

MAX_LABELS = 1000  # with more classes, the label column is probably wrong
MAX_LABELS_SHOWN = 20  # in a message
# Escapes of the Penn Treebank. They also occur in lower case.
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
    """One or two texts, their label, and their location, ``file:line``.

    ``label`` is the raw label of a class, or a number for regression.
    """

    text: str
    pair: str | None
    label: str | float
    location: str


@dataclass(frozen=True)
class LabelSet:
    """The classes in order: the labels in the data, and the names.

    >>> labels = LabelSet.from_config({"0": "bad", "1": "good"})
    >>> labels.index("1"), labels.names[1]
    (1, 'good')
    """

    raw_labels: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def from_config(cls, labels: Mapping[str, str] | Sequence[str]) -> LabelSet:
        """The labels of a recipe."""
        names = labels if isinstance(labels, Mapping) else {label: label for label in labels}
        if len(names) < len(labels) or len(set(names.values())) < len(names):
            raise InputError(f"data.label_names: a label occurs twice in {list(labels)} or their names")
        return cls(tuple(map(str, names)), tuple(map(str, names.values())))

    @classmethod
    def from_examples(cls, examples: Iterable[ClassificationExample]) -> LabelSet:
        """The labels of examples, in the order of their first occurrence."""
        locations: dict[str, str] = {}
        for example in examples:
            locations.setdefault(str(example.label), example.location)
            if len(locations) > MAX_LABELS:
                raise InputError(
                    f"{example.location}: more than {MAX_LABELS} different labels; is {example.label!r} a "
                    "label? Set data.label_column to the right column, or data.regression=true for numbers"
                )
        if len(locations) == 1:
            raise InputError(
                f"all examples have the same label, {next(iter(locations))!r}; expected two or more labels"
            )
        return cls(tuple(locations), tuple(locations))

    def index(self, label: str | float) -> int:
        """The index of a label."""
        return self.raw_labels.index(str(label))

    def check_examples(
        self, examples: Iterable[ClassificationExample | InvalidExample]
    ) -> Iterator[ClassificationExample | InvalidExample]:
        """The same examples, with an :class:`InvalidExample` for each with another label."""
        known = set(self.raw_labels)
        shown = ", ".join(self.raw_labels[:MAX_LABELS_SHOWN]) + (
            ", …" if len(self.raw_labels) > MAX_LABELS_SHOWN else ""
        )
        for example in examples:
            if isinstance(example, ClassificationExample) and example.label not in known:
                example = InvalidExample(
                    example.location, "an unknown label", f"{example.label!r}; the labels are: {shown}"
                )
            yield example

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class ClassificationColumns:
    """The columns of a table; ``pair`` is the second text."""

    text: ColumnSpec
    label: ColumnSpec
    pair: ColumnSpec | None = None
    header: bool | None = None  # whether the first line is a header; None: if columns are given by name


def read_classification_examples(
    dataset: str | Sequence[str],
    columns: ClassificationColumns,
    *,
    regression: bool = False,
    split: str | None = None,
) -> Iterator[ClassificationExample | InvalidExample]:
    """Read the tables that a recipe names. A row that cannot be used is an :class:`InvalidExample`."""
    requested = {"text": columns.text, "label": columns.label}
    if columns.pair is not None:
        requested["pair"] = columns.pair
    for table in tables.open_tables(dataset, split):
        for row in table.read(requested, columns.header):
            yield row if isinstance(row, InvalidExample) else _make_example(row, regression)


def unescape_treebank(text: str) -> str:
    """Replace the escapes of the Penn Treebank by the original characters.

    >>> unescape_treebank("-lrb- a -rrb- lovely film")
    '( a ) lovely film'
    """
    for escape, sign in TREEBANK_ESCAPES.items():
        text = text.replace(escape, sign).replace(escape.lower(), sign)
    return text


def _make_example(row: TableRow, regression: bool) -> ClassificationExample | InvalidExample:
    location, label = row.location, row.values["label"]
    has_pair = "pair" in row.values
    text = clean_text(row.values["text"], "first text" if has_pair else "text", location)
    pair = clean_text(row.values["pair"], "second text", location) if has_pair else None
    parsed_label = _parse_number(label, location) if regression else _parse_class(label, location)
    if isinstance(text, InvalidExample):
        return text
    if isinstance(pair, InvalidExample):
        return pair
    if isinstance(parsed_label, InvalidExample):
        return parsed_label
    return ClassificationExample(text, pair, parsed_label, location)


def _parse_class(label: object, location: str) -> str | InvalidExample:
    """A label as text. JSON and Parquet may contain numbers or booleans; 1 and 1.0 are the same label."""
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
