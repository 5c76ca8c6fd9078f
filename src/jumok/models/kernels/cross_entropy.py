"""Cross-entropy of rows of logits, and their gradient in their place: one kernel, a row a program.

    first pass     reads the row: the largest logit, the sum of exponentials, the sum of logits, in float32
    second pass    backwards, for what was read last is still in the cache: reads again, writes the gradient

Each thread keeps a maximum and sums of its own, so that threads meet once a row, not once a tile. A tile is
[lanes, unroll, elements]: a thread owns a lane, and reads and writes its elements as one word of 16 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.kernels.additive import launch_options
from jumok.batches.tokens import IGNORE

LOWEST = tl.constexpr(-3.0e38)  # a maximum of nothing: finite, so that no difference from it is NaN
IGNORED_LABEL = tl.constexpr(IGNORE)
VECTOR_BYTES = 16  # bytes that a thread reads at once
ROW_ALIGNMENT_BYTES = 128  # bytes: where rows should begin, for the kernel and for products


class CrossEntropyBlockSizes(NamedTuple):
    """How the kernel cuts a row.

    Few programs of many threads, rather than many of few: a row waits in the cache for its second pass.
    """

    warps: int = 16
    unroll: int = 2  # words of a thread on their way


DEFAULT_BLOCKS = CrossEntropyBlockSizes()


@triton.jit
def _tile_columns(begin, U: tl.constexpr, LANES: tl.constexpr, E: tl.constexpr):
    """The columns of the tile that begins there, [LANES, U, E]."""
    word = tl.arange(0, LANES)[:, None, None] + tl.arange(0, U)[None, :, None] * LANES
    return begin + word * E + tl.arange(0, E)[None, None, :]


@triton.jit
def _load_logits(row_ptr, bias_ptr, column, V, width, BIASED: tl.constexpr, CHECKED: tl.constexpr):
    """A tile in float32; where CHECKED, -inf past the last word."""
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
    BIASED: tl.constexpr, SMOOTHED: tl.constexpr, LEARNING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * width
    label = tl.load(labels_ptr + row).to(tl.int32)
    STEP: tl.constexpr = U * LANES * E
    clear = V // STEP * STEP  # up to there no column needs a check
    if label == IGNORED_LABEL:  # whatever the row holds
        tl.store(smoothed_ptr + row, 0.0)
        tl.store(plain_ptr + row, 0.0)
        if LEARNING:
            for begin in range(0, V, STEP):
                column = _tile_columns(begin, U, LANES, E)
                nothing = tl.zeros((LANES, U, E), logits_ptr.dtype.element_ty)
                tl.store(row_ptr + column, nothing, mask=column < width)
    else:
        # A label that is no word has no logit: its loss is NaN, which nobody overlooks.
        is_word = (label >= 0) & (label < V)
        right = tl.load(row_ptr + label, mask=is_word, other=float("nan")).to(tl.float32)
        if BIASED:
            right += tl.load(bias_ptr + label, mask=is_word, other=0.0).to(tl.float32)

        largest = tl.full((LANES,), LOWEST, tl.float32)
        total = tl.zeros((LANES,), tl.float32)  # Σ exp(x - largest)
        sums = tl.zeros((LANES,), tl.float32)  # Σ x
        for part in tl.static_range(2):
            for begin in range(0 if part == 0 else clear, clear if part == 0 else V, STEP):
                column = _tile_columns(begin, U, LANES, E)
                x = _load_logits(row_ptr, bias_ptr, column, V, width, BIASED, part == 1)
                larger = tl.maximum(largest, tl.max(tl.max(x, axis=2), axis=1))
                powers = tl.exp(x - larger[:, None, None])
                total = total * tl.exp(largest - larger) + tl.sum(tl.sum(powers, axis=2), axis=1)
                largest = larger
                if SMOOTHED:
                    if part == 1:
                        x = tl.where(column < V, x, 0.0)
                    sums += tl.sum(tl.sum(x, axis=2), axis=1)

        peak = tl.max(largest, axis=0)
        mass = tl.sum(total * tl.exp(largest - peak), axis=0)
        plain = tl.log(mass) - (right - peak)
        smoothed = plain
        if SMOOTHED:
            even = tl.log(mass) - (tl.sum(sums, axis=0) / V - peak)  # as if each word were as right as any
            smoothed += smoothing * (even - plain)
        tl.store(plain_ptr + row, plain)
        tl.store(smoothed_ptr + row, smoothed)

        if LEARNING:
            share = 1.0 / mass
            spread = smoothing / V
            for part in tl.static_range(2):
                steps = clear // STEP if part == 1 else tl.cdiv(V - clear, STEP)
                for step in range(steps):
                    begin = clear if part == 0 else clear - (step + 1) * STEP
                    column = _tile_columns(begin, U, LANES, E)
                    x = _load_logits(row_ptr, bias_ptr, column, V, width, BIASED, part == 0)
                    slope = tl.exp(x - peak) * share
                    if SMOOTHED:
                        slope -= spread
                    slope -= tl.where(column == label, 1.0 - smoothing, 0.0)
                    slope = slope.to(logits_ptr.dtype.element_ty)
                    if part == 0:
                        tl.store(row_ptr + column, slope, mask=column < width)
                    else:
                        tl.store(row_ptr + column, slope)


def allocate_logits(rows: int, vocab_size: int, like: Tensor) -> Tensor:
    """Memory for logits ``(rows, W)`` of ``like``'s type, W ≥ words such that each row begins aligned."""
    unit = ROW_ALIGNMENT_BYTES // like.element_size()
    return like.new_empty(rows, triton.cdiv(vocab_size, unit) * unit)


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
    """Write the losses of each row and, if ``needs_gradient``, over the logits the gradient of the smoothed one.

    Where the label is IGNORE, all are zero, whatever the logits are.

    Args:
        logits: ``(N, W)`` from :func:`allocate_logits`, in bfloat16, float16 or float32; what counts are the
            first ``vocab_size`` columns. (In the others some finite numbers are left.)
        words: how many.
        labels: ``(N,)``.
        smoothed: ``(N,)`` float32, written: the label-smoothed cross-entropy.
        plain: ``(N,)`` float32, written: that without smoothing.
        smoothing: this share of each label is spread over all words evenly.
        bias: ``(vocab_size,)``, added to each row in float32.
        learning: whether the gradient is wanted; otherwise the logits stay as they are.
        blocks: how a row is cut.
    """
    rows, width = logits.shape
    elements = VECTOR_BYTES // logits.element_size()
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(rows,)](
            logits, logits if bias is None else bias.contiguous(), labels.contiguous(), smoothed_losses, plain_losses,
            vocab_size, width, smoothing,
            U=blocks.unroll, LANES=32 * blocks.warps, E=elements,
            BIASED=bias is not None, SMOOTHED=smoothing > 0, LEARNING=needs_gradient, **launch_options(blocks.warps),
        )  # fmt: skip
