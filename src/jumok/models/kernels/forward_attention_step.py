"""Forward attention of one step, and its gradient: a kernel each, where plain PyTorch takes ten and more.

    forward     a_n = (b_n + b_(n−1)) · y_n / T,    T the sum of these products; a = b where T is 0
    backward    with e_n = (g_n − Σ g a) / T, bounded:
                                                    dy_n = (b_n + b_(n−1)) · e_n
                                                    db_n = y_n e_n + y_(n+1) e_(n+1)

A program has a row, whole, in registers; rows are short, as texts are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.kernels.additive import disable_compile, forbid_double_backward, launch_options
from jumok.models.tacotron_decoder import MAX_GRADIENT, MIN_TOTAL

MAX_SYMBOLS = 4096  # symbols of a text
GRADIENT_BOUND, MIN_DIVISOR = tl.constexpr(MAX_GRADIENT), tl.constexpr(MIN_TOTAL)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _load_reachable(before_ptr, at, symbol, inside):
    """b_n + b_(n−1)."""
    here = tl.load(before_ptr + at, mask=inside, other=0.0)
    return here, here + tl.load(before_ptr + at - 1, mask=inside & (symbol > 0), other=0.0)


@triton.jit
def _divide_bounded(slope, total):
    """slope / total, within bounds."""
    return tl.minimum(tl.maximum(slope / tl.maximum(total, MIN_DIVISOR), -GRADIENT_BOUND), GRADIENT_BOUND)


@triton.jit
def forward_attention_kernel(weights_ptr, before_ptr, moved_ptr, N, BLOCK: tl.constexpr):
    """Rows of N symbols: where they are after the step."""
    symbol = tl.arange(0, BLOCK)
    inside = symbol < N
    at = tl.program_id(0).to(tl.int64) * N + symbol
    here, reach = _load_reachable(before_ptr, at, symbol, inside)
    reached = reach * tl.load(weights_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(reached, axis=0)
    lost = total < TINY
    moved = tl.where(lost, here, reached / tl.where(lost, 1.0, total))
    tl.store(moved_ptr + at, moved, mask=inside)


@triton.jit
def forward_attention_backward_kernel(
    weights_ptr, before_ptr, moved_ptr, slope_ptr, d_weights_ptr, d_before_ptr, N, BLOCK: tl.constexpr
):
    """Given the slope of where they are."""
    symbol = tl.arange(0, BLOCK)
    inside = symbol < N
    follows = symbol + 1 < N
    at = tl.program_id(0).to(tl.int64) * N + symbol
    _, reach = _load_reachable(before_ptr, at, symbol, inside)
    weights = tl.load(weights_ptr + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(slope_ptr + at, mask=inside, other=0.0)
    total = tl.sum(reach * weights, axis=0)
    mean = tl.sum(slope * tl.load(moved_ptr + at, mask=inside, other=0.0), axis=0)
    lost = total < TINY
    next_weights = tl.load(weights_ptr + at + 1, mask=follows, other=0.0).to(tl.float32)
    next_slope = tl.load(slope_ptr + at + 1, mask=follows, other=0.0)
    e = _divide_bounded(slope - mean, total)
    d_weights = tl.where(lost, 0.0, reach * e)
    given = weights * e + next_weights * _divide_bounded(next_slope - mean, total)
    tl.store(d_weights_ptr + at, d_weights.to(d_weights_ptr.dtype.element_ty), mask=inside)
    tl.store(d_before_ptr + at, tl.where(lost, slope, given), mask=inside)


class _ForwardAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, previous_weights: Tensor) -> Tensor:
        weights, previous_weights = weights.contiguous(), previous_weights.contiguous()
        moved = torch.empty_like(previous_weights)
        forward_attention_kernel[(len(weights),)](
            weights, previous_weights, moved, weights.shape[1], **_get_launch_options(weights)
        )
        ctx.save_for_backward(weights, previous_weights, moved)
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        forbid_double_backward()
        weights, before, moved = ctx.saved_tensors
        gradient, d_weights, d_before = (
            gradient.contiguous(),
            torch.empty_like(weights),
            torch.empty_like(before),
        )
        forward_attention_backward_kernel[(len(weights),)](
            weights,
            before,
            moved,
            gradient,
            d_weights,
            d_before,
            weights.shape[1],
            **_get_launch_options(weights),
        )
        return d_weights, d_before


def _get_launch_options(weights: Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(weights.shape[1])
    return {"BLOCK": block, **launch_options(1 if block <= 256 else 4)}


@disable_compile
def fused_forward_attention(weights: Tensor, previous_weights: Tensor) -> Tensor:
    """The weights ``(B, N)`` float32 of those that are at most one symbol on from ``previous_weights`` ``(B, N)``.

    ``weights`` in bfloat16, float16 or float32, ``previous_weights`` in float32; N is at most ``MAX_SYMBOLS``, neither B nor
    N is 0. Differentiable once.
    """
    with torch.cuda.device_of(weights):
        return cast(Tensor, _ForwardAttentionFunction.apply(weights, previous_weights))
