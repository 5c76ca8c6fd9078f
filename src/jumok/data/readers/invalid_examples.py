"""Examples that cannot be used.

A reader yields an :class:`InvalidExample` in place of an example that cannot be used. The caller stops there, or
skips and counts it: :func:`skip_invalid`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from jumok.errors import InputError

OnError = Literal["stop", "skip"]
BLANK_LINE = "an empty line"  # ignored in tables
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InvalidExample:
    """Why there is no example at this location: a reason, by which examples are counted, and details."""

    location: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class SkippedExamples:
    """The number of skipped examples by reason, and the location of the first of each.

    >>> skipped = SkippedExamples()
    >>> for line in (7, 9):
    ...     skipped.add(InvalidExample(f"my.tsv:{line}", "an empty target"))
    >>> print(skipped)
    2 skipped: 2 × an empty target (first: my.tsv:7)
    """

    counts: Counter[str] = field(default_factory=Counter)
    first_locations: dict[str, str] = field(default_factory=dict)

    def add(self, invalid: InvalidExample) -> None:
        self.counts[invalid.reason] += 1
        self.first_locations.setdefault(invalid.reason, invalid.location)

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        reasons = (
            f"{count} × {reason} (first: {self.first_locations[reason]})" for reason, count in self.counts.most_common()
        )
        return f"{self.total} skipped: {'; '.join(reasons)}" if self.total else "none skipped"


def skip_invalid(
    examples: Iterable[T | InvalidExample],
    on_error: OnError,
    skipped: SkippedExamples,
    empty_message: str | None = None,
) -> Iterator[T]:
    """The valid examples. Invalid ones raise, or, with ``on_error="skip"``, are counted in ``skipped``.

    ``empty_message`` is the error message if there is no valid example; None if that is not an error.
    """
    is_empty = True
    for example in examples:
        if not isinstance(example, InvalidExample):
            is_empty = False
            yield example
        elif example.reason == BLANK_LINE:
            continue
        elif on_error == "skip":
            skipped.add(example)
        else:
            raise InputError(f"{example}. Fix it, or skip and count such examples: data.on_error=skip")
    if is_empty and empty_message is not None:
        raise InputError(f"{empty_message}; {skipped}")


def clean_text(text: object, description: str, location: str) -> str | InvalidExample:
    """A text, stripped of surrounding white space, if it is valid.

    ``description`` names it in error messages.
    """
    if text is None:
        return InvalidExample(location, f"an empty {description}")
    if not isinstance(text, str):
        return InvalidExample(location, f"a {description} that is no text", f"it is {text!r}"[:80])
    text = text.strip()
    if not text:
        return InvalidExample(location, f"an empty {description}")
    if "\0" in text:
        before = text.partition("\0")[0]
        return InvalidExample(location, "a NUL character", f"after {before[-20:]!r} in the {description}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # invalid UTF-8 was decoded to lone surrogates
        byte = ord(text[error.start]) - 0xDC00
        problem = f"the byte 0x{byte:02x}" if 0x80 <= byte <= 0xFF else "half a surrogate pair"
        before = text[: error.start]
        return InvalidExample(location, "invalid UTF-8", f"{problem} after {before[-20:]!r} in the {description}")
    return text


def line_too_long(path: Path | str, line_number: int) -> InvalidExample:
    """The result for a line that is too long to be text."""
    return InvalidExample(f"{path}:{line_number}", "a line of more than 16 MiB")
