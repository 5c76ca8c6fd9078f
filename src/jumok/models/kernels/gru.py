"""A GRU over sequences of unlike length: all steps of both directions in one launch, forward and backward.

    g = x Vᵀ            # (T, ways · 3 W): one product for all words

What is left for the kernel is what a step needs of the step before::

    r = σ(g_r + c_r + U_r h + b_r)    z = σ(g_z + c_z + U_z h + b_z)
    m = U_n h + b_n                   n = tanh(g_n + c_n + r ∘ m)
    h' = n + z ∘ (h − n)

A program has some sequences of like length and one direction. It reads the weight once (unless that is too
large), keeps h in registers, in float32, and walks through the steps of its longest sequence; nobody waits
for anybody else. While it works on a step, the numbers of the next are on their way.

Backward walks the other way, and leaves the gradient of every gate of every word, as the input saw the gate
and as the state did. Those of weights and biases are then sums over all words: one product, where a step at a
time would be as many as there are steps.

**Few launches.** The kernels of a batch take less time than Python needs to launch them and what is around
them. So all of a layer is one node of autograd; the kernels read parameters where they lie; and what comes
before and after are a few products, whose sums come out in float32 and are not cast.

**What forward keeps** for backward is r, z, n and m. To make them again would take the gates and all products
once more, and the weight both as it is and transposed, which leaves no registers for anything else; to read
them takes four numbers where the gates are three.

The words lie as in :func:`jumok.models.recurrent.run_packed`: by their steps, the longest sequence first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from jumok.attention.gpu_support import get_max_shared_memory
from jumok.attention.kernels.additive import disable_compile, forbid_double_backward, launch_options, tanh
from jumok.models.layers.ragged_layout import PackedSteps
from jumok.models.layers.precision import to_autocast_dtype

GruParameters = tuple[Tensor, Tensor, Tensor, Tensor]  # weight_ih, weight_hh, bias_ih, bias_hh, as in nn.GRU

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)
MAX_WIDTH = 128  # of a state
NUM_SAVED = 4  # r, z, n, m
# Bytes of a row of the weight, padded. A larger one wants more warps to share it. One still larger has no
# room in the registers of a program, and is read anew at each step, from the cache, some columns at a time.
MAX_FOUR_WARP_BYTES, MAX_HELD_BYTES = 128, 256
COLUMNS_PER_LOAD = tl.constexpr(32)
# These differ from batch to batch, and a kernel compiled for each kind of number would be no faster.
UNSPECIALIZED_ARGUMENTS = ["steps", "sequences"]


class GruKernelBlockSizes(NamedTuple):
    """How the work is cut."""

    rows: int = 16  # sequences of a program: the fewest that tensor cores take, for the most programs
    warps: int = 4
    stages: int = 1  # of a weight that is not held: how many of its parts are on their way


def choose_gru_blocks(width: int, dtype: torch.dtype) -> GruKernelBlockSizes:
    """The blocks of both kernels, for states of this width whose products are in this type."""
    return GruKernelBlockSizes(
        warps=4 if _next_power_of_2(width) * dtype.itemsize <= MAX_FOUR_WARP_BYTES else 8
    )


def fits_weight_in_shared_memory(width: int, dtype: torch.dtype, shared_memory_bytes: int) -> bool:
    """Whether a program with so many bytes of shared memory holds the weight, or reads it at each step.

    It holds three matrices there (of float32 numbers two parts each, as tf32x3 takes them), and the state as
    it goes from one layout to another. What the compiler takes on each GPU is in
    ``tests/models/test_kernel_resources.py``.
    """
    side = _next_power_of_2(width)
    if side * dtype.itemsize > MAX_HELD_BYTES:
        return False
    parts = 2 if dtype == torch.float32 else 1
    return (
        parts * (3 * side**2 * dtype.itemsize + GruKernelBlockSizes().rows * side * 4) <= shared_memory_bytes
    )


def _next_power_of_2(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    """By the exponential, or by the instruction that tanh is."""
    return 1.0 / (1.0 + tl.exp(-x)) if EXACT else 0.5 + 0.5 * tanh(0.5 * x, EXACT)


@triton.jit
def _matmul_tile(a, b):
    """a · b in b's precision, added up in float32."""
    a = a.to(b.dtype)
    if not ON_GPU:  # the interpreter takes bfloat16 for whole numbers here
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _load_weight(weight_ptr, gate: tl.constexpr, row, column, W: tl.constexpr, dtype: tl.constexpr):
    """Some rows and columns of a gate's part (W, W) of the weight, zeros beyond."""
    at = weight_ptr + (gate * W + row[:, None]) * W + column[None, :]
    return tl.load(at, mask=(row < W)[:, None] & (column < W)[None, :], other=0.0).to(dtype)


