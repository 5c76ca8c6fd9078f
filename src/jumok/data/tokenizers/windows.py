"""Windows over a row of pieces that is longer than a model reads at once.

::

    pieces    p0 p1 p2 p3 p4 p5 p6 p7 p8        a room of 5 pieces, a stride of 2
    windows   p0 p1 p2 p3 p4
                    p2 p3 p4 p5 p6
                          p4 p5 p6 p7 p8

They begin every ``stride`` pieces, or every half window if that is nearer: what is at the end of one is in
the middle of another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from jumok.errors import InputError

__all__ = ["TokenWindow", "find_central_window", "make_windows"]


class TokenWindow(NamedTuple):
    """The pieces ``begin`` up to, not including, ``end`` of a longer row."""

    begin: int
    end: int


def make_windows(length: int, max_length: int, stride: int) -> list[TokenWindow]:
    """Windows of at most ``max_length`` pieces over ``length`` of them, which together cover all.

    >>> make_windows(9, max_length=5, stride=2)
    [TokenWindow(begin=0, end=5), TokenWindow(begin=2, end=7), TokenWindow(begin=4, end=9)]
    >>> make_windows(4, max_length=5, stride=2)
    [TokenWindow(begin=0, end=4)]
    """
    if max_length < 1 or stride < 1:
        raise InputError(f"windows of {max_length} pieces every {stride}: both must be 1 or more")
    stride = min(
        stride, max(1, max_length // 2)
    )  # else what lies across two ends would be whole in no window
    count = 1 + max(0, -(-(length - max_length) // stride))
    return [TokenWindow(n * stride, min(n * stride + max_length, length)) for n in range(count)]


def find_central_window(piece: int, windows: Sequence[TokenWindow]) -> int:
    """The number of the window in which a piece is farthest from both ends; of equal ones, the first.

    >>> [find_central_window(piece, make_windows(9, max_length=5, stride=2)) for piece in range(9)]
    [0, 0, 0, 0, 1, 1, 2, 2, 2]
    """
    there = range(
        bisect_right(windows, piece, key=lambda window: window.end),
        bisect_right(windows, piece, key=lambda window: window.begin),
    )
    return max(there, key=lambda n: (min(piece - windows[n].begin, windows[n].end - 1 - piece), -n))
