"""What is set aside to validate and to test with, where a recipe names no data for it.

Examples with the same *key* stay together: the same sentence twice is never on both sides, and no article is
both learned from and asked about. Chance decides, by the key alone: the same data gives the same parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from jumok.errors import InputError

__all__ = ["NAMES", "divided"]

NAMES = ("train", "valid", "test")
MOST = 0.2  # of the examples, for each of validation and test
T = TypeVar("T")


def divided(examples: Sequence[T], key: Callable[[T], str], wanted: int) -> dict[str, list[T]]:
    """Three parts, by name. Validation and test get ``wanted`` examples each, or a few more, so that keys
    stay together; but at most a fifth of all.

    >>> parts = divided(list(range(100)), lambda number: str(number // 2), 10)
    >>> {name: len(part) for name, part in parts.items()}
    {'train': 80, 'valid': 10, 'test': 10}
    """
    groups: dict[str, list[int]] = {}
    for number, one in enumerate(examples):
        groups.setdefault(key(one), []).append(number)
    order = iter(sorted(groups, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest()))
    where = ["train"] * len(examples)
    for part in ("test", "valid"):
        room = min(wanted, int(MOST * len(examples)))
        while room > 0 and (name := next(order, None)) is not None:
            for number in groups[name]:
                where[number] = part
            room -= len(groups[name])
    parts: dict[str, list[T]] = {name: [] for name in NAMES}
    for one, part in zip(examples, where, strict=True):
        parts[part].append(one)
    if not all(parts.values()):
        raise InputError(
            f"of {len(examples)} examples ({len(groups)} that must stay together) nothing can be held out; "
            "name data.valid and data.test, or use more data"
        )
    return parts
