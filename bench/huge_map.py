"""A synthetic attention map of any size, computed on demand, like that of a long causal language model.

Each query attends to the first token, to its neighbours, to its own document, to a few tokens that all queries attend
to, and to an earlier position at a fixed distance. The cumulative weight up to a key has a closed form for each, so a
cell costs one subtraction, whatever its size.
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
        importance = np.exp(random.normal(0, 1.1, length))
        self.importance = np.concatenate([[0.0], np.cumsum(importance)])  # cumulative
        self.documents = np.concatenate([[0], np.sort(random.choice(length, max(1, length // 3000), False))])
        marks = np.where(random.random(length) < 1 / 90, np.exp(random.normal(0, 1.5, length)), 0)
        self.marks = np.concatenate([[0.0], np.cumsum(marks)])
        self.back = random.integers(length // 30 + 1, length // 4 + 2, heads)  # distance of the earlier position
        shares = [
            *([0.25, 0.35, 0.20, 0.15, 0.05], [0.10, 0.75, 0.10, 0.04, 0.01]),
            *([0.20, 0.10, 0.60, 0.05, 0.05], [0.30, 0.05, 0.05, 0.50, 0.10]),
        ]
        self.shares = np.array(shares)[np.arange(heads) % 4]

    def pooled_map(self, head: int, rows: slice, cols: slice, size: int) -> Numbers:
        tall, wide = _edges(rows, size), _edges(cols, size)
        height = np.diff(tall)
        num_samples = min(8, int(height.max()))  # queries of a cell; with more, the mean hardly changes
        offsets = (np.arange(num_samples) + 0.5) / num_samples
        queries = np.minimum(tall[:-1, None] + (height[:, None] * offsets).astype(int), tall[1:, None] - 1)
        mass = np.diff(self._cumulative_weight(head, queries.reshape(-1, 1), wide[None]), axis=1)
        return mass.reshape(len(height), num_samples, -1).mean(1).astype(np.float32)

    def weights(self, head: int, rows: slice, cols: slice) -> Numbers:
        queries = np.arange(rows.start, rows.stop)[:, None]
        return np.diff(self._cumulative_weight(head, queries, np.arange(cols.start, cols.stop + 1)[None])).astype(
            np.float32
        )

    def received_weight(self, head: int, rows: slice) -> Numbers:
        queries = np.linspace(rows.start, rows.stop - 1, min(64, rows.stop - rows.start)).astype(int)[:, None]
        mean = np.diff(self._cumulative_weight(head, queries, np.arange(self.length + 1)[None])).mean(0)
        return (mean * (rows.stop - rows.start)).astype(np.float32)

    def _cumulative_weight(self, head: int, query: NDArray[np.int64], key: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the total weight that queries ``(N, 1)`` give to the keys before each key in ``(1, M)``."""
        end = query + 1
        x = np.minimum(key, end)
        first, near, document, mark, before = self.shares[head]
        start = self.documents[np.searchsorted(self.documents, query, side="right") - 1]
        reach = 6.0 + 20 * head
        fall = np.exp(-end / reach)
        local = (np.exp(-(end - x) / reach) - fall) / (1 - fall)
        inside = self.importance[np.maximum(x, start)] - self.importance[start]
        marked = self.marks[end]
        marks = np.where(marked > 0, self.marks[x] / np.maximum(marked, 1e-9), np.minimum(x, 1))
        place = query - self.back[head]
        again = np.where(place > 0, 1 / (1 + np.exp(-np.clip((x - place - 0.5) / 0.8, -40, 40))), np.minimum(x, 1))
        return (
            first * np.minimum(x, 1)
            + near * local
            + document * inside / (self.importance[end] - self.importance[start])
            + mark * marks
            + before * again
        )


def _edges(part: slice, size: int) -> NDArray[np.int64]:
    length = part.stop - part.start
    cells = min(size, length)
    return part.start + np.arange(cells + 1) * length // cells
