"""Attention with one learned query that pools each of many packed sequences into a vector.

::

    a_t = u · tanh(z_t)                 score of a word, from z (T, A)
    out = Σ_t softmax_t(a_t) h_t        of the states h (T, D) of its sequence

The words have the order of :func:`jumok.models.layers.recurrent.run_packed_rnn`: by steps, the longest sequence
first. A program processes one sequence, a few words at a time. So nothing is padded, copied or masked, and the
host launches one kernel in place of about twenty.

Backward recomputes the weights from log Σ exp(a). It stores the gradients of all words, and those of the query
as one row per sequence.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from jumok.attention.kernels.additive import tanh
from jumok.attention.kernels.common import disable_compile, forbid_double_backward, launch_options, pad_width
from jumok.attention.kernels.launcher import launch
from jumok.models.kernels.gru import UNSPECIALIZED_ARGUMENTS, multiply
from jumok.models.layers.ragged_layout import PackedSteps

MAX_WIDTH = 1024  # of states and keys
MAX_TILE_ELEMENTS = 4096  # of a tile of words: 32 registers of each thread
MAX_WORDS_PER_TILE = 32


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _locate_words(packing_ptr, rank, first, length, WORDS: tl.constexpr):
    """Indices of the words of a sequence from its word `first` on, and which of them exist."""
    step = first + tl.arange(0, WORDS)
    valid = step < length
    return (tl.load(packing_ptr + step, mask=valid, other=0) + rank).to(tl.int64), valid


@triton.jit
def _load_rows(ptr, word, valid, column, WIDTH: tl.constexpr):
    pointers = ptr + word[:, None] * WIDTH + column[None, :]
    return tl.load(pointers, mask=valid[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store_rows(ptr, x, word, valid, column, WIDTH: tl.constexpr):
    pointers = ptr + word[:, None] * WIDTH + column[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=valid[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS, do_not_specialize_on_alignment=["ranks_ptr"])
def pooling_forward_kernel(
    states_ptr, z_ptr, query_ptr, ranks_ptr, packing_ptr, out_ptr, lse_ptr, steps, sequences,
    D: tl.constexpr, A: tl.constexpr, BD: tl.constexpr, BA: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The vector of a sequence, zeros if it is empty, and its log Σ exp(a)."""
    EXACT: tl.constexpr = states_ptr.dtype.element_ty == tl.float32
    sequence = tl.program_id(0).to(tl.int64)
    rank = tl.load(ranks_ptr + sequence)
    length = tl.load(packing_ptr + steps + rank, mask=rank < sequences, other=0)
    d, a = tl.arange(0, BD), tl.arange(0, BA)
    query = tl.load(query_ptr + a, mask=a < A, other=0.0).to(tl.float32)
    peak = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((BD,), tl.float32)
    for first in range(0, length, WORDS):
        word, valid = _locate_words(packing_ptr, rank, first, length, WORDS)
        keys = tanh(_load_rows(z_ptr, word, valid, a, A), EXACT)
        score = tl.where(valid, tl.sum(keys * query[None, :], axis=1), float("-inf"))
        next_peak = tl.maximum(peak, tl.max(score, axis=0))
        weight = tl.exp(score - next_peak)
        decay = tl.exp(peak - next_peak)
        mass = mass * decay + tl.sum(weight, axis=0)
        states = _load_rows(states_ptr, word, valid, d, D)
        mixed = mixed * decay + tl.sum(weight[:, None] * states, axis=0)
        peak = next_peak
    mixed = tl.where(mass > 0.0, mixed / mass, 0.0)
    tl.store(out_ptr + sequence * D + d, mixed.to(out_ptr.dtype.element_ty), mask=d < D)
    tl.store(lse_ptr + sequence + tl.arange(0, 1), peak + tl.log(mass))


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS, do_not_specialize_on_alignment=["ranks_ptr"])
def pooling_backward_kernel(
    d_out_ptr, out_ptr, lse_ptr, states_ptr, z_ptr, query_ptr, ranks_ptr, packing_ptr,
    d_states_ptr, d_z_ptr, d_query_ptr, steps, sequences,
    D: tl.constexpr, A: tl.constexpr, BD: tl.constexpr, BA: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The gradients of the words of a sequence, and its part of the gradient of the query."""
    EXACT: tl.constexpr = states_ptr.dtype.element_ty == tl.float32
    sequence = tl.program_id(0).to(tl.int64)
    rank = tl.load(ranks_ptr + sequence)
    length = tl.load(packing_ptr + steps + rank, mask=rank < sequences, other=0)
    d, a = tl.arange(0, BD), tl.arange(0, BA)
    query = tl.load(query_ptr + a, mask=a < A, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + sequence * D + d, mask=d < D, other=0.0).to(tl.float32)
    mean = tl.sum(d_out * tl.load(out_ptr + sequence * D + d, mask=d < D, other=0.0).to(tl.float32), axis=0)
    lse = tl.load(lse_ptr + sequence)
    d_query = tl.zeros((BA,), tl.float32)
    for first in range(0, length, WORDS):
        word, valid = _locate_words(packing_ptr, rank, first, length, WORDS)
        keys = tanh(_load_rows(z_ptr, word, valid, a, A), EXACT)
        weight = tl.where(valid, tl.exp(tl.sum(keys * query[None, :], axis=1) - lse), 0.0)
        d_weight = tl.sum(_load_rows(states_ptr, word, valid, d, D) * d_out[None, :], axis=1)
        d_score = weight * (d_weight - mean)
        _store_rows(d_states_ptr, weight[:, None] * d_out[None, :], word, valid, d, D)
        _store_rows(d_z_ptr, d_score[:, None] * query[None, :] * (1.0 - keys * keys), word, valid, a, A)
        d_query += tl.sum(d_score[:, None] * keys, axis=0)
    tl.store(d_query_ptr + sequence * A + a, d_query, mask=a < A)


# --- host ---------------------------------------------------------------------------------------------------


def _get_constants(states_width: int, key_width: int) -> dict[str, Any]:
    padded_widths = pad_width(states_width), pad_width(key_width)
    words = min(MAX_WORDS_PER_TILE, max(1, MAX_TILE_ELEMENTS // max(padded_widths)))
    sizes = {"D": states_width, "A": key_width, "BD": padded_widths[0], "BA": padded_widths[1], "WORDS": words}
    return sizes | launch_options(4)


class _PoolingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor, query: Tensor, ranks: Tensor, packed_steps: PackedSteps
    ) -> Tensor:
        low_weight = weight.to(states.dtype)
        z = F.linear(states, low_weight, bias.to(states.dtype))
        out = states.new_empty(len(ranks), states.shape[1])
        lse = states.new_empty(len(ranks), dtype=torch.float32)
        offsets_and_lengths, steps = packed_steps.offsets_and_lengths, len(packed_steps.batch_sizes)
        launch(
            pooling_forward_kernel, (len(ranks),), states, z, query, ranks, offsets_and_lengths, out, lse,
            steps, packed_steps.num_sequences, **_get_constants(states.shape[1], z.shape[1]),
        )  # fmt: skip
        ctx.save_for_backward(states, low_weight, query, z, out, lse, ranks, offsets_and_lengths)
        ctx.sizes = steps, packed_steps.num_sequences
        ctx.parameter_dtype = weight.dtype
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        states, weight, query, z, out, lse, ranks, offsets_and_lengths = ctx.saved_tensors
        d_states, d_z = torch.empty_like(states), torch.empty_like(z)
        d_queries = z.new_empty(len(ranks), z.shape[1], dtype=torch.float32)
        launch(
            pooling_backward_kernel, (len(ranks),), d_out.contiguous(), out, lse, states, z, query, ranks,
            offsets_and_lengths, d_states, d_z, d_queries, *ctx.sizes,
            **_get_constants(states.shape[1], z.shape[1]),
        )  # fmt: skip
        for_states, for_weight, for_bias, for_query, *_ = ctx.needs_input_grad
        return (
            d_states.addmm_(d_z, weight) if for_states else None,
            multiply(d_z.t(), states, ctx.parameter_dtype) if for_weight else None,
            d_z.sum(0, dtype=ctx.parameter_dtype) if for_bias else None,
            d_queries.sum(0).to(query.dtype) if for_query else None,
            None,
            None,
        )


@disable_compile
def pool_packed_words(
    states: Tensor, weight: Tensor, bias: Tensor, query: Tensor, ranks: Tensor, packed_steps: PackedSteps
) -> Tensor:
    """Return Σ_t softmax_t(query · tanh(weight h_t + bias)) h_t of each sequence, ``(B, D)``.

    Differentiable once. Empty sequences get zeros. There is at least one word.

    Args:
        states: h ``(T, D)`` of all words, in bfloat16, float16 or float32.
        weight: ``(A, D)``.
        bias: ``(A,)``.
        query: ``(A,)``.
        ranks: ``(B,)``, the rank of each sequence by falling length.
        packed_steps: the layout of the words.
    """
    return cast(Tensor, _PoolingFunction.apply(states.contiguous(), weight, bias, query, ranks, packed_steps))
