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

from jumok.look.adapters.candidates import Candidate, Use, memory, version
from jumok.look.adapters.follow import follower
from jumok.look.adapters.trail import Frame, class_name, heads_of, looks_like_attention
from jumok.look.kept import Kept

CHANNEL = re.compile(r"channel|xca|cross_?cov|transposed", re.IGNORECASE)

UNUSED = "no product of its softmax with values was seen"
FEATURES = "its softmax is not seen to be over positions; one over features has no map of queries and keys"
NEGATIVE = "it changes its weights after the softmax, and some are negative: they are no shares of a whole"
PARTS = "its weights are used in several parts"
OVERWRITTEN = "its scores and its weights were overwritten"
SEVERAL = "it has several softmaxes, not all of which are seen to weigh values in the same way"


class Map(NamedTuple):
    """An attention that was found."""

    kept: Kept
    kind: str | None  # "channel" if it weighs channels, not positions
    in_order: bool  # the scores are (B, H, Q, K) in the way in which they were changed


@dataclass
class Softmax:
    """A softmax in a module that may be an attention."""

    candidate: Candidate
    name: str  # of the module
    is_product: bool  # whether its scores are a product of two tensors that are no parameters
    left: Callable[[Kept], Kept]  # what changes of others leave of it
    frames: list[Frame] = field(default_factory=list)  # the module's, and those around it until it was used
    above: Frame | None = None  # the one around these

    @functools.cached_property
    def named(self) -> Frame | None:
        """The module in whose name it says that it attends."""
        return next((one for one in self.frames if looks_like_attention(one.module)), None)

    @property
    def is_over_positions(self) -> bool:
        """Whether there are as many keys as positions in something that the module takes or gives."""
        return self.candidate.keys in _sizes(self.frames).positions

    def note_factors(self, factors: Sequence[Tensor]) -> None:
        """A product of these was computed. Their memory tells whether one is the output of this attention."""
        outs = {memory(out) for ref in self.candidate.outputs if (out := ref()) is not None}
        self.candidate.multiplied |= any(memory(factor) in outs for factor in factors)

    @property
    def owner(self) -> str:
        """The name of the attention."""
        named = self.named or self.frames[-1]
        return self.name if named is self.frames[0] else named.name


def concluded(frame: Frame, above: Frame | None) -> list[tuple[str, Map | str]]:
    """What the softmaxes of a module that has ended are: maps, or reasons, by name.

    Weights that nothing has used yet may be used by the module above.
    """
    if not frame.parts:
        return []
    ended, frame.parts = frame.parts, []
    done: list[Softmax] = []
    for one in ended:
        if one.candidate.live and not one.candidate.uses and above is not None:
            one.frames.append(above)
            above.parts.append(one)
            frame.reported = True  # it is not known yet what it is
        else:
            one.candidate.stop()
            one.above = above
            done.append(one)
    follower().rest()
    plain = {one.owner for one in done if one.is_product and isinstance(_verdict(one), Map)}
    # Beside an attention, a softmax over no positions is something else: a gate, a kernel.
    done = [one for one in done if one.owner not in plain or one.is_product or one.is_over_positions]
    judged = [(one.owner, verdict) for one in done if (verdict := _verdict(one)) is not None]
    for name in {name for name, _ in judged}:
        some = [verdict for owner, verdict in judged if owner == name]
        shapes = {verdict.kept.shape for verdict in some if isinstance(verdict, Map)}
        reasons = [verdict for verdict in some if isinstance(verdict, str)]
        if len(some) > 1 and (reasons or len(shapes) > 1):
            reason = reasons[0] if len(set(reasons)) == 1 and not shapes else SEVERAL
            judged = [one for one in judged if one[0] != name] + [(name, reason)]
    return judged


def _verdict(one: Softmax) -> Map | str | None:
    """The map, the reason why there is none, or None for a softmax that is no attention."""
    candidate = one.candidate
    if candidate.joined:
        return None
    if not candidate.verdict:
        try:
            candidate.verdict.append(_judge(one))
        except (RuntimeError, IndexError) as error:
            candidate.verdict.append(f"it is called in an unusual form ({error})")
    found: Map | str | None = candidate.verdict[0]
    return found


