"""From a decoder's hidden states to its loss, without ever holding the logits of a whole batch.

For 14,000 places and 32,000 words the logits are the largest tensor of a training step, and autograd would
keep them, their softmax and its gradient. Here some places are worked on at a time, and their share of the
gradients is computed while their logits are at hand: nothing is kept, and nothing computed twice. On a GPU
one kernel does all that lies between the products: it reads the logits, and leaves their gradient in place.

Shapes: ``N`` places, ``D`` width, ``V`` words of the vocabulary.
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

__all__ = ["linear_cross_entropy", "select_labelled"]

MAX_LOGITS = 1 << 26  # logits held at one time, …
MAX_LOGITS_ON_CPU = 1 << 22  # … and where they should stay in the cache
# With the kernel, which holds them once, in low precision. By estimate, pieces that stay in a GPU's cache
# cost more than they save: each reads and writes the whole gradient of the weight, and few rows do not fill
# the GPU in the gradient of the hidden states.
# bench/tune_output.py measures it.
MAX_LOGITS_BY_KERNEL = 1 << 28
ROW_MULTIPLE = 128  # pieces have a multiple of so many: what a product's tile has
KERNEL_DEVICES = ("cuda",)  # the types of devices that may have them


def select_labelled(hidden: Tensor, batch: Seq2SeqBatch) -> tuple[Tensor, Tensor]:
    """Of hidden states ``(B, L, D)``, those with a label that counts, ``(N, D)``, and these labels ``(N,)``.

    Where padding is comes from the lengths on the host, so that no GPU is waited for. Tokens that are alike
    to others do not tell: there padding is carried along, and its label is IGNORE.
    """
    target, hidden, labels = batch.target, hidden.flatten(0, 1), batch.labels.flatten()
    if target.graph_key is not None:
        return hidden, labels
    real = torch.arange(target.ids.shape[1]) < torch.tensor(target.lengths)[:, None]
    places = real.flatten().nonzero()[:, 0].to(hidden.device, non_blocking=hidden.is_cuda)
    return hidden.index_select(0, places), labels.index_select(0, places)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``hidden @ weight.T + bias`` and the labels, summed: label-smoothed, and plain.

    Both are numbers in at least float32. Only the first has a graph. The logits are in autocast's type, if it
    is on, and their softmax in at least float32.

    Args:
        hidden: ``(N, D)``.
        weight: ``(V, D)``.
        labels: ``(N,)``; those that are ``IGNORE`` do not count.
        smoothing: this share of each label is spread over all words evenly, as in ``F.cross_entropy``.
        bias: ``(V,)``.

    >>> hidden, weight = torch.zeros(2, 5), torch.zeros(7, 5)
    >>> smoothed_loss(hidden, weight, torch.tensor([3, IGNORE]))  # log 7
    (tensor(1.9459), tensor(1.9459))
    """
    inputs = (hidden, weight, bias)
    learning = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    work = _apply_uncompiled if hidden.device.type in KERNEL_DEVICES else _LinearCrossEntropyFunction.apply
    return work(hidden, weight, bias, labels, smoothing, learning)


