"""What is set aside to validate and to test with, where a recipe names no data for it.

Examples with the same *key* stay together: the same sentence twice is never on both sides, and no article is
both learned from and asked about. Chance decides, by the key alone: the same data gives the same parts. They
can be kept in a file, with a line of JSON each: then they stay what they are when the data changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic

from jumok.errors import InputError
from jumok.files import atomic_write, read_json, write_json

__all__ = ["SPLIT_NAMES", "HashedHoldOut", "read_examples", "split_held_out", "write_examples"]

SPLIT_NAMES = ("train", "valid", "test")
MAX_HELD_OUT_SHARE = 0.2  # of the examples, for each of validation and test
MAX_HASHED_FRACTION = 0.1  # of a stream of examples, for each of validation and test
HASH_RANGE = 1 << 64
T = TypeVar("T")


def split_held_out(examples: Sequence[T], key: Callable[[T], str], num_held_out: int) -> dict[str, list[T]]:
    """Three parts, by name. Validation and test get ``num_held_out`` examples each, or a few more, so that keys
    stay together; but at most a fifth of all.

    >>> parts = split_held_out(list(range(100)), lambda number: str(number // 2), 10)
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


@dataclass(frozen=True)
class HashedHoldOut(Generic[T]):
    """Splits that are held out of training data too large for memory, chosen by a hash of each example's key.

    Examples with the same key are in the same split. Validation and test each have their own part of the hash
    range, whether or not a recipe names other data for them.
    """

    folder: Path  # ``data`` in the folder of a run
    config: Any  # the ``data:`` section: ``valid`` and ``test`` are None where a split is held out
    suffix: str  # of the files that the splits are written to
    key: Callable[[T], str]
    unit: str  # what is counted in ``held_out.json``, such as "pairs"

    NAMES = ("valid", "test")

    @property
    def paths(self) -> dict[str, Path]:
        """The files of the splits that are held out."""
        names = [name for name in self.NAMES if getattr(self.config, name) is None]
        return {name: self.folder / f"{name}{self.suffix}" for name in names}

    @property
    def is_written(self) -> bool:
        return all(path.is_file() for path in self.paths.values())

    def resolve_fraction(self, examples: Iterable[T]) -> float:
        """The fraction of the data for each split. It is stored, so that a resumed run uses the same."""
        path = self.folder / "held_out.json"
        if path.is_file():
            fraction = read_json(path, dict).get("fraction")
            if not isinstance(fraction, int | float):
                raise InputError(f"{path} is damaged: expected a number as fraction")
            return float(fraction)
        count = sum(1 for _ in examples)
        fraction = min(MAX_HASHED_FRACTION, float(self.config.held_out_size / count))
        write_json(path, {self.unit: count, "fraction": fraction})
        return fraction

    def is_training_example(self, example: T, fraction: float) -> bool:
        name = self._assign(example, fraction)
        return name is None or name not in self.paths

    def collect(self, examples: Iterable[T], fraction: float) -> dict[str, list[T]]:
        """The examples of each split that is held out."""
        splits: dict[str, list[T]] = {name: [] for name in self.paths}
        for example in examples:
            name = self._assign(example, fraction)
            if name in splits:
                splits[name].append(example)
        return splits

    def _assign(self, example: T, fraction: float) -> str | None:
        """The split of an example; None: training."""
        digest = hashlib.blake2b(self.key(example).encode(), digest_size=8).digest()
        position = int(int.from_bytes(digest, "big") / HASH_RANGE / fraction)
        return self.NAMES[position] if position < len(self.NAMES) else None
