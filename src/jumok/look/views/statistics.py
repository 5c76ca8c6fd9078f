"""Exact questions to a kept attention, answered without ever holding its Q×K weights.

============  ==================================================================
``compute_weights``   the weights themselves, of the part that is asked for
``compute_pooled_map``       a rectangle of any size, pooled to a picture
``compute_received_weight``  how much each key gets
``compute_entropy``   how widely each query spreads its attention
``find_top_keys``       the keys that each query attends to most
``compute_distance_profile``  how far away attention goes
``compute_rollout``   what reaches each position through all layers
============  ==================================================================

They work through strips of rows, a few MiB at a time, on any device. ``batch`` and ``head`` choose what is
looked at: a number (its axis is dropped then), a slice or a list of numbers (it stays), or None for all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import AxisIndex, CapturedAttention
from jumok.look.views.gpu_pooling import gpu_unsupported_reason, pool_map_on_gpu
from jumok.look.views.pooling import build_pooling_axes
from jumok.look.views.rollout import compute_rollout
from jumok.look.views.row_chunks import (
    IndexChoice,
    IndexSpan,
    count_indices,
    iterate_row_chunks,
    list_indices,
    resolve_choice,
    resolve_span,
)

__all__ = [
    "compute_distance_profile",
    "compute_entropy",
    "compute_pooled_map",
    "compute_received_weight",
    "compute_rollout",
    "compute_weights",
    "find_top_keys",
]


def compute_weights(
    attention: CapturedAttention,
    *,
    batch: IndexChoice = None,
    head: IndexChoice = None,
    rows: IndexChoice = None,
    cols: IndexChoice = None,
) -> Tensor:
    """The weights ``(B, H, Q, K)``, or the part asked for. The only answer that may be as large as Q×K.

    A row sums to one over all columns, or to zero without an allowed key. Weights are those before dropout.
    ``rows=(0, 4)`` are the two rows 0 and 4, as with any list; ``rows=slice(0, 4)`` are those from 0 to 3.

    >>> kept = Kept(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8))
    >>> weights(kept).shape, weights(kept, batch=0, head=1, rows=slice(2, 5)).shape
    (torch.Size([1, 2, 5, 7]), torch.Size([3, 7]))
    """
    asked = zip((batch, head, rows, cols), attention.shape, ("batch", "head", "rows", "cols"), strict=True)
    (entries, heads, some_rows, some_cols), single = zip(*(resolve_choice(*x) for x in asked), strict=True)
    out = attention.new_zeros(*(count_indices(x) for x in (entries, heads, some_rows, some_cols)))
    for at, entry in enumerate(list_indices(entries)):
        for strip in iterate_row_chunks(attention, entry, heads, some_rows, some_cols, include_masked=True):
            out[at, strip.heads, strip.rows] = strip.weights
    return out[tuple(0 if one else slice(None) for one in single)]


def compute_pooled_map(
    attention: CapturedAttention,
    *,
    batch: IndexChoice = 0,
    head: IndexChoice = 0,
    rows: IndexSpan = None,
    cols: IndexSpan = None,
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
    some_rows, some_cols = (
        resolve_span(rows, attention.shape[2], "rows"),
        resolve_span(cols, attention.shape[3], "cols"),
    )
    down, across = build_pooling_axes(
        size, count_indices(some_rows), count_indices(some_cols), attention.query.device
    )

    def part(entry: int, heads: AxisIndex) -> Tensor:
        if (
            gpu_unsupported_reason(
                attention, count_indices(heads) * count_indices(some_rows) * count_indices(some_cols)
            )
            is None
        ):
            return pool_map_on_gpu(
                attention, entry, heads, some_rows, some_cols, (down.num_cells, across.num_cells)
            )
        out = attention.new_zeros(count_indices(heads), down.num_cells, across.num_cells)
        for strip in iterate_row_chunks(attention, entry, heads, some_rows, some_cols):
            assert isinstance(strip.cols, slice)
            seen = slice(strip.cols.start - some_cols.start, strip.cols.stop - some_cols.start)
            # Down first: whole rows are added, which is fast, and leaves less to do across.
            pooled = across.pool(down.pool(strip.weights, 1, strip.rows), 2, seen)
            out[strip.heads, down.find_cells(strip.rows), across.find_cells(seen)] += pooled
        return out.div_(down.sizes[:, None])

    return _compute_each(attention, batch, head, part)


def compute_received_weight(
    attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> Tensor:
    """How much weight each key gets from all queries together: ``(H, K)``."""

    def part(entry: int, heads: AxisIndex) -> Tensor:
        out = attention.new_zeros(count_indices(heads), attention.shape[3])
        for strip in iterate_row_chunks(attention, entry, heads):
            out[strip.heads, strip.cols] += strip.weights.sum(1)
        return out

    return _compute_each(attention, batch, head, part)


def compute_entropy(
    attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> Tensor:
    """How widely each query spreads its attention, ``-Σ w · log w`` in nats: ``(H, Q)``.

    All weight on one key is 0, the same weight on ``n`` keys ``log n``; a row without an allowed key is 0.
    """

    def part(entry: int, heads: AxisIndex) -> Tensor:
        out = attention.new_zeros(count_indices(heads), attention.shape[2])
        for strip in iterate_row_chunks(attention, entry, heads):
            out[strip.heads, strip.rows] = torch.special.entr(strip.weights).sum(-1)
        return out

    return _compute_each(attention, batch, head, part)


def find_top_keys(
    attention: CapturedAttention, k: int, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest weights of each query, largest first, and the places of their keys.

    Both are ``(H, Q, min(k, K))``. A query with fewer keys than that has weight 0 and place -1 in the rest.
    """
    if k < 1:
        raise InputError(f"top({k}) came; at least one key is expected")
    most = min(k, attention.shape[3])
    found: list[Tensor] = []

    def part(entry: int, heads: AxisIndex) -> Tensor:
        largest = attention.new_zeros(count_indices(heads), attention.shape[2], most)
        places = torch.full(largest.shape, -1, device=largest.device)
        for strip in iterate_row_chunks(attention, entry, heads):
            assert isinstance(strip.cols, slice)
            values, at = strip.weights.topk(min(most, count_indices(strip.cols)))
            here = (strip.heads, strip.rows, slice(0, values.shape[-1]))
            largest[here] = values
            places[here] = torch.where(values > 0, at + strip.cols.start, -1)
        found.append(largest)
        return places

    places = _compute_each(attention, batch, head, part)
    return torch.stack(found).reshape(places.shape), places


