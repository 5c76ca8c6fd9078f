"""Attention rollout: what reaches each position through all layers."""

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
    """How much of each position at the input arrives at each position of the last layer: ``(Q, K)``.

    Abnar and Zuidema (2020): in each layer the heads' mean weights, mixed with ``residual`` parts of the
    identity for the residual connection; then the product over the layers. Rows sum to one. (A row without an
    allowed key, which is padding, keeps all it has.)

    Args:
        layers: self-attentions of one model, from the first to the last.
        batch: the entry of the batch.
        rows: some of the rows: ``(first, one after the last)``. Only these are computed.
        size: None, or the size of a picture that is pooled as by :func:`jumok.look.views.map`. Then, at any
            length, no more than a few MiB are held at a time.
        residual: the share of the identity, 0 to 1.

    >>> layers = [Kept(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)) for _ in range(3)]
    >>> rollout(layers).shape, rollout(layers, rows=(3, 5)).shape
    (torch.Size([5, 5]), torch.Size([2, 5]))
    """
    length = _check_common_length(layers)
    if not 0 <= residual <= 1:
        raise InputError(f"residual={residual} came; the share of the identity is from 0 to 1")
    (entry,) = list_indices(resolve_choice(batch, layers[0].shape[0], "batch")[0])
    some = resolve_span(rows, length, "rows")
    every = (max(1, count_indices(some)), max(1, length))
    down, across = build_pooling_axes(
        every if size is None else size, count_indices(some), length, layers[0].query.device
    )
    at_once = max(1, down.num_cells) if size is None else get_rows_per_chunk(length)
    parts = []
    for first in range(0, down.num_cells, at_once):
        start = _build_mean_rows(
            layers[0], down, slice(first, min(first + at_once, down.num_cells)), some.start, length
        )
        for layer in reversed(layers):
            start = _propagate_through_layer(layer, entry, start, residual)
        parts.append(across.pool(start, 1, slice(0, length)))
    return torch.cat(parts) if parts else layers[0].new_zeros(0, across.num_cells)


def _build_mean_rows(
    attention: CapturedAttention, row_axis: PoolingAxis, cells: slice, offset: int, length: int
) -> Tensor:
    """One row for each cell: the mean of the one-hot rows of its places."""
    first, last = (int(x) for x in row_axis.starts[[cells.start, cells.stop]])
    places = torch.arange(first, last, device=row_axis.device)
    cell = row_axis.cell_indices[first:last]
    out = attention.new_zeros(count_indices(cells), length)
    out[cell - cells.start, places + offset] = (1 / row_axis.sizes[cell]).to(out.dtype)
    return out


def _propagate_through_layer(
    attention: CapturedAttention, batch_index: int, rows: Tensor, residual: float
) -> Tensor:
    """``rows``, shares of the positions of one layer's output, as shares of the positions of its input."""
    heads = attention.shape[1]
    out, mass = torch.zeros_like(rows), rows.new_zeros(rows.shape[1])
    for strip in iterate_row_chunks(attention, batch_index, slice(0, heads)):
        mean = strip.weights.sum(0).div_(heads)
        out[:, strip.cols].addmm_(rows[:, strip.rows], mean)
        mass[strip.rows] += mean.sum(-1)
    # What is not attended from anywhere stays where it is.
    return out.mul_(1 - residual).add_(rows * (1 - (1 - residual) * mass))


def _check_common_length(layers: Sequence[CapturedAttention]) -> int:
    if not layers:
        raise InputError("no layers came; rollout needs at least one self-attention")
    shapes = [layer.shape for layer in layers]
    for at, (batch, _, queries, keys) in enumerate(shapes):
        if queries != keys:
            raise InputError(
                f"layer {at} has {queries} queries and {keys} keys; rollout is for self-attention over "
                "one and the same sequence: choose those layers"
            )
        if (batch, keys) != (shapes[0][0], shapes[0][3]):
            raise InputError(
                f"layer {at} attends over {keys} positions in a batch of {batch}, the first one over "
                f"{shapes[0][3]} in a batch of {shapes[0][0]}: choose layers of one forward and one stack"
            )
    return keys
