"""Small image files that would take minutes to decode are rejected before they are decoded."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from jumok.data.image_structure import MAX_CHUNKS, MAX_SCANS, check_structure
from jumok.data.images import TOO_MANY_PARTS, check_image, decode_image
from jumok.data.readers.invalid_examples import InvalidExample

END = b"\xff\xd9"


def encode(format_name: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((31, 29)).save(file, format_name, **options)
    return file.getvalue()


def make_jpeg_with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated until there are ``count``."""
    data = encode("JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * (count - data.count(b"\xff\xda")) + END


def make_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def make_png_with(extra: bytes) -> bytes:
    data = encode("PNG")
    return data[:33] + extra + data[33:]  # after the header


def make_jpeg_with_segments(segments: bytes) -> bytes:
    data = encode("JPEG")
    return data[:2] + segments + data[2:]


PROFILE = zlib.compress(bytes(1_000_000))
BOMBS = {
    "scans of a JPEG": make_jpeg_with_scans(60_000),
    "scans after fill bytes": make_jpeg_with_scans(60_000).replace(b"\xff\xda", b"\xff\xff\xda"),
    "comments of a JPEG": make_jpeg_with_segments(b"\xff\xfe\0\2" * 500_000),
    "comments after an early end": make_jpeg_with_segments(END + b"\xff\xfe\0\2" * 500_000),
    "fill bytes": make_jpeg_with_segments(b"\xff" * 1_000_000),
    "fill bytes and zeros": make_jpeg_with_segments(b"\xff" * 1_000_000 + b"\0"),
    "profiles of a PNG": make_png_with(make_chunk(b"iCCP", b"k\0\0" + PROFILE) * 2_000),
    "texts of a PNG": make_png_with(make_chunk(b"tEXt", b"k\0v") * 100_000),
    "data chunks of a PNG": make_png_with(make_chunk(b"IDAT", b"") * 100_000),
}


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in BOMBS.items()])
def test_decompression_bombs_are_rejected(data: bytes) -> None:
    invalid = check_image(data, "bomb")
    assert invalid is not None
    assert invalid.reason == TOO_MANY_PARTS
    assert isinstance(decode_image(data, "bomb"), InvalidExample)


@pytest.mark.parametrize(
    "data",
    [
        encode("JPEG"),
        encode("JPEG", progressive=True, optimize=True, quality=95),
        encode("JPEG", progressive=True, restart_marker_blocks=1),
        encode("JPEG", comment=b"\xff\xda" * 1000),  # not a scan inside a segment
        encode("JPEG") + make_jpeg_with_scans(60_000),  # after the end, as the video of a motion photo
        make_jpeg_with_scans(MAX_SCANS),
        encode("PNG"),
        make_png_with(make_chunk(b"tEXt", b"k\0v") * (MAX_CHUNKS - 8)),
        encode("WEBP"),
        encode("JPEG")[:100],
        b"\xff\xd8",
        b"\x89PNG\r\n\x1a\n\xff\xff\xff\xff",
    ],
)
def test_usual_files_are_accepted(data: bytes) -> None:
    assert check_structure(data) is None


def test_limit_of_scans_is_exact() -> None:
    assert decode_image(make_jpeg_with_scans(MAX_SCANS), "most").shape == (29, 31, 3)  # type: ignore[union-attr]
    assert str(decode_image(make_jpeg_with_scans(MAX_SCANS + 1), "more")).startswith(
        f"more: {TOO_MANY_PARTS} (over 100 scans"
    )
