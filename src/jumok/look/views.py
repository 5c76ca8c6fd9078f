"""Exact questions to a kept attention, answered without ever holding its Q×K weights.

============  ==================================================================
``weights``   the weights themselves, of the part that is asked for
``map``       a rectangle of any size, pooled to a picture
``received``  how much each key gets
``entropy``   how widely each query spreads its attention
``top``       the keys that each query attends to most
``distance``  how far away attention goes
``rollout``   what reaches each position through all layers
============  ==================================================================

They work through strips of rows, a few MiB at a time, on any device. ``batch`` and ``head`` choose what is
looked at: a number (its axis is dropped then), a slice or a list of numbers (it stays), or None for all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.cells import pair
from jumok.look.kept import Kept, Part
from jumok.look.on_gpu import pooled_on_gpu, why_not_on_gpu
from jumok.look.rollout import rollout
from jumok.look.strips import Choice, Span, chosen, count, numbers, span, strips

__all__ = ["distance", "entropy", "map", "received", "rollout", "top", "weights"]


def weights(
    kept: Kept, *, batch: Choice = None, head: Choice = None, rows: Choice = None, cols: Choice = None
) -> Tensor:
    """The weights ``(B, H, Q, K)``, or the part asked for. The only answer that may be as large as Q×K.

    A row sums to one over all columns, or to zero without an allowed key. Weights are those before dropout.
    ``rows=(0, 4)`` are the two rows 0 and 4, as with any list; ``rows=slice(0, 4)`` are those from 0 to 3.

    >>> kept = Kept(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8))
    >>> weights(kept).shape, weights(kept, batch=0, head=1, rows=slice(2, 5)).shape
    (torch.Size([1, 2, 5, 7]), torch.Size([3, 7]))
    """
    asked = zip((batch, head, rows, cols), kept.shape, ("batch", "head", "rows", "cols"), strict=True)
    (entries, heads, some_rows, some_cols), single = zip(*(chosen(*x) for x in asked), strict=True)
    out = kept.zeros(*(count(x) for x in (entries, heads, some_rows, some_cols)))
    for at, entry in enumerate(numbers(entries)):
        for strip in strips(kept, entry, heads, some_rows, some_cols, wide=True):
            out[at, strip.heads, strip.rows] = strip.weights
    return out[tuple(0 if one else slice(None) for one in single)]


def map(
    kept: Kept,
    *,
    batch: Choice = 0,
    head: Choice = 0,
    rows: Span = None,
    cols: Span = None,
    size: int | tuple[int, int] = 512,
) -> Tensor:
    """A rectangle of the weights, pooled to ``(size, size)`` cells: a picture of attention of any length.

    A cell holds what its queries give to its keys together, on average over the queries; a row of cells thus
    sums to one where all columns are looked at. Cells are as even as whole numbers allow: of ``n`` rows, cell
    ``i`` begins at row ``i·n // size``. With fewer than ``size`` rows each has its own cell, and there are
    fewer cells; and so with columns. ``size=(300, 400)`` is 300 cells down, 400 across. ``rows=(0, 4)`` is a
    span here, from row 0 to row 3: a rectangle has no gaps.

    Large maps on a GPU are made by a kernel. In bfloat16 and float16 it takes exponentials that are right to
    a relative 7e-4; float32 is as exact as elsewhere.

    >>> kept = Kept(torch.randn(1, 2, 500, 8), torch.randn(1, 2, 700, 8))
    >>> map(kept, head=1, size=64).shape
    torch.Size([64, 64])
    >>> map(kept, head=1, rows=(100, 130), size=64).shape
    torch.Size([30, 64])
    """
    some_rows, some_cols = span(rows, kept.shape[2], "rows"), span(cols, kept.shape[3], "cols")
    down, across = pair(size, count(some_rows), count(some_cols), kept.query.device)

    def part(entry: int, heads: Part) -> Tensor:
        if why_not_on_gpu(kept, count(heads) * count(some_rows) * count(some_cols)) is None:
            return pooled_on_gpu(kept, entry, heads, some_rows, some_cols, (down.cells, across.cells))
        out = kept.zeros(count(heads), down.cells, across.cells)
        for strip in strips(kept, entry, heads, some_rows, some_cols):
            assert isinstance(strip.cols, slice)
            seen = slice(strip.cols.start - some_cols.start, strip.cols.stop - some_cols.start)
            # Down first: whole rows are added, which is fast, and leaves less to do across.
            pooled = across.pool(down.pool(strip.weights, 1, strip.rows), 2, seen)
            out[strip.heads, down.of(strip.rows), across.of(seen)] += pooled
        return out.div_(down.sizes[:, None])

    return _each(kept, batch, head, part)


def received(kept: Kept, *, batch: Choice = 0, head: Choice = None) -> Tensor:
    """How much weight each key gets from all queries together: ``(H, K)``."""

    def part(entry: int, heads: Part) -> Tensor:
        out = kept.zeros(count(heads), kept.shape[3])
        for strip in strips(kept, entry, heads):
            out[strip.heads, strip.cols] += strip.weights.sum(1)
        return out

    return _each(kept, batch, head, part)


def entropy(kept: Kept, *, batch: Choice = 0, head: Choice = None) -> Tensor:
    """How widely each query spreads its attention, ``-Σ w · log w`` in nats: ``(H, Q)``.

    All weight on one key is 0, the same weight on ``n`` keys ``log n``; a row without an allowed key is 0.
    """

    def part(entry: int, heads: Part) -> Tensor:
        out = kept.zeros(count(heads), kept.shape[2])
        for strip in strips(kept, entry, heads):
            out[strip.heads, strip.rows] = torch.special.entr(strip.weights).sum(-1)
        return out

    return _each(kept, batch, head, part)


def top(kept: Kept, k: int, *, batch: Choice = 0, head: Choice = None) -> tuple[Tensor, Tensor]:
    """The ``k`` largest weights of each query, largest first, and the places of their keys.

    Both are ``(H, Q, min(k, K))``. A query with fewer keys than that has weight 0 and place -1 in the rest.
    """
    if k < 1:
        raise InputError(f"top({k}) came; at least one key is expected")
    most = min(k, kept.shape[3])
    found: list[Tensor] = []

    def part(entry: int, heads: Part) -> Tensor:
        largest = kept.zeros(count(heads), kept.shape[2], most)
        places = torch.full(largest.shape, -1, device=largest.device)
        for strip in strips(kept, entry, heads):
            assert isinstance(strip.cols, slice)
            values, at = strip.weights.topk(min(most, count(strip.cols)))
            here = (strip.heads, strip.rows, slice(0, values.shape[-1]))
            largest[here] = values
            places[here] = torch.where(values > 0, at + strip.cols.start, -1)
        found.append(largest)
        return places

    places = _each(kept, batch, head, part)
    return torch.stack(found).reshape(places.shape), places


def distance(kept: Kept, *, batch: Choice = 0, head: Choice = None) -> Tensor:
    """How far away attention goes: the weight at each distance ``|i - j|``, on average over the queries.

    ``(H, n)``, from distance 0 on; the profile of a head sums to one. With a diagonal (a causal mask over a
    cache, say), query ``i`` stands at its last allowed key.
    """
    _, _, queries, keys = kept.shape
    shift = kept.diagonal or 0
    farthest = max(abs(queries - 1 + shift), abs(keys - 1 - shift), abs(shift), 0)

    def part(entry: int, heads: Part) -> Tensor:
        out = kept.zeros(count(heads), farthest + 1)
        for strip in strips(kept, entry, heads):
            assert isinstance(strip.cols, slice)
            sums = _diagonal_sums(strip.weights)  # (heads, rows + cols - 1), from the lower left corner
            nearest = strip.rows.start + shift - strip.cols.stop + 1  # i - j in the upper right corner
            places = torch.arange(nearest, nearest + sums.shape[-1], device=out.device).abs()
            out[strip.heads].index_add_(1, places, sums)
        return out.div_(max(1, queries))

    return _each(kept, batch, head, part)


def _diagonal_sums(x: Tensor) -> Tensor:
    """Sums along the diagonals of ``(…, R, C)``, from upper right to lower left: ``(…, R + C - 1)``."""
    rows, cols = x.shape[-2:]
    many = rows + cols - 1
    # Written in lines of one place more, and read in lines of as many as there are diagonals, each row stands
    # one place further right than the row above it: the diagonals stand upright.
    line = torch.nn.functional.pad(x.flip(-1), (0, rows)).flatten(-2)
    return line[..., : rows * many].reshape(*x.shape[:-1], many).sum(-2)


def _each(kept: Kept, batch: Choice, head: Choice, part: Callable[[int, Part], Tensor]) -> Tensor:
    """``part(entry, heads)`` for each entry of the batch chosen, ``(B, H, …)`` without the axes of one."""
    entries, one_entry = chosen(batch, kept.shape[0], "batch")
    heads, one_head = chosen(head, kept.shape[1], "head")
    found = [part(entry, heads) for entry in numbers(entries)]
    found = [x[0] if one_head else x for x in found]
    return found[0] if one_entry else torch.stack(found)
