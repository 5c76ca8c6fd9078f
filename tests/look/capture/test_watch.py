"""watch: every way of calling attention, the same output and kernels as without, and nothing left behind."""

import contextlib
import doctest
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from jumok.errors import InputError
from jumok.look.capture import patching
from jumok.look.capture.observer import OBSERVERS
from jumok.look.capture.watch import watch

HELD = F.scaled_dot_product_attention


class Ops(TorchDispatchMode):
    """The operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is HELD
    assert isinstance(HELD, types.BuiltinFunctionType)
    assert "softmax" not in vars(torch.Tensor)
    assert all(isinstance(f, types.BuiltinFunctionType) for f in (torch.softmax, torch.bmm, torch.baddbmm))
    assert not hasattr(torch.compile, "__jumok_original__")
    assert not module_hooks._has_any_global_hook()
    assert patching._PATCHED_SLOTS == {}
    assert OBSERVERS.get() == ()


def twice(model: nn.Module, *args: Any, seed: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    """The output of the model, that of the model while it is watched, and what was seen."""
    torch.manual_seed(seed)
    before = model(*args, **options)
    torch.manual_seed(seed)
    with watch(model) as seen:
        watched = model(*args, **options)
    torch.manual_seed(seed)
    after = model(*args, **options)
    for one, other, third in zip(_tensors(before), _tensors(watched), _tensors(after), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    return before, watched, seen


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [x for x in output if isinstance(x, Tensor)]


def softmax(query: Tensor, key: Tensor, allowed: Tensor | None = None, scale: float | None = None) -> Tensor:
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1)


# ------------------------------------------------------------------------ scaled_dot_product_attention


class Attention(nn.Module):
    """Calls what it is given on what it gets."""

    def __init__(self, attend: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.attend, self.options = attend, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return self.attend(query, key, value, **self.options)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Tensor) -> Any:
        return self.attention(*args)


def qkv(*leading: int, queries: int = 5, keys: int = 7, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(*leading, n, width) for n in (queries, keys, keys))  # type: ignore[return-value]


def test_a_call_is_seen_by_the_name_of_its_module() -> None:
    query, key, value = qkv(2, 3)
    model = Block(Attention(lambda *args: F.scaled_dot_product_attention(*args)))
    _, _, seen = twice(model, query, key, value)
    assert len(seen) == 1
    assert seen.names == ["attention"]
    assert seen["attention"] is seen[0] is seen[-1]
    assert seen[0].shape == (2, 3, 5, 7)
    assert (seen[0].kind, seen[0].is_causal) == ("cross", False)
    torch.testing.assert_close(seen[0].weights(), softmax(query, key))
    assert repr(seen) == "1 attention:\n    0 <attention: cross, 2 × 3 × 5 × 7>"
    assert seen[0].query_tokens is seen[0].key_tokens is None


def test_what_is_kept_is_the_models_own() -> None:
    query, key, value = qkv(2, 3)
    allowed = torch.rand(5, 7) < 0.7
    _, _, seen = twice(Attention(F.scaled_dot_product_attention, attn_mask=allowed), query, key, value)
    kept = seen[0].attention
    assert seen.names == ["Attention"]  # the model itself, which has no name
    assert kept.query.data_ptr() == query.data_ptr()
    assert kept.key.data_ptr() == key.data_ptr()
    assert kept.mask is not None
    assert kept.mask.data_ptr() == allowed.data_ptr()


def through_a_closure() -> nn.Module:
    attend = F.scaled_dot_product_attention

    class Closed(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return attend(*args)

    return Closed()


class Imported(nn.Module):
    def forward(self, *args: Tensor) -> Any:
        return imported(*args)


class Static(nn.Module):
    attend = staticmethod(F.scaled_dot_product_attention)

    def forward(self, *args: Tensor) -> Any:
        return self.attend(*args)


@pytest.mark.parametrize(
    "make", [through_a_closure, Imported, Static, lambda: Attention(F.scaled_dot_product_attention)]
)
def test_it_does_not_matter_where_the_function_is_held(make: Callable[[], nn.Module]) -> None:
    query, key, value = qkv(2, 3)
    model = make()
    _, _, seen = twice(model, query, key, value)
    torch.testing.assert_close(seen[0].weights(), softmax(query, key))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 5, 3)])
def test_shapes_scales_and_causality(leading: tuple[int, ...], scale: float | None, causal: bool) -> None:
    query, key, value = qkv(*leading)
    model = Attention(F.scaled_dot_product_attention, is_causal=causal, scale=scale)
    _, _, seen = twice(model, query, key, value)
    allowed = torch.ones(5, 7, dtype=torch.bool).tril() if causal else None
    expected = softmax(query, key, allowed, scale)
    torch.testing.assert_close(seen[0].weights().reshape(expected.shape), expected)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 1, 7), (2, 3, 5, 7)])
@pytest.mark.parametrize("added", [False, True])
def test_masks(shape: tuple[int, ...], added: bool) -> None:
    query, key, value = qkv(2, 3)
    allowed = torch.rand(shape) < 0.7
    allowed[..., 0] = True
    mask = torch.where(allowed, torch.randn(shape), -torch.inf) if added else allowed
    _, _, seen = twice(Attention(F.scaled_dot_product_attention, attn_mask=mask), query, key, value)
    scores = query @ key.mT / 2
    expected = (scores + mask if added else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
    torch.testing.assert_close(seen[0].weights(), expected)


def test_a_mask_with_more_leading_dimensions() -> None:
    query, key, value = qkv(2, 5, 3)
    allowed = torch.rand(5, 1, 5, 7) < 0.7
    allowed[..., 0] = True
    _, _, seen = twice(Attention(F.scaled_dot_product_attention, attn_mask=allowed), query, key, value)
    assert seen[0].shape == (10, 3, 5, 7)
    torch.testing.assert_close(seen[0].weights().unflatten(0, (2, 5)), softmax(query, key, allowed))


def test_grouped_queries() -> None:
    query, (_, key, value) = torch.randn(2, 6, 5, 4), qkv(2, 2)
    _, _, seen = twice(Attention(F.scaled_dot_product_attention, enable_gqa=True), query, key, value)
    torch.testing.assert_close(seen[0].weights(), softmax(query, key.repeat_interleave(3, 1)))


def test_dropout_comes_after_the_weights_that_are_seen() -> None:
    query, key, value = qkv(2, 3)
    before, _, seen = twice(Attention(F.scaled_dot_product_attention, dropout_p=0.5), query, key, value)
    assert not torch.allclose(before, softmax(query, key) @ value)
    torch.testing.assert_close(seen[0].weights(), softmax(query, key))


def test_autocast() -> None:
    query, key, value = qkv(2, 3)
    model = Attention(F.scaled_dot_product_attention)
    with torch.autocast("cpu", torch.bfloat16):
        before, _, seen = twice(model, query, key, value)
    assert before.dtype == torch.bfloat16
    expected = softmax(query.bfloat16().float(), key.bfloat16().float())  # what the kernel got
    torch.testing.assert_close(seen[0].weights(), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_tells_the_sums_of_rows(causal: bool) -> None:
    query, key, value = qkv(2, 3, queries=7)
    with torch.no_grad():
        _, _, seen = twice(Attention(F.scaled_dot_product_attention, is_causal=causal), query, key, value)
    scores = query @ key.mT / 2
    if causal:
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    assert seen[0].attention.lse is not None
    torch.testing.assert_close(seen[0].attention.lse, scores.logsumexp(-1))


def test_gradients_are_the_same_and_no_graph_is_kept() -> None:
    query, key, value = (x.requires_grad_() for x in qkv(2, 3))
    model = Attention(F.scaled_dot_product_attention)
    expected = torch.autograd.grad(model(query, key, value).square().sum(), (query, key, value))
    with watch(model) as seen:
        found = torch.autograd.grad(model(query, key, value).square().sum(), (query, key, value))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not seen[0].attention.query.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    rows = [torch.randn(n, 3, 4) for n in (5, 2)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)  # (B, H, j, D)
    model = Attention(F.scaled_dot_product_attention)
    with torch.no_grad():
        expected = model(nested, nested, nested)
        with watch(model) as seen:
            found = model(nested, nested, nested)
    assert torch.equal(expected.values(), found.values())
    assert seen[0].shape == (2, 3, 5, 5)
    one, two = (x.transpose(0, 1) for x in rows)
    torch.testing.assert_close(seen[0].weights(batch=0), softmax(one, one))
    torch.testing.assert_close(seen[0].weights(batch=1)[:, :2, :2], softmax(two, two))


# -------------------------------------------------------------------------------------------- torch.nn

PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


VIEWS = (
    "detach",
    "view",
    "expand",
    "t",
    "transpose",
    "permute",
    "slice",
    "select",
    "unbind",
    "unsqueeze",
    "alias",
)


def ops(model: nn.Module, *args: Any, **options: Any) -> tuple[list[str], list[str]]:
    """The operations that are dispatched without watch, and with it; but for those that compute nothing."""
    with Ops() as before:
        model(*args, **options)
    with watch(model), Ops() as watched:
        model(*args, **options)
    first, second = (
        [op.removeprefix("aten.") for op in one.names if op.split(".")[1] not in VIEWS] for one in (before, watched)
    )
    return first, second


PROJECTING = {
    "addmm.default",
    "mm.default",
    "bitwise_not.default",
    "_to_copy.default",
}  # beside a fused layer


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", ["fast", "eval", "train"])
def test_multihead_attention(mode: str, padded: bool, weights: bool) -> None:
    model = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True).train(mode == "train")
    x = torch.randn(2, 5, 6)
    options = {"need_weights": weights, "key_padding_mask": PADDING if padded else None}
    model.eval()
    _, expected = model(x, x, x, average_attn_weights=False, key_padding_mask=options["key_padding_mask"])
    model.train(mode == "train")
    with torch.no_grad() if mode == "fast" else contextlib.nullcontext():
        _, _, seen = twice(model, x, x, x, **options)
        before, watched = ops(model, x, x, x, **options)
    if mode == "fast":
        assert before[-1] == "_native_multi_head_attention.default"
        assert [op for op in watched if op not in PROJECTING] == [op for op in before if op not in PROJECTING]
    else:
        assert before == watched
    assert seen.names == ["MultiheadAttention"]
    assert seen[0].kind == "self"
    torch.testing.assert_close(seen[0].weights(), expected)


def test_multihead_attention_with_additions() -> None:
    model = nn.MultiheadAttention(6, 2, add_bias_kv=True, add_zero_attn=True, kdim=4, vdim=3)
    query, key, value = torch.randn(5, 2, 6), torch.randn(7, 2, 4), torch.randn(7, 2, 3)
    mask = torch.randn(5, 7)
    (_, expected), _, seen = twice(model, query, key, value, attn_mask=mask, average_attn_weights=False)
    assert seen[0].shape == (2, 2, 5, 9)  # a learned key, and one of zeros
    assert seen[0].kind == "cross"
    torch.testing.assert_close(seen[0].weights(), expected)
    _, _, seen = twice(model, query, key, value, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(seen[0].weights(), expected)


def unfused(model: nn.Module, *args: Any, **options: Any) -> dict[str, Tensor]:
    """What each attention of the model computes, as its own slow path tells."""
    found: dict[str, Tensor] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.MultiheadAttention):

            def tell(*given: Any, name: str = name, forward: Any = part.forward, **more: Any) -> Any:
                more |= {"need_weights": True, "average_attn_weights": False}
                out, found[name] = forward(*given, **more)
                return out, None

            part.forward = tell  # type: ignore[method-assign]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            model(*args, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        for part in model.modules():
            if isinstance(part, nn.MultiheadAttention):
                del part.forward
    return found


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 11, batch_first=True, **options), 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("mode", ["fast", "eval", "train"])
def test_transformer_encoders(mode: str, mask: str, norm_first: bool) -> None:
    model, x = encoder(norm_first=norm_first).eval(), torch.randn(2, 5, 6)
    options: dict[str, Any] = {}
    if mask in ("padding", "both"):
        options["src_key_padding_mask"] = PADDING
    if mask in ("causal", "both"):
        options["mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = unfused(model, x, **options)
    model.train(mode == "train")
    with torch.no_grad() if mode == "fast" else contextlib.nullcontext():
        _, _, seen = twice(model, x, **options)
        before, watched = ops(model, x, **options)
    assert before.count("_transformer_encoder_layer_fwd.default") == (2 if mode == "fast" else 0)
    if mode == "fast":
        one, other = ([op for op in some if "layer_fwd" in op or "nested" in op] for some in (before, watched))
        assert one == other
    else:
        assert before == watched
    assert seen.names == ["layers.0.self_attn", "layers.1.self_attn"]
    if mode == "train":
        expected.pop("layers.1.self_attn")  # dropout in the first layer is before it
    for name, weights in expected.items():
        found, real = seen[name].weights(), slice(None)
        if mask == "padding":  # nested sequences have no rows for their padding
            torch.testing.assert_close(found[0], weights[0])
            torch.testing.assert_close(found[1, :, :3], weights[1, :, :3])
        else:
            torch.testing.assert_close(found[:, :, real], weights[:, :, real])
        assert seen[name].is_causal == (mask in ("causal", "both"))


def test_a_transformer_with_both_sides() -> None:
    model = nn.Transformer(6, 2, 1, 1, 11, dropout=0.0, batch_first=True).eval()
    source, target = torch.randn(2, 5, 6), torch.randn(2, 3, 6)
    options = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(3), "tgt_is_causal": True}
    with pytest.MonkeyPatch.context():
        expected = unfused(model, source, target, **options)
    with torch.no_grad():
        _, _, seen = twice(model, source, target, **options)
    assert [(entry.name, entry.kind, entry.is_causal) for entry in seen] == [
        ("encoder.layers.0.self_attn", "self", False),
        ("decoder.layers.0.self_attn", "self", True),
        ("decoder.layers.0.multihead_attn", "cross", False),
    ]
    for name, weights in expected.items():
        torch.testing.assert_close(seen[name].weights(), weights)


# ------------------------------------------------------------------------------------- written by hand


class SelfAttention(nn.Module):
    """As many write it."""

    def __init__(self, heads: int, how: str) -> None:
        super().__init__()
        self.n_head, self.how = heads, how
        self.project = nn.Linear(6, 18)
        self.attn_dropout, self.softmax = nn.Dropout(0.5), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        scores = (query @ key.mT / key.shape[-1] ** 0.5).masked_fill(torch.ones(5, 5).triu(1) > 0, -1e9)
        self.told = scores.detach().exp() / scores.detach().exp().sum(-1, keepdim=True)
        match self.how:
            case "module":
                weights = self.softmax(scores)
            case "function":
                weights = F.softmax(scores, dim=-1, dtype=torch.float32)
            case "torch":
                weights = torch.softmax(scores, 3)
            case "flat":
                weights = scores.flatten(0, 1).softmax(-1).view_as(scores)
            case "twice":
                weights = scores.softmax(-1).softmax(-1)
                self.told = weights.detach()
            case _:
                weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        return (self.attn_dropout(weights) @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["module", "function", "torch", "flat", "twice"])
def test_attention_written_out(how: str) -> None:
    model, x = Block(SelfAttention(2, how)), torch.randn(3, 5, 6)
    _, _, seen = twice(model, x)
    assert seen.names == ["attention"]
    assert seen[0].is_causal == (how != "twice")
    torch.testing.assert_close(seen[0].weights(), model.attention.told)


def test_what_cannot_be_seen_is_named() -> None:
    model = Block(SelfAttention(2, ""))
    with (
        pytest.raises(InputError, match=r"attention: .*SelfAttention attends in an unsupported way"),
        watch(model),
    ):
        model(torch.randn(3, 5, 6))


def test_one_layer_of_several_that_cannot_be_seen_is_named() -> None:
    model, x = nn.Sequential(SelfAttention(2, "module"), SelfAttention(2, "")), torch.randn(3, 5, 6)
    with pytest.warns(UserWarning, match="1: SelfAttention attends"), watch(model) as seen:
        model(x)
    assert seen.names == ["0"]
    with pytest.raises(InputError, match="'1' was not captured: SelfAttention"):
        seen["1"]


def test_a_softmax_elsewhere_is_not_attention() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1)

    model = nn.Sequential(Router(), SelfAttention(2, "module"))
    _, _, seen = twice(model, torch.randn(3, 5, 6))
    assert seen.names == ["1"]


# ------------------------------------------------------------------------- kernels of other packages


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **options: Any) -> Any:
    """What the function of that package computes, on (B, length, heads, width)."""
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    here = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    there = torch.arange(key.shape[2])
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    allowed = (there >= here - left) if left >= 0 else torch.ones_like(here - there, dtype=torch.bool)
    allowed = allowed & (there <= here + right) if right >= 0 else allowed
    scores = query @ key.mT * (options.get("softmax_scale") or query.shape[-1] ** -0.5)
    if options.get("softcap"):
        scores = options["softcap"] * (scores / options["softcap"]).tanh()
    weights = torch.special.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
    flash_attn_func.told = weights  # type: ignore[attr-defined]
    return (weights @ value).transpose(1, 2)


def memory_efficient_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return HELD(query, key, value)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of these names, with functions that compute the same."""
    for name, functions in (
        ("flash_attn", [flash_attn_func]),
        ("xformers.ops", [memory_efficient_attention]),
    ):
        module = types.ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (2, 1)}, {"causal": True, "window_size": (2, 0), "softcap": 1.5}],
)
def test_flash_attention_called_by_itself(options: dict[str, Any]) -> None:
    given = torch.randn(2, 5, 6, 4), torch.randn(2, 7, 2, 4), torch.randn(2, 7, 2, 4)
    _, _, seen = twice(Attention(flash_attn_func, **options), *given)
    torch.testing.assert_close(seen[0].weights(), flash_attn_func.told)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("packages")
