"""The weights of a kept attention, one strip of rows after another, so that memory stays bounded."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.kept import Kept, Part

Choice = int | slice | Sequence[int] | Tensor | None  # some of the places along one axis, None: all
Span = int | slice | tuple[int, int] | None  # neighbouring ones: (first, one after the last)

AT_ONCE = 1 << 22  # elements of a strip: 16 MiB of float32, and only a few such tensors at a time


class Strip(NamedTuple):
    """Some rows of some heads, over all columns that they can see."""

    weights: Tensor  # (heads, rows, cols)
    heads: slice  # which of the heads asked for
    rows: slice  # which of the rows asked for
    cols: Part  # which keys


def strips(
    kept: Kept,
    batch: int,
    heads: Part,
    rows: Part | None = None,
    cols: Part | None = None,
    *,
    wide: bool = False,
) -> Iterator[Strip]:
    """All rows and columns asked for, in strips; without columns that causality hides, unless ``wide``."""
    rows = slice(0, kept.shape[2]) if rows is None else rows
    cols = slice(0, kept.shape[3]) if cols is None else cols
    some_heads, some_rows = _at_once(kept, count(heads), count(rows))
    for h in _steps(count(heads), some_heads):
        for r in _steps(count(rows), some_rows):
            those = _nth(rows, r)
            seen = cols
            if not wide and isinstance(cols, slice) and isinstance(those, slice):
                visible = kept.visible(those)
                seen = slice(max(cols.start, visible.start), min(cols.stop, visible.stop))
                if seen.stop <= seen.start:
                    continue
            yield Strip(kept.weights(batch, _nth(heads, h), those, seen), h, r, seen)


def _at_once(kept: Kept, heads: int, rows: int) -> tuple[int, int]:
    """How many heads and rows make a strip."""
    batch, all_heads, _, keys = kept.shape
    if kept.score is not None:  # it scores the whole batch and all heads, whatever is asked for
        return heads, rows_of(batch * all_heads * keys)
    # The keys of a head are converted to float32: that counts too.
    some = min(heads, rows_of(keys * max(rows, kept.query.shape[-1])))
    return max(1, some), rows_of(keys * some)


def rows_of(elements: int) -> int:
    """How many rows of so many elements are worked on at a time."""
    return max(1, AT_ONCE // max(1, elements))


def _steps(size: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, size)) for first in range(0, size, step))


def _nth(part: Part, some: slice) -> Part:
    """Of the places in ``part``, those at ``some``."""
    if isinstance(part, Tensor):
        return part[some]
    return slice(part.start + some.start, part.start + some.stop)


def count(part: Part) -> int:
    """How many places ``part`` names."""
    return len(part) if isinstance(part, Tensor) else part.stop - part.start


def numbers(part: Part) -> list[int]:
    """The places that ``part`` names."""
    return part.tolist() if isinstance(part, Tensor) else list(range(part.start, part.stop))


def chosen(choice: Choice, size: int, what: str) -> tuple[Part, bool]:
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
        return torch.tensor([_inside(x, size, what) for x in choice], dtype=torch.long), False
    place = _inside(choice, size, what)
    return slice(place, place + 1), True


def span(choice: Span, size: int, what: str) -> slice:
    """The neighbouring places that a user's choice names."""
    if isinstance(choice, tuple):
        if len(choice) != 2:
            raise InputError(f"{what}={choice!r} came; (first, one after the last) is expected")
        first, last = (place if place is None or place >= 0 else place + size for place in choice)
        if first is not None and last is not None and last <= first and (first, last) != (0, size):
            raise InputError(
                f"{what}={choice!r} came, which is empty; (first, one after the last) is expected, of {size}"
            )
        choice = slice(*choice)
    part, _ = chosen(choice, size, what)
    if isinstance(part, Tensor):
        raise InputError(f"{what}={choice!r} came; a rectangle has no gaps: give (first, one after the last)")
    return part


def _inside(place: object, size: int, what: str) -> int:
    if isinstance(place, bool):
        raise InputError(f"{what}={place} came; whole numbers are expected: the places that are wanted")
    try:
        number = operator.index(place)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{what}={place!r} came; whole numbers are expected") from None
    if not -size <= number < size:
        raise InputError(f"{what}={number} came, but there are {size}: 0 to {size - 1} are expected")
    return number % size
