"""One step of forward attention, and its gradient: one kernel each, where PyTorch needs more than ten.

::

    forward     a_n = (b_n + b_(n−1)) · y_n / T,    T the sum of these products; a = b if T is 0
    backward    with e_n = (g_n − Σ g a) / T, bounded:
                                                    dy_n = (b_n + b_(n−1)) · e_n
                                                    db_n = y_n e_n + y_(n+1) e_(n+1)

A program holds a whole row in registers. Rows are short, as texts are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.kernels.common import disable_compile, forbid_double_backward, launch_options, next_power_of_2
from jumok.attention.kernels.launcher import launch
from jumok.models.tacotron_decoder import MAX_GRADIENT, MIN_TOTAL

MAX_SYMBOLS = 4096  # of a text
GRADIENT_BOUND, MIN_DIVISOR = tl.constexpr(MAX_GRADIENT), tl.constexpr(MIN_TOTAL)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _load_reachable(previous_ptr, offset, symbol, inside):
    """b_n + b_(n−1)."""
    previous = tl.load(previous_ptr + offset, mask=inside, other=0.0)
    return previous, previous + tl.load(previous_ptr + offset - 1, mask=inside & (symbol > 0), other=0.0)


@triton.jit
def _divide_bounded(gradient, total):
    """gradient / total, within bounds."""
    return tl.minimum(tl.maximum(gradient / tl.maximum(total, MIN_DIVISOR), -GRADIENT_BOUND), GRADIENT_BOUND)


@triton.jit
def forward_attention_kernel(weights_ptr, previous_ptr, output_ptr, N, BLOCK: tl.constexpr):
    """Computes the weights of N symbols after the step, one row per program."""
    symbol = tl.arange(0, BLOCK)
    inside = symbol < N
    offset = tl.program_id(0).to(tl.int64) * N + symbol
    previous, reachable = _load_reachable(previous_ptr, offset, symbol, inside)
    reached = reachable * tl.load(weights_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(reached, axis=0)
    is_zero = total < TINY
    output = tl.where(is_zero, previous, reached / tl.where(is_zero, 1.0, total))
    tl.store(output_ptr + offset, output, mask=inside)


@triton.jit
def forward_attention_backward_kernel(
    weights_ptr, previous_ptr, output_ptr, gradient_ptr, d_weights_ptr, d_previous_ptr, N, BLOCK: tl.constexpr
):
    """Computes the gradients of y and of the previous weights."""
    symbol = tl.arange(0, BLOCK)
    inside = symbol < N
    follows = symbol + 1 < N
    offset = tl.program_id(0).to(tl.int64) * N + symbol
    _, reachable = _load_reachable(previous_ptr, offset, symbol, inside)
    weights = tl.load(weights_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + offset, mask=inside, other=0.0)
    total = tl.sum(reachable * weights, axis=0)
    mean = tl.sum(gradient * tl.load(output_ptr + offset, mask=inside, other=0.0), axis=0)
    is_zero = total < TINY
    next_weights = tl.load(weights_ptr + offset + 1, mask=follows, other=0.0).to(tl.float32)
    next_gradient = tl.load(gradient_ptr + offset + 1, mask=follows, other=0.0)
    e = _divide_bounded(gradient - mean, total)
    d_weights = tl.where(is_zero, 0.0, reachable * e)
    d_previous = weights * e + next_weights * _divide_bounded(next_gradient - mean, total)
    tl.store(d_weights_ptr + offset, d_weights.to(d_weights_ptr.dtype.element_ty), mask=inside)
    tl.store(d_previous_ptr + offset, tl.where(is_zero, gradient, d_previous), mask=inside)


class _ForwardAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, previous_weights: Tensor) -> Tensor:
        weights, previous_weights = weights.contiguous(), previous_weights.contiguous()
        output = torch.empty_like(previous_weights)
        options = _get_launch_options(weights)
        launch(
            forward_attention_kernel, (len(weights),), weights, previous_weights, output, weights.shape[1], **options
        )
        ctx.save_for_backward(weights, previous_weights, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        forbid_double_backward()
        weights, previous_weights, output = ctx.saved_tensors
        gradient = gradient.contiguous()
        d_weights, d_previous = torch.empty_like(weights), torch.empty_like(previous_weights)
        launch(
            forward_attention_backward_kernel,
            (len(weights),),
            weights,
            previous_weights,
            output,
            gradient,
            d_weights,
            d_previous,
            weights.shape[1],
            **_get_launch_options(weights),
        )
        return d_weights, d_previous


def _get_launch_options(weights: Tensor) -> dict[str, Any]:
    block = next_power_of_2(weights.shape[1])
    return {"BLOCK": block, **launch_options(1 if block <= 256 else 4)}


@disable_compile
def fused_forward_attention(weights: Tensor, previous_weights: Tensor) -> Tensor:
    """Compute :func:`jumok.models.tacotron_decoder.forward_attention` for weights ``(B, N)`` on a GPU.

    ``weights`` are bfloat16, float16 or float32, and ``previous_weights`` and the result float32. N is at
    most ``MAX_SYMBOLS``, and neither B nor N is 0. The result is differentiable once.
    """
    return cast(Tensor, _ForwardAttentionFunction.apply(weights, previous_weights))
