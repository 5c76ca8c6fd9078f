"""Parallel corpora: from the names in a recipe to a stream of examples.

A recipe names the data and its two sides::

    train: my.tsv                     a table: .tsv, .csv, .jsonl or .parquet, optionally with .gz
    train: [corpus.en, corpus.de]     two text files, aligned by line
    train: parts/*.tsv                several tables (or a list of any of these), one after the other
    train: multi30k/train             the split "train" of a folder, here or under JUMOK_DATA: a table, or two
                                      files whose suffixes are the sides (train.en.gz, train.de.gz), or a file
                                      with bars, source ||| target (train.en-de.txt)
    train: hub:wmt/wmt16:de-en:train  the Hugging Face hub: NAME[@REVISION][:CONFIGURATION[:SPLIT]]
    source: en                        a file suffix, the name or number (from 1) of a column, or a language
    target: de

Only the current row is held in memory. Empty lines of tables and white space around sentences are ignored.
Any other example that cannot be used is *invalid*: it stops reading, or it is skipped and counted.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jumok.data.readers import dataset_files, tables
from jumok.data.readers.header_detection import NUM_SAMPLED_LINES, differs_from_rows, look_like_column_names
from jumok.data.readers.invalid_examples import (
    InvalidExample,
    OnError,
    SkippedExamples,
    clean_text,
    line_too_long,
    skip_invalid,
)
from jumok.data.readers.tables import TABLE_SUFFIXES, DelimitedTable, JsonTable, Table
from jumok.data.readers.text_files import file_suffix, read_lines
from jumok.errors import InputError

Side = str | int
Sides = tuple[Side, Side]  # of a pair: columns of a table, or languages
TextFunction = Callable[[str], str]
# Common names of the two columns, for a table without the requested names.
USUAL_COLUMNS = (("source", "target"), ("src", "tgt"))


@dataclass(frozen=True, slots=True)
class TranslationExample:
    """A sentence, its translation, and their location, ``file:line``."""

    source: str
    target: str
    location: str


ExampleIterator = Iterator[TranslationExample | InvalidExample]


def make_example(source: object, target: object, location: str) -> TranslationExample | InvalidExample:
    """An example of two texts, stripped of surrounding white space, if both are valid."""
    source_text, target_text = clean_text(source, "source", location), clean_text(target, "target", location)
    if isinstance(source_text, InvalidExample):
        return source_text
    if isinstance(target_text, InvalidExample):
        return target_text
    return TranslationExample(source_text, target_text, location)


# ------------------------------------------------------------------------------------------------------ corpora


@dataclass(frozen=True)
class CorpusPart:
    """One file, pair of files or other source of a corpus. ``name`` identifies it."""

    name: str
    read: Callable[[], ExampleIterator]
    files: tuple[Path, ...] = ()  # files that the text depends on


@dataclass(frozen=True)
class ParallelCorpus:
    """Parallel text. Each iteration reads it again from the beginning."""

    parts: tuple[CorpusPart, ...]
    on_error: OnError = "stop"

    @classmethod
    def from_pairs(cls, name: str, generate: Callable[[], Iterable[tuple[str, str]]]) -> ParallelCorpus:
        """A corpus of pairs from a deterministic function. ``name`` must identify everything they depend on.

        >>> list(ParallelCorpus.from_pairs("animals", lambda: [("a dog", "개"), ("a cat", "고양이")]))[1]
        TranslationExample(source='a cat', target='고양이', location='animals:2')
        """

        def read() -> ExampleIterator:
            for number, (source, target) in enumerate(generate(), 1):
                yield make_example(source, target, f"{name}:{number}")

        return cls((CorpusPart(name, read),))

    def read(self, skipped: SkippedExamples | None = None) -> Iterator[TranslationExample]:
        """The examples in order.

        Invalid ones raise, or, with ``on_error="skip"``, are counted in ``skipped``.
        """
        examples = (example for part in self.parts for example in part.read())
        empty_message = f"{', '.join(part.name for part in self.parts)}: no examples"
        return skip_invalid(examples, self.on_error, skipped or SkippedExamples(), empty_message)

    def __iter__(self) -> Iterator[TranslationExample]:
        return self.read()

    def map_texts(self, name: str, source_function: TextFunction, target_function: TextFunction) -> ParallelCorpus:
        """The same corpus with a function applied to each text. ``name`` must identify the functions."""

        def read(part: CorpusPart) -> ExampleIterator:
            for example in part.read():
                if isinstance(example, InvalidExample):
                    yield example
                else:
                    source, target = source_function(example.source), target_function(example.target)
                    yield make_example(source, target, example.location)

        parts = (replace(part, name=f"{part.name}, {name}", read=functools.partial(read, part)) for part in self.parts)
        return replace(self, parts=tuple(parts))

    @property
    def fingerprint(self) -> str:
        """Identifies the text, by the names, sizes and modification times of the files."""
        identity = [[part.name, *map(file_identity, part.files)] for part in self.parts]
        return hashlib.sha256(json.dumps([identity, self.on_error]).encode()).hexdigest()


def file_identity(path: Path) -> list[int]:
    """The size and the modification time of a file, by which fingerprints detect a change."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


