"""Pooling of the positions along an axis to cells that are as even as integers allow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from jumok.errors import InputError


@dataclass(frozen=True)
class PoolingAxis:
    """``length`` positions in ``num_cells`` cells: cell ``i`` begins at ``i · length // num_cells``.

    >>> PoolingAxis(7, 3, torch.device("cpu")).cell_indices
    tensor([0, 0, 1, 1, 2, 2, 2])
    """

    length: int
    num_cells: int
    device: torch.device

    @cached_property
    def cell_indices(self) -> Tensor:
        """The cell of each position, ``(length,)``."""
        return ((torch.arange(self.length, device=self.device) + 1) * self.num_cells - 1) // max(1, self.length)

    @cached_property
    def starts(self) -> Tensor:
        """The start of each cell and the end of the last one: ``(num_cells + 1,)``."""
        return torch.arange(self.num_cells + 1, device=self.device) * self.length // max(1, self.num_cells)

    @property
    def sizes(self) -> Tensor:
        """The number of positions in each cell, ``(num_cells,)``."""
        return self.starts.diff()

    def find_cells(self, positions: slice) -> slice:
        """Return the cells that contain these positions."""
        first, last = (
            ((position + 1) * self.num_cells - 1) // self.length for position in (positions.start, positions.stop - 1)
        )
        return slice(first, last + 1)

    def pool(self, x: Tensor, dim: int, positions: slice) -> Tensor:
        """Sum ``x``, which has ``positions`` along ``dim``, over the cells ``find_cells(positions)``."""
        if self.num_cells == self.length:
            return x
        cells = self.find_cells(positions)
        shape = list(x.shape)
        shape[dim] = cells.stop - cells.start
        return x.new_zeros(shape).index_add_(dim, self.cell_indices[positions] - cells.start, x)


def build_pooling_axes(
    size: int | tuple[int, int], num_rows: int, num_cols: int, device: torch.device
) -> tuple[PoolingAxis, PoolingAxis]:
    """Return the pooling axes of a map of ``size`` for rows and columns."""
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise InputError(f"size={size!r} is invalid; a number of cells is expected, or two: (rows, columns)")
    return PoolingAxis(num_rows, min(num_rows, sizes[0]), device), PoolingAxis(
        num_cols, min(num_cols, sizes[1]), device
    )
