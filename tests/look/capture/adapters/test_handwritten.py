"""Attention written by hand: the captured weights are those that multiply the values."""

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from jumok.errors import InputError
from jumok.look.capture.captures import Captures
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out

pytestmark = pytest.mark.long


B, H, N, D = 2, 3, 5, 4


class Attention(nn.Module):
    """``compute(self, query, key, value)`` returns the output. ``self.weights`` are the weights to be captured."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute, self.heads = compute, H
        self.project, self.dropout = nn.Linear(H * D, 3 * H * D), nn.Dropout(0.3)
        self.mix = nn.Linear(H, H)
        with torch.no_grad():
            self.mix.weight.abs_()
            self.mix.bias.abs_()
        self.weights: Tensor = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.compute(self, query, key, value)

    def expect(self, weights: Tensor) -> Tensor:
        self.weights = weights.detach().clone().float()
        return weights

    def attend(self, weights: Tensor, value: Tensor) -> Tensor:
        return self.dropout(self.expect(weights)) @ value


class Block(Attention):
    """The same, in a class whose name does not suggest attention."""


def compute_scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT / D**0.5


MASK = torch.ones(N, N).tril()


def standard(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return self.attend(compute_scores(query, key).softmax(-1), value)


def softmax_module(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return self.attend(nn.Softmax(dim=-1)(compute_scores(query, key)), value)


def softmax_twice(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return self.attend(compute_scores(query, key).softmax(-1).softmax(-1), value)


def special_softmax(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return self.attend(torch.special.softmax(compute_scores(query, key), dim=-1), value)


def masked_after_softmax(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return self.attend(compute_scores(query, key).softmax(-1).masked_fill(MASK == 0, 0), value)


def renormalized(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = compute_scores(query, key).softmax(-1) * MASK
    return self.attend(weights / weights.sum(-1, keepdim=True), value)


def masked_in_place(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = compute_scores(query, key).softmax(-1).mul(1)
    weights[..., 1:].mul_(0.5)  # through a view
    return self.attend(weights, value)


def mixed_heads(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = compute_scores(query, key).softmax(-1)
    return self.attend(self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), value)


def mixed_heads_after_dropout(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    def mix_heads(weights: Tensor) -> Tensor:
        return F.conv2d(weights, self.mix.weight[..., None, None], self.mix.bias)

    weights = compute_scores(query, key).softmax(-1)
    with torch.no_grad():
        self.expect(mix_heads(weights))
    return mix_heads(self.dropout(weights)) @ value


def other_layout(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    weights = torch.einsum("bqhd,bkhd->bqhk", query, key).softmax(-1)
    self.expect(weights.transpose(1, 2))
    return torch.einsum("bqhk,bkhd->bqhd", self.dropout(weights), value)


def keys_before_queries(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = compute_scores(key, query).softmax(-2)  # (B, H, K, Q)
    self.expect(weights.mT)
    return value.mT @ self.dropout(weights)


def flattened_heads(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    weights = self.expect(torch.softmax(torch.bmm(query, key.mT), 2).view(B, H, N, N) * MASK)
    return torch.bmm(self.dropout(weights).view(B * H, N, N), value)


def shared_values(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = self.expect(torch.einsum("bhqd,bkd->bhqk", query, key[:, 0]).softmax(-1))
    return torch.einsum("bhqk,bkd->bhqd", self.dropout(weights), value[:, 0])


def summed(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = self.expect(compute_scores(query, key).softmax(-1))
    return (self.dropout(weights)[..., None] * value[:, :, None]).sum(3)


def computed_in_float32(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return self.attend(F.softmax(compute_scores(query, key), dim=-1, dtype=torch.float32).to(query.dtype), value)


def from_logarithms(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return self.attend(F.log_softmax(compute_scores(query, key), dim=-1).exp(), value)


def with_sink(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.cat([compute_scores(query, key), query.new_zeros(B, H, N, 1)], dim=-1)
    return self.attend(scores.softmax(-1)[..., :-1], value)


def in_two_parts(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = self.expect(compute_scores(query, key).softmax(-1))
    return weights[..., :2] @ value[..., :2, :] + weights[..., 2:] @ value[..., 2:, :]


def one_head_at_a_time(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = self.expect(compute_scores(query, key).softmax(-1))
    return torch.stack([weights[:, head] @ value[:, head] for head in range(H)], dim=1)


FORMS = [
    standard, softmax_module, softmax_twice, special_softmax, masked_after_softmax, renormalized, masked_in_place,
    mixed_heads, mixed_heads_after_dropout, other_layout, keys_before_queries, flattened_heads, shared_values, summed,
    computed_in_float32, from_logarithms, with_sink, in_two_parts, one_head_at_a_time,
]  # fmt: skip
MODES = ["eval", "train", "no_grad", "inference", "autocast", "inference autocast"]


class AttentionForms(nn.Module):
    """Attention in several of these forms."""

    def __init__(self, kind: type[Attention], forms: list[Any]) -> None:
        super().__init__()
        for form in forms:
            self.add_module(form.__name__, kind(form))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.children()]


def enter_mode(mode: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    if "inference" in mode:
        stack.enter_context(torch.inference_mode())
    if "no_grad" in mode:
        stack.enter_context(torch.no_grad())
    if "autocast" in mode:
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
    return stack


def capture(model: nn.Module, *args: Tensor) -> Captures:
    with torch.no_grad(), watch(model) as captures:
        model(*args)
    return captures


def stack_on_input(*layers: nn.Module) -> nn.Sequential:
    """Layers that all get the same input: the output of the first is ignored."""
    layers[0].register_forward_hook(lambda module, args, out: args[0])
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("kind", [Attention, Block])
@pytest.mark.parametrize("mode", MODES)
def test_captured_weights_are_those_that_multiply_the_values(kind: Any, mode: str) -> None:
    torch.manual_seed(0)
    model, x = AttentionForms(kind, FORMS).train(mode == "train"), torch.randn(B, N, H * D)
    tolerance = {"atol": 5e-3, "rtol": 0} if "autocast" in mode else {"atol": 1e-6, "rtol": 1e-5}
    outs, grads = [], []
    with enter_mode(mode):
        for watching in (False, True):
            torch.manual_seed(1)
            with watch(model) if watching else contextlib.nullcontext() as captures:
                outs.append(model(x))
            if outs[-1][0].requires_grad:
                loss = sum(out.float().square().sum() for out in outs[-1])
                parameters = [part.project.weight for part in model.children()]
                grads.append(torch.autograd.grad(loss, parameters))
    for plain, watched in (outs, grads) if grads else (outs,):
        assert all(map(torch.equal, plain, watched))
    assert captures.names == [form.__name__ for form in FORMS]
    assert not captures.missed_layers
    for name, part in model.named_children():
        torch.testing.assert_close(captures[name].weights(), part.weights, msg=name, **tolerance)


@pytest.mark.parametrize(("rows", "length"), [(1, 5), (2, 1), (1, 1)])
def test_axes_of_size_one(rows: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MASK", torch.ones(length, length).tril())
    model = AttentionForms(Attention, [standard, masked_after_softmax, other_layout, summed, mixed_heads]).eval()
    captures = capture(model, torch.randn(rows, length, H * D))
    for name, part in model.named_children():
        assert captures[name].shape == (rows, H, length, length)
        torch.testing.assert_close(captures[name].weights(), part.weights, msg=name)


# -------------------------------------------------------------------------------------- overwritten


def overwritten(when: str) -> Callable[..., Tensor]:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = compute_scores(query, key)
        weights = torch.softmax(scores, -1, out=scores if when == "out" else None)
        self.expect(weights)
        if when == "before":
            scores.zero_()
        out = weights @ value
        if when in ("after", "both"):
            scores.zero_()
        if when == "both":
            weights.zero_()
        return out

    return compute


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("when", ["out", "before", "after"])
def test_overwritten_scores(when: str, inference: bool) -> None:
    model, x = Attention(overwritten(when)), torch.randn(B, N, H * D)
    with torch.inference_mode() if inference else torch.no_grad():
        expected = model(x)
        with watch(model) as captures:
            assert torch.equal(model(x), expected)
    torch.testing.assert_close(captures[0].weights(), model.weights)


def test_overwritten_scores_and_weights_are_reported() -> None:
    model = Attention(overwritten("both"))
    with pytest.raises(InputError, match="its scores and its weights were overwritten"):  # noqa: SIM117
        with torch.no_grad(), watch(model):
            model(torch.randn(B, N, H * D))


# -------------------------------------------------------------------------------------- unsupported


def negative_weights(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = compute_scores(query, key).softmax(-1)
    return (weights - 0.5 * weights.flip(1)) @ value


def weights_of_weights(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return compute_scores(query, key).softmax(-1) @ compute_scores(key, key).softmax(-1) @ value


def efficient_attention(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.softmax(-1) @ (key.softmax(-2).mT @ value)


def efficient_attention_keys_first(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    context = key.softmax(-2).mT @ value / N
    return query.softmax(-1) @ context


def without_softmax(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = compute_scores(query, key).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


def summed_over_two_axes(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = compute_scores(query, key).softmax(-1)
    return weights.transpose(1, 2).flatten(2) @ value.flatten(1, 2)


def reduced_to_maximum(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return compute_scores(query, key).softmax(-1).amax(-1, keepdim=True) * value


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (negative_weights, "some are negative"),
        (weights_of_weights, "several softmaxes|multiplied with weights"),
        (efficient_attention, "over features"),
        (efficient_attention_keys_first, "over features|several softmaxes"),
        (without_softmax, "Attention attends in an unsupported way"),
        (summed_over_two_axes, "summed over the keys and another axis"),
        (reduced_to_maximum, "no product of its softmax with values"),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_unsupported_forms_are_reported(form: Any, reason: str, inference: bool) -> None:
    model, x = stack_on_input(Attention(form), Attention(standard)), torch.randn(B, N, H * D)
    mode = torch.inference_mode() if inference else torch.no_grad()
    with mode, pytest.warns(UserWarning, match=reason), watch(model) as captures:
        model(x)
    assert (captures.names, list(captures.missed_layers)) == (["1"], ["0"])


def test_layer_whose_second_call_is_unsupported() -> None:
    model, x = Attention(standard).eval(), torch.randn(2, B, N, H * D)
    calls = iter([standard, negative_weights])
    model.compute = lambda *args: next(calls)(*args)
    with torch.no_grad(), pytest.warns(UserWarning, match="some are negative"), watch(model) as captures:
        _ = [model(batch) for batch in x]
    assert len(captures) == 1
    assert list(captures.missed_layers) == ["Attention"]


# --------------------------------------------------------------------------------- other softmaxes


class OtherSoftmax(nn.Module):
    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute, self.project = compute, nn.Linear(H * D, N)
        self.table = nn.Parameter(torch.randn(N, H * D))
        self.experts = nn.ModuleList(nn.Linear(H * D, H * D) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def route_to_experts(self: Any, x: Tensor) -> Tensor:
    gates = self.project(x).softmax(-1)
    return torch.einsum("bne,bned->bnd", gates, torch.stack([expert(x) for expert in self.experts], 2))


def route_to_best_experts(self: Any, x: Tensor) -> Tensor:
    values, indices = self.project(x).softmax(-1).topk(2, dim=-1)
    outputs = torch.stack([expert(x) for expert in self.experts], 2)
    best = outputs.gather(2, indices[..., None].expand(*indices.shape, H * D))
    return (values[..., None] * best).sum(2)


def read_memory_table(self: Any, x: Tensor) -> Tensor:
    return self.project(x).softmax(-1) @ self.table


def pool_positions(self: Any, x: Tensor) -> Tensor:
    return (self.project(x)[..., :1].softmax(1) * x).sum(1)


def classify(self: Any, x: Tensor) -> Tensor:
    return self.project(x).log_softmax(-1)


def gate(self: Any, x: Tensor) -> Tensor:
    return x * self.project(x).softmax(-1).sum(-1, keepdim=True)


def sample_from_table(self: Any, x: Tensor) -> Tensor:
    return F.gumbel_softmax(self.project(x), hard=True) @ self.table


def locate_in_heat_map(self: Any, x: Tensor) -> Tensor:
    """The mean position of a heat map."""
    return self.project(x).mT.softmax(-1) @ torch.linspace(0, 1, x.shape[1])[:, None]


@pytest.mark.parametrize(
    "form",
    [
        route_to_experts,
        route_to_best_experts,
        read_memory_table,
        pool_positions,
        classify,
        gate,
        sample_from_table,
        locate_in_heat_map,
    ],
)
def test_other_softmaxes_are_not_captured(form: Any) -> None:
    model, x = stack_on_input(Attention(standard), OtherSoftmax(form)), torch.randn(B, N + 2, H * D)
    captures = capture(model, x)
    assert (captures.names, captures.missed_layers) == (["0"], {})


# ------------------------------------------------------------------------------------ other modules


def test_softmax_in_its_own_module() -> None:
    class MaskedSoftmax(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return scores.masked_fill(MASK == 0, -torch.inf).softmax(-1)

    class CausalAttention(Attention):
        def __init__(self) -> None:
            super().__init__(lambda self, query, key, value: self.normalise(compute_scores(query, key)) @ value)
            self.normalise = MaskedSoftmax()

    model = nn.Sequential(CausalAttention()).eval()
    captures = capture(model, torch.randn(B, N, H * D))
    assert captures.names == ["0"]
    assert captures[0].is_causal


def test_weights_used_by_the_calling_module() -> None:
    """Tutorials of translation compute the context in the decoder."""

    class AdditiveAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.score = nn.Linear(2 * D, D), nn.Linear(D, 1)

        def forward(self, state: Tensor, memory: Tensor) -> Tensor:
            both = torch.cat([state[:, None].expand_as(memory), memory], dim=-1)
            return self.score(self.both(both).tanh()).squeeze(-1).softmax(1)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.cell = AdditiveAttention(), nn.GRUCell(D, D)

        def forward(self, state: Tensor, memory: Tensor) -> Tensor:
            self.weights = []
            for _ in range(3):
                weights = self.attention(state, memory)
                self.weights.append(weights)
                state = self.cell(torch.bmm(weights[:, None], memory)[:, 0], state)
            return state

    model = Decoder()
    captures = capture(model, torch.randn(B, D), torch.randn(B, N, D))
    assert captures.names == ["attention"]
    assert [layer.shape for layer in captures] == [(B, 1, 3, N)]
    torch.testing.assert_close(captures[0].weights()[:, 0], torch.stack(model.weights, 1))


def test_dynamic_convolution_beside_attention() -> None:
    """ConvBERT computes a convolution kernel for each position."""

    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kernel = self.project(value.transpose(1, 2).flatten(2))[..., :3].softmax(-1)
        windows = F.pad(value, (0, 0, 1, 1)).unfold(2, 3, 1)  # (B, H, N, D, 3)
        return standard(self, query, key, value) + (windows @ kernel[:, None, :, :, None]).squeeze(-1)

    model = nn.Sequential(Attention(compute)).eval()
    captures = capture(model, torch.randn(B, N, H * D))
    assert (captures.names, captures.missed_layers) == (["0"], {})
    torch.testing.assert_close(captures[0].weights(), model[0].weights)


def test_handwritten_attention_beside_sdpa() -> None:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return standard(self, query, key, value) + F.scaled_dot_product_attention(key, query, value)

    model = nn.Sequential(Attention(compute)).eval()
    captures = capture(model, torch.randn(B, N, H * D))
    assert captures.names == ["0"]
    fused, written = captures
    torch.testing.assert_close(written.weights(), model[0].weights)
    assert not torch.allclose(fused.weights(), model[0].weights)


def test_windows_are_part_of_the_batch() -> None:
    """Weights of Hiera are (B, H, windows, queries, keys). Here, H is equal to B."""

    class WindowAttention(nn.Module):
        heads = B

        def forward(self, x: Tensor) -> Tensor:
            query = x.unflatten(1, (3, 2)).unflatten(-1, (self.heads, -1)).permute(0, 3, 1, 2, 4)
            self.weights = (query @ query.mT).softmax(-1)
            return self.weights @ query

    model = WindowAttention()
    captures = capture(model, torch.randn(B, 6, 4))
    assert captures[0].shape == (3 * B, B, 2, 2)
    torch.testing.assert_close(captures[0].weights().unflatten(0, (B, 3)), model.weights.transpose(1, 2))


def merge_by_permuting(x: Tensor) -> Tensor:
    """(B, N, H · D) to (H · B, N, D), as in early Transformers."""
    return x.unflatten(-1, (H, D)).permute(2, 0, 1, 3).flatten(0, 1)


def merge_by_splitting(x: Tensor) -> Tensor:
    """The same, as in the Set Transformer."""
    return torch.cat(x.split(D, 2))


def divide_by_permuting(x: Tensor) -> Tensor:
    return x.unflatten(0, (H, -1)).permute(1, 2, 0, 3).flatten(2)


def divide_by_splitting(x: Tensor) -> Tensor:
    return torch.cat(torch.add(x, 1).split(len(x) // H), 2)


class InnerAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.weights = (query @ key.mT).softmax(-1)
        return self.weights @ value


class HeadsBeforeBatch(nn.Module):
    def __init__(self, merge: Any, divide: Any, inner: nn.Module | None) -> None:
        super().__init__()
        self.num_heads, self.merge, self.divide, self.inner = H, merge, divide, inner
        self.project = nn.Linear(H * D, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        qkv = [self.merge(part) for part in self.project(x).chunk(3, -1)]
        out: Tensor = self.divide(InnerAttention.forward(self, *qkv) if self.inner is None else self.inner(*qkv))
        return out


@pytest.mark.parametrize("batch_size", [1, 2, H])
@pytest.mark.parametrize("inner", [None, InnerAttention()])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("merge", "divide"),
    [(merge_by_permuting, divide_by_permuting), (merge_by_splitting, divide_by_splitting)],
)
def test_heads_before_the_batch(merge: Any, divide: Any, inner: Any, inference: bool, batch_size: int) -> None:
    """The weights are (H · B, N, N); only the use of the output shows that the heads come first."""
    model, x = nn.Sequential(HeadsBeforeBatch(merge, divide, inner)), torch.randn(batch_size, N, H * D)
    with torch.inference_mode() if inference else torch.no_grad(), watch(model) as captures:
        model(x)
    weights = (inner or model[0]).weights.unflatten(0, (H, batch_size)).transpose(0, 1)
    assert captures[0].shape == (batch_size, H, N, N)
    torch.testing.assert_close(captures[0].weights(), weights)


@pytest.mark.parametrize("batch_size", [1, 2, H])
def test_batch_before_the_heads(batch_size: int) -> None:
    """The same shapes as above in the usual order."""

    def merge(x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, D)).transpose(1, 2).flatten(0, 1)

    def divide(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, H)).transpose(1, 2).flatten(2)

    for inner in (None, InnerAttention()):
        model = nn.Sequential(HeadsBeforeBatch(merge, divide, inner))
        captures = capture(model, torch.randn(batch_size, N, H * D))
        weights = (inner or model[0]).weights.unflatten(0, (batch_size, H))
        torch.testing.assert_close(captures[0].weights(), weights)


def test_learned_queries() -> None:
    """MGP-STR's A3 module: a convolution gives a row of scores for each character."""

    class Characters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.feature = nn.Conv1d(D, 6, 1), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            self.weights = self.score(x.mT).softmax(-1)
            return torch.einsum("bsn,bnd->bsd", self.weights, self.feature(x))

    model = nn.Sequential(Characters())
    captures = capture(model, torch.randn(B, N, D))
    assert captures.names == ["0"]
    assert captures[0].kind == "cross"
    torch.testing.assert_close(captures[0].weights()[:, 0], model[0].weights)


