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

import difflib
import functools
import glob
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from jumok.data.readers import formats as readers_formats
from jumok.data.readers.formats import InvalidExample, Sides, TranslationExample, rank_by_similarity
from jumok.data.readers.text_files import data_folder
from jumok.errors import InputError

OnError = Literal["stop", "skip"]
NON_DATA_SUFFIXES = (
    ".md",
    ".rst",
    ".html",
    ".pdf",
    ".py",
    ".ipynb",
    ".sh",
    ".yaml",
    ".yml",
    ".toml",
    ".log",
    ".zip",
)
TextFunction = Callable[[str], str]
T = TypeVar("T")


@dataclass
class SkippedExamples:
    """The number of skipped examples by reason, and the location of the first of each.

    >>> skipped = SkippedExamples()
    >>> for line in (7, 9):
    ...     skipped.add(InvalidExample(f"my.tsv:{line}", "an empty target"))
    >>> print(skipped)
    2 skipped: 2 × an empty target (first: my.tsv:7)
    """

    counts: Counter[str] = field(default_factory=Counter)
    first_locations: dict[str, str] = field(default_factory=dict)

    def add(self, invalid: InvalidExample) -> None:
        self.counts[invalid.reason] += 1
        self.first_locations.setdefault(invalid.reason, invalid.location)

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        if not self.total:
            return "none skipped"
        reasons = (
            f"{count} × {reason} (first: {self.first_locations[reason]})" for reason, count in self.counts.most_common()
        )
        return f"{self.total} skipped: {'; '.join(reasons)}"


@dataclass(frozen=True)
class CorpusPart:
    """One file, pair of files or other source of a corpus. ``name`` identifies it."""

    name: str
    read: Callable[[], Iterator[TranslationExample | InvalidExample]]
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

        def read() -> Iterator[TranslationExample | InvalidExample]:
            for number, (source, target) in enumerate(generate(), 1):
                yield readers_formats.make_example(source, target, f"{name}:{number}")

        return cls((CorpusPart(name, read),))

    def read(self, skipped: SkippedExamples | None = None) -> Iterator[TranslationExample]:
        """The examples in order.

        Invalid ones raise, or, with ``on_error="skip"``, are counted in ``skipped``.
        """
        skipped = SkippedExamples() if skipped is None else skipped
        is_empty = True
        examples = (example for part in self.parts for example in part.read())
        for example in skip_invalid(examples, self.on_error, skipped):
            is_empty = False
            yield example
        if is_empty:
            raise InputError(f"{', '.join(part.name for part in self.parts)}: no examples; {skipped}")

    def __iter__(self) -> Iterator[TranslationExample]:
        return self.read()

    def map_texts(self, name: str, source_function: TextFunction, target_function: TextFunction) -> ParallelCorpus:
        """The same corpus with a function applied to each text. ``name`` must identify the functions."""

        def map_part(part: CorpusPart) -> CorpusPart:
            def read() -> Iterator[TranslationExample | InvalidExample]:
                for example in part.read():
                    if isinstance(example, InvalidExample):
                        yield example
                    else:
                        source, target = source_function(example.source), target_function(example.target)
                        yield readers_formats.make_example(source, target, example.location)

            return replace(part, name=f"{part.name}, {name}", read=read)

        return replace(self, parts=tuple(map(map_part, self.parts)))

    @property
    def fingerprint(self) -> str:
        """Identifies the text, by the names, sizes and modification times of the files."""
        identity = [[part.name, *map(file_identity, part.files)] for part in self.parts]
        return hashlib.sha256(json.dumps([identity, self.on_error]).encode()).hexdigest()