# ------------------------------------------------------------------------------------------------ finding files


def find_corpus(
    dataset: str | Sequence[str], *, source: Side, target: Side, split: str | None = None, on_error: OnError = "stop"
) -> ParallelCorpus:
    """The corpus that a recipe names. ``split`` is used for folders that are named without a split."""
    names, sides = dataset_files.as_names(dataset), (source, target)
    matches = [[path for path in dataset_files.search_paths(name) if path.is_file()] for name in names]
    is_text = [bool(paths) and not _is_table(paths[0]) for paths in matches]
    if len(names) == 2 and all(is_text):
        return ParallelCorpus((_make_text_part(matches[0][0], matches[1][0]),), on_error)
    if len(names) == 2 and any(is_text) and not all(matches):  # the other name is probably misspelled
        raise _corpus_not_found(names[matches.index([])], split, sides)
    return ParallelCorpus(tuple(part for name in names for part in _find_parts(name, sides, split)), on_error)


def _find_parts(name: str, sides: Sides, split: str | None) -> list[CorpusPart]:
    if name.startswith("hub:"):
        hub_name = tables.resolve_hub_name(name, split)
        return [_make_table_part(f"hub:{hub_name}", sides, lambda: tables.open_hub_table(hub_name))]
    files = dataset_files.find_existing(name)
    for path in files:
        if not _is_table(path):
            raise InputError(
                f"{path}: its suffix is none of {', '.join(TABLE_SUFFIXES)}, so it is one side of parallel text; name "
                f"both files, as in [{path}, OTHER]"
            )
    if files:
        return [_make_file_part(path, sides) for path in files]
    if part := dataset_files.find_split(name, split, lambda path: _find_split(path, sides)):
        return [part]
    raise _corpus_not_found(name, split, sides)


def _find_split(path: Path, sides: Sides) -> CorpusPart | None:
    """The split of a folder: two text files, a table, or a file with bars."""
    source, target = (dataset_files.find_with_suffix(path, [f".{side}"]) for side in sides)
    if source and target:
        return _make_text_part(source[0], target[0])
    if files := dataset_files.find_with_suffix(path, TABLE_SUFFIXES):
        return _make_file_part(files[0], sides)
    for columns in ((1, 2), (2, 1)):
        suffix = f".{sides[columns[0] - 1]}-{sides[columns[1] - 1]}.txt"
        if files := dataset_files.find_with_suffix(path, [suffix]):
            return CorpusPart(f"{files[0]} {columns}", functools.partial(_read_bars, files[0], columns), (files[0],))
    return None


def _is_table(path: Path) -> bool:
    return file_suffix(path) in TABLE_SUFFIXES


def _corpus_not_found(name: str, split: str | None, sides: Sides) -> InputError:
    for path in dataset_files.search_paths(name):
        if not path.is_dir() and path.name and any(path.parent.glob(f"{glob.escape(path.name)}.*")):
            name, split = str(path.parent), path.name  # the split exists, but not for these sides
            break
    missing = f"{split}.{sides[0]} and {split}.{sides[1]}" if split else "a split"
    hint = "and as source and target the suffixes or columns"
    return dataset_files.dataset_not_found(name, split, f"is a folder and does not contain {missing}", hint)


# ---------------------------------------------------------------------------------------------------- reading


def _make_text_part(source: Path, target: Path) -> CorpusPart:
    return CorpusPart(f"{source} {target}", functools.partial(_read_text_files, source, target), (source, target))


def _make_file_part(path: Path, sides: Sides) -> CorpusPart:
    return _make_table_part(str(path), sides, lambda: tables.open_table(path), (path,))


def _make_table_part(
    name: str, sides: Sides, open_table: Callable[[], Table], files: tuple[Path, ...] = ()
) -> CorpusPart:
    return CorpusPart(f"{name} {sides}", functools.partial(_read_table, open_table, sides), files)


