"""Output to a file that can be interrupted and resumed.

::

    out.jsonl.part          the output so far; it is renamed to out.jsonl when it is complete
    out.jsonl.part.json     the number of inputs that are done, the size of their output, a digest of these
                            inputs, and the settings

Both files exist only until the output is complete. When resuming, everything after the recorded size is
removed and computed again, so the process may be killed at any moment, and the power may fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jumok.errors import InputError
from jumok.files import add_filename_to_errors, atomic_write, fsync_path, open_for_writing, read_json, remove_atomically
from jumok.inference.line_io import is_special_file, open_stream

FORMAT_VERSION = 2
PART_SUFFIX = ".part"
SAVE_INTERVAL_SECONDS = 1.0


class LineOutput:
    """Output of lines by a function. Nothing is resumed."""

    num_resumed = 0  # inputs that an earlier process has done
    num_done = 0  # inputs that are done in total
    num_bytes_read = 0  # size of these inputs

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line = write_line

    def write(self, line: str) -> None:
        """Write one line."""
        self._write_line(line)

    def iter_remaining(self, chunks: Iterable[list[str]]) -> Iterator[tuple[int, list[str]]]:
        """Yield the inputs that are not done, with the index of the first of them."""
        for lines in chunks:
            yield self.num_done, lines
            self.num_done += len(lines)


class ResumableOutput(LineOutput):
    """Output to a file that appears when it is complete. See the description of this module."""

    def __init__(self, path: Path, settings: Mapping[str, Any], part_file: BinaryIO, state_path: Path) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings, default=str))
        self._part_file, self._state_path = part_file, state_path
        self._digest = hashlib.sha256()
        self._last_save_time = time.monotonic()
        self._expected_digest = ""  # of the inputs that an earlier process has done
        self._num_output_bytes = 0  # size of the output of the inputs that are done
        if state_path.is_file():
            self._load_progress()
        part_file.truncate(self._num_output_bytes)
        part_file.seek(self._num_output_bytes)
        if not self.num_resumed:
            self.save_progress()

    def iter_remaining(self, chunks: Iterable[list[str]]) -> Iterator[tuple[int, list[str]]]:
        """Yield the inputs that are not done, with the index of the first of them."""
        for lines in chunks:
            num_skipped = min(len(lines), max(self.num_resumed - self.num_done, 0))
            if num_skipped:
                self._mark_done(lines[:num_skipped])
            if lines[num_skipped:]:
                yield self.num_done, lines[num_skipped:]
                self._mark_done(lines[num_skipped:])
                self._num_output_bytes = self._part_file.tell()
                if time.monotonic() - self._last_save_time >= SAVE_INTERVAL_SECONDS:
                    self.save_progress()
        if self.num_done < self.num_resumed:
            raise self._build_mismatch_error(
                f"the input now has {self.num_done:,} lines, but {self.num_resumed:,} are done"
            )

    def write(self, line: str) -> None:
        with add_filename_to_errors(self.path):
            self._part_file.write(f"{line}\n".encode())

    def save_progress(self) -> None:
        """Record the inputs that are done, so that the output can be resumed from here."""
        with add_filename_to_errors(self.path):
            self._part_file.flush()
            os.fsync(self._part_file.fileno())
        state = {
            "format": FORMAT_VERSION,
            "settings": self.settings,
            "num_inputs": self.num_done,
            "num_bytes": self._num_output_bytes,
            "digest": self._digest.hexdigest(),
        }
        with atomic_write(self._state_path) as temporary:
            temporary.write_text(json.dumps(state), encoding="utf-8")
        self._last_save_time = time.monotonic()

    def stop_early(self) -> None:
        """Keep the output of the complete chunks after an interruption."""
        if self.num_done > self.num_resumed:
            self._part_file.seek(self._num_output_bytes)
            self._part_file.truncate()
            self.save_progress()
            print(f"{self.num_done:,} lines are done; the same command resumes after them", file=sys.stderr)

    def _mark_done(self, lines: list[str]) -> None:
        for line in lines:
            encoded = f"{line}\n".encode("utf-8", "surrogatepass")
            self.num_bytes_read += len(encoded)
            self._digest.update(encoded)
        self.num_done += len(lines)
        if self.num_done == self.num_resumed and self._digest.hexdigest() != self._expected_digest:
            raise self._build_mismatch_error(f"the first {self.num_resumed:,} lines of the input have changed")

    def _load_progress(self) -> None:
        state = read_json(self._state_path, dict)
        size = self._part_file.seek(0, os.SEEK_END)
        if not size:  # nothing is done, or the output is complete
            return
        if state.get("format") != FORMAT_VERSION:
            raise self._build_mismatch_error("another version of jumok wrote it")
        if not state.get("num_inputs"):
            return
        if not {"settings", "num_bytes", "digest"} <= state.keys():
            raise InputError(f"{self._state_path} is damaged; use --overwrite to start again")
        if state["settings"] != self.settings:
            raise self._build_mismatch_error("; ".join(self._describe_changes(state["settings"])))
        if size < state["num_bytes"]:
            raise self._build_mismatch_error(f"it has {size:,} bytes instead of {state['num_bytes']:,}")
        self.num_resumed, self._num_output_bytes = state["num_inputs"], state["num_bytes"]
        self._expected_digest = state["digest"]

    def _describe_changes(self, saved: Mapping[str, Any]) -> Iterator[str]:
        for name in sorted({*saved, *self.settings}):
            before, now = saved.get(name), self.settings.get(name)
            if before != now and name == "run":
                yield "the run is another one, or was trained further"
            elif before != now:
                yield f"{name}: {before!r} before, {now!r} now"

    def _build_mismatch_error(self, reason: str) -> InputError:
        return InputError(
            f"{self.path}.part cannot be resumed ({reason}); restore the earlier input and settings to "
            "resume, use --overwrite to start again, or give another --out"
        )


@contextlib.contextmanager
def open_resumable_output(
    path: Path | None, settings: Mapping[str, Any], *, overwrite: bool = False
) -> Iterator[LineOutput]:
    """Open the output: standard output (None) or a file. A file is resumed only if ``settings`` are equal."""
    if path is None or is_special_file(path):
        with open_stream(path) as write_line:
            yield LineOutput(write_line)
        return
    path = path.resolve()
    part, state = (path.with_name(path.name + suffix) for suffix in (PART_SUFFIX, f"{PART_SUFFIX}.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if part.exists() and part.stat().st_size and not state.exists() and not overwrite:
        raise InputError(f"{part} exists and is not from `jumok run`; move it away, or give another --out")
    with open_for_writing(part, "r+b" if part.exists() else "w+b") as part_file:
        _lock_file(part_file, path)
        if overwrite:
            remove_atomically(state)
        output = ResumableOutput(path, settings, part_file, state)
        try:
            yield output
        except BaseException:
            output.stop_early()
            if not output.num_resumed and not output.num_done:  # there is nothing to resume
                part.unlink()
                remove_atomically(state)
            raise
        with add_filename_to_errors(path):
            part_file.flush()
            os.fsync(part_file.fileno())
            os.replace(part, path)
            fsync_path(path.parent)
    remove_atomically(state)


def _lock_file(file: BinaryIO, path: Path) -> None:
    """Keep other processes from writing the same output, if the file system has locks."""
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
