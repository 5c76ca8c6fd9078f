"""Files of few bytes that would take a decoder minutes are refused before they are decoded."""

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


def saved(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((31, 29)).save(file, kind, **options)
    return file.getvalue()


def with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated until there are ``count``."""
    data = saved("JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * (count - data.count(b"\xff\xda")) + END


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(extra: bytes) -> bytes:
    data = saved("PNG")
    return data[:33] + extra + data[33:]  # behind the header


def segment_storm(segments: bytes) -> bytes:
    data = saved("JPEG")
    return data[:2] + segments + data[2:]


PROFILE = zlib.compress(bytes(1_000_000))
BOMBS = {
    "scans of a JPEG": with_scans(60_000),
    "scans behind fill bytes": with_scans(60_000).replace(b"\xff\xda", b"\xff\xff\xda"),
    "comments of a JPEG": segment_storm(b"\xff\xfe\0\2" * 500_000),
    "comments behind an early end": segment_storm(END + b"\xff\xfe\0\2" * 500_000),
    "fill bytes": segment_storm(b"\xff" * 1_000_000),
    "fill bytes and zeros": segment_storm(b"\xff" * 1_000_000 + b"\0"),
    "profiles of a PNG": png_with(chunk(b"iCCP", b"k\0\0" + PROFILE) * 2_000),
    "texts of a PNG": png_with(chunk(b"tEXt", b"k\0v") * 100_000),
    "data chunks of a PNG": png_with(chunk(b"IDAT", b"") * 100_000),
}


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in BOMBS.items()])
def test_a_bomb_is_refused_before_it_is_decoded(data: bytes) -> None:
    flaw = check_image(data, "bomb")
    assert flaw is not None
    assert flaw.reason == TOO_MANY_PARTS
    assert isinstance(decode_image(data, "bomb"), InvalidExample)


@pytest.mark.parametrize(
    "data",
    [
        saved("JPEG"),
        saved("JPEG", progressive=True, optimize=True, quality=95),
        saved("JPEG", progressive=True, restart_marker_blocks=1),
        saved("JPEG", comment=b"\xff\xda" * 1000),  # inside a segment it is no scan
        saved("JPEG") + with_scans(60_000),  # behind the end, as the film of a motion photo
        with_scans(MAX_SCANS),
        saved("PNG"),
        png_with(chunk(b"tEXt", b"k\0v") * (MAX_CHUNKS - 8)),
        saved("WEBP"),
        saved("JPEG")[:100],
        b"\xff\xd8",
        b"\x89PNG\r\n\x1a\n\xff\xff\xff\xff",
    ],
)
def test_what_decoders_write_passes(data: bytes) -> None:
    assert check_structure(data) is None


def test_the_number_of_scans_is_exact() -> None:
    assert decode_image(with_scans(MAX_SCANS), "most").shape == (29, 31, 3)  # type: ignore[union-attr]
    assert str(decode_image(with_scans(MAX_SCANS + 1), "more")).startswith(f"more: {TOO_MANY_PARTS} (over 100 scans")
