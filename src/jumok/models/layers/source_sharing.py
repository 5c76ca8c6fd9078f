"""Rows that share a source while decoding.

In beam search several rows continue the same source, side by side. What belongs to the source (its keys and
values) is then kept once for all of them, and most reorderings, which only swap rows of one source, leave it
as it is::

    rows       a a a b b b c c c
    sources      a     b     c          each shared by 3
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["reorder_sources"]


def reorder_sources(
    index: Tensor, sources: Sequence[int] | None, rows_per_source: int
) -> tuple[list[int], int]:
    """Which sources the rows ``index`` need, in order, and how many rows share each then.

    ``rows_per_source`` is how many share each now; ``sources`` is what the caller knows of the index: it comes in as
    many equal runs, each of rows of one of these. If the caller knows nothing (None), each row gets a source
    of its own; to find it, an index on a GPU is waited for.

    >>> sources_after(torch.tensor([5, 3, 3, 0, 0, 2]), [1, 0], shared=3)
    ([1, 0], 3)
    >>> sources_after(torch.tensor([5, 3, 3, 0, 0, 2]), None, shared=3)
    ([1, 1, 1, 0, 0, 0], 1)
    """
    if sources is None:
        return (index // rows_per_source).tolist(), 1
    known, rows = list(sources), index.numel()
    each = max(1, rows // max(1, len(known)))
    fits = each * len(known) == rows
    if fits and index.device.type == "cpu":  # where a look costs next to nothing
        fits = (index // rows_per_source).tolist() == [source for source in known for _ in range(each)]
    if not fits:
        raise ValueError(
            f"reorder: an index of {rows} rows came with {len(known)} sources; expected equally many rows of "
            f"each source, side by side and in the order of the sources; {rows_per_source} rows share each now"
        )
    return known, each
