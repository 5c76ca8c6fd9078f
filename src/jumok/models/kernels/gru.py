"""A GRU over sequences of unlike length: all steps of both directions in one launch, forward and backward.

    gates = x Vᵀ + c                                  # (T, ways · 3 W): one product for all words
    states = states_of(gates, U, b, packing)          # (T, ways · W)

What is left for the kernel is what a step needs of the step before::

    r = σ(g_r + U_r h + b_r)    z = σ(g_z + U_z h + b_z)    m = U_n h + b_n    n = tanh(g_n + r ∘ m)
    h' = n + z ∘ (h − n)

A program has some sequences of like length and one direction. It reads the weight once (unless that is too
large), keeps h in registers, in float32, and walks through the steps of its longest sequence; nobody waits
for anybody else. While it works on a step, the numbers of the next are on their way.

Backward walks the other way, and leaves the gradient of every gate of every word. Those of weight and bias
are then sums over all words: one product, where a step at a time would be as many as there are steps.

**What forward keeps** for backward is r, z, n and m. To make them again would take the gates and all products
once more, and the weight both as it is and transposed, which leaves no registers for anything else; to read
them takes four numbers where the gates are three.

The words lie as in :func:`jumok.models.recurrent.run_packed`: by their steps, the longest sequence first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from jumok.attention.kernels.additive import launched, refuse_second_derivatives, tanh, untraced
from jumok.attention.kinds import moved

Parameters = tuple[Tensor, Tensor, Tensor, Tensor]  # weight_ih, weight_hh, bias_ih, bias_hh, as in nn.GRU

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)
WIDEST = 128  # of a state
KEPT = 4  # r, z, n, m
# Bytes of a row of the weight, padded. A larger one wants more warps to share it; one still larger does not
# fit into a multiprocessor, and is read anew at each step, from the cache, some columns at a time.
FOUR_WARPS, HELD = 128, 256
COLUMNS = tl.constexpr(32)
# These differ from batch to batch, and a kernel compiled for each kind of number would be no faster.
NUMBERS = ["steps", "sequences"]


class Blocks(NamedTuple):
    """How the work is cut."""

    rows: int = 16  # sequences of a program: the fewest that tensor cores take, for the most programs
    warps: int = 4
    stages: int = 1  # of a weight that is not held: how many of its parts are on their way


def blocks_for(width: int, dtype: torch.dtype) -> Blocks:
    """The blocks of both kernels, for states of this width whose products are in this type."""
    return Blocks(warps=4 if _padded(width) * dtype.itemsize <= FOUR_WARPS else 8)


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    """By the exponential, or by the instruction that tanh is."""
    return 1.0 / (1.0 + tl.exp(-x)) if EXACT else 0.5 + 0.5 * tanh(0.5 * x, EXACT)


@triton.jit
def _dot(a, b):
    """a · b in b's precision, added up in float32."""
    a = a.to(b.dtype)
    if not ON_GPU:  # the interpreter takes bfloat16 for whole numbers here
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _weight(weight_ptr, gate: tl.constexpr, row, column, W: tl.constexpr, dtype: tl.constexpr):
    """Some rows and columns of a gate's part (W, W) of the weight, zeros beyond."""
    at = weight_ptr + (gate * W + row[:, None]) * W + column[None, :]
    return tl.load(at, mask=(row < W)[:, None] & (column < W)[None, :], other=0.0).to(dtype)


