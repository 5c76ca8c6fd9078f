"""Parallel text by name: from what a recipe says to examples, one after the other.

A recipe says where the text is, and what its two sides are called::

    train: my.tsv                     a table: .tsv, .csv, .jsonl or .parquet, each of them also .gz
    train: [corpus.en, corpus.de]     two files of text, line by line
    train: parts/*.tsv                several tables (or a list of any of these), one after the other
    train: multi30k/train             the split "train" in a folder, here or under JUMOK_DATA: a table, or two
                                      files that end in the names of the sides (train.en.gz, train.de.gz),
                                      or one with bars, source ||| target (train.en-de.txt)
    train: hub:wmt/wmt16:de-en:train  the Hugging Face hub: NAME[@REVISION][:CONFIGURATION[:SPLIT]]
    source: en                        a file ending, a column's name or its number (from 1), a language
    target: de

Nothing is held in memory but the line at hand. Empty lines of tables and white space around a sentence mean
nothing; whatever else cannot be used is a *flaw*: it stops the reading, or is skipped and counted.
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

__all__ = [
    "InvalidExample",
    "OnError",
    "ParallelCorpus",
    "SkippedExamples",
    "TranslationExample",
    "find_corpus",
    "find_files",
    "skip_invalid",
]

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
    """How many examples were left out, by reason, and where the first of each was.

    >>> skipped = SkippedExamples()
    >>> for line in (7, 9):
    ...     skipped.add(Flaw(f"my.tsv:{line}", "an empty target"))
    >>> print(skipped)
    2 left out: 2 × an empty target (first: my.tsv:7)
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
            return "none left out"
        told = (
            f"{count} × {reason} (first: {self.first_locations[reason]})"
            for reason, count in self.counts.most_common()
        )
        return f"{self.total} left out: {'; '.join(told)}"


@dataclass(frozen=True)
class CorpusPart:
    """One file, pair of files or other origin of a corpus. ``name`` tells it from every other."""

    name: str
    read: Callable[[], Iterator[TranslationExample | InvalidExample]]
    files: tuple[Path, ...] = ()  # what the text depends on


@dataclass(frozen=True)
class ParallelCorpus:
    """Parallel text somewhere, read anew from its beginning every time that one asks for it."""

    parts: tuple[CorpusPart, ...]
    on_error: OnError = "stop"

    @classmethod
    def from_pairs(cls, name: str, generate: Callable[[], Iterable[tuple[str, str]]]) -> ParallelCorpus:
        """Of pairs that a function makes, always the same ones; ``name`` says all that they depend on.

        >>> corpus = ParallelCorpus.from_pairs("squares", lambda: ((f"{n} times {n}", str(n * n)) for n in range(3)))
        >>> list(corpus)[2]
        Example(source='2 times 2', target='4', where='squares:3')
        """

        def read() -> Iterator[TranslationExample | InvalidExample]:
            for number, (source, target) in enumerate(generate(), 1):
                yield readers_formats.make_example(source, target, f"{name}:{number}")

        return cls((CorpusPart(name, read),))

    def read(self, skipped: SkippedExamples | None = None) -> Iterator[TranslationExample]:
        """The examples in order. Flaws are an error, or, with ``on_error="skip"``, counted in ``skipped``."""
        skipped = SkippedExamples() if skipped is None else skipped
        some = False
        for one in skip_invalid(
            (found for part in self.parts for found in part.read()), self.on_error, skipped
        ):
            some = True
            yield one
        if not some:
            raise InputError(f"{', '.join(part.name for part in self.parts)}: no examples; {skipped}")

    def __iter__(self) -> Iterator[TranslationExample]:
        return self.read()

    def map_texts(
        self, name: str, source_function: TextFunction, target_function: TextFunction
    ) -> ParallelCorpus:
        """The same with every text changed by a function of its side; ``name`` says what they do."""

        def changed(part: CorpusPart) -> CorpusPart:
            def read() -> Iterator[TranslationExample | InvalidExample]:
                for one in part.read():
                    if isinstance(one, TranslationExample):
                        one = readers_formats.make_example(
                            source_function(one.source), target_function(one.target), one.location
                        )
                    yield one

            return replace(part, name=f"{part.name}, {name}", read=read)

        return replace(self, parts=tuple(map(changed, self.parts)))

    @property
    def fingerprint(self) -> str:
        """Another one when another text would be read: of the names, sizes and times of the files."""
        told = [
            [part.name, *([file.stat().st_size, file.stat().st_mtime_ns] for file in part.files)]
            for part in self.parts
        ]
        return hashlib.sha256(json.dumps([told, self.on_error]).encode()).hexdigest()


