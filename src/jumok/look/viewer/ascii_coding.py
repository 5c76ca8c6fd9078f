"""Bytes as ASCII text for HTML files: six bytes in seven characters.

Six bytes are a number of 48 bits, which is written with seven digits of base 119. The digits are all ASCII
characters except those that HTML or tools that work by line would change: NUL, all line separators, and ``<``. Text
is 1.17 times as long as the bytes, whatever they are; base64 is 1.33 times as long.
"""

from __future__ import annotations

import numpy as np

BLOCK_BYTES, BLOCK_CHARACTERS = 6, 7  # six bytes are seven characters
UNSAFE = b"\x00\n\x0b\x0c\r\x1c\x1d\x1e<"
DIGITS = np.array([code for code in range(128) if code not in UNSAFE], np.uint8)
BASE = np.uint64(len(DIGITS))  # 119, and 119⁷ is more than 2⁴⁸


def encode_text(data: bytes) -> str:
    """Encode bytes, padded with zeros to a multiple of six.

    >>> decode_text(encode_text(b"any bytes"))[:9]
    b'any bytes'
    """
    num_blocks = -(-len(data) // BLOCK_BYTES)
    blocks = np.zeros((num_blocks, 8), np.uint8)
    padded = np.zeros(num_blocks * BLOCK_BYTES, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    blocks[:, 2:] = padded.reshape(-1, BLOCK_BYTES)
    numbers = blocks.view(">u8")[:, 0].astype(np.uint64)
    characters = np.empty((num_blocks, BLOCK_CHARACTERS), np.uint8)
    for n in reversed(range(BLOCK_CHARACTERS)):
        numbers, digits = np.divmod(numbers, BASE)
        characters[:, n] = DIGITS[digits]
    return characters.tobytes().decode("ascii")


def decode_text(text: str) -> bytes:
    """Decode text, with the padding."""
    values = np.zeros(128, np.uint64)
    values[DIGITS] = np.arange(len(DIGITS), dtype=np.uint64)
    digits = values[np.frombuffer(text.encode("ascii"), np.uint8).reshape(-1, BLOCK_CHARACTERS)]
    numbers = np.zeros(len(digits), np.uint64)
    for n in range(BLOCK_CHARACTERS):
        numbers = numbers * BASE + digits[:, n]
    return numbers.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 2:].tobytes()
