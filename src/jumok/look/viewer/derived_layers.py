"""Layers of the viewer that are computed from others: a part of one, the mean of several, or sums over patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError
from jumok.look.viewer.tiles import FloatArray, WeightArray, to_float32_array
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerLayer, WeightSource
from jumok.look.views.sampling import get_max_rows, limit_pairs


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
        row_outputs=None,
        spans=((), ()),
    )


def average_layers(
    heads: Sequence[tuple[ViewerLayer, Sequence[int]]], name: str, *, equal_layers: bool = False
) -> ViewerLayer:
    """Return the mean of some heads of several layers of the same shape, as a layer with a single head.

    All heads have the same share of it; with ``equal_layers``, all layers have, whatever the number of their heads.
    """
    shapes = {layer.shape for layer, _ in heads}
    if len(shapes) != 1:
        raise InputError(
            f"layers of the shapes {sorted(shapes)} were given; expected layers of one shape, at least one"
        )
    num_heads = sum(len(numbers) for _, numbers in heads)
    averaged = [
        AveragedHead(layer, number, 1 / (len(heads) * len(numbers)) if equal_layers else 1 / num_heads)
        for layer, numbers in heads
        for number in numbers
    ]
    return replace(heads[-1][0], name=name, heads=(0,), source=MeanWeightSource(averaged), mean_of=len(heads))


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

    def weights(self, head: int, rows: slice | NDArray[np.int64], cols: slice) -> FloatArray:
        return self._get_map(head).weights(0, rows, cols)

    def received_weight(self, head: int, rows: slice) -> FloatArray:
        return self._get_map(head).received_weight(0, rows)


class _PartSource:
    """The weights of a layer from some row and column on."""

    def __init__(self, source: WeightSource, first_row: int, first_col: int) -> None:
        self.source, self.first_row, self.first_col = source, first_row, first_col

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> WeightArray:
        return self.source.pooled_map(head, _shift(rows, self.first_row), _shift(cols, self.first_col), size)

    def weights(self, head: int, rows: slice | NDArray[np.int64], cols: slice) -> WeightArray:
        rows = _shift(rows, self.first_row) if isinstance(rows, slice) else rows + self.first_row
        return self.source.weights(head, rows, _shift(cols, self.first_col))

    @property
    def max_rows(self) -> int | None:
        return get_max_rows(self.source)

    def limit_pairs(self, num_heads: int) -> WeightSource:
        return _PartSource(limit_pairs(self.source, num_heads), self.first_row, self.first_col)

    def received_weight(self, head: int, rows: slice) -> WeightArray:
        if self.first_row == 0:
            return self.source.received_weight(head, rows)[self.first_col :]
        before = self.source.received_weight(head, slice(0, self.first_row))
        total = self.source.received_weight(head, slice(0, self.first_row + rows.stop))
        return (total - before)[self.first_col :]


def _shift(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


class AveragedHead(NamedTuple):
    """A head of a layer, and its share of a mean."""

    layer: ViewerLayer
    head: int
    share: float


class MeanWeightSource:
    """The mean of several heads, each of its own layer; it has the single head 0. Computed on request, head by head."""

    def __init__(self, heads: Sequence[AveragedHead]) -> None:
        self.heads = tuple(heads)
        self._sources = [limit_pairs(layer.source, len(heads)) for layer, _, _ in heads]

    @property
    def max_rows(self) -> int | None:
        """The number of queries that a request is computed from, at least; None: all of them."""
        return min((rows for source in self._sources if (rows := get_max_rows(source)) is not None), default=None)

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> FloatArray:
        return self._average("pooled_map", rows, cols, size)

    def weights(self, head: int, rows: slice | NDArray[np.int64], cols: slice) -> FloatArray:
        return self._average("weights", rows, cols)

    def received_weight(self, head: int, rows: slice) -> FloatArray:
        return self._average("received_weight", rows)

    def _average(self, method: str, *args: slice | int | NDArray[np.int64]) -> FloatArray:
        total: FloatArray | None = None
        for (_, head, share), source in zip(self.heads, self._sources, strict=True):
            part = to_float32_array(getattr(source, method)(head, *args)) * np.float32(share)
            total = part if total is None else np.add(total, part, out=total)
        assert total is not None
        return total
