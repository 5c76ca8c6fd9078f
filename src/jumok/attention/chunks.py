"""Work through the queries a few rows at a time, so that memory stays bounded whatever the length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jumok.errors import InputError

AT_ONCE = 1 << 25  # elements of the largest intermediate tensor


def step(queries: int, elements_a_row: int) -> int:
    """How many rows are worked on at a time, when each needs an intermediate of so many elements."""
    return max(1, min(queries, AT_ONCE // max(1, elements_a_row)))


def by_rows(
    run: Callable[[slice], Tensor], queries: int, elements_a_row: int, uses: tuple[Tensor, ...]
) -> Tensor:
    """``run(rows)`` for all rows of ``(…, Q, ·)``, joined; ``uses`` are the tensors that it reads.

    With more than one chunk and gradients asked for, each chunk is computed again in the backward pass
    instead of keeping its intermediates, which together would be as large as the whole.
    """
    rows = step(queries, elements_a_row)
    if rows >= queries:
        return run(slice(0, queries))
    # PyTorch's function transforms (torch.func) know no recomputing.
    again = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    written = _versions(uses)

    def unchanged(here: slice) -> Tensor:
        if _versions(uses) != written:
            raise InputError(
                "a tensor that attention read was changed in place before its backward pass, which computes "
                "part of the forward again; change a copy instead"
            )
        return run(here)

    parts = []
    for start in range(0, queries, rows):
        here = slice(start, min(start + rows, queries))
        parts.append(checkpoint(unchanged, here, use_reentrant=False) if again else run(here))
    return torch.cat(parts, dim=-2)


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    return [0 if torch.compiler.is_compiling() or x.is_inference() else x._version for x in tensors]
