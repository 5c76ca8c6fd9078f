"""Token ids of all examples, on disk: made once, line by line, and read through the memory map.

A corpus may be larger than memory: making a store holds a few thousand lines at a time, and reading it holds
what the system chooses to keep. A store is a folder::

    store.json                               what it was made of, how many examples, how many were left out
    source.ids.npy      target.ids.npy       all token ids end to end, 2 bytes each (4 from 65,537 tokens on)
    source.offsets.npy  target.offsets.npy   example n has the ids from offsets[n] up to offsets[n + 1]

It is written under another name, synced, and renamed: a store under its own name is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jumok.data.formats import Flaw
from jumok.data.sources import Corpus, Example, Skipped
from jumok.data.text import Tokenizers
from jumok.errors import InputError
from jumok.files import sync

__all__ = ["Column", "Store", "column", "facts", "growing", "made", "prepare", "writer"]

FORMAT = 1
SIDES = ("source", "target")
AT_ONCE = 4096  # examples that are tokenised together
ABANDONED = 3600.0  # seconds without a write, after which a half-made store is taken for a dead process's

Array: TypeAlias = NDArray[np.unsignedinteger[Any]]
Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Column:
    """The token ids of one side of all examples."""

    ids: Array
    offsets: Array

    def __getitem__(self, number: int) -> Array:
        return self.ids[int(self.offsets[number]) : int(self.offsets[number + 1])]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """The number of tokens of every example, special ones not counted."""
        return np.diff(self.offsets).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Store:
    """Token ids of many examples, read-only; ``store[n]`` has views of the source's and the target's ids."""

    path: Path
    source: Column
    target: Column
    skipped: Skipped  # what was left out when it was made

    @classmethod
    def open(cls, path: Path) -> Store:
        """A store that is there."""
        told = facts(path)
        if told is None:
            raise InputError(f"{path} is no store of token ids that this jumok can read")
        source, target = (column(path, side, told["examples"]) for side in SIDES)
        return cls(path, source, target, Skipped(Counter(told["skipped"]), told["first"]))

    def __len__(self) -> int:
        return len(self.source.offsets) - 1

    def __getitem__(self, number: int) -> tuple[Array, Array]:
        if not 0 <= number < len(self):
            raise IndexError(f"example {number} of {len(self)}")
        return self.source[number], self.target[number]

    def __reduce__(self) -> tuple[Callable[[Path], Store], tuple[Path]]:
        return Store.open, (self.path,)  # another process maps the files, and copies nothing


def prepare(
    path: Path,
    corpus: Corpus,
    tokenizers: Tokenizers,
    *,
    longest: int | None = None,
    replace: bool = True,
    progress: Progress | None = None,
) -> Store:
    """The store of a corpus: the one at ``path`` if it was made of just this, else a new one in its place.

    With ``replace=False`` a store that was made of something else is an error: somebody counts on it.
    Examples of more than ``longest`` tokens on either side are left out and counted. ``progress`` is told the
    number of examples read, from time to time.
    """
    said = [FORMAT, corpus.fingerprint, tokenizers.source.fingerprint, tokenizers.target.fingerprint, longest]
    fingerprint = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    made(path, fingerprint, lambda folder: _write(folder, corpus, tokenizers, longest, progress), replace)
    return Store.open(path)


def made(path: Path, fingerprint: str, write: Callable[[Path], dict[str, Any]], replace: bool) -> None:
    """See to it that a folder of arrays is at ``path``, whole, and made of what the fingerprint tells of.

    ``write`` puts the arrays into a folder, and returns what ``store.json`` is to say besides.
    """
    if _is(path, fingerprint):
        return
    if path.exists() and not (path / "store.json").is_file():
        raise InputError(
            f"{path} is there and is no store of token ids; it is left alone. Name another place"
        )
    if path.exists() and not replace:
        raise InputError(
            f"the data has changed since {path} was made of it, and a training has begun with that; "
            "bring the data back, or begin anew in another folder"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = _temporary(path)
    try:
        told = {"format": FORMAT, "fingerprint": fingerprint, **write(temporary)}
        with (temporary / "store.json").open("w", encoding="utf-8") as file:
            json.dump(told, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync(temporary)
        _put(temporary, path, fingerprint)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(
    folder: Path, corpus: Corpus, tokenizers: Tokenizers, longest: int | None, progress: Progress | None
) -> dict[str, Any]:
    """Write the arrays; the number of examples, and what was left out."""
    skipped = Skipped()
    read = examples = 0
    limit = float("inf") if longest is None else longest
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(writer(folder, side, getattr(tokenizers, side).size)) for side in SIDES
        ]
        for some in _chunks(corpus.read(skipped)):
            sources = tokenizers.source.encode([one.source for one in some])
            targets = tokenizers.target.encode([one.target for one in some])
            for one, source, target in zip(some, sources, targets, strict=True):
                if len(source) > limit or len(target) > limit:
                    side = "source" if len(source) > limit else "target"
                    skipped.add(Flaw(one.where, f"a {side} of more than {longest} tokens"))
            fit = [len(one) <= limit and len(two) <= limit for one, two in zip(sources, targets, strict=True)]
            for write, encoded in zip(writers, (sources, targets), strict=True):
                write(list(itertools.compress(encoded, fit)))
            examples += sum(fit)
            read += len(some)
            if progress is not None:
                progress(read)
    if not examples:
        raise InputError(f"none of {read} examples is left; {skipped}")
    return {"examples": examples, "skipped": skipped.counts, "first": skipped.first}


def _chunks(examples: Iterator[Example]) -> Iterator[list[Example]]:
    while some := list(itertools.islice(examples, AT_ONCE)):
        yield some


@contextlib.contextmanager
def writer(folder: Path, side: str, vocabulary: int) -> Iterator[Callable[[list[list[int]]], None]]:
    """A function that adds sequences to the arrays of one side."""
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
    with (
        growing(folder / f"{side}.ids.npy", dtype) as add_ids,
        growing(folder / f"{side}.offsets.npy", np.dtype(np.uint64)) as add_offsets,
    ):
        add_offsets(np.zeros(1, np.uint64))
        end = 0

        def write(sequences: list[list[int]]) -> None:
            nonlocal end
            lengths = np.fromiter(map(len, sequences), np.uint64, len(sequences))
            add_ids(np.fromiter(itertools.chain.from_iterable(sequences), dtype, int(lengths.sum())))
            add_offsets(np.cumsum(lengths) + np.uint64(end))
            end += int(lengths.sum())

        yield write


@contextlib.contextmanager
def growing(path: Path, dtype: np.dtype[Any]) -> Iterator[Callable[[Array], None]]:
    """A function that adds numbers to a ``.npy`` file; the header, which tells their count, comes last."""
    count = 0

    def header() -> None:
        # NumPy leaves room in it for the count to grow.
        told = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, told)

    def add(numbers: Array) -> None:
        nonlocal count
        file.write(numbers.astype(dtype, copy=False).tobytes())
        count += len(numbers)

    with path.open("wb") as file:
        header()
        begin = file.tell()
        yield add
        file.seek(0)
        header()
        if file.tell() != begin:
            raise RuntimeError(f"{path}: NumPy's header has grown, and runs into the numbers")
        file.flush()
        os.fsync(file.fileno())


def column(path: Path, side: str, examples: int) -> Column:
    """What :func:`writer` wrote, if it is whole."""
    try:
        # Plain arrays over the maps: a slice of a memmap object takes far longer.
        ids, offsets = (
            np.asarray(np.load(path / f"{side}.{what}.npy", mmap_mode="r")) for what in ("ids", "offsets")
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}; remove this folder, and it is made again") from None
    if len(offsets) != examples + 1 or offsets[-1] != len(ids):
        raise InputError(f"{path} is damaged: its files do not fit together; remove this folder")
    return Column(ids, offsets)


def facts(path: Path) -> dict[str, Any] | None:
    """What ``store.json`` says; None if there is no store, or one of another format."""
    try:
        told: dict[str, Any] = json.loads((path / "store.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if told.get("format") == FORMAT else None


def _is(path: Path, fingerprint: str) -> bool:
    told = facts(path)
    return told is not None and told["fingerprint"] == fingerprint


def _put(temporary: Path, path: Path, fingerprint: str) -> None:
    """Give a finished store its name. Another process may be faster, and have made the same."""
    old = _temporary(path)
    try:
        if path.exists() and not _is(path, fingerprint):
            path.replace(old / path.name)
        temporary.chmod(0o755)
        temporary.replace(path)
        sync(path.parent)
    except OSError:
        if not _is(path, fingerprint):
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _temporary(path: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".tmp", dir=path.parent))


def _remove_abandoned(path: Path) -> None:
    for folder in path.parent.glob(f".{path.name}-*.tmp"):
        with contextlib.suppress(OSError):  # its process may be finishing it right now
            written = max(one.stat().st_mtime for one in (folder, *folder.iterdir()))
            if time.time() - written > ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)
