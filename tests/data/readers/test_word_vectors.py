"""Word vectors in text and binary files."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from jumok.batches.tokens import SPECIAL_TOKENS
from jumok.data.readers import word_vectors
from jumok.errors import InputError

VALUES = {"dog": [1.0, 2.5, -3.0], "책": [0.5, 0.25, 0.125], "cat": [7.0, 8.0, 9.0], ". . .": [4.0, 5.0, 6.0]}
PIECES = [*SPECIAL_TOKENS, "▁dog", "dog", "▁책", "▁zebra"]


def format_text(header: bool, line_end: str = "\n") -> bytes:
    rows = [f"{word} {' '.join(map(str, numbers))}" for word, numbers in VALUES.items()]
    return line_end.join([f"{len(VALUES)} 3"] * header + rows + [""]).encode()


def format_binary(line_end: bytes) -> bytes:
    rows = [word.encode() + b" " + struct.pack("<3f", *numbers) + line_end for word, numbers in VALUES.items()]
    return f"{len(VALUES)} 3\n".encode() + b"".join(rows)


@pytest.mark.parametrize(
    "content",
    [
        format_text(True),
        format_text(False),
        format_text(True, " \n"),
        format_text(True, "\r\n"),
        gzip.compress(format_text(True)),
    ],
    ids=["fasttext", "glove", "space at the end", "crlf", "gzip"],
)
def test_text_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "my.vec"
    path.write_bytes(content)
    vectors = word_vectors.read_word_vectors(path, [*PIECES, ". . ."])
    assert vectors.dim == 3
    assert {word: vector.tolist() for word, vector in vectors.words.items()} == {
        word: VALUES[word] for word in ("dog", "책", ". . .")
    }


@pytest.mark.parametrize("line_end", [b"", b"\n"])
def test_binary_files(tmp_path: Path, line_end: bytes) -> None:
    single_words = {word: numbers for word, numbers in VALUES.items() if " " not in word}
    path = tmp_path / "my.bin"
    rows = [word.encode() + b" " + struct.pack("<3f", *n) + line_end for word, n in single_words.items()]
    path.write_bytes(b"3 3\n" + b"".join(rows))
    vectors = word_vectors.read_word_vectors(path, PIECES)
    assert {word: vector.tolist() for word, vector in vectors.words.items()} == {
        word: VALUES[word] for word in ("dog", "책")
    }
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="ends within word 3 of 3"):
        word_vectors.read_word_vectors(path, PIECES)


def test_fill_embedding(tmp_path: Path) -> None:
    (tmp_path / "my.vec").write_bytes(format_text(True))
    embedding = nn.Embedding(11, 3)  # a few more rows than words
    before = embedding.weight.detach().clone()
    vectors = word_vectors.fill_embedding(
        embedding, PIECES, word_vectors.read_word_vectors(tmp_path / "my.vec", PIECES)
    )
    assert vectors == 3  # ▁dog, dog and ▁책
    assert embedding.weight[4].tolist() == embedding.weight[5].tolist() == VALUES["dog"]
    assert embedding.weight[6].tolist() == VALUES["책"]
    others = [0, 1, 2, 3, 7, 8, 9, 10]
    assert torch.equal(embedding.weight[others], before[others])
    assert embedding.weight.requires_grad


def test_fill_half_precision_embedding(tmp_path: Path) -> None:
    (tmp_path / "my.vec").write_bytes(format_text(False))
    embedding = nn.Embedding(8, 3, dtype=torch.bfloat16)
    assert (
        word_vectors.fill_embedding(embedding, PIECES, word_vectors.read_word_vectors(tmp_path / "my.vec", PIECES)) == 3
    )
    assert embedding.weight[4].tolist() == VALUES["dog"]


def test_no_known_word_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "my.vec").write_bytes(format_text(True))
    vectors = word_vectors.read_word_vectors(tmp_path / "my.vec", ["▁nothing"])
    assert (vectors.dim, vectors.words) == (3, {})
    assert word_vectors.fill_embedding(nn.Embedding(1, 3), ["▁nothing"], vectors) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no vectors"),
        (b"2 3\n", None),
        (b"dog 1 2 3\ncat 1 2\n", r":2: expected a word and 3 numbers"),
        (b"dog 1 2 3\nthe x y z\n", r":2: no vector after 'the'"),
        (b"word\n", r":1: expected a word and some numbers"),
    ],
)
def test_invalid_vector_error_gives_the_line(tmp_path: Path, content: bytes, message: str | None) -> None:
    path = tmp_path / "my.vec"
    path.write_bytes(content)
    if message is None:
        assert word_vectors.read_word_vectors(path, ["dog"]).words == {}
    else:
        with pytest.raises(InputError, match=message):
            word_vectors.read_word_vectors(path, ["dog", "the"])


def test_mismatched_width_error_gives_both() -> None:
    vectors = word_vectors.WordVectors(Path("my.vec"), 3, {"dog": np.zeros(3, np.float32)})
    with pytest.raises(InputError, match=r"of my\.vec have 3 dimensions, and the embedding has 5"):
        word_vectors.fill_embedding(nn.Embedding(8, 5), PIECES, vectors)
    with pytest.raises(InputError, match="8 words for an embedding of 7"):
        word_vectors.fill_embedding(nn.Embedding(7, 3), PIECES, vectors)
