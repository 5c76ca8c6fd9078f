"""Readers of parallel text, one for each format. Each goes through its file once, keeping next to nothing.

A reader yields an :class:`Example` for every pair of sentences, and a :class:`Flaw` in the place of one that
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

from jumok.data.files import lines, needed, opened
from jumok.data.headers import LINES, are_names, stands_out
from jumok.errors import InputError

__all__ = [
    "BLANK",
    "TABLES",
    "Example",
    "Flaw",
    "Sides",
    "clean",
    "csv_rows",
    "ending",
    "example",
    "hub",
    "hub_rows",
    "json_rows",
    "nearest",
    "parallel",
    "parquet_rows",
    "split_rows",
    "table",
    "too_long",
]

Sides = tuple[str | int, str | int]
# What the two columns are often called, for a table that does not have the names asked for.
COMMON = (("source", "target"), ("src", "tgt"))
BLANK = "an empty line"  # of a table, where it means nothing unless lines are counted
ROWS_AT_ONCE = 1024  # of a Parquet file
END = object()


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence and its translation, and where they were found: ``file:line``."""

    source: str
    target: str
    where: str


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why there is no example at this place: the reason, the same for all such places, and the details."""

    where: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


Found = Example | Flaw


def example(source: object, target: object, where: str) -> Found:
    """An example of two texts, with no white space around them, if both can be used."""
    one, other = clean(source, "source", where), clean(target, "target", where)
    if isinstance(one, Flaw):
        return one
    return other if isinstance(other, Flaw) else Example(one, other, where)


def clean(text: object, what: str, where: str) -> str | Flaw:
    """A text with no white space around it, if it can be used; ``what`` it is, is told of a flaw."""
    if text is None:
        return Flaw(where, f"an empty {what}")
    if not isinstance(text, str):
        return Flaw(where, f"a {what} that is no text", f"it is {text!r}"[:80])
    text = text.strip()
    if not text:
        return Flaw(where, f"an empty {what}")
    if "\0" in text:
        return Flaw(where, "a NUL character", f"behind {text.partition(chr(0))[0][-20:]!r} of the {what}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # what was not UTF-8 is a lone surrogate now
        byte = ord(text[error.start]) - 0xDC00
        told = f"the byte 0x{byte:02x}" if 0x80 <= byte <= 0xFF else "half a surrogate pair"
        return Flaw(where, "invalid UTF-8", f"{told} behind {text[: error.start][-20:]!r} of the {what}")
    return text


# ------------------------------------------------------------------------------------------------- tables


def table(path: Path, sides: Sides) -> Iterator[Found]:
    """The examples of one file; its name tells the format."""
    return TABLES[ending(path)](path, sides)


def ending(path: Path) -> str:
    """What a file's name says of its format, without ``.gz``."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


Row = list[str] | Flaw
Rows = Iterator[tuple[int, Row]]


def tsv(path: Path, sides: Sides) -> Iterator[Found]:
    """Columns between tabs. A quote is a character like any other."""
    return _columns(path, sides, functools.partial(split_rows, separator="\t"))


def bars(path: Path, sides: Sides) -> Iterator[Found]:
    """``source ||| target``, as the tools for word alignment take it; columns by number only."""
    return _columns(path, sides, functools.partial(split_rows, separator="|||"))


def comma(path: Path, sides: Sides) -> Iterator[Found]:
    """Comma-separated values: quotes hold commas, line ends and doubled quotes together."""
    return _columns(path, sides, csv_rows)


def split_rows(path: Path, separator: str) -> Rows:
    """The cells of each line between separators, with the line's number."""
    for number, line in enumerate(lines(path), 1):
        yield number, too_long(path, number) if line is None else line.split(separator)


def csv_rows(path: Path) -> Rows:
    """The cells of each row of a CSV file, with the number of its first line."""
    # A line that is far too long is too long for a cell as well: the reader says so.
    too_long = "x" * (csv.field_size_limit() + 1)
    reader = csv.reader(((too_long if line is None else line) + "\n" for line in lines(path)), strict=True)
    while True:
        number = reader.line_num + 1  # where the row begins: it may have several lines
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            told = f"{error}, in lines {number} to {reader.line_num}; is a quote left open?"
            yield number, Flaw(f"{path}:{number}", "not CSV", told)


def _columns(path: Path, sides: Sides, read: Callable[[Path], Rows]) -> Iterator[Found]:
    """The examples of rows of cells, each with the number of its line."""
    places: tuple[int, int] | None = None
    width = 0
    for number, cells in read(path):
        where = f"{path}:{number}"
        if isinstance(cells, Flaw):
            yield cells
        elif not any(cells) and len(cells) < 2:
            yield Flaw(where, BLANK)
        elif places is None:
            places, has_header = _places(path, sides, [cell.strip() for cell in cells])
            width = len(cells)
            if not has_header:
                if ending(path) in TABLES:  # bars have no header
                    rows = (_cells(row, places) for _, row in read(path))
                    _check_no_header(path, sides, _cells(cells, places), rows)
                yield example(cells[places[0]], cells[places[1]], where)
        elif len(cells) != width:
            yield Flaw(where, "another number of columns", f"{len(cells)}, and the first line has {width}")
        else:
            yield example(cells[places[0]], cells[places[1]], where)


