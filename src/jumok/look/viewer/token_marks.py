"""What is marked along the axes of a map: special tokens, attention sinks, and the turns of a chat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# <s>, [CLS], <|end|>, [/INST]; not <0xEC>, which is a byte. As in static/token_text.js.
SPECIAL_TOKEN_PATTERN = re.compile(r"<(?!0x)[^<>]+>|\[/?[A-Z][A-Z_]*\d*\]")


class LabelledSpan(NamedTuple):
    """A part of an axis with a name, such as a turn of a chat: tokens from ``start`` up to, but without, ``stop``."""

    start: int
    stop: int
    name: str


def is_special_token(text: str) -> bool:
    """Return whether a token is a special one, by its text.

    >>> [is_special_token(text) for text in ("[CLS]", "<|im_start|>", "<0xEC>", "cat")]
    [True, True, False, False]
    """
    return text[:1] in "<[" and SPECIAL_TOKEN_PATTERN.fullmatch(text.strip()) is not None


def find_sinks(labels: Sequence[str] | None, num_keys: int, *, is_causal: bool) -> tuple[int, ...]:
    """Return the keys that usually are attention sinks: special tokens and, for causal attention, the first key.

    Without another key, there are none.

    >>> find_sinks(["[CLS]", "a", "cat", "[SEP]"], 4, is_causal=False), find_sinks(["a", "cat"], 2, is_causal=True)
    ((0, 3), (0,))
    """
    sinks = {n for n, text in enumerate(labels or ()) if n < num_keys and is_special_token(text)}
    sinks |= {0} if is_causal else set()
    return tuple(sorted(sinks)) if len(sinks) < num_keys else ()


def list_runs(positions: Sequence[int]) -> list[slice]:
    """Return consecutive positions as slices.

    >>> list_runs([0, 1, 5])
    [slice(0, 2, None), slice(5, 6, None)]
    """
    runs: list[slice] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = slice(runs[-1].start, position + 1)
        else:
            runs.append(slice(position, position + 1))
    return runs
