"""knock_out: a model without some heads or edges."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.errors import InputError
from jumok.look.capture import patching
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _everything_is_restored() -> Iterator[None]:
    yield
    assert patching._PATCHED_SLOTS == {}


class Attention(nn.Module):
    """Multi-head attention, and a reference for its ablation."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.num_heads, self.implementation = 3, implementation
        self.project, self.merge = nn.Linear(6, 18), nn.Linear(6, 6)

    def qkv(self, x: Tensor) -> Tensor:
        return self.project(x).unflatten(-1, (3, 3, 2)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x)
        if self.implementation == "sdpa":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            blocked = torch.ones(5, 5, dtype=torch.bool).triu(1)
            low = -torch.inf if self.implementation == "softmax" else torch.finfo(x.dtype).min
            mixed = F.softmax((query @ key.mT / 2**0.5).masked_fill(blocked, low), -1) @ value
        return self.merge(mixed.transpose(1, 2).flatten(2))

    def without(self, x: Tensor, heads: list[int], edges: list[tuple[int, int, int]]) -> Tensor:
        query, key, value = self.qkv(x)
        scores = (query @ key.mT / 2**0.5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        for head, row, column in edges:
            scores[:, head, row, column] = -torch.inf
        weights = scores.softmax(-1).nan_to_num(0)  # a row without keys
        weights[:, heads] = 0
        return self.merge((weights @ value).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(implementation), Attention(implementation)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("implementation", ["sdpa", "softmax", "low"])
def test_heads_and_edges(implementation: str) -> None:
    model, x = Model(implementation), torch.randn(2, 5, 6)
    targets = {"layers.0": [1, (3, 2), (0, 4, 4), (0, 0)], "layers.1": 2}
    with torch.no_grad(), knock_out(model, targets), watch(model) as captures:
        out = model(x)
    in_all_heads = [(head, row, column) for head in range(3) for row, column in ((3, 2), (0, 0))]
    first, second = model.layers
    hidden = x + first.without(x, [1], [*in_all_heads, (0, 4, 4)])
    torch.testing.assert_close(out, hidden + second.without(hidden, [2], []))
    weights = captures["layers.0"].weights()
    assert weights[:, 1].sum() == 0
    assert weights[:, :, 3, 2].sum() == weights[:, 0, 4, 4].sum() == weights[:, :, 0].sum() == 0
    torch.testing.assert_close(weights[:, [0, 2], 1:].sum(-1), torch.ones(2, 2, 4))
    torch.testing.assert_close(model(x), model(x))


def test_other_rows_are_equal_to_the_bit() -> None:
    model, x = Model("sdpa"), torch.randn(2, 5, 6)
    before = model.layers[0](x)
    with knock_out(model, {"layers.0": [(0, 3, 1)]}):
        after = model.layers[0](x)
    rows = [0, 1, 2, 4]
    assert torch.equal(before[:, rows], after[:, rows])
    assert not torch.equal(before[:, 3], after[:, 3])


@pytest.mark.parametrize("mode", ["fast", "plain"])
@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention(weights: bool, mode: str) -> None:
    model, x = nn.MultiheadAttention(6, 2, batch_first=True).eval(), torch.randn(2, 5, 6)
    targets: Any = {"MultiheadAttention": [0, (1, 4, 2), (3, 3)]}
    with (
        torch.no_grad() if mode == "fast" else contextlib.nullcontext(),
        knock_out(model, targets),
        watch(model) as captures,
    ):
        out, returned_weights = model(x, x, x, need_weights=weights, average_attn_weights=False)
    _, expected = model(x, x, x, average_attn_weights=False)
    expected = expected.detach().clone()
    expected[:, 1, 4, 2] = expected[:, :, 3, 3] = expected[:, 0] = 0
    for row in (3, 4):
        expected[:, 1, row] /= expected[:, 1, row].sum(-1, keepdim=True)
    value = F.linear(x, model.in_proj_weight[12:], model.in_proj_bias[12:]).unflatten(-1, (2, 3)).transpose(1, 2)
    torch.testing.assert_close(out, model.out_proj((expected @ value).transpose(1, 2).flatten(2)))
    torch.testing.assert_close(captures[0].weights(), expected)
    if weights:
        torch.testing.assert_close(returned_weights, expected)


def test_fused_layers_stay_fused() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 11, batch_first=True).eval()
    model, x = nn.Sequential(layer), torch.randn(2, 5, 6)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    model.forward = lambda x: layer(x, src_mask=causal)  # type: ignore[method-assign]
    with torch.no_grad():
        targets: Any = {"0.self_attn": [0, (1, 4, 2)]}
        with knock_out(model, targets), torch.profiler.profile() as profile:
            fast = model(x)
        assert any("_transformer_encoder_layer_fwd" in event.name for event in profile.events())
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with knock_out(model, targets):
                slow = model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        torch.testing.assert_close(fast, slow)
        with pytest.raises(InputError, match=r"nothing to attend to.*set_fastpath_enabled"):  # noqa: SIM117
            with knock_out(model, {"0.self_attn": (0, 0)}):
                model(x)


def test_invalid_layers_heads_and_edges() -> None:
    model, x = Model("sdpa"), torch.randn(2, 5, 6)

    def run(targets: Any) -> None:
        with knock_out(model, targets):
            model(x)

    with pytest.raises(InputError, match=r"no layer 'layer.0'; did you mean 'layers.0'"):
        run({"layer.0": [1]})
    with pytest.raises(InputError, match=r"layers.0 has 3 heads, 0 to 2, not head 3; the nearest is 2"):
        run({"layers.0": [3]})
    with pytest.raises(InputError, match=r"not head -1; the nearest is 0"):
        run({"layers.0": [(-1, 2, 1)]})
    with pytest.raises(InputError, match=r"computed no attention; did you mean 'layers.0'"):
        run({"layers.0.merge": [0]})
    with pytest.raises(InputError, match=r"layers.0 has no edge \(5, 1\)"):
        run({"layers.0": [(5, 1)]})
    for wrong in (
        "x",
        [1.5],
        1.5,
        True,
        [True, False, False],
        [(1, True)],
        [(1, 2, 3, 4)],
        [(1,)],
        [(0, -1)],
        [],
    ):
        with pytest.raises(InputError, match=r"knock_out: .* given for layers.0"):
            run({"layers.0": wrong})
    for targets in ({}, [1], None):
        with pytest.raises(InputError, match=r"knock_out: .* is invalid; a mapping from layers"):
            run(targets)
    with pytest.raises(InputError, match=r"knock_out takes an nn.Module"):  # noqa: SIM117
        with knock_out("model", {}):  # type: ignore[arg-type]
            pass


def test_model_that_raises() -> None:
    model, x = Model("sdpa"), torch.randn(2, 5, 6)
    before = model(x)
    with pytest.raises(RuntimeError), knock_out(model, {"layers.0": [1]}):
        model(torch.randn(2, 5, 7))
    assert torch.equal(before, model(x))


def test_loop_over_the_same_keys() -> None:
    class DecoderAttention(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            steps = [F.scaled_dot_product_attention(step, key, key) for step in query.split(1, dim=2)]
            return torch.cat(steps, dim=2)

    model, query, key = DecoderAttention(), torch.randn(1, 2, 4, 3), torch.randn(1, 2, 6, 3)
    with knock_out(model, {"DecoderAttention": [(2, 5)]}), watch(model) as captures:
        model(query, key)
    assert (captures[0].weights() == 0).nonzero().tolist() == [[0, 0, 2, 5], [0, 1, 2, 5]]


@pytest.mark.parametrize("has_equal_queries", [False, True])
def test_two_attentions_to_the_same_keys_both_lose_an_edge(has_equal_queries: bool) -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor, other: Tensor, key: Tensor) -> Tensor:
            chunks = [F.scaled_dot_product_attention(part, key, key) for part in query.split(3, dim=2)]
            return torch.cat(chunks, dim=2) - F.scaled_dot_product_attention(other, key, 2 * key)

    query, other, key = torch.randn(3, 1, 2, 5, 3).unbind()
    other = query if has_equal_queries else other
    model = Attention()
    with knock_out(model, {"Attention": [(4, 2)]}), watch(model) as captures:
        model(query, other, key)
    assert len(captures) == 2
    for layer in captures:
        assert (layer.weights() == 0).nonzero().tolist() == [[0, 0, 4, 2], [0, 1, 4, 2]]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "llama", "marian", "t5"])
