"""Tests of tiles, of their packed format and of their requests."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jumok.errors import InputError
from jumok.look.viewer.ascii_coding import decode_text, encode_text
from jumok.look.viewer.tiles import (
    TILE_SIZE,
    TileRequest,
    find_coarsest_zoom,
    find_finest_zoom,
    iterate_tiles,
    list_tile_spans,
    pack,
    pack_roots,
    unpack,
)


@given(st.integers(1, 5000), st.integers(0, 9))
def test_tiles_cover_an_axis_with_equal_cells(length: int, zoom: int) -> None:
    spans = list_tile_spans(length, zoom)
    covered = np.zeros(length, bool)
    for first, last in spans:
        assert 0 <= first < last <= length
        covered[first:last] = True
        cells = min(last - first, TILE_SIZE)
        assert (last - first) % cells == 0
        # All cells of a zoom cover the same number of tokens.
        assert (last - first) // cells == 2 ** min(zoom, find_coarsest_zoom(length))
    assert covered.all()
    assert len(set(spans)) == len(spans) == -(-length // (spans[0][1] - spans[0][0]))


def test_coarsest_zoom_has_at_most_two_tiles_a_side() -> None:
    assert [find_coarsest_zoom(n) for n in (1, 255, 256, 511, 512, 65_536, 100_000)] == [0, 0, 0, 0, 1, 8, 8]
    for length in (1, 256, 300, 511, 513, 65_536, 100_000):
        assert len(list_tile_spans(length, find_coarsest_zoom(length))) <= 2
    assert list(iterate_tiles((3, 700), 0)) == [((0, 3), (0, 256)), ((0, 3), (256, 512)), ((0, 3), (512, 700))]
    assert find_finest_zoom(1000, 1024) == 0
    assert find_finest_zoom(65_536, 1024) == 6


def test_packing_keeps_small_weights() -> None:
    cells = np.array([[1.0, 0.3, 1e-4], [3e-8, 0.0, 1.7e-6]], np.float32)
    back = unpack(pack(cells))
    assert np.allclose(back, cells, rtol=5e-4, atol=0)
    assert np.array_equal(unpack(pack(cells, exact=True)), cells)
    assert pack(cells)[:12] == struct.pack("<III", 2, 3, 0)
    assert np.array_equal(unpack(pack(np.zeros((2, 3), np.float32))), np.zeros((2, 3)))


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.floats(0, 4, width=32)),
    st.floats(1e-4, 1.0),
)
def test_roots_are_packed_within_the_bound_and_zeros_stay(cells: np.ndarray, step: float) -> None:
    back = unpack(pack_roots(cells, step))
    roots, errors = np.sqrt(cells.astype(float)), np.abs(np.sqrt(back.astype(float)) - np.sqrt(cells.astype(float)))
    assert (errors <= np.where(roots < step / 2, step, step / 2) * 1.001 + 1e-7 * roots + 1e-6).all()
    assert np.array_equal(back == 0, cells == 0)


def test_roots_need_two_bytes_only_for_large_multiples() -> None:
    cells = np.array([[0.0, 1.0, 0.25, 1e-9]], np.float32)
    assert len(pack_roots(cells, 0.1)) == 16 + 4 + 4
    assert len(pack_roots(cells, 0.001)) == 16 + 4 + 8
    assert np.allclose(unpack(pack_roots(cells, 0.001)), cells, rtol=1e-3)


@given(st.binary(max_size=200))
def test_bytes_become_text_that_a_page_keeps(data: bytes) -> None:
    text = encode_text(data)
    assert decode_text(text)[: len(data)] == data
    assert not set(text) & set("\0<")
    assert len(text.splitlines()) <= 1
    assert len(text) == -(-len(data) // 6) * 7
    assert text.isascii()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"head": "0", "rows": "0,5", "cols": "0,7"}, "layer=None"),
        ({"layer": "x", "head": "0", "rows": "0,5", "cols": "0,7"}, "layer='x'"),
        ({"layer": "1e9", "head": "0", "rows": "0,5", "cols": "0,7"}, "integer"),
        ({"layer": "٣", "head": "0", "rows": "0,5", "cols": "0,7"}, "integer"),
        ({"layer": "9" * 5000, "head": "0", "rows": "0,5", "cols": "0,7"}, "integer"),
        ({"layer": True, "head": 0, "rows": [0, 5], "cols": [0, 7]}, "layer=True"),
        ({"layer": "0", "head": "0", "rows": "0", "cols": "0,7"}, "rows='0'"),
        ({"layer": "0", "head": "0", "rows": "0,5,6", "cols": "0,7"}, "rows=0,256"),
        ({"layer": "0", "head": "0", "rows": {"a": 1}, "cols": "0,7"}, "rows="),
        ({"layer": "0", "head": "0", "rows": "0,5", "cols": "0,7", "quantity": "__class__"}, "map, weights, received"),
    ],
)
def test_unreadable_tile_request_is_rejected(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        TileRequest.from_mapping(parameters)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200
