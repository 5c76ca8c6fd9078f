"""Chosen columns of a table, row by row: .tsv, .csv, .jsonl or .parquet, each of them also .gz, or the hub.

A column is told by its name in the header (in JSON, the key), or by its number, counted from 1. Several of
them stand for those that the table has, joined into one text::

    sentence              the column of that name
    2                     the second one
    [sentence, content]   whichever of the two is there: splits of one data set may call it differently
    [title, body]         both, as "title . body"

Where all columns are numbers, the first line is a row like any other unless one says that it is a header.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jumok.data.readers import formats as readers_formats
from jumok.data.readers import parallel_corpus
from jumok.data.readers.formats import BLANK_LINE, CellRow, InvalidExample, rank_by_similarity
from jumok.errors import InputError

__all__ = [
    "SPLIT_ALIASES",
    "ColumnSpec",
    "TableRecord",
    "normalize_split_name",
    "read_column_names",
    "read_table",
    "read_tables",
]

ColumnSpec = str | int | Sequence[str | int]
TEXT_SEPARATOR = " . "
SPLIT_ALIASES = {"train": ("train", "restval", "training"), "val": ("val", "dev", "valid", "validation")}


@dataclass(frozen=True, slots=True)
class TableRecord:
    """The values of the columns asked for, and where they are: ``file:line``."""

    values: tuple[object, ...]
    location: str


RecordIterator = Iterator[TableRecord | InvalidExample]


def read_tables(
    dataset: str | Sequence[str],
    columns: Sequence[ColumnSpec],
    *,
    split: str | None = None,
    header: bool | None = None,
) -> RecordIterator:
    """The records of the tables that a recipe means; how they are named is told in ``parallel_corpus.py``."""
    for name in [dataset] if isinstance(dataset, str) else dataset:
        if name.startswith("hub:"):
            known = name.removeprefix("hub:")
            if split and known.count(":") < 2:
                known = f"{known}{':' * (2 - known.count(':'))}{split}"
            yield from (
                _record_from_mapping(row, columns, at) for at, row in readers_formats.iter_hub_rows(known)
            )
            continue
        for path in parallel_corpus.find_files(name, tuple(readers_formats.TABLE_READERS), split):
            yield from read_table(path, columns, header)


def read_table(path: Path, columns: Sequence[ColumnSpec], header: bool | None = None) -> RecordIterator:
    """The records of one file; its name tells the format."""
    ending = readers_formats.file_suffix(path)
    if ending == ".tsv":
        return _read_cells(path, columns, readers_formats.iter_separated_rows(path, "\t"), header)
    if ending == ".csv":
        return _read_cells(path, columns, readers_formats.iter_csv_rows(path), header)
    if ending == ".jsonl":
        return (
            row if isinstance(row, InvalidExample) else _record_from_mapping(row, columns, where)
            for where, row in readers_formats.iter_json_rows(path)
        )
    if ending == ".parquet":
        return _read_parquet_columns(path, columns)
    raise InputError(
        f"{path} is no table that can be read; its ending is to be {', '.join(readers_formats.TABLE_READERS)}"
    )


def read_column_names(path: Path) -> Sequence[str]:
    """What the columns of a table are called, as its first row says."""
    ending = readers_formats.file_suffix(path)
    if ending == ".parquet":
        found: list[str] = []

        def first(schema: Any) -> list[tuple[str, ...]]:
            found.extend(schema.names)
            return [(schema.names[0],)]

        next(readers_formats.iter_parquet_rows(path, first), None)
        return found
    if ending == ".jsonl":
        row = next((row for _, row in readers_formats.iter_json_rows(path) if isinstance(row, Mapping)), {})
        return list(row)
    rows = (
        readers_formats.iter_separated_rows(path, "\t")
        if ending == ".tsv"
        else readers_formats.iter_csv_rows(path)
    )
    cells = next((cells for _, cells in rows if not isinstance(cells, InvalidExample) and any(cells)), [])
    return [cell.strip() for cell in cells]


def normalize_split_name(name: str) -> str:
    """One name for the same split.

    >>> normalize_split_name("dev"), normalize_split_name("Training"), normalize_split_name("test")
    ('val', 'train', 'test')
    """
    name = name.strip().lower()
    return next((split for split, names in SPLIT_ALIASES.items() if name in names), name)


def _read_cells(
    path: Path, columns: Sequence[ColumnSpec], rows: Iterator[tuple[int, CellRow]], header: bool | None
) -> RecordIterator:
    """Of rows of cells, each with the number of its line."""
    places: list[list[int]] | None = None
    width = 0
    for number, cells in rows:
        where = f"{path}:{number}"
        if isinstance(cells, InvalidExample):
            yield cells
        elif not any(cells) and len(cells) < 2:
            yield InvalidExample(where, BLANK_LINE)
        elif places is None:
            width = len(cells)
            names = [cell.strip() for cell in cells]
            by_name = any(isinstance(name, str) for column in columns for name in _as_sequence(column))
            if by_name and header is False:
                raise InputError(f"{path}: without a header, columns are told by number; {columns} came")
            places = [_find_column(path, column, names) for column in columns]
            if not (by_name or header):
                yield _make_record(cells, places, where)
        elif len(cells) != width:
            yield InvalidExample(
                where, "another number of columns", f"{len(cells)}, and the first line has {width}"
            )
        else:
            yield _make_record(cells, places, where)


def _make_record(cells: Sequence[object], columns: Sequence[Sequence[int]], location: str) -> TableRecord:
    return TableRecord(tuple(_join_values([cells[place] for place in some]) for some in columns), location)


def _join_values(values: Sequence[object]) -> object:
    """One value as it is, and several as one text; what is no text is left for the reader to find."""
    if len(values) == 1:
        return values[0]
    texts = [value.strip() for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        return next(value for value in values if not isinstance(value, str))
    return TEXT_SEPARATOR.join(text for text in texts if text)


def _as_sequence(column: ColumnSpec) -> Sequence[str | int]:
    return [column] if isinstance(column, str | int) else column


def _find_column(path: Path, column: ColumnSpec, names: Sequence[str]) -> list[int]:
    """Where a column, or those of its columns that are there, stand among these names."""
    found = []
    for one in _as_sequence(column):
        if isinstance(one, int):
            found += [one - 1] if 1 <= one <= len(names) else []
        else:
            found += [names.index(one)] if one in names else []
    if found:
        return found
    asked = " or ".join(repr(one) for one in _as_sequence(column))
    shown = ", ".join(repr(name[:30]) for name in rank_by_similarity(str(_as_sequence(column)[0]), names)[:8])
    raise InputError(
        f"{path} has no column {asked}; its first line has {len(names)}: {shown}. "
        "Name one of these in the recipe's data section, or give its number, counted from 1"
    )


def _record_from_mapping(
    row: object, columns: Sequence[ColumnSpec], location: str
) -> TableRecord | InvalidExample:
    """Of a JSON object, or a row of the hub."""
    if not isinstance(row, Mapping):
        return InvalidExample(location, "no JSON object", f"it is {row!r}"[:80])
    values = []
    for column in columns:
        names = [one for one in _as_sequence(column) if one in row]
        if not names:
            asked = " or ".join(repr(one) for one in _as_sequence(column))
            there = ", ".join(
                rank_by_similarity(str(_as_sequence(column)[0]), [str(name) for name in row])[:8]
            )
            return InvalidExample(location, f"no {asked}", f"there is: {there}")
        values.append(_join_values([row[name] for name in names]))
    return TableRecord(tuple(values), location)


def _read_parquet_columns(path: Path, columns: Sequence[ColumnSpec]) -> RecordIterator:
    wanted: list[int] = []  # how many columns of the file make each one of ours

    def choose(schema: Any) -> list[tuple[str, ...]]:
        places = [_find_column(path, column, schema.names) for column in columns]
        wanted.extend(map(len, places))
        return [(schema.names[place],) for some in places for place in some]

    for where, row in readers_formats.iter_parquet_rows(path, choose):
        values = iter(row)
        yield TableRecord(
            tuple(_join_values([next(values) for _ in range(count)]) for count in wanted), where
        )
