"""The kernels of forward attention against plain PyTorch in float64.

As with the other kernels, the tests run on a GPU where there is one, and everywhere in Triton's interpreter,
in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
from jumok.models import tacotron_decoder  # noqa: E402
from jumok.models.kernels import forward_attention_step  # noqa: E402
from jumok.models.tacotron_decoder import MAX_GRADIENT, forward_attention  # noqa: E402

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
# NumPy warns of what is not a number beyond the end of a row.
runs_kernels = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu
ROWS = 5


@pytest.fixture(autouse=True)
def _by_kernel_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(
            tacotron_decoder,
            "triton_unsupported_reason",
            lambda x: "float64" if x.dtype == torch.float64 else None,
        )


def several_steps(weights: Tensor, first: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Where it is after three steps, and the gradients of something of it."""
    given, before = weights.to(dtype).requires_grad_(), first.to(dtype).requires_grad_()
    state, places = before, []
    for each in given.unbind(0):
        state = forward_attention(each, state.float() if dtype != torch.float64 else state)
        places.append(state)
    told = torch.stack(places)
    toward = torch.arange(told.numel(), device=told.device).view_as(told).sin().to(told.dtype)
    return told, *torch.autograd.grad((told * toward).sum(), [given, before])


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symbols", [1, 2, 7, 64, 301])
def test_places_and_slopes(symbols: int, dtype: torch.dtype) -> None:
    weights = (2 * torch.randn(3, ROWS, symbols, device=DEVICE)).softmax(-1).to(dtype)
    first = torch.rand(ROWS, symbols, device=DEVICE).softmax(-1).to(dtype)
    got = several_steps(weights, first, dtype)
    want = several_steps(weights.double(), first.double(), torch.float64)
    assert got[0].dtype == torch.float32
    assert got[1].dtype == got[2].dtype == dtype
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-7)
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    for one, other in zip(got[1:], want[1:], strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.double() / scale, other / scale, **near)


@runs_kernels
def test_who_cannot_go_where_it_is_drawn_stays() -> None:
    first = torch.eye(7, device=DEVICE)[3:5].requires_grad_()
    weights = torch.eye(7, device=DEVICE)[:2].requires_grad_()
    stayed = forward_attention(weights, first)
    assert torch.equal(stayed, first)
    toward = torch.rand(2, 7, device=DEVICE)
    by_weights, by_first = torch.autograd.grad(stayed, [weights, first], toward)
    assert not by_weights.any()
    assert torch.equal(by_first, toward)


@runs_kernels
@pytest.mark.parametrize("little", [1e-3, 1e-12, 1e-36])
def test_who_is_drawn_far_away_has_a_gradient_that_does_not_grow(little: float) -> None:
    """Undone 40 times, a division by 1e-36 would be infinite, and what is nothing times that no number."""
    first = torch.eye(4, device=DEVICE)[:1].requires_grad_()
    weights = torch.tensor([[little, little, 0.0, 1.0]], device=DEVICE, requires_grad=True)
    once = forward_attention(weights, first)
    assert once.tolist() == [[0.5, 0.5, 0.0, 0.0]]
    (slope,) = torch.autograd.grad(once[0, 1], weights)  # (1 − ½) / 2 ε, or the bound
    steep = min(1 / (4 * little), MAX_GRADIENT)
    torch.testing.assert_close(slope.cpu(), steep * torch.tensor([[-1.0, 1.0, 0.0, 0.0]]))
    moved = first
    for _ in range(40):
        moved = forward_attention(weights, moved)
    for slope in torch.autograd.grad(moved[0, 1], [weights, first]):
        assert slope.abs().max() <= 40 * 2 * MAX_GRADIENT


@runs_kernels
def test_any_strides_and_no_second_derivative() -> None:
    at_first = torch.eye(5, device=DEVICE)[0].expand(3, 5)
    weights = torch.rand(5, 3, device=DEVICE).t().softmax(-1).requires_grad_()
    moved = forward_attention(weights, at_first)
    expected = weights[:, :2] / weights[:, :2].sum(-1, keepdim=True)
    torch.testing.assert_close(moved[:, :2], expected)
    assert not moved[:, 2:].any()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(moved.square().sum(), weights, create_graph=True)


@runs_kernels
def test_what_the_kernel_cannot_do_plain_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        forward_attention_step,
        "fused_forward_attention",
        lambda *_: pytest.fail("too long for a row in registers"),
    )
    monkeypatch.setattr(forward_attention_step, "MAX_SYMBOLS", 6)
    even = torch.full((1, 7), 1 / 7, device=DEVICE)
    assert forward_attention(even, torch.eye(7, device=DEVICE)[3:4]).tolist() == [[0, 0, 0, 0.5, 0.5, 0, 0]]
    assert forward_attention(even[:0], even[:0]).shape == (0, 7)


# --- without a GPU ------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["forward_attention_kernel", "forward_attention_backward_kernel"])
def test_the_kernels_compile_for_hopper(name: str, kind: str) -> None:
    """The interpreter lets pass what the compiler does not, and the compiler needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    function = getattr(forward_attention_step, name)
    types = {"weights_ptr": f"*{kind}", "d_weights_ptr": f"*{kind}", "N": "i32", "BLOCK": "constexpr"}
    signature = {argument: types.get(argument, "*fp32") for argument in function.arg_names}
    source = triton.compiler.ASTSource(function, signature, constexprs={"BLOCK": 128})
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options=forward_attention_step.launch_options(1)
    )
    assert "st.global" in compiled.asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(
        [*command, __file__], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
