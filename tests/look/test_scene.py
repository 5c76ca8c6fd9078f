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
from jumok.look import views
from jumok.look.kept import Kept
from jumok.look.scene import Arrays, Layer, Picture, Scene, answer, as_scenes, manifest
from jumok.look.tiles import TILE, Request, coarsest, finest_within, pack, spans, tiles, unpack
from jumok.look.watch import watch


def weights(*shape: int) -> np.ndarray:
    return torch.rand(shape).softmax(-1).numpy()


class Entry:
    """As little of what `watch` gives as the viewer uses."""

    def __init__(self, cells: torch.Tensor, **more: Any) -> None:
        self.name, self.kind, self.shape = "encoder.layer.3", "self", tuple(cells.shape)
        self.cells = cells
        vars(self).update(more)

    def map(self, *, batch: int, head: int, rows: slice, cols: slice, size: int) -> torch.Tensor:
        return torch.from_numpy(Arrays(self.cells[batch]).map(head, rows, cols, size))

    def weights(self, *, batch: int, head: int, rows: slice, cols: slice) -> torch.Tensor:
        return self.cells[batch, head, rows, cols]

    def received(self, *, batch: int) -> torch.Tensor:
        return self.cells[batch].sum(1)


def test_a_cell_is_the_mean_over_its_queries_of_the_weight_on_its_keys() -> None:
    # Two cells a side of 5 × 7: rows 0-1 and 2-4, columns 0-2 and 3-6.
    cells = weights(5, 7)
    pooled = Arrays(cells).map(0, slice(0, 5), slice(0, 7), 2)
    for i, rows in enumerate((slice(0, 2), slice(2, 5))):
        for j, cols in enumerate((slice(0, 3), slice(3, 7))):
            assert pooled[i, j] == pytest.approx(cells[rows, cols].sum(1).mean(), abs=1e-6)
    assert np.allclose(pooled.sum(1), 1)


def test_with_fewer_rows_than_cells_each_has_its_own() -> None:
    cells = weights(3, 11)
    assert Arrays(cells).map(0, slice(0, 3), slice(0, 11), 5).shape == (3, 5)
    assert np.array_equal(Arrays(cells).map(0, slice(1, 3), slice(2, 7), 64), cells[1:3, 2:7])


def test_pooling_is_that_of_the_views_on_the_same_weights() -> None:
    kept = Kept(torch.randn(1, 2, 29, 5), torch.randn(1, 2, 37, 5))
    plain = Arrays(views.weights(kept, batch=0))
    for rows, cols, size in ((slice(0, 29), slice(0, 37), 7), (slice(3, 20), slice(5, 31), 11)):
        theirs = views.map(kept, head=1, rows=rows, cols=cols, size=size)
        assert np.allclose(plain.map(1, rows, cols, size), theirs, atol=1e-6)


