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

from jumok.data.readers.formats import InvalidExample
from jumok.data.readers.parallel_corpus import ParallelCorpus, SkippedExamples, TranslationExample
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.errors import InputError
from jumok.files import fsync_path

__all__ = [
    "TokenColumn",
    "TokenStore",
    "ensure_store",
    "load_column",
    "open_array_writer",
    "open_sequence_writer",
    "prepare_token_store",
    "read_metadata",
]

FORMAT_VERSION = 1
SIDES = ("source", "target")
EXAMPLES_PER_CHUNK = 4096  # examples that are tokenised together
ABANDONED_SECONDS = (
    3600.0  # seconds without a write, after which a half-made store is taken for a dead process's
)

TokenArray: TypeAlias = NDArray[np.unsignedinteger[Any]]
ReadProgress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class TokenColumn:
    """The token ids of one side of all examples."""

    ids: TokenArray
    offsets: TokenArray

    def __getitem__(self, index: int) -> TokenArray:
        return self.ids[int(self.offsets[index]) : int(self.offsets[index + 1])]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """The number of tokens of every example, special ones not counted."""
        return np.diff(self.offsets).astype(np.int32)


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Token ids of many examples, read-only; ``store[n]`` has views of the source's and the target's ids."""

    path: Path
    source: TokenColumn
    target: TokenColumn
    skipped: SkippedExamples  # what was left out when it was made

    @classmethod
    def open(cls, path: Path) -> TokenStore:
        """A store that is there."""
        told = read_metadata(path)
        if told is None:
            raise InputError(f"{path} is no store of token ids that this jumok can read")
        source, target = (load_column(path, side, told["examples"]) for side in SIDES)
        return cls(path, source, target, SkippedExamples(Counter(told["skipped"]), told["first"]))

    def __len__(self) -> int:
        return len(self.source.offsets) - 1

    def __getitem__(self, index: int) -> tuple[TokenArray, TokenArray]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.source[index], self.target[index]

    @property
    def fingerprint(self) -> str:
        """Identifies the corpus, the tokenizers and the settings that the store was made from."""
        return str((read_metadata(self.path) or {}).get("fingerprint", ""))

    def __reduce__(self) -> tuple[Callable[[Path], TokenStore], tuple[Path]]:
        return TokenStore.open, (self.path,)  # another process maps the files, and copies nothing


def prepare_token_store(
    path: Path,
    corpus: ParallelCorpus,
    tokenizers: TokenizerPair,
    *,
    max_tokens: int | None = None,
    replace: bool = True,
    progress: ReadProgress | None = None,
) -> TokenStore:
    """The store of a corpus: the one at ``path`` if it was made of just this, else a new one in its place.

    With ``replace=False`` a store that was made of something else is an error: somebody counts on it.
    Examples of more than ``max_tokens`` tokens on either side are left out and counted. ``progress`` is told the
    number of examples read, from time to time.
    """
    said = [
        FORMAT_VERSION,
        corpus.fingerprint,
        tokenizers.source.fingerprint,
        tokenizers.target.fingerprint,
        max_tokens,
    ]
    fingerprint = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    ensure_store(
        path,
        fingerprint,
        lambda folder: _write_examples(folder, corpus, tokenizers, max_tokens, progress),
        replace,
    )
    return TokenStore.open(path)


def ensure_store(
    path: Path, fingerprint: str, write: Callable[[Path], dict[str, Any]], replace: bool
) -> None:
    """See to it that a folder of arrays is at ``path``, whole, and made of what the fingerprint tells of.

    ``write`` puts the arrays into a folder, and returns what ``store.json`` is to say besides.
    """
    if _is_current(path, fingerprint):
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
    temporary = _make_temporary_folder(path)
    try:
        told = {"format": FORMAT_VERSION, "fingerprint": fingerprint, **write(temporary)}
        with (temporary / "store.json").open("w", encoding="utf-8") as file:
            json.dump(told, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        fsync_path(temporary)
        _publish(temporary, path, fingerprint)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_examples(
    folder: Path,
    corpus: ParallelCorpus,
    tokenizers: TokenizerPair,
    max_tokens: int | None,
    progress: ReadProgress | None,
) -> dict[str, Any]:
    """Write the arrays; the number of examples, and what was left out."""
    skipped = SkippedExamples()
    read = examples = 0
    limit = float("inf") if max_tokens is None else max_tokens
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(open_sequence_writer(folder, side, getattr(tokenizers, side).vocab_size))
            for side in SIDES
        ]
        for some in _iter_chunks(corpus.read(skipped)):
            sources = tokenizers.source.encode([one.source for one in some])
            targets = tokenizers.target.encode([one.target for one in some])
            for one, source, target in zip(some, sources, targets, strict=True):
                if len(source) > limit or len(target) > limit:
                    side = "source" if len(source) > limit else "target"
                    skipped.add(InvalidExample(one.location, f"a {side} of more than {max_tokens} tokens"))
            fit = [len(one) <= limit and len(two) <= limit for one, two in zip(sources, targets, strict=True)]
            for write, encoded in zip(writers, (sources, targets), strict=True):
                write(list(itertools.compress(encoded, fit)))
            examples += sum(fit)
            read += len(some)
            if progress is not None:
                progress(read)
    if not examples:
        raise InputError(f"none of {read} examples is left; {skipped}")
    return {"examples": examples, "skipped": skipped.counts, "first": skipped.first_locations}


def _iter_chunks(examples: Iterator[TranslationExample]) -> Iterator[list[TranslationExample]]:
    while some := list(itertools.islice(examples, EXAMPLES_PER_CHUNK)):
        yield some


@contextlib.contextmanager
def open_sequence_writer(
    folder: Path, name: str, vocab_size: int
) -> Iterator[Callable[[list[list[int]]], None]]:
    """A function that adds sequences to the arrays of one side."""
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    with (
        open_array_writer(folder / f"{name}.ids.npy", dtype) as add_ids,
        open_array_writer(folder / f"{name}.offsets.npy", np.dtype(np.uint64)) as add_offsets,
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
def open_array_writer(path: Path, dtype: np.dtype[Any]) -> Iterator[Callable[[TokenArray], None]]:
    """A function that adds numbers to a ``.npy`` file; the header, which tells their count, comes last."""
    count = 0

    def header() -> None:
        # NumPy leaves room in it for the count to grow.
        told = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, told)

    def add(numbers: TokenArray) -> None:
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


def load_column(path: Path, name: str, num_sequences: int) -> TokenColumn:
    """What :func:`open_sequence_writer` wrote, if it is whole."""
    try:
        # Plain arrays over the maps: a slice of a memmap object takes far longer.
        ids, offsets = (
            np.asarray(np.load(path / f"{name}.{what}.npy", mmap_mode="r")) for what in ("ids", "offsets")
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}; remove this folder, and it is made again") from None
    if len(offsets) != num_sequences + 1 or offsets[-1] != len(ids):
        raise InputError(f"{path} is damaged: its files do not fit together; remove this folder")
    return TokenColumn(ids, offsets)


def read_metadata(path: Path) -> dict[str, Any] | None:
    """What ``store.json`` says; None if there is no store, or one of another format."""
    try:
        told: dict[str, Any] = json.loads((path / "store.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if told.get("format") == FORMAT_VERSION else None


def _is_current(path: Path, fingerprint: str) -> bool:
    told = read_metadata(path)
    return told is not None and told["fingerprint"] == fingerprint


def _publish(temporary: Path, path: Path, fingerprint: str) -> None:
    """Give a finished store its name. Another process may be faster, and have made the same."""
    old = _make_temporary_folder(path)
    try:
        if path.exists() and not _is_current(path, fingerprint):
            with contextlib.suppress(FileNotFoundError):  # another process has moved it already
                path.replace(old / path.name)
        temporary.chmod(0o755)
        temporary.replace(path)
        fsync_path(path.parent)
    except OSError:
        if not _is_current(path, fingerprint):
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _make_temporary_folder(path: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".tmp", dir=path.parent))


def _remove_abandoned(path: Path) -> None:
    for folder in path.parent.glob(f".{path.name}-*.tmp"):
        with contextlib.suppress(OSError):  # its process may be finishing it right now
            written = max(one.stat().st_mtime for one in (folder, *folder.iterdir()))
            if time.time() - written > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