def test_kernels_that_are_not_read_are_named() -> None:
    class Block(nn.Module):  # whose name tells nothing
        def forward(self, *args: Tensor) -> Any:
            return memory_efficient_attention(*args)

    model = Block()
    with pytest.raises(InputError, match=r"Block: it calls xformers.ops.memory_efficient"), watch(model):
        model(*qkv(2, 3))


# -------------------------------------------------------------------------------------- how it behaves


def test_layers_are_chosen_by_their_names() -> None:
    model, x = encoder().eval(), torch.randn(2, 5, 6)
    for keep in ("layers.1.*", ["layers.1.self_attn"], lambda name: "1" in name):
        with watch(model, layers=keep) as seen:
            model(x)
        assert seen.names == ["layers.1.self_attn"]
    with (
        pytest.raises(InputError, match=r"matches none.*layers.0.self_attn"),
        watch(model, layers="layer.1.*"),
    ):
        model(x)
    with pytest.raises(InputError, match="layers=\\[\\]: expected"), watch(model, layers=[]):
        pass


def test_kept_tensors_may_be_moved() -> None:
    query, key, value = qkv(2, 3)
    mask = torch.rand(5, 7) < 0.9
    model = Attention(F.scaled_dot_product_attention, attn_mask=mask)
    with watch(model, device="meta") as seen:  # any other device; this one is always there
        model(query, key, value)
    kept = seen[0].attention
    assert [x.device.type for x in (kept.query, kept.key, kept.mask) if x is not None] == ["meta"] * 3


