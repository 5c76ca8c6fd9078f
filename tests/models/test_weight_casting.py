"""Conversion of all weights of a layer at once, under autocast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from jumok.batches.tokens import Seq2SeqBatch
from jumok.errors import InputError
from jumok.models.layers import weight_casting
from jumok.models.layers.weight_casting import CastingLayer
from jumok.models.transformer import Transformer, TransformerConfig, TransformerEncoderLayer

BATCH = Seq2SeqBatch.from_sequences([[5, 6, 7], [8]], [[9, 10], [11, 5, 6]])


@pytest.fixture(autouse=True)
def convert_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_casting, "FOREACH_DEVICE", "cpu")


def build_model(norm: str = "post") -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        width=12, num_heads=3, feed_forward_width=20, encoder_layers=1, decoder_layers=2, norm=norm, dropout=0.1
    )
    return Transformer(config, 13, 17).train()


def compute_loss(model: Transformer) -> Tensor:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        return model.loss(BATCH).total


def compute_gradients(model: Transformer) -> dict[str, Tensor]:
    loss = compute_loss(model)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True))}


def iter_nodes(root: Node | None) -> Iterator[Node]:
    seen, pending = set(), [root]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [child for child, _ in node.next_functions]
            yield node


def find_separate_casts(model: Transformer) -> set[str]:
    """Return the parameters of which autocast converted each by itself."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[child.variable]  # type: ignore[attr-defined]
        for node in iter_nodes(compute_loss(model).grad_fn)
        if node.name() == "ToCopyBackward0"
        for child, _ in node.next_functions
        if child is not None and child.name() == "torch::autograd::AccumulateGrad"
    }


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_loss_and_gradients_are_those_of_autocast(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(norm)
    results = compute_gradients(model)
    monkeypatch.setattr(weight_casting, "_find_uncast_weights", lambda layer: [])
    for name, expected in compute_gradients(model).items():
        assert results[name].dtype == expected.dtype == torch.float32, name
        assert torch.equal(results[name], expected), name


def test_no_weight_of_a_layer_is_converted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model()
    assert not find_separate_casts(model)
    monkeypatch.setattr(weight_casting, "_find_uncast_weights", lambda layer: [])
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert find_separate_casts(model) == {f"{name}.{kind}" for name in linear for kind in ("weight", "bias")}


def test_afterwards_the_layer_holds_its_parameters() -> None:
    model = build_model()
    before = dict(model.named_parameters())
    compute_loss(model)
    layer: TransformerEncoderLayer = model.encoder[0]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="mask"):
        layer(torch.zeros(2, 3, 12), torch.zeros(2, 3, 12), "no mask")
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_frozen_weights_get_no_gradient() -> None:
    model = build_model()
    expected = compute_gradients(model)
    frozen = model.encoder[0].feed_forward.widen
    frozen.requires_grad_(False)
    compute_loss(model).backward()
    assert frozen.weight.grad is None
    assert frozen.bias.grad is None
    for name, parameter in model.named_parameters():
        if not name.startswith("encoder.0.feed_forward.widen"):
            assert torch.equal(cast(Tensor, parameter.grad), expected[name]), name


class TanhSublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class TanhLayer(CastingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.sublayer = TanhSublayer()

    def forward(self, x: Tensor) -> Tensor:
        return self.sublayer(x)  # type: ignore[no-any-return]


def test_second_derivatives_are_those_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = TanhLayer(), torch.randn(2, 3)
    parameters = list(layer.parameters())

    def compute_second_derivatives() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            total = layer(x).float().square().sum()
        first = torch.autograd.grad(total, parameters, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), parameters)

    results = compute_second_derivatives()
    monkeypatch.setattr(weight_casting, "_find_uncast_weights", lambda layer: [])
    for result, expected in zip(results, compute_second_derivatives(), strict=True):
        assert result.any()
        torch.testing.assert_close(result, expected)


def test_compiled_sublayers_are_left_to_autocast() -> None:
    model = build_model()
    model.compile(backend="eager")
    layer = model.encoder[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert not weight_casting._find_uncast_weights(layer)
        assert weight_casting._find_uncast_weights(build_model().encoder[0])


def test_on_a_cpu_autocast_converts_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert find_separate_casts(build_model())


@pytest.mark.gpu
def test_on_a_gpu_the_results_are_those_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    batch = BATCH.to("cuda")
    model = build_model().cuda()
    parameters = list(model.parameters())

    def compute_on_gpu() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16):
            assert bool(weight_casting._find_uncast_weights(model.encoder[0])) == converts
            total = model.loss(batch).total
        return total.detach(), *torch.autograd.grad(total, parameters)

    converts = True
    results = compute_on_gpu()
    converts = False
    monkeypatch.setattr(weight_casting, "_find_uncast_weights", lambda layer: [])
    for result, expected in zip(results, compute_on_gpu(), strict=True):
        torch.testing.assert_close(result, expected)  # the gradients of embeddings are summed in any order
