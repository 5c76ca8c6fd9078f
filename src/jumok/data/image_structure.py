"""Limits on the structure of an image file, checked before a decoder reads it.

The number of bytes and pixels does not bound the time that decoding takes. A progressive JPEG may hold any
number of scans, each of which passes over all pixels; a PNG may hold any number of compressed profiles, each
of which is inflated. The check only reads the lengths of the segments or chunks.
"""

from __future__ import annotations

import re

MAX_SCANS = 100  # a usual progressive JPEG has 6 to 20
MAX_SEGMENTS = 1000  # of a JPEG, besides scans; the bytes between them count as one each
MAX_CHUNKS = 256  # of a PNG, besides image data
MAX_DATA_CHUNKS = 1 << 16  # of image data in a PNG

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
DATA_CHUNKS = (b"IDAT", b"fdAT", b"fcTL")  # the last two: an animation
SOS = 0xDA
MARKERS_WITH_LENGTH = {*range(0xC0, 0xD0), *range(0xDA, 0xF0), 0xFE} - {0xC8}  # markers that begin a segment
# Not a stuffed or fill byte, nor TEM or RST, which begin nothing and may lie inside entropy-coded data.
MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")


def check_structure(data: bytes) -> str | None:
    """Return which limit the file exceeds, or None. The decoder reports damaged files."""
    if data.startswith(b"\xff\xd8"):
        return _check_jpeg(data)
    if data.startswith(PNG_SIGNATURE):
        return _check_png(data)
    return None


def _check_jpeg(data: bytes) -> str | None:
    """Walk the segments as Pillow and libjpeg do: up to a marker, junk and entropy-coded data are skipped.

    Before the first scan, Pillow takes a step in Python for each segment and each byte of junk.
    """
    scans = segments = position = 0
    between_segments = True
    while (match := MARKER.search(data, position)) is not None:
        marker = data[match.end() - 1]
        if between_segments:
            segments += match.end() - 1 - position
        position = match.end()
        if marker in MARKERS_WITH_LENGTH:
            length = int.from_bytes(data[position : position + 2], "big")
            scans += marker == SOS
            between_segments = marker != SOS
            position += max(length, 2)
        elif scans:  # EOI, or a marker that no decoder accepts here
            break
        if scans > MAX_SCANS:
            return f"over {MAX_SCANS} scans"
        if segments > MAX_SEGMENTS:
            return f"over {MAX_SEGMENTS} segments"
    return None


def _check_png(data: bytes) -> str | None:
    chunks = data_chunks = 0
    position = len(PNG_SIGNATURE)
    while position + 8 <= len(data):
        length, kind = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        position += 12 + length
        if kind in DATA_CHUNKS:
            data_chunks += 1
        else:
            chunks += 1
        if chunks > MAX_CHUNKS:
            return f"over {MAX_CHUNKS} chunks besides image data"
        if data_chunks > MAX_DATA_CHUNKS:
            return f"over {MAX_DATA_CHUNKS} chunks of image data"
        if kind == b"IEND":
            break
    return None
