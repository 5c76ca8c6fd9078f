"""Input and output of lines: a text, a file or standard input, and a file or standard output."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from jumok.data.readers.text_files import MAX_LINE_BYTES, open_decompressed
from jumok.errors import InputError
from jumok.files import add_filename_to_errors, atomic_write, open_for_writing

LINES_PER_CHUNK = 1024  # lines that are predicted together, so that lines of similar length share a batch
T = TypeVar("T")
# A text that ends with one of these is probably a misspelled file name.
TEXT_SUFFIXES = (".txt", ".tsv", ".csv", ".jsonl", ".gz", ".en", ".de", ".fr", ".ko")


@contextlib.contextmanager
def read_chunks(text: str | None, *, skip_invalid: bool = False) -> Iterator[Iterator[list[str]]]:
    """Yield the lines of a file, of standard input (None), or of the text itself, in chunks.

    A line that is not UTF-8 is an error. With ``skip_invalid``, its invalid bytes become lone surrogates.

    A chunk of standard input has the lines that are available. So a user who types a line, or a process that
    waits for each result before it sends the next line, gets the result immediately.
    """
    path = None if text is None else Path(text)
    if path is None:
        if sys.stdin.isatty():
            print("reading lines from standard input; end with Ctrl-D", file=sys.stderr)
        yield _chunk_available_lines(
            decode_lines(_stream_lines(sys.stdin.buffer), "standard input", skip_invalid=skip_invalid)
        )
    elif is_file(path):
        with open_decompressed(path) as file:
            yield _chunk_lines(decode_lines(_iter_lines(file), str(path), skip_invalid=skip_invalid))
    elif _looks_like_file_name(path):
        raise InputError(f"there is no file {path}; to use this text as input: echo {path} | jumok run …")
    else:
        yield iter([str(text).split("\n")])


def predict_isolating_errors(
    predict: Callable[[list[str], int], Iterable[T]], lines: list[str], first_number: int, *, skip_invalid: bool = False
) -> Iterator[T | InputError]:
    """Yield the predictions for lines, numbered from ``first_number``, even if one of them is invalid.

    The lines before an invalid one are predicted, and then its error is raised. With ``skip_invalid``, the
    error is yielded in place of a prediction. The error of a line starts with its number or with the line
    itself (the name of an image).
    """
    num_done = 0
    try:
        for prediction in predict(lines, first_number):
            yield prediction
            num_done += 1
    except InputError as error:
        rest, number = lines[num_done:], first_number + num_done
        if len(rest) > 1:  # by halves, so that lines of similar length still share a batch
            half = len(rest) // 2
            yield from predict_isolating_errors(predict, rest[:half], number, skip_invalid=skip_invalid)
            yield from predict_isolating_errors(predict, rest[half:], number + half, skip_invalid=skip_invalid)
        elif skip_invalid and str(error).startswith((f"line {number + 1}", f"{rest[0]}: ")):
            yield error  # it concerns this line, not all lines
        else:
            raise


def iterate_chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Divide items into lists of ``size``; the last one may be shorter.

    >>> list(iterate_chunks("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def read_text(text: str) -> str:
    """Return the text itself, or the content of the file with that name."""
    if not is_file(Path(text)):
        if _looks_like_file_name(Path(text)):
            raise InputError(f"there is no file {text}; correct its name, or give a text or a text file")
        return text
    with open_decompressed(Path(text)) as file:
        return "\n".join(decode_lines(_iter_lines(file), text)).strip()


def _looks_like_file_name(path: Path) -> bool:
    """Whether a text is rather the name of a missing file."""
    return (
        bool(path.suffix)
        and not any(map(str.isspace, str(path)))
        and (len(path.parts) > 1 or path.suffix in TEXT_SUFFIXES)
    )


def _chunk_lines(lines: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of lines. The lines before an invalid one are yielded before its error is raised."""
    chunk: list[str] = []
    try:
        for line in lines:
            chunk.append(line)
            if len(chunk) == LINES_PER_CHUNK:
                yield chunk
                chunk = []
    except InputError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def _stream_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a stream as they arrive, without their newlines.

    This reads the unbuffered file, because a buffer cannot be closed while another thread waits for input.
    """
    source: BinaryIO = getattr(file, "raw", file)
    parts: list[bytes] = []  # of an incomplete line
    size = 0  # of the parts together
    while block := source.read(1 << 16):
        first, *rest = block.split(b"\n")
        parts.append(first)
        size += len(first)
        for line in rest:
            yield b"".join(parts)
            parts, size = [line], len(line)
        if size > MAX_LINE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if any(parts):
        yield b"".join(parts)


def _iter_lines(file: BinaryIO) -> Iterator[bytes]:
    """Iterate over the lines of a file. A line over MAX_LINE_BYTES is split, so that it does not fill the memory."""
    return iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")


def _chunk_available_lines(lines: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of the lines that are available, at least one. A thread reads ahead."""
    items: queue.Queue[str | BaseException | None] = queue.Queue(LINES_PER_CHUNK)  # None: the end

    def read() -> None:
        try:
            for line in lines:
                items.put(line)
            items.put(None)
        except BaseException as error:
            items.put(error)

    threading.Thread(target=read, daemon=True).start()
    item: str | BaseException | None = ""
    while isinstance(item, str):
        chunk: list[str] = []
        while len(chunk) < LINES_PER_CHUNK and (not chunk or not items.empty()):
            item = items.get()
            if not isinstance(item, str):
                break
            chunk.append(item)
        if chunk:
            yield chunk
    if item is not None:
        raise item


def is_file(path: Path) -> bool:
    """Whether there is a file with this name."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # the text is not a valid file name
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder with this name."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # the text is not a valid file name
        return False


def decode_lines(
    file: Iterable[bytes], name: str, first_number: int = 0, *, skip_invalid: bool = False
) -> Iterator[str]:
    """Decode lines and remove their line ends. Only a newline ends a line, not other Unicode separators."""
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
            f"{name}:{number}: this is not UTF-8 ({error.reason}); convert it; jumok run also has --on-error skip"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name} is damaged after line {number}: {error}; download it again") from None


@contextlib.contextmanager
def open_output(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a line to standard output (None) or to a file, atomically."""
    if path is None or is_special_file(path):
        with open_stream(path) as write_line:
            yield write_line
        return
    with atomic_write(path.resolve()) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        yield lambda line: print(line, file=file)


@contextlib.contextmanager
def open_stream(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a line to standard output (None) or to a special file, and flushes it."""

    def write_line(line: str) -> None:
        with add_filename_to_errors(path or "standard output"):
            print(line, file=file, flush=True)

    file = None
    if path is None:
        yield write_line
    else:
        with open_for_writing(path, "w", encoding="utf-8", newline="\n") as file:
            yield write_line


def is_special_file(path: Path) -> bool:
    """Whether this is /dev/null or a pipe, which must not be replaced."""
    return path.exists() and not path.is_file()
