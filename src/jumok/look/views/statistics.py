"""Exact statistics of a captured attention, computed without its full Q×K weights.

============================  ==================================================
``compute_weights``           the weights of the requested part
``compute_pooled_map``        a rectangle of any size, pooled to a map
``compute_received_weight``   the weight that each key receives
``compute_entropy``           how widely each query distributes its attention
``find_top_keys``             the keys with the highest weights of each query
``compute_distance_profile``  the weight at each distance
``compute_rollout``           attention rollout through all layers
============================  ==================================================

They process chunks of rows, a few MiB at a time, on any device. ``batch`` and ``head`` select what is
computed: a number (which drops the axis), a slice or a list of numbers (which keep it), or None for all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import AxisIndex, CapturedAttention
from jumok.look.views.gpu_pooling import gpu_unsupported_reason, pool_map_on_gpu
from jumok.look.views.pooling import build_pooling_axes
from jumok.look.views.row_chunks import (
    IndexChoice,
    IndexSpan,
    RowChunk,
    count_indices,
    iterate_row_chunks,
    list_indices,
    resolve_choice,
    resolve_span,
)


def compute_weights(
    attention: CapturedAttention,
    *,
    batch: IndexChoice = None,
    head: IndexChoice = None,
    rows: IndexChoice = None,
    cols: IndexChoice = None,
) -> Tensor:
    """Return the weights ``(B, H, Q, K)``, or a part of them. Only this result may be as large as Q×K.

    A row sums to one over all columns, or to zero without a visible key. Weights are those before dropout.
    ``rows=(0, 4)`` selects the two rows 0 and 4, as with any list; ``rows=slice(0, 4)`` those from 0 to 3.

    >>> attention = CapturedAttention(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8))
    >>> compute_weights(attention).shape, compute_weights(attention, batch=0, head=1, rows=slice(2, 5)).shape
    (torch.Size([1, 2, 5, 7]), torch.Size([3, 7]))
    """
    choices = zip((batch, head, rows, cols), attention.shape, ("batch", "head", "rows", "cols"), strict=True)
    (batch_indices, heads, row_index, col_index), is_single = zip(*(resolve_choice(*x) for x in choices), strict=True)
    out = attention.new_zeros(*(count_indices(x) for x in (batch_indices, heads, row_index, col_index)))
    for i, batch_index in enumerate(list_indices(batch_indices)):
        for chunk in iterate_row_chunks(attention, batch_index, heads, row_index, col_index, include_masked=True):
            out[i, chunk.heads, chunk.rows] = chunk.weights
    return out[tuple(0 if dropped else slice(None) for dropped in is_single)]


def compute_pooled_map(
    attention: CapturedAttention,
    *,
    batch: IndexChoice = 0,
    head: IndexChoice = 0,
    rows: IndexSpan = None,
    cols: IndexSpan = None,
    size: int | tuple[int, int] = 512,
) -> Tensor:
    """Pool a rectangle of the weights to ``(size, size)`` cells: a map of attention of any length.

    A cell holds the total weight from its queries to its keys, averaged over the queries; a row of cells
    therefore sums to one if all columns are included. Cells are as even as integers allow: of ``n`` rows,
    cell ``i`` begins at row ``i·n // size``. With fewer than ``size`` rows, each row has its own cell; the
    same holds for columns. ``size=(300, 400)`` means 300 rows and 400 columns of cells. ``rows=(0, 4)`` is a
    span here, from row 0 to row 3: a rectangle has no gaps.

    Large maps on a GPU are computed by a kernel. In bfloat16 and float16 its exponentials have a relative
    error of up to 7e-4; float32 is as exact as elsewhere.

    >>> attention = CapturedAttention(torch.randn(1, 2, 500, 8), torch.randn(1, 2, 700, 8))
    >>> compute_pooled_map(attention, head=1, size=64).shape
    torch.Size([64, 64])
    >>> compute_pooled_map(attention, head=1, rows=(100, 130), size=64).shape
    torch.Size([30, 64])
    """
    row_span = resolve_span(rows, attention.shape[2], "rows")
    col_span = resolve_span(cols, attention.shape[3], "cols")
    num_rows, num_cols = count_indices(row_span), count_indices(col_span)
    row_axis, col_axis = build_pooling_axes(size, num_rows, num_cols, attention.query.device)
    num_cells = (row_axis.num_cells, col_axis.num_cells)

    def compute(batch_index: int, heads: AxisIndex) -> Tensor:
        if gpu_unsupported_reason(attention, count_indices(heads) * num_rows * num_cols) is None:
            return pool_map_on_gpu(attention, batch_index, heads, row_span, col_span, num_cells)
        out = attention.new_zeros(count_indices(heads), *num_cells)
        for chunk in iterate_row_chunks(attention, batch_index, heads, row_span, col_span):
            assert isinstance(chunk.cols, slice)
            chunk_cols = slice(chunk.cols.start - col_span.start, chunk.cols.stop - col_span.start)
            # Pool the rows first: adding whole rows is fast and leaves less to do for the columns.
            pooled = col_axis.pool(row_axis.pool(chunk.weights, 1, chunk.rows), 2, chunk_cols)
            out[chunk.heads, row_axis.find_cells(chunk.rows), col_axis.find_cells(chunk_cols)] += pooled
        return out.div_(row_axis.sizes[:, None])

    return _compute_each(attention, batch, head, compute)


def compute_received_weight(
    attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> Tensor:
    """Return the weight that each key receives from all queries together: ``(H, K)``."""

    def add_chunk(out: Tensor, chunk: RowChunk) -> None:
        out[chunk.heads, chunk.cols] += chunk.weights.sum(1)

    return _reduce_chunks(attention, batch, head, attention.shape[3], add_chunk)


def compute_entropy(attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
    """Return how widely each query distributes its attention, ``-Σ w · log w`` in nats: ``(H, Q)``.

    The entropy is 0 if all weight is on one key, and ``log n`` for equal weights on ``n`` keys; a row without
    a visible key has 0.
    """

    def add_chunk(out: Tensor, chunk: RowChunk) -> None:
        out[chunk.heads, chunk.rows] = torch.special.entr(chunk.weights).sum(-1)

    return _reduce_chunks(attention, batch, head, attention.shape[2], add_chunk)


def find_top_keys(
    attention: CapturedAttention, k: int, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest weights of each query, largest first, and the positions of their keys.

    Both are ``(H, Q, min(k, K))``. A query with fewer keys has weight 0 and position -1 in the rest.
    """
    if k < 1:
        raise InputError(f"top_keys({k}) is invalid; at least one key is expected")
    num_keys = min(k, attention.shape[3])
    top_weights: list[Tensor] = []

    def compute(batch_index: int, heads: AxisIndex) -> Tensor:
        largest = attention.new_zeros(count_indices(heads), attention.shape[2], num_keys)
        positions = torch.full(largest.shape, -1, device=largest.device)
        for chunk in iterate_row_chunks(attention, batch_index, heads):
            assert isinstance(chunk.cols, slice)
            values, indices = chunk.weights.topk(min(num_keys, count_indices(chunk.cols)))
            target = (chunk.heads, chunk.rows, slice(0, values.shape[-1]))
            largest[target] = values
            positions[target] = torch.where(values > 0, indices + chunk.cols.start, -1)
        top_weights.append(largest)
        return positions

    positions = _compute_each(attention, batch, head, compute)
    return torch.stack(top_weights).reshape(positions.shape), positions


