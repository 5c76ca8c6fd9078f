"""Rows that share a source while decoding.

In beam search several rows continue the same source, side by side. What belongs to the source (its keys and
values) is then kept once for all of them, and most reorderings, which only swap rows of one source, leave it
as it is::

    rows       a a a b b b c c c
    sources      a     b     c          each shared by 3
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["sources_after"]


def sources_after(index: Sequence[int], shared: int) -> tuple[list[int], int]:
    """Which sources the rows ``index`` need, in order, and how many rows share each then.

    ``shared`` is how many share each now.

    >>> sources_after([0, 0, 2, 4, 4, 3], shared=3)  # rows of the sources 0 and 1
    ([0, 1], 3)
    >>> sources_after([1, 3, 4], shared=3)
    ([0, 1, 1], 1)
    """
    runs = [(source, len(list(run))) for source, run in itertools.groupby(row // shared for row in index)]
    each = math.gcd(*(times for _, times in runs)) or 1
    return [source for source, times in runs for _ in range(times // each)], each