def _places(path: Path, sides: Sides, names: list[str]) -> tuple[tuple[int, int], bool]:
    """Which columns hold the two sides, and whether the first line is a header."""
    wanted = [side for side in sides if isinstance(side, str)]
    for side in sides:
        if isinstance(side, int) and not 1 <= side <= len(names):
            raise InputError(f"{path} has {len(names)} columns; there is no column {side}")
    if not wanted:  # by number: a header shows only where it has the usual names
        a, b = (int(side) - 1 for side in sides)
        return (a, b), any({names[a], names[b]} == set(usual) for usual in COMMON)
    if all(name in names for name in wanted):
        a, b = (side - 1 if isinstance(side, int) else names.index(side) for side in sides)
        return (a, b), True
    if len(wanted) == 2:
        for one, other in COMMON:
            if one in names and other in names:
                return (names.index(one), names.index(other)), True
        if len(names) == 2 and not any(name in names for name in wanted):
            return (0, 1), False
    missing = next(name for name in wanted if name not in names)
    shown = ", ".join(repr(name[:30]) for name in nearest(missing, names)[:8])
    raise InputError(
        f"{path} has no column {missing!r}; its first line has {len(names)}: {shown}. "
        "Name two columns of its header as source and target, or give their numbers, counted from 1"
    )


def _cells(row: Row, places: Sequence[int]) -> list[str]:
    return [] if isinstance(row, Flaw) or len(row) <= max(places) else [row[at].strip() for at in places]


def _check_no_header(path: Path, sides: Sides, first: list[str], rows: Iterator[list[str]]) -> None:
    """Tell of a first line that is taken as a pair and looks like names; an error if others were asked for.

    Names may be asked for of a table without any: they are also those of languages.
    """
    wanted = [side for side in sides if isinstance(side, str)]
    one, other = first
    known = are_names(first, wanted)
    if known and wanted:
        raise InputError(
            f"{path} has no columns {' and '.join(map(repr, wanted))}; its first line is {one!r}, {other!r}. "
            f"If that is a header, name its columns: data.source={one} data.target={other}. If it is a pair, "
            "put a line with the names above it, or give the columns' numbers, counted from 1"
        )
    if known or stands_out(first, filter(None, itertools.islice(rows, LINES))):
        warnings.warn(
            f"{path}: the first line, {one!r} and {other!r}, is taken as a pair; name the columns "
            f"(data.source={one} data.target={other}) if it is a header",
            stacklevel=2,
        )


def jsonl(path: Path, sides: Sides) -> Iterator[Found]:
    """A JSON object a line, the sides at its top or under ``translation``."""
    return _objects(json_rows(path), sides)


def _objects(rows: Iterator[tuple[str, object]], sides: Sides) -> Iterator[Found]:
    """The examples of mappings. Keys are not counted: without names they are the usual ones, or an error."""
    first = True
    for where, row in rows:
        if first and isinstance(row, Mapping):
            first = False
            _check_keys(row, sides, where)
        yield row if isinstance(row, Flaw) else _keyed(row, sides, where)


def _check_keys(row: Mapping[str, object], sides: Sides, where: str) -> None:
    """Raise when the sides are counted, and the row has not the usual names."""
    if all(isinstance(side, str) for side in sides) or _both(row, sides) is not None:
        return
    names = list(map(str, _places_in(row)[-1]))
    one, other = names if len(names) == 2 else ("…", "…")
    raise InputError(
        f"{where}: which keys hold the two sides? There is: {', '.join(names[:8]) or 'nothing'}. "
        f"Name the keys: data.source={one} data.target={other}"
    )


