"""Documents of running text, one after the other: what BERT is pretrained on.

A file is one of ::

    .txt      a paragraph or a sentence a line, and an empty line between documents
    .jsonl    a JSON object a line: a document, as its field "text"
    .json     the SQuAD format, of which the articles are taken and the questions left

each of them also gzipped; or any table (see :mod:`jumok.data.tables`), if one says which column is the text.
Short texts, as reviews are, make a document together, so many at a time. Nothing is held in memory but the
document at hand.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jumok.data import sources, tables
from jumok.data.files import lines, opened
from jumok.data.formats import TABLES, Flaw, clean, ending, json_rows, too_long
from jumok.data.sources import OnError, Skipped, usable
from jumok.data.tables import Column
from jumok.errors import InputError

__all__ = ["Document", "Documents", "Paragraphs", "Rows", "find"]


MOST_LINES = 10_000  # of a document; what goes on behind them is another one, and memory stays small


@dataclass(frozen=True, slots=True)
class Document:
    """A text in paragraphs, and where it was found."""

    paragraphs: tuple[str, ...]
    where: str

    @property
    def text(self) -> str:
        return "\n".join(self.paragraphs)


@dataclass(frozen=True)
class Rows:
    """Which column of a table is text, and how many rows make a document."""

    column: Column
    together: int = 1


@dataclass(frozen=True)
class Documents:
    """The documents of some files, read anew from the beginning every time that one asks for them."""

    files: tuple[Path, ...]
    on_error: OnError = "stop"
    rows: Rows | None = None  # the files are tables
    name: str = ""  # of what ``keep`` keeps
    keep: Callable[[Document], bool] | None = None

    def read(self, skipped: Skipped | None = None) -> Iterator[Document]:
        """The documents in order. Flaws are an error, or, with ``on_error="skip"``, counted."""
        skipped = Skipped() if skipped is None else skipped
        some = False
        found = itertools.chain.from_iterable(map(self._of_file, self.files))
        for document in usable(found, self.on_error, skipped):
            some = True
            if self.keep is None or self.keep(document):
                yield document
        if not some:
            raise InputError(f"{', '.join(map(str, self.files))}: no documents; {skipped}")

    def __iter__(self) -> Iterator[Document]:
        return self.read()

    def only(self, name: str, keep: Callable[[Document], bool]) -> Documents:
        """Some of them; ``name`` says which."""
        return replace(self, name=name, keep=keep)

    @property
    def fingerprint(self) -> str:
        """Another one when another text would be read: of the names, sizes and times of the files."""
        told = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in self.files]
        rows = [self.rows.column, self.rows.together] if self.rows else None
        return hashlib.sha256(json.dumps([told, self.on_error, self.name, rows]).encode()).hexdigest()

    def _of_file(self, path: Path) -> Iterator[Document | Flaw]:
        return READERS[ending(path)](path) if self.rows is None else _table(path, self.rows)


@dataclass(frozen=True)
class Paragraphs(Iterable[str]):
    """The paragraphs of the first documents, as often as one goes through them."""

    documents: Iterable[Document]
    first: int

    def __iter__(self) -> Iterator[str]:
        for document in itertools.islice(self.documents, self.first):
            yield from document.paragraphs


def find(
    where: str | Sequence[str],
    *,
    split: str | None = None,
    on_error: OnError = "stop",
    rows: Rows | None = None,
) -> Documents:
    """The documents that a recipe means: files, patterns, or names of data sets, as in ``wiki_en/text``."""
    known = list(READERS if rows is None else TABLES)
    files = sources.files(where, known, split)
    for file in files:
        if ending(file) not in known:
            of_table = "; of a table, data.text names the column" if ending(file) in TABLES else ""
            raise InputError(f"{file}: documents come as {', '.join(known)}, each of them also .gz{of_table}")
    return Documents(tuple(files), on_error, rows)


def _text(path: Path) -> Iterator[Document | Flaw]:
    """Lines, with an empty one between documents. A line that cannot be used spoils no other."""
    paragraphs: list[str] = []
    begin = 1
    for number, line in enumerate(itertools.chain(lines(path), [""]), 1):
        if line is None:
            yield too_long(path, number)
        elif line and not line.isspace():
            told = clean(line, "text", f"{path}:{number}")
            if isinstance(told, Flaw):
                yield told
            else:
                begin = begin if paragraphs else number
                paragraphs.append(told)
        if paragraphs and ((line is not None and not line.strip()) or len(paragraphs) == MOST_LINES):
            yield Document(tuple(paragraphs), f"{path}:{begin}")
            paragraphs = []


def _json_lines(path: Path) -> Iterator[Document | Flaw]:
    for where, row in json_rows(path):
        if isinstance(row, Flaw):
            yield row
        elif not isinstance(row, Mapping) or "text" not in row:
            yield Flaw(where, 'no "text"', f"it is {row!r}"[:80])
        else:
            yield _document([row["text"]], where)


def _articles(path: Path) -> Iterator[Document | Flaw]:
    with opened(path) as file:
        try:
            tree = json.loads(file.read())
            found = [
                (str(article.get("title", number)), [one["context"] for one in article["paragraphs"]])
                for number, article in enumerate(tree["data"], 1)
            ]
        except (ValueError, EOFError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is not in SQuAD format: {error!r}") from None
    for title, contexts in found:
        yield _document(contexts, f"{path}, article {title!r}")


def _table(path: Path, rows: Rows) -> Iterator[Document | Flaw]:
    """The texts of a column. One that cannot be used spoils no other."""
    paragraphs: list[str] = []
    begin, count = "", 0
    for record in tables.read(path, [rows.column]):
        one = record if isinstance(record, Flaw) else _document(record.values, record.where)
        if isinstance(one, Flaw):
            yield one
            continue
        begin = begin if paragraphs else one.where
        paragraphs += one.paragraphs
        count += 1
        if count == rows.together:
            yield Document(tuple(paragraphs), begin)
            paragraphs, count = [], 0
    if paragraphs:
        yield Document(tuple(paragraphs), begin)


def _document(texts: Iterable[object], where: str) -> Document | Flaw:
    """A document of texts, whose lines are its paragraphs."""
    paragraphs: list[str] = []
    for text in texts:
        told = clean(text, "text", where)
        if isinstance(told, Flaw):
            return told
        paragraphs += (line.strip() for line in told.split("\n") if line.strip())
    return Document(tuple(paragraphs), where) if paragraphs else Flaw(where, "an empty text")


READERS: dict[str, Callable[[Path], Iterator[Document | Flaw]]] = {
    ".txt": _text,
    ".jsonl": _json_lines,
    ".json": _articles,
}
