"""nn.MultiheadAttention and the Transformer layers, on their regular and on their fused paths."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_models import run_watched
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from jumok.look.capture.watch import watch

pytestmark = pytest.mark.long


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
VIEW_OPS = ["detach", "view", "expand", "t", "transpose", "permute", "slice", "select", "unbind", "unsqueeze", "alias"]
PROJECTION_OPS = ("addmm.default", "mm.default", "bitwise_not.default", "_to_copy.default")  # beside a fused layer


class OperatorNames(TorchDispatchMode):
    """The names of the operators that are dispatched, except for views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(op).split(".")[1] not in VIEW_OPS:
            self.names.append(str(op).removeprefix("aten."))
        return op(*args, **(kwargs or {}))


def list_operators(model: nn.Module, *args: Any, **options: Any) -> tuple[list[str], list[str]]:
    """The operators without ``watch``, and with it."""
    with OperatorNames() as plain:
        model(*args, **options)
    with watch(model), OperatorNames() as watched:
        model(*args, **options)
    return plain.names, watched.names


def select_mode(mode: str) -> Any:
    return torch.no_grad() if mode == "fast" else contextlib.nullcontext()


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", ["fast", "eval", "train"])
def test_multihead_attention(mode: str, padded: bool, weights: bool) -> None:
    model = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True).eval()
    x = torch.randn(2, 5, 6)
    options = {"need_weights": weights, "key_padding_mask": PADDING if padded else None}
    _, expected = model(x, x, x, average_attn_weights=False, key_padding_mask=options["key_padding_mask"])
    model.train(mode == "train")
    with select_mode(mode):
        _, captures = run_watched(model, x, x, x, **options)
        plain, watched = list_operators(model, x, x, x, **options)
    if mode == "fast":
        assert plain[-1] == "_native_multi_head_attention.default"
        plain, watched = ([op for op in ops if op not in PROJECTION_OPS] for ops in (plain, watched))
    assert plain == watched
    assert captures.names == ["MultiheadAttention"]
    assert captures[0].kind == "self"
    torch.testing.assert_close(captures[0].weights(), expected)


def test_multihead_attention_with_additional_keys() -> None:
    model = nn.MultiheadAttention(6, 2, add_bias_kv=True, add_zero_attn=True, kdim=4, vdim=3)
    query, key, value = torch.randn(5, 2, 6), torch.randn(7, 2, 4), torch.randn(7, 2, 3)
    mask = torch.randn(5, 7)
    (_, expected), captures = run_watched(model, query, key, value, attn_mask=mask, average_attn_weights=False)
    assert captures[0].shape == (2, 2, 5, 9)  # a learned key, and one of zeros
    assert captures[0].kind == "cross"
    torch.testing.assert_close(captures[0].weights(), expected)
    _, captures = run_watched(model, query, key, value, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(captures[0].weights(), expected)


@contextlib.contextmanager
def record_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the weights that each attention of the model returns on the regular path."""
    weights: dict[str, Tensor] = {}
    parts = {name: part for name, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)}
    for name, part in parts.items():

        def forward(*args: Any, name: str = name, original: Any = part.forward, **options: Any) -> Any:
            options |= {"need_weights": True, "average_attn_weights": False}
            out, weights[name] = original(*args, **options)
            return out, None

        part.forward = forward  # type: ignore[method-assign]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield weights
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        for part in parts.values():
            del part.forward


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("mode", ["fast", "eval", "train"])
def test_transformer_encoders(mode: str, mask: str, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 11, batch_first=True, norm_first=norm_first)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 6)
    options: dict[str, Any] = {}
    if mask in ("padding", "both"):
        options["src_key_padding_mask"] = PADDING
    if mask in ("causal", "both"):
        options["mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with record_weights(model) as expected:
        model(x, **options)
    model.train(mode == "train")
    with select_mode(mode):
        _, captures = run_watched(model, x, **options)
        plain, watched = list_operators(model, x, **options)
    assert plain.count("_transformer_encoder_layer_fwd.default") == (2 if mode == "fast" else 0)
    if mode == "fast":
        plain, watched = ([op for op in ops if "layer_fwd" in op or "nested" in op] for ops in (plain, watched))
    assert plain == watched
    assert captures.names == ["layers.0.self_attn", "layers.1.self_attn"]
    if mode == "train":
        expected.pop("layers.1.self_attn")  # dropout in the first layer is before it
    for name, weights in expected.items():
        rows = 3 if mask == "padding" else 5  # nested sequences have no rows for their padding
        torch.testing.assert_close(captures[name].weights(batch=0), weights[0])
        torch.testing.assert_close(captures[name].weights(batch=1)[:, :rows], weights[1, :, :rows])
        assert captures[name].is_causal == (mask in ("causal", "both"))


def test_transformer_with_encoder_and_decoder() -> None:
    model = nn.Transformer(6, 2, 1, 1, 11, dropout=0.0, batch_first=True).eval()
    source, target = torch.randn(2, 5, 6), torch.randn(2, 3, 6)
    options = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(3), "tgt_is_causal": True}
    with record_weights(model) as expected:
        model(source, target, **options)
    with torch.no_grad():
        _, captures = run_watched(model, source, target, **options)
    assert [(layer.name, layer.kind, layer.is_causal) for layer in captures] == [
        ("encoder.layers.0.self_attn", "self", False),
        ("decoder.layers.0.self_attn", "self", True),
        ("decoder.layers.0.multihead_attn", "cross", False),
    ]
    for name, weights in expected.items():
        torch.testing.assert_close(captures[name].weights(), weights)
