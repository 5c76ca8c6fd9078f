"""A GRU over packed sequences: one kernel launch for all steps of both directions.

::

    g = x Vᵀ            # (T, directions · 3 W): one product for all words

The kernel computes what depends on the previous step::

    r = σ(g_r + c_r + U_r h + b_r)    z = σ(g_z + c_z + U_z h + b_z)
    m = U_n h + b_n                   n = tanh(g_n + c_n + r ∘ m)
    h' = n + z ∘ (h − n)

A program processes some sequences of similar length in one direction. It reads the weight once (unless it is
too large), keeps h in registers in float32, and loops over the steps of its longest sequence. Programs do not
synchronize. While a step is computed, the inputs of the next step are loaded.

Backward loops over the steps in reverse, and stores the gradients of all gates of all words, with respect to
the contribution of the input and to that of the state. The gradients of weights and biases are then sums over
all words: one product instead of one per step.

**Few launches.** The kernels of a batch take less time than Python needs to launch them. Therefore a whole
layer is one autograd node, the kernels read parameters without copies, and only a few products come before
and after them, with float32 outputs that need no cast.

**Saved for backward** are r, z, n and m. To recompute them would need the gates and all products again, and
the weight both as it is and transposed, for which there are not enough registers. To read them takes four
numbers instead of the three of the gates.

The words have the order of :func:`jumok.models.layers.recurrent.run_packed_rnn`: by steps, the longest
sequence first.
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
from jumok.attention.kernels.additive import tanh
from jumok.attention.kernels.common import (
    disable_compile,
    divide_up,
    forbid_double_backward,
    launch_options,
    pad_width,
)
from jumok.attention.kernels.launcher import launch
from jumok.models.layers.precision import to_autocast_dtype
from jumok.models.layers.ragged_layout import PackedSteps

GruParameters = tuple[Tensor, Tensor, Tensor, Tensor]  # weight_ih, weight_hh, bias_ih, bias_hh, as in nn.GRU

ON_GPU = tl.constexpr(not triton.knobs.runtime.interpret)
MAX_WIDTH = 128  # of a state
NUM_SAVED = 4  # r, z, n, m
# Bytes of a padded row of the weight. A larger weight needs more warps. An even larger one does not fit into
# the registers of a program, and is read from the cache at each step, a few columns at a time.
MAX_FOUR_WARP_BYTES, MAX_HELD_BYTES = 128, 256
COLUMNS_PER_LOAD = tl.constexpr(32)
# These differ from batch to batch. Specialized kernels would not be faster.
UNSPECIALIZED_ARGUMENTS = ["steps", "sequences"]


class GruKernelBlockSizes(NamedTuple):
    """Block sizes of the kernels."""

    rows: int = 16  # sequences of a program: the minimum of tensor cores, for as many programs as possible
    warps: int = 4
    stages: int = 1  # pipeline stages of loading a weight that is not held in registers


def choose_gru_blocks(width: int, dtype: torch.dtype) -> GruKernelBlockSizes:
    """Block sizes of both kernels for states of this width and products in this dtype."""
    return GruKernelBlockSizes(warps=4 if pad_width(width) * dtype.itemsize <= MAX_FOUR_WARP_BYTES else 8)


def fits_weight_in_shared_memory(width: int, dtype: torch.dtype, shared_memory_bytes: int) -> bool:
    """Whether a program can hold the weight, instead of reading it at each step.

    Shared memory then holds three matrices (in float32 two parts each, for tf32x3), and the state while its
    layout changes. ``tests/models/test_kernel_resources.py`` has the compiler's actual usage on each GPU.
    """
    side = pad_width(width)
    if side * dtype.itemsize > MAX_HELD_BYTES:
        return False
    parts = 2 if dtype == torch.float32 else 1
    return parts * (3 * side**2 * dtype.itemsize + GruKernelBlockSizes().rows * side * 4) <= shared_memory_bytes


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    """Exact by the exponential, or fast by the hardware instruction of tanh."""
    return 1.0 / (1.0 + tl.exp(-x)) if EXACT else 0.5 + 0.5 * tanh(0.5 * x, EXACT)


@triton.jit
def _matmul_tile(a, b):
    """a · b in b's precision, accumulated in float32."""
    a = a.to(b.dtype)
    if not ON_GPU:  # the interpreter treats bfloat16 as integers here
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _load_weight(weight_ptr, gate: tl.constexpr, row, column, W: tl.constexpr, dtype: tl.constexpr):
    """Rows and columns of a gate's part (W, W) of the weight, zero out of bounds."""
    pointers = weight_ptr + (gate * W + row[:, None]) * W + column[None, :]
    return tl.load(pointers, mask=(row < W)[:, None] & (column < W)[None, :], other=0.0).to(dtype)


