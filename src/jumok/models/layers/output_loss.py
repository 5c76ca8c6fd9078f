"""Output layer and cross-entropy in one function, without holding the logits of a whole batch.

For 14,000 positions and 32,000 words the logits are the largest tensor of a training step, and autograd would
store them, their softmax and its gradient. Here the positions are processed in chunks, and the gradients of a
chunk are computed while its logits exist: nothing is stored, and nothing is computed twice. On a GPU one
kernel does everything between the matrix products: it reads the logits and overwrites them with their
gradient.

Shapes: ``N`` positions, ``D`` width, ``V`` words of the vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from jumok.attention.gpu_support import triton_unsupported_reason
from jumok.batches.tokens import IGNORE, Seq2SeqBatch
from jumok.models.layers.deferred_linear import disable_compile

# Maximum number of logits of a chunk:
MAX_LOGITS = 1 << 26
MAX_LOGITS_ON_CPU = 1 << 22  # so that they stay in the cache
# The kernel needs them once, in low precision. Chunks that stay in a GPU's cache would probably cost more
# than they save: each reads and writes the whole gradient of the weight, and few rows do not fill the GPU in
# the gradient of the hidden states. bench/tune_output.py measures it.
MAX_LOGITS_BY_KERNEL = 1 << 28
ROW_MULTIPLE = 128  # of rows of a chunk: the tile size of matrix products
KERNEL_DEVICES = ("cuda",)  # device types that may have the kernel


def select_labelled(hidden: Tensor, batch: Seq2SeqBatch) -> tuple[Tensor, Tensor]:
    """Select the hidden states ``(B, L, D)`` without padding, ``(N, D)``, and their labels ``(N,)``.

    Padding is known from the lengths on the host, so this does not wait for a GPU. For tokens with static
    shapes the host does not know it: padding is kept, and its label is IGNORE.
    """
    target, hidden, labels = batch.target, hidden.flatten(0, 1), batch.labels.flatten()
    if target.graph_key is not None:
        return hidden, labels
    valid_mask = torch.arange(target.ids.shape[1]) < torch.tensor(target.lengths)[:, None]
    index = valid_mask.flatten().nonzero()[:, 0].to(hidden.device, non_blocking=hidden.is_cuda)
    return hidden.index_select(0, index), labels.index_select(0, index)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``hidden @ weight.T + bias``, summed, with and without label smoothing.

    Both are scalars in float32 or higher. Only the first has a graph. The logits have autocast's dtype if
    autocast is on, and their softmax is computed in float32 or higher.

    Args:
        hidden: ``(N, D)``.
        weight: ``(V, D)``.
        labels: ``(N,)``. Labels that are ``IGNORE`` do not count.
        smoothing: Fraction of each label that is distributed uniformly over all words, as in
            ``F.cross_entropy``.
        bias: ``(V,)``.

    >>> hidden, weight = torch.zeros(2, 5), torch.zeros(7, 5)
    >>> linear_cross_entropy(hidden, weight, torch.tensor([3, IGNORE]))  # log 7
    (tensor(1.9459), tensor(1.9459))
    """
    inputs = (hidden, weight, bias)
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    apply = _apply_uncompiled if hidden.device.type in KERNEL_DEVICES else _LinearCrossEntropyFunction.apply
    return apply(hidden, weight, bias, labels, smoothing, needs_gradient)


@disable_compile
def _apply_uncompiled(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Exclude the function from torch.compile: it consists of a Triton kernel and matrix products."""
    return _LinearCrossEntropyFunction.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


class _LinearCrossEntropyFunction(torch.autograd.Function):
    """Computes both losses, and the gradients of the first while the logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        cast_weight = weight.to(dtype)
        has_kernel = triton_unsupported_reason(cast_weight) is None and len(labels) > 0
        with torch.autocast(device, enabled=False):
            compute = _compute_by_kernel if has_kernel else _compute_in_torch
            total, plain, d_hidden, d_weight, d_bias = compute(
                hidden, cast_weight, bias, labels, smoothing, needs_gradient
            )
        if d_weight is not None:
            if d_bias is not None and bias is not None:
                d_bias = d_bias.to(bias.dtype)
            ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype), d_bias)
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        scaled = (x if x is None else x * gradient.to(x.dtype) for x in (d_hidden, d_weight, d_bias))
        return (*scaled, None, None, None)


class _LinearCrossEntropyResult(NamedTuple):
    """Both losses, and if they are needed the gradients of the first."""

    total: Tensor
    plain: Tensor
    hidden_gradient: Tensor | None = None
    weight_gradient: Tensor | None = None
    bias_gradient: Tensor | None = None


