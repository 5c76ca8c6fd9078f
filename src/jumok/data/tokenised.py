"""Documents as token ids, on disk: sentence by sentence, made once, and read through the memory map.

A folder as :mod:`jumok.data.store` makes them, whole or not there at all::

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

from jumok.data import store
from jumok.data.documents import Documents
from jumok.data.formats import Flaw
from jumok.data.sentences import sentences
from jumok.data.sources import Skipped
from jumok.data.store import Column
from jumok.data.wordpiece import WordPieces
from jumok.errors import InputError

__all__ = ["Tokenised", "prepare"]

FORMAT = 1
AT_ONCE = 256  # documents that are tokenised together
LEAST = 2  # sentences of a document: one and a next one


@dataclass(frozen=True, eq=False)
class Tokenised:
    """Documents as sentences of token ids, read-only."""

    path: Path
    sentences: Column
    documents: NDArray[np.int64]  # the sentence at which each begins, and the end
    skipped: Skipped

    @classmethod
    def open(cls, path: Path) -> Tokenised:
        """One that is there."""
        told = store.facts(path)
        if told is None or "sentences" not in told:
            raise InputError(f"{path} holds no tokenised documents that this jumok can read")
        columns = store.column(path, "sentences", told["sentences"])
        try:
            documents = np.asarray(np.load(path / "documents.npy", mmap_mode="r")).view(np.int64)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is damaged: {error}; remove it, and it is made again") from None
        if documents[-1] != told["sentences"]:
            raise InputError(f"{path} is damaged: its files do not fit together; remove this folder")
        return cls(path, columns, documents, Skipped(Counter(told["skipped"]), told["first"]))

    def __len__(self) -> int:
        """How many documents."""
        return len(self.documents) - 1

    def __getitem__(self, number: int) -> list[NDArray[Any]]:
        """The sentences of a document."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        return [self.sentences[n] for n in range(*self.documents[number : number + 2].tolist())]

    def __reduce__(self) -> tuple[Callable[[Path], Tokenised], tuple[Path]]:
        return Tokenised.open, (self.path,)  # another process maps the files, and copies nothing

    @property
    def told(self) -> str:
        """Its sizes, for people."""
        tokens, texts = len(self.sentences.ids), int(self.documents[-1])
        return f"{len(self):,} documents, {texts:,} sentences, {tokens:,} tokens"


def prepare(path: Path, documents: Documents, pieces: WordPieces, *, replace: bool = True) -> Tokenised:
    """The tokenised documents: those at ``path`` if made of just these, else new ones in their place.

    With ``replace=False`` others that are there are an error: somebody counts on them. A document of a single
    sentence is left out and counted, for nothing follows it.
    """
    said = ["documents", FORMAT, documents.fingerprint, pieces.fingerprint]
    fingerprint = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    store.made(path, fingerprint, lambda folder: _write(folder, documents, pieces), replace)
    return Tokenised.open(path)


def _write(folder: Path, documents: Documents, pieces: WordPieces) -> dict[str, Any]:
    skipped = Skipped()
    count = 0
    with (
        store.writer(folder, "sentences", pieces.size) as write,
        store.growing(folder / "documents.npy", np.dtype(np.uint64)) as add,
    ):
        add(np.zeros(1, np.uint64))
        for some in _chunks(documents, pieces, skipped):
            write(list(itertools.chain.from_iterable(some)))
            ends = list(itertools.accumulate(map(len, some), initial=count))
            add(np.array(ends[1:], np.uint64))
            count = ends[-1]
    if not count:
        raise InputError(
            f"no document has {LEAST} sentences or more; {skipped}. "
            "Documents are separated by an empty line, and their sentences or paragraphs are lines"
        )
    return {"sentences": count, "skipped": skipped.counts, "first": skipped.first}


def _chunks(documents: Documents, pieces: WordPieces, skipped: Skipped) -> Iterator[list[list[list[int]]]]:
    """Token ids of the sentences of documents, many at a time."""
    found = documents.read(skipped)
    while some := list(itertools.islice(found, AT_ONCE)):
        texts = [[one for text in document.paragraphs for one in sentences(text)] for document in some]
        encoded = iter(pieces.encode([one for document in texts for one in document]))
        kept = []
        for document, text in zip(some, texts, strict=True):
            ids = [one for one in itertools.islice(encoded, len(text)) if one]
            if len(ids) < LEAST:
                skipped.add(Flaw(document.where, "a document of a single sentence"))
            else:
                kept.append(ids)
        yield kept
