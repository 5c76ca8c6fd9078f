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

MAX_DOCUMENT_LINES = 10_000  # a longer document is split, to limit the memory


@dataclass(frozen=True, slots=True)
class TextDocument:
    """The paragraphs of a text, and its location."""

    paragraphs: tuple[str, ...]
    location: str

    @property
    def text(self) -> str:
        return "\n".join(self.paragraphs)


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
        skipped = SkippedExamples() if skipped is None else skipped
        is_empty = True
        documents = itertools.chain.from_iterable(map(self._read_file, self.files))
        for document in skip_invalid(documents, self.on_error, skipped):
            is_empty = False
            if self.predicate is None or self.predicate(document):
                yield document
        if is_empty:
            raise InputError(f"{', '.join(map(str, self.files))}: no documents; {skipped}")

    def __iter__(self) -> Iterator[TextDocument]:
        return self.read()

    def filter(self, name: str, predicate: Callable[[TextDocument], bool]) -> DocumentCorpus:
        """The documents for which ``predicate`` is true. ``name`` must identify the predicate."""
        return replace(self, filter_name=name, predicate=predicate)

    @property
    def fingerprint(self) -> str:
        """Identifies the text, by the names, sizes and modification times of the files."""
        files = [[str(file), *parallel_corpus.file_identity(file)] for file in self.files]
        rows = [self.rows.column, self.rows.rows_per_document] if self.rows else None
        return hashlib.sha256(json.dumps([files, self.on_error, self.filter_name, rows]).encode()).hexdigest()

    def _read_file(self, path: Path) -> Iterator[TextDocument | InvalidExample]:
        return DOCUMENT_READERS[file_suffix(path)](path) if self.rows is None else _read_table(path, self.rows)


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
    suffixes = list(DOCUMENT_READERS if rows is None else TABLE_READERS)
    files = parallel_corpus.find_files(dataset, suffixes, split)
    for file in files:
        if file_suffix(file) not in suffixes:
            hint = "; for a table, set data.text_column" if file_suffix(file) in TABLE_READERS else ""
            raise InputError(f"{file}: expected {', '.join(suffixes)}, optionally with .gz{hint}")
    return DocumentCorpus(tuple(files), on_error, rows)


def _read_text(path: Path) -> Iterator[TextDocument | InvalidExample]:
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


def _read_json_lines(path: Path) -> Iterator[TextDocument | InvalidExample]:
    for location, row in iter_json_rows(path):
        if isinstance(row, InvalidExample):
            yield row
        elif not isinstance(row, Mapping) or "text" not in row:
            yield InvalidExample(location, 'no "text"', f"it is {row!r}"[:80])
        else:
            yield _make_document([row["text"]], location)


def _read_squad_articles(path: Path) -> Iterator[TextDocument | InvalidExample]:
    with open_decompressed(path) as file:
        try:
            tree = json.loads(file.read())
            articles = [
                (
                    str(article.get("title", number)),
                    [paragraph["context"] for paragraph in article["paragraphs"]],
                )
                for number, article in enumerate(tree["data"], 1)
            ]
        except (ValueError, EOFError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is not in SQuAD format: {error!r}") from None
    for title, contexts in articles:
        yield _make_document(contexts, f"{path}, article {title!r}")


def _read_table(path: Path, rows: DocumentRows) -> Iterator[TextDocument | InvalidExample]:
    """The texts of a column. An invalid text does not affect other texts."""
    paragraphs: list[str] = []
    location, num_rows = "", 0
    for record in tables.read_table(path, [rows.column]):
        document = record if isinstance(record, InvalidExample) else _make_document(record.values, record.location)
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


DOCUMENT_READERS: dict[str, Callable[[Path], Iterator[TextDocument | InvalidExample]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_squad_articles,
}
