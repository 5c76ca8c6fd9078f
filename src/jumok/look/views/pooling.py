"""Pooling: many places along an axis, in a few cells that are as even as whole numbers allow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from jumok.errors import InputError


@dataclass(frozen=True)
class PoolingAxis:
    """``length`` along an axis in ``num_cells`` cells: cell ``i`` begins at place ``i · length // num_cells``.

    >>> Cells(7, 3, torch.device("cpu")).cell
    tensor([0, 0, 1, 1, 2, 2, 2])
    """

    length: int
    num_cells: int
    device: torch.device

    @cached_property
    def cell_indices(self) -> Tensor:
        """The cell of each place, ``(length,)``."""
        return ((torch.arange(self.length, device=self.device) + 1) * self.num_cells - 1) // max(
            1, self.length
        )

    @cached_property
    def starts(self) -> Tensor:
        """Where each cell begins, and where the last one ends: ``(num_cells + 1,)``."""
        return torch.arange(self.num_cells + 1, device=self.device) * self.length // max(1, self.num_cells)

    @property
    def sizes(self) -> Tensor:
        """How many places each cell has, ``(num_cells,)``."""
        return self.starts.diff()

    def find_cells(self, positions: slice) -> slice:
        """The cells that these places lie in."""
        first, last = (
            ((place + 1) * self.num_cells - 1) // self.length
            for place in (positions.start, positions.stop - 1)
        )
        return slice(first, last + 1)

    def pool(self, x: Tensor, dim: int, positions: slice) -> Tensor:
        """``x``, which has the places ``positions`` along ``dim``, summed in the cells ``of(positions)``."""
        if self.num_cells == self.length:
            return x
        here = self.find_cells(positions)
        shape = list(x.shape)
        shape[dim] = here.stop - here.start
        return x.new_zeros(shape).index_add_(dim, self.cell_indices[positions] - here.start, x)


def build_pooling_axes(
    size: int | tuple[int, int], num_rows: int, num_cols: int, device: torch.device
) -> tuple[PoolingAxis, PoolingAxis]:
    """The cells down and across of a picture of ``size``, of so many rows and columns."""
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise InputError(f"size={size!r} came; a number of cells is expected, or two: (down, across)")
    return PoolingAxis(num_rows, min(num_rows, sizes[0]), device), PoolingAxis(
        num_cols, min(num_cols, sizes[1]), device
    )
