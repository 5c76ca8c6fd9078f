"""Rows that share a source while decoding.

In beam search several neighbouring rows continue the same source. Its keys and values are stored once for all
of them, and most reorderings, which only exchange rows of one source, do not touch them::

    rows       a a a b b b c c c
    sources      a     b     c          each shared by 3 rows
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def reorder_sources(index: Tensor, sources: Sequence[int] | None, rows_per_source: int) -> tuple[list[int], int]:
    """Return the sources that the rows ``index`` need, in order, and the new number of rows per source.

    Args:
        index: Rows to keep, in their new order.
        sources: The sources of these rows, with equally many neighbouring rows each, if the caller knows
            them. If None, each row gets its own source; this waits for an index on a GPU.
        rows_per_source: The current number of rows per source.

    >>> reorder_sources(torch.tensor([5, 3, 3, 0, 0, 2]), [1, 0], rows_per_source=3)
    ([1, 0], 3)
    >>> reorder_sources(torch.tensor([5, 3, 3, 0, 0, 2]), None, rows_per_source=3)
    ([1, 1, 1, 0, 0, 0], 1)
    """
    if sources is None:
        return (index // rows_per_source).tolist(), 1
    new_sources, num_rows = list(sources), index.numel()
    new_rows_per_source = max(1, num_rows // max(1, len(new_sources)))
    is_valid = new_rows_per_source * len(new_sources) == num_rows
    if is_valid and index.device.type == "cpu":  # checking an index on a GPU would wait for it
        expected = [source for source in new_sources for _ in range(new_rows_per_source)]
        is_valid = (index // rows_per_source).tolist() == expected
    if not is_valid:
        raise ValueError(
            f"reorder: the index has {num_rows} rows and there are {len(new_sources)} sources; expected "
            "equally many neighbouring rows of each source, in the order of the sources; currently "
            f"{rows_per_source} rows share each source"
        )
    return new_sources, new_rows_per_source
