"""Reader of documents of running text, for pretraining.

A file has one of these formats, optionally gzipped::

    .txt      one paragraph or sentence per line, and an empty line between documents
    .jsonl    one JSON object per line: a document in its field "text"
    .json     the SQuAD format: its articles, without the questions

or it is a table (see :mod:`jumok.data.readers.tables`) of which a recipe names the text column. Several short
texts, such as reviews, can be joined to one document. Only the current document is held in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jumok.data.readers.dataset_files import find_files
from jumok.data.readers.invalid_examples import (
    InvalidExample,
    OnError,
    SkippedExamples,
    clean_text,
    line_too_long,
    skip_invalid,
)
from jumok.data.readers.parallel_corpus import file_identity
from jumok.data.readers.squad import get_value, read_articles
from jumok.data.readers.tables import TABLE_SUFFIXES, ColumnSpec, open_table
from jumok.data.readers.text_files import file_suffix, read_lines
from jumok.errors import InputError

DOCUMENT_SUFFIXES = (".txt", ".jsonl", ".json")
MAX_DOCUMENT_LINES = 10_000  # a longer document is split, to limit the memory


@dataclass(frozen=True, slots=True)
class TextDocument:
    """The paragraphs of a text, and its location."""

    paragraphs: tuple[str, ...]
    location: str

    @property
    def text(self) -> str:
        return "\n".join(self.paragraphs)


DocumentIterator = Iterator[TextDocument | InvalidExample]


@dataclass(frozen=True)
class DocumentRows:
    """The text column of a table, and the number of rows per document."""

    column: ColumnSpec
    rows_per_document: int = 1


@dataclass(frozen=True)
class DocumentCorpus:
    """The documents of some files. Each iteration reads them again from the beginning."""

    files: tuple[Path, ...]
    on_error: OnError = "stop"
    rows: DocumentRows | None = None  # not None: the files are tables
    filter_name: str = ""  # identifies ``predicate``
    predicate: Callable[[TextDocument], bool] | None = None

    def read(self, skipped: SkippedExamples | None = None) -> Iterator[TextDocument]:
        """The documents in order.

        Invalid ones raise, or, with ``on_error="skip"``, are counted in ``skipped``.
        """
        documents = itertools.chain.from_iterable(map(self._read_file, self.files))
        empty_message = f"{', '.join(map(str, self.files))}: no documents"
        valid = skip_invalid(documents, self.on_error, skipped or SkippedExamples(), empty_message)
        return (document for document in valid if self.predicate is None or self.predicate(document))

    def __iter__(self) -> Iterator[TextDocument]:
        return self.read()

    def filter(self, name: str, predicate: Callable[[TextDocument], bool]) -> DocumentCorpus:
        """The documents for which ``predicate`` is true. ``name`` must identify the predicate."""
        return replace(self, filter_name=name, predicate=predicate)

    @property
    def fingerprint(self) -> str:
        """Identifies the text, by the names, sizes and modification times of the files."""
        files = [[str(file), *file_identity(file)] for file in self.files]
        rows = [self.rows.column, self.rows.rows_per_document] if self.rows else None
        return hashlib.sha256(json.dumps([files, self.on_error, self.filter_name, rows]).encode()).hexdigest()

    def _read_file(self, path: Path) -> DocumentIterator:
        suffix = file_suffix(path)
        if self.rows is not None or suffix == ".jsonl":
            return _read_table(path, self.rows or DocumentRows("text"))
        return _read_text(path) if suffix == ".txt" else _read_squad_articles(path)


@dataclass(frozen=True)
class FirstParagraphs(Iterable[str]):
    """The paragraphs of the first documents. It can be iterated repeatedly."""

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
    """The documents that a recipe names: files, patterns, or names of data sets, such as ``wiki_en/text``."""
    suffixes = DOCUMENT_SUFFIXES if rows is None else TABLE_SUFFIXES
    files = find_files(dataset, suffixes, split)
    for file in files:
        if file_suffix(file) not in suffixes:
            hint = "; for a table, set data.text_column" if file_suffix(file) in TABLE_SUFFIXES else ""
            raise InputError(f"{file}: expected {', '.join(suffixes)}, optionally with .gz{hint}")
    return DocumentCorpus(tuple(files), on_error, rows)


def _read_text(path: Path) -> DocumentIterator:
    """Lines, with an empty line between documents. An invalid line does not affect other lines."""
    paragraphs: list[str] = []
    start = 1
    for line_number, line in enumerate(itertools.chain(read_lines(path), [""]), 1):
        if line is None:
            yield line_too_long(path, line_number)
        elif line and not line.isspace():
            cleaned = clean_text(line, "text", f"{path}:{line_number}")
            if isinstance(cleaned, InvalidExample):
                yield cleaned
            else:
                start = start if paragraphs else line_number
                paragraphs.append(cleaned)
        if paragraphs and ((line is not None and not line.strip()) or len(paragraphs) == MAX_DOCUMENT_LINES):
            yield TextDocument(tuple(paragraphs), f"{path}:{start}")
            paragraphs = []


def _read_squad_articles(path: Path) -> DocumentIterator:
    for title, paragraphs in read_articles(path):
        contexts = (get_value(paragraph, "context") for paragraph in paragraphs)
        yield _make_document(contexts, f"{path}, article {title!r}")


def _read_table(path: Path, rows: DocumentRows) -> DocumentIterator:
    """The texts of a column. An invalid text does not affect other texts."""
    paragraphs: list[str] = []
    location, num_rows = "", 0
    for row in open_table(path).read({"text": rows.column}):
        document = row if isinstance(row, InvalidExample) else _make_document(row.values.values(), row.location)
        if isinstance(document, InvalidExample):
            yield document
            continue
        location = location if paragraphs else document.location
        paragraphs += document.paragraphs
        num_rows += 1
        if num_rows == rows.rows_per_document:
            yield TextDocument(tuple(paragraphs), location)
            paragraphs, num_rows = [], 0
    if paragraphs:
        yield TextDocument(tuple(paragraphs), location)


def _make_document(texts: Iterable[object], location: str) -> TextDocument | InvalidExample:
    """A document whose paragraphs are the lines of some texts."""
    paragraphs: list[str] = []
    for text in texts:
        cleaned = clean_text(text, "text", location)
        if isinstance(cleaned, InvalidExample):
            return cleaned
        paragraphs += (line.strip() for line in cleaned.split("\n") if line.strip())
    return TextDocument(tuple(paragraphs), location) if paragraphs else InvalidExample(location, "an empty text")
