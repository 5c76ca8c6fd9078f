"""watch: attention written by hand is what multiplies the values, whatever happens after the softmax."""

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from jumok.errors import InputError
from jumok.look.capture.watch import watch
from jumok.look.capture.weight_tracking.weight_tracker import get_tracker
from jumok.look.views.ablation import knock_out

sys.path.insert(0, str(Path(__file__).parents[1]))

B, H, N, D = 2, 3, 5, 4


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Any:
    yield
    assert not get_tracker().is_active
    assert not get_tracker().tracked_weights
    for name in ("softmax", "log_softmax", "__matmul__", "matmul", "bmm"):
        assert name not in vars(Tensor)
    assert not hasattr(torch.einsum, "__jumok_original__")


class Attention(nn.Module):
    """``compute(self, query, key, value)`` gives the output; it leaves its weights in ``self.weights``."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute, self.heads = compute, H
        self.project, self.dropout = nn.Linear(H * D, 3 * H * D), nn.Dropout(0.3)
        self.mix = nn.Linear(H, H)
        self.weights: Tensor = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.compute(self, query, key, value)

    def expect(self, weights: Tensor) -> None:
        self.weights = weights.detach().clone().float()


class Attend(Attention):
    """The same, in a class whose name says nothing."""


Attend.__name__ = "Block"


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT / D**0.5


MASK = torch.ones(N, N).tril()


def plain(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    self.expect(weights)
    return self.dropout(weights) @ value


def masked_after(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1).masked_fill(MASK == 0, 0)
    self.expect(weights)
    return self.dropout(weights) @ value


def normalised_after(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1) * MASK
    weights = weights / weights.sum(-1, keepdim=True)
    self.expect(weights)
    return self.dropout(weights) @ value


def masked_in_place(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    weights = weights.mul(1)
    weights[..., 1:].mul_(0.5)  # through a view
    self.expect(weights)
    return self.dropout(weights) @ value


def mixed_heads(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.no_grad():
        self.mix.weight.abs_()
        self.mix.bias.abs_()
    weights = scores_of(query, key).softmax(-1)
    weights = self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    self.expect(weights)
    return self.dropout(weights) @ value


def mixed_heads_after_dropout(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.no_grad():
        self.mix.weight.abs_()
        self.mix.bias.abs_()

    def mixed(weights: Tensor) -> Tensor:
        return F.conv2d(weights, self.mix.weight[..., None, None], self.mix.bias)

    weights = scores_of(query, key).softmax(-1)
    with torch.no_grad():
        self.expect(mixed(weights))
    return mixed(self.dropout(weights)) @ value


def other_layout(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    weights = torch.einsum("bqhd,bkhd->bqhk", query, key).softmax(-1)
    self.expect(weights.transpose(1, 2))
    return torch.einsum("bqhk,bkhd->bqhd", self.dropout(weights), value)


def keys_first(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(key, query).softmax(-2)  # (B, H, K, Q)
    self.expect(weights.mT)
    return value.mT @ self.dropout(weights)


def flat(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    weights = torch.softmax(torch.bmm(query, key.mT), 2)
    self.expect(weights.unflatten(0, (B, H)))
    weights = weights.view(B, H, N, N) * MASK
    self.expect(weights)
    return torch.bmm(self.dropout(weights).view(B * H, N, N), value)


def shared_values(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bkd->bhqk", query, key[:, 0]).softmax(-1)
    self.expect(weights)
    return torch.einsum("bhqk,bkd->bhqd", self.dropout(weights), value[:, 0])


def summed(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    self.expect(weights)
    return (self.dropout(weights)[..., None] * value[:, :, None]).sum(3)


def cast(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = F.softmax(scores_of(query, key), dim=-1, dtype=torch.float32).to(query.dtype)
    self.expect(weights)
    return self.dropout(weights) @ value


def from_logarithms(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = F.log_softmax(scores_of(query, key), dim=-1).exp()
    self.expect(weights)
    return self.dropout(weights) @ value


def with_sink(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.cat([scores_of(query, key), query.new_zeros(B, H, N, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :-1]
    self.expect(weights)
    return self.dropout(weights) @ value


def in_two_parts(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    self.expect(weights)
    return weights[..., :2] @ value[..., :2, :] + weights[..., 2:] @ value[..., 2:, :]


def head_by_head(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    self.expect(weights)
    return torch.stack([weights[:, head] @ value[:, head] for head in range(H)], dim=1)


def special(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.special.softmax(scores_of(query, key), dim=-1)
    self.expect(weights)
    return self.dropout(weights) @ value


FORMS = [
    plain, masked_after, normalised_after, masked_in_place, mixed_heads, mixed_heads_after_dropout,
    other_layout, keys_first, flat, shared_values, summed, cast, from_logarithms, with_sink, in_two_parts,
    head_by_head, special,
]  # fmt: skip
MODES = ["eval", "train", "no_grad", "inference", "autocast", "inference autocast"]


class Every(nn.Module):
    """Attention in each of these forms."""

    def __init__(self, kind: type[Attention], forms: list[Any]) -> None:
        super().__init__()
        for form in forms:
            self.add_module(form.__name__, kind(form))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.children()]


def modes(mode: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    if "inference" in mode:
        stack.enter_context(torch.inference_mode())
    if "no_grad" in mode:
        stack.enter_context(torch.no_grad())
    if "autocast" in mode:
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
    return stack


@pytest.mark.parametrize("kind", [Attention, Attend])
@pytest.mark.parametrize("mode", MODES)
def test_the_map_is_what_multiplies_the_values(kind: Any, mode: str) -> None:
    torch.manual_seed(0)
    model, x = Every(kind, FORMS).train(mode == "train"), torch.randn(B, N, H * D)
    tolerance = {"atol": 5e-3, "rtol": 0} if "autocast" in mode else {"atol": 1e-6, "rtol": 1e-5}
    outs, grads = [], []
    with modes(mode):
        for watching in (False, True):
            torch.manual_seed(1)
            with watch(model) if watching else contextlib.nullcontext() as seen:
                outs.append(model(x))
            if outs[-1][0].requires_grad:
                loss = sum(out.float().square().sum() for out in outs[-1])
                parameters = [part.project.weight for part in model.children()]
                grads.append(torch.autograd.grad(loss, parameters))
    for all_of_one, all_of_other in (outs, grads) if grads else (outs,):
        assert all(torch.equal(one, other) for one, other in zip(all_of_one, all_of_other, strict=True))
    assert seen.names == [form.__name__ for form in FORMS]
    assert not seen.missed_layers
    for name, part in model.named_children():
        torch.testing.assert_close(seen[name].weights(), part.weights, msg=name, **tolerance)


@pytest.mark.parametrize(("rows", "length"), [(1, 5), (2, 1), (1, 1)])
def test_axes_of_one(rows: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MASK", torch.ones(length, length).tril())
    model = Every(Attention, [plain, masked_after, other_layout, summed, mixed_heads]).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(rows, length, H * D))
    for name, part in model.named_children():
        assert seen[name].shape == (rows, H, length, length)
        torch.testing.assert_close(seen[name].weights(), part.weights, msg=name)


# -------------------------------------------------------------------------------------- overwritten


def overwritten(when: str) -> Callable[..., Tensor]:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = scores_of(query, key)
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
def test_scores_that_are_overwritten(when: str, inference: bool) -> None:
    model, x = Attention(overwritten(when)), torch.randn(B, N, H * D)
    with torch.inference_mode() if inference else torch.no_grad():
        expected = model(x)
        with watch(model) as seen:
            assert torch.equal(model(x), expected)
    torch.testing.assert_close(seen[0].weights(), model.weights)


def test_scores_and_weights_that_are_overwritten_are_named() -> None:
    model = Attention(overwritten("both"))
    with pytest.raises(InputError, match="its scores and its weights were overwritten"):  # noqa: SIM117
        with torch.no_grad(), watch(model):
            model(torch.randn(B, N, H * D))


# ------------------------------------------------------------------------------------- not followed


def signed(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    return (weights - 0.5 * weights.flip(1)) @ value


def weights_of_weights(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scores_of(query, key).softmax(-1) @ scores_of(key, key).softmax(-1) @ value


def efficient(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.softmax(-1) @ (key.softmax(-2).mT @ value)


def efficient_backwards(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    context = key.softmax(-2).mT @ value / N
    return query.softmax(-1) @ context


def by_hand(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


def of_both_axes(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scores_of(query, key).softmax(-1)
    return weights.transpose(1, 2).flatten(2) @ value.flatten(1, 2)


def thrown_away(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scores_of(query, key).softmax(-1).amax(-1, keepdim=True) * value


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (signed, "some are negative"),
        (weights_of_weights, "several softmaxes|multiplied with weights"),
        (efficient, "over features"),
        (efficient_backwards, "over features|several softmaxes"),
        (by_hand, "Attention attends in an unsupported way"),
        (of_both_axes, "summed over the keys and another axis"),
        (thrown_away, "no product of its softmax with values"),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_not_followed_is_named(form: Any, reason: str, inference: bool) -> None:
    model, x = nn.Sequential(Attention(form), Attention(plain)).eval(), torch.randn(B, N, H * D)
    model[0].register_forward_hook(lambda module, args, out: x)
    mode = torch.inference_mode() if inference else torch.no_grad()
    with mode, pytest.warns(UserWarning, match=reason), watch(model) as seen:
        model(x)
    assert seen.names == ["1"]
    assert list(seen.missed_layers) == ["0"]


def test_a_layer_that_is_seen_in_one_call_and_not_in_another() -> None:
    model, x = Attention(plain).eval(), torch.randn(2, B, N, H * D)
    calls = iter([plain, signed])
    model.compute = lambda *args: next(calls)(*args)
    with torch.no_grad(), pytest.warns(UserWarning, match="some are negative"), watch(model) as seen:
        [model(some) for some in x]
    assert len(seen) == 1
    assert list(seen.missed_layers) == ["Attention"]


# ------------------------------------------------------------------------------------ no attention


class Other(nn.Module):
    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute, self.project = compute, nn.Linear(H * D, N)
        self.table = nn.Parameter(torch.randn(N, H * D))
        self.experts = nn.ModuleList(nn.Linear(H * D, H * D) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def routed(self: Any, x: Tensor) -> Tensor:
    gates = self.project(x).softmax(-1)
    return torch.einsum("bne,bned->bnd", gates, torch.stack([one(x) for one in self.experts], 2))


def routed_to_the_best(self: Any, x: Tensor) -> Tensor:
    values, places = self.project(x).softmax(-1).topk(2, dim=-1)
    every = torch.stack([one(x) for one in self.experts], 2)
    chosen = every.gather(2, places[..., None].expand(*places.shape, H * D))
    return (values[..., None] * chosen).sum(2)


def looked_up(self: Any, x: Tensor) -> Tensor:
    return self.project(x).softmax(-1) @ self.table


def pooled(self: Any, x: Tensor) -> Tensor:
    return (self.project(x)[..., :1].softmax(1) * x).sum(1)


def classified(self: Any, x: Tensor) -> Tensor:
    return self.project(x).log_softmax(-1)


def gated(self: Any, x: Tensor) -> Tensor:
    return x * self.project(x).softmax(-1).sum(-1, keepdim=True)


def sampled(self: Any, x: Tensor) -> Tensor:
    return F.gumbel_softmax(self.project(x), hard=True) @ self.table


def located(self: Any, x: Tensor) -> Tensor:
    """The mean place of a heat map over the positions."""
    return self.project(x).mT.softmax(-1) @ torch.linspace(0, 1, x.shape[1])[:, None]


@pytest.mark.parametrize("form", [routed, routed_to_the_best, looked_up, pooled, classified, gated, sampled, located])
def test_other_softmaxes_are_no_attention(form: Any) -> None:
    model, x = nn.Sequential(Attention(plain), Other(form)).eval(), torch.randn(B, N + 2, H * D)
    model[0].register_forward_hook(lambda module, args, out: x)
    with torch.no_grad(), watch(model) as seen:
        model(x)
    assert seen.names == ["0"]
    assert not seen.missed_layers


# ------------------------------------------------------------------------------------ other modules


def test_a_softmax_in_a_module_of_its_own() -> None:
    class MaskedSoftmax(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return scores.masked_fill(MASK == 0, -torch.inf).softmax(-1)

    class CausalAttention(Attention):
        def __init__(self) -> None:
            super().__init__(lambda self, query, key, value: self.normalise(scores_of(query, key)) @ value)
            self.normalise = MaskedSoftmax()

    model = nn.Sequential(CausalAttention()).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(B, N, H * D))
    assert seen.names == ["0"]
    assert seen[0].is_causal


def test_weights_that_the_module_above_uses() -> None:
    """As many tutorials of translation write it."""

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
            self.told = []
            for _ in range(3):
                weights = self.attention(state, memory)
                self.told.append(weights)
                state = self.cell(torch.bmm(weights[:, None], memory)[:, 0], state)
            return state

    model = Decoder()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(B, D), torch.randn(B, N, D))
    assert seen.names == ["attention"]
    assert [entry.shape for entry in seen] == [(B, 1, 3, N)]
    torch.testing.assert_close(seen[0].weights()[:, 0], torch.stack(model.told, 1))


def test_a_gate_beside_an_attention() -> None:
    """As ConvBERT has it: a kernel of its own for each position."""

    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kernel = self.project(value.transpose(1, 2).flatten(2))[..., :3].softmax(-1)
        windows = F.pad(value, (0, 0, 1, 1)).unfold(2, 3, 1)  # (B, H, N, D, 3)
        return plain(self, query, key, value) + (windows @ kernel[:, None, :, :, None]).squeeze(-1)

    model = nn.Sequential(Attention(compute)).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(B, N, H * D))
    assert seen.names == ["0"]
    assert not seen.missed_layers
    torch.testing.assert_close(seen[0].weights(), model[0].weights)


def test_beside_a_fused_attention() -> None:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return plain(self, query, key, value) + F.scaled_dot_product_attention(key, query, value)

    model = nn.Sequential(Attention(compute)).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(B, N, H * D))
    assert seen.names == ["0"]
    fused, written = seen
    torch.testing.assert_close(written.weights(), model[0].weights)
    assert not torch.allclose(fused.weights(), model[0].weights)


def test_windows_have_axes_of_their_own() -> None:
    """(B, H, windows, queries, keys), as Hiera has it; there are as many heads as rows in the batch."""

    class WindowAttention(nn.Module):
        heads = B

        def forward(self, x: Tensor) -> Tensor:
            query = x.unflatten(1, (3, 2)).unflatten(-1, (self.heads, -1)).permute(0, 3, 1, 2, 4)
            self.weights = (query @ query.mT).softmax(-1)
            return self.weights @ query

    model = WindowAttention()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(B, 6, 4))
    assert seen[0].shape == (3 * B, B, 2, 2)
    torch.testing.assert_close(seen[0].weights().unflatten(0, (B, 3)), model.weights.transpose(1, 2))


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
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(B, N, D))
    assert seen.names == ["0"]
    assert seen[0].kind == "cross"
    torch.testing.assert_close(seen[0].weights()[:, 0], model[0].weights)


class ChannelAttention(nn.Module):
    """As XCiT and DaViT have it: a map from the channels of a head to its channels."""

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
def test_maps_over_channels_are_labelled(kind: Any, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(kind(3, on_grid=len(shape) == 4))
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(shape))
    assert [(entry.kind, entry.shape) for entry in seen] == [("channel", (B, 3, 4, 4))]
    assert not seen[0].is_causal
    torch.testing.assert_close(seen[0].weights(), model[0].weights)
    with pytest.raises(InputError, match="no self-attention"):
        seen.rollout()


def test_as_many_positions_as_channels_of_a_head() -> None:
    for length in (D, D + 1):
        model = Attention(plain).eval()
        with torch.no_grad(), watch(model) as seen:
            model(torch.randn(B, length, H * D))
        assert seen[0].kind == "self"


# ------------------------------------------------------------------------------------------ ablation


@pytest.mark.parametrize("kind", [Attention, Attend])
def test_heads_and_edges_are_taken_out(kind: Any) -> None:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = scores_of(query, key).softmax(-1) * MASK
        self.expect(weights)
        return weights @ value

    model, x = nn.Sequential(kind(compute)), torch.randn(B, N, H * D)
    with torch.no_grad(), knock_out(model, {"0": [1, (0, 4, 2)]}), watch(model) as seen:
        model(x)
    found = seen[0].weights()
    assert found[:, 1].sum() == found[:, 0, 4, 2].sum() == 0
    assert (found[:, 0, 4, 3] > 0).all()
    torch.testing.assert_close(found, model[0].weights)


def test_a_layout_that_cannot_be_changed_is_an_error() -> None:
    model, x = nn.Sequential(Attention(other_layout)).eval(), torch.randn(B, H, H * D)
    with pytest.raises(InputError, match=r"knock_out: the axes of 0's scores"):  # noqa: SIM117
        with torch.no_grad(), knock_out(model, {"0": [1]}):
            model(x)


def test_what_is_no_attention_cannot_be_knocked_out() -> None:
    model, x = nn.Sequential(Attention(plain), Other(routed)).eval(), torch.randn(B, N, H * D)
    model[0].register_forward_hook(lambda module, args, out: x)
    with pytest.raises(InputError, match=r"'1' computed no attention; did you mean '0'"):  # noqa: SIM117
        with torch.no_grad(), knock_out(model, {"1": [0]}):
            model(x)


# ------------------------------------------------------------------------------------------- the mode


def test_a_model_that_raises_leaves_no_mode() -> None:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores_of(query, key).softmax(-1)
        raise RuntimeError("on purpose")

    model = Attention(compute)
    with pytest.raises(RuntimeError, match="on purpose"), watch(model):
        model(torch.randn(B, N, H * D))


def test_a_sparse_product_is_no_failure() -> None:
    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores_of(query, key).softmax(-1)
        return MASK.to_sparse() @ value[0, 0]

    model = nn.Sequential(Attention(compute), Attention(plain)).eval()
    model[0].register_forward_hook(lambda module, args, out: args[0])
    with torch.no_grad(), pytest.warns(UserWarning, match="no product of its softmax"), watch(model) as seen:
        model(torch.randn(B, N, H * D))
    assert seen.names == ["1"]


def test_threads_follow_by_themselves() -> None:
    model, x, both = Attention(masked_after).eval(), torch.randn(B, N, H * D), threading.Barrier(2)
    seen = []

    def look() -> None:
        with torch.no_grad(), watch(model) as mine:
            both.wait()
            model(x)
            both.wait()
        seen.append(mine[0].weights())

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 2
    assert all(torch.allclose(one, model.weights) for one in seen)


def test_a_mode_of_the_model_that_ends_after_a_softmax() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return op(*args, **(kwargs or {}))

    def compute(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with Mode():
            query.softmax(-1).argmax(-1)  # a router
        return plain(self, query, key, value)

    model = Attention(compute).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(B, N, H * D))
    assert _get_current_dispatch_mode() is None
    assert torch.allclose(seen[0].weights(), model.weights)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_model_leaves_no_mode(kind: type[BaseException]) -> None:
    """PyTorch calls no hook of a module that ends in an exception which is no ``Exception``."""

    def interrupted(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores_of(query, key).softmax(-1)
        raise kind

    model, x = Attention(interrupted), torch.randn(B, N, H * D)
    with pytest.raises(kind), watch(model):
        model(x)
    assert _get_current_dispatch_mode() is None


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def test_a_mode_that_ends_before_the_weights_are_used() -> None:
    """Modes end in the order of a stack: ours may not lie on top of one that the model closes first."""

    def in_a_mode(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with _Mode():
            weights = scores_of(query, key).softmax(-1)
        return weights @ value

    model, x = nn.Sequential(Attention(plain), Attend(in_a_mode)).eval(), torch.randn(B, N, H * D)
    model[0].register_forward_hook(lambda module, args, out: out.transpose(1, 2).flatten(2))
    expected = model(x)
    with pytest.warns(UserWarning, match="dispatch mode"), watch(model) as seen:
        assert torch.equal(model(x), expected)
    assert (seen.names, list(seen.missed_layers)) == (["0"], ["1"])
    assert _get_current_dispatch_mode() is None


def test_what_is_lost_in_a_class_without_a_name_is_named() -> None:
    def averaged(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scores_of(query, key).softmax(-1).mean(1, keepdim=True) @ value

    model, x = nn.Sequential(Attention(plain), Attend(averaged)).eval(), torch.randn(B, N, H * D)
    model[0].register_forward_hook(lambda module, args, out: out.transpose(1, 2).flatten(2))
    with pytest.warns(UserWarning, match="go through mean"), watch(model) as seen:
        model(x)
    assert (seen.names, list(seen.missed_layers)) == (["0"], ["1"])
