"""Helpers of the tests of the kernel for short sequences.

On a GPU most of their time goes into compiling: once for each dtype, width, number of heads, power of two that
holds the longest sequence, and causal or not. So tests use the same values unless they need others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from triton_testing import DEVICE, INTERPRETED, ON_GPU

from jumok.attention.paths import varlen

DTYPES = [torch.float16, torch.bfloat16]
HALF = torch.bfloat16 if ON_GPU else torch.float16


@pytest.fixture(autouse=True)
def kernel_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attend` uses the kernel in the interpreter too."""
    if INTERPRETED:
        monkeypatch.setattr(varlen, "packed_unsupported_reason", lambda device: None)


def offsets(*lengths: int) -> Tensor:
    """Cumulative lengths, ``cu_seqlens``."""
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def with_gradients(run: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of Σ weight · result."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = run(*leaves)
    grad = torch.linspace(-1, 2, out.numel(), device=out.device).sin().reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def random(heads: int, width: int, *lengths: int, dtype: torch.dtype = HALF) -> list[Tensor]:
    return [torch.randn(1, heads, n, width, device=DEVICE).to(dtype) for n in lengths]