def skip_invalid(
    examples: Iterable[T | InvalidExample], on_error: OnError, skipped: SkippedExamples
) -> Iterator[T]:
    """What can be used. Flaws are an error, or, with ``on_error="skip"``, counted."""
    for one in examples:
        if not isinstance(one, InvalidExample):
            yield one
        elif one.reason == readers_formats.BLANK_LINE:
            continue
        elif on_error == "skip":
            skipped.add(one)
        else:
            raise InputError(f"{one}. Mend it, or leave such lines out and counted: data.on_error=skip")


def find_files(dataset: str | Sequence[str], suffixes: Sequence[str], split: str | None = None) -> list[Path]:
    """The files that a recipe means, of data sets whose examples are in one file each, not in two.

    ``dataset`` is a file, a pattern (``jaquad/train/*``), a split of a folder (``sst2/train``), or a list of
    these, here or under JUMOK_DATA; of a folder that is named alone, ``split`` is taken. A split is a file
    with one of the endings, gzipped or not.
    """
    found = []
    for name in [dataset] if isinstance(dataset, str) else dataset:
        named: Path | None = None
        for path in (Path(name), data_folder() / name):
            if path.is_file():
                some = [path]
            elif path.is_dir():
                named = named or path
                some = _find_with_suffix(path / split, suffixes) if split else []
            elif not (some := [Path(one) for one in sorted(glob.glob(str(path))) if Path(one).is_file()]):
                some = _find_with_suffix(path, suffixes)
            found += some
            if some:
                break
        else:
            if named is None:
                raise InputError(_unknown_dataset_message(name))
            asked = f"no {split}{suffixes[0]}" if split else "several splits"
            raise InputError(
                f"{named} is a folder with {asked}; it holds: {_format_names(split or '', _list_data_names(named))}. "
                f"Name one of its splits, as in {named.name}/train, or all its files: {name}/*"
            )
    if not found:
        raise InputError("there is no file named to read from")
    return found


def _find_with_suffix(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """The first file of this name that has one of the endings."""
    if not path.name:
        return []
    there = (path.with_name(f"{path.name}{ending}{zipped}") for ending in suffixes for zipped in ("", ".gz"))
    return [one for one in there if one.is_file()][:1]


def find_corpus(
    dataset: str | Sequence[str],
    *,
    source: str | int,
    target: str | int,
    split: str | None = None,
    on_error: OnError = "stop",
) -> ParallelCorpus:
    """The corpus that a recipe means. ``split`` is the one to take of a folder that is named without one."""
    sides = (source, target)
    names = [dataset] if isinstance(dataset, str) else list(dataset)
    if not names:
        raise InputError("there is no file named to read from")
    texts = [path for path in map(_find_file, names) if path and _is_plain_text(path)]
    if len(names) == 2 and len(texts) == 2:
        return ParallelCorpus((_make_parallel_part(*texts),), on_error)
    if len(names) == 2 and len(texts) == 1:  # one side of parallel text is there: the other one is meant
        for name in names:
            if _find_file(name) is None:
                raise InputError(_unknown_dataset_message(name))
    return ParallelCorpus(tuple(part for name in names for part in _find_parts(name, sides, split)), on_error)


def _find_file(name: str) -> Path | None:
    """The file of this name, here or among the data sets."""
    return next((path for path in (Path(name), data_folder() / name) if path.is_file()), None)


def _find_parts(name: str, sides: Sides, split: str | None) -> list[CorpusPart]:
    if name.startswith("hub:"):
        known = name.removeprefix("hub:")
        if split and known.count(":") < 2:
            known = f"{known}{':' * (2 - known.count(':'))}{split}"
        return [
            CorpusPart(
                f"hub:{known} {sides}", functools.partial(readers_formats.read_hub_dataset, known, sides)
            )
        ]
    if file := _find_file(name):
        return [_make_table_part(file, sides)]
    named = None
    for path in (Path(name), data_folder() / name):
        if found := [Path(one) for one in sorted(glob.glob(str(path))) if Path(one).is_file()]:
            return [_make_table_part(one, sides) for one in found]
        if path.is_dir():
            folder, wanted = path, split
        elif path.name and any(path.parent.glob(f"{glob.escape(path.name)}.*")):
            folder, wanted = path.parent, path.name
        else:
            continue
        if wanted and (part := _find_split(folder, wanted, sides)):
            return [part]
        named = named or (folder, wanted)
    raise InputError(_missing_split_message(*named, sides) if named else _unknown_dataset_message(name))


def _find_split(folder: Path, split: str, sides: Sides) -> CorpusPart | None:
    """The split of a folder: two files of text, one table, or one file with bars."""

    def there(name: str) -> Path | None:
        return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)

    one, other = (there(f"{split}.{side}") for side in sides)
    if one and other:
        return _make_parallel_part(one, other)
    for ending in readers_formats.TABLE_READERS:
        if path := there(f"{split}{ending}"):
            return _make_table_part(path, sides)
    for columns in ((1, 2), (2, 1)):
        if path := there(f"{split}.{sides[columns[0] - 1]}-{sides[columns[1] - 1]}.txt"):
            return CorpusPart(
                f"{path} {columns}",
                functools.partial(readers_formats.read_bar_separated, path, columns),
                (path,),
            )
    return None


