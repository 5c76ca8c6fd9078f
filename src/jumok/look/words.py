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
from jumok.look.scene import Arrays, Layer, Scene, numbers
from jumok.look.tokens import SPACE

__all__ = ["beginnings", "in_words"]

MOST = 2048  # tokens a side: all weights are computed
INSIDE = "##"  # WordPiece's mark of a piece that goes on with a word
SPECIAL = re.compile(r"<(?!0x)[^<>]+>|\[[A-Z]+\d*\]")  # <s>, [CLS], <|end|>; <0xEC> is a part of a character


def beginnings(tokens: Sequence[str]) -> list[int]:
    """Where words begin, told by the marks of WordPiece or of tokenizers that write spaces as ▁.

    >>> beginnings(["[CLS]", "play", "##ing", "out"]), beginnings(["▁pla", "ying", "▁out", "</s>"])
    ([0, 1, 3], [0, 2, 3])
    """
    if any(token.startswith(INSIDE) for token in tokens):
        return [n for n, token in enumerate(tokens) if n == 0 or not token.startswith(INSIDE)]
    if not any(token.startswith(SPACE) for token in tokens):
        return list(range(len(tokens)))  # no marks: each is taken for a word
    alone = [SPECIAL.fullmatch(token) is not None for token in tokens]
    return [
        n for n, token in enumerate(tokens) if n == 0 or token.startswith(SPACE) or alone[n] or alone[n - 1]
    ]


def in_words(scene: Scene) -> Scene:
    """The scene with the pieces of each word as one; a layer whose texts are not known stays as it is."""
    return scene.with_layers([_merged(layer) for layer in scene.layers])


def _merged(layer: Layer) -> Layer:
    if layer.rows is None or layer.cols is None:
        return layer
    tall, wide = layer.shape
    if max(tall, wide) > MOST:
        raise InputError(
            f"{layer.name} has {tall} × {wide} tokens; words are put together up to {MOST}: look at tokens"
        )
    rows, cols = list(layer.rows)[:tall], list(layer.cols)[:wide]
    down, across = beginnings(rows), beginnings(cols)
    many = np.diff([*down, tall])[:, None]
    everything = slice(0, tall), slice(0, wide)
    merged = [
        np.add.reduceat(np.add.reduceat(numbers(layer.source.weights(head, *everything)), down, 0), across, 1)
        / many
        for head in layer.heads
    ]
    return replace(
        layer,
        shape=(len(down), len(across)),
        heads=tuple(range(len(merged))),
        source=Arrays(np.stack(merged).astype(np.float32)),
        rows=_texts(rows, down),
        cols=_texts(cols, across),
    )


def _texts(tokens: Sequence[str], begins: Sequence[int]) -> list[str]:
    ends = [*begins[1:], len(tokens)]
    pieces = (tokens[begin:end] for begin, end in zip(begins, ends, strict=True))
    return ["".join(piece.removeprefix(INSIDE) for piece in some).removeprefix(SPACE) for some in pieces]
