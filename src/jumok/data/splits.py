"""What is set aside to validate and to test with, where a recipe names no data for it.

Examples with the same *key* stay together: the same sentence twice is never on both sides, and no article is
both learned from and asked about. Chance decides, by the key alone: the same data gives the same parts. They
can be kept in a file, with a line of JSON each: then they stay what they are when the data changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from jumok.errors import InputError
from jumok.files import atomic_write

__all__ = ["SPLIT_NAMES", "read_examples", "split_held_out", "write_examples"]

SPLIT_NAMES = ("train", "valid", "test")
MAX_HELD_OUT_SHARE = 0.2  # of the examples, for each of validation and test
T = TypeVar("T")


def split_held_out(examples: Sequence[T], key: Callable[[T], str], num_held_out: int) -> dict[str, list[T]]:
    """Three parts, by name. Validation and test get ``num_held_out`` examples each, or a few more, so that keys
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
        room = min(num_held_out, int(MAX_HELD_OUT_SHARE * len(examples)))
        while room > 0 and (name := next(order, None)) is not None:
            for number in groups[name]:
                where[number] = part
            room -= len(groups[name])
    parts: dict[str, list[T]] = {name: [] for name in SPLIT_NAMES}
    for one, part in zip(examples, where, strict=True):
        parts[part].append(one)
    if not all(parts.values()):
        raise InputError(
            f"of {len(examples)} examples ({len(groups)} that must stay together) nothing can be held out; "
            "name data.valid and data.test, or use more data"
        )
    return parts


def write_examples(path: Path, examples: Sequence[Any]) -> None:
    """Write examples, which are dataclasses, to a file."""
    lines = (json.dumps(asdict(one), ensure_ascii=False, default=os.fspath) for one in examples)
    with atomic_write(path) as part:
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def read_examples(path: Path, example_type: type[T]) -> list[T]:
    """The examples of such a file."""
    read = pydantic.TypeAdapter(example_type).validate_json
    found: list[T] = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(read(line))
            except pydantic.ValidationError:
                raise InputError(
                    f"{path}:{number} is not what training held out: the file was changed; train again"
                ) from None
    return found
