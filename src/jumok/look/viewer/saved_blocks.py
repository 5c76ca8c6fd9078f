"""The blocks of a saved file: maps, and queries and keys, which are rounded until they fit."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from jumok.look.viewer.score_factors import MIN_ERROR, BalancedSide, compress_side
from jumok.look.viewer.tiles import FloatArray, pack, pack_roots

# Steps of square roots, as shares of the root of the mean weight. 0 stands for three digits.
STEPS = (0.0, *(0.6 / 1.12**n for n in reversed(range(66))))
SAMPLE_CELLS = 1 << 14  # of each map, to estimate the size of a file


class Block(Protocol):
    """A part of a file, which the browser decodes when it is needed. ``step`` is that of square roots of weights."""

    @property
    def key(self) -> str: ...
    def compress(self, step: float) -> bytes: ...
    def estimate_size(self, step: float) -> float: ...


@dataclass(frozen=True, eq=False)
class StoredMap:
    """Cells of one head that a file contains. Uniform attention has the weight ``mean`` in each."""

    key: str
    cells: FloatArray
    mean: float
    min_step: float = 0.0

    def compress(self, step: float) -> bytes:
        step = max(step, self.min_step)
        if step == 0:
            return zlib.compress(pack(self.cells))
        # The codes of weights hardly repeat, except for zeros: searching for matches takes long and finds few.
        compressor = zlib.compressobj(strategy=zlib.Z_RLE)
        return compressor.compress(pack_roots(self.cells, step * self.mean**0.5)) + compressor.flush()

    def estimate_size(self, step: float) -> float:
        """Return about how many bytes the map takes, from some of its rows."""
        stride = max(1, self.cells.size // SAMPLE_CELLS)
        sample = replace(self, cells=self.cells[::stride])
        return len(sample.compress(step)) * self.cells.size / sample.cells.size


@dataclass(frozen=True, eq=False)
class StoredSide:
    """The queries of a head, or the keys of a group of heads."""

    key: str
    side: BalancedSide

    def compress(self, step: float) -> bytes:
        return compress_side(self.side, get_score_error(step))

    def estimate_size(self, step: float) -> float:
        values = self.side.values
        sample = values[:: max(1, 2 * values.numel() // SAMPLE_CELLS)]
        size = len(compress_side(replace(self.side, values=sample), get_score_error(step)))
        return size * len(values) / len(sample)


@dataclass(frozen=True, eq=False)
class StoredBytes:
    """Bytes that are not rounded."""

    key: str
    data: bytes  # compressed

    def compress(self, step: float) -> bytes:
        return self.data

    def estimate_size(self, step: float) -> float:
        return len(self.data)


def choose_step(blocks: Sequence[Block], max_bytes: int, executor: ThreadPoolExecutor) -> float:
    """Return the finest step with which all blocks fit into ``max_bytes``, or the coarsest one."""

    def fits(step: float) -> bool:
        sizes: Iterable[float] = executor.map(lambda block: block.estimate_size(step), blocks)
        return sum(sizes) <= max_bytes

    return STEPS[min(bisect.bisect_left(STEPS, True, key=fits), len(STEPS) - 1)]


def get_score_error(step: float) -> float:
    """Return the error of scores that is as harmful as a step of square roots, for a weight equal to the mean."""
    return max(step / 3**0.5, MIN_ERROR)