def test_every_forward_has_its_entry() -> None:
    model, x = SelfAttention(2, "module"), torch.randn(3, 5, 6)
    with watch(model) as seen:
        model(x)
        model(x[:1])
    assert [entry.shape[0] for entry in seen] == [3, 1]
    assert len(seen.calls) == 2
    with pytest.raises(InputError, match=r"captured 2 times, at \[0, 1\]"):
        seen["SelfAttention"]
    assert seen.find_layers("SelfAttention") == list(seen)
    with pytest.raises(InputError, match="did you mean 'SelfAttention'"):
        seen["SelfAttentoin"]


def test_chunks_of_queries_are_one_entry() -> None:
    def chunked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        masks = torch.ones(5, 7, dtype=torch.bool).tril(2).split(2)
        parts = zip(query.split(2, dim=-2), masks, strict=True)
        return torch.cat([imported(part, key, value, attn_mask=mask) for part, mask in parts], dim=-2)

    query, key, value = qkv(2, 3)
    _, _, seen = twice(Attention(chunked), query, key, value)
    assert len(seen) == 1
    assert len(seen.calls) == 3
    allowed = torch.ones(5, 7, dtype=torch.bool).tril(2)
    torch.testing.assert_close(seen[0].weights(), softmax(query, key, allowed))