def compute_distance_profile(
    attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> Tensor:
    """How far away attention goes: the weight at each distance ``|i - j|``, on average over the queries.

    ``(H, n)``, from distance 0 on; the profile of a head sums to one. With a diagonal (a causal mask over a
    cache, say), query ``i`` stands at its last allowed key.
    """
    _, _, queries, keys = attention.shape
    shift = attention.diagonal or 0
    farthest = max(abs(queries - 1 + shift), abs(keys - 1 - shift), abs(shift), 0)

    def part(entry: int, heads: AxisIndex) -> Tensor:
        out = attention.new_zeros(count_indices(heads), farthest + 1)
        for strip in iterate_row_chunks(attention, entry, heads):
            assert isinstance(strip.cols, slice)
            sums = _sum_diagonals(strip.weights)  # (heads, rows + cols - 1), from the lower left corner
            nearest = strip.rows.start + shift - strip.cols.stop + 1  # i - j in the upper right corner
            places = torch.arange(nearest, nearest + sums.shape[-1], device=out.device).abs()
            out[strip.heads].index_add_(1, places, sums)
        return out.div_(max(1, queries))

    return _compute_each(attention, batch, head, part)


def _sum_diagonals(x: Tensor) -> Tensor:
    """Sums along the diagonals of ``(…, R, C)``, from upper right to lower left: ``(…, R + C - 1)``."""
    rows, cols = x.shape[-2:]
    many = rows + cols - 1
    # Written in lines of one place more, and read in lines of as many as there are diagonals, each row stands
    # one place further right than the row above it: the diagonals stand upright.
    line = torch.nn.functional.pad(x.flip(-1), (0, rows)).flatten(-2)
    return line[..., : rows * many].reshape(*x.shape[:-1], many).sum(-2)


def _compute_each(
    attention: CapturedAttention,
    batch: IndexChoice,
    head: IndexChoice,
    compute: Callable[[int, AxisIndex], Tensor],
) -> Tensor:
    """``compute(entry, heads)`` for each entry of the batch chosen, ``(B, H, …)`` without the axes of one."""
    entries, one_entry = resolve_choice(batch, attention.shape[0], "batch")
    heads, one_head = resolve_choice(head, attention.shape[1], "head")
    found = [compute(entry, heads) for entry in list_indices(entries)]
    found = [x[0] if one_head else x for x in found]
    return found[0] if one_entry else torch.stack(found)
