"""Run a model without some of its attention heads, or without what one token sees of another."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.adapters import listening
from jumok.look.adapters.compiled import uncompiled
from jumok.look.adapters.site import Found, Fused, Listener
from jumok.look.adapters.softmax import as_given
from jumok.look.adapters.trail import kind_by_name, looks_like_attention
from jumok.look.kept import Kept
from jumok.look.seen import nearest
from jumok.look.sources import goes_on, same_tensor

Edge = tuple[int, int] | tuple[int, int, int]  # (query, key), or (head, query, key)


@contextmanager
def knock_out(model: nn.Module, what: Mapping[str, int | Edge | Sequence[int | Edge]]) -> Iterator[None]:
    """While it lasts, the model runs without these heads and edges. It is for looking, not for training.

    The kernels that run are the same: a head's output is zeroed behind them, and the few rows that lose an
    edge are computed once more without it. Only in PyTorch's fused layers a mask does it.

    Args:
        model: as for :func:`jumok.watch`, which may look at the same time, and then sees what is left.
        what: for each layer, by its name as in ``seen.names``, a list of heads, which are numbers, and edges
            from one token to another, ``(query, key)`` in all heads or ``(head, query, key)``. Places are
            those in the tensors of a forward, and in ``generate`` those in the whole sequence. A token that
            is left with nothing to attend to gets zeros.

    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> with knock_out(model, {"MultiheadAttention": [0, (1, 4, 2)]}):
    ...     out, weights = model(x, x, x, average_attn_weights=False)
    >>> weights[0, 0].sum().item(), weights[0, 1, 4, 2].item()
    (0.0, 0.0)
    """
    knocker = Knocker(uncompiled(model, "knock_out"), what)
    with listening(knocker):
        yield
    knocker.conclude()


@dataclass
class _Layer:
    """What is taken out of one layer, and where its last call stood."""

    heads: set[int] = field(default_factory=set)
    edges: list[tuple[int | None, int, int]] = field(default_factory=list)  # head or all, query, key
    met: set[int] = field(default_factory=set)  # of the edges
    ran: bool = False
    turn: int = 0
    begin: int = 0  # the place at which this turn began
    first: int = 0  # the place of the last call's first query …
    count: int = 0  # … and how many there were
    last: Kept | None = None


class Knocker(Listener):
    """Takes out what it is told to."""

    def __init__(self, model: nn.Module, what: Mapping[str, Any]) -> None:
        super().__init__(model)
        if not isinstance(what, Mapping) or not what:
            raise InputError(
                f"knock_out: {what!r} came; for each layer its heads and edges are expected, as in "
                '{"layers.0": [1, (8, 2)]}'
            )
        known = list(self.trail.names.values())
        likely = [self.trail.names[id(module)] for module in model.modules() if looks_like_attention(module)]
        self.layers: dict[str, _Layer] = {}
        self.others: list[str] = []  # layers that attend, too
        for name, given in what.items():
            if name not in known:
                raise InputError(
                    f"the model has no layer {name!r}{nearest(name, likely or known, 'Its layers')}"
                )
            self.layers[name] = _read(name, given)
        self._dead: Tensor | None = None

    def see(self, name: str, found: Found) -> None:
        if name in self.layers and not found.in_order:
            raise InputError(
                f"knock_out: the axes of {name}'s scores are not batch, heads, queries, keys in this order, "
                "and no other order can be changed; bring the scores into this order before the softmax"
            )
        if name not in self.layers:
            self.others.append(name)

    def generation_begins(self) -> None:
        for layer in self.layers.values():
            layer.turn = layer.first = layer.count = 0

    # ------------------------------------------------------------------------------- what changes

    def without(self, name: str, kept: Kept) -> Kept:
        gone = self._gone(name, kept.shape, kept)
        if gone is None or (kept.score is as_given and kept.lse is not None):  # weights: changed before
            return kept
        rule = kept.change

        def change(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if rule is not None:
                scores = rule(scores, b, h, q, k)
            out = gone.at(h, q, k)
            if kept.score is as_given:  # then so are masked ones
                out = out | (_low(scores) & out.any(-1, keepdim=True))
            return scores.masked_fill(out, -torch.inf)

        return replace(kept, change=change, lse=None)  # what the kernel told of a row's sum is no longer true

    def output(self, name: str, kept: Kept, value: Tensor | None, out: Tensor) -> Tensor:
        gone = self._gone(name, kept.shape, kept)
        if gone is None:
            return out
        left, out = self.without(name, kept), out.clone()
        if len(gone.rows):
            rows, (batch, heads, _, keys) = gone.rows.to(out.device), kept.shape
            for entry in range(batch):
                weights = left.weights(entry, slice(0, heads), rows, slice(0, keys))  # (H, rows, K)
                if value is not None:
                    values = value[entry].repeat_interleave(heads // value.shape[1], 0).to(weights.dtype)
                    weights = weights @ values.where(values.isfinite(), 0)
                out[entry, :, rows] = weights.to(out.dtype)
        if len(gone.heads):
            out[:, gone.heads.to(out.device)] = 0
        return out

    def changes(self, name: str) -> bool:
        return name in self.layers

    def scores(self, name: str, scores: Tensor) -> Tensor:
        gone = self._gone(name, tuple(scores.shape))
        self._dead = None
        if gone is None:
            return scores
        h, q, k = (torch.arange(n, device=scores.device) for n in scores.shape[1:])
        blocked = gone.at(h[:, None, None], q[:, None], k)
        # A row that is left without a key has no softmax; it is zeroed behind it.
        self._dead = (_low(scores) | blocked).all(-1, keepdim=True) & blocked.any(-1, keepdim=True)
        return scores.masked_fill(blocked, -torch.inf).masked_fill(self._dead, 0.0)

    def weights(self, name: str, weights: Tensor) -> Tensor:
        dead, self._dead = self._dead, None
        return weights if dead is None else weights.masked_fill(dead, 0.0)

    def fused(self, name: str, layer: Fused, kept: Kept) -> Fused:
        gone = self._gone(name, kept.shape, kept)
        if gone is None:
            return layer
        merge, blocked = layer.merge, layer.blocked
        if len(gone.heads):
            merge = merge.detach().clone()
            merge.unflatten(1, (kept.shape[1], -1))[:, gone.heads.to(merge.device)] = 0
        if len(gone.rows):
            h, q, k = (torch.arange(n, device=merge.device) for n in kept.shape[1:])
            edges = gone.at(h[:, None, None], q[:, None], k, heads=False)
            blocked = edges if blocked is None else blocked | edges
            if bool(blocked.expand(kept.shape).all(-1).any()):
                raise InputError(
                    f"knock_out: a token of {name} is left with nothing to attend to, and PyTorch's fused "
                    "layer gives NaN for it; use torch.backends.mha.set_fastpath_enabled(False)"
                )
        return Fused(blocked, merge)

    # ---------------------------------------------------------------------------------- where it is

    def _gone(self, name: str, shape: tuple[int, ...], kept: Kept | None = None) -> _Gone | None:
        """What is taken out of this call; None if nothing is."""
        layer = self.layers.get(name)
        if layer is None:
            return None
        layer.ran |= kept is not None  # scores alone may be no attention: that shows when they are used
        _, heads, queries, keys = shape
        wrong = [
            h for h in (*layer.heads, *(h for h, _, _ in layer.edges if h is not None)) if not 0 <= h < heads
        ]
        if wrong:
            raise InputError(
                f"knock_out: {name} has {heads} heads, 0 to {heads - 1}, and head {wrong[0]} came; the "
                f"nearest is {min(max(wrong[0], 0), heads - 1)}"
            )
        row, column = self._place(name, layer, queries, keys, kept)
        here = []
        for number, (head, query, key) in enumerate(layer.edges):
            if row <= query < row + queries and column <= key < column + keys:
                layer.met.add(number)
                here.append((head, query - row, key - column))
        return _Gone.of(layer.heads, here, queries, keys) if layer.heads or here else None

    def _place(self, name: str, layer: _Layer, queries: int, keys: int, kept: Kept | None) -> tuple[int, int]:
        """The place in the sequence of the first query and of the first key of a call."""
        frame = self.trail.frame
        cross = kind_by_name(name, None if frame is None else frame.module) == "cross"
        if layer.turn != self.trail.turn:  # another forward: the next step of a generation, or something new
            whole = not self.generates or (not cross and queries == keys)
            layer.begin = layer.first = 0 if whole else layer.first + layer.count
            layer.turn, layer.last = self.trail.turn, kept
        elif kept is not None and layer.last is not None and not same_tensor(kept.query, layer.last.query):
            # The next step of a loop over the same keys; or another attention, which begins anew.
            layer.first = layer.first + layer.count if goes_on(layer.last, kept) else layer.begin
            layer.last = kept
        layer.count = queries
        # A sliding window has dropped the first keys; a static cache has room behind the last.
        return layer.first, 0 if cross or not self.generates else max(0, layer.first + queries - keys)

    def conclude(self) -> None:
        """What was not there to be taken out is an error: the model ran as it is."""
        for name, layer in self.layers.items():
            if not layer.ran:
                attend = list(dict.fromkeys(self.others))
                raise InputError(f"knock_out: {name!r} did not attend to anything"
                                 f"{nearest(name, attend, 'What did')}")  # fmt: skip
            for number, edge in enumerate(layer.edges):
                if number not in layer.met:
                    raise InputError(
                        f"knock_out: {name} has no edge {edge[1:]}: its queries and keys never went that far"
                    )


def _low(scores: Tensor) -> Tensor:
    """Where scores are masked: the lowest number of a type, too, is how models write -inf."""
    return scores <= torch.finfo(scores.dtype).min / 2


@dataclass(frozen=True, eq=False)
class _Gone:
    """What is taken out of one call. Edges are numbered: (head · Q + query) · K + key."""

    heads: Tensor
    rows: Tensor  # the queries that lose an edge
    everywhere: Tensor  # edges of all heads, without the head in the number
    single: Tensor  # those of one
    queries: int
    keys: int

    @classmethod
    def of(cls, heads: set[int], edges: list[tuple[int | None, int, int]], queries: int, keys: int) -> _Gone:
        rows = sorted({query for _, query, _ in edges})
        numbers = [query * keys + key for head, query, key in edges if head is None]
        single = [(head * queries + query) * keys + key for head, query, key in edges if head is not None]
        lists = (sorted(heads), rows, numbers, single)
        a, b, c, d = (torch.tensor(x, dtype=torch.long) for x in lists)
        return cls(a, b, c, d, queries, keys)

    def at(self, h: Tensor, q: Tensor, k: Tensor, heads: bool = True) -> Tensor:
        """Whether the places are taken out; the indices broadcast."""
        number = q * self.keys + k
        out = torch.isin(number, self.everywhere.to(k.device))
        if len(self.single):
            out = out | torch.isin(h * (self.queries * self.keys) + number, self.single.to(k.device))
        return out | torch.isin(h, self.heads.to(h.device)) if heads else out


def _read(name: str, given: Any) -> _Layer:
    """Heads and edges as they were given."""
    layer = _Layer()
    single = isinstance(given, int) or (
        isinstance(given, tuple) and len(given) in (2, 3) and all(isinstance(x, int) for x in given)
    )
    if not single and (isinstance(given, str) or not isinstance(given, Iterable)):
        given = [given]
    for one in [given] if single else given:
        try:
            if isinstance(one, bool) or (isinstance(one, tuple | list) and any(type(x) is bool for x in one)):
                raise TypeError
            if isinstance(one, tuple | list):
                *head, query, key = (operator.index(x) for x in one)
                if len(head) > 1 or min(query, key) < 0:
                    raise ValueError
                layer.edges.append((head[0] if head else None, query, key))
            else:
                layer.heads.add(operator.index(one))
        except (TypeError, ValueError):
            raise InputError(
                f"knock_out: {one!r} came for {name}; the number of a head is expected, or an edge: "
                "(query, key) or (head, query, key), whole numbers from 0"
            ) from None
    if not layer.heads and not layer.edges:
        raise InputError(f"knock_out: nothing came for {name}; give heads, or edges as (query, key)")
    return layer