def _read_table(open_table: Callable[[], Table], sides: Sides) -> ExampleIterator:
    table = open_table()
    columns, header = _find_columns(table, sides)
    if isinstance(table, DelimitedTable) and not header and all(isinstance(column, int) for column in columns):
        _check_no_header(table, open_table, sides, columns)
    return _read_pairs(table, columns, header)


def _read_bars(path: Path, columns: Sides) -> ExampleIterator:
    """Read ``source ||| target``, the input format of word aligners. Columns are given by number only."""
    table = DelimitedTable(path, tables.iter_delimited_rows(path, "|||"))
    return _read_pairs(table, *_find_columns(table, columns))


def _read_pairs(table: Table, columns: Sides, header: bool | None = None) -> ExampleIterator:
    for row in table.read({"source": columns[0], "target": columns[1]}, header):
        if isinstance(row, InvalidExample):
            yield row
        else:
            yield make_example(row.values["source"], row.values["target"], row.location)


def _read_text_files(source: Path, target: Path) -> ExampleIterator:
    """Read two text files: line n of one is the translation of line n of the other."""
    source_lines, target_lines = read_lines(source), read_lines(target)
    exhausted = object()
    lines = itertools.zip_longest(source_lines, target_lines, fillvalue=exhausted)
    for line_number, (source_line, target_line) in enumerate(lines, 1):
        if source_line is exhausted or target_line is exhausted:
            total = line_number + sum(1 for _ in (target_lines if source_line is exhausted else source_lines))
            counts = (line_number - 1, total) if source_line is exhausted else (total, line_number - 1)
            raise InputError(
                f"{source} has {counts[0]} lines and {target} has {counts[1]}; line n of one must be the "
                "translation of line n of the other, and an extra line shifts all lines after it"
            )
        if source_line is None or target_line is None:
            yield line_too_long(source, line_number)
        else:
            yield make_example(source_line, target_line, f"{source}:{line_number}")


# ------------------------------------------------------------------------------------------- columns of a table


def _find_columns(table: Table, sides: Sides) -> tuple[Sides, bool | None]:
    """The columns of the two sides, and whether the first line is a header; None: if columns are given by name."""
    names = table.column_names
    requested = [side for side in sides if isinstance(side, str)]
    usual = next((pair for pair in USUAL_COLUMNS if set(pair) <= set(names)), None)
    if isinstance(table, JsonTable) and len(requested) < 2:  # keys have no numbers
        if usual is None and names:
            raise _unknown_keys(table)
        return usual or sides, None
    if not requested:
        selected = {names[side - 1] for side in sides if isinstance(side, int) and 1 <= side <= len(names)}
        return sides, any(selected == set(pair) for pair in USUAL_COLUMNS) or None
    if len(requested) == 2 and not set(requested) <= set(names):
        if usual is not None:
            return usual, None
        if isinstance(table, DelimitedTable) and len(names) == 2 and not set(requested) & set(names):
            return (1, 2), None
    return sides, None


def _unknown_keys(table: Table) -> InputError:
    names = [name for name in table.column_names if name != tables.NESTED_COLUMN]
    source, target = names if len(names) == 2 else ("…", "…")
    return InputError(
        f"{table.name}: which keys hold the two sides? The keys are: {', '.join(names[:8]) or 'none'}. "
        f"Name the keys: data.source={source} data.target={target}"
    )


def _check_no_header(table: Table, open_table: Callable[[], Table], sides: Sides, columns: Sides) -> None:
    """Warn if the first line is used as a pair but looks like a header; raise if other names were requested.

    Names may be requested for a table without a header, because they are also the names of languages.
    """
    names = table.column_names
    if not all(isinstance(column, int) and 1 <= column <= len(names) for column in columns):
        return
    first, second = (names[int(column) - 1] for column in columns)
    requested = [side for side in sides if isinstance(side, str)]
    is_header = look_like_column_names([first, second], requested)
    if is_header and requested:
        raise InputError(
            f"{table.name} has no columns {' and '.join(map(repr, requested))}; its first line is {first!r}, "
            f"{second!r}. If that is a header, name its columns: data.source={first} data.target={second}. "
            "If it is a pair, put a header above it, or give the numbers of the columns, starting at 1"
        )
    sample = itertools.islice(_read_pairs(open_table(), columns), NUM_SAMPLED_LINES)
    rows = ([pair.source, pair.target] for pair in sample if isinstance(pair, TranslationExample))
    if is_header or differs_from_rows([first, second], rows):
        warnings.warn(
            f"{table.name}: the first line, {first!r} and {second!r}, is used as a pair; name the columns "
            f"(data.source={first} data.target={second}) if it is a header",
            stacklevel=2,
        )
