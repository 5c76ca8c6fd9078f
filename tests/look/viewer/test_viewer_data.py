"""The numbers behind the viewer: pooled, packed, cut into tiles; and bad requests are refused."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.watch import watch
from jumok.look.viewer.attended_image import AttendedImage
from jumok.look.viewer.tiles import (
    TILE_SIZE,
    TileRequest,
    find_coarsest_zoom,
    find_finest_zoom,
    iterate_tiles,
    list_tile_spans,
    pack,
    unpack,
)
from jumok.look.viewer.viewer_data import (
    ArrayWeightSource,
    ViewerData,
    ViewerLayer,
    answer_request,
    as_viewer_data_tuple,
    build_manifest,
)
from jumok.look.views import statistics


def weights(*shape: int) -> np.ndarray:
    return torch.rand(shape).softmax(-1).numpy()


class Entry:
    """As little of what `watch` gives as the viewer uses."""

    def __init__(self, cells: torch.Tensor, **more: Any) -> None:
        self.name, self.kind, self.shape = "encoder.layer.3", "self", tuple(cells.shape)
        self.cells = cells
        vars(self).update(more)

    def pooled_map(self, *, batch: int, head: int, rows: slice, cols: slice, size: int) -> torch.Tensor:
        return torch.from_numpy(ArrayWeightSource(self.cells[batch]).pooled_map(head, rows, cols, size))

    def weights(self, *, batch: int, head: int, rows: slice, cols: slice) -> torch.Tensor:
        return self.cells[batch, head, rows, cols]

    def received_weight(self, *, batch: int) -> torch.Tensor:
        return self.cells[batch].sum(1)


def test_a_cell_is_the_mean_over_its_queries_of_the_weight_on_its_keys() -> None:
    # Two cells a side of 5 × 7: rows 0-1 and 2-4, columns 0-2 and 3-6.
    cells = weights(5, 7)
    pooled = ArrayWeightSource(cells).pooled_map(0, slice(0, 5), slice(0, 7), 2)
    for i, rows in enumerate((slice(0, 2), slice(2, 5))):
        for j, cols in enumerate((slice(0, 3), slice(3, 7))):
            assert pooled[i, j] == pytest.approx(cells[rows, cols].sum(1).mean(), abs=1e-6)
    assert np.allclose(pooled.sum(1), 1)


def test_with_fewer_rows_than_cells_each_has_its_own() -> None:
    cells = weights(3, 11)
    assert ArrayWeightSource(cells).pooled_map(0, slice(0, 3), slice(0, 11), 5).shape == (3, 5)
    assert np.array_equal(ArrayWeightSource(cells).pooled_map(0, slice(1, 3), slice(2, 7), 64), cells[1:3, 2:7])


def test_pooling_is_that_of_the_views_on_the_same_weights() -> None:
    kept = CapturedAttention(torch.randn(1, 2, 29, 5), torch.randn(1, 2, 37, 5))
    plain = ArrayWeightSource(statistics.compute_weights(kept, batch=0))
    for rows, cols, size in ((slice(0, 29), slice(0, 37), 7), (slice(3, 20), slice(5, 31), 11)):
        theirs = statistics.compute_pooled_map(kept, head=1, rows=rows, cols=cols, size=size)
        assert np.allclose(plain.pooled_map(1, rows, cols, size), theirs, atol=1e-6)


@given(st.integers(1, 5000), st.integers(0, 9))
def test_tiles_cover_an_axis_and_all_cells_of_a_zoom_are_equal(length: int, zoom: int) -> None:
    found = list_tile_spans(length, zoom)
    covered = np.zeros(length, bool)
    for first, last in found:
        assert 0 <= first < last <= length
        covered[first:last] = True
        cells = min(last - first, TILE_SIZE)
        assert (last - first) % cells == 0
        # As many tokens as every other cell of this zoom.
        assert (last - first) // cells == 2 ** min(zoom, find_coarsest_zoom(length))
    assert covered.all()
    assert len(set(found)) == len(found) == -(-length // (found[0][1] - found[0][0]))


def test_the_coarsest_zoom_has_one_or_two_tiles_a_side() -> None:
    assert [find_coarsest_zoom(n) for n in (1, 255, 256, 511, 512, 65_536, 100_000)] == [0, 0, 0, 0, 1, 8, 8]
    for length in (1, 256, 300, 511, 513, 65_536, 100_000):
        assert len(list_tile_spans(length, find_coarsest_zoom(length))) <= 2
    assert list(iterate_tiles((3, 700), 0)) == [
        ((0, 3), (0, 256)),
        ((0, 3), (256, 512)),
        ((0, 3), (512, 700)),
    ]
    assert find_finest_zoom(1000, 1024) == 0
    assert find_finest_zoom(65_536, 1024) == 6


def test_packing_keeps_small_weights_beside_large_ones() -> None:
    cells = np.array([[1.0, 0.3, 1e-4], [3e-8, 0.0, 1.7e-6]], np.float32)
    back = unpack(pack(cells))
    assert np.allclose(back, cells, rtol=5e-4, atol=0)
    assert np.array_equal(unpack(pack(cells, exact=True)), cells)
    assert pack(cells)[:12] == struct.pack("<III", 2, 3, 0)
    assert np.array_equal(unpack(pack(np.zeros((2, 3), np.float32))), np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("given", "says"),
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
        (
            {"layer": "0", "head": "0", "rows": "0,5", "cols": "0,7", "quantity": "__class__"},
            "map, weights, received",
        ),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        TileRequest.from_mapping(given)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data_index": 1}, "data=1"),
        ({"data_index": -1}, "data=-1"),
        ({"layer": 1}, "layer=1"),
        ({"layer": -1}, "layer=-1"),
        ({"head": 3}, "head=3"),
        ({"head": -1}, "head=-1"),
        ({"rows": (-1, 3)}, "rows=-1,3"),
        ({"rows": (3, 3)}, "rows=3,3"),
        ({"rows": (0, 6)}, "within 0,5"),
        ({"cols": (5, 2)}, "cols=5,2"),
        ({"size": 0}, "size=0"),
        ({"size": 100_000}, "size=100000"),
    ],
)
def test_a_request_for_what_is_not_there_is_refused(change: dict[str, Any], says: str) -> None:
    scene = ViewerData.from_weights({"a": weights(2, 5, 7)})
    good: dict[str, Any] = {"layer": 0, "head": 0, "rows": (0, 5), "cols": (0, 7)}
    answer_request([scene], TileRequest(**good))
    with pytest.raises(InputError, match=says):
        answer_request([scene], TileRequest(**{**good, **change}))


def test_nobody_gets_more_single_weights_than_one_answer_holds() -> None:
    layer = ViewerLayer("long", "self", (10**6, 10**6), (0,), ArrayWeightSource(weights(2, 3)))
    with pytest.raises(InputError, match="smaller rectangle"):
        answer_request([ViewerData((layer,))], TileRequest(0, 0, (0, 2000), (0, 2000), quantity="weights"))


def test_answers_are_the_weights() -> None:
    cells = weights(3, 5, 7)
    scene = ViewerData.from_weights({"a": cells})
    part = TileRequest(0, 2, (1, 4), (2, 7), quantity="weights")
    assert np.array_equal(unpack(answer_request([scene], part)), cells[2, 1:4, 2:7])
    got = unpack(answer_request([scene], TileRequest(0, 1, (0, 5), (0, 7), quantity="received_weight")))
    assert np.allclose(got, cells[1].mean(0)[None], rtol=1e-3)
    mean = unpack(answer_request([scene], TileRequest(0, None, (0, 5), (0, 7), quantity="weights")))
    assert np.allclose(mean, cells.mean(0), atol=1e-6)


def test_what_was_seen_becomes_a_scene_without_its_padding() -> None:
    cells = torch.rand(2, 3, 5, 7).softmax(-1)
    entry = Entry(cells, query_tokens=[["a"] * 5, ["b", "c"]], key_tokens=[list("defghij"), list("klm")])
    scene = ViewerData.from_captures([entry], batch=1, title="t")
    layer = scene.layers[0]
    assert (layer.name, layer.kind, layer.shape, layer.heads) == (
        "encoder.layer.3",
        "self",
        (2, 3),
        (0, 1, 2),
    )
    assert list(layer.row_labels or ()) == ["b", "c"]
    got = unpack(answer_request([scene], TileRequest(0, 2, (0, 2), (0, 3), quantity="weights")))
    assert np.array_equal(got, cells[1, 2, :2, :3].numpy())
    received = unpack(answer_request([scene], TileRequest(0, 2, (0, 2), (0, 3), quantity="received_weight")))
    assert np.allclose(received[0], cells[1, 2, :2, :3].mean(0), rtol=1e-3)  # what padding looks at does not count
    whole = ViewerData.from_captures([Entry(cells)], batch=1)
    received = unpack(answer_request([whole], TileRequest(0, 2, (0, 5), (0, 7), quantity="received_weight")))
    assert np.allclose(received[0], cells[1, 2].mean(0), rtol=1e-3)
    with pytest.raises(InputError, match="batch=2"):
        ViewerData.from_captures([entry], batch=2)


def test_what_watch_really_sees_becomes_a_scene() -> None:
    model = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(2, 7, 12)
    with watch(model) as found, torch.no_grad():
        _, expected = model(x, x, x, average_attn_weights=False)
    scene = ViewerData.from_captures(found, batch=1)
    got = unpack(answer_request([scene], TileRequest(0, 2, (0, 7), (0, 7))))
    assert np.allclose(got, expected[1, 2], atol=2e-3)


def test_the_manifest_has_shared_texts_once_and_no_numbers() -> None:
    words = ["<script>", "שלום"]
    scene = ViewerData.from_weights(
        {"a": weights(2, 2, 2), "b": weights(2, 2, 2)}, row_labels=words, col_labels=list(words), title="t"
    )
    told = build_manifest([scene, scene])
    assert told["texts"] == [words]
    assert [s["label"] for s in told["data"]] == ["Before", "After"]
    layer = told["data"][0]["layers"][1]
    assert layer == {
        "name": "b",
        "kind": "cross",
        "shape": [2, 2],
        "heads": [0, 1],
        "has_mean": True,
        "row_labels": 0,
        "col_labels": 0,
        "finest_zoom": 0,
    }
    assert build_manifest([ViewerData.from_weights({"a": weights(2, 3)})])["data"][0]["layers"][0]["row_labels"] is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ViewerData(()), "without layers"),
        (lambda: ViewerData.from_weights({"a": np.full((2, 2), np.nan)}), "NaN"),
        (lambda: ViewerData.from_weights({"a": np.zeros((1, 1, 2, 2))}), "expected \\(Q, K\\)"),
        (lambda: ViewerData.from_weights({"a": np.zeros((0, 2))}), "expected \\(Q, K\\)"),
        (lambda: ViewerData.from_weights({"a": weights(2, 2)}, row_labels=["a", "b", "c"]), "3 rows texts"),
        (lambda: as_viewer_data_tuple([]), "0 items"),
        (lambda: AttendedImage(b"GIF89a", (2, 2)), "PNG"),
        (lambda: AttendedImage(b"\x89PNG", (0, 2)), "grid"),
        (lambda: AttendedImage.from_pixels(np.zeros((2, 2, 3)), (1, 1)), "uint8"),  # type: ignore[arg-type]
    ],
)
def test_a_scene_that_cannot_be_is_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


def test_pixels_become_a_png_that_others_can_read() -> None:
    pixels = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8).numpy()
    data = AttendedImage.from_pixels(pixels, (1, 1)).data
    length = struct.unpack(">I", data[33:37])[0]
    lines = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(5, 22)
    assert np.array_equal(lines[:, 1:].reshape(5, 7, 3), pixels)
    image = pytest.importorskip("matplotlib.image")
    import io

    assert np.allclose(image.imread(io.BytesIO(data), format="png"), pixels / 255)


def test_a_picture_that_fits_no_layer_is_refused_with_both_numbers() -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    weights = {"vit": np.full((7, 7), 1 / 7, np.float32)}  # a class token and 2 × 3 patches
    with pytest.raises(InputError, match=r"2 × 3 patches came, 6 keys.*vit 7 \(self\).*pass num_prefix_keys=1"):
        ViewerData.from_weights(weights, kind="self", image=AttendedImage.from_pixels(pixels, (2, 3)))
    with pytest.raises(InputError, match=r"4 × 5 patches after 1 other keys came, 21 keys.*vit 7"):
        ViewerData.from_weights(
            weights, kind="self", image=AttendedImage.from_pixels(pixels, (4, 5), num_prefix_keys=1)
        )
    fits = AttendedImage.from_pixels(pixels, (2, 3), num_prefix_keys=1)
    for kind in ("causal self", "channel"):  # the viewer shows neither over a picture
        with pytest.raises(InputError, match=rf"vit 7 \({kind}\).*neither causal nor over channels"):
            ViewerData.from_weights(weights, kind=kind, image=fits)
    assert ViewerData.from_weights(weights, kind="self", image=fits).image is fits


def test_what_watch_saw_of_a_picture_that_does_not_fit_is_refused() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    with watch(layer) as seen:
        layer(torch.randn(1, 5, 8))
    with pytest.raises(InputError, match=r"3 × 3 patches came, 9 keys.*self_attn 5"):
        ViewerData.from_captures(seen, image=AttendedImage.from_pixels(np.zeros((3, 3, 3), np.uint8), (3, 3)))
    scene = ViewerData.from_captures(
        seen, image=AttendedImage.from_pixels(np.zeros((2, 2, 3), np.uint8), (2, 2), num_prefix_keys=1)
    )
    assert scene.image is not None
    other = ViewerData.from_weights({"words": np.ones((1, 1), np.float32)}).layers
    assert scene.with_layers(other).image is None
