"""Process queries in chunks of rows, so that memory stays bounded for any length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jumok.attention.caching import get_tensor_version
from jumok.errors import InputError

MAX_CHUNK_ELEMENTS = 1 << 25  # elements of the largest intermediate tensor


def rows_per_chunk(num_queries: int, elements_per_row: int) -> int:
    """Return how many rows form a chunk if each needs an intermediate of this many elements."""
    return max(1, min(num_queries, MAX_CHUNK_ELEMENTS // max(1, elements_per_row)))


def map_row_chunks(
    compute_rows: Callable[[slice], Tensor],
    num_queries: int,
    elements_per_row: int,
    inputs: tuple[Tensor, ...],
) -> Tensor:
    """Concatenate ``compute_rows(rows)`` over chunks of the rows of ``(…, Q, ·)``.

    With more than one chunk and gradients enabled, the backward pass recomputes each chunk instead of storing
    its intermediates, which together would be as large as those of a single chunk.

    Args:
        compute_rows: computes the result of some rows, ``(…, rows, ·)``.
        num_queries: Q.
        elements_per_row: elements of the largest intermediate of one row.
        inputs: the tensors that ``compute_rows`` reads. They must not be modified before the backward pass.
    """
    chunk_size = rows_per_chunk(num_queries, elements_per_row)
    if chunk_size >= num_queries:
        return compute_rows(slice(0, num_queries))
    # Function transforms (torch.func) do not support checkpoints.
    recompute = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    versions = [get_tensor_version(x) for x in inputs]

    def compute_unchanged(rows: slice) -> Tensor:
        if [get_tensor_version(x) for x in inputs] != versions:
            raise InputError(
                "a tensor that attention read was modified in place before its backward pass, which "
                "recomputes part of the forward pass; modify a copy instead"
            )
        return compute_rows(rows)

    chunks = []
    for start in range(0, num_queries, chunk_size):
        rows = slice(start, min(start + chunk_size, num_queries))
        chunks.append(checkpoint(compute_unchanged, rows, use_reentrant=False) if recompute else compute_rows(rows))
    return torch.cat(chunks, dim=-2)
