"""Pretrained word vectors for an embedding: from text (fastText's ``.vec``, GloVe) or word2vec's binary.

A file of two million words is gone through once, and only the vectors of wanted words are kept. Words that
the file does not have keep the vectors that the embedding was made with.

>>> words = tokenizer.pieces(range(tokenizer.size))                     # doctest: +SKIP
>>> vectors = read(Path("wiki.en.vec"), words)                          # doctest: +SKIP
>>> found = fill(model.source_embedding, words, vectors)                # doctest: +SKIP
>>> print(f"{found} of {len(words)} words have a pretrained vector")    # doctest: +SKIP
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

__all__ = ["WordVectors", "fill_embedding", "read_word_vectors"]

Vector = NDArray[np.float32]
MAX_WORD_BYTES = 4096  # bytes: what goes on longer without a space is no word of a binary file


@dataclass(frozen=True)
class WordVectors:
    """The vectors of some words, as read from a file."""

    path: Path
    dim: int
    words: dict[str, Vector]


def read_word_vectors(path: Path, words: Iterable[str]) -> WordVectors:
    """The vectors of those words that the file has. A piece's ▁ is not part of its word."""
    wanted = {normalize_word(word) for word in words if word not in SPECIAL_TOKENS}
    vectors = _read_binary(path, wanted) if _is_binary(path) else _read_text(path, wanted)
    if not vectors.dim:
        raise InputError(f"{path} holds no vectors")
    return vectors


def fill_embedding(embedding: nn.Embedding, words: Sequence[str], vectors: WordVectors) -> int:
    """Write the vectors into the rows of their words; how many there were."""
    if embedding.embedding_dim != vectors.dim:
        raise InputError(
            f"the vectors of {vectors.path} are {vectors.dim} wide, and the embedding is "
            f"{embedding.embedding_dim} wide: give the model this width, or take other vectors"
        )
    if embedding.num_embeddings < len(words):
        raise InputError(f"{len(words)} words came for an embedding of {embedding.num_embeddings}")
    rows = [
        row
        for row, word in enumerate(words)
        if word not in SPECIAL_TOKENS and normalize_word(word) in vectors.words
    ]
    if rows:
        values = np.stack([vectors.words[normalize_word(words[row])] for row in rows])
        with torch.no_grad():
            embedding.weight[rows] = torch.from_numpy(values).to(embedding.weight)
    return len(rows)


def normalize_word(word: str) -> str:
    """A word as vector files have it: without the ▁ of a piece, in Unicode's form NFC."""
    return unicodedata.normalize("NFC", word.removeprefix("▁"))


def _read_text(path: Path, vocabulary: set[str]) -> WordVectors:
    """``word 0.1 0.2 …``, perhaps with a first line that tells the number of words and their width."""
    width = 0
    found: dict[str, Vector] = {}
    for number, line in enumerate(read_lines(path), 1):
        cells = (line or "").rstrip().split(" ")
        if number == 1 and len(cells) == 2 and all(cell.isdecimal() for cell in cells):
            width = int(cells[1])
        elif cells != [""]:
            width = width or len(cells) - 1
            if not 0 < width < len(cells):
                raise InputError(f"{path}:{number}: a word and {width or 'some'} numbers should stand here")
            word = normalize_word(" ".join(cells[:-width]))  # a few words of GloVe have spaces in them
            if word in vocabulary and word not in found:  # the first is the most frequent
                try:
                    found[word] = np.array(cells[-width:], np.float32)
                except ValueError as error:
                    raise InputError(f"{path}:{number}: no vector stands behind {word!r}: {error}") from None
    return WordVectors(path, width, found)


def _read_binary(path: Path, vocabulary: set[str]) -> WordVectors:
    """word2vec's: a line with count and width, then each word, a space and its numbers of 4 bytes."""
    found: dict[str, Vector] = {}
    with open_decompressed(path) as file:
        count, width = map(int, file.readline(64).split())
        for number in range(1, count + 1):
            word = normalize_word(_read_word(file).decode("utf-8", "replace"))
            raw = file.read(4 * width)
            if len(raw) < 4 * width:
                raise InputError(f"{path} ends within word {number} of {count}; was its download cut off?")
            if word in vocabulary and word not in found:
                found[word] = np.frombuffer(raw, "<f4").astype(np.float32)
    return WordVectors(path, width, found)


def _read_word(file: BinaryIO) -> bytes:
    """What stands before the next space; some writers end every vector with a line end."""
    letters = bytearray()
    while len(letters) < MAX_WORD_BYTES and (letter := file.read(1)) not in (b"", b" "):
        letters += letter
    return bytes(letters).lstrip(b"\n")


def _is_binary(path: Path) -> bool:
    """Whether numbers of 4 bytes follow the first line's word, and not a text."""
    with open_decompressed(path) as file:
        head = file.readline(64).split()
        if len(head) != 2 or not all(cell.isdigit() for cell in head):
            return False
        start = file.read(4096)
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return error.start < len(start) - 4  # a character may be cut in two at the end
    return b"\0" in start
