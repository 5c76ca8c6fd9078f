"""F.scaled_dot_product_attention: every form of a call."""

from typing import Any

import pytest
import torch
from attention_models import FunctionAttention, causal_mask, random_qkv, reference_weights, run_watched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_sdpa
from torch.utils._python_dispatch import TorchDispatchMode

from jumok.errors import InputError
from jumok.look.capture.watch import watch


def sdpa(**options: Any) -> FunctionAttention:
    return FunctionAttention(F.scaled_dot_product_attention, **options)


def test_layer_has_the_name_of_its_module() -> None:
    model = nn.Module()
    model.attention = sdpa()
    model.forward = lambda *args: model.attention(*args)  # type: ignore[method-assign]
    query, key, value = random_qkv(2, 3)
    _, captures = run_watched(model, query, key, value)
    assert captures.names == ["attention"]
    assert captures["attention"] is captures[0] is captures[-1]
    assert captures[0].shape == (2, 3, 5, 7)
    assert (captures[0].kind, captures[0].is_causal) == ("cross", False)
    torch.testing.assert_close(captures[0].weights(), reference_weights(query, key))
    assert repr(captures) == "1 attention:\n    0 <attention: cross, 2 × 3 × 5 × 7>"
    assert captures[0].query_tokens is captures[0].key_tokens is None


def test_tensors_are_stored_by_reference() -> None:
    query, key, value = random_qkv(2, 3)
    allowed = torch.rand(5, 7) < 0.7
    _, captures = run_watched(sdpa(attn_mask=allowed), query, key, value)
    attention = captures[0].attention
    assert captures.names == ["FunctionAttention"]  # the model itself, which has no name
    assert attention.query.data_ptr() == query.data_ptr()
    assert attention.key.data_ptr() == key.data_ptr()
    assert attention.mask is not None
    assert attention.mask.data_ptr() == allowed.data_ptr()


def build_closure() -> nn.Module:
    attend = F.scaled_dot_product_attention

    class Closure(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return attend(*args)

    return Closure()


class ImportedFunction(nn.Module):
    def forward(self, *args: Tensor) -> Any:
        return imported_sdpa(*args)


class StaticMethod(nn.Module):
    attend = staticmethod(F.scaled_dot_product_attention)

    def forward(self, *args: Tensor) -> Any:
        return self.attend(*args)


def build_compiled() -> nn.Module:
    return FunctionAttention(torch.compile(F.scaled_dot_product_attention, backend="eager"))


@pytest.mark.parametrize("build", [build_closure, ImportedFunction, StaticMethod, sdpa, build_compiled])
def test_function_is_captured_wherever_it_is_held(build: Any) -> None:
    query, key, value = random_qkv(2, 3)
    with torch.no_grad():
        _, captures = run_watched(build(), query, key, value)
    torch.testing.assert_close(captures[0].weights(), reference_weights(query, key))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 5, 3)])
def test_shapes_scales_and_causality(leading: tuple[int, ...], scale: float | None, causal: bool) -> None:
    query, key, value = random_qkv(*leading)
    _, captures = run_watched(sdpa(is_causal=causal, scale=scale), query, key, value)
    expected = reference_weights(query, key, causal_mask(5, 7) if causal else None, scale=scale)
    torch.testing.assert_close(captures[0].weights().reshape(expected.shape), expected)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 1, 7), (2, 3, 5, 7)])
@pytest.mark.parametrize("additive", [False, True])
def test_masks(shape: tuple[int, ...], additive: bool) -> None:
    query, key, value = random_qkv(2, 3)
    allowed = torch.rand(shape) < 0.7
    allowed[..., 0] = True
    bias = torch.randn(shape) if additive else torch.zeros(())
    mask = torch.where(allowed, bias, -torch.inf) if additive else allowed
    _, captures = run_watched(sdpa(attn_mask=mask), query, key, value)
    torch.testing.assert_close(captures[0].weights(), reference_weights(query, key, allowed, bias=bias))


def test_mask_with_more_leading_dimensions() -> None:
    query, key, value = random_qkv(2, 5, 3)
    allowed = torch.rand(5, 1, 5, 7) < 0.7
    allowed[..., 0] = True
    _, captures = run_watched(sdpa(attn_mask=allowed), query, key, value)
    assert captures[0].shape == (10, 3, 5, 7)
    torch.testing.assert_close(captures[0].weights().unflatten(0, (2, 5)), reference_weights(query, key, allowed))


