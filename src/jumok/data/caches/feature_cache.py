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

from jumok.data.readers.formats import InvalidExample
from jumok.errors import InputError
from jumok.files import add_filename_to_errors, atomic_write

__all__ = ["FORMAT_VERSION", "CacheSource", "FeatureCache", "StorageType", "cache_path", "digest_sources"]

FORMAT_VERSION = 1
METADATA_FILE, LOCK_FILE = "cache.json", "lock"
ROW_FILES = {"float16": "features.f16", "uint8": "features.u8"}
DIGEST_BYTES, END_BYTES = 32, 8  # bytes of a record
SOURCES_PER_CHUNK = 64  # files
NUM_THREADS = 8  # that decode; the libraries let others work meanwhile

StorageType = Literal["float16", "uint8"]


class CacheSource(Protocol):
    """What numbers are made of: a file, or something that is made on the spot."""

    @property
    def identity(self) -> list[object]: ...
    @property
    def location(self) -> str: ...


S = TypeVar("S", bound=CacheSource)
T = TypeVar("T")
PreparedArray = NDArray[Any]


def digest_sources(*modules: str) -> str:
    """A digest of the sources of modules: what they make up is made anew when they have changed."""
    sources = (inspect.getsource(importlib.import_module(module)) for module in modules)
    return hashlib.sha256("".join(sources).encode()).hexdigest()[:12]


def cache_path(folder: Path, name: str, provenance: Mapping[str, object]) -> Path:
    """The place for what was made so, in a folder for all that was made."""
    digest = hashlib.sha256(json.dumps(provenance).encode()).hexdigest()[:12]
    plain = re.sub(r"[^\w.-]+", "-", name)[:50].strip("-.")
    return folder / f"{plain}-{digest}"


