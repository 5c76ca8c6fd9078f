"""Checks of texts that requests, JSONL files and command lines share."""

from __future__ import annotations

import re

SURROGATE_PATTERN = re.compile(r"[\ud800-\udfff]")  # half of a pair, which JSON can express and UTF-8 cannot
# All control characters except tab, newline and carriage return.
CONTROL_PATTERN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def to_single_line(text: str) -> str:
    """Replace each run of white space, including tabs and newlines, by one space."""
    return " ".join(text.split())
