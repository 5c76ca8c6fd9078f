"""Attention rollout: how much of each input position reaches each output position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.views.pooling import PoolingAxis, build_pooling_axes
from jumok.look.views.row_chunks import (
    IndexSpan,
    count_indices,
    get_rows_per_chunk,
    iterate_row_chunks,
    list_indices,
    resolve_choice,
    resolve_span,
)


def compute_rollout(
    layers: Sequence[CapturedAttention],
    *,
    batch: int = 0,
    rows: IndexSpan = None,
    size: int | tuple[int, int] | None = None,
    residual: float = 0.5,
) -> Tensor:
    """Return how much of each input position reaches each position of the last layer: ``(Q, K)``.

    In each layer, the mean weights of the heads are mixed with the identity, weighted by ``residual``, for
    the residual connection. The result is the product over the layers (Abnar and Zuidema, 2020). Rows sum to
    one. A row without a visible key, which is padding, keeps its input.

    Args:
        layers: Self-attentions of one model, from the first to the last.
        batch: The index in the batch.
        rows: Some of the rows: ``(first, one after the last)``. Only these are computed.
        size: None, or the size of a map that is pooled as by :func:`.statistics.compute_pooled_map`. In this
            case no more than a few MiB are needed at any length.
        residual: The share of the identity, 0 to 1.

    >>> layers = [CapturedAttention(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)) for _ in range(3)]
    >>> compute_rollout(layers).shape, compute_rollout(layers, rows=(3, 5)).shape
    (torch.Size([5, 5]), torch.Size([2, 5]))
    """
    length = _check_common_length(layers)
    if not 0 <= residual <= 1:
        raise InputError(f"residual={residual} is invalid; a share of the identity from 0 to 1 is expected")
    (batch_index,) = list_indices(resolve_choice(batch, layers[0].shape[0], "batch")[0])
    row_span = resolve_span(rows, length, "rows")
    full_size = (max(1, count_indices(row_span)), max(1, length))
    row_axis, col_axis = build_pooling_axes(
        full_size if size is None else size, count_indices(row_span), length, layers[0].query.device
    )
    rows_per_chunk = max(1, row_axis.num_cells) if size is None else get_rows_per_chunk(length)
    chunks = []
    for first in range(0, row_axis.num_cells, rows_per_chunk):
        shares = _build_mean_rows(
            layers[0],
            row_axis,
            slice(first, min(first + rows_per_chunk, row_axis.num_cells)),
            row_span.start,
            length,
        )
        for layer in reversed(layers):
            shares = _propagate_through_layer(layer, batch_index, shares, residual)
        chunks.append(col_axis.pool(shares, 1, slice(0, length)))
    return torch.cat(chunks) if chunks else layers[0].new_zeros(0, col_axis.num_cells)


def _build_mean_rows(
    attention: CapturedAttention, row_axis: PoolingAxis, cells: slice, offset: int, length: int
) -> Tensor:
    """Return one row for each cell: the mean of the one-hot rows of its positions."""
    first, last = (int(x) for x in row_axis.starts[[cells.start, cells.stop]])
    positions = torch.arange(first, last, device=row_axis.device)
    cell_indices = row_axis.cell_indices[first:last]
    out = attention.new_zeros(count_indices(cells), length)
    out[cell_indices - cells.start, positions + offset] = (1 / row_axis.sizes[cell_indices]).to(out.dtype)
    return out


def _propagate_through_layer(attention: CapturedAttention, batch_index: int, rows: Tensor, residual: float) -> Tensor:
    """Map ``rows``, shares of the positions of a layer's output, to shares of the positions of its input."""
    num_heads = attention.shape[1]
    out, mass = torch.zeros_like(rows), rows.new_zeros(rows.shape[1])
    for chunk in iterate_row_chunks(attention, batch_index, slice(0, num_heads)):
        mean = chunk.weights.sum(0).div_(num_heads)
        out[:, chunk.cols].addmm_(rows[:, chunk.rows], mean)
        mass[chunk.rows] += mean.sum(-1)
    # Rows without attention pass their input on.
    return out.mul_(1 - residual).add_(rows * (1 - (1 - residual) * mass))


def _check_common_length(layers: Sequence[CapturedAttention]) -> int:
    if not layers:
        raise InputError("no layers given; rollout needs at least one self-attention")
    shapes = [layer.shape for layer in layers]
    for index, (batch_size, _, num_queries, num_keys) in enumerate(shapes):
        if num_queries != num_keys:
            raise InputError(
                f"layer {index} has {num_queries} queries and {num_keys} keys; rollout is for self-attention "
                "over the same sequence: select those layers"
            )
        if (batch_size, num_keys) != (shapes[0][0], shapes[0][3]):
            raise InputError(
                f"layer {index} attends over {num_keys} positions in a batch of {batch_size}, the first one "
                f"over {shapes[0][3]} in a batch of {shapes[0][0]}: select layers of one forward and stack"
            )
    return num_keys
