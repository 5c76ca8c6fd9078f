"""From a softmax that was followed to the attention that it is, or to the reason why it is not shown."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jumok.look.capture.adapters.module_stack import (
    ModuleFrame,
    get_class_name,
    get_num_heads,
    looks_like_attention,
)
from jumok.look.capture.adapters.softmax_candidates import (
    SoftmaxCandidate,
    ValueProduct,
    get_storage_id,
    get_version,
)
from jumok.look.capture.adapters.weight_tracker import get_tracker
from jumok.look.capture.captured_attention import CapturedAttention

CHANNEL_PATTERN = re.compile(r"channel|xca|cross_?cov|transposed", re.IGNORECASE)

UNUSED_REASON = "no product of its softmax with values was seen"
FEATURES_REASON = (
    "its softmax is not seen to be over positions; one over features has no map of queries and keys"
)
NEGATIVE_REASON = (
    "it changes its weights after the softmax, and some are negative: they are no shares of a whole"
)
PARTS_REASON = "its weights are used in several parts"
OVERWRITTEN_REASON = "its scores and its weights were overwritten"
SEVERAL_REASON = "it has several softmaxes, not all of which are seen to weigh values in the same way"


class SoftmaxAttention(NamedTuple):
    """An attention that was found."""

    attention: CapturedAttention
    kind: str | None  # "channel" if it weighs channels, not positions
    is_bhqk: bool  # the scores are (B, H, Q, K) in the way in which they were changed


@dataclass
class TrackedSoftmax:
    """A softmax in a module that may be an attention."""

    candidate: SoftmaxCandidate
    name: str  # of the module
    is_product: bool  # whether its scores are a product of two tensors that are no parameters
    modify_attention: Callable[[CapturedAttention], CapturedAttention]  # what changes of others leave of it
    frames: list[ModuleFrame] = field(
        default_factory=list
    )  # the module's, and those around it until it was used
    parent_frame: ModuleFrame | None = None  # the one around these

    @functools.cached_property
    def attention_frame(self) -> ModuleFrame | None:
        """The module in whose name it says that it attends."""
        return next((one for one in self.frames if looks_like_attention(one.module)), None)

    @property
    def is_over_positions(self) -> bool:
        """Whether there are as many keys as positions in something that the module takes or gives."""
        return self.candidate.num_keys in _collect_sizes(self.frames).positions

    def record_factors(self, factors: Sequence[Tensor]) -> None:
        """A product of these was computed. Their memory tells whether one is the output of this attention."""
        outs = {get_storage_id(out) for ref in self.candidate.product_outputs if (out := ref()) is not None}
        self.candidate.is_output_multiplied |= any(get_storage_id(factor) in outs for factor in factors)

    @property
    def owner_name(self) -> str:
        """The name of the attention."""
        named = self.attention_frame or self.frames[-1]
        return self.name if named is self.frames[0] else named.name


def analyze_softmaxes(
    frame: ModuleFrame, parent_frame: ModuleFrame | None
) -> list[tuple[str, SoftmaxAttention | str]]:
    """What the softmaxes of a module that has ended are: maps, or reasons, by name.

    Weights that nothing has used yet may be used by the module above.
    """
    if not frame.softmaxes:
        return []
    ended, frame.softmaxes = frame.softmaxes, []
    done: list[TrackedSoftmax] = []
    for one in ended:
        if one.candidate.live and not one.candidate.uses and parent_frame is not None:
            one.frames.append(parent_frame)
            parent_frame.softmaxes.append(one)
            frame.is_reported = True  # it is not known yet what it is
        else:
            one.candidate.stop()
            one.above = parent_frame
            done.append(one)
    get_tracker().exit_if_idle()
    plain = {
        one.owner_name for one in done if one.is_product and isinstance(_get_result(one), SoftmaxAttention)
    }
    # Beside an attention, a softmax over no positions is something else: a gate, a kernel.
    done = [one for one in done if one.owner_name not in plain or one.is_product or one.is_over_positions]
    judged = [(one.owner_name, verdict) for one in done if (verdict := _get_result(one)) is not None]
    for name in {name for name, _ in judged}:
        some = [verdict for owner, verdict in judged if owner == name]
        shapes = {verdict.attention.shape for verdict in some if isinstance(verdict, SoftmaxAttention)}
        reasons = [verdict for verdict in some if isinstance(verdict, str)]
        if len(some) > 1 and (reasons or len(shapes) > 1):
            reason = reasons[0] if len(set(reasons)) == 1 and not shapes else SEVERAL_REASON
            judged = [one for one in judged if one[0] != name] + [(name, reason)]
    return judged


def _get_result(softmax: TrackedSoftmax) -> SoftmaxAttention | str | None:
    """The map, the reason why there is none, or None for a softmax that is no attention."""
    candidate = softmax.candidate
    if candidate.is_merged:
        return None
    if not candidate.cached_result:
        try:
            candidate.cached_result.append(_analyze(softmax))
        except (RuntimeError, IndexError) as error:
            candidate.cached_result.append(f"it is called in an unusual form ({error})")
    found: SoftmaxAttention | str | None = candidate.cached_result[0]
    return found


def _analyze(softmax: TrackedSoftmax) -> SoftmaxAttention | str | None:
    candidate = softmax.candidate
    expected = softmax.attention_frame is not None
    if candidate.reason is not None or not candidate.value_products:
        unused = UNUSED_REASON if expected else None
        return candidate.reason or unused if expected or softmax.is_product else None
    use = candidate.value_products[0]
    if len(candidate.value_products) > 1:
        pieces = sum(part.weights.numel() for part in candidate.value_products)
        if pieces != candidate.num_scores or not all(part.is_unchanged for part in candidate.value_products):
            return PARTS_REASON if expected or softmax.is_product else None
        use = _merge_partial_products(candidate)
    sizes = _collect_sizes(softmax.frames)
    modules = [frame.module for frame in (*softmax.frames, softmax.parent_frame) if frame is not None]
    heads = next((n for module in modules if (n := get_num_heads(module))), None)
    order = _find_axis_order(use, heads, sizes)
    if not _is_attention(softmax, use, order, sizes):
        return FEATURES_REASON if expected else None
    if isinstance(order, str):
        return order
    if (
        use.is_unchanged
        and (len(candidate.value_products) > 1 or not use.is_partial)
        and candidate.has_scores
    ):
        scores, lse = order.apply(candidate.scores.detach().reshape(use.sizes)), None
    elif get_version(use.source) != use.version:
        return OVERWRITTEN_REASON
    elif bool((use.weights < 0).any()):
        return NEGATIVE_REASON
    else:  # the logarithms of the weights serve as scores that need no division by their sum
        weights = use.weights if use.weights.dtype == torch.float64 else use.weights.float()
        scores = order.apply(weights.log())
        lse = scores.new_zeros(scores.shape[:3])
    kind = "channel" if _is_over_channels(softmax, use, order, sizes) else None
    in_order = candidate.modified_shape == () or (order.is_sorted and candidate.modified_shape == order.shape)
    kept = capture_scores(scores, lse)
    return SoftmaxAttention(softmax.modify_attention(kept) if in_order else kept, kind, in_order)


def capture_scores(scores: Tensor, lse: Tensor | None = None) -> CapturedAttention:
    """What is kept where scores ``(B, H, Q, K)`` are there as a whole: they, in the place of the queries."""
    nothing = scores.new_zeros(()).expand(scores.shape[0], 1, scores.shape[3], 1)
    return CapturedAttention(scores, nothing, score_function=return_scores, lse=lse)


def return_scores(rows: Tensor, keys: Tensor) -> Tensor:
    """The score where scores stand in the place of queries."""
    return rows


def _merge_partial_products(candidate: SoftmaxCandidate) -> ValueProduct:
    """Parts of the weights that were used one by one, as one. An axis of which each is a place is batch."""
    uses = candidate.value_products
    rows = set().union(*(use.query_axes for use in uses))
    batch = {axis for axis in uses[0].all_axes if not axis.is_key and axis.size > 1} - rows
    every = uses[0].all_axes
    return replace(
        uses[0], axes=every, sizes=[axis.size for axis in every], batch_axes=batch, query_axes=rows
    )


# --------------------------------------------------------------------------------------------- axes


class _AxisOrder(NamedTuple):
    """How to get ``(B, H, Q, K)`` from the axes of weights."""

    batch: list[int]  # places of axes
    heads: list[int]
    queries: list[int]
    keys: list[int]
    shape: tuple[int, int, int, int]

    @property
    def is_sorted(self) -> bool:
        places = [*self.batch, *self.heads, *self.queries, *self.keys]
        return places == sorted(places)

    def apply(self, x: Tensor) -> Tensor:
        return x.permute(*self.batch, *self.heads, *self.queries, *self.keys).reshape(self.shape)


def _find_axis_order(product: ValueProduct, num_heads: int | None, sizes: _ModuleSizes) -> _AxisOrder | str:
    """Which axes are batch, heads, queries and keys; or that it cannot be told."""
    axes, size = product.axes, product.sizes
    keys = [at for at, axis in enumerate(axes) if axis.is_key]
    rows = [at for at, axis in enumerate(axes) if axis in product.query_axes]
    batch = [at for at, axis in enumerate(axes) if axis in product.batch_axes]
    single = [at for at, axis in enumerate(axes) if not axis.is_key and at not in rows and at not in batch]

    def order(b: list[int], h: list[int], q: list[int]) -> _AxisOrder:
        b, h, q = sorted(b), sorted(h), sorted(q)
        counts = [math.prod(size[at] for at in some) for some in (b, h, q, keys)]
        if (
            len(b) == 1
            and not h
            and num_heads
            and counts[0] % num_heads == 0
            and counts[0] != sizes.batch_size
        ):
            counts[:2] = counts[0] // num_heads, num_heads  # both in one axis
        return _AxisOrder(b, h, q, keys, (counts[0], counts[1], counts[2], counts[3]))

    others = sorted([*rows, *batch, *single])
    if not rows:  # one query: an axis of one, unless the values differ from query to query
        is_step = len(others) < 3 and (num_heads is None or len(batch) < 2 or size[batch[-1]] == num_heads)
        rows = single[-1:]
        if not rows and not is_step:
            return "each query has values of its own"
    elif len(rows) > 1:  # the values are the same for all heads
        of_heads = [at for at in rows if size[at] == num_heads]
        if len(rows) > 2 or (not of_heads and len(others) > 2):
            return _format_ambiguous_axes(size)
        rows = [at for at in rows if at != (of_heads or rows)[0]]
    rest = [at for at in others if at not in rows]
    if len(rest) < 2:
        is_head = len(rest) == 1 and not batch and size[rest[0]] == num_heads
        return order([], rest, rows) if is_head else order(rest, [], rows)
    fitting = [at for at in rest if size[at] == num_heads]
    if len(rest) == 2 and (num_heads is None or size[rest[1]] == num_heads):
        return order(rest[:1], rest[1:], rows)
    if len(fitting) > 1 and num_heads != 1:  # the first axis is the batch
        fitting = [at for at in fitting if at != rest[0]]
    if len(fitting) != 1 and (num_heads != 1 or not fitting):
        return _format_ambiguous_axes(size)
    return order([at for at in rest if at != fitting[-1]], fitting[-1:], rows)


def _format_ambiguous_axes(sizes: Sequence[int]) -> str:
    shape = " × ".join(map(str, sizes))
    return f"it cannot be told which axes of its weights, {shape}, are heads and which are queries"


# -------------------------------------------------------------------------- attention, and of what


class _ModuleSizes(NamedTuple):
    """Sizes of what goes into modules, and comes out."""

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


def _is_attention(
    softmax: TrackedSoftmax, product: ValueProduct, order: _AxisOrder | str, sizes: _ModuleSizes
) -> bool:
    """Whether the weights are for positions, or for channels, of what the module works on."""
    if softmax.is_product:
        return True
    queries = order.shape[2] if isinstance(order, _AxisOrder) else 2
    keys = softmax.candidate.num_keys
    where = get_storage_id(product.value)
    outputs = (ref() for frame in softmax.frames for _, ref in frame.products)
    values_are_product = any(out is not None and get_storage_id(out) == where for out in outputs)
    if values_are_product or softmax.candidate.is_output_multiplied or keys == 1:
        return False
    if keys not in sizes.positions and queries > 1:
        return False
    if softmax.attention_frame is not None:
        return True
    parameters = (parameter for frame in softmax.frames for parameter in frame.module.parameters())
    is_shared = not product.batch_axes or any(get_storage_id(parameter) == where for parameter in parameters)
    return keys in sizes.positions and queries > 1 and not is_shared


def _is_over_channels(
    softmax: TrackedSoftmax, product: ValueProduct, order: _AxisOrder, sizes: _ModuleSizes
) -> bool:
    """Whether the values are a row of positions for each channel.

    Then they are as wide as there are positions, and the keys of all heads are the channels.
    """
    _, heads, queries, keys = order.shape
    possible = queries == keys and product.value_width in sizes.positions and keys * heads in sizes.widths
    if not possible or keys not in sizes.positions:
        return possible
    if any(CHANNEL_PATTERN.search(get_class_name(frame.module)) for frame in softmax.frames):
        return True
    # As many channels as positions: features of one position lie side by side in what a projection gives.
    return sizes.has_features_last and product.key_stride == 1 and keys > 1
