"""Overlapping windows over a sequence of pieces that is longer than the maximum length of a model.

::

    pieces    p0 p1 p2 p3 p4 p5 p6 p7 p8        max_length 5, stride 2
    windows   p0 p1 p2 p3 p4
                    p2 p3 p4 p5 p6
                          p4 p5 p6 p7 p8

Windows begin every ``stride`` pieces, but at least every half window: a piece at the end of one window is in
the middle of another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from jumok.errors import InputError


class TokenWindow(NamedTuple):
    """The pieces of a sequence from ``begin`` to ``end``, exclusive."""

    begin: int
    end: int


def make_windows(length: int, max_length: int, stride: int) -> list[TokenWindow]:
    """Windows of at most ``max_length`` pieces that cover a sequence of ``length`` pieces.

    >>> make_windows(9, max_length=5, stride=2)
    [TokenWindow(begin=0, end=5), TokenWindow(begin=2, end=7), TokenWindow(begin=4, end=9)]
    >>> make_windows(4, max_length=5, stride=2)
    [TokenWindow(begin=0, end=4)]
    """
    if max_length < 1 or stride < 1:
        raise InputError(f"max_length={max_length} and stride={stride}: expected 1 or more")
    # With a larger stride, a span across the ends of two windows would be complete in none.
    stride = min(stride, max(1, max_length // 2))
    num_windows = 1 + max(0, -(-(length - max_length) // stride))
    starts = (number * stride for number in range(num_windows))
    return [TokenWindow(start, min(start + max_length, length)) for start in starts]


def find_central_window(piece: int, windows: Sequence[TokenWindow]) -> int:
    """The index of the window in which a piece is farthest from both ends; of equal ones, the first.

    >>> [find_central_window(piece, make_windows(9, max_length=5, stride=2)) for piece in range(9)]
    [0, 0, 0, 0, 1, 1, 2, 2, 2]
    """
    candidates = range(
        bisect_right(windows, piece, key=lambda window: window.end),
        bisect_right(windows, piece, key=lambda window: window.begin),
    )

    def distance_to_ends(index: int) -> int:
        return min(piece - windows[index].begin, windows[index].end - 1 - piece)

    return max(candidates, key=lambda index: (distance_to_ends(index), -index))
