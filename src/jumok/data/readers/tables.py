"""Selected columns of tables, row by row: .tsv, .csv, .jsonl or .parquet, optionally with .gz, or the hub.

A column is given by its name in the header (in JSON, the key) or by its number, starting at 1. A list of
columns
means all of them that the table has, joined into one text::

    sentence              the column of that name
    2                     the second column
    [sentence, content]   whichever of the two exists: splits of one data set may use different names
    [title, body]         both, as "title . body"

If all columns are numbers, the first line is a row unless ``header`` is set.
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

ColumnSpec = str | int | Sequence[str | int]
TEXT_SEPARATOR = " . "
SPLIT_ALIASES = {"train": ("train", "restval", "training"), "val": ("val", "dev", "valid", "validation")}


@dataclass(frozen=True, slots=True)
class TableRecord:
    """The values of the requested columns, and their location, ``file:line``."""

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
    """Read the tables that a recipe names; for the names see ``parallel_corpus.py``."""
    for name in [dataset] if isinstance(dataset, str) else dataset:
        if name.startswith("hub:"):
            hub_name = readers_formats.resolve_hub_name(name, split)
            for location, row in readers_formats.iter_hub_rows(hub_name):
                yield _record_from_mapping(row, columns, location)
            continue
        for path in parallel_corpus.find_files(name, tuple(readers_formats.TABLE_READERS), split):
            yield from read_table(path, columns, header)


def read_table(path: Path, columns: Sequence[ColumnSpec], header: bool | None = None) -> RecordIterator:
    """Read one file. Its suffix determines the format."""
    suffix = readers_formats.file_suffix(path)
    if suffix == ".tsv":
        return _read_cells(path, columns, readers_formats.iter_separated_rows(path, "\t"), header)
    if suffix == ".csv":
        return _read_cells(path, columns, readers_formats.iter_csv_rows(path), header)
    if suffix == ".jsonl":
        return (
            row if isinstance(row, InvalidExample) else _record_from_mapping(row, columns, location)
            for location, row in readers_formats.iter_json_rows(path)
        )
    if suffix == ".parquet":
        return _read_parquet_columns(path, columns)
    raise InputError(f"{path} is not a table; expected a file ending in {', '.join(readers_formats.TABLE_READERS)}")


def read_column_names(path: Path) -> Sequence[str]:
    """The names of the columns of a table, from its first row."""
    suffix = readers_formats.file_suffix(path)
    if suffix == ".parquet":
        names: list[str] = []

        def choose_first(schema: Any) -> list[tuple[str, ...]]:
            names.extend(schema.names)
            return [(schema.names[0],)]

        next(readers_formats.iter_parquet_rows(path, choose_first), None)
        return names
    if suffix == ".jsonl":
        row = next((row for _, row in readers_formats.iter_json_rows(path) if isinstance(row, Mapping)), {})
        return list(row)
    rows = readers_formats.iter_separated_rows(path, "\t") if suffix == ".tsv" else readers_formats.iter_csv_rows(path)
    cells = next((cells for _, cells in rows if not isinstance(cells, InvalidExample) and any(cells)), [])
    return [cell.strip() for cell in cells]


def normalize_split_name(name: str) -> str:
    """Map the different names of a split to one.

    >>> normalize_split_name("dev"), normalize_split_name("Training"), normalize_split_name("test")
    ('val', 'train', 'test')
    """
    name = name.strip().lower()
    return next((split for split, names in SPLIT_ALIASES.items() if name in names), name)


def _read_cells(
    path: Path, columns: Sequence[ColumnSpec], rows: Iterator[tuple[int, CellRow]], header: bool | None
) -> RecordIterator:
    """The records of rows of cells with line numbers."""
    indices: list[list[int]] | None = None
    width = 0
    for line_number, cells in rows:
        location = f"{path}:{line_number}"
        if isinstance(cells, InvalidExample):
            yield cells
        elif not any(cells) and len(cells) < 2:
            yield InvalidExample(location, BLANK_LINE)
        elif indices is None:
            width = len(cells)
            names = [cell.strip() for cell in cells]
            by_name = any(isinstance(name, str) for column in columns for name in _as_sequence(column))
            if by_name and header is False:
                raise InputError(f"{path} has no header, so columns need numbers; they are {columns}")
            indices = [_find_column(path, column, names) for column in columns]
            if not (by_name or header):
                yield _make_record(cells, indices, location)
        elif len(cells) != width:
            yield InvalidExample(location, "another number of columns", f"{len(cells)}, and the first line has {width}")
        else:
            yield _make_record(cells, indices, location)


def _make_record(cells: Sequence[object], columns: Sequence[Sequence[int]], location: str) -> TableRecord:
    return TableRecord(
        tuple(_join_values([cells[index] for index in column_indices]) for column_indices in columns),
        location,
    )


def _join_values(values: Sequence[object]) -> object:
    """A single value as it is; several joined into one text. A value that is no text is returned as it is."""
    if len(values) == 1:
        return values[0]
    texts = [value.strip() for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        return next(value for value in values if not isinstance(value, str))
    return TEXT_SEPARATOR.join(text for text in texts if text)


def _as_sequence(column: ColumnSpec) -> Sequence[str | int]:
    return [column] if isinstance(column, str | int) else column


def _find_column(path: Path, column: ColumnSpec, names: Sequence[str]) -> list[int]:
    """The indices of a column, or of those of its columns that exist, among these names."""
    indices = []
    for name in _as_sequence(column):
        if isinstance(name, int):
            indices += [name - 1] if 1 <= name <= len(names) else []
        else:
            indices += [names.index(name)] if name in names else []
    if indices:
        return indices
    requested = " or ".join(repr(name) for name in _as_sequence(column))
    shown = ", ".join(repr(name[:30]) for name in rank_by_similarity(str(_as_sequence(column)[0]), names)[:8])
    raise InputError(
        f"{path} has no column {requested}; its first line has {len(names)}: {shown}. "
        "Name one of these in the data section of the recipe, or give its number, starting at 1"
    )


def _record_from_mapping(row: object, columns: Sequence[ColumnSpec], location: str) -> TableRecord | InvalidExample:
    """The record of a JSON object, or of a row of the hub."""
    if not isinstance(row, Mapping):
        return InvalidExample(location, "no JSON object", f"it is {row!r}"[:80])
    values = []
    for column in columns:
        names = [name for name in _as_sequence(column) if name in row]
        if not names:
            requested = " or ".join(repr(name) for name in _as_sequence(column))
            similar = ", ".join(rank_by_similarity(str(_as_sequence(column)[0]), [str(name) for name in row])[:8])
            return InvalidExample(location, f"no {requested}", f"it has: {similar}")
        values.append(_join_values([row[name] for name in names]))
    return TableRecord(tuple(values), location)


def _read_parquet_columns(path: Path, columns: Sequence[ColumnSpec]) -> RecordIterator:
    counts: list[int] = []  # number of columns of the file for each of ``columns``

    def choose(schema: Any) -> list[tuple[str, ...]]:
        indices = [_find_column(path, column, schema.names) for column in columns]
        counts.extend(map(len, indices))
        return [(schema.names[index],) for column_indices in indices for index in column_indices]

    for location, row in readers_formats.iter_parquet_rows(path, choose):
        values = iter(row)
        yield TableRecord(tuple(_join_values([next(values) for _ in range(count)]) for count in counts), location)