def file_identity(path: Path) -> list[int]:
    """The size and the modification time of a file, by which fingerprints detect a change."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def skip_invalid(examples: Iterable[T | InvalidExample], on_error: OnError, skipped: SkippedExamples) -> Iterator[T]:
    """The valid examples. Invalid ones raise, or, with ``on_error="skip"``, are counted in ``skipped``."""
    for example in examples:
        if not isinstance(example, InvalidExample):
            yield example
        elif example.reason == readers_formats.BLANK_LINE:
            continue
        elif on_error == "skip":
            skipped.add(example)
        else:
            raise InputError(f"{example}. Fix it, or skip and count such examples: data.on_error=skip")


def find_files(dataset: str | Sequence[str], suffixes: Sequence[str], split: str | None = None) -> list[Path]:
    """The files of a data set whose examples are each in a single file.

    ``dataset`` is a file, a pattern (``jaquad/train/*``), a split of a folder (``sst2/train``), or a list of
    these, here or under JUMOK_DATA. If it is just a folder, ``split`` is used. A split is a file with one of
    the suffixes, gzipped or not.
    """
    files: list[Path] = []
    for name in [dataset] if isinstance(dataset, str) else dataset:
        folder: Path | None = None
        for path in (Path(name), data_folder() / name):
            if path.is_file():
                matches = [path]
            elif path.is_dir():
                folder = folder or path
                matches = _find_with_suffix(path / split, suffixes) if split else []
            else:
                matches = _glob_files(path) or _find_with_suffix(path, suffixes)
            files += matches
            if matches:
                break
        else:
            if folder is None:
                raise InputError(_unknown_dataset_message(name))
            problem = f"no {split}{suffixes[0]}" if split else "several splits"
            contents = _format_names(split or "", _list_data_names(folder))
            raise InputError(
                f"{folder} is a folder with {problem}; it contains: {contents}. Name one of its splits, as "
                f"in {folder.name}/train, or all its files: {name}/*"
            )
    if not files:
        raise InputError("there is no file to read; name at least one")
    return files


def _glob_files(pattern: Path) -> list[Path]:
    return [path for path in map(Path, sorted(glob.glob(str(pattern)))) if path.is_file()]


def _find_with_suffix(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """The first file of this name that has one of the suffixes."""
    if not path.name:
        return []
    names = (f"{path.name}{suffix}{gzip_suffix}" for suffix in suffixes for gzip_suffix in ("", ".gz"))
    return [candidate for candidate in map(path.with_name, names) if candidate.is_file()][:1]


def find_corpus(
    dataset: str | Sequence[str],
    *,
    source: str | int,
    target: str | int,
    split: str | None = None,
    on_error: OnError = "stop",
) -> ParallelCorpus:
    """The corpus that a recipe names. ``split`` is used for folders that are named without a split."""
    sides = (source, target)
    names = [dataset] if isinstance(dataset, str) else list(dataset)
    if not names:
        raise InputError("there is no file to read; name at least one")
    text_files = [path for path in map(_find_file, names) if path and _is_plain_text(path)]
    if len(names) == 2 and len(text_files) == 2:
        return ParallelCorpus((_make_parallel_part(*text_files),), on_error)
    if len(names) == 2 and len(text_files) == 1:  # the other name is probably misspelled
        for name in names:
            if _find_file(name) is None:
                raise InputError(_unknown_dataset_message(name))
    return ParallelCorpus(tuple(part for name in names for part in _find_parts(name, sides, split)), on_error)


def _find_file(name: str) -> Path | None:
    """The file of this name, here or under JUMOK_DATA."""
    return next((path for path in (Path(name), data_folder() / name) if path.is_file()), None)


def _find_parts(name: str, sides: Sides, split: str | None) -> list[CorpusPart]:
    if name.startswith("hub:"):
        hub_name = readers_formats.resolve_hub_name(name, split)
        read = functools.partial(readers_formats.read_hub_dataset, hub_name, sides)
        return [CorpusPart(f"hub:{hub_name} {sides}", read)]
    if file := _find_file(name):
        return [_make_table_part(file, sides)]
    incomplete = None
    for path in (Path(name), data_folder() / name):
        if files := _glob_files(path):
            return [_make_table_part(file, sides) for file in files]
        if path.is_dir():
            folder, folder_split = path, split
        elif path.name and any(path.parent.glob(f"{glob.escape(path.name)}.*")):
            folder, folder_split = path.parent, path.name
        else:
            continue
        if folder_split and (part := _find_split(folder, folder_split, sides)):
            return [part]
        incomplete = incomplete or (folder, folder_split)
    raise InputError(_missing_split_message(*incomplete, sides) if incomplete else _unknown_dataset_message(name))


def _find_split(folder: Path, split: str, sides: Sides) -> CorpusPart | None:
    """The split of a folder: two text files, a table, or a file with bars."""

    def find(name: str) -> Path | None:
        return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)

    source, target = (find(f"{split}.{side}") for side in sides)
    if source and target:
        return _make_parallel_part(source, target)
    for suffix in readers_formats.TABLE_READERS:
        if path := find(f"{split}{suffix}"):
            return _make_table_part(path, sides)
    for columns in ((1, 2), (2, 1)):
        if path := find(f"{split}.{sides[columns[0] - 1]}-{sides[columns[1] - 1]}.txt"):
            read = functools.partial(readers_formats.read_bar_separated, path, columns)
            return CorpusPart(f"{path} {columns}", read, (path,))
    return None


def _make_table_part(path: Path, sides: Sides) -> CorpusPart:
    if _is_plain_text(path):
        suffixes = ", ".join(readers_formats.TABLE_READERS)
        raise InputError(
            f"{path}: its suffix is none of {suffixes}, so it is one side of parallel text; name both "
            f"files, as in [{path}, OTHER]"
        )
    read = functools.partial(readers_formats.read_parallel_table, path, sides)
    return CorpusPart(f"{path} {sides}", read, (path,))


def _make_parallel_part(source: Path, target: Path) -> CorpusPart:
    read = functools.partial(readers_formats.read_parallel_files, source, target)
    return CorpusPart(f"{source} {target}", read, (source, target))


def _is_plain_text(path: Path) -> bool:
    return readers_formats.file_suffix(path) not in readers_formats.TABLE_READERS


def _missing_split_message(folder: Path, split: str | None, sides: Sides) -> str:
    """The message for a folder without the requested split; it lists the contents, the most similar first."""
    files = [name for name in _list_data_names(folder) if (folder / name).is_file()]
    missing = f"{split}.{sides[0]} and {split}.{sides[1]}" if split else "a split"
    return (
        f"{folder} is a folder and does not contain {missing}; it contains: "
        f"{_format_names(split or '', files)}. Name one of its splits, as in {folder.name}/train, and as "
        "source and target the suffixes or columns"
    )


def _unknown_dataset_message(name: str) -> str:
    """The message for a missing data set; it lists existing ones, the most similar first."""
    path, root = Path(name), data_folder()
    for folder in (path.parent, root / path.parent):
        if path.parent != Path() and folder.is_dir():
            contents = _format_names(path.name, _list_data_names(folder))
            return f"there is no {name}; {folder} contains: {contents}"
    message = f"there is no file or data set {name!r}"
    if similar := difflib.get_close_matches(name, _list_data_names(Path()), n=3):
        message += f"; similar names here: {', '.join(similar)}"
    if root.is_dir():
        message += f"; the data sets in {root} are: {_format_names(name, _list_data_names(root))}"
    else:
        message += f"; there is no folder {root} of data sets either (set JUMOK_DATA to use another one)"
    return f"{message}. For a data set of the Hugging Face hub, write hub:{name}"


def _list_data_names(folder: Path) -> list[str]:
    """The folders and the data files in a folder."""
    return sorted(path.name for path in folder.iterdir() if _is_data(path))


def _is_data(path: Path) -> bool:
    """Whether a path is a folder or may contain examples, unlike documentation and programs."""
    if path.name.lower().startswith((".", "readme", "licence", "license")):
        return False
    return path.is_dir() or (path.suffix != "" and path.suffix.lower() not in NON_DATA_SUFFIXES)


def _format_names(name: str, names: list[str]) -> str:
    shown = ", ".join(rank_by_similarity(name, names)[:10])
    return f"{shown}, and {len(names) - 10} more" if len(names) > 10 else shown or "nothing"