def test_grouped_queries() -> None:
    query, key, value = random_qkv(2, 6, key_heads=2)
    _, captures = run_watched(sdpa(enable_gqa=True), query, key, value)
    torch.testing.assert_close(captures[0].weights(), reference_weights(query, key))


def test_weights_are_those_before_dropout() -> None:
    query, key, value = random_qkv(2, 3)
    out, captures = run_watched(sdpa(dropout_p=0.5), query, key, value)
    assert not torch.allclose(out, reference_weights(query, key) @ value)
    torch.testing.assert_close(captures[0].weights(), reference_weights(query, key))


def test_autocast() -> None:
    query, key, value = random_qkv(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        out, captures = run_watched(sdpa(), query, key, value)
    assert out.dtype == torch.bfloat16
    expected = reference_weights(query.bfloat16().float(), key.bfloat16().float())  # what the kernel got
    torch.testing.assert_close(captures[0].weights(), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_row_log_sum_exp_of_the_kernel_is_stored(causal: bool) -> None:
    query, key, value = random_qkv(2, 3, queries=7)
    with torch.no_grad():
        _, captures = run_watched(sdpa(is_causal=causal), query, key, value)
    scores = query @ key.mT / 2
    scores = scores.masked_fill(~causal_mask(7, 7), -torch.inf) if causal else scores
    assert captures[0].attention.lse is not None
    torch.testing.assert_close(captures[0].attention.lse, scores.logsumexp(-1))


def test_weights_of_large_scores_sum_to_one() -> None:
    query, key, value = random_qkv(2, 3, queries=7)
    query = query * 3000  # scores of some thousands: two orders of summation differ by 1e-3
    with torch.no_grad():
        _, captures = run_watched(sdpa(), query, key, value)
    assert captures[0].attention.lse is None
    weights = captures[0].weights()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 7), atol=1e-6, rtol=0)


def test_gradients_are_equal_and_no_graph_is_stored() -> None:
    qkv = [x.requires_grad_() for x in random_qkv(2, 3)]
    model = sdpa()
    expected = torch.autograd.grad(model(*qkv).square().sum(), qkv)
    with watch(model) as captures:
        gradients = torch.autograd.grad(model(*qkv).square().sum(), qkv)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
    assert not captures[0].attention.query.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    sequences = [torch.randn(n, 3, 4) for n in (5, 2)]
    nested = torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)  # (B, H, j, D)
    model = sdpa()
    with torch.no_grad():
        expected = model(nested, nested, nested)
        with watch(model) as captures:
            out = model(nested, nested, nested)
    assert torch.equal(expected.values(), out.values())
    assert captures[0].shape == (2, 3, 5, 5)
    for row, sequence in enumerate(sequences):
        n, x = len(sequence), sequence.transpose(0, 1)
        torch.testing.assert_close(captures[0].weights(batch=row)[:, :n, :n], reference_weights(x, x))


def test_broadcast_and_empty_calls() -> None:
    query, key, value = random_qkv(1, 3)
    key = key.expand(2, 3, 7, 4)
    _, captures = run_watched(sdpa(), query, key, value)
    torch.testing.assert_close(captures[0].weights(), reference_weights(query.expand(2, 3, 5, 4), key))
    _, captures = run_watched(sdpa(), torch.randn(2, 3, 0, 4), key, value)
    assert captures[0].weights().shape == (2, 3, 0, 7)


def test_transforms_of_functions_are_reported() -> None:
    model = sdpa()
    with pytest.raises(InputError, match=r"FunctionAttention: it ran inside a transform of torch.func"), watch(model):
        torch.vmap(model)(*random_qkv(2, 3))


class OperatorNames(TorchDispatchMode):
    """The names of the attention operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(op):
            self.names.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
def test_gpu_kernels_are_equal_to_the_bit(backend: str, causal: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = (torch.randn(2, 3, 384, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    model = sdpa(is_causal=causal)
    with torch.no_grad(), sdpa_kernel(getattr(SDPBackend, backend)):
        _, captures = run_watched(model, query, key, value)
        with OperatorNames() as plain:
            model(query, key, value)
        with watch(model), OperatorNames() as watched:
            model(query, key, value)
    assert plain.names == watched.names
    scores = query.float() @ key.float().mT / 8
    scores = scores.masked_fill(~causal_mask(384, 384).cuda(), -torch.inf) if causal else scores
    if backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        assert captures[0].attention.lse is not None
        torch.testing.assert_close(captures[0].attention.lse, scores.logsumexp(-1), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(captures[0].weights(), scores.softmax(-1), atol=1e-3, rtol=1e-2)
