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

from jumok.data.readers.text_files import MAX_LINE_BYTES, open_decompressed
from jumok.errors import InputError
from jumok.files import add_filename_to_errors, atomic_write, open_for_writing

__all__ = ["decode_lines", "is_file", "open_output", "predict_isolating_errors", "read_chunks", "read_text"]

LINES_PER_CHUNK = 1024  # lines that are translated together, so that those of like length share a batch
T = TypeVar("T")
TEXT_SUFFIXES = (".txt", ".tsv", ".csv", ".jsonl", ".gz", ".en", ".de", ".fr", ".ko")  # what a typo may be of


@contextlib.contextmanager
def read_chunks(text: str | None, *, skip_invalid: bool = False) -> Iterator[Iterator[list[str]]]:
    """The lines of a file, of standard input, or the one text itself, so many at a time.

    A line that is not UTF-8 is an error. With ``skip_invalid``, its invalid bytes become lone surrogates.

    From standard input come those that are there: whoever types a line, or waits for its translation before
    sending the next, gets it at once.
    """
    path = None if text is None else Path(text)
    if path is None:
        if sys.stdin.isatty():
            print("reading from standard input, a line each; end with Ctrl-D", file=sys.stderr)
        yield _chunk_available_lines(
            decode_lines(_stream_lines(sys.stdin.buffer), "standard input", skip_invalid=skip_invalid)
        )
    elif is_file(path):
        with open_decompressed(path) as file:
            yield _chunk_lines(decode_lines(_read_bounded_lines(file), str(path), skip_invalid=skip_invalid))
    elif path.suffix and " " not in str(path) and (len(path.parts) > 1 or path.suffix in TEXT_SUFFIXES):
        raise InputError(
            f"there is no file {path}; to have these very letters read: echo {path} | jumok run …"
        )
    else:
        yield iter([str(text).split("\n")])


def predict_isolating_errors(
    predict: Callable[[list[str], int], Iterable[T]],
    lines: list[str],
    first_number: int,
    *,
    skip_invalid: bool = False,
) -> Iterator[T | InputError]:
    """What is said of lines that are read together, numbered from ``first_number``.

    One of them that cannot be read takes the others not along: what comes before it is answered, and then the
    error raised; or, to ``skip_invalid``, it stands in the place of an answer. The error of a line begins with its
    number, or with the line itself (the name of a picture).
    """
    done = 0
    try:
        for one in predict(lines, first_number):
            yield one
            done += 1
    except InputError as error:
        left, begin = lines[done:], first_number + done
        if len(left) > 1:  # those of like length share a batch still
            half = len(left) // 2
            yield from predict_isolating_errors(predict, left[:half], begin, skip_invalid=skip_invalid)
            yield from predict_isolating_errors(predict, left[half:], begin + half, skip_invalid=skip_invalid)
        elif skip_invalid and str(error).startswith((f"line {begin + 1}", f"{left[0]}: ")):
            yield error  # and not what is wrong with all of them
        else:
            raise


def read_text(text: str) -> str:
    """The text itself, or if there is a file of this name, all that it holds."""
    if not is_file(Path(text)):
        return text
    with open_decompressed(Path(text)) as file:
        return "\n".join(decode_lines(_read_bounded_lines(file), text)).strip()


def _chunk_lines(lines: Iterator[str]) -> Iterator[list[str]]:
    """Lists of lines. Those before one that cannot be read are not lost for it."""
    some: list[str] = []
    try:
        for line in lines:
            some.append(line)
            if len(some) == LINES_PER_CHUNK:
                yield some
                some = []
    except InputError:
        if some:
            yield some
        raise
    if some:
        yield some


def _stream_lines(file: BinaryIO) -> Iterator[bytes]:
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
        if size > MAX_LINE_BYTES:
            yield b"".join(begun)
            begun, size = [], 0
    if any(begun):
        yield b"".join(begun)


def _read_bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. A line over LONGEST_LINE comes in parts, so that it does not fill the memory."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line


def _chunk_available_lines(lines: Iterator[str]) -> Iterator[list[str]]:
    """Lists of the lines that are there, one at least; a thread reads ahead."""
    ready: queue.Queue[str | BaseException | None] = queue.Queue(LINES_PER_CHUNK)

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
        while len(some) < LINES_PER_CHUNK and (not some or not ready.empty()):
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


def decode_lines(
    file: Iterable[bytes], name: str, first_number: int = 0, *, skip_invalid: bool = False
) -> Iterator[str]:
    """Lines without their ends. Only a newline ends one: what else looks like an end belongs to the text."""
    number = first_number
    try:
        for number, line in enumerate(file, first_number + 1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(f"{name}:{number}: this line has over {MAX_LINE_BYTES:,} bytes; is it text?")
            encoding = "utf-8-sig" if number == 1 else "utf-8"
            errors = "surrogateescape" if skip_invalid else "strict"
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode(encoding, errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}:{number}: this is not UTF-8 ({error.reason}); convert it, or --on-error skip"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name} is damaged behind line {number}: {error}; fetch it again") from None


@contextlib.contextmanager
def open_output(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes a line, to a file that is renamed when whole, or to standard output."""
    if path is None:
        yield lambda line: _print_line(line, None, "standard output")
        return
    if path.exists() and not path.is_file():  # /dev/null, a pipe: not to be replaced
        with open_for_writing(path, "w", encoding="utf-8", newline="\n") as file:
            yield lambda line: _print_line(line, file, path)
        return
    with (
        atomic_write(path.resolve()) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as file,
    ):
        yield lambda line: print(line, file=file)


def _print_line(line: str, file: TextIO | None, name: Path | str) -> None:
    with add_filename_to_errors(name):
        print(line, file=file, flush=True)
