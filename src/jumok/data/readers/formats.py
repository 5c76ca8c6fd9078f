"""Readers of parallel text, one for each format. Each goes through its file once, keeping next to nothing.

A reader yields an :class:`TranslationExample` for every pair of sentences, and a :class:`InvalidExample` in the place of one that
cannot be used. What becomes of flaws (stop, or skip and count) is decided by who reads, in ``sources.py``.

The two *sides* of a pair are told by name or number: columns of a table (a name in its header, or a number,
counted from 1), keys of a JSON object, languages of a translation.
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

__all__ = [
    "BLANK_LINE",
    "TABLE_READERS",
    "InvalidExample",
    "Sides",
    "TranslationExample",
    "clean_text",
    "file_suffix",
    "iter_csv_rows",
    "iter_hub_rows",
    "iter_json_rows",
    "iter_parquet_rows",
    "iter_separated_rows",
    "line_too_long",
    "make_example",
    "rank_by_similarity",
    "read_hub_dataset",
    "read_parallel_files",
    "read_parallel_table",
]

Sides = tuple[str | int, str | int]
# What the two columns are often called, for a table that does not have the names asked for.
USUAL_COLUMNS = (("source", "target"), ("src", "tgt"))
BLANK_LINE = "an empty line"  # of a table, where it means nothing unless lines are counted
ROWS_PER_BATCH = 1024  # of a Parquet file
EXHAUSTED = object()


@dataclass(frozen=True, slots=True)
class TranslationExample:
    """A sentence and its translation, and where they were found: ``file:line``."""

    source: str
    target: str
    location: str


@dataclass(frozen=True, slots=True)
class InvalidExample:
    """Why there is no example at this place: the reason, the same for all such places, and the details."""

    location: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


ExampleOrInvalid = TranslationExample | InvalidExample


def make_example(source: object, target: object, location: str) -> ExampleOrInvalid:
    """An example of two texts, with no white space around them, if both can be used."""
    one, other = clean_text(source, "source", location), clean_text(target, "target", location)
    if isinstance(one, InvalidExample):
        return one
    return other if isinstance(other, InvalidExample) else TranslationExample(one, other, location)


def clean_text(text: object, description: str, location: str) -> str | InvalidExample:
    """A text with no white space around it, if it can be used; ``description`` it is, is told of a flaw."""
    if text is None:
        return InvalidExample(location, f"an empty {description}")
    if not isinstance(text, str):
        return InvalidExample(location, f"a {description} that is no text", f"it is {text!r}"[:80])
    text = text.strip()
    if not text:
        return InvalidExample(location, f"an empty {description}")
    if "\0" in text:
        return InvalidExample(
            location, "a NUL character", f"behind {text.partition(chr(0))[0][-20:]!r} of the {description}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # what was not UTF-8 is a lone surrogate now
        byte = ord(text[error.start]) - 0xDC00
        told = f"the byte 0x{byte:02x}" if 0x80 <= byte <= 0xFF else "half a surrogate pair"
        return InvalidExample(
            location, "invalid UTF-8", f"{told} behind {text[: error.start][-20:]!r} of the {description}"
        )
    return text


# ------------------------------------------------------------------------------------------------- tables


def read_parallel_table(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """The examples of one file; its name tells the format."""
    return TABLE_READERS[file_suffix(path)](path, sides)


def file_suffix(path: Path) -> str:
    """What a file's name says of its format, without ``.gz``."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


CellRow = list[str] | InvalidExample
CellRows = Iterator[tuple[int, CellRow]]


