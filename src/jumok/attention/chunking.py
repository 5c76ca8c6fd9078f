"""Work through the queries a few rows at a time, so that memory stays bounded whatever the length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jumok.errors import InputError

MAX_CHUNK_ELEMENTS = 1 << 25  # elements of the largest intermediate tensor


def rows_per_chunk(num_queries: int, elements_per_row: int) -> int:
    """How many rows are worked on at a time, when each needs an intermediate of so many elements."""
    return max(1, min(num_queries, MAX_CHUNK_ELEMENTS // max(1, elements_per_row)))


def map_row_chunks(
    compute_rows: Callable[[slice], Tensor],
    num_queries: int,
    elements_per_row: int,
    inputs: tuple[Tensor, ...],
) -> Tensor:
    """``compute_rows(rows)`` for all rows of ``(…, Q, ·)``, joined; ``inputs`` are the tensors that it reads.

    With more than one chunk and gradients asked for, each chunk is computed again in the backward pass
    instead of keeping its intermediates, which together would be as large as the whole.
    """
    rows = rows_per_chunk(num_queries, elements_per_row)
    if rows >= num_queries:
        return compute_rows(slice(0, num_queries))
    # PyTorch's function transforms (torch.func) know no recomputing.
    again = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    written = _get_versions(inputs)

    def unchanged(here: slice) -> Tensor:
        if _get_versions(inputs) != written:
            raise InputError(
                "a tensor that attention read was changed in place before its backward pass, which computes "
                "part of the forward again; change a copy instead"
            )
        return compute_rows(here)

    parts = []
    for start in range(0, num_queries, rows):
        here = slice(start, min(start + rows, num_queries))
        parts.append(checkpoint(unchanged, here, use_reentrant=False) if again else compute_rows(here))
    return torch.cat(parts, dim=-2)


def _get_versions(tensors: tuple[Tensor, ...]) -> list[int]:
    return [0 if torch.compiler.is_compiling() or x.is_inference() else x._version for x in tensors]
