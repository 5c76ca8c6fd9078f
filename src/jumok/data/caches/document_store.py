"""Documents as token ids, on disk: sentence by sentence, made once, and read through the memory map.

A folder as :mod:`jumok.data.token_store` makes them, whole or not there at all::

    store.json               what it was made of, how many sentences, how much was left out
    sentences.ids.npy        all token ids end to end
    sentences.offsets.npy    sentence n has the ids from offsets[n] up to offsets[n + 1]
    documents.npy            document d has the sentences from documents[d] up to documents[d + 1]
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.caches import token_store
from jumok.data.caches.token_store import TokenColumn
from jumok.data.readers.documents import DocumentCorpus
from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.parallel_corpus import SkippedExamples
from jumok.data.tokenizers.sentence_splitter import split_sentences
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError

__all__ = ["DocumentStore", "prepare_document_store"]

FORMAT_VERSION = 1
DOCUMENTS_PER_CHUNK = 256  # documents that are tokenised together
MIN_SENTENCES = 2  # sentences of a document: one and a next one


@dataclass(frozen=True, eq=False)
class DocumentStore:
    """Documents as sentences of token ids, read-only."""

    path: Path
    sentences: TokenColumn
    documents: NDArray[np.int64]  # the sentence at which each begins, and the end
    skipped: SkippedExamples

    @classmethod
    def open(cls, path: Path) -> DocumentStore:
        """One that is there."""
        told = token_store.read_metadata(path)
        if told is None or "sentences" not in told:
            raise InputError(f"{path} holds no tokenised documents that this jumok can read")
        columns = token_store.load_column(path, "sentences", told["sentences"])
        try:
            documents = np.asarray(np.load(path / "documents.npy", mmap_mode="r")).view(np.int64)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is damaged: {error}; remove it, and it is made again") from None
        if documents[-1] != told["sentences"]:
            raise InputError(f"{path} is damaged: its files do not fit together; remove this folder")
        return cls(path, columns, documents, SkippedExamples(Counter(told["skipped"]), told["first"]))

    def __len__(self) -> int:
        """How many documents."""
        return len(self.documents) - 1

    def __getitem__(self, index: int) -> list[NDArray[Any]]:
        """The sentences of a document."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return [self.sentences[n] for n in range(*self.documents[index : index + 2].tolist())]

    @property
    def fingerprint(self) -> str:
        """Identifies the documents and the tokenizer that the store was made from."""
        return str((token_store.read_metadata(self.path) or {}).get("fingerprint", ""))

    def __reduce__(self) -> tuple[Callable[[Path], DocumentStore], tuple[Path]]:
        return DocumentStore.open, (self.path,)  # another process maps the files, and copies nothing

    @property
    def summary(self) -> str:
        """Its sizes, for people."""
        tokens, texts = len(self.sentences.ids), int(self.documents[-1])
        return f"{len(self):,} documents, {texts:,} sentences, {tokens:,} tokens"


def prepare_document_store(
    path: Path, documents: DocumentCorpus, tokenizer: WordPieceTokenizer, *, replace: bool = True
) -> DocumentStore:
    """The tokenised documents: those at ``path`` if made of just these, else new ones in their place.

    With ``replace=False`` others that are there are an error: somebody counts on them. A document of a single
    sentence is left out and counted, for nothing follows it.
    """
    said = ["documents", FORMAT_VERSION, documents.fingerprint, tokenizer.fingerprint]
    fingerprint = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    token_store.ensure_store(
        path, fingerprint, lambda folder: _write_documents(folder, documents, tokenizer), replace
    )
    return DocumentStore.open(path)


def _write_documents(
    folder: Path, documents: DocumentCorpus, tokenizer: WordPieceTokenizer
) -> dict[str, Any]:
    skipped = SkippedExamples()
    count = 0
    with (
        token_store.open_sequence_writer(folder, "sentences", tokenizer.vocab_size) as write,
        token_store.open_array_writer(folder / "documents.npy", np.dtype(np.uint64)) as add,
    ):
        add(np.zeros(1, np.uint64))
        for some in _iter_tokenized_chunks(documents, tokenizer, skipped):
            write(list(itertools.chain.from_iterable(some)))
            ends = list(itertools.accumulate(map(len, some), initial=count))
            add(np.array(ends[1:], np.uint64))
            count = ends[-1]
    if not count:
        raise InputError(
            f"no document has {MIN_SENTENCES} sentences or more; {skipped}. "
            "Documents are separated by an empty line, and their sentences or paragraphs are lines"
        )
    return {"sentences": count, "skipped": skipped.counts, "first": skipped.first_locations}


def _iter_tokenized_chunks(
    documents: DocumentCorpus, tokenizer: WordPieceTokenizer, skipped: SkippedExamples
) -> Iterator[list[list[list[int]]]]:
    """Token ids of the sentences of documents, many at a time."""
    found = documents.read(skipped)
    while some := list(itertools.islice(found, DOCUMENTS_PER_CHUNK)):
        texts = [[one for text in document.paragraphs for one in split_sentences(text)] for document in some]
        encoded = iter(tokenizer.encode([one for document in texts for one in document]))
        kept = []
        for document, text in zip(some, texts, strict=True):
            ids = [one for one in itertools.islice(encoded, len(text)) if one]
            if len(ids) < MIN_SENTENCES:
                skipped.add(InvalidExample(document.location, "a document of a single sentence"))
            else:
                kept.append(ids)
        yield kept