def test_models_of_transformers(name: str, implementation: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    transformers.logging.set_verbosity_error()
    from tiny_models import build_inputs, build_model, list_attentions

    model, inputs = build_model(name), build_inputs(name)
    layers = {
        "bert": ("encoder.layer.1.attention.self", "encoder.layer.1.attention.output.dense"),
        "llama": ("model.layers.1.self_attn", "model.layers.1.self_attn.o_proj"),
        "marian": ("model.decoder.layers.1.encoder_attn", "model.decoder.layers.1.encoder_attn.out_proj"),
        "t5": ("decoder.block.1.layer.1.EncDecAttention", "decoder.block.1.layer.1.EncDecAttention.o"),
    }
    layer, merge = layers[name]
    model.set_attn_implementation(implementation)
    with torch.no_grad(), knock_out(model, {layer: [1, (4, 3)]}), watch(model) as captures:
        without = model(**inputs)
    with torch.no_grad(), knock_out(model, {layer: [1]}), watch(model) as captures_without_head:
        out_without_head = model(**inputs)
    weights = captures[layer].weights()
    assert weights[:, 1].sum() == weights[:, :, 4, 3].sum() == 0
    # Without the head: as if the output projection ignored it.
    dense = model.get_submodule(merge).weight
    width = dense.shape[1] // weights.shape[1]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        dense[:, width : 2 * width] = 0
        expected = model(**inputs, output_attentions=True)
    is_token = inputs["attention_mask"] > 0 if name == "llama" else slice(None)  # the outputs at padding do not matter
    torch.testing.assert_close(out_without_head[0][is_token], expected[0][is_token], atol=1e-5, rtol=1e-4)
    has_keys = captures_without_head[layer].weights().sum(-1) > 0
    expected_weights = list_attentions(expected)[captures.names.index(layer)]
    torch.testing.assert_close(
        captures_without_head[layer].weights()[has_keys], expected_weights[has_keys], atol=1e-5, rtol=0
    )
    assert not torch.allclose(without[0], out_without_head[0])