@disable_compile
def _apply_uncompiled(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Keep torch.compile out: it would find a kernel that is compiled already, and products."""
    return _LinearCrossEntropyFunction.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


class _LinearCrossEntropyFunction(torch.autograd.Function):
    """The two sums, and while the logits are there, the gradients of the first."""

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
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        narrow = weight.to(low)
        by_kernel = triton_unsupported_reason(narrow) is None and len(labels) > 0
        with torch.autocast(device, enabled=False):
            work = _compute_by_kernel if by_kernel else _compute_in_torch
            total, plain, by_hidden, by_weight, by_bias = work(
                hidden, narrow, bias, labels, smoothing, needs_gradient
            )
        if by_weight is not None:
            if by_bias is not None and bias is not None:
                by_bias = by_bias.to(bias.dtype)
            ctx.save_for_backward(by_hidden, by_weight.to(weight.dtype), by_bias)
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        scaled = (x if x is None else x * gradient.to(x.dtype) for x in (hidden, weight, bias))
        return (*scaled, None, None, None)


class _LinearCrossEntropyResult(NamedTuple):
    """What comes of the logits: the two sums and, if they are wanted, the gradients of the first."""

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
    low, words = weight.dtype, len(weight)
    high = torch.promote_types(low, torch.float32)
    total = plain = torch.zeros((), dtype=high, device=hidden.device)
    by_hidden: list[Tensor] = []
    by_weight = torch.zeros_like(weight, dtype=high) if needs_gradient else None
    by_bias = torch.zeros_like(bias, dtype=high) if needs_gradient and bias is not None else None
    rows = max(1, (MAX_LOGITS if hidden.is_cuda else MAX_LOGITS_ON_CPU) // words)
    for here, said in zip(hidden.split(rows), labels.split(rows), strict=True):
        counts = (said != IGNORE)[:, None]  # (n, 1)
        said = said[:, None].clamp(min=0)
        here = here.to(low).where(counts, 0)
        logits = here @ weight.t()
        if bias is not None:
            logits += bias
        log_p = logits.log_softmax(-1, dtype=high)
        right = smoothed = log_p.gather(1, said)
        if smoothing:
            smoothed = torch.lerp(right, log_p.mean(-1, keepdim=True), smoothing)
        plain = plain - right.where(counts, 0).sum()
        total = total - smoothed.where(counts, 0).sum()
        if by_weight is None:
            continue
        # The gradient of the logits: p − (1 − smoothing) · [the label] − smoothing / V.
        slope = log_p.exp_().scatter_(1, said, right.exp() + (smoothing - 1))
        if smoothing:
            slope.sub_(smoothing / words)
        if by_bias is not None:
            by_bias += (counts.to(high).t() @ slope)[0]  # a product: it copies nothing
        slope = slope.to(low)
        by_hidden.append((slope @ weight).where(counts, 0).to(hidden.dtype))
        by_weight += slope.t() @ here
    return _LinearCrossEntropyResult(
        total, plain, torch.cat(by_hidden) if by_hidden else None, by_weight, by_bias
    )


def _compute_by_kernel(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    needs_gradient: bool,
) -> _LinearCrossEntropyResult:
    """The same, where nothing but one kernel stands between the product of the logits and those with them."""
    from jumok.models.kernels.cross_entropy import allocate_logits, cross_entropy_

    places, words = len(labels), len(weight)
    # The kernel looks at no row without a label, and leaves zeros there. But zero times NaN is NaN, so that
    # for the gradient of the weight such rows of the hidden states have to be zero too.
    given = hidden.to(weight.dtype).where((labels != IGNORE)[:, None], 0)
    pieces = math.ceil(places * words / MAX_LOGITS_BY_KERNEL)
    rows = min(places, math.ceil(places / pieces / ROW_MULTIPLE) * ROW_MULTIPLE)
    room = allocate_logits(rows, words, weight)
    # Words of zeros, up to the width of the room: for odd numbers of words cuBLAS has slow products only.
    whole = F.pad(weight, (0, 0, 0, room.shape[1] - words))
    smoothed, plain = (labels.new_empty(places, dtype=torch.float32) for _ in range(2))
    by_hidden = by_weight = by_bias = None
    if needs_gradient:
        by_hidden = torch.empty_like(hidden)
        by_weight = torch.empty_like(whole, dtype=torch.float32)
        by_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    for begin in range(0, places, rows):
        part = slice(begin, begin + rows)
        here, said = given[part], labels[part]
        logits = room[: len(said)]
        torch.mm(here, whole.t(), out=logits)
        losses = smoothed[part], plain[part]
        cross_entropy_(
            logits, words, said, *losses, smoothing=smoothing, bias=bias, needs_gradient=needs_gradient
        )
        if by_hidden is None or by_weight is None:
            continue
        slope = logits  # by now
        _matmul_into(slope, whole, out=by_hidden[part])
        _matmul_into(slope.t(), here, out=by_weight, add=begin > 0)
        if by_bias is not None:
            by_bias += slope[:, :words].sum(0, dtype=torch.float32)
    if by_weight is not None:
        by_weight = by_weight[:words]
    return _LinearCrossEntropyResult(smoothed.sum(), plain.sum(), by_hidden, by_weight, by_bias)


def _matmul_into(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """``out = a @ b``, or ``out += a @ b``, rounded to ``out``'s type alone where torch can."""
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
    """Whether products of such matrices can be written, and added, in float32: torch tells if one tries."""
    if device.type != "cuda":
        return False
    one, out = torch.ones(8, 8, dtype=dtype, device=device), torch.zeros(8, 8, device=device)
    try:
        torch.addmm(out, one, one, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return False
    return True
