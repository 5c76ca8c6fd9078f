"""The kernels of one decoding step of additive attention, forward and backward. See :mod:`.additive_step`.

A program loops over some of the keys of one row. The last program of a row to finish combines the partial
results of the row, so that no second launch is needed.

A step is so short that its time is mostly waiting. So each warp has its own keys, and each key has some
lanes: a warp sums within itself, has no barrier in its loop, and keeps its part of the result in registers.
It loads the next keys as soon as it has used the current ones, and likewise the next values: each are loaded
while it works on the others. If they were loaded earlier, they would go to other registers, and the compiler
would move them at the end of each iteration and so wait for them. With STAGES > 1, some tiles are loaded into
shared memory instead, at the cost of a barrier and a read from allowed in each iteration.

H, D and strides are in units of UNIT elements, so that the compiler knows what they are multiples of and
loads 16 bytes at a time if possible. By itself, it only checks for multiples of 16, and H = 1000 is not one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jumok.attention.kernels.additive import tanh
from jumok.attention.kernels.common import ON_GPU

# These change from batch to batch, and specialising the kernel on them would not make it faster.
UNSPECIALIZED_ARGUMENTS = ["K", "share", "k_units_b", "value_units_b"]


# --- tiles of keys and values -------------------------------------------------------------------------------


@triton.jit
def _tile_columns(LINES: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of a tile [keys, LINES, WIDTH], as [1, LINES, WIDTH].

    In this shape, the compiler assigns lanes along a line, the other lanes and the warps along the keys, and
    the same positions of all lines to each lane. So a sum over all columns stays within the lanes of a key:
    with 16 lanes, two keys at once take four shuffles.
    """
    return (tl.arange(0, LINES) * WIDTH)[None, :, None] + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def _load_vector(ptr, columns, size):
    return tl.load(ptr + columns, mask=columns < size, other=0.0).to(tl.float32)


