"""Cross-entropy of rows of logits, and their gradient in place: one kernel, with one program per row.

::

    first pass     computes the maximum, the sum of exponentials and the sum of logits in float32
    second pass    reads the row again, from its end, which is still in the cache, and writes the gradient

Each thread has its own maximum and sums, so that threads synchronize once per row, not once per tile. A tile
is [lanes, unroll, elements]: a thread owns a lane, and loads and stores its elements as one word of 16 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.kernels.common import launch_options, round_up
from jumok.attention.kernels.launcher import launch
from jumok.batches.tokens import IGNORE

LOWEST = tl.constexpr(-3.0e38)  # initial maximum: finite, so that no difference from it is NaN
IGNORED_LABEL = tl.constexpr(IGNORE)
VECTOR_BYTES = 16  # that a thread loads at once
ROW_ALIGNMENT_BYTES = 128  # of rows, for the kernel and for matrix products


class CrossEntropyBlockSizes(NamedTuple):
    """Block sizes of the kernel.

    Few programs with many threads are better than many with few, because a row must stay in the cache for its
    second pass.
    """

    warps: int = 16
    unroll: int = 2  # words that a thread loads at the same time


DEFAULT_BLOCKS = CrossEntropyBlockSizes()


@triton.jit
def _tile_columns(start, U: tl.constexpr, LANES: tl.constexpr, E: tl.constexpr):
    """Columns of the tile that begins at `start`, [LANES, U, E]."""
    word = tl.arange(0, LANES)[:, None, None] + tl.arange(0, U)[None, :, None] * LANES
    return start + word * E + tl.arange(0, E)[None, None, :]


@triton.jit
def _load_logits(row_ptr, bias_ptr, column, V, width, BIASED: tl.constexpr, CHECKED: tl.constexpr):
    """A tile of logits in float32. If CHECKED, columns after the last word are -inf."""
    if CHECKED:
        x = tl.load(row_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        if BIASED:
            x += tl.load(bias_ptr + column, mask=column < V, other=0.0).to(tl.float32)
        x = tl.where(column < V, x, float("-inf"))
    else:
        x = tl.load(row_ptr + column).to(tl.float32)
        if BIASED:
            x += tl.load(bias_ptr + column).to(tl.float32)
    return x


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, bias_ptr, labels_ptr, smoothed_ptr, plain_ptr, V, width, smoothing,
    U: tl.constexpr, LANES: tl.constexpr, E: tl.constexpr,
    BIASED: tl.constexpr, SMOOTHED: tl.constexpr, NEEDS_GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * width
    label = tl.load(labels_ptr + row).to(tl.int32)
    STEP: tl.constexpr = U * LANES * E
    unchecked = V // STEP * STEP  # columns before this one need no bounds check
    if label == IGNORED_LABEL:  # whatever the row holds
        tl.store(smoothed_ptr + row, 0.0)
        tl.store(plain_ptr + row, 0.0)
        if NEEDS_GRADIENT:
            for start in range(0, V, STEP):
                column = _tile_columns(start, U, LANES, E)
                zeros = tl.zeros((LANES, U, E), logits_ptr.dtype.element_ty)
                tl.store(row_ptr + column, zeros, mask=column < width)
    else:
        # An invalid label has no logit. Its loss is NaN.
        is_word = (label >= 0) & (label < V)
        label_logit = tl.load(row_ptr + label, mask=is_word, other=float("nan")).to(tl.float32)
        if BIASED:
            label_logit += tl.load(bias_ptr + label, mask=is_word, other=0.0).to(tl.float32)

        maximum = tl.full((LANES,), LOWEST, tl.float32)
        total = tl.zeros((LANES,), tl.float32)  # Σ exp(x - maximum)
        sums = tl.zeros((LANES,), tl.float32)  # Σ x
        for part in tl.static_range(2):
            for start in range(0 if part == 0 else unchecked, unchecked if part == 0 else V, STEP):
                column = _tile_columns(start, U, LANES, E)
                x = _load_logits(row_ptr, bias_ptr, column, V, width, BIASED, part == 1)
                new_maximum = tl.maximum(maximum, tl.max(tl.max(x, axis=2), axis=1))
                exponentials = tl.exp(x - new_maximum[:, None, None])
                total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.sum(exponentials, axis=2), axis=1)
                maximum = new_maximum
                if SMOOTHED:
                    if part == 1:
                        x = tl.where(column < V, x, 0.0)
                    sums += tl.sum(tl.sum(x, axis=2), axis=1)

        peak = tl.max(maximum, axis=0)
        mass = tl.sum(total * tl.exp(maximum - peak), axis=0)
        plain = tl.log(mass) - (label_logit - peak)
        smoothed = plain
        if SMOOTHED:
            uniform = tl.log(mass) - (tl.sum(sums, axis=0) / V - peak)  # loss of a uniform label distribution
            smoothed += smoothing * (uniform - plain)
        tl.store(plain_ptr + row, plain)
        tl.store(smoothed_ptr + row, smoothed)

        if NEEDS_GRADIENT:
            inverse_mass = 1.0 / mass
            smoothing_mass = smoothing / V
            for part in tl.static_range(2):
                steps = unchecked // STEP if part == 1 else tl.cdiv(V - unchecked, STEP)
                for step in range(steps):
                    start = unchecked if part == 0 else unchecked - (step + 1) * STEP
                    column = _tile_columns(start, U, LANES, E)
                    x = _load_logits(row_ptr, bias_ptr, column, V, width, BIASED, part == 0)
                    gradient = tl.exp(x - peak) * inverse_mass
                    if SMOOTHED:
                        gradient -= smoothing_mass
                    gradient -= tl.where(column == label, 1.0 - smoothing, 0.0)
                    gradient = gradient.to(logits_ptr.dtype.element_ty)
                    if part == 0:
                        tl.store(row_ptr + column, gradient, mask=column < width)
                    else:
                        tl.store(row_ptr + column, gradient)


def allocate_logits(rows: int, vocab_size: int, like: Tensor) -> Tensor:
    """Allocate logits ``(rows, W)`` in the dtype of ``like``, with W ≥ ``vocab_size`` and aligned rows."""
    unit = ROW_ALIGNMENT_BYTES // like.element_size()
    return like.new_empty(rows, round_up(vocab_size, unit))


def cross_entropy_(
    logits: Tensor,
    vocab_size: int,
    labels: Tensor,
    smoothed_losses: Tensor,
    plain_losses: Tensor,
    *,
    smoothing: float,
    bias: Tensor | None,
    needs_gradient: bool,
    blocks: CrossEntropyBlockSizes = DEFAULT_BLOCKS,
) -> None:
    """Write the losses of each row, and overwrite the logits with the gradient of the smoothed loss.

    If a label is IGNORE, its losses and gradients are zero, whatever the logits are.

    Args:
        logits: ``(N, W)`` from :func:`allocate_logits`, in bfloat16, float16 or float32. Only the first
            ``vocab_size`` columns are used. (The others hold finite numbers afterwards.)
        vocab_size: Number of words.
        labels: ``(N,)``.
        smoothed_losses: Output ``(N,)`` in float32: cross-entropy with label smoothing.
        plain_losses: Output ``(N,)`` in float32: cross-entropy without label smoothing.
        smoothing: Fraction of each label that is distributed uniformly over all words.
        bias: ``(vocab_size,)``, added to each row in float32.
        needs_gradient: Whether to compute the gradient. Otherwise the logits are not changed.
        blocks: Block sizes of the kernel.
    """
    rows, width = logits.shape
    elements = VECTOR_BYTES // logits.element_size()
    launch(
        _cross_entropy_kernel, (rows,), logits, logits if bias is None else bias.contiguous(), labels.contiguous(),
        smoothed_losses, plain_losses, vocab_size, width, smoothing,
        U=blocks.unroll, LANES=32 * blocks.warps, E=elements, BIASED=bias is not None,
        SMOOTHED=smoothing > 0, NEEDS_GRADIENT=needs_gradient, **launch_options(blocks.warps),
    )  # fmt: skip
