"""Range checks that the configs of all models share."""

from __future__ import annotations

import math


def check_ranges(
    config: object,
    *,
    positive: tuple[str, ...] = (),
    non_negative: tuple[str, ...] = (),
    fraction: tuple[str, ...] = (),
    prefix: str = "",
) -> None:
    """Raise ``ValueError`` if a field of ``config`` is out of range.

    Args:
        config: The object that has the fields.
        positive: Fields that must be at least 1.
        non_negative: Fields that must be at least 0.
        fraction: Fields that must be at least 0 and below 1.
        prefix: Written before a field's name in the message, such as "style.".
    """
    ranges = (
        (positive, 1, math.inf, "1 or more"),
        (non_negative, 0, math.inf, "0 or more"),
        (fraction, 0, 1, "a number from 0 to below 1"),
    )
    for names, minimum, upper_bound, expected in ranges:
        for name in names:
            value = getattr(config, name)
            if not minimum <= value < upper_bound:
                raise ValueError(f"{prefix}{name}={value}: {expected} is expected")


def check_heads(width: int, num_heads: int, prefix: str = "") -> None:
    """Raise ``ValueError`` if the width is not divisible by the number of heads."""
    if width % num_heads:
        raise ValueError(f"{prefix}width={width} is not divisible by {prefix}num_heads={num_heads}; change one of them")
