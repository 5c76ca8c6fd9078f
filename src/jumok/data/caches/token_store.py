"""Token ids of a parallel corpus on disk, written once and read through memory maps.

A corpus may be larger than memory: only a few thousand lines are held at a time. A store is a folder::

    store.json                               fingerprint, number of examples, and skipped examples
    source.ids.npy      target.ids.npy       all token ids, concatenated; 2 bytes each (4 for over 65,536 ids)
    source.offsets.npy  target.offsets.npy   example n has the ids from offsets[n] to offsets[n + 1]

It is written to a temporary folder, synced and renamed: a store is always complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples
from jumok.data.readers.parallel_corpus import ParallelCorpus, TranslationExample
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.errors import InputError
from jumok.files import atomic_write_folder

FORMAT_VERSION = 1
SIDES = ("source", "target")
EXAMPLES_PER_CHUNK = 4096  # examples that are tokenized together

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
        """The number of tokens of every example, without special tokens."""
        return np.diff(self.offsets).astype(np.int32)


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Token ids of many examples, read-only. ``store[n]`` returns views of the source and the target ids."""

    path: Path
    source: TokenColumn
    target: TokenColumn
    skipped: SkippedExamples  # when the store was written

    @classmethod
    def open(cls, path: Path) -> TokenStore:
        """Open an existing store."""
        metadata = read_metadata(path)
        if metadata is None:
            raise InputError(f"{path} is not a store of token ids that this version can read")
        source, target = (load_column(path, side, metadata["examples"]) for side in SIDES)
        return cls(path, source, target, SkippedExamples(Counter(metadata["skipped"]), metadata["first"]))

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
        return TokenStore.open, (self.path,)  # another process maps the files without copying


def prepare_token_store(
    path: Path,
    corpus: ParallelCorpus,
    tokenizers: TokenizerPair,
    *,
    max_tokens: int | None = None,
    replace: bool = True,
    progress: ReadProgress | None = None,
) -> TokenStore:
    """Open the store at ``path`` if it was made from this corpus; otherwise write a new one in its place.

    Args:
        path: Folder of the store.
        corpus: The corpus.
        tokenizers: The tokenizers of both sides.
        max_tokens: Skip and count examples with more tokens on either side.
        replace: If False, a store of other data is an error, because a run depends on it.
        progress: Called from time to time with the number of examples read.
    """
    identity = [
        FORMAT_VERSION,
        corpus.fingerprint,
        tokenizers.source.fingerprint,
        tokenizers.target.fingerprint,
        max_tokens,
    ]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    ensure_store(
        path,
        fingerprint,
        lambda folder: _write_examples(folder, corpus, tokenizers, max_tokens, progress),
        replace,
    )
    return TokenStore.open(path)


def ensure_store(path: Path, fingerprint: str, write: Callable[[Path], dict[str, Any]], replace: bool) -> None:
    """Make sure that ``path`` is a complete folder of arrays with this fingerprint.

    ``write`` writes the arrays to a folder, and returns further contents of ``store.json``.
    """
    if _is_current(path, fingerprint):
        return
    if path.exists() and not (path / "store.json").is_file():
        raise InputError(f"{path} exists and is not a store of token ids, so it is kept; choose another folder")
    if path.exists() and not replace:
        raise InputError(
            f"the data has changed since {path} was made from it, and a run was trained on that; restore "
            "the data, or start a new run in another folder"
        )
    with atomic_write_folder(path, lambda: _is_current(path, fingerprint)) as folder:
        metadata = {"format": FORMAT_VERSION, "fingerprint": fingerprint, **write(folder)}
        (folder / "store.json").write_text(json.dumps(metadata, ensure_ascii=False, indent=1), encoding="utf-8")


def _write_examples(
    folder: Path,
    corpus: ParallelCorpus,
    tokenizers: TokenizerPair,
    max_tokens: int | None,
    progress: ReadProgress | None,
) -> dict[str, Any]:
    """Write the arrays. Returns the number of examples and the skipped examples."""
    skipped = SkippedExamples()
    num_read = num_examples = 0
    limit = float("inf") if max_tokens is None else max_tokens
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(open_sequence_writer(folder, side, getattr(tokenizers, side).vocab_size))
            for side in SIDES
        ]
        for chunk in _iter_chunks(corpus.read(skipped)):
            sources = tokenizers.source.encode([example.source for example in chunk])
            targets = tokenizers.target.encode([example.target for example in chunk])
            for example, source, target in zip(chunk, sources, targets, strict=True):
                if len(source) > limit or len(target) > limit:
                    side = "source" if len(source) > limit else "target"
                    skipped.add(InvalidExample(example.location, f"a {side} of more than {max_tokens} tokens"))
            is_kept = [max(len(source), len(target)) <= limit for source, target in zip(sources, targets, strict=True)]
            for write, encoded in zip(writers, (sources, targets), strict=True):
                write(list(itertools.compress(encoded, is_kept)))
            num_examples += sum(is_kept)
            num_read += len(chunk)
            if progress is not None:
                progress(num_read)
    if not num_examples:
        raise InputError(f"none of {num_read} examples is left; {skipped}")
    return {"examples": num_examples, "skipped": skipped.counts, "first": skipped.first_locations}


def _iter_chunks(examples: Iterator[TranslationExample]) -> Iterator[list[TranslationExample]]:
    while chunk := list(itertools.islice(examples, EXAMPLES_PER_CHUNK)):
        yield chunk


@contextlib.contextmanager
def open_sequence_writer(folder: Path, name: str, vocab_size: int) -> Iterator[Callable[[list[list[int]]], None]]:
    """Yield a function that appends sequences to the arrays of one side."""
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
    """Yield a function that appends numbers to a ``.npy`` file.

    The header with their count is written last.
    """
    count = 0

    def header() -> None:
        # NumPy reserves space in the header for a larger count.
        description = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (count,),
        }
        np.lib.format.write_array_header_1_0(file, description)

    def add(numbers: TokenArray) -> None:
        nonlocal count
        file.write(numbers.astype(dtype, copy=False).tobytes())
        count += len(numbers)

    with path.open("wb") as file:
        header()
        data_start = file.tell()
        yield add
        file.seek(0)
        header()
        if file.tell() != data_start:
            raise RuntimeError(f"{path}: the header of NumPy has grown and overlaps the numbers")


def load_column(path: Path, name: str, num_sequences: int) -> TokenColumn:
    """Load the arrays that :func:`open_sequence_writer` wrote, and check them."""
    try:
        # Use plain arrays over the maps, because slicing a memmap object is far slower.
        ids, offsets = (
            np.asarray(np.load(path / f"{name}.{array_name}.npy", mmap_mode="r")) for array_name in ("ids", "offsets")
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}; remove this folder to create it again") from None
    if len(offsets) != num_sequences + 1 or offsets[-1] != len(ids):
        raise InputError(f"{path} is damaged: its files do not fit together; remove this folder")
    return TokenColumn(ids, offsets)


def read_metadata(path: Path) -> dict[str, Any] | None:
    """The contents of ``store.json``; None if there is no store, or one of another format."""
    try:
        metadata: dict[str, Any] = json.loads((path / "store.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return metadata if metadata.get("format") == FORMAT_VERSION else None


def _is_current(path: Path, fingerprint: str) -> bool:
    metadata = read_metadata(path)
    return metadata is not None and metadata["fingerprint"] == fingerprint
