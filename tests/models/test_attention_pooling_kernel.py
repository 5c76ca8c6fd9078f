"""The kernels that pool packed sequences by attention, against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from triton_testing import DEVICE, INTERPRETED, assert_as_accurate, compile_for_hopper, compiles_kernels, runs_kernels

import jumok
from jumok.batches.text import DocumentBatch
from jumok.batches.tokens import Tokens
from jumok.models import hierarchical
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.models.kernels import attention_pooling
from jumok.models.kernels.attention_pooling import pool_packed_words
from jumok.models.layers.ragged_layout import RaggedLayout

pytestmark = pytest.mark.long

LENGTHS = [3, 0, 70, 1, 33, 32, 0, 2]  # less and more than a tile of words


def build_layout(lengths: Sequence[int]) -> RaggedLayout:
    return RaggedLayout.from_tokens(Tokens.pack([[5] * length for length in lengths]).to(DEVICE))


def pool_plainly(layout: RaggedLayout, lengths: Sequence[int], *inputs: Tensor) -> Tensor:
    """One sequence at a time."""
    states, weight, bias, query = inputs
    indices = layout.token_indices.argsort().split([*lengths])
    rows = []
    for index in indices:
        words = states[index]
        scores = torch.tanh(words @ weight.t() + bias) @ query
        scores = scores if scores.dtype == torch.float64 else scores.float()
        rows.append(scores.softmax(0).to(words.dtype) @ words)
    return torch.stack(rows)


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "widths"), [(torch.float32, (10, 7)), (torch.float16, (16, 40)), (torch.bfloat16, (128, 130))]
)
def test_vectors_and_gradients(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layout = build_layout(LENGTHS)
    shapes = (sum(LENGTHS), widths[0]), (widths[1], widths[0]), (widths[1],), (widths[1],)
    inputs = [torch.randn(shape, device=DEVICE).mul_(0.5).to(dtype) for shape in shapes]
    upstream = torch.randn(len(LENGTHS), widths[0], device=DEVICE)

    def ours(*leaves: Tensor) -> Tensor:
        return pool_packed_words(*leaves, layout.ranks, layout.packed_steps)

    def plain(*leaves: Tensor) -> Tensor:
        return pool_plainly(layout, LENGTHS, *leaves)

    fast = with_gradients(ours, inputs, upstream)
    assert [x.dtype for x in fast] == [dtype] * len(fast)
    exact = with_gradients(plain, [x.double() for x in inputs], upstream)
    assert_as_accurate(fast, exact, with_gradients(plain, inputs, upstream), dtype=dtype)
    assert not fast[0][1].any()


@runs_kernels
def test_only_requested_gradients() -> None:
    torch.manual_seed(1)
    layout = build_layout([2, 4])
    inputs = [torch.randn(shape, device=DEVICE) for shape in ((6, 5), (3, 5), (3,), (3,))]
    upstream = torch.randn(2, 5, device=DEVICE)
    _, *expected = with_gradients(lambda *x: pool_plainly(layout, [2, 4], *x), inputs, upstream)
    for number, gradient in enumerate(expected):
        leaves = [x.clone().requires_grad_(number == index) for index, x in enumerate(inputs)]
        pool_packed_words(*leaves, layout.ranks, layout.packed_steps).backward(upstream)
        torch.testing.assert_close(leaves[number].grad, gradient, rtol=1e-4, atol=1e-5)


@runs_kernels
def test_second_derivatives_raise() -> None:
    layout = build_layout([2, 4])
    states, *others = (torch.randn(shape, device=DEVICE) for shape in ((6, 5), (3, 5), (3,), (3,)))
    out = pool_packed_words(states.requires_grad_(), *others, layout.ranks, layout.packed_steps)
    with pytest.raises(RuntimeError, match="differentiable once"):
        out.sum().backward(create_graph=True)


# --- in the model -------------------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> HierarchicalAttentionNetwork:
    if INTERPRETED:
        monkeypatch.setattr(hierarchical, "triton_unsupported_reason", lambda x: None)
    torch.manual_seed(2)
    config = HierarchicalConfig(embedding_width=7, width=5, attention_width=11, dropout=0.0)
    model = HierarchicalAttentionNetwork(config, vocab_size=11, num_classes=3).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def build_batch() -> DocumentBatch:
    sentences = [[7, 8, 9], [5], [4, 6], [], [10, 9, 8, 7, 6]]
    return DocumentBatch.from_sequences(sentences, sentence_indices=[[0, 1], [2, 3, 4]], labels=[2, 0], packed=True).to(
        torch.device(DEVICE)
    )


@runs_kernels
def test_a_model_is_the_same_with_and_without_the_kernels(
    model: HierarchicalAttentionNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    pool = attention_pooling.pool_packed_words
    monkeypatch.setattr(attention_pooling, "pool_packed_words", lambda *x: calls.append(x) or pool(*x))

    def results() -> list[Tensor]:
        loss = model.loss(build_batch()).total
        return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

    fast = results()
    assert len(calls) == 2  # one of each level
    monkeypatch.setattr(hierarchical, "triton_unsupported_reason", lambda x: "not now")
    for ours, plain in zip(fast, results(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("observer", ["watch", "hook"])
def test_what_observes_the_attention_sees_it(
    model: HierarchicalAttentionNetwork, observer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_pooling, "pool_packed_words", lambda *_: pytest.fail("nothing sees the keys"))
    if observer == "watch":
        with jumok.watch(model) as captures:
            model.logits(build_batch())
        assert len(captures) == 2
    else:
        keys: list[Tensor] = []
        for level in (model.word_level, model.sentence_level):
            level.key.register_forward_hook(lambda module, inputs, output: keys.append(output))
        model.logits(build_batch())
        assert len(keys) == 2


# --- without a GPU ------------------------------------------------------------------------------------------


@compiles_kernels
@pytest.mark.parametrize("name", ["pooling_forward_kernel", "pooling_backward_kernel"])
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_the_kernels_compile_for_hopper(name: str, pointer: str) -> None:
    kernel = getattr(attention_pooling, name)
    constants = attention_pooling._get_constants(128, 100)
    numbers = {"query_ptr": "*fp32", "lse_ptr": "*fp32", "d_query_ptr": "*fp32"}
    numbers |= {"ranks_ptr": "*i32", "packing_ptr": "*i32"}
    types = {name: numbers.get(name, pointer) for name in kernel.arg_names if "_ptr" in name}
    options = {name: constants[name] for name in ("num_warps", "enable_fp_fusion")}
    compile_for_hopper(kernel, constants, types, options)