@triton.jit
def _load_bias(bias_ptr, gate: tl.constexpr, column, W: tl.constexpr):
    return tl.load(bias_ptr + gate * W + column, mask=column < W, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load_sequences(numbers_ptr, steps, sequences, WAYS: tl.constexpr, ROWS: tl.constexpr):
    """Which sequences a program has, and how long they are."""
    row = tl.program_id(0) // WAYS * ROWS + tl.arange(0, ROWS)
    return row, tl.load(numbers_ptr + steps + row, mask=row < sequences, other=0)


@triton.jit
def _locate_words(numbers_ptr, row, length, longest, step, onwards):
    """Where the words of a step lie, [ROWS], and which sequences have one; none before and after all steps.

    `step` is counted from where the walk begins, which goes `onwards`, or from the last word to the first.
    """
    step = tl.where(onwards, step, longest - 1 - step)
    step = tl.where(step < 0, longest, step)
    first = tl.load(numbers_ptr + step, mask=step < longest, other=0)
    return (first + row).to(tl.int64), step < length


@triton.jit
def _load_words(ptr, word, alive, column, stride: tl.constexpr, W: tl.constexpr):
    """Some of W numbers of each word, [ROWS, columns]; zeros where there is none."""
    at = ptr + word[:, None] * stride + column[None, :]
    return tl.load(at, mask=alive[:, None] & (column < W)[None, :], other=0.0)


@triton.jit
def _store_words(ptr, x, word, alive, column, stride: tl.constexpr, W: tl.constexpr):
    at = ptr + word[:, None] * stride + column[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=alive[:, None] & (column < W)[None, :])


@triton.jit
def _multiply_from_memory(
    states_ptr, weight_ptr, word, alive,
    STATES: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """U h of each gate, where U is too large to be held: some columns of h at a time, from memory."""
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    column = tl.arange(0, BW)
    nothing = tl.zeros((ROWS, BW), tl.float32)
    r, z, n = nothing, nothing, nothing
    tl.debug_barrier()  # all threads have written what any may read
    for begin in range(0, W, COLUMNS_PER_LOAD):
        some = begin + tl.arange(0, COLUMNS_PER_LOAD)
        h = _load_words(states_ptr, word, alive, some, STATES, W)
        r = r + _matmul_tile(h, tl.trans(_load_weight(weight_ptr, 0, column, some, W, dtype)))
        z = z + _matmul_tile(h, tl.trans(_load_weight(weight_ptr, 1, column, some, W, dtype)))
        n = n + _matmul_tile(h, tl.trans(_load_weight(weight_ptr, 2, column, some, W, dtype)))
    return r, z, n


@triton.jit
def _multiply_back_from_memory(
    d_gates_ptr, weight_ptr, word, alive,
    GATES: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same for what the gradients of the gates give to that of h."""
    dtype: tl.constexpr = d_gates_ptr.dtype.element_ty
    column = tl.arange(0, BW)
    d_h = tl.zeros((ROWS, BW), tl.float32)
    tl.debug_barrier()
    for begin in range(0, W, COLUMNS_PER_LOAD):
        some = begin + tl.arange(0, COLUMNS_PER_LOAD)
        d_r = _load_words(d_gates_ptr, word, alive, some, GATES, W)
        d_h += _matmul_tile(d_r, _load_weight(weight_ptr, 0, some, column, W, dtype))
        d_z = _load_words(d_gates_ptr + W, word, alive, some, GATES, W)
        d_h += _matmul_tile(d_z, _load_weight(weight_ptr, 1, some, column, W, dtype))
        d_m = _load_words(d_gates_ptr + 2 * W, word, alive, some, GATES, W)
        d_h += _matmul_tile(d_m, _load_weight(weight_ptr, 2, some, column, W, dtype))
    return d_h


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def gru_forward_kernel(
    gates_ptr, weight_on_ptr, weight_back_ptr, bias_on_ptr, bias_back_ptr, input_bias_on_ptr,
    input_bias_back_ptr, states_ptr, kept_ptr, numbers_ptr, steps, sequences,
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
    weight_ptr = tl.where(onwards, weight_on_ptr, weight_back_ptr)
    bias_ptr = tl.where(onwards, bias_on_ptr, bias_back_ptr)
    input_bias_ptr = tl.where(onwards, input_bias_on_ptr, input_bias_back_ptr)
    states_ptr += way * W
    kept_ptr += way * 4 * W
    row, length = _load_sequences(numbers_ptr, steps, sequences, WAYS, ROWS)
    longest = tl.max(length, axis=0)
    column = tl.arange(0, BW)

    if HELD:
        u_r = _load_weight(weight_ptr, 0, column, column, W, dtype)
        u_z = _load_weight(weight_ptr, 1, column, column, W, dtype)
        u_n = _load_weight(weight_ptr, 2, column, column, W, dtype)
    b_r = _load_bias(bias_ptr, 0, column, W) + _load_bias(input_bias_ptr, 0, column, W)
    b_z = _load_bias(bias_ptr, 1, column, W) + _load_bias(input_bias_ptr, 1, column, W)
    b_n, c_n = _load_bias(bias_ptr, 2, column, W), _load_bias(input_bias_ptr, 2, column, W)
    h = tl.zeros((ROWS, BW), tl.float32)
    if not HELD:
        last_word, last_alive = _locate_words(numbers_ptr, row, length, longest, -1, onwards)
    word, alive = _locate_words(numbers_ptr, row, length, longest, 0, onwards)
    g_r = _load_words(gates_ptr, word, alive, column, GATES, W)
    g_z = _load_words(gates_ptr + W, word, alive, column, GATES, W)
    g_n = _load_words(gates_ptr + 2 * W, word, alive, column, GATES, W)
    for step in range(longest):
        next_word, next_alive = _locate_words(numbers_ptr, row, length, longest, step + 1, onwards)
        next_r = _load_words(gates_ptr, next_word, next_alive, column, GATES, W)
        next_z = _load_words(gates_ptr + W, next_word, next_alive, column, GATES, W)
        next_n = _load_words(gates_ptr + 2 * W, next_word, next_alive, column, GATES, W)

        if HELD:
            a_r, a_z, m = (
                _matmul_tile(h, tl.trans(u_r)),
                _matmul_tile(h, tl.trans(u_z)),
                _matmul_tile(h, tl.trans(u_n)),
            )
        else:
            a_r, a_z, m = _multiply_from_memory(
                states_ptr, weight_ptr, last_word, last_alive, STATES, W, BW, ROWS
            )
            last_word, last_alive = word, alive
        r = _sigmoid(g_r.to(tl.float32) + (a_r + b_r), EXACT)
        z = _sigmoid(g_z.to(tl.float32) + (a_z + b_z), EXACT)
        m += b_n
        n = tanh(g_n.to(tl.float32) + c_n + r * m, EXACT)
        # Read backwards, the shorter sequences begin later, and until then have zeros.
        h = tl.where(alive[:, None], n + z * (h - n), h)
        _store_words(states_ptr, h, word, alive, column, STATES, W)
        if LEARNING:
            _store_words(kept_ptr, r, word, alive, column, KEPT, W)
            _store_words(kept_ptr + W, z, word, alive, column, KEPT, W)
            _store_words(kept_ptr + 2 * W, n, word, alive, column, KEPT, W)
            _store_words(kept_ptr + 3 * W, m, word, alive, column, KEPT, W)
        word, alive, g_r, g_z, g_n = next_word, next_alive, next_r, next_z, next_n


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def gru_backward_kernel(
    d_states_ptr, weight_on_ptr, weight_back_ptr, states_ptr, kept_ptr, d_gates_ptr, before_ptr, numbers_ptr,
    steps, sequences,
    W: tl.constexpr, BW: tl.constexpr, WAYS: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The gradient of the gates, and the states that the steps began with (before).

    Twice: as the input has them, where the third is that of n, and as the state has them, where it is of m.
    """
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    GATES: tl.constexpr = 2 * WAYS * 3 * W
    STATES: tl.constexpr = WAYS * W
    KEPT: tl.constexpr = WAYS * 4 * W
    way = tl.program_id(0) % WAYS
    onwards = way != 0
    weight_ptr = tl.where(onwards, weight_back_ptr, weight_on_ptr)
    kept_ptr += way * 4 * W
    d_gates_ptr += way * 3 * W
    d_of_state_ptr = d_gates_ptr + WAYS * 3 * W
    d_states_ptr += way * W
    states_ptr += way * W
    before_ptr += way * W
    row, length = _load_sequences(numbers_ptr, steps, sequences, WAYS, ROWS)
    longest = tl.max(length, axis=0)
    column = tl.arange(0, BW)

    if HELD:
        u_r = _load_weight(weight_ptr, 0, column, column, W, dtype)
        u_z = _load_weight(weight_ptr, 1, column, column, W, dtype)
        u_n = _load_weight(weight_ptr, 2, column, column, W, dtype)
    # Of a sequence that is over, or did not begin, everything is read as zero, and so is its gradient.
    d_h = tl.zeros((ROWS, BW), tl.float32)
    word, alive = _locate_words(numbers_ptr, row, length, longest, 0, onwards)
    next_word, next_alive = _locate_words(numbers_ptr, row, length, longest, 1, onwards)
    r = _load_words(kept_ptr, word, alive, column, KEPT, W)
    z = _load_words(kept_ptr + W, word, alive, column, KEPT, W)
    n = _load_words(kept_ptr + 2 * W, word, alive, column, KEPT, W)
    m = _load_words(kept_ptr + 3 * W, word, alive, column, KEPT, W)
    given = _load_words(d_states_ptr, word, alive, column, STATES, W)
    h = _load_words(
        states_ptr, next_word, next_alive, column, STATES, W
    )  # which this walk comes to one step later
    for step in range(longest):
        later_word, later_alive = _locate_words(numbers_ptr, row, length, longest, step + 2, onwards)
        next_r = _load_words(kept_ptr, next_word, next_alive, column, KEPT, W)
        next_z = _load_words(kept_ptr + W, next_word, next_alive, column, KEPT, W)
        next_n = _load_words(kept_ptr + 2 * W, next_word, next_alive, column, KEPT, W)
        next_m = _load_words(kept_ptr + 3 * W, next_word, next_alive, column, KEPT, W)
        next_given = _load_words(d_states_ptr, next_word, next_alive, column, STATES, W)
        next_h = _load_words(states_ptr, later_word, later_alive, column, STATES, W)

        _store_words(before_ptr, h, word, alive, column, STATES, W)
        r, z, n = r.to(tl.float32), z.to(tl.float32), n.to(tl.float32)
        d_h += given.to(tl.float32)
        d_z = d_h * (h.to(tl.float32) - n) * (z * (1.0 - z))
        d_n = d_h * (1.0 - z) * (1.0 - n * n)
        d_r = d_n * m.to(tl.float32) * (r * (1.0 - r))
        d_m = d_n * r
        _store_words(d_gates_ptr, d_r, word, alive, column, GATES, W)
        _store_words(d_gates_ptr + W, d_z, word, alive, column, GATES, W)
        _store_words(d_gates_ptr + 2 * W, d_n, word, alive, column, GATES, W)
        _store_words(d_of_state_ptr, d_r, word, alive, column, GATES, W)
        _store_words(d_of_state_ptr + W, d_z, word, alive, column, GATES, W)
        _store_words(d_of_state_ptr + 2 * W, d_m, word, alive, column, GATES, W)
        d_h *= z
        if HELD:
            d_h += _matmul_tile(d_r, u_r) + _matmul_tile(d_z, u_z) + _matmul_tile(d_m, u_n)
        else:
            d_h += _multiply_back_from_memory(d_of_state_ptr, weight_ptr, word, alive, GATES, W, BW, ROWS)
        word, alive, next_word, next_alive = next_word, next_alive, later_word, later_alive
        r, z, n, m, given, h = next_r, next_z, next_n, next_m, next_given, next_h


# --- host ---------------------------------------------------------------------------------------------------


def _launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    packed_steps: PackedSteps,
    num_directions: int,
    blocks: GruKernelBlockSizes,
    **constants: Any,
) -> None:
    """One program for some sequences and a direction, the longest first; nothing if there is no word."""
    programs = -(-packed_steps.num_sequences // blocks.rows) * num_directions
    if programs:
        with torch.cuda.device_of(tensors[0]):
            kernel[(programs,)](
                *tensors, packed_steps.offsets_and_lengths, len(packed_steps.batch_sizes), packed_steps.num_sequences,
                WAYS=num_directions, ROWS=blocks.rows, num_stages=blocks.stages, **constants, **launch_options(blocks.warps),
            )  # fmt: skip


@functools.cache
def _get_kernel_constants(width: int, dtype: torch.dtype, shared_memory_bytes: int) -> dict[str, Any]:
    return {
        "W": width,
        "BW": _next_power_of_2(width),
        "HELD": fits_weight_in_shared_memory(width, dtype, shared_memory_bytes),
    }


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a · b, added up in float32, in this type."""
    if a.is_cuda and dtype == torch.float32 != a.dtype:  # as it was added up: no rounding, and no cast
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


class _GruFunction(torch.autograd.Function):
    """Of x and the parameters: V, U, c and b of each direction, in this order."""

    @staticmethod
    def forward(
        ctx: Any,
        packed_steps: PackedSteps,
        needs_gradient: bool,
        blocks: tuple[GruKernelBlockSizes, GruKernelBlockSizes] | None,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ways, width = len(parameters) // 4, parameters[1].shape[-1]
        from_input, from_state, input_bias, bias = (parameters[kind::4] for kind in range(4))
        low, weight = (
            to_autocast_dtype(x),
            to_autocast_dtype(torch.cat(from_input) if ways > 1 else from_input[0]),
        )
        gates = torch.mm(low, weight.t())
        states = gates.new_empty(len(x), ways * width)
        kept = gates.new_empty(len(x), ways * NUM_SAVED * width) if needs_gradient else states
        # A single direction is given twice, and the kernel does not look at the second.
        twice = [each.contiguous() for of in (from_state, bias, input_bias) for each in (of[0], of[-1])]
        of_forward, of_backward = blocks or (choose_gru_blocks(width, gates.dtype),) * 2
        tensors = gates, *twice, states, kept
        constants = _get_kernel_constants(width, gates.dtype, get_max_shared_memory(x.device))
        _launch(
            gru_forward_kernel, tensors, packed_steps, ways, of_forward, LEARNING=needs_gradient, **constants
        )
        if needs_gradient:
            ctx.save_for_backward(low, weight, *twice[:2], states, kept, packed_steps.offsets_and_lengths)
            ctx.packing, ctx.blocks = packed_steps, of_backward
            ctx.types = x.dtype, parameters[0].dtype
        return states

    @staticmethod
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        low, weight, *from_state, states, kept, numbers = ctx.saved_tensors
        words, width = len(states), from_state[0].shape[-1]
        ways = states.shape[1] // width
        d_gates = states.new_empty(words, 2, ways, 3 * width)  # of the input, and of the state
        before = states.new_empty(words, ways, width)
        tensors = d_states.contiguous(), *from_state, states, kept, d_gates, before
        packing = ctx.packing._replace(numbers=numbers)
        constants = _get_kernel_constants(width, states.dtype, get_max_shared_memory(states.device))
        _launch(gru_backward_kernel, tensors, packing, ways, ctx.blocks, **constants)

        x_type, parameter_type = ctx.types
        _, _, _, for_x, *for_each = ctx.needs_input_grad
        for_input, for_state, *for_biases = (any(for_each[kind::4]) for kind in range(4))
        d_x, of_parameters = None, [cast(tuple[Tensor | None, ...], (None,) * ways)] * 4
        of_input, of_state = d_gates.unbind(1)
        of_input = of_input.flatten(1)
        if for_x:
            d_x = _matmul(of_input, weight, x_type)
        if for_input:
            of_parameters[0] = _matmul(of_input.t(), low, parameter_type).chunk(ways)
        if for_state:
            # A product for each direction. A batched one is a launch less, but of 17,000 words it had four
            # times the error: that of words added up one after another, not in several sums side by side.
            pairs = zip(of_state.unbind(1), before.unbind(1), strict=True)
            of_parameters[1] = tuple(_matmul(one.t(), state, parameter_type) for one, state in pairs)
        if any(for_biases):
            of_parameters[2:] = [each.unbind() for each in d_gates.sum(0, dtype=parameter_type).unbind()]
        return None, None, None, d_x, *itertools.chain.from_iterable(zip(*of_parameters, strict=True))


@disable_compile
def run_fused_gru(
    x: Tensor,
    parameters: Sequence[GruParameters],
    packed_steps: PackedSteps,
    blocks: tuple[GruKernelBlockSizes, GruKernelBlockSizes] | None = None,
) -> Tensor:
    """The states ``(T, num_directions · W)``, from zeros, of the words ``x`` ``(T, inputs)``, T of them in all.

    ``parameters`` are those of one direction, or of both, of a layer of ``nn.GRU``; W is at most ``MAX_WIDTH``.
    In bfloat16, float16 or float32, or by autocast. Differentiable once. ``blocks``: of forward and of
    backward.
    """
    inputs = x, *itertools.chain.from_iterable(parameters)
    learning = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    return cast(Tensor, _GruFunction.apply(packed_steps, learning, blocks, *inputs))
