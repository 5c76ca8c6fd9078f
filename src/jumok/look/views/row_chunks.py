"""The weights of a kept attention, one strip of rows after another, so that memory stays bounded."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import AxisIndex, CapturedAttention

IndexChoice = int | slice | Sequence[int] | Tensor | None  # some of the places along one axis, None: all
IndexSpan = int | slice | tuple[int, int] | None  # neighbouring ones: (first, one after the last)

MAX_CHUNK_ELEMENTS = 1 << 22  # elements of a strip: 16 MiB of float32, and only a few such tensors at a time


class RowChunk(NamedTuple):
    """Some rows of some heads, over all columns that they can see."""

    weights: Tensor  # (heads, rows, cols)
    heads: slice  # which of the heads asked for
    rows: slice  # which of the rows asked for
    cols: AxisIndex  # which keys


def iterate_row_chunks(
    attention: CapturedAttention,
    batch: int,
    heads: AxisIndex,
    rows: AxisIndex | None = None,
    cols: AxisIndex | None = None,
    *,
    include_masked: bool = False,
) -> Iterator[RowChunk]:
    """All rows and columns asked for, in strips; without columns that causality hides, unless ``include_masked``."""
    rows = slice(0, attention.shape[2]) if rows is None else rows
    cols = slice(0, attention.shape[3]) if cols is None else cols
    some_heads, some_rows = _choose_chunk_size(attention, count_indices(heads), count_indices(rows))
    for h in _iterate_slices(count_indices(heads), some_heads):
        for r in _iterate_slices(count_indices(rows), some_rows):
            those = _select_indices(rows, r)
            seen = cols
            if not include_masked and isinstance(cols, slice) and isinstance(those, slice):
                visible = attention.find_visible_keys(those)
                seen = slice(max(cols.start, visible.start), min(cols.stop, visible.stop))
                if seen.stop <= seen.start:
                    continue
            yield RowChunk(
                attention.compute_weights(batch, _select_indices(heads, h), those, seen), h, r, seen
            )


def _choose_chunk_size(attention: CapturedAttention, num_heads: int, num_rows: int) -> tuple[int, int]:
    """How many heads and rows make a strip."""
    batch, all_heads, _, keys = attention.shape
    if attention.score_function is not None:  # it scores the whole batch and all heads, whatever is asked for
        return num_heads, get_rows_per_chunk(batch * all_heads * keys)
    # The keys of a head are converted to float32: that counts too.
    some = min(num_heads, get_rows_per_chunk(keys * max(num_rows, attention.query.shape[-1])))
    return max(1, some), get_rows_per_chunk(keys * some)


def get_rows_per_chunk(elements_per_row: int) -> int:
    """How many rows of so many elements are worked on at a time."""
    return max(1, MAX_CHUNK_ELEMENTS // max(1, elements_per_row))


def _iterate_slices(size: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, size)) for first in range(0, size, step))


def _select_indices(index: AxisIndex, selection: slice) -> AxisIndex:
    """Of the places in ``index``, those at ``selection``."""
    if isinstance(index, Tensor):
        return index[selection]
    return slice(index.start + selection.start, index.start + selection.stop)


def count_indices(index: AxisIndex) -> int:
    """How many places ``index`` names."""
    return len(index) if isinstance(index, Tensor) else index.stop - index.start


def list_indices(index: AxisIndex) -> list[int]:
    """The places that ``index`` names."""
    return index.tolist() if isinstance(index, Tensor) else list(range(index.start, index.stop))


def resolve_choice(choice: IndexChoice, size: int, name: str) -> tuple[AxisIndex, bool]:
    """The places that a user's choice names, and whether it was a single one."""
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
    place = _check_index(choice, size, name)
    return slice(place, place + 1), True


def resolve_span(choice: IndexSpan, size: int, name: str) -> slice:
    """The neighbouring places that a user's choice names."""
    if isinstance(choice, tuple):
        if len(choice) != 2:
            raise InputError(f"{name}={choice!r} came; (first, one after the last) is expected")
        first, last = (place if place is None or place >= 0 else place + size for place in choice)
        if first is not None and last is not None and last <= first and (first, last) != (0, size):
            raise InputError(
                f"{name}={choice!r} came, which is empty; (first, one after the last) is expected, of {size}"
            )
        choice = slice(*choice)
    part, _ = resolve_choice(choice, size, name)
    if isinstance(part, Tensor):
        raise InputError(f"{name}={choice!r} came; a rectangle has no gaps: give (first, one after the last)")
    return part


def _check_index(value: object, size: int, name: str) -> int:
    if isinstance(value, bool):
        raise InputError(f"{name}={value} came; whole numbers are expected: the places that are wanted")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{name}={value!r} came; whole numbers are expected") from None
    if not -size <= number < size:
        raise InputError(f"{name}={number} came, but there are {size}: 0 to {size - 1} are expected")
    return number % size
