"""Iteration over the weights of a captured attention in chunks of rows, so that memory stays bounded."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import AxisIndex, CapturedAttention

IndexChoice = int | slice | Sequence[int] | Tensor | None  # indices along one axis; None: all
IndexSpan = int | slice | tuple[int, int] | None  # contiguous indices: (first, one after the last)

MAX_CHUNK_ELEMENTS = 1 << 22  # 16 MiB of float32; only a few such tensors exist at a time
CACHED_CHUNK_ELEMENTS = 1 << 18  # 1 MiB, which stays in the cache of a CPU core …
MIN_CACHED_ROWS = 64  # … unless it has so few rows that reading the keys takes most of the time


class RowChunk(NamedTuple):
    """Some rows of some heads, over all columns that they can see."""

    weights: Tensor  # (heads, rows, cols)
    heads: slice  # indices into the requested heads
    rows: slice  # indices into the requested rows
    cols: AxisIndex  # the keys


def iterate_row_chunks(
    attention: CapturedAttention,
    batch: int,
    heads: AxisIndex,
    rows: AxisIndex | None = None,
    cols: AxisIndex | None = None,
    *,
    include_masked: bool = False,
) -> Iterator[RowChunk]:
    """Iterate over the requested rows and columns; without masked columns, unless ``include_masked``."""
    rows = slice(0, attention.shape[2]) if rows is None else rows
    cols = slice(0, attention.shape[3]) if cols is None else cols
    heads_per_chunk, rows_per_chunk = _choose_chunk_size(attention, count_indices(heads), count_indices(rows))
    for h in _iterate_slices(count_indices(heads), heads_per_chunk):
        for r in _iterate_slices(count_indices(rows), rows_per_chunk):
            row_index = _select_indices(rows, r)
            col_index = cols
            if not include_masked and isinstance(cols, slice) and isinstance(row_index, slice):
                visible = attention.find_visible_keys(row_index)
                col_index = slice(max(cols.start, visible.start), min(cols.stop, visible.stop))
                if col_index.stop <= col_index.start:
                    continue
            yield RowChunk(
                attention.compute_weights(batch, _select_indices(heads, h), row_index, col_index),
                h,
                r,
                col_index,
            )


def _choose_chunk_size(attention: CapturedAttention, num_heads: int, num_rows: int) -> tuple[int, int]:
    """Return the number of heads and rows of a chunk."""
    batch, total_heads, _, num_keys = attention.shape
    if attention.score_function is not None:  # it always scores the whole batch and all heads
        return num_heads, get_rows_per_chunk(batch * total_heads * num_keys)
    if attention.query.device.type == "cpu" and attention.key.dtype == attention.dtype:
        heads_per_chunk = min(num_heads, CACHED_CHUNK_ELEMENTS // max(1, num_keys * num_rows))
        cached_rows = max(MIN_CACHED_ROWS, CACHED_CHUNK_ELEMENTS // max(1, num_keys))
        return max(1, heads_per_chunk), min(cached_rows, get_rows_per_chunk(num_keys))
    # The keys of a head are converted to float32, which needs memory too.
    heads_per_chunk = min(num_heads, get_rows_per_chunk(num_keys * max(num_rows, attention.query.shape[-1])))
    return max(1, heads_per_chunk), get_rows_per_chunk(num_keys * heads_per_chunk)


def get_rows_per_chunk(elements_per_row: int) -> int:
    """Return how many rows of ``elements_per_row`` elements make a chunk."""
    return max(1, MAX_CHUNK_ELEMENTS // max(1, elements_per_row))


def _iterate_slices(size: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, size)) for first in range(0, size, step))


def _select_indices(index: AxisIndex, selection: slice) -> AxisIndex:
    """Return the indices at ``selection`` within ``index``."""
    if isinstance(index, Tensor):
        return index[selection]
    return slice(index.start + selection.start, index.start + selection.stop)


def count_indices(index: AxisIndex) -> int:
    """Return the number of indices that ``index`` selects."""
    return len(index) if isinstance(index, Tensor) else index.stop - index.start


def list_indices(index: AxisIndex) -> list[int]:
    """Return the indices that ``index`` selects."""
    return index.tolist() if isinstance(index, Tensor) else list(range(index.start, index.stop))


def resolve_choice(choice: IndexChoice, size: int, name: str) -> tuple[AxisIndex, bool]:
    """Resolve a user's choice of indices. Also returns whether it is a single index."""
    if choice is None:
        return slice(0, size), False
    if isinstance(choice, slice):
        start, stop, step = choice.indices(size)
        if step == 1:
            return slice(start, max(start, stop)), False
        return torch.arange(size)[choice] if step > 0 else torch.tensor(range(size)[choice]), False
    if isinstance(choice, Tensor):
        choice = choice.tolist()
    if isinstance(choice, Iterable):
        return torch.tensor([_check_index(x, size, name) for x in choice], dtype=torch.long), False
    index = _check_index(choice, size, name)
    return slice(index, index + 1), True


def resolve_span(choice: IndexSpan, size: int, name: str) -> slice:
    """Resolve a user's choice of contiguous indices."""
    if isinstance(choice, tuple):
        if len(choice) != 2:
            raise InputError(f"{name}={choice!r} is invalid; (first, one after the last) is expected")
        first, last = (bound if bound is None or bound >= 0 else bound + size for bound in choice)
        if first is not None and last is not None and last <= first and (first, last) != (0, size):
            raise InputError(f"{name}={choice!r} is empty; (first, one after the last) is expected, of {size}")
        choice = slice(*choice)
    index, _ = resolve_choice(choice, size, name)
    if isinstance(index, Tensor):
        raise InputError(f"{name}={choice!r} is invalid; a rectangle has no gaps: give (first, one after the last)")
    return index


def _check_index(value: object, size: int, name: str) -> int:
    if isinstance(value, bool):
        raise InputError(f"{name}={value} is invalid; integers are expected: the selected indices")
    try:
        index = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{name}={value!r} is invalid; integers are expected") from None
    if not -size <= index < size:
        raise InputError(f"{name}={index} is out of range: there are {size}: 0 to {size - 1} are expected")
    return index % size
