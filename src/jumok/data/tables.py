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

from jumok.data import formats, sources
from jumok.data.formats import BLANK, Flaw, Row, nearest
from jumok.errors import InputError

__all__ = ["SPLITS", "Column", "Record", "find", "names", "read", "split_name"]

Column = str | int | Sequence[str | int]
GLUE = " . "
SPLITS = {"train": ("train", "restval", "training"), "val": ("val", "dev", "valid", "validation")}


@dataclass(frozen=True, slots=True)
class Record:
    """The values of the columns asked for, and where they are: ``file:line``."""

    values: tuple[object, ...]
    where: str


Found = Iterator[Record | Flaw]


def find(
    where: str | Sequence[str],
    columns: Sequence[Column],
    *,
    split: str | None = None,
    header: bool | None = None,
) -> Found:
    """The records of the tables that a recipe means; how they are named is told in ``sources.py``."""
    for name in [where] if isinstance(where, str) else where:
        if name.startswith("hub:"):
            known = name.removeprefix("hub:")
            if split and known.count(":") < 2:
                known = f"{known}{':' * (2 - known.count(':'))}{split}"
            yield from (_keyed(row, columns, at) for at, row in formats.hub_rows(known))
            continue
        for path in sources.files(name, tuple(formats.TABLES), split):
            yield from read(path, columns, header)


def read(path: Path, columns: Sequence[Column], header: bool | None = None) -> Found:
    """The records of one file; its name tells the format."""
    ending = formats.ending(path)
    if ending == ".tsv":
        return _cells(path, columns, formats.split_rows(path, "\t"), header)
    if ending == ".csv":
        return _cells(path, columns, formats.csv_rows(path), header)
    if ending == ".jsonl":
        return (
            row if isinstance(row, Flaw) else _keyed(row, columns, where)
            for where, row in formats.json_rows(path)
        )
    if ending == ".parquet":
        return _parquet(path, columns)
    raise InputError(f"{path} is no table that can be read; its ending is to be {', '.join(formats.TABLES)}")


def names(path: Path) -> Sequence[str]:
    """What the columns of a table are called, as its first row says."""
    ending = formats.ending(path)
    if ending == ".parquet":
        found: list[str] = []

        def first(schema: Any) -> list[tuple[str, ...]]:
            found.extend(schema.names)
            return [(schema.names[0],)]

        next(formats.parquet_rows(path, first), None)
        return found
    if ending == ".jsonl":
        row = next((row for _, row in formats.json_rows(path) if isinstance(row, Mapping)), {})
        return list(row)
    rows = formats.split_rows(path, "\t") if ending == ".tsv" else formats.csv_rows(path)
    cells = next((cells for _, cells in rows if not isinstance(cells, Flaw) and any(cells)), [])
    return [cell.strip() for cell in cells]


def split_name(name: str) -> str:
    """One name for the same split.

    >>> split_name("dev"), split_name("Training"), split_name("test")
    ('val', 'train', 'test')
    """
    name = name.strip().lower()
    return next((split for split, names in SPLITS.items() if name in names), name)


def _cells(
    path: Path, columns: Sequence[Column], rows: Iterator[tuple[int, Row]], header: bool | None
) -> Found:
    """Of rows of cells, each with the number of its line."""
    places: list[list[int]] | None = None
    width = 0
    for number, cells in rows:
        where = f"{path}:{number}"
        if isinstance(cells, Flaw):
            yield cells
        elif not any(cells) and len(cells) < 2:
            yield Flaw(where, BLANK)
        elif places is None:
            width = len(cells)
            names = [cell.strip() for cell in cells]
            by_name = any(isinstance(name, str) for column in columns for name in _each(column))
            if by_name and header is False:
                raise InputError(f"{path}: without a header, columns are told by number; {columns} came")
            places = [_places(path, column, names) for column in columns]
            if not (by_name or header):
                yield _record(cells, places, where)
        elif len(cells) != width:
            yield Flaw(where, "another number of columns", f"{len(cells)}, and the first line has {width}")
        else:
            yield _record(cells, places, where)


def _record(cells: Sequence[object], places: Sequence[Sequence[int]], where: str) -> Record:
    return Record(tuple(_joined([cells[place] for place in some]) for some in places), where)


def _joined(values: Sequence[object]) -> object:
    """One value as it is, and several as one text; what is no text is left for the reader to find."""
    if len(values) == 1:
        return values[0]
    texts = [value.strip() for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        return next(value for value in values if not isinstance(value, str))
    return GLUE.join(text for text in texts if text)


def _each(column: Column) -> Sequence[str | int]:
    return [column] if isinstance(column, str | int) else column


def _places(path: Path, column: Column, names: Sequence[str]) -> list[int]:
    """Where a column, or those of its columns that are there, stand among these names."""
    found = []
    for one in _each(column):
        if isinstance(one, int):
            found += [one - 1] if 1 <= one <= len(names) else []
        else:
            found += [names.index(one)] if one in names else []
    if found:
        return found
    asked = " or ".join(repr(one) for one in _each(column))
    shown = ", ".join(repr(name[:30]) for name in nearest(str(_each(column)[0]), names)[:8])
    raise InputError(
        f"{path} has no column {asked}; its first line has {len(names)}: {shown}. "
        "Name one of these in the recipe's data section, or give its number, counted from 1"
    )


def _keyed(row: object, columns: Sequence[Column], where: str) -> Record | Flaw:
    """Of a JSON object, or a row of the hub."""
    if not isinstance(row, Mapping):
        return Flaw(where, "no JSON object", f"it is {row!r}"[:80])
    values = []
    for column in columns:
        names = [one for one in _each(column) if one in row]
        if not names:
            asked = " or ".join(repr(one) for one in _each(column))
            there = ", ".join(nearest(str(_each(column)[0]), [str(name) for name in row])[:8])
            return Flaw(where, f"no {asked}", f"there is: {there}")
        values.append(_joined([row[name] for name in names]))
    return Record(tuple(values), where)


def _parquet(path: Path, columns: Sequence[Column]) -> Found:
    wanted: list[int] = []  # how many columns of the file make each one of ours

    def choose(schema: Any) -> list[tuple[str, ...]]:
        places = [_places(path, column, schema.names) for column in columns]
        wanted.extend(map(len, places))
        return [(schema.names[place],) for some in places for place in some]

    for where, row in formats.parquet_rows(path, choose):
        values = iter(row)
        yield Record(tuple(_joined([next(values) for _ in range(count)]) for count in wanted), where)
