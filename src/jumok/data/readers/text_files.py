"""Text files, plain or gzipped, read line by line."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

from jumok.errors import InputError, MissingExtra

GZIP_MAGIC = b"\x1f\x8b"
UTF8_BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 1 << 24  # a longer line is not text, and must not fill the memory


def data_folder() -> Path:
    """The folder of data sets: the environment variable ``JUMOK_DATA``, by default ``data``."""
    return Path(os.environ.get("JUMOK_DATA") or "data")


def file_suffix(path: Path) -> str:
    """The suffix of a file in lower case, ignoring ``.gz``."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def import_optional(module: str, extra: str) -> ModuleType:
    """Import an optional package. If it is missing, the error gives the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtra(f'{package} is needed for this: pip install "jumok[{extra}]" ({error})') from None


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressing it if its content is gzipped."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    with file:
        start = file.peek(2)[:2]
        if start == GZIP_MAGIC:
            # readline() of a buffer around a GzipFile is far faster than that of the GzipFile.
            with io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)), 1 << 18) as unzipped:
                yield cast(BinaryIO, unzipped)
        elif path.suffix == ".gz":
            raise InputError(
                f"{path} has the suffix .gz but is not gzipped; was its download interrupted or decompressed?"
            )
        else:
            yield cast(BinaryIO, file)


def read_lines(path: Path) -> Iterator[str | None]:
    r"""The lines of a text file without ``\n`` or ``\r\n`` at the end; None for a line that is far too long.

    Only ``\n`` ends a line: U+0085, U+2028 and similar characters occur inside real sentences. Invalid UTF-8
    becomes lone surrogates; it matters only if the text is used.
    """
    number = 0
    try:
        with open_decompressed(path) as file:
            while raw := file.readline(MAX_LINE_BYTES):
                number += 1
                if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    while raw and not raw.endswith(b"\n"):
                        raw = file.readline(MAX_LINE_BYTES)
                    yield None
                    continue
                if number == 1:
                    raw = _strip_bom(path, raw)
                text = raw.decode("utf-8", "surrogateescape")
                yield text.removesuffix("\n").removesuffix("\r")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is damaged after line {number}: {error}; download it again") from None


def _strip_bom(path: Path, line: bytes) -> bytes:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path} > {path}.utf8")
    return line.removeprefix(UTF8_BOM)