class FeatureCache(Generic[S]):
    """Rows of numbers, one or more for each source, on disk."""

    source_name: ClassVar[str] = "files"
    has_variable_rows: ClassVar[bool] = False  # whether sources have several rows each

    def __init__(
        self, path: Path, provenance: dict[str, object], storage_type: StorageType = "float16"
    ) -> None:
        self.path, self.dtype = path, np.dtype(storage_type)
        self.rows_path, self.records_path = path / ROW_FILES[storage_type], path / f"{self.source_name}.key"
        self.shape: tuple[int, ...] | None = None  # of one row; None before there is one
        self._provenance = provenance
        self._record_bytes = DIGEST_BYTES + (END_BYTES if self.has_variable_rows else 0)
        self._num_records = self._num_rows = 0  # records, and rows, on the disk that count
        self._spans: dict[bytes, tuple[int, int]] = {}
        self._features: NDArray[Any] | None = None
        self._reload_records()

    def __len__(self) -> int:
        return self._num_records

    def __contains__(self, source: S) -> bool:
        return _source_digest(source) in self._spans

    @property
    def features(self) -> NDArray[Any]:
        """All rows, through the memory map ``(rows, *shape)``; read-only."""
        if self.shape is None or not len(self):
            raise InputError(f"{self.path} holds no features yet; fill it first")
        if self._features is None or len(self._features) < self._num_rows:
            shape = (self._num_rows, *self.shape)
            # A plain array over the map: a slice of a memmap object takes far longer.
            self._features = np.asarray(np.memmap(self.rows_path, self.dtype, "r", shape=shape))
        return self._features

    def span(self, source: S) -> tuple[int, int]:
        """Where its rows begin and end among ``features``."""
        span = self._spans.get(_source_digest(source))
        if span is None:
            raise InputError(f"{self.path} has no features of {source.location}; fill it first")
        return span

    def _fill_examples(
        self,
        examples: Iterable[T | InvalidExample],
        get_source: Callable[[T], S],
        read: Callable[[T], PreparedArray | InvalidExample],
        add: Callable[[list[S], list[PreparedArray]], None],
    ) -> Iterator[T | InvalidExample]:
        """The same, one after the other, once their rows are here; a flaw for what cannot be read.

        They are read in threads, so that no more than a few are in memory.
        """
        examples = iter(examples)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            while some := list(itertools.islice(examples, SOURCES_PER_CHUNK)):
                sources = {get_source(one): one for one in some if not isinstance(one, InvalidExample)}
                flaws = self._fill_missing(sources, lambda ones: pool.map(read, ones), add)
                yield from (
                    one if isinstance(one, InvalidExample) else flaws.get(get_source(one), one)
                    for one in some
                )

    def _fill_missing(
        self,
        items: Mapping[S, T],
        read: Callable[[Iterable[T]], Iterable[PreparedArray | InvalidExample]],
        add: Callable[[list[S], list[PreparedArray]], None],
    ) -> dict[S, InvalidExample]:
        """Make what is not here; why some of it cannot be."""
        if all(source in self for source in items):
            return {}
        with self._lock():
            new = {source: one for source, one in items.items() if source not in self}
            results = dict(zip(new, read(new.values()), strict=True))
            flaws = {source: one for source, one in results.items() if isinstance(one, InvalidExample)}
            prepared = {source: one for source, one in results.items() if not isinstance(one, InvalidExample)}
            if prepared:
                add(list(prepared), list(prepared.values()))
        return flaws

    def _append_rows(self, sources: Sequence[S], rows: NDArray[Any], counts: Sequence[int]) -> None:
        """Write rows behind those that are here, so many of each source, and then the records."""
        if self.shape is None:
            self.shape = rows.shape[1:]
            with atomic_write(self.path / METADATA_FILE) as part:
                part.write_text(json.dumps({**self._provenance, "shape": self.shape}), encoding="utf-8")
        ends = self._num_rows + np.cumsum(counts)
        records = b"".join(
            _source_digest(source)
            + (int(end).to_bytes(END_BYTES, "little") if self.has_variable_rows else b"")
            for source, end in zip(sources, ends, strict=True)
        )
        _append_bytes(
            self.rows_path, self._num_rows * self.dtype.itemsize * math.prod(self.shape), rows.tobytes()
        )
        _append_bytes(self.records_path, self._num_records * self._record_bytes, records)
        self._index_records(records, int(ends[-1]))

    def _to_storage_type(self, values: NDArray[Any], sources: Sequence[S]) -> NDArray[Any]:
        """As they are kept."""
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(values, self.dtype)
        if not np.isfinite(rows).all():
            raise InputError(
                f"there came NaN, infinity or numbers over 65504 of {sources[0].location} or one of the "
                f"{len(sources) - 1} behind it; features are kept with 16 bits"
            )
        return rows

    def _reload_records(self) -> None:
        """Learn what is on the disk: this process, or another one, may have written it."""
        try:
            told = json.loads((self.path / METADATA_FILE).read_text(encoding="utf-8"))
            self.shape = tuple(told["shape"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.path} is damaged: {error!r}; remove this folder, and fill it") from None
        each = self.dtype.itemsize * math.prod(self.shape)
        with contextlib.suppress(FileNotFoundError), self.records_path.open("rb") as file:
            file.seek(self._num_records * self._record_bytes)
            self._index_records(file.read(), self.rows_path.stat().st_size // each)

    def _index_records(self, records: bytes, num_rows: int) -> None:
        """Of further records, those whose rows are among the first so many."""
        for begin in range(0, len(records) - self._record_bytes + 1, self._record_bytes):
            key, end = records[begin : begin + DIGEST_BYTES], self._num_rows + 1
            if self.has_variable_rows:
                end = int.from_bytes(records[begin + DIGEST_BYTES : begin + self._record_bytes], "little")
            if end > num_rows:
                return
            self._spans[key] = self._num_rows, end
            self._num_records, self._num_rows = self._num_records + 1, end

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Wait until no other process adds to the cache, where files can be locked."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK_FILE).open("w") as file:
            with contextlib.suppress(ImportError, OSError):  # Windows; a file system without locks
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            self._reload_records()
            yield


def _source_digest(source: CacheSource) -> bytes:
    return hashlib.sha256(json.dumps(source.identity).encode()).digest()


def _append_bytes(path: Path, offset: int, data: bytes) -> None:
    """Write behind the part that counts, over what a process that was killed may have left there."""
    with add_filename_to_errors(path), path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
