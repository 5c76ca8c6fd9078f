"""Helpers that the kernels share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter runs no inline assembly
LOG2_E = math.log2(math.e)  # exp(x) = exp2(LOG2_E · x)


@triton.jit
def matmul(a, b):
    """a @ b of two tiles, in float32. For float32 inputs, three tensor-core products are nearly exact."""
    if not ON_GPU:  # the interpreter treats bfloat16 as integers here
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


def launch_options(num_warps: int, num_stages: int | None = None, max_registers: int | None = None) -> dict[str, Any]:
    """Return compiler options. Multiplications and additions are fused, on which the speed depends.

    Args:
        num_warps: warps per program.
        num_stages: tiles that are loaded ahead. Default: Triton's.
        max_registers: registers per thread at most. Default: no limit.
    """
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": True}
    if num_stages is not None:
        options["num_stages"] = num_stages
    if max_registers is not None and not triton.knobs.runtime.interpret:
        options["maxnreg"] = max_registers
    return options


def make_rows_contiguous(x: Tensor) -> Tensor:
    """Copy ``x`` if its last dimension is not contiguous. The kernels support any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Not triton.cdiv and triton.next_power_of_2, which take 5 µs on the host.
def divide_up(size: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-size // divisor)


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple that is at least ``size``."""
    return -(-size // multiple) * multiple


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is at least ``size``, and at least 1."""
    return 1 << max(0, size - 1).bit_length()


def pad_width(width: int) -> int:
    """Return the width of the tile for vectors of this width: a power of two, at least 16."""
    return max(16, next_power_of_2(width))


def disable_compile(function: FunctionT) -> FunctionT:
    """Exclude a function from ``torch.compile``: its kernels are already compiled."""
    return cast(FunctionT, torch.compiler.disable(function))


def forbid_double_backward() -> None:
    """Raise if the calling backward pass is itself differentiated: it would be treated as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "these kernels are differentiable once, and create_graph=True requires a second derivative: "
            "convert to float64, which runs in plain PyTorch, or omit create_graph"
        )
