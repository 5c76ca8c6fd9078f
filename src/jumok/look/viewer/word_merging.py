"""Attention between words rather than between the pieces that a model reads.

What a word gets is what its pieces get together; how a word looks is the mean of how its pieces look. So a
row still adds up to one::

    play  ##ing  outside           playing  outside
    0.2    0.3     0.5      ►        0.5      0.5
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jumok.errors import InputError
from jumok.look.capture.axis_tokens import SPACE_MARK
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer, to_float32_array

__all__ = ["find_word_starts", "merge_into_words"]

MAX_TOKENS = 2048  # tokens a side: all weights are computed
WORDPIECE_PREFIX = "##"  # WordPiece's mark of a piece that goes on with a word
SPECIAL_TOKEN_PATTERN = re.compile(
    r"<(?!0x)[^<>]+>|\[[A-Z]+\d*\]"
)  # <s>, [CLS], <|end|>; <0xEC> is a part of a character


def find_word_starts(tokens: Sequence[str]) -> list[int]:
    """Where words begin, told by the marks of WordPiece or of tokenizers that write spaces as ▁.

    >>> beginnings(["[CLS]", "play", "##ing", "out"]), beginnings(["▁pla", "ying", "▁out", "</s>"])
    ([0, 1, 3], [0, 2, 3])
    """
    if any(token.startswith(WORDPIECE_PREFIX) for token in tokens):
        return [n for n, token in enumerate(tokens) if n == 0 or not token.startswith(WORDPIECE_PREFIX)]
    if not any(token.startswith(SPACE_MARK) for token in tokens):
        return list(range(len(tokens)))  # no marks: each is taken for a word
    alone = [SPECIAL_TOKEN_PATTERN.fullmatch(token) is not None for token in tokens]
    return [
        n
        for n, token in enumerate(tokens)
        if n == 0 or token.startswith(SPACE_MARK) or alone[n] or alone[n - 1]
    ]


def merge_into_words(viewer_data: ViewerData) -> ViewerData:
    """The scene with the pieces of each word as one; a layer whose texts are not known stays as it is."""
    return viewer_data.with_layers([_merge_layer(layer) for layer in viewer_data.layers])


def _merge_layer(layer: ViewerLayer) -> ViewerLayer:
    if layer.row_labels is None or layer.col_labels is None:
        return layer
    tall, wide = layer.shape
    if max(tall, wide) > MAX_TOKENS:
        raise InputError(
            f"{layer.name} has {tall} × {wide} tokens; words are put together up to {MAX_TOKENS}: look at tokens"
        )
    rows, cols = list(layer.row_labels)[:tall], list(layer.col_labels)[:wide]
    down, across = find_word_starts(rows), find_word_starts(cols)
    many = np.diff([*down, tall])[:, None]
    everything = slice(0, tall), slice(0, wide)
    merged = [
        np.add.reduceat(
            np.add.reduceat(to_float32_array(layer.source.weights(head, *everything)), down, 0), across, 1
        )
        / many
        for head in layer.heads
    ]
    return replace(
        layer,
        shape=(len(down), len(across)),
        heads=tuple(range(len(merged))),
        source=ArrayWeightSource(np.stack(merged).astype(np.float32)),
        row_labels=_join_tokens(rows, down),
        col_labels=_join_tokens(cols, across),
    )


def _join_tokens(tokens: Sequence[str], word_starts: Sequence[int]) -> list[str]:
    ends = [*word_starts[1:], len(tokens)]
    pieces = (tokens[begin:end] for begin, end in zip(word_starts, ends, strict=True))
    return [
        "".join(piece.removeprefix(WORDPIECE_PREFIX) for piece in some).removeprefix(SPACE_MARK)
        for some in pieces
    ]
