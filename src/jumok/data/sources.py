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

from jumok.data import formats
from jumok.data.files import data_folder
from jumok.data.formats import Example, Flaw, Sides, nearest
from jumok.errors import InputError

__all__ = ["Corpus", "Example", "Flaw", "OnError", "Skipped", "files", "find", "usable"]

OnError = Literal["stop", "skip"]
NO_DATA = (".md", ".rst", ".html", ".pdf", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".log", ".zip")
Change = Callable[[str], str]
T = TypeVar("T")


@dataclass
class Skipped:
    """How many examples were left out, by reason, and where the first of each was.

    >>> skipped = Skipped()
    >>> for line in (7, 9):
    ...     skipped.add(Flaw(f"my.tsv:{line}", "an empty target"))
    >>> print(skipped)
    2 left out: 2 × an empty target (first: my.tsv:7)
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, flaw: Flaw) -> None:
        self.counts[flaw.reason] += 1
        self.first.setdefault(flaw.reason, flaw.where)

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        if not self.total:
            return "none left out"
        told = (
            f"{count} × {reason} (first: {self.first[reason]})" for reason, count in self.counts.most_common()
        )
        return f"{self.total} left out: {'; '.join(told)}"


@dataclass(frozen=True)
class Part:
    """One file, pair of files or other origin of a corpus. ``name`` tells it from every other."""

    name: str
    read: Callable[[], Iterator[Example | Flaw]]
    files: tuple[Path, ...] = ()  # what the text depends on


@dataclass(frozen=True)
class Corpus:
    """Parallel text somewhere, read anew from its beginning every time that one asks for it."""

    parts: tuple[Part, ...]
    on_error: OnError = "stop"

    @classmethod
    def made(cls, name: str, make: Callable[[], Iterable[tuple[str, str]]]) -> Corpus:
        """Of pairs that a function makes, always the same ones; ``name`` says all that they depend on.

        >>> corpus = Corpus.made("squares", lambda: ((f"{n} times {n}", str(n * n)) for n in range(3)))
        >>> list(corpus)[2]
        Example(source='2 times 2', target='4', where='squares:3')
        """

        def read() -> Iterator[Example | Flaw]:
            for number, (source, target) in enumerate(make(), 1):
                yield formats.example(source, target, f"{name}:{number}")

        return cls((Part(name, read),))

    def read(self, skipped: Skipped | None = None) -> Iterator[Example]:
        """The examples in order. Flaws are an error, or, with ``on_error="skip"``, counted in ``skipped``."""
        skipped = Skipped() if skipped is None else skipped
        some = False
        for one in usable((found for part in self.parts for found in part.read()), self.on_error, skipped):
            some = True
            yield one
        if not some:
            raise InputError(f"{', '.join(part.name for part in self.parts)}: no examples; {skipped}")

    def __iter__(self) -> Iterator[Example]:
        return self.read()

    def prepared(self, name: str, source: Change, target: Change) -> Corpus:
        """The same with every text changed by a function of its side; ``name`` says what they do."""

        def changed(part: Part) -> Part:
            def read() -> Iterator[Example | Flaw]:
                for one in part.read():
                    if isinstance(one, Example):
                        one = formats.example(source(one.source), target(one.target), one.where)
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


def usable(found: Iterable[T | Flaw], on_error: OnError, skipped: Skipped) -> Iterator[T]:
    """What can be used. Flaws are an error, or, with ``on_error="skip"``, counted."""
    for one in found:
        if not isinstance(one, Flaw):
            yield one
        elif one.reason == formats.BLANK:
            continue
        elif on_error == "skip":
            skipped.add(one)
        else:
            raise InputError(f"{one}. Mend it, or leave such lines out and counted: data.on_error=skip")


def files(where: str | Sequence[str], endings: Sequence[str], split: str | None = None) -> list[Path]:
    """The files that a recipe means, of data sets whose examples are in one file each, not in two.

    ``where`` is a file, a pattern (``jaquad/train/*``), a split of a folder (``sst2/train``), or a list of
    these, here or under JUMOK_DATA; of a folder that is named alone, ``split`` is taken. A split is a file
    with one of the endings, gzipped or not.
    """
    found = []
    for name in [where] if isinstance(where, str) else where:
        named: Path | None = None
        for path in (Path(name), data_folder() / name):
            if path.is_file():
                some = [path]
            elif path.is_dir():
                named = named or path
                some = _with_ending(path / split, endings) if split else []
            elif not (some := [Path(one) for one in sorted(glob.glob(str(path))) if Path(one).is_file()]):
                some = _with_ending(path, endings)
            found += some
            if some:
                break
        else:
            if named is None:
                raise InputError(_unknown(name))
            asked = f"no {split}{endings[0]}" if split else "several splits"
            raise InputError(
                f"{named} is a folder with {asked}; it holds: {_listed(split or '', _names(named))}. "
                f"Name one of its splits, as in {named.name}/train, or all its files: {name}/*"
            )
    if not found:
        raise InputError("there is no file named to read from")
    return found


def _with_ending(path: Path, endings: Sequence[str]) -> list[Path]:
    """The first file of this name that has one of the endings."""
    if not path.name:
        return []
    there = (path.with_name(f"{path.name}{ending}{zipped}") for ending in endings for zipped in ("", ".gz"))
    return [one for one in there if one.is_file()][:1]


def find(
    where: str | Sequence[str],
    *,
    source: str | int,
    target: str | int,
    split: str | None = None,
    on_error: OnError = "stop",
) -> Corpus:
    """The corpus that a recipe means. ``split`` is the one to take of a folder that is named without one."""
    sides = (source, target)
    names = [where] if isinstance(where, str) else list(where)
    if not names:
        raise InputError("there is no file named to read from")
    texts = [path for path in map(_file, names) if path and _is_text(path)]
    if len(names) == 2 and len(texts) == 2:
        return Corpus((_parallel(*texts),), on_error)
    if len(names) == 2 and len(texts) == 1:  # one side of parallel text is there: the other one is meant
        for name in names:
            if _file(name) is None:
                raise InputError(_unknown(name))
    return Corpus(tuple(part for name in names for part in _parts(name, sides, split)), on_error)


def _file(name: str) -> Path | None:
    """The file of this name, here or among the data sets."""
    return next((path for path in (Path(name), data_folder() / name) if path.is_file()), None)


def _parts(name: str, sides: Sides, split: str | None) -> list[Part]:
    if name.startswith("hub:"):
        known = name.removeprefix("hub:")
        if split and known.count(":") < 2:
            known = f"{known}{':' * (2 - known.count(':'))}{split}"
        return [Part(f"hub:{known} {sides}", functools.partial(formats.hub, known, sides))]
    if file := _file(name):
        return [_table(file, sides)]
    named = None
    for path in (Path(name), data_folder() / name):
        if found := [Path(one) for one in sorted(glob.glob(str(path))) if Path(one).is_file()]:
            return [_table(one, sides) for one in found]
        if path.is_dir():
            folder, wanted = path, split
        elif path.name and any(path.parent.glob(f"{glob.escape(path.name)}.*")):
            folder, wanted = path.parent, path.name
        else:
            continue
        if wanted and (part := _split(folder, wanted, sides)):
            return [part]
        named = named or (folder, wanted)
    raise InputError(_no_split(*named, sides) if named else _unknown(name))


def _split(folder: Path, split: str, sides: Sides) -> Part | None:
    """The split of a folder: two files of text, one table, or one file with bars."""

    def there(name: str) -> Path | None:
        return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)

    one, other = (there(f"{split}.{side}") for side in sides)
    if one and other:
        return _parallel(one, other)
    for ending in formats.TABLES:
        if path := there(f"{split}{ending}"):
            return _table(path, sides)
    for columns in ((1, 2), (2, 1)):
        if path := there(f"{split}.{sides[columns[0] - 1]}-{sides[columns[1] - 1]}.txt"):
            return Part(f"{path} {columns}", functools.partial(formats.bars, path, columns), (path,))
    return None


def _table(path: Path, sides: Sides) -> Part:
    if _is_text(path):
        known = ", ".join(formats.TABLES)
        raise InputError(
            f"{path}: its ending is none of {known}, so it is one side of parallel text; "
            f"name both files, as in [{path}, OTHER]"
        )
    return Part(f"{path} {sides}", functools.partial(formats.table, path, sides), (path,))


def _parallel(source: Path, target: Path) -> Part:
    return Part(f"{source} {target}", functools.partial(formats.parallel, source, target), (source, target))


def _is_text(path: Path) -> bool:
    return formats.ending(path) not in formats.TABLES


def _no_split(folder: Path, split: str | None, sides: Sides) -> str:
    """There is a folder, but not what was asked for in it; what there is, the nearest first."""
    there = [name for name in _names(folder) if (folder / name).is_file()]
    asked = f"{split}.{sides[0]} and {split}.{sides[1]}" if split else "a split"
    return (
        f"{folder} is a folder, and does not hold {asked}; it holds: {_listed(split or '', there)}. "
        f"Name one of its splits, as in {folder.name}/train, and as source and target the endings or columns"
    )


def _unknown(name: str) -> str:
    """There is no such thing; what there is, the nearest first."""
    path, root = Path(name), data_folder()
    for folder in (path.parent, root / path.parent):
        if path.parent != Path() and folder.is_dir():
            return f"there is no {name}; {folder} holds: {_listed(path.name, _names(folder))}"
    told = f"there is no file or data set {name!r}"
    if near := difflib.get_close_matches(name, _names(Path()), n=3):
        told += f"; here is: {', '.join(near)}"
    if root.is_dir():
        told += f"; the data sets in {root} are: {_listed(name, _names(root))}"
    else:
        told += f"; nor is there a folder {root} of data sets (JUMOK_DATA may name one)"
    return f"{told}. A data set of the Hugging Face hub is written hub:{name}"


def _names(folder: Path) -> list[str]:
    """The folders and the files of data in a folder."""
    return sorted(path.name for path in folder.iterdir() if _is_data(path))


def _is_data(path: Path) -> bool:
    """Whether it is a folder, or a file that may hold examples: not one for people or programs to read."""
    if path.name.lower().startswith((".", "readme", "licence", "license")):
        return False
    return path.is_dir() or (path.suffix != "" and path.suffix.lower() not in NO_DATA)


def _listed(name: str, there: list[str]) -> str:
    shown = ", ".join(nearest(name, there)[:10])
    return f"{shown}, and {len(there) - 10} more" if len(there) > 10 else shown or "nothing"