def json_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Where each line is, and what it holds, or a flaw."""
    for number, line in enumerate(lines(path), 1):
        where = f"{path}:{number}"
        if line is None:
            yield where, too_long(path, number)
        elif not line.strip():
            yield where, Flaw(where, BLANK)
        else:
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield where, Flaw(where, "not JSON", str(error))


def _keyed(row: object, sides: Sides, where: str) -> Found:
    """The example in a mapping, the sides at its top or under ``translation``."""
    if not isinstance(row, Mapping):
        return Flaw(where, "no JSON object", f"it is {row!r}"[:80])
    if both := _both(row, sides):
        return example(*both, where)
    names = [str(name) for place in _places_in(row) for name in place]
    wanted = sides if all(isinstance(side, str) for side in sides) else COMMON[0]
    missing = next((side for side in wanted if side not in names), wanted[0])
    return Flaw(where, f"no {missing!r}", f"there is: {', '.join(nearest(str(missing), names)[:8])}")


def _both(row: Mapping[str, object], sides: Sides) -> tuple[object, object] | None:
    """What a mapping has for the two sides, if it has both."""
    for source, target in (sides, *COMMON):
        for place in _places_in(row):
            if source in place and target in place:
                return place[source], place[target]
    return None


def _places_in(row: Mapping[str, object]) -> list[Mapping[Any, object]]:
    """Where the sides may be."""
    nested = row.get("translation")
    return [row, nested] if isinstance(nested, Mapping) else [row]


def parquet(path: Path, sides: Sides) -> Iterator[Found]:
    """Columns of a Parquet file, or fields of its column ``translation``; a row group is read at a time."""
    rows = parquet_rows(path, lambda schema: [_parquet_column(path, sides, side, schema) for side in (0, 1)])
    for where, (source, target) in rows:
        yield example(source, target, where)


def parquet_rows(
    path: Path, choose: Callable[[Any], Sequence[tuple[str, ...]]]
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Where each row is, and its values in the columns that are chosen by the file's schema.

    A column is told by the way to it, as (name,) or (name, field).
    """
    arrow, reader = needed("pyarrow", "hub"), needed("pyarrow.parquet", "hub")
    with tempfile.TemporaryFile() as unzipped, opened(path) as file:
        source: Any = path
        if path.suffix == ".gz":  # Parquet is read from its end
            shutil.copyfileobj(file, unzipped)
            source = unzipped
        try:
            with reader.ParquetFile(source) as opened_file:
                names = choose(opened_file.schema_arrow)
                columns = [".".join(name) for name in names]
                begun = 0
                for batch in opened_file.iter_batches(ROWS_AT_ONCE, columns=columns):
                    values = [_values(arrow, batch, name) for name in names]
                    for number, row in enumerate(zip(*values, strict=True), begun + 1):
                        yield f"{path}:{number}", row
                    begun += batch.num_rows
        except (arrow.ArrowException, OSError) as error:
            raise InputError(f"{path} cannot be read as Parquet: {error}") from None


def _parquet_column(path: Path, sides: Sides, which: int, schema: Any) -> tuple[str, ...]:
    """The way to the column of one side, as (name,) or ("translation", name)."""
    side = sides[which]
    if isinstance(side, int):
        if not 1 <= side <= len(schema.names):
            raise InputError(f"{path} has {len(schema.names)} columns; there is no column {side}")
        return (schema.names[side - 1],)
    nested = []
    if "translation" in schema.names:
        nested = [field.name for field in schema.field("translation").type]
    for name in (side, *(pair[which] for pair in COMMON)):
        if name in schema.names:
            return (name,)
        if name in nested:
            return ("translation", name)
    shown = ", ".join(nearest(side, [*schema.names, *nested])[:8])
    raise InputError(f"{path} has no column {side!r}; it has: {shown}")


def _values(arrow: Any, batch: Any, name: tuple[str, ...]) -> Iterator[object]:
    """A column as Python strings, say; what is not UTF-8 comes as lone surrogates, as from a text file."""
    column = batch.column(name[0])
    if len(name) == 2:
        column = column.field(name[1])
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
        column = column.cast(arrow.large_binary())
    for value in column.to_pylist():
        yield value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


TABLES = {".tsv": tsv, ".csv": comma, ".jsonl": jsonl, ".parquet": parquet}


# ------------------------------------------------------------------------------------- two files, the hub


def parallel(source: Path, target: Path) -> Iterator[Found]:
    """Two files of text: line n of the one is the translation of line n of the other."""
    ones, others = lines(source), lines(target)
    for number, (one, other) in enumerate(itertools.zip_longest(ones, others, fillvalue=END), 1):
        if one is END or other is END:
            more = number + sum(1 for _ in (others if one is END else ones))
            counts = (number - 1, more) if one is END else (more, number - 1)
            raise InputError(
                f"{source} has {counts[0]} lines and {target} has {counts[1]}; line n of the one must be the "
                "translation of line n of the other, and a line too many shifts all that follow it"
            )
        is_long = one is None or other is None
        yield too_long(source, number) if is_long else example(one, other, f"{source}:{number}")


def hub(name: str, sides: Sides) -> Iterator[Found]:
    """A data set of the Hugging Face hub, streamed: ``NAME[@REVISION][:CONFIGURATION[:SPLIT]]``."""
    return _objects(hub_rows(name), sides)


def hub_rows(name: str) -> Iterator[tuple[str, object]]:
    """Where each row of it is, and what it holds."""
    datasets = needed("datasets", "hub")
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


def too_long(path: Path | str, number: int) -> Flaw:
    """Of a line that nobody wrote."""
    return Flaw(f"{path}:{number}", "a line of more than 16 MiB")


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """The names that are there, those most like the one asked for first."""
    return sorted(names, key=lambda one: -difflib.SequenceMatcher(None, name.lower(), one.lower()).ratio())
