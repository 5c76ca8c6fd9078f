"""Readers of parallel text, one for each format. They hold only the current row in memory.

A reader yields a :class:`TranslationExample` for every sentence pair, and an :class:`InvalidExample` in place
of one that cannot be used. The caller decides whether to stop or to skip and count these (see
``parallel_corpus.py``).

The two *sides* of a pair are given by name or number: columns of a table (a name in its header, or a number
from 1), keys of a JSON object, or languages of a translation.
"""

from __future__ import annotations

import csv
import difflib
import functools
import itertools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jumok.data.readers.header_detection import NUM_SAMPLED_LINES, differs_from_rows, look_like_column_names
from jumok.data.readers.text_files import import_optional, open_decompressed, read_lines
from jumok.errors import InputError

Sides = tuple[str | int, str | int]
# Common names of the two columns, for a table without the requested names.
USUAL_COLUMNS = (("source", "target"), ("src", "tgt"))
BLANK_LINE = "an empty line"  # ignored in tables
ROWS_PER_BATCH = 1024  # rows of a Parquet file that are read together
EXHAUSTED = object()


@dataclass(frozen=True, slots=True)
class TranslationExample:
    """A sentence, its translation, and their location, ``file:line``."""

    source: str
    target: str
    location: str


@dataclass(frozen=True, slots=True)
class InvalidExample:
    """Why there is no example at this location: a reason, by which examples are counted, and details."""

    location: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


ExampleOrInvalid = TranslationExample | InvalidExample


def make_example(source: object, target: object, location: str) -> ExampleOrInvalid:
    """An example of two texts, stripped of surrounding white space, if both are valid."""
    source_text, target_text = clean_text(source, "source", location), clean_text(target, "target", location)
    if isinstance(source_text, InvalidExample):
        return source_text
    return (
        target_text
        if isinstance(target_text, InvalidExample)
        else TranslationExample(source_text, target_text, location)
    )