@given(st.integers(1, 5000), st.integers(0, 9))
def test_tiles_cover_an_axis_and_all_cells_of_a_zoom_are_equal(length: int, zoom: int) -> None:
    found = spans(length, zoom)
    covered = np.zeros(length, bool)
    for first, last in found:
        assert 0 <= first < last <= length
        covered[first:last] = True
        cells = min(last - first, TILE)
        assert (last - first) % cells == 0
        # As many tokens as every other cell of this zoom.
        assert (last - first) // cells == 2 ** min(zoom, coarsest(length))
    assert covered.all()
    assert len(set(found)) == len(found) == -(-length // (found[0][1] - found[0][0]))


def test_the_coarsest_zoom_has_one_or_two_tiles_a_side() -> None:
    assert [coarsest(n) for n in (1, 255, 256, 511, 512, 65_536, 100_000)] == [0, 0, 0, 0, 1, 8, 8]
    for length in (1, 256, 300, 511, 513, 65_536, 100_000):
        assert len(spans(length, coarsest(length))) <= 2
    assert list(tiles((3, 700), 0)) == [((0, 3), (0, 256)), ((0, 3), (256, 512)), ((0, 3), (512, 700))]
    assert finest_within(1000, 1024) == 0
    assert finest_within(65_536, 1024) == 6


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
        ({"layer": "1e9", "head": "0", "rows": "0,5", "cols": "0,7"}, "whole number"),
        ({"layer": "٣", "head": "0", "rows": "0,5", "cols": "0,7"}, "whole number"),
        ({"layer": "9" * 5000, "head": "0", "rows": "0,5", "cols": "0,7"}, "whole number"),
        ({"layer": True, "head": 0, "rows": [0, 5], "cols": [0, 7]}, "layer=True"),
        ({"layer": "0", "head": "0", "rows": "0", "cols": "0,7"}, "rows='0'"),
        ({"layer": "0", "head": "0", "rows": "0,5,6", "cols": "0,7"}, "rows=0,256"),
        ({"layer": "0", "head": "0", "rows": {"a": 1}, "cols": "0,7"}, "rows="),
        (
            {"layer": "0", "head": "0", "rows": "0,5", "cols": "0,7", "what": "__class__"},
            "map, weights, received",
        ),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        Request.read(given)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scene": 1}, "scene=1"),
        ({"scene": -1}, "scene=-1"),
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
    scene = Scene.of_weights({"a": weights(2, 5, 7)})
    good: dict[str, Any] = {"layer": 0, "head": 0, "rows": (0, 5), "cols": (0, 7)}
    answer([scene], Request(**good))
    with pytest.raises(InputError, match=says):
        answer([scene], Request(**{**good, **change}))


def test_nobody_gets_more_single_weights_than_one_answer_holds() -> None:
    layer = Layer("long", "self", (10**6, 10**6), (0,), Arrays(weights(2, 3)))
    with pytest.raises(InputError, match="smaller rectangle"):
        answer([Scene((layer,))], Request(0, 0, (0, 2000), (0, 2000), what="weights"))


def test_answers_are_the_weights() -> None:
    cells = weights(3, 5, 7)
    scene = Scene.of_weights({"a": cells})
    part = Request(0, 2, (1, 4), (2, 7), what="weights")
    assert np.array_equal(unpack(answer([scene], part)), cells[2, 1:4, 2:7])
    got = unpack(answer([scene], Request(0, 1, (0, 5), (0, 7), what="received")))
    assert np.allclose(got, cells[1].mean(0)[None], rtol=1e-3)
    mean = unpack(answer([scene], Request(0, None, (0, 5), (0, 7), what="weights")))
    assert np.allclose(mean, cells.mean(0), atol=1e-6)


def test_what_was_seen_becomes_a_scene_without_its_padding() -> None:
    cells = torch.rand(2, 3, 5, 7).softmax(-1)
    entry = Entry(cells, rows=[["a"] * 5, ["b", "c"]], cols=[list("defghij"), list("klm")])
    scene = Scene.of([entry], batch=1, title="t")
    layer = scene.layers[0]
    assert (layer.name, layer.kind, layer.shape, layer.heads) == (
        "encoder.layer.3",
        "self",
        (2, 3),
        (0, 1, 2),
    )
    assert list(layer.rows or ()) == ["b", "c"]
    got = unpack(answer([scene], Request(0, 2, (0, 2), (0, 3), what="weights")))
    assert np.array_equal(got, cells[1, 2, :2, :3].numpy())
    received = unpack(answer([scene], Request(0, 2, (0, 2), (0, 3), what="received")))
    assert np.allclose(
        received[0], cells[1, 2, :2, :3].mean(0), rtol=1e-3
    )  # what padding looks at does not count
    whole = Scene.of([Entry(cells)], batch=1)
    received = unpack(answer([whole], Request(0, 2, (0, 5), (0, 7), what="received")))
    assert np.allclose(received[0], cells[1, 2].mean(0), rtol=1e-3)
    with pytest.raises(InputError, match="batch=2"):
        Scene.of([entry], batch=2)


def test_what_watch_really_sees_becomes_a_scene() -> None:
    model = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(2, 7, 12)
    with watch(model) as found, torch.no_grad():
        _, expected = model(x, x, x, average_attn_weights=False)
    scene = Scene.of(found, batch=1)
    got = unpack(answer([scene], Request(0, 2, (0, 7), (0, 7))))
    assert np.allclose(got, expected[1, 2], atol=2e-3)


def test_the_manifest_has_shared_texts_once_and_no_numbers() -> None:
    words = ["<script>", "שלום"]
    scene = Scene.of_weights(
        {"a": weights(2, 2, 2), "b": weights(2, 2, 2)}, rows=words, cols=list(words), title="t"
    )
    told = manifest([scene, scene])
    assert told["texts"] == [words]
    assert [s["label"] for s in told["scenes"]] == ["Before", "After"]
    layer = told["scenes"][0]["layers"][1]
    assert layer == {"name": "b", "kind": "cross", "shape": [2, 2], "heads": [0, 1], "mean": True, "rows": 0,
                     "cols": 0, "finest": 0}  # fmt: skip
    assert manifest([Scene.of_weights({"a": weights(2, 3)})])["scenes"][0]["layers"][0]["rows"] is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Scene(()), "without layers"),
        (lambda: Scene.of_weights({"a": np.full((2, 2), np.nan)}), "NaN"),
        (lambda: Scene.of_weights({"a": np.zeros((1, 1, 2, 2))}), "expected \\(Q, K\\)"),
        (lambda: Scene.of_weights({"a": np.zeros((0, 2))}), "expected \\(Q, K\\)"),
        (lambda: Scene.of_weights({"a": weights(2, 2)}, rows=["a", "b", "c"]), "3 rows texts"),
        (lambda: as_scenes([]), "0 scenes"),
        (lambda: Picture(b"GIF89a", (2, 2)), "PNG"),
        (lambda: Picture(b"\x89PNG", (0, 2)), "grid"),
        (lambda: Picture.of_pixels(np.zeros((2, 2, 3)), (1, 1)), "uint8"),  # type: ignore[arg-type]
    ],
)
def test_a_scene_that_cannot_be_is_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


