"""Messages between Python and the viewer: small requests one way, packed tiles the other way.

A map of any size is shown like a street map. At zoom ``z`` a cell covers ``2**z`` rows and columns, and a
tile has ``TILE_SIZE × TILE_SIZE`` cells. Along an axis of n tokens tiles begin at 0, span, 2·span, …, but the
last one ends at n and may overlap the one before: all cells of a zoom cover the same number of tokens::

    n = 700, z = 1      [0 ......................... 512)
                                  [188 ....................... 700)

The packed format is a header of 16 bytes (rows, columns and kind as uint32, the scale as float32, all
little-endian) and the cells, row by row. A weight is its cell times the scale. Kind 0 has float16 cells,
scaled so that the largest is 32,768 (a relative error of at most 5e-4 over eight decades); kind 1 has
unscaled float32 cells.

Kind 2 is for saved files: square roots of weights, rounded to multiples of the scale. Its header is followed
by a float32, the mean of the weights whose root is rounded to 0, and by one byte per cell: 0 for a weight of
exactly 0, otherwise 1 plus the multiple. If a multiple needs two bytes, all low bytes come first, then all
high bytes.
"""

from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.errors import InputError

TILE_SIZE = 256  # cells along a side
MAX_CELLS = 1 << 21  # of one response: 8 MiB in float32
HEADER = struct.Struct("<IIIf")
FLOAT16_PEAK = 32768.0  # the largest cell of a float16 response
MAX_ROOT_CODE = 65_000  # the largest multiple of a root
FLOAT32_TINY = float(np.finfo(np.float32).tiny)

FloatArray: TypeAlias = NDArray[np.float32]
WeightArray: TypeAlias = Tensor | NDArray[Any]
TokenSpan: TypeAlias = tuple[int, int]
Quantity: TypeAlias = Literal["pooled_map", "weights", "received_weight"]


@dataclass(frozen=True)
class TileRequest:
    """A rectangle of one head of one layer, and the quantity to compute.

    ``pooled_map`` requests pooled cells, at most ``size`` along each axis (a cell is the mean over its
    queries of the weight on all of its keys); ``weights`` every weight of the rectangle; ``received_weight``
    the mean over all queries of the weight on each of the columns. ``head`` None is the mean over the heads.
    ``without_sinks``: of the weights without attention sinks (see :mod:`.sink_filter`).
    """

    layer: int
    head: int | None
    rows: TokenSpan
    cols: TokenSpan
    size: int = TILE_SIZE
    quantity: Quantity = "pooled_map"
    data_index: int = 0
    without_sinks: bool = False

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TileRequest:
        """Parse the fields that a browser sent: numbers, or numbers as text.

        >>> TileRequest.from_mapping({"layer": "0", "head": "2", "rows": "0,5", "cols": "0,7"}).rows
        (0, 5)
        """
        quantity = values.get("quantity", "pooled_map")
        if quantity not in get_args(Quantity):
            raise InputError(
                f"quantity={_shorten_repr(quantity)} is invalid; expected one of {', '.join(get_args(Quantity))}"
            )
        head = values.get("head")
        return cls(
            layer=_parse_int(values, "layer"),
            head=None if head is None or head in ("", "mean") else _parse_int(values, "head"),
            rows=_parse_span(values, "rows"),
            cols=_parse_span(values, "cols"),
            size=_parse_int(values, "size", TILE_SIZE),
            quantity=quantity,
            data_index=_parse_int(values, "data", 0),
            without_sinks=bool(_parse_int(values, "without_sinks", 0)),
        )

    @property
    def key(self) -> str:
        """The name of this response in a saved file; the viewer builds the same."""
        head = "mean" if self.head is None else self.head
        (r0, r1), (c0, c1) = self.rows, self.cols
        end = "/without_sinks" if self.without_sinks else ""
        return f"{self.quantity}/{self.data_index}/{self.layer}/{head}/{r0}-{r1}/{c0}-{c1}/{self.size}{end}"

    def check(self, shape: tuple[int, int]) -> None:
        """Check that the rectangle lies within a map of this shape and that the response is not too large."""
        for name, (first, last), end in (("rows", self.rows, shape[0]), ("cols", self.cols, shape[1])):
            if not 0 <= first < last <= end:
                raise InputError(f"{name}={first},{last} is invalid; expected two numbers first < last within 0,{end}")
        if not 1 <= self.size <= 1024:
            raise InputError(f"size={self.size} is invalid; expected 1 to 1024 cells a side")
        num_cells = (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])
        if self.quantity == "weights" and num_cells > MAX_CELLS:
            raise InputError(
                f"{num_cells:,} weights were requested; one response has at most {MAX_CELLS:,}: "
                "request a smaller rectangle, or a pooled map"
            )


def to_float32_array(weights: Any) -> FloatArray:
    """Return an array, a tensor or nested lists as float32 on the host."""
    if isinstance(weights, Tensor):
        return weights.detach().to("cpu", torch.float32).numpy()
    try:
        return np.asarray(weights, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"the weights are not an array of numbers ({error})") from error