@triton.jit
def _bias(bias_ptr, gate: tl.constexpr, column, W: tl.constexpr):
    return tl.load(bias_ptr + gate * W + column, mask=column < W, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _sequences(numbers_ptr, steps, sequences, WAYS: tl.constexpr, ROWS: tl.constexpr):
    """Which sequences a program has, and how long they are."""
    row = tl.program_id(0) // WAYS * ROWS + tl.arange(0, ROWS)
    return row, tl.load(numbers_ptr + steps + row, mask=row < sequences, other=0)


@triton.jit
def _words(numbers_ptr, row, length, longest, step, onwards):
    """Where the words of a step lie, [ROWS], and which sequences have one; none before and after all steps.

    `step` is counted from where the walk begins, which goes `onwards`, or from the last word to the first.
    """
    step = tl.where(onwards, step, longest - 1 - step)
    step = tl.where(step < 0, longest, step)
    first = tl.load(numbers_ptr + step, mask=step < longest, other=0)
    return (first + row).to(tl.int64), step < length


@triton.jit
def _load(ptr, word, alive, column, stride: tl.constexpr, W: tl.constexpr):
    """Some of W numbers of each word, [ROWS, columns]; zeros where there is none."""
    at = ptr + word[:, None] * stride + column[None, :]
    return tl.load(at, mask=alive[:, None] & (column < W)[None, :], other=0.0)


@triton.jit
def _store(ptr, x, word, alive, column, stride: tl.constexpr, W: tl.constexpr):
    at = ptr + word[:, None] * stride + column[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=alive[:, None] & (column < W)[None, :])


@triton.jit
def _from_memory(
    states_ptr, weight_ptr, word, alive,
    STATES: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """U h of each gate, where U is too large to be held: some columns of h at a time, from memory."""
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    column = tl.arange(0, BW)
    nothing = tl.zeros((ROWS, BW), tl.float32)
    r, z, n = nothing, nothing, nothing
    tl.debug_barrier()  # all threads have written what any may read
    for begin in range(0, W, COLUMNS):
        some = begin + tl.arange(0, COLUMNS)
        h = _load(states_ptr, word, alive, some, STATES, W)
        r = r + _dot(h, tl.trans(_weight(weight_ptr, 0, column, some, W, dtype)))
        z = z + _dot(h, tl.trans(_weight(weight_ptr, 1, column, some, W, dtype)))
        n = n + _dot(h, tl.trans(_weight(weight_ptr, 2, column, some, W, dtype)))
    return r, z, n


@triton.jit
def _back_from_memory(
    d_gates_ptr, d_inner_ptr, weight_ptr, word, alive,
    GATES: tl.constexpr, STATES: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same for what the gradients of the gates give to that of h."""
    dtype: tl.constexpr = d_gates_ptr.dtype.element_ty
    column = tl.arange(0, BW)
    d_h = tl.zeros((ROWS, BW), tl.float32)
    tl.debug_barrier()
    for begin in range(0, W, COLUMNS):
        some = begin + tl.arange(0, COLUMNS)
        d_r = _load(d_gates_ptr, word, alive, some, GATES, W)
        d_h += _dot(d_r, _weight(weight_ptr, 0, some, column, W, dtype))
        d_z = _load(d_gates_ptr + W, word, alive, some, GATES, W)
        d_h += _dot(d_z, _weight(weight_ptr, 1, some, column, W, dtype))
        d_m = _load(d_inner_ptr, word, alive, some, STATES, W)
        d_h += _dot(d_m, _weight(weight_ptr, 2, some, column, W, dtype))
    return d_h


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    gates_ptr, weight_ptr, bias_ptr, states_ptr, kept_ptr, numbers_ptr, steps, sequences,
    W: tl.constexpr, BW: tl.constexpr, WAYS: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr,
    LEARNING: tl.constexpr,
):  # fmt: skip
    """The states of all words; if LEARNING, what backward needs too."""
    dtype: tl.constexpr = gates_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    GATES: tl.constexpr = WAYS * 3 * W
    STATES: tl.constexpr = WAYS * W
    KEPT: tl.constexpr = WAYS * 4 * W
    way = tl.program_id(0) % WAYS
    onwards = way == 0
    gates_ptr += way * 3 * W
    weight_ptr += way * 3 * W * W
    bias_ptr += way * 3 * W
    states_ptr += way * W
    kept_ptr += way * 4 * W
    row, length = _sequences(numbers_ptr, steps, sequences, WAYS, ROWS)
    longest = tl.max(length, axis=0)
    column = tl.arange(0, BW)

    if HELD:
        u_r = _weight(weight_ptr, 0, column, column, W, dtype)
        u_z = _weight(weight_ptr, 1, column, column, W, dtype)
        u_n = _weight(weight_ptr, 2, column, column, W, dtype)
    b_r = _bias(bias_ptr, 0, column, W)
    b_z = _bias(bias_ptr, 1, column, W)
    b_n = _bias(bias_ptr, 2, column, W)
    h = tl.zeros((ROWS, BW), tl.float32)
    if not HELD:
        last_word, last_alive = _words(numbers_ptr, row, length, longest, -1, onwards)
    word, alive = _words(numbers_ptr, row, length, longest, 0, onwards)
    g_r = _load(gates_ptr, word, alive, column, GATES, W)
    g_z = _load(gates_ptr + W, word, alive, column, GATES, W)
    g_n = _load(gates_ptr + 2 * W, word, alive, column, GATES, W)
    for step in range(longest):
        next_word, next_alive = _words(numbers_ptr, row, length, longest, step + 1, onwards)
        next_r = _load(gates_ptr, next_word, next_alive, column, GATES, W)
        next_z = _load(gates_ptr + W, next_word, next_alive, column, GATES, W)
        next_n = _load(gates_ptr + 2 * W, next_word, next_alive, column, GATES, W)

        if HELD:
            a_r, a_z, m = _dot(h, tl.trans(u_r)), _dot(h, tl.trans(u_z)), _dot(h, tl.trans(u_n))
        else:
            a_r, a_z, m = _from_memory(states_ptr, weight_ptr, last_word, last_alive, STATES, W, BW, ROWS)
            last_word, last_alive = word, alive
        r = _sigmoid(g_r.to(tl.float32) + (a_r + b_r), EXACT)
        z = _sigmoid(g_z.to(tl.float32) + (a_z + b_z), EXACT)
        m += b_n
        n = tanh(g_n.to(tl.float32) + r * m, EXACT)
        # Read backwards, the shorter sequences begin later, and until then have zeros.
        h = tl.where(alive[:, None], n + z * (h - n), h)
        _store(states_ptr, h, word, alive, column, STATES, W)
        if LEARNING:
            _store(kept_ptr, r, word, alive, column, KEPT, W)
            _store(kept_ptr + W, z, word, alive, column, KEPT, W)
            _store(kept_ptr + 2 * W, n, word, alive, column, KEPT, W)
            _store(kept_ptr + 3 * W, m, word, alive, column, KEPT, W)
        word, alive, g_r, g_z, g_n = next_word, next_alive, next_r, next_z, next_n


@triton.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    d_states_ptr, weight_ptr, states_ptr, kept_ptr, d_gates_ptr, d_inner_ptr, before_ptr, numbers_ptr,
    steps, sequences,
    W: tl.constexpr, BW: tl.constexpr, WAYS: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The gradient of the gates, that of m (d_inner), and the states that the steps began with (before)."""
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    GATES: tl.constexpr = WAYS * 3 * W
    STATES: tl.constexpr = WAYS * W
    KEPT: tl.constexpr = WAYS * 4 * W
    way = tl.program_id(0) % WAYS
    onwards = way != 0
    weight_ptr += way * 3 * W * W
    kept_ptr += way * 4 * W
    d_gates_ptr += way * 3 * W
    d_states_ptr += way * W
    states_ptr += way * W
    d_inner_ptr += way * W
    before_ptr += way * W
    row, length = _sequences(numbers_ptr, steps, sequences, WAYS, ROWS)
    longest = tl.max(length, axis=0)
    column = tl.arange(0, BW)

    if HELD:
        u_r = _weight(weight_ptr, 0, column, column, W, dtype)
        u_z = _weight(weight_ptr, 1, column, column, W, dtype)
        u_n = _weight(weight_ptr, 2, column, column, W, dtype)
    # Of a sequence that is over, or did not begin, everything is read as zero, and so is its gradient.
    d_h = tl.zeros((ROWS, BW), tl.float32)
    word, alive = _words(numbers_ptr, row, length, longest, 0, onwards)
    next_word, next_alive = _words(numbers_ptr, row, length, longest, 1, onwards)
    r = _load(kept_ptr, word, alive, column, KEPT, W)
    z = _load(kept_ptr + W, word, alive, column, KEPT, W)
    n = _load(kept_ptr + 2 * W, word, alive, column, KEPT, W)
    m = _load(kept_ptr + 3 * W, word, alive, column, KEPT, W)
    given = _load(d_states_ptr, word, alive, column, STATES, W)
    h = _load(states_ptr, next_word, next_alive, column, STATES, W)  # which this walk comes to one step later
    for step in range(longest):
        later_word, later_alive = _words(numbers_ptr, row, length, longest, step + 2, onwards)
        next_r = _load(kept_ptr, next_word, next_alive, column, KEPT, W)
        next_z = _load(kept_ptr + W, next_word, next_alive, column, KEPT, W)
        next_n = _load(kept_ptr + 2 * W, next_word, next_alive, column, KEPT, W)
        next_m = _load(kept_ptr + 3 * W, next_word, next_alive, column, KEPT, W)
        next_given = _load(d_states_ptr, next_word, next_alive, column, STATES, W)
        next_h = _load(states_ptr, later_word, later_alive, column, STATES, W)

        _store(before_ptr, h, word, alive, column, STATES, W)
        r, z, n = r.to(tl.float32), z.to(tl.float32), n.to(tl.float32)
        d_h += given.to(tl.float32)
        d_z = d_h * (h.to(tl.float32) - n) * (z * (1.0 - z))
        d_n = d_h * (1.0 - z) * (1.0 - n * n)
        d_r = d_n * m.to(tl.float32) * (r * (1.0 - r))
        d_m = d_n * r
        _store(d_gates_ptr, d_r, word, alive, column, GATES, W)
        _store(d_gates_ptr + W, d_z, word, alive, column, GATES, W)
        _store(d_gates_ptr + 2 * W, d_n, word, alive, column, GATES, W)
        _store(d_inner_ptr, d_m, word, alive, column, STATES, W)
        d_h *= z
        if HELD:
            d_h += _dot(d_r, u_r) + _dot(d_z, u_z) + _dot(d_m, u_n)
        else:
            d_h += _back_from_memory(
                d_gates_ptr, d_inner_ptr, weight_ptr, word, alive, GATES, STATES, W, BW, ROWS
            )
        word, alive, next_word, next_alive = next_word, next_alive, later_word, later_alive
        r, z, n, m, given, h = next_r, next_z, next_n, next_m, next_given, next_h


# --- host ---------------------------------------------------------------------------------------------------


class Packing(NamedTuple):
    """Where the words of the steps lie, for the kernels."""

    numbers: Tensor  # (steps + sequences,): which is a step's first word; how many words a sequence has
    steps: int
    sequences: int

    @classmethod
    def of(cls, sizes: Tensor, device: torch.device) -> Packing:
        """``sizes`` ``(steps,)``, on the host, are the words of each step."""
        each = sizes.numpy()
        sequences = int(each.max(initial=0))
        lengths = np.searchsorted(-each, -np.arange(sequences), side="left")
        numbers = torch.from_numpy(np.concatenate([np.cumsum(each) - each, lengths]).astype(np.int32))
        if device.type == "cuda":  # from other memory, a large copy waits until the GPU is through
            numbers = numbers.pin_memory()
        return cls(moved(numbers, device), len(each), sequences)


def _launch(
    kernel: Any, tensors: Sequence[Tensor], packing: Packing, ways: int, blocks: Blocks, **constants: Any
) -> None:
    """One program for some sequences and a direction, the longest first; nothing if there is no word."""
    programs = triton.cdiv(packing.sequences, blocks.rows) * ways
    if programs:
        with torch.cuda.device_of(tensors[0]):
            kernel[(programs,)](
                *tensors, packing.numbers, packing.steps, packing.sequences,
                WAYS=ways, ROWS=blocks.rows, num_stages=blocks.stages, **constants, **launched(blocks.warps),
            )  # fmt: skip


def _constants(width: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"W": width, "BW": _padded(width), "HELD": _padded(width) * dtype.itemsize <= HELD}


class _States(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        weight: Tensor,
        bias: Tensor,
        packing: Packing,
        learning: bool,
        blocks: tuple[Blocks, Blocks],
    ) -> Tensor:
        words, (ways, _, width) = len(gates), weight.shape
        gates, weight, bias = gates.contiguous(), weight.contiguous(), bias.contiguous()
        states = gates.new_empty(words, ways * width)
        kept = gates.new_empty(words, ways * KEPT * width) if learning else states
        tensors = gates, weight, bias, states, kept
        constants = _constants(width, gates.dtype)
        _launch(forward_kernel, tensors, packing, ways, blocks[0], LEARNING=learning, **constants)
        if learning:
            ctx.save_for_backward(weight, states, kept, packing.numbers)
            ctx.packing, ctx.blocks, ctx.bias_type = packing, blocks[1], bias.dtype
        return states

    @staticmethod
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        weight, states, kept, numbers = ctx.saved_tensors
        words, (ways, _, width) = len(states), weight.shape
        d_gates = states.new_empty(words, ways, 3 * width)
        d_inner, before = (states.new_empty(words, ways, width) for _ in range(2))
        tensors = d_states.contiguous(), weight, states, kept, d_gates, d_inner, before
        packing, constants = ctx.packing._replace(numbers=numbers), _constants(width, states.dtype)
        _launch(backward_kernel, tensors, packing, ways, ctx.blocks, **constants)
        # What the state gives: to r and z as to the gates of the input, to n by way of m.
        parts = d_gates[..., : 2 * width], d_inner
        d_weight = d_bias = None
        if ctx.needs_input_grad[1]:
            states_before = before.transpose(0, 1)
            d_weight = torch.cat([part.permute(1, 2, 0) @ states_before for part in parts], 1)
            d_weight = d_weight.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = torch.cat([part.sum(0, dtype=ctx.bias_type) for part in parts], 1)
        return d_gates.flatten(1), d_weight, d_bias, None, None, None


@untraced
def gru(
    x: Tensor, parameters: Sequence[Parameters], sizes: Tensor, blocks: tuple[Blocks, Blocks] | None = None
) -> Tensor:
    """The states ``(T, ways · W)``, from zeros, of the words ``x`` ``(T, inputs)``, T of them in all.

    ``parameters`` are those of one direction, or of both, of a layer of ``nn.GRU``; W is at most ``WIDEST``.
    ``sizes`` ``(steps,)``, on the host, says how many sequences have a word at each step. In bfloat16,
    float16 or float32, or by autocast. Differentiable once. ``blocks``: of forward and of backward.
    """
    from_input, from_state, bias, bias_of_state = zip(*parameters, strict=True)
    gates = F.linear(x, torch.cat(from_input), torch.cat(bias))
    inputs = gates, torch.stack(from_state), torch.stack(bias_of_state)
    learning = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    blocks = blocks or (blocks_for(inputs[1].shape[-1], gates.dtype),) * 2
    return cast(Tensor, _States.apply(*inputs, Packing.of(sizes, x.device), learning, blocks))
