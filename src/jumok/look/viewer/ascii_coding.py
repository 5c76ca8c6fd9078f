"""Bytes as text for HTML files: seven bits in each character.

Characters that HTML or tools that work by line would change (NUL, all line separators, ``<``) are replaced by
the character 128 places higher, which has two bytes in UTF-8. The low seven bits of a character are its value
in both cases. Text is 1.22 times as long as compressed bytes; base64 is 1.33 times as long.
"""

from __future__ import annotations

import numpy as np

BLOCK_BYTES, BLOCK_CHARACTERS = 7, 8  # seven bytes are eight characters
UNSAFE = np.frombuffer(b"\x00\n\x0b\x0c\r\x1c\x1d\x1e<", np.uint8)


def encode_text(data: bytes) -> str:
    """Encode bytes, padded with zeros to a multiple of seven.

    >>> decode_text(encode_text(b"any bytes"))[:9]
    b'any bytes'
    """
    padded = np.zeros(-(-len(data) // BLOCK_BYTES) * BLOCK_BYTES, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    blocks = padded.reshape(-1, BLOCK_BYTES)
    values = np.empty((len(blocks), BLOCK_CHARACTERS), np.uint8)
    # Character n has the low n bits of byte n - 1, then the high 7 - n bits of byte n.
    values[:, 0] = blocks[:, 0] >> 1
    for n in range(1, BLOCK_BYTES):
        values[:, n] = ((blocks[:, n - 1] << (7 - n)) | (blocks[:, n] >> (n + 1))) & 127
    values[:, 7] = blocks[:, 6] & 127
    shift = np.zeros(128, np.uint8)
    shift[UNSAFE] = 128
    return (values | shift[values]).tobytes().decode("latin-1")


def decode_text(text: str) -> bytes:
    """Decode text, with the padding."""
    values = np.frombuffer(text.encode("latin-1"), np.uint8).reshape(-1, BLOCK_CHARACTERS) & 127
    blocks = np.empty((len(values), BLOCK_BYTES), np.uint8)
    for n in range(BLOCK_BYTES):
        blocks[:, n] = (values[:, n] << (n + 1)) | (values[:, n + 1] >> (6 - n))
    return blocks.tobytes()