def compute_distance_profile(
    attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> Tensor:
    """Return the weight at each distance ``|i - j|``, averaged over the queries: ``(H, n)``.

    The profile starts at distance 0 and sums to one. With a diagonal (a causal mask over a cache, for
    example), the position of query ``i`` is that of its last visible key.
    """
    _, _, num_queries, num_keys = attention.shape
    offset = attention.diagonal or 0
    max_distance = max(abs(num_queries - 1 + offset), abs(num_keys - 1 - offset), abs(offset), 0)

    def add_chunk(out: Tensor, chunk: RowChunk) -> None:
        assert isinstance(chunk.cols, slice)
        sums = _sum_diagonals(chunk.weights)  # (heads, rows + cols - 1), from the lower left corner
        nearest = chunk.rows.start + offset - chunk.cols.stop + 1  # i - j in the upper right corner
        distances = torch.arange(nearest, nearest + sums.shape[-1], device=out.device).abs()
        out[chunk.heads].index_add_(1, distances, sums)

    return _reduce_chunks(attention, batch, head, max_distance + 1, add_chunk).div_(max(1, num_queries))


def _sum_diagonals(x: Tensor) -> Tensor:
    """Return the sums along the diagonals of ``(…, R, C)``, upper right to lower left: ``(…, R + C - 1)``."""
    rows, cols = x.shape[-2:]
    num_diagonals = rows + cols - 1
    # Rows are padded by one element more than there are diagonals and read again without it, which shifts
    # each row one position further to the right than the row above it: diagonals become columns.
    padded = torch.nn.functional.pad(x.flip(-1), (0, rows)).flatten(-2)
    return padded[..., : rows * num_diagonals].reshape(*x.shape[:-1], num_diagonals).sum(-2)


def _reduce_chunks(
    attention: CapturedAttention,
    batch: IndexChoice,
    head: IndexChoice,
    size: int,
    add_chunk: Callable[[Tensor, RowChunk], None],
) -> Tensor:
    """Return ``(H, size)`` for each batch index, to which ``add_chunk(out, chunk)`` adds each chunk of rows."""

    def compute(batch_index: int, heads: AxisIndex) -> Tensor:
        out = attention.new_zeros(count_indices(heads), size)
        for chunk in iterate_row_chunks(attention, batch_index, heads):
            add_chunk(out, chunk)
        return out

    return _compute_each(attention, batch, head, compute)


def _compute_each(
    attention: CapturedAttention,
    batch: IndexChoice,
    head: IndexChoice,
    compute: Callable[[int, AxisIndex], Tensor],
) -> Tensor:
    """Return ``compute(batch_index, heads)`` for each batch index; single choices drop their axis."""
    batch_indices, is_one_batch = resolve_choice(batch, attention.shape[0], "batch")
    heads, is_one_head = resolve_choice(head, attention.shape[1], "head")
    results = [compute(batch_index, heads) for batch_index in list_indices(batch_indices)]
    results = [x[0] if is_one_head else x for x in results]
    return results[0] if is_one_batch else torch.stack(results)
