"""Exact statistics of a captured attention, computed without its full Q×K weights.

============================  ==================================================
``compute_weights``           the weights of the requested part
``compute_pooled_map``        a rectangle of any size, pooled to a map
``compute_statistics``        all of the following in one pass
``compute_received_weight``   the weight that each key receives
``compute_entropy``           how widely each query distributes its attention
``compute_distance_profile``  the weight at each distance
``compute_sink_share``        the weight of each query on the first key
``find_top_keys``             the keys with the highest weights of each query
============================  ==================================================

They process chunks of rows, a few MiB at a time, on any device; on a GPU, kernels compute large ones. ``batch``
and ``head`` select what is computed: a number (which drops the axis), a slice or a list of numbers (which keep
it), or None for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import AxisIndex, CapturedAttention
from jumok.look.views.gpu_kernels import compute_statistics_on_gpu, gpu_unsupported_reason, pool_map_on_gpu
from jumok.look.views.pooling import build_pooling_axes
from jumok.look.views.row_chunks import (
    IndexChoice,
    IndexSpan,
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

    return _compute_each(attention, batch, head, lambda *selection: {"map": compute(*selection)})["map"]


class AttentionStatistics(NamedTuple):
    """Statistics of the weights. Without the axis of heads if one head was selected."""

    received_weight: Tensor  # (H, K), see compute_received_weight
    entropy: Tensor  # (H, Q), see compute_entropy
    distance_profile: Tensor  # (H, n), see compute_distance_profile
    sink_share: Tensor  # (H, Q), see compute_sink_share
    top_weights: Tensor  # (H, Q, k), see find_top_keys
    top_keys: Tensor  # (H, Q, k)


def compute_statistics(
    attention: CapturedAttention, *, num_top: int = 8, batch: IndexChoice = 0, head: IndexChoice = None
) -> AttentionStatistics:
    """Return all statistics, computed in one pass over the queries and keys.

    ``num_top`` is the number of keys with the highest weights that are found for each query.

    >>> attention = CapturedAttention(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8))
    >>> statistics = compute_statistics(attention, num_top=3)
    >>> statistics.received_weight.shape, statistics.entropy.shape, statistics.top_keys.shape
    (torch.Size([2, 7]), torch.Size([2, 5]), torch.Size([2, 5, 3]))
    """
    return AttentionStatistics(**_compute_fields(attention, AttentionStatistics._fields, batch, head, num_top))


def compute_received_weight(
    attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> Tensor:
    """Return the weight that each key receives from all queries together: ``(H, K)``."""
    return _compute_fields(attention, ["received_weight"], batch, head)["received_weight"]


def compute_entropy(attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
    """Return how widely each query distributes its attention, ``-Σ w · log w`` in nats: ``(H, Q)``.

    The entropy is 0 if all weight is on one key, and ``log n`` for equal weights on ``n`` keys; a row without
    a visible key has 0.
    """
    return _compute_fields(attention, ["entropy"], batch, head)["entropy"]


def compute_distance_profile(
    attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> Tensor:
    """Return the weight at each distance ``|i - j|``, averaged over the queries: ``(H, n)``.

    The profile starts at distance 0 and sums to one. With a diagonal (a causal mask over a cache, for
    example), the position of query ``i`` is that of its last visible key.
    """
    return _compute_fields(attention, ["distance_profile"], batch, head)["distance_profile"]


def compute_sink_share(attention: CapturedAttention, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
    """Return the weight of each query on the first key, which often is an attention sink: ``(H, Q)``."""
    return _compute_fields(attention, ["sink_share"], batch, head)["sink_share"]


def find_top_keys(
    attention: CapturedAttention, k: int, *, batch: IndexChoice = 0, head: IndexChoice = None
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest weights of each query, largest first, and the positions of their keys.

    Both are ``(H, Q, min(k, K))``. A query with fewer keys has weight 0 and position -1 in the rest.
    """
    fields = _compute_fields(attention, ["top_weights", "top_keys"], batch, head, k)
    return fields["top_weights"], fields["top_keys"]


# ------------------------------------------------------------------------------------- computing them


def _compute_fields(
    attention: CapturedAttention,
    names: Sequence[str],
    batch: IndexChoice,
    head: IndexChoice,
    num_top: int = 0,
) -> dict[str, Tensor]:
    """Return the fields of :class:`AttentionStatistics` with these names."""
    has_top = "top_keys" in names
    if has_top and num_top < 1:
        raise InputError(f"top_keys({num_top}) is invalid; at least one key is expected")
    num_top = min(num_top, attention.shape[3]) if has_top else 0

    def compute(batch_index: int, heads: AxisIndex) -> dict[str, Tensor]:
        fields = compute_statistics_on_gpu(attention, batch_index, heads, num_top)
        if fields is None:
            fields = _add_row_chunks(attention, names, batch_index, heads, num_top)
        fields = {name: fields[name] for name in names if name in fields}
        if "distance_profile" in fields:
            fields["distance_profile"].div_(max(1, attention.shape[2]))
        if "sink_share" in names:
            fields["sink_share"] = _compute_first_weights(attention, batch_index, heads)
        return fields

    return _compute_each(attention, batch, head, compute)