@triton.jit
def _load_rows(
    ptr, b, units_b, units_r, row, last, units,
    UNIT: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Some rows of keys or values, [keys, lines, width], for `_to_float32`. With PAIRS, half that width.

    They are for the next iteration of a loop. Two 16-bit numbers that are loaded into one register must stay
    in it until then. Otherwise, the compiler would unpack them in this iteration, and wait for them.
    """
    start = (b * units_b + row.to(tl.int64) * units_r)[:, None, None]
    inside = (row < last)[:, None, None]
    if PAIRS:
        columns = _tile_columns(LINES, WIDTH // 2)
        at = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + start * (UNIT // 2) + columns
        rows = tl.load(at, mask=inside & (columns < units * (UNIT // 2)), other=0)
    else:
        columns = _tile_columns(LINES, WIDTH)
        rows = tl.load(ptr + start * UNIT + columns, mask=inside & (columns < units * UNIT), other=0.0)
    return rows


@triton.jit
def _to_float32(rows, kind: tl.constexpr, PAIRS: tl.constexpr):
    """Rows in float32, [keys, lines, width]."""
    if PAIRS:
        low = rows.to(tl.int16).to(kind, bitcast=True)
        high = (rows >> 16).to(tl.int16).to(kind, bitcast=True)
        pairs = tl.join(low.to(tl.float32), high.to(tl.float32))
        numbers = tl.reshape(pairs, (rows.shape[0], rows.shape[1], 2 * rows.shape[2]))
    else:
        numbers = rows.to(tl.float32)
    return numbers


@triton.jit
def _sum_columns(x):
    """[keys, lines, width] → [keys]"""
    return tl.sum(tl.sum(x, axis=1), axis=1)


@triton.jit
def _store_per_lane(ptr, x, mask):
    """`tl.store` of one number per key, by the lanes that have it.

    tl.store would first exchange the numbers, so that adjacent lanes write to adjacent addresses, at the cost
    of barriers for every tile. Not for values that this kernel reads again.
    """
    if ON_GPU:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0;}",
            "=r,l,f,r",
            [ptr.to(tl.int64), x, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(ptr, x, mask=mask)


# --- partial results of a row -------------------------------------------------------------------------------


@triton.jit
def _is_last_program(counter_ptr, b, SPLITS: tl.constexpr):
    """Whether this is the last program of the row to get here. It then sees what the others have written.

    The counter is reset for the next launch.
    """
    tl.debug_barrier()  # wait until all threads of this program have written
    last = tl.atomic_add(counter_ptr + b, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        tl.store(counter_ptr + b, 0)
    return last


@triton.jit
def _part_columns(start: tl.constexpr, PW: tl.constexpr, VECTOR: tl.constexpr):
    """PW columns of the parts. A thread has VECTOR adjacent ones: so few that no two warps share a column."""
    return start + tl.multiple_of(tl.arange(0, PW), VECTOR)


@triton.jit
def _load_parts(parts_ptr, b, part, columns, size, SPLITS: tl.constexpr):
    """The partial results of all programs of the row in these columns, [parts, columns]."""
    at = parts_ptr + (b * SPLITS + part)[:, None] * size + columns[None, :]
    inside = (part < SPLITS)[:, None] & (columns < size)[None, :]
    return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


# --- forward ------------------------------------------------------------------------------------------------


@triton.jit
def _load_allowed(allowed_ptr, b, K, row, last, MASKED: tl.constexpr):
    allowed = row < last
    if MASKED:
        allowed = tl.load(allowed_ptr + b * K + row, mask=allowed, other=0) != 0
    return allowed


@triton.jit
def _replace_negative_infinity(x):
    """0 for -inf, the maximum of no scores: exp(-inf - 0) is 0, but exp(-inf + inf) is NaN."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def _compute_lse(highest, total):
    """log Σ exp(score), or 0 for a row without any allowed key, whose weights exp(-inf - 0) are then 0."""
    return tl.where(total == 0.0, 0.0, highest + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, value_ptr, allowed_ptr, scores_ptr, lse_ptr, context_ptr, precise_ptr, parts_ptr,
    sums_ptr, counter_ptr, K, share, h_units, d_units, k_units_b, k_units_r, value_units_b, value_units_r,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
    PRECISE: tl.constexpr, ROWS: tl.constexpr, HL: tl.constexpr, DL: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, STAGES: tl.constexpr, PW: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The scores Σ v · tanh(q + k), their log Σ exp, and the values mixed by their softmax.

    Each of the ROWS positions of a tile has its own softmax over the keys that pass through it. They are
    combined after the loop. parts (B, SPLITS, D) and sums (B, SPLITS, 2: maximum score, Σ exp) are float32
    scratch memory.
    """
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    first = split * share
    last = tl.minimum(first + share, K)
    H = h_units * UNIT
    D = d_units * UNIT
    h = _tile_columns(HL, WIDTH)
    d = _tile_columns(DL, WIDTH)
    row = first + tl.arange(0, ROWS)
    if STAGES == 1:
        k = _load_rows(k_ptr, b, k_units_b, k_units_r, row, last, h_units, UNIT, HL, WIDTH, PAIRS)
    q = _load_vector(q_ptr + b * H, h, H)
    v = _load_vector(v_ptr, h, H)
    if STAGES == 1:
        value = _load_rows(value_ptr, b, value_units_b, value_units_r, row, last, d_units, UNIT, DL, WIDTH, PAIRS)
    allowed = _load_allowed(allowed_ptr, b, K, row, last, MASKED)

    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, DL, WIDTH), tl.float32)
    for k0 in tl.range(first, last, ROWS, num_stages=STAGES):
        row = k0 + tl.arange(0, ROWS)
        if STAGES > 1:
            k = _load_rows(k_ptr, b, k_units_b, k_units_r, row, last, h_units, UNIT, HL, WIDTH, PAIRS)
            value = _load_rows(value_ptr, b, value_units_b, value_units_r, row, last, d_units, UNIT, DL, WIDTH, PAIRS)
        score = _sum_columns(v * tanh(q + _to_float32(k, k_ptr.dtype.element_ty, PAIRS), EXACT))
        if STAGES == 1:
            k = _load_rows(k_ptr, b, k_units_b, k_units_r, row + ROWS, last, h_units, UNIT, HL, WIDTH, PAIRS)
        score = tl.where(allowed, score, -float("inf"))
        allowed = _load_allowed(allowed_ptr, b, K, row + ROWS, last, MASKED)
        _store_per_lane(scores_ptr + b * K + row, score, row < last)
        new_peak = tl.maximum(peak, score)
        level = _replace_negative_infinity(new_peak)
        shrink = tl.exp(peak - level)
        weight = tl.exp(score - level)
        total = total * shrink + weight
        if MASKED:  # blocked values may be NaN; here, two numbers are replaced at once
            value = tl.where((score != -float("inf"))[:, None, None], value, 0)
        numbers = _to_float32(value, value_ptr.dtype.element_ty, PAIRS)
        mix = mix * shrink[:, None, None] + weight[:, None, None] * numbers
        if STAGES == 1:
            value = _load_rows(
                value_ptr, b, value_units_b, value_units_r, row + ROWS, last, d_units, UNIT, DL, WIDTH, PAIRS
            )
        peak = new_peak
    highest = _replace_negative_infinity(tl.max(peak, axis=0))
    factor = tl.exp(peak - highest)
    total = tl.sum(total * factor, axis=0)
    mixed = tl.expand_dims(tl.sum(mix * factor[:, None, None], axis=0), 0)  # [1, DL, WIDTH]

    if SPLITS == 1:
        mixed *= 1.0 / tl.where(total == 0.0, 1.0, total)
        tl.store(context_ptr + b * D + d, mixed, mask=d < D)
        if PRECISE:
            tl.store(precise_ptr + b * D + d, mixed, mask=d < D)
        tl.store(lse_ptr + b, _compute_lse(highest, total))
    else:
        tl.store(parts_ptr + (b * SPLITS + split) * D + d, mixed, mask=d < D)
        tl.store(sums_ptr + (b * SPLITS + split) * 2, highest)
        tl.store(sums_ptr + (b * SPLITS + split) * 2 + 1, total)
        if _is_last_program(counter_ptr, b, SPLITS):
            # Loads first, stores last: a load after a store would wait for it.
            part = tl.arange(0, PARTS)
            columns = _part_columns(0, PW, VECTOR)
            parts = _load_parts(parts_ptr, b, part, columns, D, SPLITS)
            sums_at = sums_ptr + (b * SPLITS + part) * 2
            peaks = tl.load(sums_at, mask=part < SPLITS, other=0.0, cache_modifier=".cg")
            totals = tl.load(sums_at + 1, mask=part < SPLITS, other=0.0, cache_modifier=".cg")
            peaks = tl.where(totals == 0.0, -float("inf"), peaks)  # no allowed key in that part
            highest = _replace_negative_infinity(tl.max(peaks, axis=0))
            factors = tl.exp(peaks - highest)
            total = tl.sum(totals * factors, axis=0)
            factors *= 1.0 / tl.where(total == 0.0, 1.0, total)
            for after in tl.static_range(PW, DL * WIDTH + PW, PW):
                these, c = parts, columns
                if after < DL * WIDTH:
                    columns = _part_columns(after, PW, VECTOR)
                    parts = _load_parts(parts_ptr, b, part, columns, D, SPLITS)
                whole = tl.sum(these * factors[:, None], axis=0)
                tl.store(context_ptr + b * D + c, whole, mask=c < D)
                if PRECISE:
                    tl.store(precise_ptr + b * D + c, whole, mask=c < D)
            tl.store(lse_ptr + b, _compute_lse(highest, total))


# --- backward -----------------------------------------------------------------------------------------------


@triton.jit
def _load_per_key(ptr, b, K, row, last, other):
    """One number per key, [keys]."""
    return tl.load(ptr + b * K + row, mask=row < last, other=other)


@triton.jit(do_not_specialize=UNSPECIALIZED_ARGUMENTS)
def backward_kernel(
    q_ptr, k_ptr, v_ptr, value_ptr, scores_ptr, lse_ptr, context_ptr, d_context_ptr, ds_ptr, dq_ptr,
    parts_ptr, counter_ptr, K, share, h_units, d_units, k_units_b, k_units_r, value_units_b, value_units_r,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, HL: tl.constexpr, DL: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    STAGES: tl.constexpr, PW: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """ds = w · (dw - Σ w · dw) and dq = v · Σ_k ds · (1 - tanh²(q + k)).

    With w = exp(score - lse) and dw = dc · value. Σ w · dw needs no loop over all keys: it is dc · context.
    parts (B, SPLITS, H), dq without v, is float32 scratch memory.
    """
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    first = split * share
    last = tl.minimum(first + share, K)
    H = h_units * UNIT
    D = d_units * UNIT
    h = _tile_columns(HL, WIDTH)
    d = _tile_columns(DL, WIDTH)
    row = first + tl.arange(0, ROWS)
    if STAGES == 1:
        value = _load_rows(value_ptr, b, value_units_b, value_units_r, row, last, d_units, UNIT, DL, WIDTH, PAIRS)
    dc = _load_vector(d_context_ptr + b * D, d, D)
    context = _load_vector(context_ptr + b * D, d, D)
    if STAGES == 1:
        k = _load_rows(k_ptr, b, k_units_b, k_units_r, row, last, h_units, UNIT, HL, WIDTH, PAIRS)
    q = _load_vector(q_ptr + b * H, h, H)
    score = _load_per_key(scores_ptr, b, K, row, last, -float("inf"))
    lse = tl.load(lse_ptr + b)
    # Every warp computes this for itself, which saves the barriers.
    mean = _sum_columns(tl.broadcast_to(dc * context, (ROWS, DL, WIDTH)))

    slopes = tl.zeros((ROWS, HL, WIDTH), tl.float32)
    for k0 in tl.range(first, last, ROWS, num_stages=STAGES):
        row = k0 + tl.arange(0, ROWS)
        if STAGES > 1:
            value = _load_rows(value_ptr, b, value_units_b, value_units_r, row, last, d_units, UNIT, DL, WIDTH, PAIRS)
            k = _load_rows(k_ptr, b, k_units_b, k_units_r, row, last, h_units, UNIT, HL, WIDTH, PAIRS)
        dw = _sum_columns(dc * _to_float32(value, value_ptr.dtype.element_ty, PAIRS))
        if STAGES == 1:
            value = _load_rows(
                value_ptr, b, value_units_b, value_units_r, row + ROWS, last, d_units, UNIT, DL, WIDTH, PAIRS
            )
        ds = tl.exp(score - lse) * (dw - mean)
        if MASKED:  # blocked keys may be NaN
            ds = tl.where(score != -float("inf"), ds, 0.0)
            k = tl.where((score != -float("inf"))[:, None, None], k, 0)
        score = _load_per_key(scores_ptr, b, K, row + ROWS, last, -float("inf"))
        t = tanh(q + _to_float32(k, k_ptr.dtype.element_ty, PAIRS), EXACT)
        if STAGES == 1:
            k = _load_rows(k_ptr, b, k_units_b, k_units_r, row + ROWS, last, h_units, UNIT, HL, WIDTH, PAIRS)
        _store_per_lane(ds_ptr + b * K + row, ds, row < last)
        slopes += ds[:, None, None] * (1.0 - t * t)
    slope = tl.expand_dims(tl.sum(slopes, axis=0), 0)  # [1, HL, WIDTH]

    if SPLITS == 1:
        tl.store(dq_ptr + b * H + h, slope * _load_vector(v_ptr, h, H), mask=h < H)
    else:
        tl.store(parts_ptr + (b * SPLITS + split) * H + h, slope, mask=h < H)
        if _is_last_program(counter_ptr, b, SPLITS):
            # Loads first, as above.
            part = tl.arange(0, PARTS)
            columns = _part_columns(0, PW, VECTOR)
            parts = _load_parts(parts_ptr, b, part, columns, H, SPLITS)
            v = _load_vector(v_ptr, columns, H)
            for after in tl.static_range(PW, HL * WIDTH + PW, PW):
                these, scale, c = parts, v, columns
                if after < HL * WIDTH:
                    columns = _part_columns(after, PW, VECTOR)
                    parts = _load_parts(parts_ptr, b, part, columns, H, SPLITS)
                    v = _load_vector(v_ptr, columns, H)
                tl.store(dq_ptr + b * H + c, tl.sum(these, axis=0) * scale, mask=c < H)
