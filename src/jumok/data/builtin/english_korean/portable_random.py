"""Random numbers that are the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


class PortableRandom:
    """Random choices that only use ``random()`` of ``random.Random``, which is guaranteed not to change.

    >>> rng = PortableRandom(7)
    >>> [rng.choice("abc") for _ in range(8)]
    ['a', 'a', 'b', 'a', 'b', 'b', 'a', 'b']
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def choice(self, options: Sequence[T]) -> T:
        """One of the options, with equal probability."""
        return options[int(self._random() * len(options))]

    def weighted_choice(self, options: Mapping[T, float]) -> T:
        """One of the options, with a probability proportional to its weight."""
        remaining = self._random() * sum(options.values())
        for option, weight in options.items():
            remaining -= weight
            if remaining < 0:
                return option
        return next(reversed(list(options)))
