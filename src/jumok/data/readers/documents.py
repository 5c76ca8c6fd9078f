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

from jumok.data.readers import parallel_corpus, tables
from jumok.data.readers.formats import (
    TABLE_READERS,
    InvalidExample,
    clean_text,
    file_suffix,
    iter_json_rows,
    line_too_long,
)
from jumok.data.readers.parallel_corpus import OnError, SkippedExamples, skip_invalid
from jumok.data.readers.tables import ColumnSpec
from jumok.data.readers.text_files import open_decompressed, read_lines
from jumok.errors import InputError

__all__ = ["DocumentCorpus", "DocumentRows", "FirstParagraphs", "TextDocument", "find_documents"]


MAX_DOCUMENT_LINES = 10_000  # of a document; what goes on behind them is another one, and memory stays small


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A text in paragraphs, and where it was found."""

    paragraphs: tuple[str, ...]
    location: str

    @property
    def text(self) -> str:
        return "\n".join(self.paragraphs)


@dataclass(frozen=True)
class DocumentRows:
    """Which column of a table is text, and how many rows make a document."""

    column: ColumnSpec
    rows_per_document: int = 1


@dataclass(frozen=True)
class DocumentCorpus:
    """The documents of some files, read anew from the beginning every time that one asks for them."""

    files: tuple[Path, ...]
    on_error: OnError = "stop"
    rows: DocumentRows | None = None  # the files are tables
    filter_name: str = ""  # of what ``predicate`` keeps
    predicate: Callable[[TextDocument], bool] | None = None

    def read(self, skipped: SkippedExamples | None = None) -> Iterator[TextDocument]:
        """The documents in order. Flaws are an error, or, with ``on_error="skip"``, counted."""
        skipped = SkippedExamples() if skipped is None else skipped
        some = False
        found = itertools.chain.from_iterable(map(self._read_file, self.files))
        for document in skip_invalid(found, self.on_error, skipped):
            some = True
            if self.predicate is None or self.predicate(document):
                yield document
        if not some:
            raise InputError(f"{', '.join(map(str, self.files))}: no documents; {skipped}")

    def __iter__(self) -> Iterator[TextDocument]:
        return self.read()

    def filter(self, name: str, predicate: Callable[[TextDocument], bool]) -> DocumentCorpus:
        """Some of them; ``filter_name`` says which."""
        return replace(self, filter_name=name, predicate=predicate)

    @property
    def fingerprint(self) -> str:
        """Another one when another text would be read: of the names, sizes and times of the files."""
        told = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in self.files]
        rows = [self.rows.column, self.rows.rows_per_document] if self.rows else None
        return hashlib.sha256(json.dumps([told, self.on_error, self.filter_name, rows]).encode()).hexdigest()

    def _read_file(self, path: Path) -> Iterator[TextDocument | InvalidExample]:
        return (
            DOCUMENT_READERS[file_suffix(path)](path) if self.rows is None else _read_table(path, self.rows)
        )


@dataclass(frozen=True)
class FirstParagraphs(Iterable[str]):
    """The paragraphs of the first documents, as often as one goes through them."""

    documents: Iterable[TextDocument]
    max_documents: int

    def __iter__(self) -> Iterator[str]:
        for document in itertools.islice(self.documents, self.max_documents):
            yield from document.paragraphs


def find_documents(
    dataset: str | Sequence[str],
    *,
    split: str | None = None,
    on_error: OnError = "stop",
    rows: DocumentRows | None = None,
) -> DocumentCorpus:
    """The documents that a recipe means: files, patterns, or names of data sets, as in ``wiki_en/text``."""
    known = list(DOCUMENT_READERS if rows is None else TABLE_READERS)
    files = parallel_corpus.find_files(dataset, known, split)
    for file in files:
        if file_suffix(file) not in known:
            of_table = (
                "; of a table, data.text names the column" if file_suffix(file) in TABLE_READERS else ""
            )
            raise InputError(f"{file}: documents come as {', '.join(known)}, each of them also .gz{of_table}")
    return DocumentCorpus(tuple(files), on_error, rows)


def _read_text(path: Path) -> Iterator[TextDocument | InvalidExample]:
    """Lines, with an empty one between documents. A line that cannot be used spoils no other."""
    paragraphs: list[str] = []
    begin = 1
    for number, line in enumerate(itertools.chain(read_lines(path), [""]), 1):
        if line is None:
            yield line_too_long(path, number)
        elif line and not line.isspace():
            told = clean_text(line, "text", f"{path}:{number}")
            if isinstance(told, InvalidExample):
                yield told
            else:
                begin = begin if paragraphs else number
                paragraphs.append(told)
        if paragraphs and ((line is not None and not line.strip()) or len(paragraphs) == MAX_DOCUMENT_LINES):
            yield TextDocument(tuple(paragraphs), f"{path}:{begin}")
            paragraphs = []


def _read_json_lines(path: Path) -> Iterator[TextDocument | InvalidExample]:
    for where, row in iter_json_rows(path):
        if isinstance(row, InvalidExample):
            yield row
        elif not isinstance(row, Mapping) or "text" not in row:
            yield InvalidExample(where, 'no "text"', f"it is {row!r}"[:80])
        else:
            yield _make_document([row["text"]], where)


def _read_squad_articles(path: Path) -> Iterator[TextDocument | InvalidExample]:
    with open_decompressed(path) as file:
        try:
            tree = json.loads(file.read())
            found = [
                (str(article.get("title", number)), [one["context"] for one in article["paragraphs"]])
                for number, article in enumerate(tree["data"], 1)
            ]
        except (ValueError, EOFError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is not in SQuAD format: {error!r}") from None
    for title, contexts in found:
        yield _make_document(contexts, f"{path}, article {title!r}")


def _read_table(path: Path, rows: DocumentRows) -> Iterator[TextDocument | InvalidExample]:
    """The texts of a column. One that cannot be used spoils no other."""
    paragraphs: list[str] = []
    begin, count = "", 0
    for record in tables.read_table(path, [rows.column]):
        one = record if isinstance(record, InvalidExample) else _make_document(record.values, record.location)
        if isinstance(one, InvalidExample):
            yield one
            continue
        begin = begin if paragraphs else one.location
        paragraphs += one.paragraphs
        count += 1
        if count == rows.rows_per_document:
            yield TextDocument(tuple(paragraphs), begin)
            paragraphs, count = [], 0
    if paragraphs:
        yield TextDocument(tuple(paragraphs), begin)


def _make_document(texts: Iterable[object], location: str) -> TextDocument | InvalidExample:
    """A document of texts, whose lines are its paragraphs."""
    paragraphs: list[str] = []
    for text in texts:
        told = clean_text(text, "text", location)
        if isinstance(told, InvalidExample):
            return told
        paragraphs += (line.strip() for line in told.split("\n") if line.strip())
    return (
        TextDocument(tuple(paragraphs), location) if paragraphs else InvalidExample(location, "an empty text")
    )


DOCUMENT_READERS: dict[str, Callable[[Path], Iterator[TextDocument | InvalidExample]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_squad_articles,
}
