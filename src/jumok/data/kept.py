"""Numbers made of files, on disk by file: nothing is decoded twice.

A cache is a folder, one for each way to make them::

    cache.json     what made them, and the shape of one row, as in [49, 1280]
    features.f16   row after row, 2 bytes a number (features.u8: whole numbers of 1 byte)
    NAME.key       a record for each file, in the same order: 32 bytes of a digest of its name, place, size
                   and time; and where files have several rows each, 8 more that say where the last one ends

Rows are on the disk before their records are: whatever ends a process, a record that is there has its rows,
and what lies behind the last record is written over. A file that has changed has another digest, and is read
anew. Several processes may fill one cache; they take turns.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from jumok.data.formats import Flaw
from jumok.errors import InputError
from jumok.files import add_filename_to_errors, written

__all__ = ["FORMAT", "Kept", "Kind", "Source", "code", "named"]

FORMAT = 1
FACTS, LOCK = "cache.json", "lock"
FILES = {"float16": "features.f16", "uint8": "features.u8"}
DIGEST, END = 32, 8  # bytes of a record
AT_ONCE = 64  # files
THREADS = 8  # that decode; the libraries let others work meanwhile

Kind = Literal["float16", "uint8"]


class Source(Protocol):
    """What numbers are made of: a file, or something that is made on the spot."""

    @property
    def identity(self) -> list[object]: ...
    @property
    def where(self) -> str: ...


S = TypeVar("S", bound=Source)
T = TypeVar("T")
Prepared = NDArray[Any]


def code(*modules: str) -> str:
    """A digest of the sources of modules: what they make up is made anew when they have changed."""
    sources = (inspect.getsource(importlib.import_module(module)) for module in modules)
    return hashlib.sha256("".join(sources).encode()).hexdigest()[:12]


def named(folder: Path, name: str, made_by: Mapping[str, object]) -> Path:
    """The place for what was made so, in a folder for all that was made."""
    digest = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]
    plain = re.sub(r"[^\w.-]+", "-", name)[:50].strip("-.")
    return folder / f"{plain}-{digest}"


class Kept(Generic[S]):
    """Rows of numbers, one or more for each source, on disk."""

    whose: ClassVar[str] = "files"
    ragged: ClassVar[bool] = False  # whether sources have several rows each

    def __init__(self, path: Path, made_by: dict[str, object], kind: Kind = "float16") -> None:
        self.path, self.kind = path, np.dtype(kind)
        self.file, self.keys = path / FILES[kind], path / f"{self.whose}.key"
        self.shape: tuple[int, ...] | None = None  # of one row; None before there is one
        self._made_by = made_by
        self._record = DIGEST + (END if self.ragged else 0)
        self._count = self._end = 0  # records, and rows, on the disk that count
        self._spans: dict[bytes, tuple[int, int]] = {}
        self._features: NDArray[Any] | None = None
        self._update()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, source: S) -> bool:
        return _key(source) in self._spans

    @property
    def features(self) -> NDArray[Any]:
        """All rows, through the memory map ``(rows, *shape)``; read-only."""
        if self.shape is None or not len(self):
            raise InputError(f"{self.path} holds no features yet; fill it first")
        if self._features is None or len(self._features) < self._end:
            shape = (self._end, *self.shape)
            # A plain array over the map: a slice of a memmap object takes far longer.
            self._features = np.asarray(np.memmap(self.file, self.kind, "r", shape=shape))
        return self._features

    def span(self, source: S) -> tuple[int, int]:
        """Where its rows begin and end among ``features``."""
        span = self._spans.get(_key(source))
        if span is None:
            raise InputError(f"{self.path} has no features of {source.where}; fill it first")
        return span

    def _filled(
        self,
        found: Iterable[T | Flaw],
        source: Callable[[T], S],
        read: Callable[[T], Prepared | Flaw],
        add: Callable[[list[S], list[Prepared]], None],
    ) -> Iterator[T | Flaw]:
        """The same, one after the other, once their rows are here; a flaw for what cannot be read.

        They are read in threads, so that no more than a few are in memory.
        """
        found = iter(found)
        with ThreadPoolExecutor(THREADS) as pool:
            while some := list(itertools.islice(found, AT_ONCE)):
                sources = {source(one): one for one in some if not isinstance(one, Flaw)}
                flaws = self._fill(sources, lambda ones: pool.map(read, ones), add)
                yield from (one if isinstance(one, Flaw) else flaws.get(source(one), one) for one in some)

    def _fill(
        self,
        some: Mapping[S, T],
        read: Callable[[Iterable[T]], Iterable[Prepared | Flaw]],
        add: Callable[[list[S], list[Prepared]], None],
    ) -> dict[S, Flaw]:
        """Make what is not here; why some of it cannot be."""
        if all(source in self for source in some):
            return {}
        with self._turn():
            new = {source: one for source, one in some.items() if source not in self}
            results = dict(zip(new, read(new.values()), strict=True))
            flaws = {source: one for source, one in results.items() if isinstance(one, Flaw)}
            prepared = {source: one for source, one in results.items() if not isinstance(one, Flaw)}
            if prepared:
                add(list(prepared), list(prepared.values()))
        return flaws

    def _write(self, sources: Sequence[S], rows: NDArray[Any], counts: Sequence[int]) -> None:
        """Write rows behind those that are here, so many of each source, and then the records."""
        if self.shape is None:
            self.shape = rows.shape[1:]
            with written(self.path / FACTS) as part:
                part.write_text(json.dumps({**self._made_by, "shape": self.shape}), encoding="utf-8")
        ends = self._end + np.cumsum(counts)
        records = b"".join(
            _key(source) + (int(end).to_bytes(END, "little") if self.ragged else b"")
            for source, end in zip(sources, ends, strict=True)
        )
        _append(self.file, self._end * self.kind.itemsize * math.prod(self.shape), rows.tobytes())
        _append(self.keys, self._count * self._record, records)
        self._learn(records, int(ends[-1]))

    def _rounded(self, made: NDArray[Any], sources: Sequence[S]) -> NDArray[Any]:
        """As they are kept."""
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(made, self.kind)
        if not np.isfinite(rows).all():
            raise InputError(
                f"there came NaN, infinity or numbers over 65504 of {sources[0].where} or one of the "
                f"{len(sources) - 1} behind it; features are kept with 16 bits"
            )
        return rows

    def _update(self) -> None:
        """Learn what is on the disk: this process, or another one, may have written it."""
        try:
            told = json.loads((self.path / FACTS).read_text(encoding="utf-8"))
            self.shape = tuple(told["shape"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.path} is damaged: {error!r}; remove this folder, and fill it") from None
        each = self.kind.itemsize * math.prod(self.shape)
        with contextlib.suppress(FileNotFoundError), self.keys.open("rb") as file:
            file.seek(self._count * self._record)
            self._learn(file.read(), self.file.stat().st_size // each)

    def _learn(self, records: bytes, there: int) -> None:
        """Of further records, those whose rows are among the first so many."""
        for begin in range(0, len(records) - self._record + 1, self._record):
            key, end = records[begin : begin + DIGEST], self._end + 1
            if self.ragged:
                end = int.from_bytes(records[begin + DIGEST : begin + self._record], "little")
            if end > there:
                return
            self._spans[key] = self._end, end
            self._count, self._end = self._count + 1, end

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other process adds to the cache, where files can be locked."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("w") as file:
            with contextlib.suppress(ImportError, OSError):  # Windows; a file system without locks
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            self._update()
            yield


def _key(source: Source) -> bytes:
    return hashlib.sha256(json.dumps(source.identity).encode()).digest()


def _append(path: Path, end: int, data: bytes) -> None:
    """Write behind the part that counts, over what a process that was killed may have left there."""
    with add_filename_to_errors(path), path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
