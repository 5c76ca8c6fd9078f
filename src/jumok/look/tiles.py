"""What travels between Python and the viewer: small requests one way, packed numbers the other way.

A map of any size is shown like a street map. At zoom ``z`` a cell covers ``2**z`` rows and columns, and a
tile is ``TILE × TILE`` cells. Along an axis of n tokens tiles begin at 0, span, 2·span, …, but the last
one ends at n and may overlap the one before: all cells of a zoom cover equally many tokens, none is cut::

    n = 700, z = 1      [0 ......................... 512)
                                  [188 ....................... 700)

The packed form is 16 bytes (rows, columns and kind as uint32, the scale as float32, all little-endian) and
the cells, row after row. A weight is its cell times the scale. Kind 0 has cells of float16, scaled so that
the largest is 32,768 (a relative error of at most 5e-4 over eight decades); kind 1 has float32, as they are.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError

__all__ = ["TILE", "Numbers", "Request", "coarsest", "finest_within", "pack", "spans", "tiles", "unpack"]

TILE = 256  # cells along a side
MOST_CELLS = 1 << 21  # of one answer: 8 MiB in float32
HEADER = struct.Struct("<IIIf")
TOP = 32768.0  # where the largest cell of a float16 answer is put

Numbers: TypeAlias = NDArray[np.float32]
Span: TypeAlias = tuple[int, int]
What: TypeAlias = Literal["map", "weights", "received"]


@dataclass(frozen=True)
class Request:
    """A rectangle of one head of one layer, and in what form it is wanted.

    ``map`` gives pooled cells, at most ``size`` along each axis (a cell is the mean over its queries of the
    weight on all of its keys); ``weights`` every weight of the rectangle; ``received`` the mean over all
    queries of the weight on each of the columns. ``head`` None is the mean over the heads.
    """

    layer: int
    head: int | None
    rows: Span
    cols: Span
    size: int = TILE
    what: What = "map"
    scene: int = 0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Request:
        """From what a browser sent: numbers, or texts that are numbers.

        >>> Request.read({"layer": "0", "head": "2", "rows": "0,5", "cols": "0,7"}).rows
        (0, 5)
        """
        what = given.get("what", "map")
        if what not in get_args(What):
            raise InputError(f"what={_short(what)} came; expected one of {', '.join(get_args(What))}")
        head = given.get("head")
        return cls(
            layer=_whole(given, "layer"),
            head=None if head is None or head in ("", "mean") else _whole(given, "head"),
            rows=_span(given, "rows"),
            cols=_span(given, "cols"),
            size=_whole(given, "size", TILE),
            what=what,
            scene=_whole(given, "scene", 0),
        )

    @property
    def key(self) -> str:
        """The name of this answer in a saved file; the viewer makes the same."""
        head = "mean" if self.head is None else self.head
        (r0, r1), (c0, c1) = self.rows, self.cols
        return f"{self.what}/{self.scene}/{self.layer}/{head}/{r0}-{r1}/{c0}-{c1}/{self.size}"

    def check(self, shape: tuple[int, int]) -> None:
        """That the rectangle lies within a map of this shape, and that the answer is of a decent size."""
        for name, (first, last), end in (("rows", self.rows, shape[0]), ("cols", self.cols, shape[1])):
            if not 0 <= first < last <= end:
                raise InputError(
                    f"{name}={first},{last} came; expected two numbers first < last within 0,{end}"
                )
        if not 1 <= self.size <= 1024:
            raise InputError(f"size={self.size} came; expected 1 to 1024 cells a side")
        cells = (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])
        if self.what == "weights" and cells > MOST_CELLS:
            raise InputError(
                f"{cells:,} weights were asked for; one answer has at most {MOST_CELLS:,}: "
                "ask for a smaller rectangle, or for a map, which is pooled"
            )


def pack(cells: Numbers, *, exact: bool = False) -> bytes:
    """A two-dimensional array in the packed form, as float16 or exact as float32."""
    rows, cols = cells.shape
    if exact:
        return HEADER.pack(rows, cols, 1, 1.0) + cells.astype("<f4").tobytes()
    scale = float(cells.max(initial=0.0)) / TOP or 1.0
    return HEADER.pack(rows, cols, 0, scale) + (cells / np.float32(scale)).astype("<f2").tobytes()


def unpack(data: bytes) -> Numbers:
    """The way back.

    >>> unpack(pack(np.array([[0.25, 0.75]], np.float32)))
    array([[0.25, 0.75]], dtype=float32)
    """
    rows, cols, kind, scale = HEADER.unpack_from(data)
    cells = np.frombuffer(data, "<f4" if kind else "<f2", offset=HEADER.size).reshape(rows, cols)
    return cells.astype(np.float32) * np.float32(scale)


def coarsest(length: int) -> int:
    """The last zoom at which an axis still fills a tile; 0 where it never does."""
    return max(0, (length // TILE).bit_length() - 1)


def finest_within(length: int, cells: int) -> int:
    """The first zoom at which an axis has no more than so many cells (or the last one there is)."""
    zoom = 0
    while (length >> zoom) > cells and zoom < coarsest(length):
        zoom += 1
    return zoom


def spans(length: int, zoom: int) -> list[Span]:
    """The first token and the one after the last of each tile along an axis.

    >>> spans(700, 0), spans(700, 1)
    ([(0, 256), (256, 512), (512, 700)], [(0, 512), (188, 700)])
    """
    zoom = min(zoom, coarsest(length))
    span = min(TILE << zoom, length)
    firsts = range(0, length, span)
    if zoom == 0:  # a cell is a token: the last tile just has fewer
        return [(first, min(first + span, length)) for first in firsts]
    return [(min(first, length - span), min(first + span, length)) for first in firsts]


def tiles(shape: tuple[int, int], zoom: int) -> Iterator[tuple[Span, Span]]:
    """The rows and columns of every tile of a map at a zoom."""
    return itertools.product(spans(shape[0], zoom), spans(shape[1], zoom))


def _whole(given: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = given.get(name, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) < 16 and value.isascii() and value.lstrip("-").isdigit():
        return int(value)
    raise InputError(f"{name}={_short(value)} came; expected a whole number")


def _span(given: Mapping[str, Any], name: str) -> Span:
    value = given.get(name)
    ends = value.split(",") if isinstance(value, str) else value
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        raise InputError(f"{name}={_short(value)} came; expected two whole numbers, as in {name}=0,256")
    first, last = ({name: end} for end in ends)
    return _whole(first, name), _whole(last, name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
