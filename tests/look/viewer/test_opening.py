"""Tests of what is opened first, of means over layers, and of weights without attention sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huge_map import HugeMap

from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.captures import CapturedLayer
from jumok.look.viewer import opening as opening_module
from jumok.look.viewer import viewer_data
from jumok.look.viewer.attended_image import AttendedImages, encode_png
from jumok.look.viewer.image_placement import ImageGrid, ImagePlacement
from jumok.look.viewer.opening import MAX_MEAN_LENGTH, choose_opening, compute_statistics
from jumok.look.viewer.preparation import add_layer_means, prepare_for_display
from jumok.look.viewer.tiles import TileRequest
from jumok.look.viewer.viewer_data import ArrayWeightSource, Opening, ViewerData, ViewerLayer, compute_cells

TOKENS = ["[CLS]", "the", "cat", "sat", "down", "[SEP]"]


def build_layer(name: str, *heads: np.ndarray, kind: str = "self", **options: Any) -> ViewerLayer:
    weights = np.stack(heads).astype(np.float32)
    labels = {"row_labels": TOKENS, "col_labels": TOKENS} if weights.shape[1:] == (6, 6) else {}
    return ViewerLayer(
        name, kind, weights.shape[1:], tuple(range(len(heads))), ArrayWeightSource(weights), **labels, **options
    )


def attend_to(*keys: int) -> np.ndarray:
    """All queries attend to these keys."""
    weights = np.full((6, 6), 0.01)
    weights[:, keys] += 0.94 / len(keys)
    return weights


def diagonal(offset: int = 0) -> np.ndarray:
    return np.roll(np.full((6, 6), 0.01) + 0.94 * np.eye(6), offset, axis=1)


SINKS_BOX = 'label:has-text("Without sinks") input'
UNIFORM = np.full((6, 6), 1 / 6)


def test_statistics_can_be_checked_by_hand() -> None:
    layer = build_layer("a", UNIFORM)
    # Row 1: [CLS] is a sink, the, cat are near, sat and down are content, [SEP] is a sink.
    row = np.array([[0.4, 0.1, 0.1, 0.15, 0.15, 0.1]], np.float32)
    statistics = compute_statistics(layer, np.array([1]), row)
    assert statistics.content_share == pytest.approx(0.3)
    assert statistics.sink_share == pytest.approx(0.5)
    assert statistics.near_share == pytest.approx(0.2)
    assert statistics.score == pytest.approx(0, abs=1e-6)  # the content has equal weights
    row[0, 3:5] = 0.3, 0.0
    # One of the content keys has a weight of 0, as if it was masked: a query that sees one key tells nothing.
    assert compute_statistics(layer, np.array([1]), row).score == 0
    row[0, 3:5] = 0.29, 0.01
    p = 0.29 / 0.3
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)) / np.log(2)
    assert compute_statistics(layer, np.array([1]), row).score == pytest.approx(0.3 * (1 - entropy), rel=1e-4)


def test_opening_is_not_a_sink_a_diagonal_or_a_uniform_map() -> None:
    layers = [
        build_layer("sink", attend_to(0), attend_to(5)),
        build_layer("diagonal", diagonal(), diagonal(-1)),
        build_layer("content", attend_to(2, 3), attend_to(2)),
        build_layer("uniform", UNIFORM, UNIFORM),
    ]
    opening = choose_opening(ViewerData(tuple(layers)))
    assert (opening.layer, opening.head) == (2, None)
    assert opening.reason.startswith("most telling of 4 layers: ")
    assert opening.reason.endswith("beyond special tokens and neighbours; head 1 the most")
    assert choose_opening(ViewerData(tuple(layers[:1]))).reason == ""


def test_cross_attention_and_generated_tokens_open_first() -> None:
    content = build_layer("encoder", attend_to(2))
    cross = build_layer("cross", UNIFORM, kind="cross")
    generated = build_layer("decoder", UNIFORM, kind="causal self", first_generated=(3, 3))
    assert choose_opening(ViewerData((content, generated, cross))).layer == 2
    assert choose_opening(ViewerData((content, generated))).layer == 1
    assert choose_opening(ViewerData((generated, content))).layer == 0


def test_generated_tokens_are_scored_alone() -> None:
    early, late = UNIFORM.copy(), UNIFORM.copy()
    early[:4], late[4:] = attend_to(2)[:4], attend_to(2)[4:]
    marks = {"kind": "causal self", "first_generated": (4, 4)}
    data = ViewerData((build_layer("early", early, **marks), build_layer("late", late, **marks)))
    assert choose_opening(data).layer == 1


def test_long_map_opens_at_a_head_from_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class CountingMap(HugeMap):
        num_weights = 0

        def weights(self, head: int, rows: slice, cols: slice) -> Any:
            CountingMap.num_weights += (rows.stop - rows.start) * (cols.stop - cols.start)
            return super().weights(head, rows, cols)

    monkeypatch.setattr(opening_module, "MAX_SAMPLES", 1 << 17)
    length = 4 * MAX_MEAN_LENGTH
    layers = [ViewerLayer(name, "self", (length, length), (0, 1), CountingMap(length, 2)) for name in "ab"]
    opening = choose_opening(ViewerData(tuple(layers)))
    assert opening.head is not None
    assert "of 4 heads" in opening.reason
    assert CountingMap.num_weights <= 1 << 17


# ---------------------------------------------------------------- means over layers


def test_mean_over_layers_is_a_layer() -> None:
    layers = [
        build_layer("encoder.0.attention", attend_to(1), attend_to(2)),
        build_layer("encoder.1.attention", UNIFORM),
    ]
    *_, mean = add_layer_means(ViewerData(tuple(layers))).layers
    assert (mean.name, mean.mean_of, mean.heads) == ("mean of all 2 layers", 2, (0,))
    expected = ((attend_to(1) + attend_to(2)) / 2 + UNIFORM) / 2  # each layer has the same share
    np.testing.assert_allclose(mean.compute_weights(0), expected, rtol=1e-5)
    pooled = mean.source.pooled_map(0, slice(0, 6), slice(0, 6), 3)
    parts = [
        np.mean([layer.source.pooled_map(h, slice(0, 6), slice(0, 6), 3) for h in layer.heads], 0) for layer in layers
    ]
    np.testing.assert_allclose(pooled, np.mean(parts, 0), rtol=1e-5)
    np.testing.assert_allclose(mean.source.received_weight(0, slice(0, 6)), expected.sum(0), rtol=1e-5)


def test_means_are_between_the_same_tokens() -> None:
    other = {"row_labels": list("uvwxyz")}
    layers = [
        *(build_layer(f"encoder.{n}.attention", UNIFORM) for n in range(2)),
        *(replace(build_layer(f"decoder.{n}.cross_attention", UNIFORM, kind="cross"), **other) for n in range(3)),
        build_layer("decoder.0.self_attention", UNIFORM, kind="causal self"),
    ]
    assert [(mean.name, mean.mean_of) for mean in add_layer_means(ViewerData(tuple(layers))).layers[6:]] == [
        ("mean of encoder.*.attention", 2),
        ("mean of decoder.*.cross_attention", 3),
    ]
    data = prepare_for_display(ViewerData(tuple(layers)))
    assert len(data.layers) == 8
    assert data.opening is not None
    assert prepare_for_display(data).layers == data.layers  # once


def test_means_of_layers_on_images_are_on_the_same_patches() -> None:
    grids = [ImageGrid(np.arange(6).reshape(2, 3), image=image) for image in (0, 1)]
    names = {f"encoder.{n}.attention [image {image + 1}]": image for n in range(2) for image in (0, 1)}
    placements = {name: ImagePlacement((grids[image],), (), 6) for name, image in names.items()}
    image = AttendedImages((encode_png(np.zeros((2, 3, 3), np.uint8)),) * 2, placements)
    data = add_layer_means(ViewerData(tuple(build_layer(name, UNIFORM) for name in names), image=image))
    means = data.layers[4:]
    assert [mean.name for mean in means] == [f"mean of encoder.*.attention [image {n}]" for n in (1, 2)]
    assert [data.image.find_placement(mean).grids[0].image for mean in means] == [0, 1]  # type: ignore[union-attr]


# ---------------------------------------------------------------- without sinks


def test_weights_without_sinks_are_renormalised() -> None:
    weights = np.array([[[0.5, 0.1, 0.1, 0.1, 0.0, 0.2]] * 6, [[0.9, 0.0, 0.0, 0.0, 0.05, 0.05]] * 6], np.float32)
    layer = build_layer("a", *weights)
    assert layer.sinks == (0, 5)
    whole = TileRequest(0, 0, (0, 6), (0, 6), quantity="weights", without_sinks=True)
    np.testing.assert_allclose(compute_cells(layer, whole)[2], [0, 1 / 3, 1 / 3, 1 / 3, 0, 0], rtol=1e-5)
    # The mean without sinks: a head with much weight on sinks contributes little.
    mean = weights.mean(0)[0]
    expected = np.array([0, mean[1], mean[2], mean[3], mean[4], 0]) / mean[1:5].sum()
    np.testing.assert_allclose(compute_cells(layer, replace(whole, head=None))[3], expected, rtol=1e-5)
    part = replace(whole, rows=(1, 4), cols=(2, 6))
    np.testing.assert_allclose(compute_cells(layer, part), compute_cells(layer, whole)[1:4, 2:6], rtol=1e-5)
    pooled = compute_cells(layer, replace(whole, quantity="pooled_map", size=2))
    np.testing.assert_allclose(pooled, [[2 / 3, 1 / 3]] * 2, rtol=1e-5)
    received = compute_cells(layer, replace(whole, quantity="received_weight"))
    np.testing.assert_allclose(received, [[0, 1 / 3, 1 / 3, 1 / 3, 0, 0]], rtol=1e-5)


def test_rows_keep_their_sum_without_sinks() -> None:
    causal = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    layer = replace(build_layer("a", causal, kind="causal self"), row_labels=None, col_labels=None)
    assert layer.sinks == (0,)  # the first token
    request = TileRequest(0, 0, (0, 6), (0, 6), quantity="weights", without_sinks=True)
    np.testing.assert_allclose(compute_cells(layer, request).sum(1), [0, 1, 1, 1, 1, 1], rtol=1e-5)
    halved = replace(layer, source=ArrayWeightSource(causal / 2))
    np.testing.assert_allclose(compute_cells(halved, request).sum(1), [0, 0.5, 0.5, 0.5, 0.5, 0.5], rtol=1e-5)


def test_attention_to_sinks_only_has_no_filter() -> None:
    weights = ViewerData.from_weights({"a": UNIFORM[:2, :2]}, row_labels=["x", "y"], col_labels=["<s>", "</s>"])
    assert weights.layers[0].sinks == ()


def test_long_means_are_computed_from_a_sample_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    length, num_heads = 1500, 3
    generator = torch.Generator().manual_seed(0)

    def build_captured_layer(number: int) -> CapturedLayer:
        # Neighbouring queries are similar, as in a text.
        query = torch.randn(1, num_heads, length, 4, generator=generator).cumsum(2) / 8
        key = torch.randn(1, num_heads, length, 4, generator=generator)
        attention = CapturedAttention(query, key, scale=0.3, diagonal=0)
        source = SimpleNamespace(attention=attention, shape=attention.shape, query_ids=None)
        return CapturedLayer(f"layer.{number}", "self", source, [], None)

    data = add_layer_means(ViewerData.from_captures([build_captured_layer(n) for n in range(2)]))
    requests = [
        (layer, TileRequest(0, head, (0, length), (0, length), 64, quantity=quantity, without_sinks=without_sinks))  # type: ignore[arg-type]
        for layer, head in ((0, None), (2, 0))
        for quantity in ("pooled_map", "received_weight")
        for without_sinks in (False, True)
    ]
    exact = [compute_cells(data.layers[layer], request) for layer, request in requests]
    monkeypatch.setattr(viewer_data, "MAX_CPU_PAIRS", length * 1024)
    num_pairs = 0
    compute_weights = CapturedAttention.compute_weights

    def count(self: CapturedAttention, *args: Any) -> Any:
        nonlocal num_pairs
        weights = compute_weights(self, *args)
        num_pairs += weights.shape[0] * weights.shape[1] * length
        return weights

    monkeypatch.setattr(CapturedAttention, "compute_weights", count)
    data = add_layer_means(ViewerData.from_captures([layer.source.layer for layer in data.layers[:2]]))
    for (layer, request), cells in zip(requests, exact, strict=True):
        num_pairs = 0
        sampled = compute_cells(data.layers[layer], request)
        assert np.abs(sampled - cells).sum() < 0.12 * cells.sum()
        assert sampled.sum() == pytest.approx(cells.sum(), rel=0.02)
        # 2 × 3 heads would compute length² pairs each; now about 1024 queries together, at least 256 of each.
        assert num_pairs < (2 if request.without_sinks else 1) * 6.2 * 342 * length


def build_data() -> ViewerData:
    rng = np.random.default_rng(5)
    layers = [build_layer(f"encoder.{n}", *rng.dirichlet(np.full(6, 0.3), (2, 6))) for n in range(2)]
    return ViewerData(tuple(layers), title="t")


@pytest.mark.long
@pytest.mark.parametrize("opener", ["open_served", "open_saved"])
def test_viewer_leaves_sinks_out(opener: str, request: Any) -> None:
    data = build_data()
    viewer = request.getfixturevalue(opener)(data)
    assert not viewer.page.is_checked(SINKS_BOX)
    viewer.press("f")
    viewer.wait_until_idle()
    assert viewer.page.is_checked(SINKS_BOX)
    assert "without [CLS] [SEP]" in viewer.page.inner_text(".jm-subtitle")
    assert "without sinks, renormalised" in viewer.page.inner_text(".jm-legend")
    for head in (0, None):
        for quantity in ("weights", "pooled_map", "received_weight"):
            tile = TileRequest(0, head, (0, 6), (0, 6), 4, quantity=quantity, without_sinks=True)  # type: ignore[arg-type]
            script = """(async () => { v.set({ head: args[0] });
                return [...(await v.fetch(args[1], [0, 6], [0, 6], 4)).values]; })()"""
            shown = viewer.evaluate(script, head, quantity)
            np.testing.assert_allclose(shown, compute_cells(data.layers[0], tile).ravel(), atol=2e-3)
    viewer.press("2")
    viewer.page.wait_for_selector(".jm-arcs svg")
    assert "without sinks" in viewer.page.text_content(".jm-arcs svg")
    viewer.press("4")
    viewer.wait_until_idle()
    assert "without sinks" in viewer.page.inner_text(".jm-legend")
    viewer.page.uncheck(SINKS_BOX)
    assert "without" not in viewer.page.inner_text(".jm-legend")


@pytest.mark.long
def test_maps_share_a_scale_or_have_their_own(open_served: Callable[..., Any]) -> None:
    weights = np.full((2, 6, 6), 1 / 6)
    viewer = open_served(ViewerData((build_layer("a", *weights),)))
    assert "scale of this map" in viewer.page.inner_text(".jm-legend")
    own = sum(viewer.get_cell_colour(1, 1))  # the highest weight of this map
    viewer.page.select_option('[aria-label="Range of the scale"]', "all")
    viewer.wait_until_idle()
    assert "one scale for all maps" in viewer.page.inner_text(".jm-legend")
    assert sum(viewer.get_cell_colour(1, 1)) > own + 200  # 1/6 of a scale that ends at 1
    viewer.press("4")
    assert "One scale for all maps" in viewer.page.inner_text(".jm-legend")
    viewer.press("r")
    assert "its own scale" in viewer.page.inner_text(".jm-legend")


@pytest.mark.long
@pytest.mark.parametrize("opener", ["open_served", "open_saved"])
def test_viewer_opens_with_the_most_telling_layer(opener: str, request: Any) -> None:
    layers = [build_layer(f"encoder.{n}", attend_to(n), attend_to(n)) for n in (0, 3, 5)]
    viewer = request.getfixturevalue(opener)(ViewerData(tuple(layers), title="t"), opening=None)
    assert viewer.evaluate("[v.state.layer, v.state.head]") == [1, None]
    assert "most telling of 3 layers" in viewer.page.inner_text(".jm-subtitle")
    viewer.page.select_option('[aria-label="Layer"]', label="mean of all 3 layers")
    viewer.wait_until_idle()
    assert "most telling" not in viewer.page.inner_text(".jm-subtitle")
    mean = np.mean([layer.compute_weights(head) for layer in layers for head in layer.heads], 0)[2]
    row = viewer.page.evaluate("document.querySelector('#viewer').jumok.row(2).then((row) => [...row.values])")
    np.testing.assert_allclose(row, mean, rtol=1e-3)


@pytest.mark.long
def test_opening_without_sinks(open_saved: Callable[..., Any]) -> None:
    viewer = open_saved(replace(build_data(), hides_sinks=True, opening=Opening(1, 1)))
    assert viewer.evaluate("[v.state.layer, v.state.head, v.hidesSinks]") == [1, 1, True]
