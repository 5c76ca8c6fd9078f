"""Random numbers that are a pure function of a counter, in any order and in any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BitArray = NDArray[np.uint64]


@dataclass(frozen=True)
class CounterRng:
    """Random numbers that depend only on the seed, the epoch, the counter and the stream.

    A counter identifies what a number is drawn for, such as an example. A stream identifies its purpose.

    >>> rng = CounterRng(seed=1, epoch=0)
    >>> bool((rng(np.arange(9), stream=3)[5:] == rng(np.arange(5, 9), stream=3)).all())
    True
    """

    seed: int
    epoch: int

    def random_bits(self, counters: NDArray[Any], stream: int) -> BitArray:
        """64 random bits for each counter."""
        key = np.random.SeedSequence((self.seed, self.epoch, stream)).generate_state(1, np.uint64)
        return _mix_bits(counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)

    def __call__(self, counters: NDArray[Any], stream: int) -> NDArray[np.float64]:
        """A random number in [0, 1) for each counter."""
        return (self.random_bits(counters, stream) >> np.uint64(11)) * np.float64(2.0**-53)

    def integers(self, counters: NDArray[Any], stream: int, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """A random integer from 0 to below its limit for each counter."""
        return (self(counters, stream) * limits).astype(np.int64)


def _mix_bits(x: BitArray) -> BitArray:
    """The last steps of SplitMix64: every bit of the result depends on every bit of ``x``."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