def _add_row_chunks(
    attention: CapturedAttention, names: Sequence[str], batch: int, heads: AxisIndex, num_top: int
) -> dict[str, Tensor]:
    """Return statistics of some heads of one sequence, added up over chunks of rows."""
    num_heads, (_, _, num_queries, num_keys) = count_indices(heads), attention.shape
    offset = attention.diagonal or 0
    max_distance = max(abs(num_queries - 1 + offset), abs(num_keys - 1 - offset), abs(offset), 0)
    sizes: dict[str, tuple[int, ...]] = {
        "received_weight": (num_keys,),
        "entropy": (num_queries,),
        "distance_profile": (max_distance + 1,),
        "top_weights": (num_queries, num_top),
    }
    fields = {name: attention.new_zeros(num_heads, *size) for name, size in sizes.items() if name in names}
    if "top_keys" in names:
        fields["top_keys"] = torch.full(fields["top_weights"].shape, -1, device=fields["top_weights"].device)
    for chunk in iterate_row_chunks(attention, batch, heads):
        assert isinstance(chunk.cols, slice)
        if "received_weight" in fields:
            fields["received_weight"][chunk.heads, chunk.cols] += chunk.weights.sum(1)
        if "entropy" in fields:
            # Faster than torch.special.entr; where a weight is 0, the logarithm is finite.
            logs = chunk.weights.clamp_min(torch.finfo(chunk.weights.dtype).tiny).log_()
            fields["entropy"][chunk.heads, chunk.rows] = torch.linalg.vecdot(chunk.weights, logs).neg_()
        if "distance_profile" in fields:
            sums = _sum_diagonals(chunk.weights)  # (heads, rows + cols - 1), from the lower left corner
            nearest = chunk.rows.start + offset - chunk.cols.stop + 1  # i - j in the upper right corner
            distances = torch.arange(sums.shape[-1], device=sums.device).flip(0).add_(nearest).abs_()
            fields["distance_profile"][chunk.heads].index_add_(1, distances, sums)
        if "top_keys" in fields:
            values, indices = chunk.weights.topk(min(num_top, count_indices(chunk.cols)))
            target = (chunk.heads, chunk.rows, slice(0, values.shape[-1]))
            fields["top_weights"][target] = values
            fields["top_keys"][target] = torch.where(values > 0, indices + chunk.cols.start, -1)
    return fields


def _sum_diagonals(x: Tensor) -> Tensor:
    """Return the sums along the diagonals of ``(H, R, C)``, lower left to upper right: ``(H, R + C - 1)``."""
    heads, rows, cols = x.shape
    # In a buffer with rows - 1 zeros on both sides, each row is read one element further right than the row
    # above it, which makes columns of the diagonals.
    padded = x.new_zeros(heads, rows, cols + 2 * (rows - 1))
    padded[..., rows - 1 : rows - 1 + cols] = x
    size, pitch = rows + cols - 1, padded.shape[-1]
    return padded.as_strided((heads, rows, size), (rows * pitch, pitch + 1, 1)).sum(1)


def _compute_first_weights(attention: CapturedAttention, batch: int, heads: AxisIndex) -> Tensor:
    """Return the weight of each query on the first key ``(heads, Q)``."""
    out = attention.new_zeros(count_indices(heads), attention.shape[2])
    if attention.shape[3]:
        for chunk in iterate_row_chunks(attention, batch, heads, cols=slice(0, 1)):
            out[chunk.heads, chunk.rows] = chunk.weights[..., 0]
    return out


def _compute_each(
    attention: CapturedAttention,
    batch: IndexChoice,
    head: IndexChoice,
    compute: Callable[[int, AxisIndex], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the tensors of ``compute(batch_index, heads)``, of all batch indices; single choices drop their axis."""
    batch_indices, is_one_batch = resolve_choice(batch, attention.shape[0], "batch")
    heads, is_one_head = resolve_choice(head, attention.shape[1], "head")
    results = [compute(batch_index, heads) for batch_index in list_indices(batch_indices)]
    out = {}
    for name in results[0]:
        tensors = [fields[name][0] if is_one_head else fields[name] for fields in results]
        out[name] = tensors[0] if is_one_batch else torch.stack(tensors)
    return out