def pack(cells: FloatArray, *, exact: bool = False) -> bytes:
    """Pack a two-dimensional array as float16 or, if ``exact``, as float32."""
    rows, cols = cells.shape
    if exact:
        return HEADER.pack(rows, cols, 1, 1.0) + cells.astype("<f4").tobytes()
    scale = float(cells.max(initial=0.0)) / FLOAT16_PEAK or 1.0
    return HEADER.pack(rows, cols, 0, scale) + (cells / np.float32(scale)).astype("<f2").tobytes()


def pack_roots(cells: FloatArray, step: float) -> bytes:
    """Pack a two-dimensional array with square roots rounded to multiples of ``step``.

    ``|sqrt(packed) - sqrt(cell)|`` is at most ``step / 2``, or ``step`` for roots below ``step / 2``. Zeros stay
    zeros. Negative weights, which only rounding errors produce, become zeros.
    """
    rows, cols = cells.shape
    step = max(step, float(np.sqrt(cells.max(initial=0.0))) / MAX_ROOT_CODE, FLOAT32_TINY)
    multiples = np.rint(np.sqrt(np.maximum(cells, 0)) * np.float32(1 / step)).astype("<u2")
    codes = np.where(cells > 0, multiples + np.uint16(1), np.uint16(0))
    is_small = codes == 1
    small = float(cells[is_small].mean(dtype=np.float64)) if is_small.any() else 0.0
    header = HEADER.pack(rows, cols, 2, step) + struct.pack("<f", small)
    low = codes.astype(np.uint8).tobytes()
    return header + low + ((codes >> 8).astype(np.uint8).tobytes() if codes.max(initial=0) > 255 else b"")


def pack_base64(cells: FloatArray) -> str:
    """Pack a two-dimensional array exactly, as base64."""
    return base64.b64encode(pack(cells, exact=True)).decode()


def unpack(data: bytes) -> FloatArray:
    """Unpack an array.

    >>> unpack(pack(np.array([[0.25, 0.75]], np.float32), exact=True))
    array([[0.25, 0.75]], dtype=float32)
    """
    rows, cols, kind, scale = HEADER.unpack_from(data)
    if kind == 2:
        (small,) = struct.unpack_from("<f", data, HEADER.size)
        planes = np.frombuffer(data, np.uint8, offset=HEADER.size + 4).reshape(-1, rows, cols).astype(np.float32)
        codes = planes[0] + (256 * planes[1] if len(planes) == 2 else np.float32(0))
        roots = np.maximum(codes - 1, 0) * np.float32(scale)
        return np.where(codes == 1, np.float32(small), roots * roots)
    cells = np.frombuffer(data, "<f4" if kind else "<f2", offset=HEADER.size).reshape(rows, cols)
    return cells.astype(np.float32) * np.float32(scale)


def find_coarsest_zoom(length: int) -> int:
    """Return the last zoom at which an axis still fills a tile; 0 if it never does."""
    return max(0, (length // TILE_SIZE).bit_length() - 1)


def find_finest_zoom(length: int, max_cells: int) -> int:
    """Return the first zoom at which an axis has at most ``max_cells`` cells, or the last zoom."""
    zoom = 0
    while (length >> zoom) > max_cells and zoom < find_coarsest_zoom(length):
        zoom += 1
    return zoom


def list_tile_spans(length: int, zoom: int) -> list[TokenSpan]:
    """Return the first token and the one after the last of each tile along an axis.

    >>> list_tile_spans(700, 0), list_tile_spans(700, 1)
    ([(0, 256), (256, 512), (512, 700)], [(0, 512), (188, 700)])
    """
    zoom = min(zoom, find_coarsest_zoom(length))
    span = min(TILE_SIZE << zoom, length)
    firsts = range(0, length, span)
    if zoom == 0:  # a cell is a token: the last tile is smaller
        return [(first, min(first + span, length)) for first in firsts]
    return [(min(first, length - span), min(first + span, length)) for first in firsts]


def iterate_tiles(shape: tuple[int, int], zoom: int) -> Iterator[tuple[TokenSpan, TokenSpan]]:
    """Iterate over the rows and columns of every tile of a map at a zoom."""
    return itertools.product(list_tile_spans(shape[0], zoom), list_tile_spans(shape[1], zoom))


def _parse_int(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) < 16 and value.isascii() and value.lstrip("-").isdigit():
        return int(value)
    raise InputError(f"{name}={_shorten_repr(value)} is invalid; expected an integer")


def _parse_span(values: Mapping[str, Any], name: str) -> TokenSpan:
    value = values.get(name)
    bounds = value.split(",") if isinstance(value, str) else value
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        raise InputError(f"{name}={_shorten_repr(value)} is invalid; expected two integers, as in {name}=0,256")
    first, last = ({name: bound} for bound in bounds)
    return _parse_int(first, name), _parse_int(last, name)


def _shorten_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