def clean_text(text: object, description: str, location: str) -> str | InvalidExample:
    """A text, stripped of surrounding white space, if it is valid.

    ``description`` names it in error messages.
    """
    if text is None:
        return InvalidExample(location, f"an empty {description}")
    if not isinstance(text, str):
        return InvalidExample(location, f"a {description} that is no text", f"it is {text!r}"[:80])
    text = text.strip()
    if not text:
        return InvalidExample(location, f"an empty {description}")
    if "\0" in text:
        return InvalidExample(
            location, "a NUL character", f"after {text.partition(chr(0))[0][-20:]!r} in the {description}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # invalid UTF-8 was decoded to lone surrogates
        byte = ord(text[error.start]) - 0xDC00
        problem = f"the byte 0x{byte:02x}" if 0x80 <= byte <= 0xFF else "half a surrogate pair"
        return InvalidExample(
            location, "invalid UTF-8", f"{problem} after {text[: error.start][-20:]!r} in the {description}"
        )
    return text


# ------------------------------------------------------------------------------------------------- tables


def read_parallel_table(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Read the examples of one file. Its suffix determines the format."""
    return TABLE_READERS[file_suffix(path)](path, sides)


def file_suffix(path: Path) -> str:
    """The suffix of a file in lower case, ignoring ``.gz``."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


CellRow = list[str] | InvalidExample
CellRows = Iterator[tuple[int, CellRow]]


def read_tsv(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Read tab-separated columns. Quotes have no special meaning."""
    return _read_columns(path, sides, functools.partial(iter_separated_rows, separator="\t"))


def read_bar_separated(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Read ``source ||| target``, the input format of word aligners. Columns are given by number only."""
    return _read_columns(path, sides, functools.partial(iter_separated_rows, separator="|||"))


def read_csv(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Read comma-separated values. A quoted cell may contain commas, line breaks and doubled quotes."""
    return _read_columns(path, sides, iter_csv_rows)


def iter_separated_rows(path: Path, separator: str) -> CellRows:
    """The cells of each line, with its line number."""
    for number, line in enumerate(read_lines(path), 1):
        yield number, line_too_long(path, number) if line is None else line.split(separator)


def iter_csv_rows(path: Path) -> CellRows:
    """The cells of each row of a CSV file, with the number of its first line."""
    # A line that is too long is also too long for a cell, so the csv module reports it.
    too_long = "x" * (csv.field_size_limit() + 1)
    reader = csv.reader(((too_long if line is None else line) + "\n" for line in read_lines(path)), strict=True)
    while True:
        line_number = reader.line_num + 1  # where the row begins: it may span several lines
        try:
            yield line_number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            detail = f"{error}, in lines {line_number} to {reader.line_num}; is a quote not closed?"
            yield line_number, InvalidExample(f"{path}:{line_number}", "not CSV", detail)


def _read_columns(path: Path, sides: Sides, read_rows: Callable[[Path], CellRows]) -> Iterator[ExampleOrInvalid]:
    """The examples of rows of cells with line numbers."""
    columns: tuple[int, int] | None = None
    width = 0
    for line_number, cells in read_rows(path):
        location = f"{path}:{line_number}"
        if isinstance(cells, InvalidExample):
            yield cells
        elif not any(cells) and len(cells) < 2:
            yield InvalidExample(location, BLANK_LINE)
        elif columns is None:
            columns, has_header = _find_columns(path, sides, [cell.strip() for cell in cells])
            width = len(cells)
            if not has_header:
                if file_suffix(path) in TABLE_READERS:  # a file with bars has no header
                    rows = (_select_cells(row, columns) for _, row in read_rows(path))
                    _check_no_header(path, sides, _select_cells(cells, columns), rows)
                yield make_example(cells[columns[0]], cells[columns[1]], location)
        elif len(cells) != width:
            yield InvalidExample(location, "another number of columns", f"{len(cells)}, and the first line has {width}")
        else:
            yield make_example(cells[columns[0]], cells[columns[1]], location)


def _find_columns(path: Path, sides: Sides, names: list[str]) -> tuple[tuple[int, int], bool]:
    """The columns of the two sides, and whether the first line is a header."""
    requested = [side for side in sides if isinstance(side, str)]
    for side in sides:
        if isinstance(side, int) and not 1 <= side <= len(names):
            raise InputError(f"{path} has {len(names)} columns; there is no column {side}")
    if not requested:  # by number: only a header with common names is recognized
        source_column, target_column = (int(side) - 1 for side in sides)
        return (source_column, target_column), any(
            {names[source_column], names[target_column]} == set(usual) for usual in USUAL_COLUMNS
        )
    if all(name in names for name in requested):
        source_column, target_column = (side - 1 if isinstance(side, int) else names.index(side) for side in sides)
        return (source_column, target_column), True
    if len(requested) == 2:
        for source, target in USUAL_COLUMNS:
            if source in names and target in names:
                return (names.index(source), names.index(target)), True
        if len(names) == 2 and not any(name in names for name in requested):
            return (0, 1), False
    missing = next(name for name in requested if name not in names)
    shown = ", ".join(repr(name[:30]) for name in rank_by_similarity(missing, names)[:8])
    raise InputError(
        f"{path} has no column {missing!r}; its first line has {len(names)}: {shown}. "
        "Name two columns of its header as source and target, or give their numbers, starting at 1"
    )


def _select_cells(row: CellRow, columns: Sequence[int]) -> list[str]:
    return (
        []
        if isinstance(row, InvalidExample) or len(row) <= max(columns)
        else [row[column].strip() for column in columns]
    )


def _check_no_header(path: Path, sides: Sides, cells: list[str], rows: Iterator[list[str]]) -> None:
    """Warn if the first line is used as a pair but looks like a header; raise if other names were requested.

    Names may be requested for a table without a header, because they are also the names of languages.
    """
    requested = [side for side in sides if isinstance(side, str)]
    first, second = cells
    is_header = look_like_column_names(cells, requested)
    if is_header and requested:
        raise InputError(
            f"{path} has no columns {' and '.join(map(repr, requested))}; its first line is {first!r}, "
            f"{second!r}. If that is a header, name its columns: data.source={first} data.target={second}. "
            "If it is a pair, put a header above it, or give the numbers of the columns, starting at 1"
        )
    if is_header or differs_from_rows(cells, filter(None, itertools.islice(rows, NUM_SAMPLED_LINES))):
        warnings.warn(
            f"{path}: the first line, {first!r} and {second!r}, is used as a pair; name the columns "
            f"(data.source={first} data.target={second}) if it is a header",
            stacklevel=2,
        )


def read_jsonl(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Read one JSON object per line, with the sides at its top level or under ``translation``."""
    return _read_mappings(iter_json_rows(path), sides)


def _read_mappings(rows: Iterator[tuple[str, object]], sides: Sides) -> Iterator[ExampleOrInvalid]:
    """The examples of mappings. Keys have no numbers: without names, only the common ones are accepted."""
    first = True
    for location, row in rows:
        if first and isinstance(row, Mapping):
            first = False
            _check_keys(row, sides, location)
        yield row if isinstance(row, InvalidExample) else _example_from_mapping(row, sides, location)


def _check_keys(row: Mapping[str, object], sides: Sides, location: str) -> None:
    """Raise if the sides are given by number and the row does not have the common names."""
    if all(isinstance(side, str) for side in sides) or _get_both_sides(row, sides) is not None:
        return
    names = list(map(str, _candidate_mappings(row)[-1]))
    source, target = names if len(names) == 2 else ("…", "…")
    raise InputError(
        f"{location}: which keys hold the two sides? The keys are: {', '.join(names[:8]) or 'none'}. "
        f"Name the keys: data.source={source} data.target={target}"
    )


def iter_json_rows(path: Path) -> Iterator[tuple[str, object]]:
    """The location of each line, and its value or an :class:`InvalidExample`."""
    for line_number, line in enumerate(read_lines(path), 1):
        location = f"{path}:{line_number}"
        if line is None:
            yield location, line_too_long(path, line_number)
        elif not line.strip():
            yield location, InvalidExample(location, BLANK_LINE)
        else:
            try:
                yield location, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield location, InvalidExample(location, "not JSON", str(error))


def _example_from_mapping(row: object, sides: Sides, location: str) -> ExampleOrInvalid:
    """The example in a mapping, with the sides at its top level or under ``translation``."""
    if not isinstance(row, Mapping):
        return InvalidExample(location, "no JSON object", f"it is {row!r}"[:80])
    if texts := _get_both_sides(row, sides):
        return make_example(*texts, location)
    names = [str(name) for mapping in _candidate_mappings(row) for name in mapping]
    requested = sides if all(isinstance(side, str) for side in sides) else USUAL_COLUMNS[0]
    missing = next((side for side in requested if side not in names), requested[0])
    return InvalidExample(
        location, f"no {missing!r}", f"it has: {', '.join(rank_by_similarity(str(missing), names)[:8])}"
    )


def _get_both_sides(row: Mapping[str, object], sides: Sides) -> tuple[object, object] | None:
    """The values of the two sides, if a mapping has both."""
    for source, target in (sides, *USUAL_COLUMNS):
        for mapping in _candidate_mappings(row):
            if source in mapping and target in mapping:
                return mapping[source], mapping[target]
    return None


def _candidate_mappings(row: Mapping[str, object]) -> list[Mapping[Any, object]]:
    """The mappings that may contain the sides."""
    nested = row.get("translation")
    return [row, nested] if isinstance(nested, Mapping) else [row]


def read_parquet(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Read columns of a Parquet file, or fields of its column ``translation``, one row group at a time."""
    rows = iter_parquet_rows(path, lambda schema: [_find_parquet_column(path, sides, side, schema) for side in (0, 1)])
    for location, (source, target) in rows:
        yield make_example(source, target, location)


def iter_parquet_rows(
    path: Path, choose_columns: Callable[[Any], Sequence[tuple[str, ...]]]
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The location of each row, and its values in the columns that ``choose_columns`` selects.

    A column is given by its path, (name,) or (name, field).
    """
    arrow, reader = import_optional("pyarrow", "hub"), import_optional("pyarrow.parquet", "hub")
    with tempfile.TemporaryFile() as unzipped, open_decompressed(path) as file:
        source: Any = path
        if path.suffix == ".gz":  # Parquet needs random access
            shutil.copyfileobj(file, unzipped)
            source = unzipped
        try:
            with reader.ParquetFile(source) as parquet_file:
                column_paths = choose_columns(parquet_file.schema_arrow)
                columns = [".".join(column_path) for column_path in column_paths]
                num_rows = 0
                for batch in parquet_file.iter_batches(ROWS_PER_BATCH, columns=columns):
                    values = [_column_values(arrow, batch, column_path) for column_path in column_paths]
                    for row_number, row in enumerate(zip(*values, strict=True), num_rows + 1):
                        yield f"{path}:{row_number}", row
                    num_rows += batch.num_rows
        except (arrow.ArrowException, OSError) as error:
            raise InputError(f"{path} cannot be read as Parquet: {error}") from None


def _find_parquet_column(path: Path, sides: Sides, side_index: int, schema: Any) -> tuple[str, ...]:
    """The path of the column of one side: (name,) or ("translation", name)."""
    side = sides[side_index]
    if isinstance(side, int):
        if not 1 <= side <= len(schema.names):
            raise InputError(f"{path} has {len(schema.names)} columns; there is no column {side}")
        return (schema.names[side - 1],)
    nested = []
    if "translation" in schema.names:
        nested = [field.name for field in schema.field("translation").type]
    for name in (side, *(pair[side_index] for pair in USUAL_COLUMNS)):
        if name in schema.names:
            return (name,)
        if name in nested:
            return ("translation", name)
    shown = ", ".join(rank_by_similarity(side, [*schema.names, *nested])[:8])
    raise InputError(f"{path} has no column {side!r}; it has: {shown}")


def _column_values(arrow: Any, batch: Any, column_path: tuple[str, ...]) -> Iterator[object]:
    """The Python values of a column. Invalid UTF-8 becomes lone surrogates, as when reading a text file."""
    column = batch.column(column_path[0])
    if len(column_path) == 2:
        column = column.field(column_path[1])
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
        column = column.cast(arrow.large_binary())
    for value in column.to_pylist():
        yield value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


TABLE_READERS = {".tsv": read_tsv, ".csv": read_csv, ".jsonl": read_jsonl, ".parquet": read_parquet}


# --------------------------------------------------------------------------- parallel files, Hugging Face hub


def read_parallel_files(source: Path, target: Path) -> Iterator[ExampleOrInvalid]:
    """Read two text files: line n of one is the translation of line n of the other."""
    source_lines, target_lines = read_lines(source), read_lines(target)
    for line_number, (source_line, target_line) in enumerate(
        itertools.zip_longest(source_lines, target_lines, fillvalue=EXHAUSTED), 1
    ):
        if source_line is EXHAUSTED or target_line is EXHAUSTED:
            total = line_number + sum(1 for _ in (target_lines if source_line is EXHAUSTED else source_lines))
            counts = (line_number - 1, total) if source_line is EXHAUSTED else (total, line_number - 1)
            raise InputError(
                f"{source} has {counts[0]} lines and {target} has {counts[1]}; line n of one must be the "
                "translation of line n of the other, and an extra line shifts all lines after it"
            )
        is_long = source_line is None or target_line is None
        yield (
            line_too_long(source, line_number)
            if is_long
            else make_example(source_line, target_line, f"{source}:{line_number}")
        )


def read_hub_dataset(name: str, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Stream a data set of the Hugging Face hub: ``NAME[@REVISION][:CONFIGURATION[:SPLIT]]``."""
    return _read_mappings(iter_hub_rows(name), sides)


def resolve_hub_name(dataset: str, split: str | None) -> str:
    """The part of ``hub:NAME`` after the colon, with ``split`` if it has none."""
    name = dataset.removeprefix("hub:")
    if split and name.count(":") < 2:
        name = f"{name}{':' * (2 - name.count(':'))}{split}"
    return name


def iter_hub_rows(name: str) -> Iterator[tuple[str, object]]:
    """The location of each row of a data set of the hub, and its value."""
    datasets = import_optional("datasets", "hub")
    repository, _, rest = name.partition(":")
    configuration, _, split = rest.partition(":")
    repository, _, revision = repository.partition("@")
    try:
        rows = datasets.load_dataset(
            repository,
            configuration or None,
            split=split or "train",
            revision=revision or None,
            streaming=True,
        )
        for row_number, row in enumerate(rows, 1):
            yield f"hub:{name}:{row_number}", row
    except Exception as error:  # the network, the hub and the data set raise many types, from four packages
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"hub:{name} cannot be read: {lines[0]}") from error


def line_too_long(path: Path | str, line_number: int) -> InvalidExample:
    """The result for a line that is too long to be text."""
    return InvalidExample(f"{path}:{line_number}", "a line of more than 16 MiB")


def rank_by_similarity(name: str, names: Sequence[str]) -> list[str]:
    """Sort names by their similarity to ``name``, the most similar first."""
    return sorted(names, key=lambda candidate: -difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio())
