"""Attention between words rather than between sub-word tokens.

The weight on a word is the sum over its tokens; the weights of a word as a query are the mean over its
tokens. A row therefore still sums to one::

    play  ##ing  outside           playing  outside
    0.2    0.3     0.5      ►        0.5      0.5
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from jumok.errors import InputError
from jumok.look.capture.axis_tokens import SPACE_MARK
from jumok.look.viewer.attended_image import AttendedImages
from jumok.look.viewer.token_marks import LabelledSpan, is_special_token
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer

MAX_TOKENS = 2048  # along each axis: all weights are computed
WORDPIECE_PREFIX = "##"  # WordPiece's mark of a token that continues a word


def find_word_starts(tokens: Sequence[str], patches: Collection[int] = ()) -> list[int]:
    """Return where words begin, by the marks of WordPiece or of tokenizers that write spaces as ▁.

    ``patches`` are positions of patches of images, each of which is a word.

    >>> find_word_starts(["[CLS]", "play", "##ing", "out"]), find_word_starts(["▁pla", "ying", "▁out"])
    ([0, 1, 3], [0, 2])
    """
    if any(token.startswith(WORDPIECE_PREFIX) for token in tokens):
        return [n for n, token in enumerate(tokens) if n == 0 or not token.startswith(WORDPIECE_PREFIX)]
    if not any(token.startswith(SPACE_MARK) for token in tokens):
        return list(range(len(tokens)))  # no marks: each token is a word
    is_special = list(map(is_special_token, tokens))
    for patch in patches:
        is_special[patch] = True
    return [
        n
        for n, token in enumerate(tokens)
        if n == 0 or token.startswith(SPACE_MARK) or is_special[n] or is_special[n - 1]
    ]


def merge_into_words(viewer_data: ViewerData) -> ViewerData:
    """Merge the tokens of each word; a layer without labels stays as it is, and so do the patches of images."""
    image = viewer_data.image
    if not isinstance(image, AttendedImages):
        merged = viewer_data.with_layers([_merge_layer(layer) for layer in viewer_data.layers])
        return replace(merged, opening=viewer_data.opening)
    layers, placements = [], {}
    for layer in viewer_data.layers:
        placement = image.find_placement(layer)
        if placement is not None and not placement.has_text:  # no words among the keys
            layers.append(layer)
            placements[layer.name] = placement
            continue
        patches = {key for span in placement.spans for key in range(span.start, span.stop)} if placement else set()
        merged_layer = _merge_layer(layer, patches, patches if image.has_patch_queries(layer) else set())
        layers.append(merged_layer)
        if placement is not None and layer.col_labels is not None:
            placements[layer.name] = placement.renumber(find_word_starts(layer.col_labels, patches))
    return replace(viewer_data, layers=tuple(layers), image=replace(image, placements=placements))


def _merge_layer(
    layer: ViewerLayer, col_patches: Collection[int] = (), row_patches: Collection[int] = ()
) -> ViewerLayer:
    if layer.row_labels is None or layer.col_labels is None:
        return layer
    num_rows, num_cols = layer.shape
    rows, cols = layer.row_labels, layer.col_labels
    if layer.kind == "cross" and layer.row_outputs is not None:
        rows = layer.row_outputs  # the words that a decoder produced, rather than those it read
        layer = replace(layer, row_labels=rows, row_outputs=None)
    row_starts, col_starts = find_word_starts(rows, row_patches), find_word_starts(cols, col_patches)
    if len(row_starts) == num_rows and len(col_starts) == num_cols:
        return layer
    if max(num_rows, num_cols) > MAX_TOKENS:
        raise InputError(
            f"{layer.name} has {num_rows} × {num_cols} tokens; words are merged up to {MAX_TOKENS}: show tokens"
        )
    tokens_per_row = np.diff([*row_starts, num_rows])[:, None]
    merged = [
        np.add.reduceat(np.add.reduceat(layer.compute_weights(head), row_starts, 0), col_starts, 1) / tokens_per_row
        for head in layer.heads
    ]
    return replace(
        layer,
        shape=(len(row_starts), len(col_starts)),
        heads=tuple(range(len(merged))),
        source=ArrayWeightSource(np.stack(merged).astype(np.float32)),
        row_labels=_join_tokens(rows, row_starts),
        col_labels=_join_tokens(cols, col_starts),
        first_generated=(
            _find_word(row_starts, layer.first_generated[0]),
            _find_word(col_starts, layer.first_generated[1]),
        ),
        row_outputs=None,  # the tokens that follow are in the middle of words
        spans=(_merge_spans(layer.spans[0], row_starts), _merge_spans(layer.spans[1], col_starts)),
    )


def _merge_spans(spans: Sequence[LabelledSpan], word_starts: Sequence[int]) -> tuple[LabelledSpan, ...]:
    """Return the spans of words that begin in these spans of tokens."""

    def find(token: int) -> int:
        return int(np.searchsorted(word_starts, token))

    merged = (LabelledSpan(find(span.start), find(span.stop), span.name) for span in spans)
    return tuple(span for span in merged if span.start < span.stop)


def _find_word(word_starts: Sequence[int], token: int | None) -> int | None:
    """Return the first word that begins at a token or after it."""
    return None if token is None else int(np.searchsorted(word_starts, token))


def _join_tokens(tokens: Sequence[str], word_starts: Sequence[int]) -> list[str]:
    ends = [*word_starts[1:], len(tokens)]
    pieces = (tokens[start:end] for start, end in zip(word_starts, ends, strict=True))
    return ["".join(token.removeprefix(WORDPIECE_PREFIX) for token in word).removeprefix(SPACE_MARK) for word in pieces]
