"""Tests of viewer data: pooled, packed, split into tiles, and requested."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.captures import CapturedLayer
from jumok.look.capture.watch import watch
from jumok.look.viewer.attended_image import AttendedImage
from jumok.look.viewer.tiles import (
    TileRequest,
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


class WeightsStub:
    """The source of a captured layer with given weights."""

    query_ids = None

    def __init__(self, cells: torch.Tensor) -> None:
        self.attention = CapturedAttention.from_weights(cells)
        self.shape = self.attention.shape


def test_pooled_cell_is_mean_over_queries_of_sum_over_keys() -> None:
    # Two cells a side of 5 × 7: rows 0-1 and 2-4, columns 0-2 and 3-6.
    cells = weights(5, 7)
    pooled = ArrayWeightSource(cells).pooled_map(0, slice(0, 5), slice(0, 7), 2)
    for i, rows in enumerate((slice(0, 2), slice(2, 5))):
        for j, cols in enumerate((slice(0, 3), slice(3, 7))):
            assert pooled[i, j] == pytest.approx(cells[rows, cols].sum(1).mean(), abs=1e-6)
    assert np.allclose(pooled.sum(1), 1)


def test_small_maps_are_not_pooled() -> None:
    cells = weights(3, 11)
    assert ArrayWeightSource(cells).pooled_map(0, slice(0, 3), slice(0, 11), 5).shape == (3, 5)
    assert np.array_equal(ArrayWeightSource(cells).pooled_map(0, slice(1, 3), slice(2, 7), 64), cells[1:3, 2:7])


def test_pooling_equals_that_of_captures() -> None:
    captured = CapturedAttention(torch.randn(1, 2, 29, 5), torch.randn(1, 2, 37, 5))
    source = ArrayWeightSource(statistics.compute_weights(captured, batch=0))
    for rows, cols, size in ((slice(0, 29), slice(0, 37), 7), (slice(3, 20), slice(5, 31), 11)):
        expected = statistics.compute_pooled_map(captured, head=1, rows=rows, cols=cols, size=size)
        assert np.allclose(source.pooled_map(1, rows, cols, size), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_tile_request_outside_the_data_is_rejected(change: dict[str, Any], message: str) -> None:
    data = ViewerData.from_weights({"a": weights(2, 5, 7)})
    good: dict[str, Any] = {"layer": 0, "head": 0, "rows": (0, 5), "cols": (0, 7)}
    answer_request([data], TileRequest(**good))
    with pytest.raises(InputError, match=message):
        answer_request([data], TileRequest(**{**good, **change}))


def test_large_weight_request_is_rejected() -> None:
    layer = ViewerLayer("long", "self", (10**6, 10**6), (0,), ArrayWeightSource(weights(2, 3)))
    with pytest.raises(InputError, match="smaller rectangle"):
        answer_request([ViewerData((layer,))], TileRequest(0, 0, (0, 2000), (0, 2000), quantity="weights"))


def test_answers_equal_the_weights() -> None:
    cells = weights(3, 5, 7)
    data = ViewerData.from_weights({"a": cells})
    part = TileRequest(0, 2, (1, 4), (2, 7), quantity="weights")
    assert np.array_equal(unpack(answer_request([data], part)), cells[2, 1:4, 2:7])
    answer = unpack(answer_request([data], TileRequest(0, 1, (0, 5), (0, 7), quantity="received_weight")))
    assert np.allclose(answer, cells[1].mean(0)[None], rtol=1e-3)
    mean = unpack(answer_request([data], TileRequest(0, None, (0, 5), (0, 7), quantity="weights")))
    assert np.allclose(mean, cells.mean(0), atol=1e-6)


def test_captures_are_converted_without_padding() -> None:
    cells = torch.rand(2, 3, 5, 7).softmax(-1)
    captured = CapturedLayer("encoder.layer.3", "self", WeightsStub(cells), [], None)
    data = ViewerData.from_captures([captured], batch=1, row_labels=["b", "c"], col_labels=list("klm"))
    layer = data.layers[0]
    assert (layer.name, layer.kind, layer.shape, layer.heads) == ("encoder.layer.3", "self", (2, 3), (0, 1, 2))
    assert list(layer.row_labels or ()) == ["b", "c"]
    answer = unpack(answer_request([data], TileRequest(0, 2, (0, 2), (0, 3), quantity="weights")))
    np.testing.assert_allclose(answer, cells[1, 2, :2, :3], rtol=1e-6)
    received = unpack(answer_request([data], TileRequest(0, 2, (0, 2), (0, 3), quantity="received_weight")))
    np.testing.assert_allclose(received[0], cells[1, 2, :2, :3].mean(0), rtol=1e-3)  # without the padding's queries
    with pytest.raises(InputError, match="batch=2"):
        ViewerData.from_captures([captured], batch=2)


def test_watched_module_is_converted() -> None:
    model = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(2, 7, 12)
    with watch(model) as captures, torch.no_grad():
        _, expected = model(x, x, x, average_attn_weights=False)
    data = ViewerData.from_captures(captures, batch=1)
    answer = unpack(answer_request([data], TileRequest(0, 2, (0, 7), (0, 7))))
    assert np.allclose(answer, expected[1, 2], atol=2e-3)


def test_manifest_stores_shared_texts_once() -> None:
    words = ["<script>", "שלום"]
    data = ViewerData.from_weights(
        {"a": weights(2, 2, 2), "b": weights(2, 2, 2)}, row_labels=words, col_labels=list(words), title="t"
    )
    manifest = build_manifest([data, data])
    assert manifest["texts"] == [words]
    assert [s["label"] for s in manifest["data"]] == ["Before", "After"]
    layer = manifest["data"][0]["layers"][1]
    assert layer == {
        "name": "b",
        "kind": "cross",
        "shape": [2, 2],
        "heads": [0, 1],
        "has_mean": True,
        "row_labels": 0,
        "col_labels": 0,
        "first_generated": [None, None],
        "row_outputs": None,
        "spans": [[], []],
        "sinks": [0],
        "mean_of": 0,
        "media": [],
        "max_rows": None,
        "max_mean_rows": None,
        "averaged": None,
        "detailed_heads": None,
        "image_layer": None,
        "finest_zoom": 0,
    }
    assert build_manifest([ViewerData.from_weights({"a": weights(2, 3)})])["data"][0]["layers"][0]["row_labels"] is None


@pytest.mark.parametrize(
    ("build", "message"),
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
def test_invalid_viewer_data_is_rejected(build: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


def test_pixels_are_encoded_as_png() -> None:
    pixels = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8).numpy()
    data = AttendedImage.from_pixels(pixels, (1, 1)).data
    length = struct.unpack(">I", data[33:37])[0]
    lines = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(5, 22)
    assert np.array_equal(lines[:, 1:].reshape(5, 7, 3), pixels)
    image = pytest.importorskip("matplotlib.image")
    import io

    assert np.allclose(image.imread(io.BytesIO(data), format="png"), pixels / 255)


def test_image_without_matching_layer_is_rejected() -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    weights = {"vit": np.full((7, 7), 1 / 7, np.float32)}  # a class token and 2 × 3 patches
    with pytest.raises(InputError, match=r"2 × 3 patches, 6 keys.*vit 7 \(self\).*pass num_prefix_keys=1"):
        ViewerData.from_weights(weights, kind="self", image=AttendedImage.from_pixels(pixels, (2, 3)))
    with pytest.raises(InputError, match=r"4 × 5 patches after 1 other keys, 21 keys.*vit 7"):
        ViewerData.from_weights(
            weights, kind="self", image=AttendedImage.from_pixels(pixels, (4, 5), num_prefix_keys=1)
        )
    fits = AttendedImage.from_pixels(pixels, (2, 3), num_prefix_keys=1)
    for kind in ("causal self", "channel"):  # the viewer shows neither over an image
        with pytest.raises(InputError, match=rf"vit 7 \({kind}\).*neither causal nor over channels"):
            ViewerData.from_weights(weights, kind=kind, image=fits)
    assert ViewerData.from_weights(weights, kind="self", image=fits).image is fits


def test_captures_without_matching_layer_are_rejected() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    with watch(layer) as captures:
        layer(torch.randn(1, 5, 8))
    with pytest.raises(InputError, match=r"3 × 3 patches, 9 keys.*self_attn 5"):
        ViewerData.from_captures(captures, image=AttendedImage.from_pixels(np.zeros((3, 3, 3), np.uint8), (3, 3)))
    data = ViewerData.from_captures(
        captures, image=AttendedImage.from_pixels(np.zeros((2, 2, 3), np.uint8), (2, 2), num_prefix_keys=1)
    )
    assert data.image is not None
    other = ViewerData.from_weights({"words": np.ones((1, 1), np.float32)}).layers
    assert data.with_layers(other).image is None
