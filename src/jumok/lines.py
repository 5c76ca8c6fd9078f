"""Lines in and lines out: how commands read from a text, a file or standard input, and write."""

from __future__ import annotations

import contextlib
import gzip
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO, TypeVar

from jumok.data.files import LONGEST_LINE, opened
from jumok.errors import InputError
from jumok.files import add_filename_to_errors, open_for_writing, written

__all__ = ["answered", "decoded", "is_file", "output", "whole", "windows"]

AT_ONCE = 1024  # lines that are translated together, so that those of like length share a batch
T = TypeVar("T")
TEXT_FILES = (".txt", ".tsv", ".csv", ".jsonl", ".gz", ".en", ".de", ".fr", ".ko")  # what a typo may be of


@contextlib.contextmanager
def windows(text: str | None, *, skip: bool = False) -> Iterator[Iterator[list[str]]]:
    """The lines of a file, of standard input, or the one text itself, so many at a time.

    A line that is not UTF-8 is an error. With ``skip``, its invalid bytes become lone surrogates.

    From standard input come those that are there: whoever types a line, or waits for its translation before
    sending the next, gets it at once.
    """
    path = None if text is None else Path(text)
    if path is None:
        if sys.stdin.isatty():
            print("reading from standard input, a line each; end with Ctrl-D", file=sys.stderr)
        yield _as_they_come(decoded(_lines_of(sys.stdin.buffer), "standard input", skip=skip))
    elif is_file(path):
        with opened(path) as file:
            yield _some_at_a_time(decoded(_bounded(file), str(path), skip=skip))
    elif path.suffix and " " not in str(path) and (len(path.parts) > 1 or path.suffix in TEXT_FILES):
        raise InputError(
            f"there is no file {path}; to have these very letters read: echo {path} | jumok run …"
        )
    else:
        yield iter([str(text).split("\n")])


def answered(
    predict: Callable[[list[str], int], Iterable[T]], lines: list[str], first: int, *, skip: bool = False
) -> Iterator[T | InputError]:
    """What is said of lines that are read together, numbered from ``first``.

    One of them that cannot be read takes the others not along: what comes before it is answered, and then the
    error raised; or, to ``skip``, it stands in the place of an answer. The error of a line begins with its
    number, or with the line itself (the name of a picture).
    """
    done = 0
    try:
        for one in predict(lines, first):
            yield one
            done += 1
    except InputError as error:
        left, begin = lines[done:], first + done
        if len(left) > 1:  # those of like length share a batch still
            half = len(left) // 2
            yield from answered(predict, left[:half], begin, skip=skip)
            yield from answered(predict, left[half:], begin + half, skip=skip)
        elif skip and str(error).startswith((f"line {begin + 1}", f"{left[0]}: ")):
            yield error  # and not what is wrong with all of them
        else:
            raise


def whole(text: str) -> str:
    """The text itself, or if there is a file of this name, all that it holds."""
    if not is_file(Path(text)):
        return text
    with opened(Path(text)) as file:
        return "\n".join(decoded(_bounded(file), text)).strip()


def _some_at_a_time(lines: Iterator[str]) -> Iterator[list[str]]:
    """Lists of lines. Those before one that cannot be read are not lost for it."""
    some: list[str] = []
    try:
        for line in lines:
            some.append(line)
            if len(some) == AT_ONCE:
                yield some
                some = []
    except InputError:
        if some:
            yield some
        raise
    if some:
        yield some


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file that is read as it grows, without their newlines.

    Past its buffer: whoever is interrupted while a thread waits for more could not close that.
    """
    source: BinaryIO = getattr(file, "raw", file)
    begun: list[bytes] = []
    size = 0  # of these
    while chunk := source.read(1 << 16):
        first, *others = chunk.split(b"\n")
        begun.append(first)
        size += len(first)
        for line in others:
            yield b"".join(begun)
            begun, size = [line], len(line)
        if size > LONGEST_LINE:
            yield b"".join(begun)
            begun, size = [], 0
    if any(begun):
        yield b"".join(begun)


def _bounded(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. A line over LONGEST_LINE comes in parts, so that it does not fill the memory."""
    while line := file.readline(LONGEST_LINE + 1):
        yield line


def _as_they_come(lines: Iterator[str]) -> Iterator[list[str]]:
    """Lists of the lines that are there, one at least; a thread reads ahead."""
    ready: queue.Queue[str | BaseException | None] = queue.Queue(AT_ONCE)

    def read() -> None:
        try:
            for line in lines:
                ready.put(line)
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    threading.Thread(target=read, daemon=True).start()
    got: str | BaseException | None = ""
    while isinstance(got, str):
        some: list[str] = []
        while len(some) < AT_ONCE and (not some or not ready.empty()):
            got = ready.get()
            if not isinstance(got, str):
                break
            some.append(got)
        if some:
            yield some
    if got is not None:
        raise got


def is_file(path: Path) -> bool:
    """Whether there is a file of this name."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a text that could not be a name
        return False


def decoded(file: Iterable[bytes], name: str, first: int = 0, *, skip: bool = False) -> Iterator[str]:
    """Lines without their ends. Only a newline ends one: what else looks like an end belongs to the text."""
    number = first
    try:
        for number, line in enumerate(file, first + 1):
            if len(line) > LONGEST_LINE:
                raise InputError(f"{name}:{number}: this line has over {LONGEST_LINE:,} bytes; is it text?")
            encoding = "utf-8-sig" if number == 1 else "utf-8"
            errors = "surrogateescape" if skip else "strict"
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode(encoding, errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}:{number}: this is not UTF-8 ({error.reason}); convert it, or --on-error skip"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name} is damaged behind line {number}: {error}; fetch it again") from None


@contextlib.contextmanager
def output(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes a line, to a file that is renamed when whole, or to standard output."""
    if path is None:
        yield lambda line: _print(line, None, "standard output")
        return
    if path.exists() and not path.is_file():  # /dev/null, a pipe: not to be replaced
        with open_for_writing(path, "w", encoding="utf-8", newline="\n") as file:
            yield lambda line: _print(line, file, path)
        return
    with written(path.resolve()) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        yield lambda line: print(line, file=file)


def _print(line: str, file: TextIO | None, name: Path | str) -> None:
    with add_filename_to_errors(name):
        print(line, file=file, flush=True)
