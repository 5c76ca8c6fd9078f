"""Pooling: many places along an axis, in a few cells that are as even as whole numbers allow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from jumok.errors import InputError


@dataclass(frozen=True)
class Cells:
    """``places`` along an axis in ``cells`` cells: cell ``i`` begins at place ``i · places // cells``.

    >>> Cells(7, 3, torch.device("cpu")).cell
    tensor([0, 0, 1, 1, 2, 2, 2])
    """

    places: int
    cells: int
    device: torch.device

    @cached_property
    def cell(self) -> Tensor:
        """The cell of each place, ``(places,)``."""
        return ((torch.arange(self.places, device=self.device) + 1) * self.cells - 1) // max(1, self.places)

    @cached_property
    def starts(self) -> Tensor:
        """Where each cell begins, and where the last one ends: ``(cells + 1,)``."""
        return torch.arange(self.cells + 1, device=self.device) * self.places // max(1, self.cells)

    @property
    def sizes(self) -> Tensor:
        """How many places each cell has, ``(cells,)``."""
        return self.starts.diff()

    def of(self, some: slice) -> slice:
        """The cells that these places lie in."""
        first, last = (((place + 1) * self.cells - 1) // self.places for place in (some.start, some.stop - 1))
        return slice(first, last + 1)

    def pool(self, x: Tensor, dim: int, some: slice) -> Tensor:
        """``x``, which has the places ``some`` along ``dim``, summed in the cells ``of(some)``."""
        if self.cells == self.places:
            return x
        here = self.of(some)
        shape = list(x.shape)
        shape[dim] = here.stop - here.start
        return x.new_zeros(shape).index_add_(dim, self.cell[some] - here.start, x)


def pair(size: int | tuple[int, int], rows: int, cols: int, device: torch.device) -> tuple[Cells, Cells]:
    """The cells down and across of a picture of ``size``, of so many rows and columns."""
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise InputError(f"size={size!r} came; a number of cells is expected, or two: (down, across)")
    return Cells(rows, min(rows, sizes[0]), device), Cells(cols, min(cols, sizes[1]), device)
