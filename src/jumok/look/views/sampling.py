"""Pooled maps of a sample of the queries, for maps whose n² weights would take too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.views.pooling import PoolingAxis, build_pooling_axes
from jumok.look.views.row_chunks import iterate_row_chunks

Source = TypeVar("Source")


def compute_sampled_map(
    attention: CapturedAttention, batch: int, head: int, rows: slice, cols: slice, size: int, rows_per_cell: int
) -> Tensor:
    """Return a rectangle pooled as by :func:`.statistics.compute_pooled_map`, from some queries of each cell.

    Queries are evenly spaced. All keys count, so that the error is only that of replacing the mean over the
    queries of a cell by the mean over ``rows_per_cell`` of them.
    """
    row_axis, col_axis = build_pooling_axes(
        size, rows.stop - rows.start, cols.stop - cols.start, attention.query.device
    )
    sampled, cells = sample_rows(row_axis, rows_per_cell)
    out = attention.new_zeros(row_axis.num_cells, col_axis.num_cells)
    for chunk in iterate_row_chunks(
        attention, batch, slice(head, head + 1), sampled + rows.start, cols, include_masked=True
    ):
        pooled = col_axis.pool(chunk.weights[0], 1, slice(0, cols.stop - cols.start))
        out.index_add_(0, cells[chunk.rows], pooled)
    return out.div_(cells.bincount(minlength=row_axis.num_cells)[:, None])


def compute_sampled_received_weight(
    attention: CapturedAttention, batch: int, head: int, rows: slice, num_samples: int
) -> Tensor:
    """Return about the total weight that each key receives from the queries ``rows``: ``(K,)``."""
    num_rows, num_keys = rows.stop - rows.start, attention.shape[3]
    num_samples = min(num_samples, num_rows)
    sampled, _ = sample_rows(PoolingAxis(num_rows, 1, attention.query.device), num_samples)
    out = attention.new_zeros(num_keys)
    for chunk in iterate_row_chunks(
        attention, batch, slice(head, head + 1), sampled + rows.start, slice(0, num_keys), include_masked=True
    ):
        out += chunk.weights[0].sum(0)
    return out.mul_(num_rows / num_samples)


def limit_pairs(source: Source, num_heads: int) -> Source:
    """Return a source of weights for requests that compute so many heads: together, they take about as long as one."""
    limit: Callable[[int], Source] | None = getattr(source, "limit_pairs", None)
    return source if limit is None or num_heads == 1 else limit(num_heads)


def get_max_rows(source: object) -> int | None:
    """Return the number of queries from which a source of weights computes a long map; None: all of them."""
    max_rows: int | None = getattr(source, "max_rows", None)
    return max_rows


def sample_rows(axis: PoolingAxis, rows_per_cell: int) -> tuple[Tensor, Tensor]:
    """Return positions in the middle of ``rows_per_cell`` equal parts of each cell, and the cell of each."""
    if rows_per_cell < 1:
        raise InputError(f"rows_per_cell={rows_per_cell} is invalid; at least one query of a cell is expected")
    counts = axis.sizes.clamp_max(rows_per_cell)
    cells = torch.repeat_interleave(torch.arange(axis.num_cells, device=axis.device), counts)
    order = torch.arange(len(cells), device=axis.device) - (counts.cumsum(0) - counts)[cells]
    rows: Tensor = axis.starts[cells] + (2 * order + 1) * axis.sizes[cells] // (2 * counts[cells])
    return rows, cells
