"""Tests of rounded queries and keys, from which saved files compute weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.captures import CapturedLayer
from jumok.look.viewer import html_file
from jumok.look.viewer.score_factors import (
    BalancedSide,
    compress_side,
    compute_relative_errors,
    factor_scores,
    unpack_side,
)
from jumok.look.viewer.viewer_data import ViewerData

pytestmark = pytest.mark.long

Q, K, D = 131, 149, 7
HEADS = (0, 2, 3)


def build_attention(seed: int = 0, spread: float = 1.5, **options: Any) -> CapturedAttention:
    """Four heads, of which two share their keys. Channels are correlated, and have a mean, as in trained models."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(D, D, generator=random) * torch.linspace(2, 0.1, D)
    query = (torch.randn(2, 4, Q, D, generator=random) * spread + 1) @ mixing
    key = (torch.randn(2, 2, K, D, generator=random) - 2) @ mixing
    return CapturedAttention(query, key, scale=D**-0.5 / 30, **options)


def build_padding() -> Tensor:
    mask = torch.ones(2, 1, 1, K, dtype=torch.bool)
    mask[:, ..., -11:] = False
    return mask


def build_data(attention: CapturedAttention, batch: int = 1) -> ViewerData:
    source = SimpleNamespace(attention=attention, shape=attention.shape, query_ids=None)
    layer = CapturedLayer("layer", "cross", source, [], None)
    return ViewerData.from_captures([layer], batch=batch)


CASES = {
    "plain": {},
    "causal": {"diagonal": 5},
    "window": {"diagonal": 5, "window": 40},
    "padding": {"mask": build_padding()},
    "additive": {"mask": torch.zeros(2, 1, 1, K).masked_fill(~build_padding(), torch.finfo(torch.float32).min)},
    "softcap": {"softcap": 2.0, "diagonal": 0},
}


@pytest.mark.parametrize("name", CASES)
def test_error_of_weights_is_that_of_the_scores(name: str) -> None:
    attention = build_attention(**CASES[name])
    exact = attention.compute_weights(1, slice(0, 4), slice(0, Q), slice(0, K))
    factors = factor_scores(attention, 1, HEADS, (Q, K))
    assert factors is not None
    assert list(factors.keys) == [0, 1]  # heads 2 and 3 share theirs
    for head in HEADS:
        for error in (1e-3, 0.02):
            rounded = factors.compute_weights(head, torch.arange(Q), error)
            assert torch.equal(rounded == 0, exact[head] == 0)
            errors = compute_relative_errors(exact[head].numpy(), rounded.numpy())
            assert np.sqrt((errors**2).mean()) < 1.5 * error


def test_balanced_channels_take_fewer_bytes() -> None:
    attention = build_attention()
    factors = factor_scores(attention, 0, [0], (Q, K))
    assert factors is not None
    sides = (factors.queries[0], factors.keys[0])
    energies = [side.values[:, 1:].double().square().mean(0) for side in sides]
    assert torch.allclose(*energies, rtol=1e-3)
    assert (energies[0].diff() < 0).all()
    plain_key = attention.key[0, 0] - attention.key[0, 0].mean(0)
    plain_query = attention.query[0, 0] * attention.scale
    deviation = float((plain_key.square().sum(1).mean() + plain_query.square().sum(1).mean()).sqrt())
    plain = [BalancedSide(torch.nn.functional.pad(x, (1, 0)), deviation) for x in (plain_query, plain_key)]
    sizes = [sum(len(compress_side(side, 0.02)) for side in pair) for pair in (sides, plain)]
    assert sizes[0] < 0.85 * sizes[1]


def test_sides_are_packed_to_multiples_of_their_steps() -> None:
    values = torch.tensor([[300.0, 1.04, -0.26], [-1.0, 0.0, 99.0]])
    packed = BalancedSide(values, score_deviation=12**0.5).pack(0.1)  # steps: 0.05 of the bias, 0.1 of the others
    assert torch.allclose(unpack_side(packed), torch.tensor([[300.0, 1.0, -0.3], [-1.0, 0.0, 99.0]]), atol=1e-4)


@pytest.mark.parametrize(
    "attention",
    [
        CapturedAttention.from_scores(torch.randn(1, 2, Q, K)),
        build_attention(score_mod=lambda scores, b, h, q, k: scores),
        build_attention(mask=torch.randn(2, 1, Q, K)),  # a bias
        build_attention(mask=torch.ones(2, 4, Q, K, dtype=torch.bool)),  # could differ between heads
    ],
)
def test_other_attention_has_no_factors(attention: CapturedAttention) -> None:
    assert factor_scores(attention, 0, [0, 1], (Q, K)) is None


