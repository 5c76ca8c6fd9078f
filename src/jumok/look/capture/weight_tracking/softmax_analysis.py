"""Analysis of tracked softmaxes: the attention that a softmax computes, or the reason why it is not shown."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.module_stack import (
    ModuleFrame,
    get_class_name,
    get_num_heads,
    looks_like_attention,
)
from jumok.look.capture.weight_tracking.softmax_candidates import (
    SoftmaxCandidate,
    ValueProduct,
    get_storage_id,
    get_version,
)
from jumok.look.capture.weight_tracking.weight_tracker import get_tracker

CHANNEL_PATTERN = re.compile(r"channel|xca|cross_?cov|transposed", re.IGNORECASE)

UNUSED_REASON = "no product of its softmax with values was found"
SINGLE_REASON = "its softmax is over a single score, whose weight is always 1; it has no map of queries and keys"
FEATURES_REASON = "its softmax does not appear to be over positions; one over features has no map of queries and keys"
NEGATIVE_REASON = "it changes its weights after the softmax, and some are negative: they do not form a distribution"
PARTS_REASON = "its weights are used in several parts"
OVERWRITTEN_REASON = "its scores and its weights were overwritten"
SEVERAL_REASON = "it has several softmaxes, not all of which appear to weight values in the same way"


class SoftmaxAttention(NamedTuple):
    """An attention that a softmax computes."""

    attention: CapturedAttention
    kind: str | None  # "channel" if it weights channels, not positions
    is_bhqk: bool  # the scores are (B, H, Q, K), as was assumed when they were modified


@dataclass
class TrackedSoftmax:
    """A softmax in a module that may be an attention."""

    candidate: SoftmaxCandidate
    name: str  # of the module
    is_product: bool  # whether its scores are a product of two tensors that are not parameters
    modify_attention: Callable[[CapturedAttention], CapturedAttention]  # applies the observers' modifications
    frames: list[ModuleFrame] = field(default_factory=list)  # of the module, and its callers until it was used
    parent_frame: ModuleFrame | None = None  # the caller of these

    @functools.cached_property
    def attention_frame(self) -> ModuleFrame | None:
        """The first module whose class is named after attention."""
        return next((frame for frame in self.frames if looks_like_attention(frame.module)), None)

    @property
    def is_over_positions(self) -> bool:
        """Whether there are as many keys as positions in an input or output of the module."""
        return self.candidate.num_keys in _collect_sizes(self.frames).positions

    def record_factors(self, factors: Sequence[Tensor]) -> None:
        """Record a product. Shared memory shows whether a factor is the output of this attention."""
        output_ids = {get_storage_id(out) for ref in self.candidate.product_outputs if (out := ref()) is not None}
        self.candidate.is_output_multiplied |= any(get_storage_id(factor) in output_ids for factor in factors)

    @property
    def owner_name(self) -> str:
        """The name of the attention."""
        frame = self.attention_frame or self.frames[-1]
        return self.name if frame is self.frames[0] else frame.name


def analyze_softmaxes(frame: ModuleFrame, parent_frame: ModuleFrame | None) -> list[tuple[str, SoftmaxAttention | str]]:
    """Analyze the softmaxes of a module that has ended: attention or a reason, by name.

    Weights that have not been used yet may be used by the caller of the module.
    """
    if not frame.softmaxes:
        return []
    ended, frame.softmaxes = frame.softmaxes, []
    done: list[TrackedSoftmax] = []
    for tracked in ended:
        if tracked.candidate.is_live and not tracked.candidate.value_products and parent_frame is not None:
            tracked.frames.append(parent_frame)
            parent_frame.softmaxes.append(tracked)
            frame.is_reported = True  # the result is not known yet
        elif parent_frame is not None and _may_divide_output(tracked, parent_frame):
            tracked.parent_frame = parent_frame
            parent_frame.softmaxes.append(tracked)
            frame.is_reported = True
        else:
            tracked.candidate.stop()
            tracked.parent_frame = tracked.parent_frame or parent_frame
            done.append(tracked)
    get_tracker().exit_if_idle()
    product_owners = {
        tracked.owner_name
        for tracked in done
        if tracked.is_product and isinstance(_get_result(tracked), SoftmaxAttention)
    }
    # Beside an attention, a softmax that is not over positions is something else: a gate or a kernel.
    done = [
        tracked
        for tracked in done
        if tracked.owner_name not in product_owners or tracked.is_product or tracked.is_over_positions
    ]
    results = [(tracked.owner_name, result) for tracked in done if (result := _get_result(tracked)) is not None]
    for name in {name for name, _ in results}:
        same_owner = [result for owner, result in results if owner == name]
        shapes = {result.attention.shape for result in same_owner if isinstance(result, SoftmaxAttention)}
        reasons = [result for result in same_owner if isinstance(result, str)]
        if len(same_owner) > 1 and (reasons or len(shapes) > 1):
            reason = reasons[0] if len(set(reasons)) == 1 and not shapes else SEVERAL_REASON
            results = [entry for entry in results if entry[0] != name] + [(name, reason)]
    return results


def _may_divide_output(softmax: TrackedSoftmax, parent_frame: ModuleFrame) -> bool:
    """Return whether the caller of the module merged the heads into the batch, and will divide the output."""
    if softmax.parent_frame is not None or not softmax.candidate.is_output_tracked:
        return False
    num_heads = _get_num_heads([*softmax.frames, parent_frame])
    batch_size, caller_size = (_collect_sizes(frames).batch_size for frames in (softmax.frames, [parent_frame]))
    return num_heads is not None and batch_size == num_heads * caller_size


def _get_num_heads(frames: Sequence[ModuleFrame | None]) -> int | None:
    counts = (get_num_heads(frame.module) for frame in frames if frame is not None)
    return next((count for count in counts if count), None)


def _get_batch_size(softmax: TrackedSoftmax, sizes: _ModuleSizes, num_heads: int | None) -> int:
    """Return the batch size of the module, or of its caller, if that has merged the heads into the batch."""
    if softmax.parent_frame is not None:
        caller_size = _collect_sizes([softmax.parent_frame]).batch_size
        if caller_size * (num_heads or 1) == sizes.batch_size:
            return caller_size
    return sizes.batch_size


def _get_result(softmax: TrackedSoftmax) -> SoftmaxAttention | str | None:
    """Return the attention, the reason why there is none, or None for a softmax that is not an attention."""
    candidate = softmax.candidate
    if candidate.is_merged:
        return None
    if not candidate.cached_result:
        try:
            candidate.cached_result.append(_analyze(softmax))
        except (RuntimeError, IndexError) as error:
            candidate.cached_result.append(f"it is called in an unusual form ({error})")
    result: SoftmaxAttention | str | None = candidate.cached_result[0]
    return result


def _analyze(softmax: TrackedSoftmax) -> SoftmaxAttention | str | None:
    candidate = softmax.candidate
    # A module whose attention was computed by another module may have a softmax of its own: a router of experts.
    is_expected = softmax.attention_frame is not None and not softmax.attention_frame.has_attention
    if candidate.reason is not None or not candidate.value_products:
        unused = UNUSED_REASON if is_expected else None
        return candidate.reason or unused if is_expected or softmax.is_product else None
    product = candidate.value_products[0]
    if len(candidate.value_products) > 1:
        num_elements = sum(part.weights.numel() for part in candidate.value_products)
        if num_elements != candidate.num_scores or not all(part.is_unchanged for part in candidate.value_products):
            return PARTS_REASON if is_expected or softmax.is_product else None
        product = _merge_partial_products(candidate)
    sizes = _collect_sizes(softmax.frames)
    num_heads = _get_num_heads([*softmax.frames, softmax.parent_frame])
    heads_first = num_heads is not None and candidate.has_heads_first(num_heads)
    order = _find_axis_order(product, num_heads, _get_batch_size(softmax, sizes, num_heads), heads_first)
    if not _is_attention(softmax, product, order, sizes):
        reason = SINGLE_REASON if candidate.num_keys == 1 else FEATURES_REASON
        return reason if is_expected else None
    if isinstance(order, str):
        return order
    if product.is_unchanged and (len(candidate.value_products) > 1 or not product.is_partial) and candidate.has_scores:
        attention = CapturedAttention.from_scores(order.apply(candidate.scores.detach().reshape(product.sizes)))
    elif get_version(product.source) != product.version:
        return OVERWRITTEN_REASON
    elif bool((product.weights < 0).any()):
        return NEGATIVE_REASON
    else:
        weights = product.weights if product.weights.dtype == torch.float64 else product.weights.float()
        attention = CapturedAttention.from_weights(order.apply(weights))
    kind = "channel" if _is_over_channels(softmax, product, order, sizes) else None
    in_order = candidate.modified_shape == () or (order.is_sorted and candidate.modified_shape == order.shape)
    return SoftmaxAttention(softmax.modify_attention(attention) if in_order else attention, kind, in_order)


def _merge_partial_products(candidate: SoftmaxCandidate) -> ValueProduct:
    """Merge products with parts of the weights. An axis that is split over the parts is a batch axis."""
    products = candidate.value_products
    query_axes = set().union(*(product.query_axes for product in products))
    batch_axes = {axis for axis in products[0].all_axes if not axis.is_key and axis.size > 1} - query_axes
    axes = products[0].all_axes
    return replace(
        products[0],
        axes=axes,
        sizes=[axis.size for axis in axes],
        batch_axes=batch_axes,
        query_axes=query_axes,
    )


# --------------------------------------------------------------------------------------------- axes


class _AxisOrder(NamedTuple):
    """How to get ``(B, H, Q, K)`` from the axes of weights."""

    batch: list[int]  # indices of axes
    heads: list[int]
    queries: list[int]
    keys: list[int]
    shape: tuple[int, int, int, int]
    has_heads_first: bool = False  # batch and heads share an axis, which iterates over the heads first

    @property
    def is_sorted(self) -> bool:
        indices = [*self.batch, *self.heads, *self.queries, *self.keys]
        return indices == sorted(indices) and not self.has_heads_first

    def apply(self, x: Tensor) -> Tensor:
        x = x.permute(*self.batch, *self.heads, *self.queries, *self.keys)
        if self.has_heads_first:
            return x.reshape(self.shape[1], self.shape[0], *self.shape[2:]).transpose(0, 1)
        return x.reshape(self.shape)


def _find_axis_order(
    product: ValueProduct, num_heads: int | None, batch_size: int, has_heads_first: bool
) -> _AxisOrder | str:
    """Return which axes are batch, heads, queries and keys, or the reason why that is ambiguous.

    ``has_heads_first``: an axis that batch and heads share iterates over the heads first.
    """
    axes, size = product.axes, product.sizes
    keys = [i for i, axis in enumerate(axes) if axis.is_key]
    rows = [i for i, axis in enumerate(axes) if axis in product.query_axes]
    batch = [i for i, axis in enumerate(axes) if axis in product.batch_axes]
    single = [i for i, axis in enumerate(axes) if not axis.is_key and i not in rows and i not in batch]

    def build_order(b: list[int], h: list[int], q: list[int]) -> _AxisOrder:
        b, h, q = sorted(b), sorted(h), sorted(q)
        counts = [math.prod(size[i] for i in indices) for indices in (b, h, q, keys)]
        if len(b) == 1 and not h and num_heads and counts[0] % num_heads == 0 and counts[0] != batch_size:
            counts[:2] = counts[0] // num_heads, num_heads  # batch and heads share an axis
            return _AxisOrder(b, h, q, keys, (counts[0], counts[1], counts[2], counts[3]), has_heads_first)
        return _AxisOrder(b, h, q, keys, (counts[0], counts[1], counts[2], counts[3]))

    others = sorted([*rows, *batch, *single])
    if not rows:  # a single query: an axis of size one, unless the values differ between queries
        is_step = len(others) < 3 and (num_heads is None or len(batch) < 2 or size[batch[-1]] == num_heads)
        rows = single[-1:]
        if not rows and not is_step:
            return "each query has values of its own"
    elif len(rows) > 1:  # the values are the same for all heads
        head_axes = [i for i in rows if size[i] == num_heads]
        if len(rows) > 2 or (not head_axes and len(others) > 2):
            return _format_ambiguous_axes(size)
        rows = [i for i in rows if i != (head_axes or rows)[0]]
    rest = [i for i in others if i not in rows]
    if len(rest) < 2:
        is_head = len(rest) == 1 and not batch and size[rest[0]] == num_heads
        return build_order([], rest, rows) if is_head else build_order(rest, [], rows)
    fitting = [i for i in rest if size[i] == num_heads]
    if len(rest) == 2 and (num_heads is None or size[rest[1]] == num_heads):
        return build_order(rest[:1], rest[1:], rows)
    if len(fitting) > 1 and num_heads != 1:  # the first axis is the batch
        fitting = [i for i in fitting if i != rest[0]]
    if len(fitting) != 1 and (num_heads != 1 or not fitting):
        return _format_ambiguous_axes(size)
    return build_order([i for i in rest if i != fitting[-1]], fitting[-1:], rows)


def _format_ambiguous_axes(sizes: Sequence[int]) -> str:
    shape = " × ".join(map(str, sizes))
    return f"it is ambiguous which axes of its weights, {shape}, are heads and which are queries"


# ----------------------------------------------------------------------------- kind of attention


class _ModuleSizes(NamedTuple):
    """Sizes of the inputs and outputs of modules."""

    batch_size: int
    positions: set[int]
    widths: set[int]
    has_features_last: bool


def _collect_sizes(frames: Sequence[ModuleFrame]) -> _ModuleSizes:
    shapes = [shape for frame in frames for shape in frame.shapes]
    positions: set[int] = set()
    widths: set[int] = set()
    for shape in shapes:
        if len(shape) == 4:  # (B, C, height, width) or (B, height, width, C)
            positions |= {shape[2] * shape[3], shape[1] * shape[2]}
            widths |= {shape[1], shape[3]}
        elif len(shape) in (2, 3):
            positions.add(shape[-2])
            widths.add(shape[-1])
    features_last = any(len(shape) < 4 for shape in shapes)
    return _ModuleSizes(shapes[0][0] if shapes and shapes[0] else 1, positions, widths, features_last)


def _is_attention(softmax: TrackedSoftmax, product: ValueProduct, order: _AxisOrder | str, sizes: _ModuleSizes) -> bool:
    """Return whether the weights are over positions, or channels, of the module's inputs or outputs."""
    if softmax.is_product:
        return True
    num_queries = order.shape[2] if isinstance(order, _AxisOrder) else 2
    num_keys = softmax.candidate.num_keys
    storage_id = get_storage_id(product.value)
    outputs = (ref() for frame in softmax.frames for _, ref in frame.products)
    is_value_product = any(out is not None and get_storage_id(out) == storage_id for out in outputs)
    if is_value_product or softmax.candidate.is_output_multiplied or num_keys == 1:
        return False
    if num_keys not in sizes.positions and num_queries > 1:
        return False
    if softmax.attention_frame is not None:
        return True
    parameters = (parameter for frame in softmax.frames for parameter in frame.module.parameters())
    is_shared = not product.batch_axes or any(get_storage_id(parameter) == storage_id for parameter in parameters)
    return num_keys in sizes.positions and num_queries > 1 and not is_shared


def _is_over_channels(softmax: TrackedSoftmax, product: ValueProduct, order: _AxisOrder, sizes: _ModuleSizes) -> bool:
    """Return whether the values are a row of positions for each channel.

    In this case they are as wide as there are positions, and the keys of all heads are the channels.
    """
    _, num_heads, num_queries, num_keys = order.shape
    is_possible = (
        num_queries == num_keys and product.value_width in sizes.positions and num_keys * num_heads in sizes.widths
    )
    if not is_possible or num_keys not in sizes.positions:
        return is_possible
    if any(CHANNEL_PATTERN.search(get_class_name(frame.module)) for frame in softmax.frames):
        return True
    # As many channels as positions: in the output of a projection, features of one position are adjacent.
    return sizes.has_features_last and product.key_stride == 1 and num_keys > 1
