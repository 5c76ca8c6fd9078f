"""Token ids of documents on disk, by sentence, written once and read through memory maps.

A store is a folder, written like those of :mod:`jumok.data.caches.token_store`::

    store.json               fingerprint, number of sentences, and skipped documents
    sentences.ids.npy        all token ids, concatenated
    sentences.offsets.npy    sentence n has the ids from offsets[n] to offsets[n + 1]
    documents.npy            document d has the sentences from documents[d] to documents[d + 1]
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
from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples
from jumok.data.tokenizers.sentence_splitter import split_sentences
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError

FORMAT_VERSION = 1
DOCUMENTS_PER_CHUNK = 256  # documents that are tokenized together
MIN_SENTENCES = 2  # sentences of a document: next-sentence prediction needs two


@dataclass(frozen=True, eq=False)
class DocumentStore:
    """Documents as sentences of token ids, read-only."""

    path: Path
    sentences: TokenColumn
    documents: NDArray[np.int64]  # (N + 1,): the first sentence of each, then the end of the last
    skipped: SkippedExamples

    @classmethod
    def open(cls, path: Path) -> DocumentStore:
        """Open an existing store."""
        metadata = token_store.read_metadata(path)
        if metadata is None or "sentences" not in metadata:
            raise InputError(f"{path} contains no tokenized documents that this version can read")
        sentences = token_store.load_column(path, "sentences", metadata["sentences"])
        try:
            documents = np.asarray(np.load(path / "documents.npy", mmap_mode="r")).view(np.int64)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is damaged: {error}; remove this folder to create it again") from None
        if documents[-1] != metadata["sentences"]:
            raise InputError(f"{path} is damaged: its files do not fit together; remove this folder")
        return cls(path, sentences, documents, SkippedExamples(Counter(metadata["skipped"]), metadata["first"]))

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents) - 1

    def __getitem__(self, index: int) -> list[NDArray[Any]]:
        """The sentences of a document."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return [self.sentences[sentence] for sentence in range(*self.documents[index : index + 2].tolist())]

    @property
    def fingerprint(self) -> str:
        """Identifies the documents and the tokenizer that the store was made from."""
        return str((token_store.read_metadata(self.path) or {}).get("fingerprint", ""))

    def __reduce__(self) -> tuple[Callable[[Path], DocumentStore], tuple[Path]]:
        return DocumentStore.open, (self.path,)  # another process maps the files without copying

    @property
    def summary(self) -> str:
        """The numbers of documents, sentences and tokens, as text."""
        num_tokens, num_sentences = len(self.sentences.ids), int(self.documents[-1])
        return f"{len(self):,} documents, {num_sentences:,} sentences, {num_tokens:,} tokens"


def prepare_document_store(
    path: Path, documents: DocumentCorpus, tokenizer: WordPieceTokenizer, *, replace: bool = True
) -> DocumentStore:
    """Open the store at ``path`` if it was made from these documents; otherwise write a new one in its place.

    With ``replace=False``, a store of other data is an error, because a run depends on it. A document of a
    single sentence is skipped and counted.
    """
    identity = ["documents", FORMAT_VERSION, documents.fingerprint, tokenizer.fingerprint]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    token_store.ensure_store(path, fingerprint, lambda folder: _write_documents(folder, documents, tokenizer), replace)
    return DocumentStore.open(path)


def _write_documents(folder: Path, documents: DocumentCorpus, tokenizer: WordPieceTokenizer) -> dict[str, Any]:
    skipped = SkippedExamples()
    num_sentences = 0
    with (
        token_store.open_sequence_writer(folder, "sentences", tokenizer.vocab_size) as write,
        token_store.open_array_writer(folder / "documents.npy", np.dtype(np.uint64)) as add,
    ):
        add(np.zeros(1, np.uint64))
        for chunk in _iter_tokenized_chunks(documents, tokenizer, skipped):
            write(list(itertools.chain.from_iterable(chunk)))
            ends = list(itertools.accumulate(map(len, chunk), initial=num_sentences))
            add(np.array(ends[1:], np.uint64))
            num_sentences = ends[-1]
    if not num_sentences:
        raise InputError(
            f"no document has {MIN_SENTENCES} sentences or more; {skipped}. Separate documents by an empty "
            "line, and put each sentence or paragraph on its own line"
        )
    return {"sentences": num_sentences, "skipped": skipped.counts, "first": skipped.first_locations}


def _iter_tokenized_chunks(
    documents: DocumentCorpus, tokenizer: WordPieceTokenizer, skipped: SkippedExamples
) -> Iterator[list[list[list[int]]]]:
    """The token ids of the sentences of documents, in chunks of documents."""
    remaining = documents.read(skipped)
    while chunk := list(itertools.islice(remaining, DOCUMENTS_PER_CHUNK)):
        chunk_sentences = [
            [sentence for sentences in document.paragraphs for sentence in split_sentences(sentences)]
            for document in chunk
        ]
        encoded = iter(tokenizer.encode([sentence for document in chunk_sentences for sentence in document]))
        chunk_ids = []
        for document, sentences in zip(chunk, chunk_sentences, strict=True):
            ids = [sentence for sentence in itertools.islice(encoded, len(sentences)) if sentence]
            if len(ids) < MIN_SENTENCES:
                skipped.add(InvalidExample(document.location, "a document of a single sentence"))
            else:
                chunk_ids.append(ids)
        yield chunk_ids
