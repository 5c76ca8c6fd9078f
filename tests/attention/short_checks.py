"""What tests of the kernel for short sequences share: they run it on a GPU, and in Triton's interpreter.

On a GPU most of their time goes into compiling: once for each type, width, number of heads, power of two that
holds the longest sequence, and for causal or not. So tests take the same of these where they need no others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
from jumok.attention.paths import varlen  # noqa: E402

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.gpu
runs_kernels = pytest.mark.filterwarnings("default") if INTERPRETED else pytest.mark.gpu
# The interpreter cuts numbers off when it makes bfloat16 of them, where a GPU rounds.
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
HALF = DTYPES[-1]


@pytest.fixture(autouse=True)
def kernel_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attend` takes the kernel, in the interpreter too."""
    if INTERPRETED:
        monkeypatch.setattr(varlen, "packed_unsupported_reason", lambda device: None)


def edges(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def with_gradients(run: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of Σ weight · result."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = run(*leaves)
    grad = torch.linspace(-1, 2, out.numel(), device=out.device).sin().reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def as_near(ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Ours err at most twice as much as plain PyTorch does in the same precision, or nearly so."""
    for at, (a, b, truth) in enumerate(zip(ours, plain, exact, strict=True)):
        size = truth.norm() + 1e-30
        error, allowed = (((x.double() - truth).norm() / size).item() for x in (a, b))
        assert error <= 2 * allowed + torch.finfo(dtype).eps / 8, f"{at}: {error:.1e}, plain {allowed:.1e}"


def random(heads: int, width: int, *lengths: int, dtype: torch.dtype = HALF) -> list[Tensor]:
    return [torch.randn(1, heads, n, width, device=DEVICE).to(dtype) for n in lengths]


def interpret(tests: str) -> None:
    """Run the tests of a file in Triton's interpreter, in a process of its own."""
    source = Path(__file__).resolve().parents[2] / "src"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu"]
    command = [sys.executable, "-m", "pytest", *options, tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
