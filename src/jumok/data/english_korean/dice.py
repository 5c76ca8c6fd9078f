"""Chance that falls alike on every machine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

__all__ = ["Dice"]

T = TypeVar("T")


class Dice:
    """Draws from a seed. Of ``random.Random``, only ``random()`` is promised to stay: nothing else is used.

    >>> dice = Dice(7)
    >>> [dice.pick("abc") for _ in range(8)]
    ['a', 'a', 'b', 'a', 'b', 'b', 'a', 'b']
    """

    def __init__(self, seed: int) -> None:
        self._number = random.Random(seed).random

    def chance(self, share: float) -> bool:
        """True in this share of all cases."""
        return self._number() < share

    def pick(self, options: Sequence[T]) -> T:
        """One of these, each as likely as the others."""
        return options[int(self._number() * len(options))]

    def weigh(self, options: Mapping[T, float]) -> T:
        """One of these, as often as its weight says."""
        left = self._number() * sum(options.values())
        for option, weight in options.items():
            left -= weight
            if left < 0:
                return option
        return next(reversed(list(options)))
