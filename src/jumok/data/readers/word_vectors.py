"""Reader of pretrained word vectors: text files (fastText ``.vec``, GloVe) or binary files of word2vec.

A file is read once, and only the vectors of words in the vocabulary are kept. Words without a pretrained
vector keep their initial embedding.

>>> words = tokenizer.ids_to_tokens(range(tokenizer.vocab_size))             # doctest: +SKIP
>>> vectors = read_word_vectors(Path("wiki.en.vec"), words)                  # doctest: +SKIP
>>> num_found = fill_embedding(model.source_embedding, words, vectors)       # doctest: +SKIP
>>> print(f"{num_found} of {len(words)} words have a pretrained vector")     # doctest: +SKIP
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from jumok.batches.tokens import SPECIAL_TOKENS
from jumok.data.readers.text_files import open_decompressed, read_lines
from jumok.errors import InputError

Vector = NDArray[np.float32]
MAX_WORD_BYTES = 4096  # longest word of a binary file


@dataclass(frozen=True)
class WordVectors:
    """The vectors of some words, read from a file."""

    path: Path
    dim: int
    words: dict[str, Vector]


def read_word_vectors(path: Path, words: Iterable[str]) -> WordVectors:
    """Read the vectors of ``words`` that the file contains. The ▁ of a piece is not part of its word."""
    vocabulary = {normalize_word(word) for word in words if word not in SPECIAL_TOKENS}
    vectors = _read_binary(path, vocabulary) if _is_binary(path) else _read_text(path, vocabulary)
    if not vectors.dim:
        raise InputError(f"{path} contains no vectors")
    return vectors


def fill_embedding(embedding: nn.Embedding, words: Sequence[str], vectors: WordVectors) -> int:
    """Copy the vectors into the rows of their words. Returns the number of rows."""
    if embedding.embedding_dim != vectors.dim:
        raise InputError(
            f"the vectors of {vectors.path} have {vectors.dim} dimensions, and the embedding has "
            f"{embedding.embedding_dim}; change the width of the embedding, or use other vectors"
        )
    if embedding.num_embeddings < len(words):
        raise InputError(f"there are {len(words)} words for an embedding of {embedding.num_embeddings} rows")
    rows = [
        row for row, word in enumerate(words) if word not in SPECIAL_TOKENS and normalize_word(word) in vectors.words
    ]
    if rows:
        values = np.stack([vectors.words[normalize_word(words[row])] for row in rows])
        with torch.no_grad():
            embedding.weight[rows] = torch.from_numpy(values).to(embedding.weight)
    return len(rows)


def normalize_word(word: str) -> str:
    """A word as in files of vectors: without the ▁ of a piece, in Unicode normalization form NFC."""
    return unicodedata.normalize("NFC", word.removeprefix("▁"))


def _read_text(path: Path, vocabulary: set[str]) -> WordVectors:
    """Lines of ``word 0.1 0.2 …``, optionally after a line with the number of words and the dimension."""
    dim = 0
    vectors: dict[str, Vector] = {}
    for line_number, line in enumerate(read_lines(path), 1):
        cells = (line or "").rstrip().split(" ")
        if line_number == 1 and len(cells) == 2 and all(cell.isdecimal() for cell in cells):
            dim = int(cells[1])
        elif cells != [""]:
            dim = dim or len(cells) - 1
            if not 0 < dim < len(cells):
                raise InputError(f"{path}:{line_number}: expected a word and {dim or 'some'} numbers")
            word = normalize_word(" ".join(cells[:-dim]))  # a few words of GloVe contain spaces
            if word in vocabulary and word not in vectors:  # the first is the most frequent
                try:
                    vectors[word] = np.array(cells[-dim:], np.float32)
                except ValueError as error:
                    raise InputError(f"{path}:{line_number}: no vector after {word!r}: {error}") from None
    return WordVectors(path, dim, vectors)


def _read_binary(path: Path, vocabulary: set[str]) -> WordVectors:
    """word2vec: a line with the count and the dimension, then for each word a space and float32 numbers."""
    vectors: dict[str, Vector] = {}
    with open_decompressed(path) as file:
        count, dim = map(int, file.readline(64).split())
        for number in range(1, count + 1):
            word = normalize_word(_read_word(file).decode("utf-8", "replace"))
            raw = file.read(4 * dim)
            if len(raw) < 4 * dim:
                raise InputError(f"{path} ends within word {number} of {count}; was its download interrupted?")
            if word in vocabulary and word not in vectors:
                vectors[word] = np.frombuffer(raw, "<f4").astype(np.float32)
    return WordVectors(path, dim, vectors)


def _read_word(file: BinaryIO) -> bytes:
    """The bytes up to the next space. Some writers put a line break after every vector."""
    letters = bytearray()
    while len(letters) < MAX_WORD_BYTES and (letter := file.read(1)) not in (b"", b" "):
        letters += letter
    return bytes(letters).lstrip(b"\n")


def _is_binary(path: Path) -> bool:
    """Whether the first line is followed by binary numbers rather than text."""
    with open_decompressed(path) as file:
        head = file.readline(64).split()
        if len(head) != 2 or not all(cell.isdigit() for cell in head):
            return False
        start = file.read(4096)
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return error.start < len(start) - 4  # the last character may be incomplete
    return b"\0" in start
