"""Held-out splits for validation and test, if a recipe names no data for them.

Examples with the same *key* are in the same split: a repeated sentence is never in two splits, and no article
is used for both training and test. The choice depends only on a hash of the key, so that the same data gives
the same splits. They can be stored as JSON lines, so that they do not change with the data.
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

SPLIT_NAMES = ("train", "valid", "test")
MAX_HELD_OUT_SHARE = 0.2  # of the examples, for each of validation and test
MAX_HASHED_FRACTION = 0.1  # of a stream of examples, for each of validation and test
HASH_RANGE = 1 << 64
T = TypeVar("T")


def split_held_out(examples: Sequence[T], key: Callable[[T], str], num_held_out: int) -> dict[str, list[T]]:
    """Split examples into train, valid and test. Valid and test get ``num_held_out`` examples each.

    They may get a few more to keep keys together, but at most a fifth of all examples.

    >>> splits = split_held_out(list(range(100)), lambda number: str(number // 2), 10)
    >>> {name: len(split) for name, split in splits.items()}
    {'train': 80, 'valid': 10, 'test': 10}
    """
    groups: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault(key(example), []).append(index)
    order = iter(sorted(groups, key=lambda group_key: hashlib.blake2b(group_key.encode(), digest_size=8).digest()))
    split_of_example = ["train"] * len(examples)
    for split_name in ("test", "valid"):
        num_remaining = min(num_held_out, int(MAX_HELD_OUT_SHARE * len(examples)))
        while num_remaining > 0 and (group_key := next(order, None)) is not None:
            for index in groups[group_key]:
                split_of_example[index] = split_name
            num_remaining -= len(groups[group_key])
    splits: dict[str, list[T]] = {name: [] for name in SPLIT_NAMES}
    for example, split_name in zip(examples, split_of_example, strict=True):
        splits[split_name].append(example)
    if not all(splits.values()):
        raise InputError(
            f"nothing can be held out of {len(examples)} examples with {len(groups)} different keys; set "
            "data.valid and data.test, or use more data"
        )
    return splits


def write_examples(path: Path, examples: Sequence[Any]) -> None:
    """Write examples, which are dataclasses, to a file."""
    lines = (json.dumps(asdict(example), ensure_ascii=False, default=os.fspath) for example in examples)
    with atomic_write(path) as part:
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def read_examples(path: Path, example_type: type[T]) -> list[T]:
    """Read examples that :func:`write_examples` wrote."""
    parse = pydantic.TypeAdapter(example_type).validate_json
    examples: list[T] = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for line_number, line in enumerate(file, 1):
            try:
                examples.append(parse(line))
            except pydantic.ValidationError:
                raise InputError(
                    f"{path}:{line_number} is not an example that training held out: the file was changed; train again"
                ) from None
    return examples


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