def test_short_texts_have_no_factors() -> None:
    assert factor_scores(build_attention(), 0, HEADS, (11, 13)) is None


def test_channels_without_variance_are_supported() -> None:
    query, key = torch.randn(1, 1, Q, D), torch.randn(1, 1, K, D)
    key[..., 3:] = 2.0
    attention = CapturedAttention(query, key, scale=0.5)
    factors = factor_scores(attention, 0, [0], (Q, K))
    assert factors is not None
    exact = attention.compute_weights(0, slice(0, 1), slice(0, Q), slice(0, K))[0]
    assert torch.allclose(factors.compute_weights(0, torch.arange(Q), 1e-3), exact, rtol=0.02)


READ_WEIGHTS = """(head) => document.querySelector('#viewer').jumok.store.host(
    {data: 0, layer: 0, head, rows: [0, 131], cols: [0, 149], size: 256, quantity: 'weights'})
    .then((buffer) => [...new Float32Array(buffer, 16)])"""


@pytest.mark.parametrize("name", CASES)
def test_browser_computes_the_weights(open_saved: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(html_file, "TARGET_BYTES", 12_000)
    attention = build_attention(**CASES[name])
    viewer = open_saved(build_data(attention), heads={"layer": HEADS})
    exact = attention.compute_weights(1, slice(0, 4), slice(0, Q), slice(0, K))[list(HEADS)].numpy()
    stated = viewer.evaluate("v.manifest.score_error")
    assert 0 < stated < 0.2
    decoded = np.array([viewer.page.evaluate(READ_WEIGHTS, head) for head in HEADS]).reshape(exact.shape)
    assert np.array_equal(decoded == 0, exact == 0)
    assert np.quantile(compute_relative_errors(exact, decoded), 0.99) < 1.5 * stated
    mean = np.reshape(viewer.page.evaluate(READ_WEIGHTS, None), (Q, K))
    assert np.allclose(mean, decoded.mean(0), atol=1e-6)
    assert "99 % are exact to within" in viewer.page.locator(".jm-file-note").text_content()


def test_weight_on_no_key_is_kept(open_saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_file, "TARGET_BYTES", 12_000)
    attention = build_attention()
    lse = attention.compute_scores(1, slice(0, 4), slice(0, Q), slice(0, K)).logsumexp(-1)
    attention = build_attention(lse=(lse + torch.linspace(0.1, 2, Q)).expand(2, 4, Q))  # a sink takes the rest
    viewer = open_saved(build_data(attention), heads={"layer": HEADS})
    row_sums = np.reshape(viewer.page.evaluate(READ_WEIGHTS, 2), (Q, K)).sum(1)
    assert np.allclose(row_sums, np.exp(-np.linspace(0.1, 2, Q)), rtol=2e-3)


@pytest.mark.parametrize("max_averaged", [1 << 25, 0])
def test_browser_computes_means_over_layers_without_sinks(
    open_saved: Any, monkeypatch: pytest.MonkeyPatch, max_averaged: int
) -> None:
    monkeypatch.setattr(html_file, "TARGET_BYTES", 60_000)
    monkeypatch.setattr(html_file, "MAX_AVERAGED_WEIGHTS", max_averaged)
    attentions = [build_attention(seed) for seed in (1, 2)]
    labels = [f"k{n}" for n in range(K)]
    labels[5] = "[SEP]"
    layers = [
        replace(build_data(found).layers[0], name=f"layer.{n}", col_labels=labels) for n, found in enumerate(attentions)
    ]
    viewer = open_saved(ViewerData(tuple(layers)))
    *singles, mean = viewer.evaluate("v.manifest.data[0].layers")
    assert all(layer["scores"] for layer in singles)
    assert (mean["name"], mean["averaged"] is None) == ("mean of all 2 layers", max_averaged == 0)
    exact = np.stack([a.compute_weights(1, slice(0, 4), slice(0, Q), slice(0, K)).numpy() for a in attentions])
    expected = {0: exact[0].mean(0), 2: exact.mean((0, 1))}
    for number, weights in expected.items():
        for without_sinks in (0, 1):
            if without_sinks:
                weights = weights.copy()
                weights[:, 5] = 0
                weights /= weights.sum(1, keepdims=True)
            decoded = viewer.page.evaluate(
                READ_WEIGHTS.replace("layer: 0, head", f"layer: {number}, without_sinks: {without_sinks}, head"), None
            )
            assert np.allclose(np.reshape(decoded, (Q, K)), weights, rtol=0.15, atol=3e-4)
    viewer.page.select_option('[aria-label="Layer"]', label="mean of all 2 layers")
    viewer.wait_until_idle()
    assert "Attention of mean of all 2 layers: 131 queries" in viewer.evaluate("v.content().label")