def _make_table_part(path: Path, sides: Sides) -> CorpusPart:
    if _is_plain_text(path):
        known = ", ".join(readers_formats.TABLE_READERS)
        raise InputError(
            f"{path}: its ending is none of {known}, so it is one side of parallel text; "
            f"name both files, as in [{path}, OTHER]"
        )
    return CorpusPart(
        f"{path} {sides}", functools.partial(readers_formats.read_parallel_table, path, sides), (path,)
    )


def _make_parallel_part(source: Path, target: Path) -> CorpusPart:
    return CorpusPart(
        f"{source} {target}",
        functools.partial(readers_formats.read_parallel_files, source, target),
        (source, target),
    )


def _is_plain_text(path: Path) -> bool:
    return readers_formats.file_suffix(path) not in readers_formats.TABLE_READERS


def _missing_split_message(folder: Path, split: str | None, sides: Sides) -> str:
    """There is a folder, but not what was asked for in it; what there is, the nearest first."""
    there = [name for name in _list_data_names(folder) if (folder / name).is_file()]
    asked = f"{split}.{sides[0]} and {split}.{sides[1]}" if split else "a split"
    return (
        f"{folder} is a folder, and does not hold {asked}; it holds: {_format_names(split or '', there)}. "
        f"Name one of its splits, as in {folder.name}/train, and as source and target the endings or columns"
    )


def _unknown_dataset_message(name: str) -> str:
    """There is no such thing; what there is, the nearest first."""
    path, root = Path(name), data_folder()
    for folder in (path.parent, root / path.parent):
        if path.parent != Path() and folder.is_dir():
            return f"there is no {name}; {folder} holds: {_format_names(path.name, _list_data_names(folder))}"
    told = f"there is no file or data set {name!r}"
    if near := difflib.get_close_matches(name, _list_data_names(Path()), n=3):
        told += f"; here is: {', '.join(near)}"
    if root.is_dir():
        told += f"; the data sets in {root} are: {_format_names(name, _list_data_names(root))}"
    else:
        told += f"; nor is there a folder {root} of data sets (JUMOK_DATA may name one)"
    return f"{told}. A data set of the Hugging Face hub is written hub:{name}"


def _list_data_names(folder: Path) -> list[str]:
    """The folders and the files of data in a folder."""
    return sorted(path.name for path in folder.iterdir() if _is_data(path))


def _is_data(path: Path) -> bool:
    """Whether it is a folder, or a file that may hold examples: not one for people or programs to read."""
    if path.name.lower().startswith((".", "readme", "licence", "license")):
        return False
    return path.is_dir() or (path.suffix != "" and path.suffix.lower() not in NON_DATA_SUFFIXES)


def _format_names(name: str, names: list[str]) -> str:
    shown = ", ".join(rank_by_similarity(name, names)[:10])
    return f"{shown}, and {len(names) - 10} more" if len(names) > 10 else shown or "nothing"