@triton.jit
def _load_bias(bias_ptr, gate: tl.constexpr, column, W: tl.constexpr):
    return tl.load(bias_ptr + gate * W + column, mask=column < W, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load_sequences(packing_ptr, steps, sequences, DIRECTIONS: tl.constexpr, ROWS: tl.constexpr):
    """The sequences of a program, and their lengths."""
    row = tl.program_id(0) // DIRECTIONS * ROWS + tl.arange(0, ROWS)
    return row, tl.load(packing_ptr + steps + row, mask=row < sequences, other=0)


@triton.jit
def _locate_words(packing_ptr, row, length, max_length, step, is_forward):
    """Indices of the words of a step, [ROWS], and which sequences have one.

    If the loop is not `is_forward`, `step` counts from the last word.
    """
    step = tl.where(is_forward, step, max_length - 1 - step)
    step = tl.where(step < 0, max_length, step)
    first = tl.load(packing_ptr + step, mask=step < max_length, other=0)
    return (first + row).to(tl.int64), step < length


@triton.jit
def _load_words(ptr, word, valid, column, stride: tl.constexpr, W: tl.constexpr):
    """Columns of the W numbers of each word, [ROWS, columns], zero where there is no word."""
    pointers = ptr + word[:, None] * stride + column[None, :]
    return tl.load(pointers, mask=valid[:, None] & (column < W)[None, :], other=0.0)


@triton.jit
def _store_words(ptr, x, word, valid, column, stride: tl.constexpr, W: tl.constexpr):
    pointers = ptr + word[:, None] * stride + column[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=valid[:, None] & (column < W)[None, :])


@triton.jit
def _multiply_from_memory(
    states_ptr, weight_ptr, word, valid,
    STATES: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """U h of each gate, for a U that is too large to be held: reads a few columns of h and U at a time."""
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    column = tl.arange(0, BW)
    zeros = tl.zeros((ROWS, BW), tl.float32)
    r, z, n = zeros, zeros, zeros
    tl.debug_barrier()  # other threads of the program wrote h
    for begin in range(0, W, COLUMNS_PER_LOAD):
        part = begin + tl.arange(0, COLUMNS_PER_LOAD)
        h = _load_words(states_ptr, word, valid, part, STATES, W)
        r = r + _matmul_tile(h, tl.trans(_load_weight(weight_ptr, 0, column, part, W, dtype)))
        z = z + _matmul_tile(h, tl.trans(_load_weight(weight_ptr, 1, column, part, W, dtype)))
        n = n + _matmul_tile(h, tl.trans(_load_weight(weight_ptr, 2, column, part, W, dtype)))
    return r, z, n


@triton.jit
def _multiply_back_from_memory(
    d_gates_ptr, weight_ptr, word, valid,
    GATES: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Contribution of the gates' gradients to that of h, for a U that is too large to be held."""
    dtype: tl.constexpr = d_gates_ptr.dtype.element_ty
    column = tl.arange(0, BW)
    d_h = tl.zeros((ROWS, BW), tl.float32)
    tl.debug_barrier()
    for begin in range(0, W, COLUMNS_PER_LOAD):
        part = begin + tl.arange(0, COLUMNS_PER_LOAD)
        d_r = _load_words(d_gates_ptr, word, valid, part, GATES, W)
        d_h += _matmul_tile(d_r, _load_weight(weight_ptr, 0, part, column, W, dtype))
        d_z = _load_words(d_gates_ptr + W, word, valid, part, GATES, W)
        d_h += _matmul_tile(d_z, _load_weight(weight_ptr, 1, part, column, W, dtype))
        d_m = _load_words(d_gates_ptr + 2 * W, word, valid, part, GATES, W)
        d_h += _matmul_tile(d_m, _load_weight(weight_ptr, 2, part, column, W, dtype))
    return d_h


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def gru_forward_kernel(
    gates_ptr, weight_forward_ptr, weight_backward_ptr, bias_forward_ptr, bias_backward_ptr,
    input_bias_forward_ptr, input_bias_backward_ptr, states_ptr, saved_ptr, packing_ptr, steps, sequences,
    W: tl.constexpr, BW: tl.constexpr, DIRECTIONS: tl.constexpr, ROWS: tl.constexpr,
    HOLD_WEIGHT: tl.constexpr, NEEDS_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Computes the states of all words, and if NEEDS_GRADIENT the numbers saved for backward."""
    dtype: tl.constexpr = gates_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    GATES: tl.constexpr = DIRECTIONS * 3 * W
    STATES: tl.constexpr = DIRECTIONS * W
    SAVED: tl.constexpr = DIRECTIONS * 4 * W
    direction = tl.program_id(0) % DIRECTIONS
    is_forward = direction == 0
    gates_ptr += direction * 3 * W
    weight_ptr = tl.where(is_forward, weight_forward_ptr, weight_backward_ptr)
    bias_ptr = tl.where(is_forward, bias_forward_ptr, bias_backward_ptr)
    input_bias_ptr = tl.where(is_forward, input_bias_forward_ptr, input_bias_backward_ptr)
    states_ptr += direction * W
    saved_ptr += direction * 4 * W
    row, length = _load_sequences(packing_ptr, steps, sequences, DIRECTIONS, ROWS)
    max_length = tl.max(length, axis=0)
    column = tl.arange(0, BW)

    if HOLD_WEIGHT:
        u_r = _load_weight(weight_ptr, 0, column, column, W, dtype)
        u_z = _load_weight(weight_ptr, 1, column, column, W, dtype)
        u_n = _load_weight(weight_ptr, 2, column, column, W, dtype)
    b_r = _load_bias(bias_ptr, 0, column, W) + _load_bias(input_bias_ptr, 0, column, W)
    b_z = _load_bias(bias_ptr, 1, column, W) + _load_bias(input_bias_ptr, 1, column, W)
    b_n, c_n = _load_bias(bias_ptr, 2, column, W), _load_bias(input_bias_ptr, 2, column, W)
    h = tl.zeros((ROWS, BW), tl.float32)
    if not HOLD_WEIGHT:
        last_word, last_valid = _locate_words(packing_ptr, row, length, max_length, -1, is_forward)
    word, valid = _locate_words(packing_ptr, row, length, max_length, 0, is_forward)
    g_r = _load_words(gates_ptr, word, valid, column, GATES, W)
    g_z = _load_words(gates_ptr + W, word, valid, column, GATES, W)
    g_n = _load_words(gates_ptr + 2 * W, word, valid, column, GATES, W)
    for step in range(max_length):
        next_word, next_valid = _locate_words(packing_ptr, row, length, max_length, step + 1, is_forward)
        next_r = _load_words(gates_ptr, next_word, next_valid, column, GATES, W)
        next_z = _load_words(gates_ptr + W, next_word, next_valid, column, GATES, W)
        next_n = _load_words(gates_ptr + 2 * W, next_word, next_valid, column, GATES, W)

        if HOLD_WEIGHT:
            a_r, a_z, m = (
                _matmul_tile(h, tl.trans(u_r)),
                _matmul_tile(h, tl.trans(u_z)),
                _matmul_tile(h, tl.trans(u_n)),
            )
        else:
            a_r, a_z, m = _multiply_from_memory(states_ptr, weight_ptr, last_word, last_valid, STATES, W, BW, ROWS)
            last_word, last_valid = word, valid
        r = _sigmoid(g_r.to(tl.float32) + (a_r + b_r), EXACT)
        z = _sigmoid(g_z.to(tl.float32) + (a_z + b_z), EXACT)
        m += b_n
        n = tanh(g_n.to(tl.float32) + c_n + r * m, EXACT)
        # In the backward direction shorter sequences begin later. Their state is zero until then.
        h = tl.where(valid[:, None], n + z * (h - n), h)
        _store_words(states_ptr, h, word, valid, column, STATES, W)
        if NEEDS_GRADIENT:
            _store_words(saved_ptr, r, word, valid, column, SAVED, W)
            _store_words(saved_ptr + W, z, word, valid, column, SAVED, W)
            _store_words(saved_ptr + 2 * W, n, word, valid, column, SAVED, W)
            _store_words(saved_ptr + 3 * W, m, word, valid, column, SAVED, W)
        word, valid, g_r, g_z, g_n = next_word, next_valid, next_r, next_z, next_n


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def gru_backward_kernel(
    d_states_ptr, weight_forward_ptr, weight_backward_ptr, states_ptr, saved_ptr, d_gates_ptr,
    previous_ptr, packing_ptr, steps, sequences,
    W: tl.constexpr, BW: tl.constexpr, DIRECTIONS: tl.constexpr, ROWS: tl.constexpr,
    HOLD_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of the gates, and stores the state before each step.

    Gate gradients are stored twice: for the input's contribution, where the third is that of n, and for the
    state's contribution, where the third is that of m.
    """
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    GATES: tl.constexpr = 2 * DIRECTIONS * 3 * W
    STATES: tl.constexpr = DIRECTIONS * W
    SAVED: tl.constexpr = DIRECTIONS * 4 * W
    direction = tl.program_id(0) % DIRECTIONS
    is_forward = direction != 0
    weight_ptr = tl.where(is_forward, weight_backward_ptr, weight_forward_ptr)
    saved_ptr += direction * 4 * W
    d_gates_ptr += direction * 3 * W
    d_state_gates_ptr = d_gates_ptr + DIRECTIONS * 3 * W
    d_states_ptr += direction * W
    states_ptr += direction * W
    previous_ptr += direction * W
    row, length = _load_sequences(packing_ptr, steps, sequences, DIRECTIONS, ROWS)
    max_length = tl.max(length, axis=0)
    column = tl.arange(0, BW)

    if HOLD_WEIGHT:
        u_r = _load_weight(weight_ptr, 0, column, column, W, dtype)
        u_z = _load_weight(weight_ptr, 1, column, column, W, dtype)
        u_n = _load_weight(weight_ptr, 2, column, column, W, dtype)
    # For a sequence that has ended or not begun, everything is loaded as zero, so its gradient is zero.
    d_h = tl.zeros((ROWS, BW), tl.float32)
    word, valid = _locate_words(packing_ptr, row, length, max_length, 0, is_forward)
    next_word, next_valid = _locate_words(packing_ptr, row, length, max_length, 1, is_forward)
    r = _load_words(saved_ptr, word, valid, column, SAVED, W)
    z = _load_words(saved_ptr + W, word, valid, column, SAVED, W)
    n = _load_words(saved_ptr + 2 * W, word, valid, column, SAVED, W)
    m = _load_words(saved_ptr + 3 * W, word, valid, column, SAVED, W)
    d_output = _load_words(d_states_ptr, word, valid, column, STATES, W)
    h = _load_words(states_ptr, next_word, next_valid, column, STATES, W)  # the state before the step
    for step in range(max_length):
        later_word, later_valid = _locate_words(packing_ptr, row, length, max_length, step + 2, is_forward)
        next_r = _load_words(saved_ptr, next_word, next_valid, column, SAVED, W)
        next_z = _load_words(saved_ptr + W, next_word, next_valid, column, SAVED, W)
        next_n = _load_words(saved_ptr + 2 * W, next_word, next_valid, column, SAVED, W)
        next_m = _load_words(saved_ptr + 3 * W, next_word, next_valid, column, SAVED, W)
        next_d_output = _load_words(d_states_ptr, next_word, next_valid, column, STATES, W)
        next_h = _load_words(states_ptr, later_word, later_valid, column, STATES, W)

        _store_words(previous_ptr, h, word, valid, column, STATES, W)
        r, z, n = r.to(tl.float32), z.to(tl.float32), n.to(tl.float32)
        d_h += d_output.to(tl.float32)
        d_z = d_h * (h.to(tl.float32) - n) * (z * (1.0 - z))
        d_n = d_h * (1.0 - z) * (1.0 - n * n)
        d_r = d_n * m.to(tl.float32) * (r * (1.0 - r))
        d_m = d_n * r
        _store_words(d_gates_ptr, d_r, word, valid, column, GATES, W)
        _store_words(d_gates_ptr + W, d_z, word, valid, column, GATES, W)
        _store_words(d_gates_ptr + 2 * W, d_n, word, valid, column, GATES, W)
        _store_words(d_state_gates_ptr, d_r, word, valid, column, GATES, W)
        _store_words(d_state_gates_ptr + W, d_z, word, valid, column, GATES, W)
        _store_words(d_state_gates_ptr + 2 * W, d_m, word, valid, column, GATES, W)
        d_h *= z
        if HOLD_WEIGHT:
            d_h += _matmul_tile(d_r, u_r) + _matmul_tile(d_z, u_z) + _matmul_tile(d_m, u_n)
        else:
            d_h += _multiply_back_from_memory(d_state_gates_ptr, weight_ptr, word, valid, GATES, W, BW, ROWS)
        word, valid, next_word, next_valid = next_word, next_valid, later_word, later_valid
        r, z, n, m, d_output, h = next_r, next_z, next_n, next_m, next_d_output, next_h


# --- host ---------------------------------------------------------------------------------------------------


def _launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    packed_steps: PackedSteps,
    num_directions: int,
    blocks: GruKernelBlockSizes,
    **constants: Any,
) -> None:
    """Launch one program per block of sequences and direction, the longest first."""
    programs = divide_up(packed_steps.num_sequences, blocks.rows) * num_directions
    if programs:
        launch(
            kernel,
            (programs,),
            *tensors,
            packed_steps.offsets_and_lengths,
            len(packed_steps.batch_sizes),
            packed_steps.num_sequences,
            DIRECTIONS=num_directions,
            ROWS=blocks.rows,
            num_stages=blocks.stages,
            **constants,
            **launch_options(blocks.warps),
        )


@functools.cache
def _get_kernel_constants(width: int, dtype: torch.dtype, shared_memory_bytes: int) -> dict[str, Any]:
    return {
        "W": width,
        "BW": pad_width(width),
        "HOLD_WEIGHT": fits_weight_in_shared_memory(width, dtype, shared_memory_bytes),
    }


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a · b in this dtype, accumulated in float32."""
    if a.is_cuda and dtype == torch.float32 != a.dtype:  # neither rounded nor cast
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


class _GruFunction(torch.autograd.Function):
    """Its inputs are x, and V, U, c and b of each direction."""

    @staticmethod
    def forward(
        ctx: Any,
        packed_steps: PackedSteps,
        needs_gradient: bool,
        blocks: tuple[GruKernelBlockSizes, GruKernelBlockSizes] | None,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        directions, width = len(parameters) // 4, parameters[1].shape[-1]
        weights_ih, weights_hh, biases_ih, biases_hh = (parameters[first::4] for first in range(4))
        inputs = to_autocast_dtype(x)
        weight = to_autocast_dtype(torch.cat(weights_ih) if directions > 1 else weights_ih[0])
        gates = torch.mm(inputs, weight.t())
        states = gates.new_empty(len(x), directions * width)
        saved = gates.new_empty(len(x), directions * NUM_SAVED * width) if needs_gradient else states
        # The kernel takes two directions. A single one is passed twice, and the second is not read.
        direction_parameters = [
            tensor.contiguous() for pair in (weights_hh, biases_hh, biases_ih) for tensor in (pair[0], pair[-1])
        ]
        forward_blocks, backward_blocks = blocks or (choose_gru_blocks(width, gates.dtype),) * 2
        tensors = gates, *direction_parameters, states, saved
        constants = _get_kernel_constants(width, gates.dtype, get_max_shared_memory(x.device))
        constants = {**constants, "NEEDS_GRADIENT": needs_gradient}
        _launch(gru_forward_kernel, tensors, packed_steps, directions, forward_blocks, **constants)
        if needs_gradient:
            weights = weight, *direction_parameters[:2]
            ctx.save_for_backward(inputs, *weights, states, saved, packed_steps.offsets_and_lengths)
            ctx.packed_steps, ctx.blocks = packed_steps, backward_blocks
            ctx.dtypes = x.dtype, parameters[0].dtype
        return states

    @staticmethod
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        inputs, weight, *weights_hh, states, saved, offsets_and_lengths = ctx.saved_tensors
        num_words, width = len(states), weights_hh[0].shape[-1]
        directions = states.shape[1] // width
        d_gates = states.new_empty(num_words, 2, directions, 3 * width)  # of the input, and of the state
        previous_states = states.new_empty(num_words, directions, width)
        tensors = d_states.contiguous(), *weights_hh, states, saved, d_gates, previous_states
        packed_steps = ctx.packed_steps._replace(offsets_and_lengths=offsets_and_lengths)
        constants = _get_kernel_constants(width, states.dtype, get_max_shared_memory(states.device))
        _launch(gru_backward_kernel, tensors, packed_steps, directions, ctx.blocks, **constants)

        x_dtype, parameter_dtype = ctx.dtypes
        _, _, _, for_x, *for_parameters = ctx.needs_input_grad
        for_weights_ih, for_weights_hh, *for_biases = (any(for_parameters[first::4]) for first in range(4))
        d_x, d_parameters = None, [cast(tuple[Tensor | None, ...], (None,) * directions)] * 4
        d_input_gates, d_state_gates = d_gates.unbind(1)
        d_input_gates = d_input_gates.flatten(1)
        if for_x:
            d_x = multiply(d_input_gates, weight, x_dtype)
        if for_weights_ih:
            d_parameters[0] = multiply(d_input_gates.t(), inputs, parameter_dtype).chunk(directions)
        if for_weights_hh:
            # One product for each direction. A batched product saves a launch, but its error was four times
            # as large for 17,000 words, because it adds them up sequentially instead of in several partial
            # sums.
            pairs = zip(d_state_gates.unbind(1), previous_states.unbind(1), strict=True)
            d_parameters[1] = tuple(multiply(gates.t(), state, parameter_dtype) for gates, state in pairs)
        if any(for_biases):
            d_parameters[2:] = [x.unbind() for x in d_gates.sum(0, dtype=parameter_dtype).unbind()]
        return None, None, None, d_x, *itertools.chain.from_iterable(zip(*d_parameters, strict=True))


@disable_compile
def run_fused_gru(
    x: Tensor,
    parameters: Sequence[GruParameters],
    packed_steps: PackedSteps,
    blocks: tuple[GruKernelBlockSizes, GruKernelBlockSizes] | None = None,
) -> Tensor:
    """Return the states ``(T, directions · W)``, from zeros, of packed words ``x`` ``(T, input_width)``.

    ``parameters`` are those of one or both directions of a layer of ``nn.GRU``. W is at most ``MAX_WIDTH``.
    Numbers are bfloat16, float16 or float32, or converted by autocast. The result is differentiable once.
    ``blocks`` are the block sizes of forward and backward.
    """
    inputs = x, *itertools.chain.from_iterable(parameters)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)

    return cast(Tensor, _GruFunction.apply(packed_steps, needs_gradient, blocks, *inputs))
