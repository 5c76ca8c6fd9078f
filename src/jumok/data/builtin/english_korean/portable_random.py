"""Chance that falls alike on every machine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

__all__ = ["PortableRandom"]

T = TypeVar("T")


class PortableRandom:
    """Draws from a seed. Of ``random.Random``, only ``random()`` is promised to stay: nothing else is used.

    >>> dice = PortableRandom(7)
    >>> [dice.choice("abc") for _ in range(8)]
    ['a', 'a', 'b', 'a', 'b', 'b', 'a', 'b']
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def bernoulli(self, probability: float) -> bool:
        """True in this share of all cases."""
        return self._random() < probability

    def choice(self, options: Sequence[T]) -> T:
        """One of these, each as likely as the others."""
        return options[int(self._random() * len(options))]

    def weighted_choice(self, options: Mapping[T, float]) -> T:
        """One of these, as often as its weight says."""
        left = self._random() * sum(options.values())
        for option, weight in options.items():
            left -= weight
            if left < 0:
                return option
        return next(reversed(list(options)))
