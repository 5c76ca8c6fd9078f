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
from jumok.files import add_filename_to_errors, open_for_writing, read_json, remove, sync, written

__all__ = ["Output", "Resumed", "opened"]

FORMAT = 1
PART = ".part"
NOTED_EVERY = 1.0  # seconds


class Output:
    """Standard output, a pipe: every line is out at once, and nothing is known of an earlier time."""

    begun = 0  # inputs that were done before
    done = 0  # inputs that are done
    read = 0  # bytes of these

    def __init__(self, file: TextIO | None = None, name: Path | str = "standard output") -> None:
        self._file, self._name = file, name

    def left(self, windows: Iterable[list[str]]) -> Iterator[tuple[int, list[str]]]:
        """The inputs that are to be answered, with the number of the first of them."""
        for lines in windows:
            yield self.done, lines
            self.done += len(lines)

    def write(self, line: str) -> None:
        with add_filename_to_errors(self._name):
            print(line, file=self._file, flush=True)


class Resumed(Output):
    """A file that is there when it is whole, and until then in parts."""

    def __init__(self, path: Path, asked: Mapping[str, Any], file: BinaryIO, state: Path) -> None:
        self.path, self.asked = path, json.loads(json.dumps(asked, default=str))
        self._part, self._state = file, state
        self._digest = hashlib.sha256()
        self._noted = time.monotonic()
        self._expected, self._end = "", 0  # a digest of what was done, and how many bytes the answers have
        if state.is_file():
            self._go_on()
        file.truncate(self._end)
        file.seek(self._end)
        if not self.begun:
            self.note()

    def left(self, windows: Iterable[list[str]]) -> Iterator[tuple[int, list[str]]]:
        for lines in windows:
            passed = min(len(lines), self.begun - self.done) if self.done < self.begun else 0
            if passed:
                self._pass(lines[:passed])
            if lines[passed:]:
                yield self.done, lines[passed:]
                self._pass(lines[passed:])
                self._end = self._part.tell()
                if time.monotonic() - self._noted >= NOTED_EVERY:
                    self.note()
        if self.done < self.begun:
            raise self._changed(f"the input has {self.done:,} lines now; {self.begun:,} were done")

    def write(self, line: str) -> None:
        with add_filename_to_errors(self.path):
            self._part.write(f"{line}\n".encode())

    def note(self) -> None:
        """From here it would go on."""
        with add_filename_to_errors(self.path):
            self._part.flush()
            os.fsync(self._part.fileno())
        known = {"inputs": self.done, "bytes": self._end, "digest": self._digest.hexdigest()}
        with written(self._state) as part:
            part.write_text(json.dumps({"format": FORMAT, "asked": self.asked, **known}), encoding="utf-8")
        self._noted = time.monotonic()

    def leave(self) -> None:
        """Stop before the end: whole windows stay."""
        if self.done > self.begun:
            self._part.seek(self._end)
            self._part.truncate()
            self.note()
            print(f"{self.done:,} lines are done; the same command goes on after them", file=sys.stderr)

    def _pass(self, lines: list[str]) -> None:
        for line in lines:
            told = f"{line}\n".encode("utf-8", "surrogatepass")
            self.read += len(told)
            self._digest.update(told)
        self.done += len(lines)
        if self.done == self.begun and self._digest.hexdigest() != self._expected:
            raise self._changed(f"the first {self.begun:,} lines of the input are others now")

    def _go_on(self) -> None:
        known = read_json(self._state, dict)
        size = self._part.seek(0, os.SEEK_END)
        if not size or not known.get("inputs"):  # what was noted became the whole file; or nothing is done
            return
        if known.get("format") != FORMAT:
            raise self._changed("another version of jumok began it")
        if not {"asked", "bytes", "digest"} <= known.keys():
            raise InputError(f"{self._state} is damaged; --again begins anew")
        then = known["asked"]
        if then != self.asked:
            names = sorted(name for name in {*then, *self.asked} if then.get(name) != self.asked.get(name))
            told = (
                f"{name}: {then.get(name)!r} then, {self.asked.get(name)!r} now"
                if name != "run"
                else "the run: it was trained further, or is another"
                for name in names
            )
            raise self._changed("; ".join(told))
        if size < known["bytes"]:
            raise self._changed(f"it has {size:,} bytes, and had {known['bytes']:,}")
        self.begun, self._expected, self._end = known["inputs"], known["digest"], known["bytes"]

    def _changed(self, told: str) -> InputError:
        return InputError(
            f"{self.path}.part was begun with something else ({told}); give that again to go on with it, "
            "--again to begin anew, or another --out"
        )


@contextlib.contextmanager
def opened(path: Path | None, asked: Mapping[str, Any], *, again: bool = False) -> Iterator[Output]:
    """Where lines are written to; ``asked`` is what must be the same for an earlier part to count."""
    if path is None:
        yield Output()
        return
    if path.exists() and not path.is_file():  # /dev/null, a pipe: not to be replaced
        with open_for_writing(path, "w", encoding="utf-8", newline="\n") as file:
            yield Output(file, path)
        return
    path = path.resolve()
    part, state = (path.with_name(path.name + end) for end in (PART, f"{PART}.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if part.exists() and part.stat().st_size and not state.exists() and not again:
        raise InputError(f"{part} is there, and not from `jumok run`: move it away, or give another --out")
    with open_for_writing(part, "r+b" if part.exists() else "w+b") as binary:
        _lock(binary, path)
        if again:
            remove(state)
        output = Resumed(path, asked, binary, state)
        try:
            yield output
        except BaseException:
            output.leave()
            if not output.begun and not output.done:  # nothing to go on from
                part.unlink()
                remove(state)
            raise
        with add_filename_to_errors(path):
            binary.flush()
            os.fsync(binary.fileno())
            os.replace(part, path)
            sync(path.parent)
    remove(state)


def _lock(file: BinaryIO, path: Path) -> None:
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