def _compute_in_torch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    needs_gradient: bool,
) -> _LinearCrossEntropyResult:
    dtype, vocab_size = weight.dtype, len(weight)
    sum_dtype = torch.promote_types(dtype, torch.float32)
    total = plain = torch.zeros((), dtype=sum_dtype, device=hidden.device)
    d_hidden: list[Tensor] = []
    d_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_gradient else None
    d_bias = torch.zeros_like(bias, dtype=sum_dtype) if needs_gradient and bias is not None else None
    rows = max(1, (MAX_LOGITS if hidden.is_cuda else MAX_LOGITS_ON_CPU) // vocab_size)
    for chunk, chunk_labels in zip(hidden.split(rows), labels.split(rows), strict=True):
        valid_mask = (chunk_labels != IGNORE)[:, None]  # (n, 1)
        index = chunk_labels[:, None].clamp(min=0)
        chunk = chunk.to(dtype).where(valid_mask, 0)
        logits = chunk @ weight.t()
        if bias is not None:
            logits += bias
        log_probs = logits.log_softmax(-1, dtype=sum_dtype)
        label_log_probs = smoothed = log_probs.gather(1, index)
        if smoothing:
            smoothed = torch.lerp(label_log_probs, log_probs.mean(-1, keepdim=True), smoothing)
        plain = plain - label_log_probs.where(valid_mask, 0).sum()
        total = total - smoothed.where(valid_mask, 0).sum()
        if d_weight is None:
            continue
        # The gradient of the logits: p − (1 − smoothing) · [the label] − smoothing / V.
        d_logits = log_probs.exp_().scatter_(1, index, label_log_probs.exp() + (smoothing - 1))
        if smoothing:
            d_logits.sub_(smoothing / vocab_size)
        if d_bias is not None:
            d_bias += (valid_mask.to(sum_dtype).t() @ d_logits)[0]  # a product makes no masked copy
        d_logits = d_logits.to(dtype)
        d_hidden.append((d_logits @ weight).where(valid_mask, 0).to(hidden.dtype))
        d_weight += d_logits.t() @ chunk
    return _LinearCrossEntropyResult(total, plain, torch.cat(d_hidden) if d_hidden else None, d_weight, d_bias)


def _compute_by_kernel(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    needs_gradient: bool,
) -> _LinearCrossEntropyResult:
    """Compute the same with one kernel between the matrix products."""
    from jumok.models.kernels.cross_entropy import allocate_logits, cross_entropy_

    positions, vocab_size = len(labels), len(weight)
    # The kernel ignores rows without a label, and writes zeros there. But zero times NaN is NaN, so for the
    # gradient of the weight these rows of the hidden states must be zero too.
    inputs = hidden.to(weight.dtype).where((labels != IGNORE)[:, None], 0)
    num_chunks = math.ceil(positions * vocab_size / MAX_LOGITS_BY_KERNEL)
    rows = min(positions, math.ceil(positions / num_chunks / ROW_MULTIPLE) * ROW_MULTIPLE)
    buffer = allocate_logits(rows, vocab_size, weight)
    # Padded to the width of the buffer, because cuBLAS is slow for odd numbers of words.
    padded_weight = F.pad(weight, (0, 0, 0, buffer.shape[1] - vocab_size))
    smoothed, plain = (labels.new_empty(positions, dtype=torch.float32) for _ in range(2))
    d_hidden = d_weight = d_bias = None
    if needs_gradient:
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.empty_like(padded_weight, dtype=torch.float32)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    for start in range(0, positions, rows):
        part = slice(start, start + rows)
        chunk, chunk_labels = inputs[part], labels[part]
        logits = buffer[: len(chunk_labels)]
        torch.mm(chunk, padded_weight.t(), out=logits)
        cross_entropy_(
            logits,
            vocab_size,
            chunk_labels,
            smoothed[part],
            plain[part],
            smoothing=smoothing,
            bias=bias,
            needs_gradient=needs_gradient,
        )
        if d_hidden is None or d_weight is None:
            continue
        d_logits = logits  # overwritten by the kernel
        _matmul_into(d_logits, padded_weight, out=d_hidden[part])
        _matmul_into(d_logits.t(), chunk, out=d_weight, add=start > 0)
        if d_bias is not None:
            d_bias += d_logits[:, :vocab_size].sum(0, dtype=torch.float32)
    if d_weight is not None:
        d_weight = d_weight[:vocab_size]
    return _LinearCrossEntropyResult(smoothed.sum(), plain.sum(), d_hidden, d_weight, d_bias)


def _matmul_into(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """``out = a @ b``, or ``out += a @ b``, rounded only to the dtype of ``out`` if torch supports it."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif out.dtype == torch.float32 and _supports_float32_output(a.dtype, a.device):
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=int(add), out=out)
    elif add:
        out += a @ b
    else:
        out.copy_(a @ b)


@functools.cache
def _supports_float32_output(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of matrices of this dtype can be written in float32. This is found by trying."""
    if device.type != "cuda":
        return False
    matrix, out = torch.ones(8, 8, dtype=dtype, device=device), torch.zeros(8, 8, device=device)
    try:
        torch.addmm(out, matrix, matrix, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return False
    return True