def _judge(one: Softmax) -> Map | str | None:
    candidate = one.candidate
    expected = one.named is not None
    if candidate.reason is not None or not candidate.uses:
        unused = UNUSED if expected else None
        return candidate.reason or unused if expected or one.is_product else None
    use = candidate.uses[0]
    if len(candidate.uses) > 1:
        pieces = sum(part.weights.numel() for part in candidate.uses)
        if pieces != candidate.size or not all(part.unchanged for part in candidate.uses):
            return PARTS if expected or one.is_product else None
        use = _whole(candidate)
    sizes = _sizes(one.frames)
    modules = [frame.module for frame in (*one.frames, one.above) if frame is not None]
    heads = next((n for module in modules if (n := heads_of(module))), None)
    order = _layout(use, heads, sizes)
    if not _is_attention(one, use, order, sizes):
        return FEATURES if expected else None
    if isinstance(order, str):
        return order
    if use.unchanged and (len(candidate.uses) > 1 or not use.part) and candidate.has_scores:
        scores, lse = order.applied(candidate.scores.detach().reshape(use.sizes)), None
    elif version(use.source) != use.version:
        return OVERWRITTEN
    elif bool((use.weights < 0).any()):
        return NEGATIVE
    else:  # the logarithms of the weights serve as scores that need no division by their sum
        weights = use.weights if use.weights.dtype == torch.float64 else use.weights.float()
        scores = order.applied(weights.log())
        lse = scores.new_zeros(scores.shape[:3])
    kind = "channel" if _is_over_channels(one, use, order, sizes) else None
    in_order = candidate.changed_as == () or (order.is_plain and candidate.changed_as == order.shape)
    kept = kept_scores(scores, lse)
    return Map(one.left(kept) if in_order else kept, kind, in_order)


def kept_scores(scores: Tensor, lse: Tensor | None = None) -> Kept:
    """What is kept where scores ``(B, H, Q, K)`` are there as a whole: they, in the place of the queries."""
    nothing = scores.new_zeros(()).expand(scores.shape[0], 1, scores.shape[3], 1)
    return Kept(scores, nothing, score=as_given, lse=lse)


def as_given(rows: Tensor, keys: Tensor) -> Tensor:
    """The score where scores stand in the place of queries."""
    return rows


def _whole(candidate: Candidate) -> Use:
    """Parts of the weights that were used one by one, as one. An axis of which each is a place is batch."""
    uses = candidate.uses
    rows = set().union(*(use.rows for use in uses))
    batch = {axis for axis in uses[0].every if not axis.is_key and axis.size > 1} - rows
    every = uses[0].every
    return replace(uses[0], axes=every, sizes=[axis.size for axis in every], batch=batch, rows=rows)


# --------------------------------------------------------------------------------------------- axes


class _Order(NamedTuple):
    """How to get ``(B, H, Q, K)`` from the axes of weights."""

    batch: list[int]  # places of axes
    heads: list[int]
    queries: list[int]
    keys: list[int]
    shape: tuple[int, int, int, int]

    @property
    def is_plain(self) -> bool:
        places = [*self.batch, *self.heads, *self.queries, *self.keys]
        return places == sorted(places)

    def applied(self, x: Tensor) -> Tensor:
        return x.permute(*self.batch, *self.heads, *self.queries, *self.keys).reshape(self.shape)