class ChannelAttention(nn.Module):
    """Attention of XCiT and DaViT: from the channels of a head to its channels."""

    def __init__(self, heads: int, on_grid: bool = False) -> None:
        super().__init__()
        self.heads, self.on_grid = heads, on_grid
        self.project = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).mT if self.on_grid else x
        query, key, value = self.project(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 4, 1)
        self.weights = (F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT).softmax(-1)
        y = (self.weights @ value).permute(0, 3, 1, 2).flatten(2)
        return y.mT.reshape(x.shape) if self.on_grid else y


class XCA(ChannelAttention):
    pass


class Mixer(ChannelAttention):
    pass


@pytest.mark.parametrize("kind", [ChannelAttention, XCA, Mixer])
@pytest.mark.parametrize("shape", [(B, 7, 12), (B, 4, 12), (B, 12, 2, 3)])
def test_channel_attention(kind: Any, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(kind(3, on_grid=len(shape) == 4))
    captures = capture(model, torch.randn(shape))
    assert [(layer.kind, layer.shape) for layer in captures] == [("channel", (B, 3, 4, 4))]
    assert not captures[0].is_causal
    torch.testing.assert_close(captures[0].weights(), model[0].weights)
    with pytest.raises(InputError, match="no self-attention"):
        captures.rollout()


def test_as_many_positions_as_channels_per_head() -> None:
    for length in (D, D + 1):
        model = Attention(standard).eval()
        with torch.no_grad(), watch(model) as captures:
            model(torch.randn(B, length, H * D))
        assert captures[0].kind == "self"


# ------------------------------------------------------------------------------------------ ablation


@pytest.mark.parametrize("kind", [Attention, Block])
def test_knock_out_heads_and_edges(kind: Any) -> None:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = compute_scores(query, key).softmax(-1) * MASK
        self.expect(weights)
        return weights @ value

    model, x = nn.Sequential(kind(compute)), torch.randn(B, N, H * D)
    with torch.no_grad(), knock_out(model, {"0": [1, (0, 4, 2)]}), watch(model) as captures:
        model(x)
    weights = captures[0].weights()
    assert weights[:, 1].sum() == weights[:, 0, 4, 2].sum() == 0
    assert (weights[:, 0, 4, 3] > 0).all()
    torch.testing.assert_close(weights, model[0].weights)


def test_knock_out_of_another_layout_is_an_error() -> None:
    model, x = nn.Sequential(Attention(other_layout)).eval(), torch.randn(B, H, H * D)
    with pytest.raises(InputError, match=r"knock_out: the axes of 0's scores"):  # noqa: SIM117
        with torch.no_grad(), knock_out(model, {"0": [1]}):
            model(x)


def test_knock_out_of_heads_before_the_batch_is_an_error() -> None:
    model = nn.Sequential(HeadsBeforeBatch(merge_by_permuting, divide_by_permuting, None)).eval()
    with pytest.raises(InputError, match=r"knock_out: the axes of 0's scores"):  # noqa: SIM117
        with torch.no_grad(), knock_out(model, {"0": [1]}):
            model(torch.randn(2, N, H * D))


def test_knock_out_of_another_softmax_is_an_error() -> None:
    model, x = stack_on_input(Attention(standard), OtherSoftmax(route_to_experts)), torch.randn(B, N, H * D)
    with pytest.raises(InputError, match=r"'1' computed no attention; did you mean '0'"):  # noqa: SIM117
        with torch.no_grad(), knock_out(model, {"1": [0]}):
            model(x)


# ------------------------------------------------------------------------------------ dispatch modes


class EmptyMode(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def test_model_that_raises() -> None:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        compute_scores(query, key).softmax(-1)
        raise RuntimeError("on purpose")

    model = Attention(compute)
    with pytest.raises(RuntimeError, match="on purpose"), watch(model):
        model(torch.randn(B, N, H * D))


def test_sparse_product() -> None:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        compute_scores(query, key).softmax(-1)
        return MASK.to_sparse() @ value[0, 0]

    model = stack_on_input(Attention(compute), Attention(standard))
    with torch.no_grad(), pytest.warns(UserWarning, match="no product of its softmax"), watch(model) as captures:
        model(torch.randn(B, N, H * D))
    assert captures.names == ["1"]


def test_threads_track_weights_independently() -> None:
    model, x, barrier = Attention(masked_after_softmax).eval(), torch.randn(B, N, H * D), threading.Barrier(2)
    captured_weights = []

    def run() -> None:
        with torch.no_grad(), watch(model) as captures:
            barrier.wait()
            model(x)
            barrier.wait()
        captured_weights.append(captures[0].weights())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(captured_weights) == 2
    assert all(torch.allclose(weights, model.weights) for weights in captured_weights)


def test_softmax_inside_a_dispatch_mode_before_attention() -> None:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with EmptyMode():
            query.softmax(-1).argmax(-1)  # a router
        return standard(self, query, key, value)

    model = Attention(compute).eval()
    captures = capture(model, torch.randn(B, N, H * D))
    assert torch.allclose(captures[0].weights(), model.weights)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupted_model(kind: type[BaseException]) -> None:
    """PyTorch calls no hooks of a module that ends with a ``BaseException``."""

    def interrupted(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        compute_scores(query, key).softmax(-1)
        raise kind

    model, x = Attention(interrupted), torch.randn(B, N, H * D)
    with pytest.raises(kind), watch(model):
        model(x)


def test_dispatch_mode_that_ends_before_the_weights_are_used() -> None:
    """Modes form a stack: the mode of the tracker must not be above one that the model leaves first."""

    def in_a_mode(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with EmptyMode():
            weights = compute_scores(query, key).softmax(-1)
        return weights @ value

    model, x = stack_on_input(Attention(standard), Block(in_a_mode)), torch.randn(B, N, H * D)
    expected = model(x)
    with pytest.warns(UserWarning, match="dispatch mode"), watch(model) as captures:
        assert torch.equal(model(x), expected)
    assert (captures.names, list(captures.missed_layers)) == (["0"], ["1"])


def test_unsupported_form_in_a_class_with_another_name_is_reported() -> None:
    def averaged(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compute_scores(query, key).softmax(-1).mean(1, keepdim=True) @ value

    model, x = stack_on_input(Attention(standard), Block(averaged)), torch.randn(B, N, H * D)
    with pytest.warns(UserWarning, match="go through mean"), watch(model) as captures:
        model(x)
    assert (captures.names, list(captures.missed_layers)) == (["0"], ["1"])
