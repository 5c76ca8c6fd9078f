"""Tables: .tsv, .csv, .jsonl or .parquet, optionally with .gz, or a data set of the Hugging Face hub.

A table is read row by row. Only the requested columns of the current row are held in memory::

    for row in open_table(Path("train.tsv")).read({"text": "sentence", "label": 2}):
        row.values["text"], row.values["label"], row.location

A column is given by its name in the header (in JSON, the key) or by its number, starting at 1. A list of columns
means all of them that the table has, joined into one text::

    sentence              the column of that name
    2                     the second column
    [sentence, content]   whichever of the two exists: splits of one data set may use different names
    [title, body]         both, as "title . body"

If all columns are numbers, the first line is a row unless ``header`` is set. The fields of a nested column
``translation`` are columns of their own.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jumok.data.readers.dataset_files import as_names, find_files, rank_by_similarity
from jumok.data.readers.invalid_examples import BLANK_LINE, InvalidExample, line_too_long
from jumok.data.readers.text_files import file_suffix, import_optional, open_decompressed, read_lines
from jumok.errors import InputError

TABLE_SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
TEXT_SEPARATOR = " . "  # between joined columns
NESTED_COLUMN = "translation"
ROWS_PER_BATCH = 1024  # rows of a Parquet file that are read together
SPLIT_ALIASES = {"train": ("train", "restval", "training"), "val": ("val", "dev", "valid", "validation")}

ColumnSpec: TypeAlias = str | int | Sequence[str | int]
ColumnSpecs: TypeAlias = Mapping[str, ColumnSpec]  # the columns of each value that is read, by its name
CellRows: TypeAlias = Iterator[tuple[str, list[str] | InvalidExample]]  # the location and the cells of each row
JsonRows: TypeAlias = Iterator[tuple[str, Mapping[str, object] | InvalidExample]]


@dataclass(frozen=True, slots=True)
class TableRow:
    """The requested values of a row, by name, and its location, ``file:line``."""

    values: Mapping[str, object]
    location: str


RowIterator: TypeAlias = Iterator[TableRow | InvalidExample]


def open_tables(dataset: str | Sequence[str], split: str | None = None) -> Iterator[Table]:
    """The tables that a recipe names: files (see ``dataset_files.py``), or data sets of the hub."""
    for name in as_names(dataset):
        if name.startswith("hub:"):
            yield open_hub_table(resolve_hub_name(name, split))
        else:
            yield from map(open_table, find_files(name, TABLE_SUFFIXES, split))


def open_table(path: Path) -> Table:
    """Open one file. Its suffix determines the format."""
    suffix = file_suffix(path)
    if suffix == ".tsv":
        return DelimitedTable(path, iter_delimited_rows(path, "\t"))
    if suffix == ".csv":
        return DelimitedTable(path, iter_csv_rows(path))
    if suffix == ".jsonl":
        return JsonTable(path, _iter_json_rows(path))
    if suffix == ".parquet":
        return ParquetTable(path)
    raise InputError(f"{path} is not a table; expected a file ending in {', '.join(TABLE_SUFFIXES)}")


class Table(ABC):
    """Rows with named or numbered columns. A table can be read once."""

    names_phrase = "its first line has"  # before the column names, in messages

    def __init__(self, name: Path | str) -> None:
        self.name = str(name)  # for messages

    @property
    @abstractmethod
    def column_names(self) -> list[str]:
        """The names of the columns: the cells of the first line, or the keys of the first row of JSON."""

    @abstractmethod
    def read(self, columns: ColumnSpecs, header: bool | None = None) -> RowIterator:
        """Read the rows. ``header``: whether the first line is a header; None: if columns are given by name."""

    def has_column(self, column: ColumnSpec) -> bool:
        """Whether the table has a column of this name, or one of these. A number is not checked."""
        return any(isinstance(name, int) or name in self.column_names for name in _as_sequence(column))

    def _find_column(self, column: ColumnSpec, names: Sequence[str]) -> list[int]:
        """The indices of a column, or of those of its columns that exist, among these names."""
        numbers = [
            name if isinstance(name, int) else names.index(name) + 1 if name in names else 0
            for name in _as_sequence(column)
        ]
        indices = [number - 1 for number in numbers if 1 <= number <= len(names)]
        if not indices:
            raise InputError(
                f"{self.name} has no column {_format_column(column)}; {self.names_phrase} {len(names)}: "
                f"{_format_similar(column, [repr(name[:30]) for name in names])}. Name one of these in the data "
                "section of the recipe, or give its number, starting at 1"
            )
        return indices


class DelimitedTable(Table):
    """TSV, CSV and similar formats, from rows of cells."""

    def __init__(self, name: Path | str, rows: CellRows) -> None:
        super().__init__(name)
        self._rows = rows

    @functools.cached_property
    def column_names(self) -> list[str]:
        first, self._rows = _peek(self._rows)
        return [cell.strip() for cell in first or []]

    def read(self, columns: ColumnSpecs, header: bool | None = None) -> RowIterator:
        by_name = any(isinstance(name, str) for column in columns.values() for name in _as_sequence(column))
        if by_name and header is False:
            raise InputError(f"{self.name} has no header, so columns need numbers; they are {list(columns.values())}")
        names = self.column_names
        indices = {name: self._find_column(column, names) for name, column in columns.items()} if names else {}
        is_header = by_name or header
        for location, cells in self._rows:
            if isinstance(cells, InvalidExample):
                yield cells
            elif is_header:
                is_header = False
            elif len(cells) != len(names):
                detail = f"{len(cells)}, and the first line has {len(names)}"
                yield InvalidExample(location, "wrong number of columns", detail)
            else:
                yield _select_values(cells, indices, location)


class JsonTable(Table):
    """JSON lines or a data set of the hub, from mappings. Each row has its own keys."""

    def __init__(self, name: Path | str, rows: JsonRows) -> None:
        super().__init__(name)
        self._rows = rows

    @functools.cached_property
    def column_names(self) -> list[str]:
        first, self._rows = _peek(self._rows)
        return list(map(str, _flatten(first or {})))

    def read(self, columns: ColumnSpecs, header: bool | None = None) -> RowIterator:
        for location, row in self._rows:
            if isinstance(row, InvalidExample):
                yield row
                continue
            cells = _flatten(row)
            keys = {name: [key for key in _as_sequence(spec) if key in cells] for name, spec in columns.items()}
            if all(keys.values()):
                yield _select_values(cells, keys, location)
            else:
                missing = next(columns[name] for name in columns if not keys[name])
                similar = _format_similar(missing, list(map(str, cells)))
                yield InvalidExample(location, f"no {_format_column(missing)}", f"it has: {similar}")


class ParquetTable(Table):
    """A Parquet file, read one row group at a time."""

    names_phrase = "it has"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    @functools.cached_property
    def column_names(self) -> list[str]:
        return [path[-1] for path in self._column_paths]

    @functools.cached_property
    def _column_paths(self) -> list[tuple[str, ...]]:
        """The path of each column: (name,), or (translation, name) if it is nested."""
        with self._open() as file:
            schema = file.schema_arrow
        nested = schema.field(NESTED_COLUMN).type if NESTED_COLUMN in schema.names else ()
        names = [field.name for field in nested if field.name not in schema.names]
        return [(name,) for name in schema.names] + [(NESTED_COLUMN, name) for name in names]

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        arrow, reader = import_optional("pyarrow", "hub"), import_optional("pyarrow.parquet", "hub")
        with tempfile.TemporaryFile() as unzipped, open_decompressed(self.path) as file:
            source: Any = self.path
            if self.path.suffix == ".gz":  # Parquet needs random access
                shutil.copyfileobj(file, unzipped)
                source = unzipped
            try:
                with reader.ParquetFile(source) as parquet_file:
                    yield parquet_file
            except (arrow.ArrowException, OSError) as error:
                raise InputError(f"{self.name} cannot be read as Parquet: {error}") from None

    def read(self, columns: ColumnSpecs, header: bool | None = None) -> RowIterator:
        indices = {name: self._find_column(column, self.column_names) for name, column in columns.items()}
        paths = {index: self._column_paths[index] for column_indices in indices.values() for index in column_indices}
        num_rows = 0
        with self._open() as file:
            for batch in file.iter_batches(ROWS_PER_BATCH, columns=list(map(".".join, paths.values()))):
                values = zip(*(_decode_column(batch, path) for path in paths.values()), strict=True)
                for number, row in enumerate(values, num_rows + 1):
                    yield _select_values(dict(zip(paths, row, strict=True)), indices, f"{self.name}:{number}")
                num_rows += batch.num_rows


def normalize_split_name(name: str) -> str:
    """Map the different names of a split to one.

    >>> normalize_split_name("dev"), normalize_split_name("Training"), normalize_split_name("test")
    ('val', 'train', 'test')
    """
    name = name.strip().lower()
    return next((split for split, names in SPLIT_ALIASES.items() if name in names), name)


def select_split(rows: RowIterator, split: str | None, name: str, unit: str) -> RowIterator:
    """The rows of a split, by their column ``split``; all rows if they have none, or if ``split`` is None.

    Raises if the table ``name`` has splits, but none of its ``unit``, such as captions, are in this one.
    """
    splits: set[str] = set()
    is_empty = True
    for row in rows:
        if split is not None and isinstance(row, TableRow) and "split" in row.values:
            row_split = str(row.values["split"] or "")
            splits.add(row_split)
            if normalize_split_name(row_split) != normalize_split_name(split):
                continue
        is_empty = is_empty and isinstance(row, InvalidExample)
        yield row
    if splits and is_empty:
        names = ", ".join(sorted(filter(None, splits))) or "none"
        raise InputError(f"{name} has no {unit} of the split {split!r}; its splits are: {names}")


# ---------------------------------------------------------------------------------------------------- formats


def iter_delimited_rows(path: Path, separator: str) -> CellRows:
    """The location and the cells of each line. Quotes have no special meaning."""
    for number, line in enumerate(read_lines(path), 1):
        location = f"{path}:{number}"
        if line is None:
            yield location, line_too_long(path, number)
        else:
            yield location, line.split(separator) if line else InvalidExample(location, BLANK_LINE)


def iter_csv_rows(path: Path) -> CellRows:
    """The cells of each row of a CSV file, and its location, where the row begins: it may span several lines.

    A quoted cell may contain commas, line breaks and doubled quotes.
    """
    # A line that is too long is also too long for a cell, so the csv module reports it.
    too_long = "x" * (csv.field_size_limit() + 1)
    reader = csv.reader(((too_long if line is None else line) + "\n" for line in read_lines(path)), strict=True)
    while True:
        line_number = reader.line_num + 1
        location = f"{path}:{line_number}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            detail = f"{error}, in lines {line_number} to {reader.line_num}; is a quote not closed?"
            yield location, InvalidExample(location, "not CSV", detail)
        else:
            yield location, cells if cells not in ([], [""]) else InvalidExample(location, BLANK_LINE)


def _iter_json_rows(path: Path) -> JsonRows:
    for number, line in enumerate(read_lines(path), 1):
        location = f"{path}:{number}"
        if line is None:
            yield location, line_too_long(path, number)
        elif not line.strip():
            yield location, InvalidExample(location, BLANK_LINE)
        else:
            try:
                yield location, _check_mapping(json.loads(line), location)
            except (ValueError, RecursionError) as error:
                yield location, InvalidExample(location, "not JSON", str(error))


def resolve_hub_name(dataset: str, split: str | None) -> str:
    """The part of ``hub:NAME`` after the colon, with ``split`` if it has none."""
    name = dataset.removeprefix("hub:")
    return f"{name}{':' * (2 - name.count(':'))}{split}" if split and name.count(":") < 2 else name


def open_hub_table(name: str) -> JsonTable:
    """Stream a data set of the Hugging Face hub: ``NAME[@REVISION][:CONFIGURATION[:SPLIT]]``."""
    return JsonTable(f"hub:{name}", _iter_hub_rows(name))


def _iter_hub_rows(name: str) -> JsonRows:
    datasets = import_optional("datasets", "hub")
    repository, _, rest = name.partition(":")
    configuration, _, split = rest.partition(":")
    repository, _, revision = repository.partition("@")
    try:
        rows = datasets.load_dataset(
            repository, configuration or None, split=split or "train", revision=revision or None, streaming=True
        )
        for number, row in enumerate(rows, 1):
            location = f"hub:{name}:{number}"
            yield location, _check_mapping(row, location)
    except Exception as error:  # the network, the hub and the data set raise many types, from four packages
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"hub:{name} cannot be read: {lines[0]}") from error


def _check_mapping(row: object, location: str) -> Mapping[str, object] | InvalidExample:
    if isinstance(row, Mapping):
        return row
    return InvalidExample(location, "no JSON object", f"it is {row!r}"[:80])


def _flatten(row: Mapping[str, object]) -> Mapping[str, object]:
    """A row with the fields of its nested column as columns of their own."""
    nested = row.get(NESTED_COLUMN)
    return {**nested, **row} if isinstance(nested, Mapping) else row


def _decode_column(batch: Any, path: tuple[str, ...]) -> Iterator[object]:
    """The Python values of a Parquet column. Invalid UTF-8 becomes lone surrogates, as when reading a text file."""
    arrow = import_optional("pyarrow", "hub")
    column = batch.column(path[0])
    if len(path) == 2:
        column = column.field(path[1])
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
        column = column.cast(arrow.large_binary())
    for value in column.to_pylist():
        yield value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


# ---------------------------------------------------------------------------------------------------- columns


def _peek(rows: Iterator[tuple[str, Any]]) -> tuple[Any, Iterator[tuple[str, Any]]]:
    """The first valid row, or None, and an iterator over all rows."""
    start: list[tuple[str, Any]] = []
    for row in rows:
        start.append(row)
        if not isinstance(row[1], InvalidExample):
            return row[1], itertools.chain(start, rows)
    return None, iter(start)


def _select_values(cells: Any, columns: Mapping[str, Sequence[Any]], location: str) -> TableRow:
    values = {name: _join_values([cells[key] for key in keys]) for name, keys in columns.items()}
    return TableRow(values, location)


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


def _format_column(column: ColumnSpec) -> str:
    return " or ".join(map(repr, _as_sequence(column)))


def _format_similar(column: ColumnSpec, names: Sequence[str]) -> str:
    return ", ".join(rank_by_similarity(str(_as_sequence(column)[0]), names)[:8])
