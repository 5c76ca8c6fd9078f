"""A made-up map of any size, never there as a whole, like the attention of a long causal language model.

Each query gives its weight to the first token, to its neighbours, to its own document, to a few marks that
all look back at, and to where the same thing stood before. All of these have a closed form for the weight up
to a key, so a cell costs a subtraction, however many tokens it covers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float32]


class HugeMap:
    """Weights of ``length`` queries and keys, a `jumok.look.viewer.viewer_data.WeightSource`."""

    def __init__(self, length: int, heads: int = 4) -> None:
        random = np.random.default_rng(7)
        self.length, self.heads = length, heads
        worth = np.exp(random.normal(0, 1.1, length))
        self.worth = np.concatenate([[0.0], np.cumsum(worth)])  # of all tokens before
        self.documents = np.concatenate([[0], np.sort(random.choice(length, max(1, length // 3000), False))])
        marks = np.where(random.random(length) < 1 / 90, np.exp(random.normal(0, 1.5, length)), 0)
        self.marks = np.concatenate([[0.0], np.cumsum(marks)])
        self.back = random.integers(length // 30 + 1, length // 4 + 2, heads)  # where the same stood before
        shares = [
            *([0.25, 0.35, 0.20, 0.15, 0.05], [0.10, 0.75, 0.10, 0.04, 0.01]),
            *([0.20, 0.10, 0.60, 0.05, 0.05], [0.30, 0.05, 0.05, 0.50, 0.10]),
        ]
        self.shares = np.array(shares)[np.arange(heads) % 4]

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> Numbers:
        tall, wide = _edges(rows, size), _edges(cols, size)
        height = np.diff(tall)
        looks = min(8, int(height.max()))  # queries looked at in a cell: with more, the mean hardly changes
        at = (np.arange(looks) + 0.5) / looks
        queries = np.minimum(tall[:-1, None] + (height[:, None] * at).astype(int), tall[1:, None] - 1)
        mass = np.diff(self._upto(head, queries.reshape(-1, 1), wide[None]), axis=1)
        return mass.reshape(len(height), looks, -1).mean(1).astype(np.float32)

    def weights(self, head: int, rows: slice, cols: slice) -> Numbers:
        queries = np.arange(rows.start, rows.stop)[:, None]
        return np.diff(self._upto(head, queries, np.arange(cols.start, cols.stop + 1)[None])).astype(np.float32)

    def received_weight(self, head: int, rows: slice) -> Numbers:
        queries = np.linspace(rows.start, rows.stop - 1, min(64, rows.stop - rows.start)).astype(int)[:, None]
        mean = np.diff(self._upto(head, queries, np.arange(self.length + 1)[None])).mean(0)
        return (mean * (rows.stop - rows.start)).astype(np.float32)

    def _upto(self, head: int, query: NDArray[np.int64], key: NDArray[np.int64]) -> NDArray[np.float64]:
        """The weight that queries ``(N, 1)`` give to all keys before those in ``(1, M)``."""
        end = query + 1
        x = np.minimum(key, end)
        first, near, document, mark, before = self.shares[head]
        start = self.documents[np.searchsorted(self.documents, query, side="right") - 1]
        reach = 6.0 + 20 * head
        fall = np.exp(-end / reach)
        local = (np.exp(-(end - x) / reach) - fall) / (1 - fall)
        inside = self.worth[np.maximum(x, start)] - self.worth[start]
        marked = self.marks[end]
        marks = np.where(marked > 0, self.marks[x] / np.maximum(marked, 1e-9), np.minimum(x, 1))
        place = query - self.back[head]
        again = np.where(place > 0, 1 / (1 + np.exp(-np.clip((x - place - 0.5) / 0.8, -40, 40))), np.minimum(x, 1))
        return (
            first * np.minimum(x, 1)
            + near * local
            + document * inside / (self.worth[end] - self.worth[start])
            + mark * marks
            + before * again
        )


def _edges(part: slice, size: int) -> NDArray[np.int64]:
    length = part.stop - part.start
    cells = min(size, length)
    return part.start + np.arange(cells + 1) * length // cells
