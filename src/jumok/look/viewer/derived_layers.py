"""Layers of the viewer that are computed from others: a part of one, the mean of several, or sums over patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jumok.errors import InputError
from jumok.look.viewer.tiles import FloatArray, WeightArray, to_float32_array
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerLayer, WeightSource


def select_part(
    layer: ViewerLayer,
    rows: slice,
    cols: slice,
    *,
    name: str | None = None,
    kind: str | None = None,
    row_labels: Sequence[str] | None = None,
    col_labels: Sequence[str] | None = None,
) -> ViewerLayer:
    """Return the rectangle of a layer with these rows and columns, given as slices with a start and a stop.

    Weights keep their values, so a row may sum to less than one.
    """
    num_rows, num_cols = rows.stop - rows.start, cols.stop - cols.start
    is_start = rows.start == 0 and cols.start == 0
    return replace(
        layer,
        name=layer.name if name is None else name,
        kind=layer.kind if kind is None else kind,
        shape=(num_rows, num_cols),
        # A part that begins at the first query and key has the same positions.
        source=layer.source if is_start else _PartSource(layer.source, rows.start, cols.start),
        row_labels=row_labels,
        col_labels=col_labels,
        first_generated=(None, None),
    )


def average_layers(heads: Sequence[tuple[ViewerLayer, Sequence[int]]], name: str) -> ViewerLayer:
    """Return the mean of some heads of several layers of the same shape, as a layer with a single head."""
    shapes = {layer.shape for layer, _ in heads}
    if len(shapes) != 1:
        raise InputError(
            f"layers of the shapes {sorted(shapes)} were given; expected layers of one shape, at least one"
        )
    sources = [(layer.source, head) for layer, numbers in heads for head in numbers]
    return replace(heads[-1][0], name=name, heads=(0,), source=_MeanSource(sources))


@dataclass(frozen=True)
class PatchGrid:
    """Positions that are patches of a spectrogram, band by band, after ``num_prefix`` other tokens."""

    num_prefix: int
    num_bands: int
    num_times: int

    @property
    def num_positions(self) -> int:
        return self.num_prefix + self.num_bands * self.num_times

    def sum_bands(self, weights: FloatArray) -> FloatArray:
        """Return the weight of each query on each time ``(Q, T)``, of weights on all positions ``(Q, K)``."""
        patches = weights[:, self.num_prefix :].reshape(len(weights), self.num_bands, self.num_times)
        return np.asarray(patches.sum(1), np.float32)


def average_patches(layer: ViewerLayer, grid: PatchGrid, num_times: int) -> tuple[ViewerLayer, ViewerLayer]:
    """Return the attention of the first tokens over time, and of each time over time; of the first ``num_times``.

    The weight on a time is the sum over its bands; the weights of a time as a query are the mean over its bands.
    """

    def compute_prefix(weights: FloatArray) -> FloatArray:
        return grid.sum_bands(weights[: grid.num_prefix])[:, :num_times]

    def compute_times(weights: FloatArray) -> FloatArray:
        rows = grid.sum_bands(weights[grid.num_prefix :]).reshape(grid.num_bands, grid.num_times, -1)
        return np.asarray(rows.mean(0)[:num_times, :num_times], np.float32)

    prefix, times = (
        replace(
            layer,
            name=f"{layer.name} ({name})",
            shape=(num_rows, num_times),
            source=_ReducedSource(layer, compute),
            row_labels=None,
            col_labels=None,
        )
        for name, num_rows, compute in (
            ("first tokens", grid.num_prefix, compute_prefix),
            ("over time", num_times, compute_times),
        )
    )
    return prefix, times


class _ReducedSource:
    """A small map that is computed from the whole map of each head, and then kept."""

    def __init__(self, layer: ViewerLayer, compute: Callable[[FloatArray], FloatArray]) -> None:
        self.layer, self.compute = layer, compute
        self.maps: dict[int, ArrayWeightSource] = {}

    def _get_map(self, head: int) -> ArrayWeightSource:
        if head not in self.maps:
            self.maps[head] = ArrayWeightSource(self.compute(self.layer.compute_weights(head)))
        return self.maps[head]

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> FloatArray:
        return self._get_map(head).pooled_map(0, rows, cols, size)

    def weights(self, head: int, rows: slice, cols: slice) -> FloatArray:
        return self._get_map(head).weights(0, rows, cols)

    def received_weight(self, head: int, rows: slice) -> FloatArray:
        return self._get_map(head).received_weight(0, rows)


class _PartSource:
    """The weights of a layer from some row and column on."""

    def __init__(self, source: WeightSource, first_row: int, first_col: int) -> None:
        self.source, self.first_row, self.first_col = source, first_row, first_col

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> WeightArray:
        return self.source.pooled_map(head, *self._shift(rows, cols), size)

    def weights(self, head: int, rows: slice, cols: slice) -> WeightArray:
        return self.source.weights(head, *self._shift(rows, cols))

    def received_weight(self, head: int, rows: slice) -> WeightArray:
        if self.first_row == 0:
            return self.source.received_weight(head, rows)[self.first_col :]
        before = self.source.received_weight(head, slice(0, self.first_row))
        total = self.source.received_weight(head, slice(0, self.first_row + rows.stop))
        return (total - before)[self.first_col :]

    def _shift(self, rows: slice, cols: slice) -> tuple[slice, slice]:
        return (
            slice(rows.start + self.first_row, rows.stop + self.first_row),
            slice(cols.start + self.first_col, cols.stop + self.first_col),
        )


class _MeanSource:
    """The mean of several heads, each of its own source; it has the single head 0."""

    def __init__(self, sources: Sequence[tuple[WeightSource, int]]) -> None:
        self.sources = sources

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> FloatArray:
        return self._average([source.pooled_map(number, rows, cols, size) for source, number in self.sources])

    def weights(self, head: int, rows: slice, cols: slice) -> FloatArray:
        return self._average([source.weights(number, rows, cols) for source, number in self.sources])

    def received_weight(self, head: int, rows: slice) -> FloatArray:
        return self._average([source.received_weight(number, rows) for source, number in self.sources])

    @staticmethod
    def _average(parts: Sequence[WeightArray]) -> FloatArray:
        return np.asarray(np.mean([to_float32_array(part) for part in parts], axis=0), np.float32)