def read_tsv(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Columns between tabs. A quote is a character like any other."""
    return _read_columns(path, sides, functools.partial(iter_separated_rows, separator="\t"))


def read_bar_separated(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """``source ||| target``, as the tools for word alignment take it; columns by number only."""
    return _read_columns(path, sides, functools.partial(iter_separated_rows, separator="|||"))


def read_csv(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Comma-separated values: quotes hold commas, line ends and doubled quotes together."""
    return _read_columns(path, sides, iter_csv_rows)


def iter_separated_rows(path: Path, separator: str) -> CellRows:
    """The cells of each line between separators, with the line's number."""
    for number, line in enumerate(read_lines(path), 1):
        yield number, line_too_long(path, number) if line is None else line.split(separator)


def iter_csv_rows(path: Path) -> CellRows:
    """The cells of each row of a CSV file, with the number of its first line."""
    # A line that is far too long is too long for a cell as well: the reader says so.
    too_long = "x" * (csv.field_size_limit() + 1)
    reader = csv.reader(
        ((too_long if line is None else line) + "\n" for line in read_lines(path)), strict=True
    )
    while True:
        number = reader.line_num + 1  # where the row begins: it may have several lines
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            told = f"{error}, in lines {number} to {reader.line_num}; is a quote left open?"
            yield number, InvalidExample(f"{path}:{number}", "not CSV", told)


def _read_columns(
    path: Path, sides: Sides, read_rows: Callable[[Path], CellRows]
) -> Iterator[ExampleOrInvalid]:
    """The examples of rows of cells, each with the number of its line."""
    places: tuple[int, int] | None = None
    width = 0
    for number, cells in read_rows(path):
        where = f"{path}:{number}"
        if isinstance(cells, InvalidExample):
            yield cells
        elif not any(cells) and len(cells) < 2:
            yield InvalidExample(where, BLANK_LINE)
        elif places is None:
            places, has_header = _find_columns(path, sides, [cell.strip() for cell in cells])
            width = len(cells)
            if not has_header:
                if file_suffix(path) in TABLE_READERS:  # bars have no header
                    rows = (_select_cells(row, places) for _, row in read_rows(path))
                    _check_no_header(path, sides, _select_cells(cells, places), rows)
                yield make_example(cells[places[0]], cells[places[1]], where)
        elif len(cells) != width:
            yield InvalidExample(
                where, "another number of columns", f"{len(cells)}, and the first line has {width}"
            )
        else:
            yield make_example(cells[places[0]], cells[places[1]], where)


def _find_columns(path: Path, sides: Sides, names: list[str]) -> tuple[tuple[int, int], bool]:
    """Which columns hold the two sides, and whether the first line is a header."""
    wanted = [side for side in sides if isinstance(side, str)]
    for side in sides:
        if isinstance(side, int) and not 1 <= side <= len(names):
            raise InputError(f"{path} has {len(names)} columns; there is no column {side}")
    if not wanted:  # by number: a header shows only where it has the usual names
        a, b = (int(side) - 1 for side in sides)
        return (a, b), any({names[a], names[b]} == set(usual) for usual in USUAL_COLUMNS)
    if all(name in names for name in wanted):
        a, b = (side - 1 if isinstance(side, int) else names.index(side) for side in sides)
        return (a, b), True
    if len(wanted) == 2:
        for one, other in USUAL_COLUMNS:
            if one in names and other in names:
                return (names.index(one), names.index(other)), True
        if len(names) == 2 and not any(name in names for name in wanted):
            return (0, 1), False
    missing = next(name for name in wanted if name not in names)
    shown = ", ".join(repr(name[:30]) for name in rank_by_similarity(missing, names)[:8])
    raise InputError(
        f"{path} has no column {missing!r}; its first line has {len(names)}: {shown}. "
        "Name two columns of its header as source and target, or give their numbers, counted from 1"
    )


def _select_cells(row: CellRow, columns: Sequence[int]) -> list[str]:
    return (
        []
        if isinstance(row, InvalidExample) or len(row) <= max(columns)
        else [row[at].strip() for at in columns]
    )


def _check_no_header(path: Path, sides: Sides, cells: list[str], rows: Iterator[list[str]]) -> None:
    """Tell of a first line that is taken as a pair and looks like names; an error if others were asked for.

    Names may be asked for of a table without any: they are also those of languages.
    """
    wanted = [side for side in sides if isinstance(side, str)]
    one, other = cells
    known = look_like_column_names(cells, wanted)
    if known and wanted:
        raise InputError(
            f"{path} has no columns {' and '.join(map(repr, wanted))}; its first line is {one!r}, {other!r}. "
            f"If that is a header, name its columns: data.source={one} data.target={other}. If it is a pair, "
            "put a line with the names above it, or give the columns' numbers, counted from 1"
        )
    if known or differs_from_rows(cells, filter(None, itertools.islice(rows, NUM_SAMPLED_LINES))):
        warnings.warn(
            f"{path}: the first line, {one!r} and {other!r}, is taken as a pair; name the columns "
            f"(data.source={one} data.target={other}) if it is a header",
            stacklevel=2,
        )


def read_jsonl(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """A JSON object a line, the sides at its top or under ``translation``."""
    return _read_mappings(iter_json_rows(path), sides)


def _read_mappings(rows: Iterator[tuple[str, object]], sides: Sides) -> Iterator[ExampleOrInvalid]:
    """The examples of mappings. Keys are not counted: without names they are the usual ones, or an error."""
    first = True
    for where, row in rows:
        if first and isinstance(row, Mapping):
            first = False
            _check_keys(row, sides, where)
        yield row if isinstance(row, InvalidExample) else _example_from_mapping(row, sides, where)


def _check_keys(row: Mapping[str, object], sides: Sides, location: str) -> None:
    """Raise when the sides are counted, and the row has not the usual names."""
    if all(isinstance(side, str) for side in sides) or _get_both_sides(row, sides) is not None:
        return
    names = list(map(str, _candidate_mappings(row)[-1]))
    one, other = names if len(names) == 2 else ("…", "…")
    raise InputError(
        f"{location}: which keys hold the two sides? There is: {', '.join(names[:8]) or 'nothing'}. "
        f"Name the keys: data.source={one} data.target={other}"
    )


def iter_json_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Where each line is, and what it holds, or a flaw."""
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}:{number}"
        if line is None:
            yield where, line_too_long(path, number)
        elif not line.strip():
            yield where, InvalidExample(where, BLANK_LINE)
        else:
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield where, InvalidExample(where, "not JSON", str(error))


def _example_from_mapping(row: object, sides: Sides, location: str) -> ExampleOrInvalid:
    """The example in a mapping, the sides at its top or under ``translation``."""
    if not isinstance(row, Mapping):
        return InvalidExample(location, "no JSON object", f"it is {row!r}"[:80])
    if both := _get_both_sides(row, sides):
        return make_example(*both, location)
    names = [str(name) for place in _candidate_mappings(row) for name in place]
    wanted = sides if all(isinstance(side, str) for side in sides) else USUAL_COLUMNS[0]
    missing = next((side for side in wanted if side not in names), wanted[0])
    return InvalidExample(
        location, f"no {missing!r}", f"there is: {', '.join(rank_by_similarity(str(missing), names)[:8])}"
    )


def _get_both_sides(row: Mapping[str, object], sides: Sides) -> tuple[object, object] | None:
    """What a mapping has for the two sides, if it has both."""
    for source, target in (sides, *USUAL_COLUMNS):
        for place in _candidate_mappings(row):
            if source in place and target in place:
                return place[source], place[target]
    return None


def _candidate_mappings(row: Mapping[str, object]) -> list[Mapping[Any, object]]:
    """Where the sides may be."""
    nested = row.get("translation")
    return [row, nested] if isinstance(nested, Mapping) else [row]


def read_parquet(path: Path, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """Columns of a Parquet file, or fields of its column ``translation``; a row group is read at a time."""
    rows = iter_parquet_rows(
        path, lambda schema: [_find_parquet_column(path, sides, side, schema) for side in (0, 1)]
    )
    for where, (source, target) in rows:
        yield make_example(source, target, where)


def iter_parquet_rows(
    path: Path, choose_columns: Callable[[Any], Sequence[tuple[str, ...]]]
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Where each row is, and its values in the columns that are chosen by the file's schema.

    A column is told by the way to it, as (name,) or (name, field).
    """
    arrow, reader = import_optional("pyarrow", "hub"), import_optional("pyarrow.parquet", "hub")
    with tempfile.TemporaryFile() as unzipped, open_decompressed(path) as file:
        source: Any = path
        if path.suffix == ".gz":  # Parquet is read from its end
            shutil.copyfileobj(file, unzipped)
            source = unzipped
        try:
            with reader.ParquetFile(source) as opened_file:
                names = choose_columns(opened_file.schema_arrow)
                columns = [".".join(name) for name in names]
                begun = 0
                for batch in opened_file.iter_batches(ROWS_PER_BATCH, columns=columns):
                    values = [_column_values(arrow, batch, name) for name in names]
                    for number, row in enumerate(zip(*values, strict=True), begun + 1):
                        yield f"{path}:{number}", row
                    begun += batch.num_rows
        except (arrow.ArrowException, OSError) as error:
            raise InputError(f"{path} cannot be read as Parquet: {error}") from None


def _find_parquet_column(path: Path, sides: Sides, side_index: int, schema: Any) -> tuple[str, ...]:
    """The way to the column of one side, as (name,) or ("translation", name)."""
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
    """A column as Python strings, say; what is not UTF-8 comes as lone surrogates, as from a text file."""
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


# ------------------------------------------------------------------------------------- two files, the hub


def read_parallel_files(source: Path, target: Path) -> Iterator[ExampleOrInvalid]:
    """Two files of text: line n of the one is the translation of line n of the other."""
    ones, others = read_lines(source), read_lines(target)
    for number, (one, other) in enumerate(itertools.zip_longest(ones, others, fillvalue=EXHAUSTED), 1):
        if one is EXHAUSTED or other is EXHAUSTED:
            more = number + sum(1 for _ in (others if one is EXHAUSTED else ones))
            counts = (number - 1, more) if one is EXHAUSTED else (more, number - 1)
            raise InputError(
                f"{source} has {counts[0]} lines and {target} has {counts[1]}; line n of the one must be the "
                "translation of line n of the other, and a line too many shifts all that follow it"
            )
        is_long = one is None or other is None
        yield line_too_long(source, number) if is_long else make_example(one, other, f"{source}:{number}")


def read_hub_dataset(name: str, sides: Sides) -> Iterator[ExampleOrInvalid]:
    """A data set of the Hugging Face hub, streamed: ``NAME[@REVISION][:CONFIGURATION[:SPLIT]]``."""
    return _read_mappings(iter_hub_rows(name), sides)


def iter_hub_rows(name: str) -> Iterator[tuple[str, object]]:
    """Where each row of it is, and what it holds."""
    datasets = import_optional("datasets", "hub")
    place, _, rest = name.partition(":")
    configuration, _, split = rest.partition(":")
    place, _, revision = place.partition("@")
    try:
        rows = datasets.load_dataset(
            place, configuration or None, split=split or "train", revision=revision or None, streaming=True
        )
        for number, row in enumerate(rows, 1):
            yield f"hub:{name}:{number}", row
    except Exception as error:  # of the network, the hub, the data set: a dozen kinds from four packages
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"hub:{name} cannot be read: {told[0]}") from error


def line_too_long(path: Path | str, line_number: int) -> InvalidExample:
    """Of a line that nobody wrote."""
    return InvalidExample(f"{path}:{line_number}", "a line of more than 16 MiB")


def rank_by_similarity(name: str, names: Sequence[str]) -> list[str]:
    """The names that are there, those most like the one asked for first."""
    return sorted(names, key=lambda one: -difflib.SequenceMatcher(None, name.lower(), one.lower()).ratio())
