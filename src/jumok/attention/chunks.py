"""Work through the queries a few rows at a time, so that memory stays bounded whatever the length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

AT_ONCE = 1 << 25  # elements of the largest intermediate tensor


def step(queries: int, elements_a_row: int) -> int:
    """How many rows are worked on at a time if each needs an intermediate of ``elements_a_row`` elements."""
    return max(1, min(queries, AT_ONCE // max(1, elements_a_row)))


def by_rows(run: Callable[[slice], Tensor], queries: int, elements_a_row: int) -> Tensor:
    """``run(rows)`` for all rows of ``(…, Q, ·)``, joined.

    With more than one chunk and gradients asked for, each chunk is computed again in the backward pass
    instead of keeping its intermediates, which together would be as large as the whole.
    """
    rows = step(queries, elements_a_row)
    if rows >= queries:
        return run(slice(0, queries))
    parts = []
    for start in range(0, queries, rows):
        here = slice(start, min(start + rows, queries))
        if torch.is_grad_enabled():
            parts.append(checkpoint(run, here, use_reentrant=False))
        else:
            parts.append(run(here))
    return torch.cat(parts, dim=-2)
