"""The base class of configurations, which are the sections of recipes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar


class Config:
    """Base class of dataclasses that are read from recipes. An unknown key is an error."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def check_ranges(
        self,
        *,
        positive: Sequence[str] = (),
        non_negative: Sequence[str] = (),
        above_zero: Sequence[str] = (),
        fraction: Sequence[str] = (),
        prefix: str = "",
    ) -> None:
        """Raise ``ValueError`` if a field is out of range. None is always valid.

        Args:
            positive: Fields that must be at least 1.
            non_negative: Fields that must be at least 0.
            above_zero: Fields that must be greater than 0.
            fraction: Fields that must be at least 0 and below 1.
            prefix: Written before a field's name in the message, such as "style.".
        """
        ranges = (
            (positive, 1, math.inf, "1 or more"),
            (non_negative, 0, math.inf, "0 or more"),
            (above_zero, math.ulp(0.0), math.inf, "more than 0"),
            (fraction, 0, 1, "a number from 0 to below 1"),
        )
        for names, minimum, upper_bound, expected in ranges:
            for name in names:
                value = getattr(self, name)
                if value is not None and not minimum <= value < upper_bound:
                    raise ValueError(f"{prefix}{name}={value}: {expected} is expected")

    def check_divisible(self, name: str, divisor_name: str, prefix: str = "") -> None:
        """Raise ``ValueError`` if a field is not divisible by another one."""
        value, divisor = getattr(self, name), getattr(self, divisor_name)
        if value % divisor:
            raise ValueError(
                f"{prefix}{name}={value} is not divisible by {prefix}{divisor_name}={divisor}; change one of them"
            )
