"""Weights without attention sinks: those keys get weight 0, and the rest of each row is scaled to the row's old sum.

Many heads put most of their weight on the first token and on special tokens (Xiao et al. 2023, arXiv 2309.17453),
which hides what else they attend to::

    [CLS]  the   cat  [SEP]            [CLS]  the   cat  [SEP]
     0.5   0.1   0.1   0.3      ►        0    0.5   0.5    0
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from jumok.look.viewer.tiles import FloatArray, to_float32_array
from jumok.look.viewer.token_marks import list_runs
from jumok.look.views import sampling
from jumok.look.views.pooling import PoolingAxis, build_pooling_axes
from jumok.look.views.row_chunks import get_rows_per_chunk

if TYPE_CHECKING:
    from jumok.look.viewer.viewer_data import ViewerLayer, WeightSource

MIN_REST = 1e-6  # weight beside the sinks, below which nothing is left: the row becomes 0
NUM_CHECKED_ROWS = 8  # of a head, to find out whether its rows sum to 1


Rows: TypeAlias = slice | NDArray[np.int64]


class SinkFreeWeights:
    """The weights of a layer without its sinks, computed in chunks of rows; those of long maps from a sample of them.

    ``head`` None is the mean of the heads, without the sinks: a head with nearly all of its weight on sinks
    hardly contributes to it.
    """

    def __init__(self, layer: ViewerLayer) -> None:
        self.layer, self.num_keys = layer, layer.shape[1]
        self.sinks = np.asarray(layer.sinks, np.int64)
        self._runs = list_runs(layer.sinks)
        self._has_unit_sums: dict[int | None, bool] = {}  # by head

    def weights(self, head: int | None, rows: Rows, cols: slice) -> FloatArray:
        weights = self._compute_all(head, rows, cols) * self._compute_scales(head, rows)[:, None]
        weights[:, self.sinks[(self.sinks >= cols.start) & (self.sinks < cols.stop)] - cols.start] = 0
        return weights

    def pooled_map(self, head: int | None, rows: slice, cols: slice, size: int) -> FloatArray:
        num_rows, num_cols = rows.stop - rows.start, cols.stop - cols.start
        row_axis, col_axis = build_pooling_axes(size, num_rows, num_cols, torch.device("cpu"))
        col_starts = col_axis.starts[:-1].numpy()
        pooled = np.zeros((row_axis.num_cells, col_axis.num_cells), np.float32)
        sample, cells = self._sample_rows(head, rows, row_axis)
        first = 0
        for chunk in self._iterate_chunks(sample):
            summed = np.add.reduceat(self.weights(head, chunk, cols), col_starts, axis=1)
            np.add.at(pooled, cells[first : first + len(summed)], summed)
            first += len(summed)
        return np.asarray(pooled / np.bincount(cells)[:, None], np.float32)

    def received_weight(self, head: int | None, rows: slice) -> FloatArray:
        received = np.zeros(self.num_keys)
        num_rows = rows.stop - rows.start
        sample, cells = self._sample_rows(head, rows, PoolingAxis(num_rows, 1, torch.device("cpu")))
        for chunk in self._iterate_chunks(sample):
            received += self.weights(head, chunk, slice(0, self.num_keys)).sum(0)
        return np.asarray(received * (num_rows / len(cells)), np.float32)

    def _sample_rows(self, head: int | None, rows: slice, axis: PoolingAxis) -> tuple[Rows, NDArray[np.int64]]:
        """Return the rows from which the cells of an axis are computed, and the cell of each; of short maps, all."""
        max_rows = sampling.get_max_rows(self._get_source(head))
        if max_rows is None or rows.stop - rows.start <= max(max_rows, axis.num_cells):
            return rows, axis.cell_indices.numpy()
        sample, cells = sampling.sample_rows(axis, max(1, max_rows // axis.num_cells))
        return rows.start + sample.numpy(), cells.numpy()

    def _get_source(self, head: int | None) -> WeightSource:
        """Return the source of the weights of a head, or of each head of the mean."""
        return sampling.limit_pairs(self.layer.source, 1 if head is not None else len(self.layer.heads))

    def _compute_all(self, head: int | None, rows: Rows, cols: slice) -> FloatArray:
        """Return the weights with the sinks."""
        heads = self.layer.heads if head is None else (head,)
        parts = (to_float32_array(self.layer.source.weights(n, rows, cols)) for n in heads)
        return next(parts) if len(heads) == 1 else np.asarray(sum(parts) / np.float32(len(heads)), np.float32)

    def _compute_scales(self, head: int | None, rows: Rows) -> FloatArray:
        """Return the factor of each row, (sum of the row) / (sum without sinks)."""
        sums = self._compute_sums(head, rows)
        rest = sums.copy()
        for run in self._runs:
            rest -= self._compute_all(head, rows, run).sum(1)
        return np.where(rest > MIN_REST, sums / np.maximum(rest, MIN_REST), 0).astype(np.float32)

    def _compute_sums(self, head: int | None, rows: Rows) -> FloatArray:
        """Return the sum of each row: 1, except for weights that were changed after their softmax."""
        whole = slice(0, self.num_keys)
        if head not in self._has_unit_sums:
            checked = self._compute_all(head, slice(0, min(NUM_CHECKED_ROWS, self.layer.shape[0])), whole).sum(1)
            self._has_unit_sums[head] = bool(np.all(np.abs(checked - 1) < 0.01))
        if self._has_unit_sums[head]:
            return np.ones(rows.stop - rows.start if isinstance(rows, slice) else len(rows), np.float32)
        return np.concatenate([self._compute_all(head, part, whole).sum(1) for part in self._iterate_chunks(rows)])

    def _iterate_chunks(self, rows: Rows) -> Iterator[Rows]:
        step = get_rows_per_chunk(self.num_keys)
        if not isinstance(rows, slice):
            yield from (rows[start : start + step] for start in range(0, len(rows), step))
            return
        for start in range(rows.start, rows.stop, step):
            yield slice(start, min(start + step, rows.stop))