def test_pixels_become_a_png_that_others_can_read() -> None:
    pixels = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8).numpy()
    data = Picture.of_pixels(pixels, (1, 1)).data
    length = struct.unpack(">I", data[33:37])[0]
    lines = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(5, 22)
    assert np.array_equal(lines[:, 1:].reshape(5, 7, 3), pixels)
    image = pytest.importorskip("matplotlib.image")
    import io

    assert np.allclose(image.imread(io.BytesIO(data), format="png"), pixels / 255)


def test_a_picture_that_fits_no_layer_is_refused_with_both_numbers() -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    weights = {"vit": np.full((7, 7), 1 / 7, np.float32)}  # a class token and 2 × 3 patches
    with pytest.raises(InputError, match=r"2 × 3 patches came, 6 keys.*vit 7 \(self\).*give first=1"):
        Scene.of_weights(weights, kind="self", picture=Picture.of_pixels(pixels, (2, 3)))
    with pytest.raises(InputError, match=r"4 × 5 patches after 1 other keys came, 21 keys.*vit 7"):
        Scene.of_weights(weights, kind="self", picture=Picture.of_pixels(pixels, (4, 5), first=1))
    fits = Picture.of_pixels(pixels, (2, 3), first=1)
    for kind in ("causal self", "channel"):  # the viewer shows neither over a picture
        with pytest.raises(InputError, match=rf"vit 7 \({kind}\).*neither causal nor over channels"):
            Scene.of_weights(weights, kind=kind, picture=fits)
    assert Scene.of_weights(weights, kind="self", picture=fits).picture is fits


def test_what_watch_saw_of_a_picture_that_does_not_fit_is_refused() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    with watch(layer) as seen:
        layer(torch.randn(1, 5, 8))
    with pytest.raises(InputError, match=r"3 × 3 patches came, 9 keys.*self_attn 5"):
        Scene.of(seen, picture=Picture.of_pixels(np.zeros((3, 3, 3), np.uint8), (3, 3)))
    scene = Scene.of(seen, picture=Picture.of_pixels(np.zeros((2, 2, 3), np.uint8), (2, 2), first=1))
    assert scene.picture is not None
    other = Scene.of_weights({"words": np.ones((1, 1), np.float32)}).layers
    assert scene.with_layers(other).picture is None
