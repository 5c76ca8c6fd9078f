"""Checks of texts that requests, JSONL files and command lines share."""

from __future__ import annotations

import re

SURROGATE_PATTERN = re.compile(r"[\ud800-\udfff]")  # half of a pair, which JSON can express and UTF-8 cannot
CONTROL_PATTERN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)  # all control characters except tab, newline and carriage return


def to_single_line(text: str) -> str:
    """Replace every run of white space, tabs and newlines included, by one space."""
    return " ".join(text.split())
