"""An output that goes on where it stopped, whatever stopped it.

::

    out.jsonl.part          what is written so far: it becomes out.jsonl when it is whole
    out.jsonl.part.json     how many inputs that are, how many bytes, a digest of these inputs, what was asked

Both are there only while there is something left to do. What lies in the part behind the bytes that were
noted is cut off and made again, so that a process may be killed at any moment, and the power may go.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from jumok.errors import InputError
from jumok.files import (
    add_filename_to_errors,
    atomic_write,
    fsync_path,
    open_for_writing,
    read_json,
    remove_atomically,
)

__all__ = ["ResumableOutput", "StreamOutput", "open_resumable_output"]

FORMAT_VERSION = 1
PART_SUFFIX = ".part"
SAVE_INTERVAL_SECONDS = 1.0  # seconds


class StreamOutput:
    """Standard output, a pipe: every line is out at once, and nothing is known of an earlier time."""

    num_resumed = 0  # inputs that were done before
    num_done = 0  # inputs that are done
    num_bytes_read = 0  # bytes of these

    def __init__(self, file: TextIO | None = None, name: Path | str = "standard output") -> None:
        self._file, self._name = file, name

    def iter_remaining(self, chunks: Iterable[list[str]]) -> Iterator[tuple[int, list[str]]]:
        """The inputs that are to be answered, with the number of the first of them."""
        for lines in chunks:
            yield self.num_done, lines
            self.num_done += len(lines)

    def write(self, line: str) -> None:
        with add_filename_to_errors(self._name):
            print(line, file=self._file, flush=True)


class ResumableOutput(StreamOutput):
    """A file that is there when it is whole, and until then in parts."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], part_file: BinaryIO, state_path: Path
    ) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings, default=str))
        self._part_file, self._state_path = part_file, state_path
        self._digest = hashlib.sha256()
        self._last_save_time = time.monotonic()
        self._expected_digest, self._num_output_bytes = (
            "",
            0,
        )  # a digest of what was done, and how many bytes the answers have
        if state_path.is_file():
            self._load_progress()
        part_file.truncate(self._num_output_bytes)
        part_file.seek(self._num_output_bytes)
        if not self.num_resumed:
            self.save_progress()

    def iter_remaining(self, chunks: Iterable[list[str]]) -> Iterator[tuple[int, list[str]]]:
        for lines in chunks:
            passed = (
                min(len(lines), self.num_resumed - self.num_done) if self.num_done < self.num_resumed else 0
            )
            if passed:
                self._mark_done(lines[:passed])
            if lines[passed:]:
                yield self.num_done, lines[passed:]
                self._mark_done(lines[passed:])
                self._num_output_bytes = self._part_file.tell()
                if time.monotonic() - self._last_save_time >= SAVE_INTERVAL_SECONDS:
                    self.save_progress()
        if self.num_done < self.num_resumed:
            raise self._build_mismatch_error(
                f"the input has {self.num_done:,} lines now; {self.num_resumed:,} were done"
            )

    def write(self, line: str) -> None:
        with add_filename_to_errors(self.path):
            self._part_file.write(f"{line}\n".encode())

    def save_progress(self) -> None:
        """From here it would go on."""
        with add_filename_to_errors(self.path):
            self._part_file.flush()
            os.fsync(self._part_file.fileno())
        known = {"inputs": self.num_done, "bytes": self._num_output_bytes, "digest": self._digest.hexdigest()}
        with atomic_write(self._state_path) as part:
            part.write_text(
                json.dumps({"format": FORMAT_VERSION, "asked": self.settings, **known}), encoding="utf-8"
            )
        self._last_save_time = time.monotonic()

    def stop_early(self) -> None:
        """Stop before the end: whole windows stay."""
        if self.num_done > self.num_resumed:
            self._part_file.seek(self._num_output_bytes)
            self._part_file.truncate()
            self.save_progress()
            print(f"{self.num_done:,} lines are done; the same command goes on after them", file=sys.stderr)

    def _mark_done(self, lines: list[str]) -> None:
        for line in lines:
            told = f"{line}\n".encode("utf-8", "surrogatepass")
            self.num_bytes_read += len(told)
            self._digest.update(told)
        self.num_done += len(lines)
        if self.num_done == self.num_resumed and self._digest.hexdigest() != self._expected_digest:
            raise self._build_mismatch_error(
                f"the first {self.num_resumed:,} lines of the input are others now"
            )

    def _load_progress(self) -> None:
        known = read_json(self._state_path, dict)
        size = self._part_file.seek(0, os.SEEK_END)
        if not size or not known.get("inputs"):  # what was noted became the whole file; or nothing is done
            return
        if known.get("format") != FORMAT_VERSION:
            raise self._build_mismatch_error("another version of jumok began it")
        if not {"asked", "bytes", "digest"} <= known.keys():
            raise InputError(f"{self._state_path} is damaged; --again begins anew")
        then = known["asked"]
        if then != self.settings:
            names = sorted(
                name for name in {*then, *self.settings} if then.get(name) != self.settings.get(name)
            )
            told = (
                f"{name}: {then.get(name)!r} then, {self.settings.get(name)!r} now"
                if name != "run"
                else "the run: it was trained further, or is another"
                for name in names
            )
            raise self._build_mismatch_error("; ".join(told))
        if size < known["bytes"]:
            raise self._build_mismatch_error(f"it has {size:,} bytes, and had {known['bytes']:,}")
        self.num_resumed, self._expected_digest, self._num_output_bytes = (
            known["inputs"],
            known["digest"],
            known["bytes"],
        )

    def _build_mismatch_error(self, reason: str) -> InputError:
        return InputError(
            f"{self.path}.part was begun with something else ({reason}); give that again to go on with it, "
            "--again to begin anew, or another --out"
        )


@contextlib.contextmanager
def open_resumable_output(
    path: Path | None, settings: Mapping[str, Any], *, overwrite: bool = False
) -> Iterator[StreamOutput]:
    """Where lines are written to; ``settings`` is what must be the same for an earlier part to count."""
    if path is None:
        yield StreamOutput()
        return
    if path.exists() and not path.is_file():  # /dev/null, a pipe: not to be replaced
        with open_for_writing(path, "w", encoding="utf-8", newline="\n") as file:
            yield StreamOutput(file, path)
        return
    path = path.resolve()
    part, state = (path.with_name(path.name + end) for end in (PART_SUFFIX, f"{PART_SUFFIX}.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if part.exists() and part.stat().st_size and not state.exists() and not overwrite:
        raise InputError(f"{part} is there, and not from `jumok run`: move it away, or give another --out")
    with open_for_writing(part, "r+b" if part.exists() else "w+b") as binary:
        _lock_file(binary, path)
        if overwrite:
            remove_atomically(state)
        output = ResumableOutput(path, settings, binary, state)
        try:
            yield output
        except BaseException:
            output.stop_early()
            if not output.num_resumed and not output.num_done:  # nothing to go on from
                part.unlink()
                remove_atomically(state)
            raise
        with add_filename_to_errors(path):
            binary.flush()
            os.fsync(binary.fileno())
            os.replace(part, path)
            fsync_path(path.parent)
    remove_atomically(state)


def _lock_file(file: BinaryIO, path: Path) -> None:
    """Keep other processes from the same output, where files can be locked."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another process is writing {path}; wait for it, or give another --out") from None
    except OSError:  # a file system without locks
        pass