def _layout(use: Use, heads: int | None, sizes: _Sizes) -> _Order | str:
    """Which axes are batch, heads, queries and keys; or that it cannot be told."""
    axes, size = use.axes, use.sizes
    keys = [at for at, axis in enumerate(axes) if axis.is_key]
    rows = [at for at, axis in enumerate(axes) if axis in use.rows]
    batch = [at for at, axis in enumerate(axes) if axis in use.batch]
    single = [at for at, axis in enumerate(axes) if not axis.is_key and at not in rows and at not in batch]

    def order(b: list[int], h: list[int], q: list[int]) -> _Order:
        b, h, q = sorted(b), sorted(h), sorted(q)
        counts = [math.prod(size[at] for at in some) for some in (b, h, q, keys)]
        if len(b) == 1 and not h and heads and counts[0] % heads == 0 and counts[0] != sizes.batch:
            counts[:2] = counts[0] // heads, heads  # both in one axis
        return _Order(b, h, q, keys, (counts[0], counts[1], counts[2], counts[3]))

    others = sorted([*rows, *batch, *single])
    if not rows:  # one query: an axis of one, unless the values differ from query to query
        is_step = len(others) < 3 and (heads is None or len(batch) < 2 or size[batch[-1]] == heads)
        rows = single[-1:]
        if not rows and not is_step:
            return "each query has values of its own"
    elif len(rows) > 1:  # the values are the same for all heads
        of_heads = [at for at in rows if size[at] == heads]
        if len(rows) > 2 or (not of_heads and len(others) > 2):
            return _untold(size)
        rows = [at for at in rows if at != (of_heads or rows)[0]]
    rest = [at for at in others if at not in rows]
    if len(rest) < 2:
        is_head = len(rest) == 1 and not batch and size[rest[0]] == heads
        return order([], rest, rows) if is_head else order(rest, [], rows)
    fitting = [at for at in rest if size[at] == heads]
    if len(rest) == 2 and (heads is None or size[rest[1]] == heads):
        return order(rest[:1], rest[1:], rows)
    if len(fitting) > 1 and heads != 1:  # the first axis is the batch
        fitting = [at for at in fitting if at != rest[0]]
    if len(fitting) != 1 and (heads != 1 or not fitting):
        return _untold(size)
    return order([at for at in rest if at != fitting[-1]], fitting[-1:], rows)


def _untold(size: Sequence[int]) -> str:
    shape = " × ".join(map(str, size))
    return f"it cannot be told which axes of its weights, {shape}, are heads and which are queries"


# -------------------------------------------------------------------------- attention, and of what


class _Sizes(NamedTuple):
    """Sizes of what goes into modules, and comes out."""

    batch: int
    positions: set[int]
    widths: set[int]
    features_last: bool


def _sizes(frames: Sequence[Frame]) -> _Sizes:
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
    return _Sizes(shapes[0][0] if shapes and shapes[0] else 1, positions, widths, features_last)


def _is_attention(one: Softmax, use: Use, order: _Order | str, sizes: _Sizes) -> bool:
    """Whether the weights are for positions, or for channels, of what the module works on."""
    if one.is_product:
        return True
    queries = order.shape[2] if isinstance(order, _Order) else 2
    keys = one.candidate.keys
    where = memory(use.value)
    outputs = (ref() for frame in one.frames for _, ref in frame.products)
    values_are_product = any(out is not None and memory(out) == where for out in outputs)
    if values_are_product or one.candidate.multiplied or keys == 1:
        return False
    if keys not in sizes.positions and queries > 1:
        return False
    if one.named is not None:
        return True
    parameters = (parameter for frame in one.frames for parameter in frame.module.parameters())
    is_shared = not use.batch or any(memory(parameter) == where for parameter in parameters)
    return keys in sizes.positions and queries > 1 and not is_shared


def _is_over_channels(one: Softmax, use: Use, order: _Order, sizes: _Sizes) -> bool:
    """Whether the values are a row of positions for each channel.

    Then they are as wide as there are positions, and the keys of all heads are the channels.
    """
    _, heads, queries, keys = order.shape
    possible = queries == keys and use.columns in sizes.positions and keys * heads in sizes.widths
    if not possible or keys not in sizes.positions:
        return possible
    if any(CHANNEL.search(class_name(frame.module)) for frame in one.frames):
        return True
    # As many channels as positions: features of one position lie side by side in what a projection gives.
    return sizes.features_last and use.key_stride == 1 and keys > 1
