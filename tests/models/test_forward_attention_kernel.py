"""The kernels of forward attention against plain PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from triton_testing import DEVICE, INTERPRETED, compile_for_hopper, compiles_kernels, runs_kernels

from jumok.models import tacotron_decoder
from jumok.models.kernels import forward_attention_step
from jumok.models.tacotron_decoder import MAX_GRADIENT, forward_attention

pytestmark = pytest.mark.long


ROWS = 5


@pytest.fixture(autouse=True)
def _use_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(
            tacotron_decoder,
            "triton_unsupported_reason",
            lambda x: "float64" if x.dtype == torch.float64 else None,
        )


def run_three_steps(weights: Tensor, first: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The alignments of three steps, and the gradients of a weighted sum of them."""
    weights, first = weights.to(dtype).requires_grad_(), first.to(dtype).requires_grad_()
    state, states = first, []
    for step_weights in weights.unbind(0):
        state = forward_attention(step_weights, state.float() if dtype != torch.float64 else state)
        states.append(state)
    alignments = torch.stack(states)
    grad = torch.arange(alignments.numel(), device=alignments.device).view_as(alignments).sin().to(alignments.dtype)
    return alignments, *torch.autograd.grad((alignments * grad).sum(), [weights, first])


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symbols", [1, 2, 7, 64, 131])
def test_alignments_and_gradients(symbols: int, dtype: torch.dtype) -> None:
    weights = (2 * torch.randn(3, ROWS, symbols, device=DEVICE)).softmax(-1).to(dtype)
    first = torch.rand(ROWS, symbols, device=DEVICE).softmax(-1).to(dtype)
    ours = run_three_steps(weights, first, dtype)
    exact = run_three_steps(weights.double(), first.double(), torch.float64)
    assert ours[0].dtype == torch.float32
    assert ours[1].dtype == ours[2].dtype == dtype
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=1e-7)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    for gradient, expected in zip(ours[1:], exact[1:], strict=True):
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(gradient.double() / scale, expected / scale, **tolerance)


@runs_kernels
def test_the_alignment_stays_if_no_reachable_symbol_has_weight() -> None:
    first = torch.eye(7, device=DEVICE)[3:5].requires_grad_()
    weights = torch.eye(7, device=DEVICE)[:2].requires_grad_()
    alignment = forward_attention(weights, first)
    assert torch.equal(alignment, first)
    grad = torch.rand(2, 7, device=DEVICE)
    d_weights, d_first = torch.autograd.grad(alignment, [weights, first], grad)
    assert not d_weights.any()
    assert torch.equal(d_first, grad)


@runs_kernels
@pytest.mark.parametrize("epsilon", [1e-3, 1e-12, 1e-36])
def test_gradients_are_bounded_if_reachable_symbols_have_little_weight(epsilon: float) -> None:
    """After 40 steps back, unbounded gradients of a division by 1e-36 would be infinite or NaN."""
    first = torch.eye(4, device=DEVICE)[:1].requires_grad_()
    weights = torch.tensor([[epsilon, epsilon, 0.0, 1.0]], device=DEVICE, requires_grad=True)
    once = forward_attention(weights, first)
    assert once.tolist() == [[0.5, 0.5, 0.0, 0.0]]
    (gradient,) = torch.autograd.grad(once[0, 1], weights)  # (1 − ½) / 2 ε, or the bound
    expected = min(1 / (4 * epsilon), MAX_GRADIENT)
    torch.testing.assert_close(gradient.cpu(), expected * torch.tensor([[-1.0, 1.0, 0.0, 0.0]]))
    alignment = first
    for _ in range(40):
        alignment = forward_attention(weights, alignment)
    for gradient in torch.autograd.grad(alignment[0, 1], [weights, first]):
        assert gradient.abs().max() <= 40 * 2 * MAX_GRADIENT


@runs_kernels
def test_strided_inputs_and_no_second_derivative() -> None:
    first = torch.eye(5, device=DEVICE)[0].expand(3, 5)
    weights = torch.rand(5, 3, device=DEVICE).t().softmax(-1).requires_grad_()
    alignment = forward_attention(weights, first)
    expected = weights[:, :2] / weights[:, :2].sum(-1, keepdim=True)
    torch.testing.assert_close(alignment[:, :2], expected)
    assert not alignment[:, 2:].any()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(alignment.square().sum(), weights, create_graph=True)


@runs_kernels
def test_plain_pytorch_serves_long_and_empty_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        forward_attention_step,
        "fused_forward_attention",
        lambda *_: pytest.fail("too long for a row in registers"),
    )
    monkeypatch.setattr(forward_attention_step, "MAX_SYMBOLS", 6)
    uniform = torch.full((1, 7), 1 / 7, device=DEVICE)
    assert forward_attention(uniform, torch.eye(7, device=DEVICE)[3:4]).tolist() == [[0, 0, 0, 0.5, 0.5, 0, 0]]
    assert forward_attention(uniform[:0], uniform[:0]).shape == (0, 7)


# --- without a GPU ------------------------------------------------------------------------------------------


@compiles_kernels
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["forward_attention_kernel", "forward_attention_backward_kernel"])
def test_the_kernels_compile_for_hopper(name: str, dtype: str) -> None:
    types = {"weights_ptr": f"*{dtype}", "d_weights_ptr": f"*{dtype}"}
    kernel, options = getattr(forward_attention_step, name), forward_attention_step.launch_options(1)
    assert "st.global" in compile_for_hopper(kernel, {"BLOCK": 128}, types, options).asm["ptx"]
