"""Disk cache of arrays that are computed from files, such as image features and spectrograms.

A cache is a folder, one for each way to compute them::

    cache.json     provenance, and the shape of a row, such as [49, 1280]
    features.f16   all rows, 2 bytes per number (features.u8: unsigned integers of 1 byte)
    NAME.key       a record for each file, in the same order: 32 bytes of a digest of its name, offset, size
                   and modification time; if files have several rows, 8 more bytes with the end of its rows

Rows are synced to disk before their records. Whenever a process is killed, an existing record has its rows,
and data after the last record is overwritten. A file that has changed has another digest and is read again.
Several processes may fill a cache; they lock it.
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

from jumok.data.readers.invalid_examples import InvalidExample
from jumok.errors import InputError
from jumok.files import add_filename_to_errors, atomic_write

FORMAT_VERSION = 1
METADATA_FILE, LOCK_FILE = "cache.json", "lock"
ROW_FILES = {"float16": "features.f16", "uint8": "features.u8"}
DIGEST_BYTES, END_BYTES = 32, 8  # of a record
SOURCES_PER_CHUNK = 64
NUM_THREADS = 8  # decoding threads; the libraries release the GIL

StorageType = Literal["float16", "uint8"]


class CacheSource(Protocol):
    """What rows are computed from: a file, or a generated example."""

    @property
    def identity(self) -> list[object]: ...
    @property
    def location(self) -> str: ...


S = TypeVar("S", bound=CacheSource)
T = TypeVar("T")
PreparedArray = NDArray[Any]


def digest_sources(*modules: str) -> str:
    """A digest of the source code of modules, so that what they generate is regenerated when they change."""
    sources = (inspect.getsource(importlib.import_module(module)) for module in modules)
    return hashlib.sha256("".join(sources).encode()).hexdigest()[:12]


def cache_path(folder: Path, name: str, provenance: Mapping[str, object]) -> Path:
    """The path of the cache with this provenance, in a folder of caches."""
    digest = hashlib.sha256(json.dumps(provenance).encode()).hexdigest()[:12]
    safe_name = re.sub(r"[^\w.-]+", "-", name)[:50].strip("-.")
    return folder / f"{safe_name}-{digest}"


class FeatureCache(Generic[S]):
    """Rows of numbers on disk, one or more for each source."""

    source_name: ClassVar[str] = "files"
    has_variable_rows: ClassVar[bool] = False  # whether sources have several rows

    def __init__(self, path: Path, provenance: dict[str, object], storage_type: StorageType = "float16") -> None:
        self.path, self.dtype = path, np.dtype(storage_type)
        self.rows_path, self.records_path = path / ROW_FILES[storage_type], path / f"{self.source_name}.key"
        self.shape: tuple[int, ...] | None = None  # of a row; None if there is none yet
        self._provenance = provenance
        self._record_bytes = DIGEST_BYTES + (END_BYTES if self.has_variable_rows else 0)
        self._num_records = self._num_rows = 0  # valid records and rows on disk
        self._spans: dict[bytes, tuple[int, int]] = {}
        self._features: NDArray[Any] | None = None
        self._reload_records()

    def __len__(self) -> int:
        return self._num_records

    def __contains__(self, source: S) -> bool:
        return _source_digest(source) in self._spans

    @property
    def features(self) -> NDArray[Any]:
        """All rows ``(rows, *shape)``, a read-only memory map."""
        if self.shape is None or not len(self):
            raise InputError(f"{self.path} contains no features yet; fill it first")
        if self._features is None or len(self._features) < self._num_rows:
            shape = (self._num_rows, *self.shape)
            # Use a plain array over the map, because slicing a memmap object is far slower.
            self._features = np.asarray(np.memmap(self.rows_path, self.dtype, "r", shape=shape))
        return self._features

    def span(self, source: S) -> tuple[int, int]:
        """The start and the end of the rows of a source in ``features``."""
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
        """Yield the same examples once their rows are cached; invalid ones for sources that cannot be read.

        Sources are read in threads, in chunks, so that only a few are in memory.
        """
        examples = iter(examples)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            while chunk := list(itertools.islice(examples, SOURCES_PER_CHUNK)):
                sources = {get_source(example): example for example in chunk if not isinstance(example, InvalidExample)}
                invalid = self._fill_missing(sources, lambda items: pool.map(read, items), add)
                yield from (
                    example if isinstance(example, InvalidExample) else invalid.get(get_source(example), example)
                    for example in chunk
                )

    def _fill_missing(
        self,
        items: Mapping[S, T],
        read: Callable[[Iterable[T]], Iterable[PreparedArray | InvalidExample]],
        add: Callable[[list[S], list[PreparedArray]], None],
    ) -> dict[S, InvalidExample]:
        """Add the rows of missing items. Returns those that cannot be read."""
        if all(source in self for source in items):
            return {}
        with self._lock():
            missing = {source: item for source, item in items.items() if source not in self}
            results = dict(zip(missing, read(missing.values()), strict=True))
            invalid = {source: item for source, item in results.items() if isinstance(item, InvalidExample)}
            prepared = {source: item for source, item in results.items() if not isinstance(item, InvalidExample)}
            if prepared:
                add(list(prepared), list(prepared.values()))
        return invalid

    def _append_rows(self, sources: Sequence[S], rows: NDArray[Any], counts: Sequence[int]) -> None:
        """Append rows, ``counts`` of them for each source, and then the records."""
        if self.shape is None:
            self.shape = rows.shape[1:]
            with atomic_write(self.path / METADATA_FILE) as part:
                part.write_text(json.dumps({**self._provenance, "shape": self.shape}), encoding="utf-8")
        ends = self._num_rows + np.cumsum(counts)
        records = b"".join(
            _source_digest(source) + (int(end).to_bytes(END_BYTES, "little") if self.has_variable_rows else b"")
            for source, end in zip(sources, ends, strict=True)
        )
        _append_bytes(self.rows_path, self._num_rows * self.dtype.itemsize * math.prod(self.shape), rows.tobytes())
        _append_bytes(self.records_path, self._num_records * self._record_bytes, records)
        self._index_records(records, int(ends[-1]))

    def _to_storage_type(self, values: NDArray[Any], sources: Sequence[S]) -> NDArray[Any]:
        """Convert values to the data type of the cache."""
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(values, self.dtype)
        if not np.isfinite(rows).all():
            raise InputError(
                f"the features of {sources[0].location} or one of the {len(sources) - 1} sources after it "
                "contain NaN, infinity or numbers over 65504; expected the range of float16"
            )
        return rows

    def _reload_records(self) -> None:
        """Read new records from disk, which this process or another one may have written."""
        try:
            metadata = json.loads((self.path / METADATA_FILE).read_text(encoding="utf-8"))
            self.shape = tuple(metadata["shape"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.path} is damaged: {error!r}; remove this folder to create it again") from None
        row_bytes = self.dtype.itemsize * math.prod(self.shape)
        with contextlib.suppress(FileNotFoundError), self.records_path.open("rb") as file:
            file.seek(self._num_records * self._record_bytes)
            self._index_records(file.read(), self.rows_path.stat().st_size // row_bytes)

    def _index_records(self, records: bytes, num_rows: int) -> None:
        """Index more records whose rows are among the first ``num_rows``."""
        for start in range(0, len(records) - self._record_bytes + 1, self._record_bytes):
            key, end = records[start : start + DIGEST_BYTES], self._num_rows + 1
            if self.has_variable_rows:
                end = int.from_bytes(records[start + DIGEST_BYTES : start + self._record_bytes], "little")
            if end > num_rows:
                return
            self._spans[key] = self._num_rows, end
            self._num_records, self._num_rows = self._num_records + 1, end

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock the cache against other processes, if the file system supports locks."""
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
    """Write at an offset. Data after it is what a killed process left behind, and is removed."""
    with add_filename_to_errors(path), path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