class Twice(nn.Module):
    """Attends twice to the same keys, with the same queries or with others."""

    def forward(self, query: Tensor, other: Tensor, key: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(query, key, key)
        return first - F.scaled_dot_product_attention(other, key, 2 * key)


@pytest.mark.parametrize("same", [False, True])
def test_two_attentions_to_the_same_keys_are_two_entries(same: bool) -> None:
    query, key, other = qkv(2, 3, queries=7)
    other = query if same else other
    _, _, seen = twice(Twice(), query, other, key)
    assert [entry.shape for entry in seen] == [(2, 3, 7, 7)] * 2
    torch.testing.assert_close(seen[0].weights(), softmax(query, key))
    torch.testing.assert_close(seen[1].weights(), softmax(other, key))


def test_other_models_are_not_watched() -> None:
    one, other, x = SelfAttention(2, "module"), SelfAttention(2, "module"), torch.randn(3, 5, 6)
    with watch(one) as seen:
        other(x)
        one(x)
        imported(*qkv(2, 3))
    assert len(seen) == 1


def test_two_may_watch_at_once_and_leave_in_any_order() -> None:
    model, x = encoder().eval(), torch.randn(2, 5, 6)
    outer, inner = watch(model), watch(model.layers[1])
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(outer)
        other = inner.__enter__()
        model(x)
        stack.pop_all().close()  # the first leaves first
        model(x)
        inner.__exit__(None, None, None)
    assert seen.names == ["layers.0.self_attn", "layers.1.self_attn"]
    assert other.names == ["self_attn"]
    assert (len(seen), len(other)) == (2, 2)


def test_threads_do_not_see_each_others_calls() -> None:
    model = SelfAttention(2, "module")
    both, seen = threading.Barrier(2), {}

    def look(rows: int) -> None:
        with watch(model) as mine:
            both.wait()
            model(torch.randn(rows, 5, 6))
            both.wait()
        seen[rows] = [entry.shape[0] for entry in mine]

    threads = [threading.Thread(target=look, args=(rows,)) for rows in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {2: [2], 3: [3]}


def test_a_call_in_another_thread_is_told_of() -> None:
    model = SelfAttention(2, "module")
    thread = threading.Thread(target=lambda: model(torch.randn(2, 5, 6)))

    def run() -> None:
        thread.start()
        thread.join()

    with pytest.raises(InputError, match="not called inside the with block, or in another"), watch(model):
        run()


def test_nothing_stays_when_the_model_raises() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SelfAttention(2, "module")

        def forward(self, x: Tensor) -> Tensor:
            self.attention(x)
            raise RuntimeError("on purpose")

    model = Fails()
    with pytest.raises(RuntimeError, match="on purpose"), watch(model) as seen:
        model(torch.randn(2, 5, 6))
    assert len(seen) == 1  # what was seen until then


def test_a_failure_that_the_model_catches_does_not_confuse_names() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.broken, self.attention = nn.Linear(5, 7), SelfAttention(2, "module")

        def forward(self, x: Tensor) -> Any:
            with contextlib.suppress(RuntimeError):
                self.broken(x)
            return self.attention(x)

    _, _, seen = twice(Careful(), torch.randn(2, 5, 6))
    assert seen.names == ["attention"]


def test_a_model_that_was_not_called() -> None:
    with pytest.raises(InputError, match="not called"), watch(nn.Linear(2, 3)):
        pass


def test_a_model_that_does_not_attend() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with (
        pytest.raises(InputError, match=r"no attention in the 3 modules that ran, such as .*Supported"),
        watch(model),
    ):
        model(torch.randn(1, 2))


def test_what_is_no_module() -> None:
    with pytest.raises(InputError, match=r"got SimpleNamespace; give its .model"):  # noqa: SIM117
        with watch(types.SimpleNamespace(model=nn.Linear(2, 3))):  # type: ignore[arg-type]
            pass


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Imported()

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_named() -> None:
    class SdpaAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(torch.jit.script(SdpaAttention()))
    with pytest.raises(InputError, match="0: SdpaAttention is scripted"), watch(model):
        model(torch.randn(2, 3, 5, 4))


def test_compiled_modules_are_refused_with_the_remedy() -> None:
    def compiled_whole() -> nn.Module:
        return torch.compile(encoder())  # type: ignore[return-value]

    def compiled_inside() -> nn.Module:
        model = encoder()
        model.layers[0].compile()
        return model

    def compiled_forward() -> nn.Module:
        model = encoder()
        model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
        return model

    for make, words in (
        (compiled_whole, "the model is compiled.*compiled._orig_mod"),
        (compiled_inside, "layers.0 is compiled.*force_eager"),
        (compiled_forward, "the model is compiled.*force_eager"),
    ):
        with pytest.raises(InputError, match=words), watch(make()):
            pass
    model, x = compiled_inside().eval(), torch.randn(2, 5, 6)
    with torch.compiler.set_stance("force_eager"), watch(model) as seen:  # the remedy
        model(x)
    assert len(seen) == 2
    _, _, seen = twice(compiled_whole()._orig_mod.eval(), x)  # type: ignore[union-attr, operator]
    assert len(seen) == 2


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_wrapper_of_the_model_is_told_of_with_the_remedy() -> None:
    model, x = encoder().eval(), torch.randn(2, 5, 6)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with pytest.raises(InputError, match=r"compiled by torch\.compile.*force_eager"), watch(model):
        compiled(x)
    with torch.compiler.set_stance("force_eager"), watch(model) as seen:  # the remedy
        compiled(x)
    assert len(seen) == 2


def test_what_the_model_overwrites_is_not_shown_wrongly() -> None:
    query, key, value = qkv(2, 3)
    model = Attention(F.scaled_dot_product_attention)
    with watch(model) as seen:
        model(query, key, value)
    seen[0].weights()
    key.mul_(2)
    with pytest.raises(InputError, match="overwritten"):
        seen[0].weights()


@pytest.mark.parametrize("length", [5, 3001])  # the latter with more numbers than are compared
@pytest.mark.parametrize("which", ["query", "key"])
def test_what_is_overwritten_in_inference_mode_is_not_shown_wrongly(which: str, length: int) -> None:
    model = Attention(F.scaled_dot_product_attention)
    with torch.inference_mode():
        query, key, value = qkv(2, 3, queries=length, keys=length)
        key[0, 0, 0, 0] = torch.nan
        with watch(model) as seen:
            model(query, key, value)
        assert seen[0].weights(batch=1, head=1, rows=0).sum() == pytest.approx(1)
        (query if which == "query" else key)[:, 1:] *= 2
    with pytest.raises(InputError, match="overwritten"):
        seen[0].weights(batch=1, head=0, rows=0)


def test_a_buffer_that_is_written_again_and_again_is_copied() -> None:
    room = torch.zeros(1, 2, 4, 3)
    steps = torch.randn(4, 1, 2, 1, 3)
    model = Attention(F.scaled_dot_product_attention)
    with watch(model) as seen:
        for number, step in enumerate(steps):
            room[:, :, number : number + 1] = step
            model(step, room, room)
    for number, entry in enumerate(seen):
        past = torch.cat([*steps[: number + 1], torch.zeros(1, 2, 3 - number, 3)], dim=2)
        torch.testing.assert_close(entry.weights(), softmax(steps[number], past))


def test_a_copied_model_and_a_pickled_function_know_nothing_of_it() -> None:
    import copy
    import pickle

    model, x = SelfAttention(2, "module"), torch.randn(2, 5, 6)
    model.generate = lambda: None  # type: ignore[assignment]
    with watch(model):
        model(x)
        twin = copy.deepcopy(model)
    assert torch.equal(twin.eval()(x), model.eval()(x))
    assert vars(twin).keys() == vars(model).keys()
    assert pickle.loads(pickle.dumps(F.softmax)) is F.softmax


def test_inference_mode() -> None:
    model, x = encoder().eval(), torch.randn(2, 5, 6)
    with torch.inference_mode():
        _, _, seen = twice(model, x)
    torch.testing.assert_close(seen[0].weights().sum(-1), torch.ones(2, 2, 5))
    assert seen.rollout().shape == (5, 5)


def test_a_function_that_was_compiled() -> None:
    query, key, value = qkv(2, 3)
    attend = torch.compile(F.scaled_dot_product_attention, backend="eager")
    with torch.no_grad():
        _, _, seen = twice(Attention(attend), query, key, value)
    torch.testing.assert_close(seen[0].weights(), softmax(query, key))


def test_transforms_of_functions_are_named() -> None:
    query, key, value = qkv(2, 3)
    model = Attention(F.scaled_dot_product_attention)
    with pytest.raises(InputError, match=r"Attention: it ran inside a transform of torch.func"), watch(model):
        torch.vmap(model)(query, key, value)


def test_broadcast_and_empty_calls() -> None:
    query, key, value = qkv(1, 3)
    _, _, seen = twice(Attention(F.scaled_dot_product_attention), query, key.expand(2, 3, 7, 4), value)
    torch.testing.assert_close(seen[0].weights(), softmax(query, key).expand(2, 3, 5, 7))
    none = torch.randn(2, 3, 0, 4)
    _, _, seen = twice(Attention(F.scaled_dot_product_attention), none, key.expand(2, 3, 7, 4), value)
    assert seen[0].weights().shape == (2, 3, 0, 7)


def test_answers_are_those_of_the_views() -> None:
    query, key, value = qkv(2, 3, queries=7)
    _, _, seen = twice(Attention(F.scaled_dot_product_attention), query, key, value)
    entry, weights = seen[0], softmax(query, key)
    torch.testing.assert_close(
        entry.weights(batch=1, head=2, rows=slice(1, 4), cols=[0, 5]), weights[1, 2, 1:4, [0, 5]]
    )
    torch.testing.assert_close(entry.pooled_map(batch=1, head=2, size=7), weights[1, 2])
    torch.testing.assert_close(entry.received_weight(batch=1), weights[1].sum(1))
    torch.testing.assert_close(entry.entropy(batch=1), -(weights[1] * weights[1].log()).sum(-1))
    torch.testing.assert_close(entry.top_keys(2, batch=1)[0], weights[1].topk(2).values)
    assert entry.distance_profile().shape[0] == 3
    torch.testing.assert_close(seen.rollout(batch=1).sum(-1), torch.ones(7))


def test_a_rollout_goes_through_a_shared_layer_as_often_as_it_ran() -> None:
    layer, x = SelfAttention(2, "module").eval(), torch.randn(1, 5, 6)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layer

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + self.attention(x)
            return x

    model = Shared()
    with torch.no_grad(), watch(model) as seen:
        model(x)
    expected = torch.eye(5)
    for entry in seen:
        expected = (entry.weights(batch=0).mean(0) + torch.eye(5)) / 2 @ expected
    torch.testing.assert_close(seen.rollout(), expected)
    with torch.no_grad(), watch(model) as seen:
        model(x)
        model(x)
    with pytest.raises(InputError, match="run the model once inside"):
        seen.rollout()


def test_a_rollout_is_through_one_stack() -> None:
    model = nn.Transformer(6, 2, 2, 1, 11, batch_first=True).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(1, 5, 6), torch.randn(1, 3, 6))
    with pytest.raises(InputError, match=r"one stack.*encoder\.layers\.0"):
        seen.rollout()
    assert seen.rollout(layers="encoder.*").shape == (5, 5)
    with pytest.raises(InputError, match="no self-attention"):
        seen.rollout(layers="nowhere")


@pytest.mark.parametrize("name", ["jumok.look.capture.watch", "jumok.look.views.ablation"])
def test_examples_in_the_documentation(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
def test_every_kernel_of_a_gpu_says_the_same_to_the_bit(backend: str, causal: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = (torch.randn(2, 3, 384, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    model = Attention(F.scaled_dot_product_attention, is_causal=causal)
    with torch.no_grad(), sdpa_kernel(getattr(SDPBackend, backend)):
        _, _, seen = twice(model, query, key, value)
        before, watched = ops(model, query, key, value)
    assert [op for op in before if "attention" in op] == [op for op in watched if "attention" in op]
    scores = query.float() @ key.float().mT / 8
    if causal:
        scores = scores.masked_fill(torch.ones(384, 384, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    if backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        assert seen[0].attention.lse is not None
        torch.testing.assert_close(seen[0].attention.lse, scores.logsumexp(-1), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(seen[0].weights(), scores.softmax(-1), atol=1e-3, rtol=1e-2)
