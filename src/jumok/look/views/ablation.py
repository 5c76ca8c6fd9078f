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
from jumok.look.capture.adapters import attach_observer
from jumok.look.capture.adapters.call_site import FusedLayerInputs, ObservedCall, Observer
from jumok.look.capture.adapters.compile_check import require_uncompiled
from jumok.look.capture.adapters.module_stack import infer_kind_from_name, looks_like_attention
from jumok.look.capture.adapters.softmax import return_scores
from jumok.look.capture.capture_store import is_continuation, is_same_tensor
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.captures import suggest_name

AttentionEdge = tuple[int, int] | tuple[int, int, int]  # (query, key), or (head, query, key)


@contextmanager
def knock_out(
    model: nn.Module, targets: Mapping[str, int | AttentionEdge | Sequence[int | AttentionEdge]]
) -> Iterator[None]:
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
    knocker = AblationObserver(require_uncompiled(model, "knock_out"), targets)
    with attach_observer(knocker):
        yield
    knocker.check_applied()


@dataclass
class _LayerAblation:
    """What is taken out of one layer, and where its last call stood."""

    heads: set[int] = field(default_factory=set)
    edges: list[tuple[int | None, int, int]] = field(default_factory=list)  # head or all, query, key
    matched_edges: set[int] = field(default_factory=set)  # of the edges
    has_run: bool = False
    forward_index: int = 0
    forward_start: int = 0  # the place at which this turn began
    first_query: int = 0  # the place of the last call's first query …
    num_queries: int = 0  # … and how many there were
    last_attention: CapturedAttention | None = None


class AblationObserver(Observer):
    """Takes out what it is told to."""

    def __init__(self, model: nn.Module, targets: Mapping[str, Any]) -> None:
        super().__init__(model)
        if not isinstance(targets, Mapping) or not targets:
            raise InputError(
                f"knock_out: {targets!r} came; for each layer its heads and edges are expected, as in "
                '{"layers.0": [1, (8, 2)]}'
            )
        known = list(self.module_stack.names.values())
        likely = [
            self.module_stack.names[id(module)] for module in model.modules() if looks_like_attention(module)
        ]
        self.layers: dict[str, _LayerAblation] = {}
        self.other_layers: list[str] = []  # layers that attend, too
        for name, given in targets.items():
            if name not in known:
                raise InputError(
                    f"the model has no layer {name!r}{suggest_name(name, likely or known, 'Its layers')}"
                )
            self.layers[name] = _parse_ablation(name, given)
        self._empty_rows: Tensor | None = None

    def on_attention(self, name: str, call: ObservedCall) -> None:
        if name in self.layers and not call.is_bhqk:
            raise InputError(
                f"knock_out: the axes of {name}'s scores are not batch, heads, queries, keys in this order, "
                "and no other order can be changed; bring the scores into this order before the softmax"
            )
        if name not in self.layers:
            self.other_layers.append(name)

    def on_generation_start(self) -> None:
        for layer in self.layers.values():
            layer.forward_index = layer.first_query = layer.num_queries = 0

    # ------------------------------------------------------------------------------- what changes

    def modify_attention(self, name: str, attention: CapturedAttention) -> CapturedAttention:
        gone = self._select_ablation(name, attention.shape, attention)
        if gone is None or (
            attention.score_function is return_scores and attention.lse is not None
        ):  # weights: changed before
            return attention
        rule = attention.score_mod

        def change(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if rule is not None:
                scores = rule(scores, b, h, q, k)
            out = gone.contains(h, q, k)
            if attention.score_function is return_scores:  # then so are masked ones
                out = out | (_is_masked(scores) & out.any(-1, keepdim=True))
            return scores.masked_fill(out, -torch.inf)

        return replace(
            attention, score_mod=change, lse=None
        )  # what the kernel told of a row's sum is no longer true

    def modify_output(
        self, name: str, attention: CapturedAttention, value: Tensor | None, out: Tensor
    ) -> Tensor:
        gone = self._select_ablation(name, attention.shape, attention)
        if gone is None:
            return out
        left, out = self.modify_attention(name, attention), out.clone()
        if len(gone.query_rows):
            rows, (batch, heads, _, keys) = gone.query_rows.to(out.device), attention.shape
            for entry in range(batch):
                weights = left.compute_weights(entry, slice(0, heads), rows, slice(0, keys))  # (H, rows, K)
                if value is not None:
                    values = value[entry].repeat_interleave(heads // value.shape[1], 0).to(weights.dtype)
                    weights = weights @ values.where(values.isfinite(), 0)
                out[entry, :, rows] = weights.to(out.dtype)
        if len(gone.heads):
            out[:, gone.heads.to(out.device)] = 0
        return out

    def modifies(self, name: str) -> bool:
        return name in self.layers

    def modify_scores(self, name: str, scores: Tensor) -> Tensor:
        gone = self._select_ablation(name, tuple(scores.shape))
        self._empty_rows = None
        if gone is None:
            return scores
        h, q, k = (torch.arange(n, device=scores.device) for n in scores.shape[1:])
        blocked = gone.contains(h[:, None, None], q[:, None], k)
        # A row that is left without a key has no softmax; it is zeroed behind it.
        self._empty_rows = (_is_masked(scores) | blocked).all(-1, keepdim=True) & blocked.any(
            -1, keepdim=True
        )
        return scores.masked_fill(blocked, -torch.inf).masked_fill(self._empty_rows, 0.0)

    def modify_weights(self, name: str, weights: Tensor) -> Tensor:
        dead, self._empty_rows = self._empty_rows, None
        return weights if dead is None else weights.masked_fill(dead, 0.0)

    def modify_fused_inputs(
        self, name: str, inputs: FusedLayerInputs, attention: CapturedAttention
    ) -> FusedLayerInputs:
        gone = self._select_ablation(name, attention.shape, attention)
        if gone is None:
            return inputs
        merge, blocked = inputs.output_weight, inputs.blocked_mask
        if len(gone.heads):
            merge = merge.detach().clone()
            merge.unflatten(1, (attention.shape[1], -1))[:, gone.heads.to(merge.device)] = 0
        if len(gone.query_rows):
            h, q, k = (torch.arange(n, device=merge.device) for n in attention.shape[1:])
            edges = gone.contains(h[:, None, None], q[:, None], k, include_heads=False)
            blocked = edges if blocked is None else blocked | edges
            if bool(blocked.expand(attention.shape).all(-1).any()):
                raise InputError(
                    f"knock_out: a token of {name} is left with nothing to attend to, and PyTorch's fused "
                    "layer gives NaN for it; use torch.backends.mha.set_fastpath_enabled(False)"
                )
        return FusedLayerInputs(blocked, merge)

    # ---------------------------------------------------------------------------------- where it is

    def _select_ablation(
        self, name: str, shape: tuple[int, ...], attention: CapturedAttention | None = None
    ) -> _CallAblation | None:
        """What is taken out of this call; None if nothing is."""
        layer = self.layers.get(name)
        if layer is None:
            return None
        layer.has_run |= (
            attention is not None
        )  # scores alone may be no attention: that shows when they are used
        _, heads, queries, keys = shape
        wrong = [
            h for h in (*layer.heads, *(h for h, _, _ in layer.edges if h is not None)) if not 0 <= h < heads
        ]
        if wrong:
            raise InputError(
                f"knock_out: {name} has {heads} heads, 0 to {heads - 1}, and head {wrong[0]} came; the "
                f"nearest is {min(max(wrong[0], 0), heads - 1)}"
            )
        row, column = self._locate_call(name, layer, queries, keys, attention)
        here = []
        for number, (head, query, key) in enumerate(layer.edges):
            if row <= query < row + queries and column <= key < column + keys:
                layer.matched_edges.add(number)
                here.append((head, query - row, key - column))
        return _CallAblation.from_edges(layer.heads, here, queries, keys) if layer.heads or here else None

    def _locate_call(
        self,
        name: str,
        layer: _LayerAblation,
        num_queries: int,
        num_keys: int,
        attention: CapturedAttention | None,
    ) -> tuple[int, int]:
        """The place in the sequence of the first query and of the first key of a call."""
        frame = self.module_stack.current_frame
        cross = infer_kind_from_name(name, None if frame is None else frame.module) == "cross"
        if (
            layer.forward_index != self.module_stack.forward_index
        ):  # another forward: the next step of a generation, or something new
            whole = not self.is_generating or (not cross and num_queries == num_keys)
            layer.forward_start = layer.first_query = 0 if whole else layer.first_query + layer.num_queries
            layer.forward_index, layer.last_attention = self.module_stack.forward_index, attention
        elif (
            attention is not None
            and layer.last_attention is not None
            and not is_same_tensor(attention.query, layer.last_attention.query)
        ):
            # The next step of a loop over the same keys; or another attention, which begins anew.
            layer.first_query = (
                layer.first_query + layer.num_queries
                if is_continuation(layer.last_attention, attention)
                else layer.forward_start
            )
            layer.last_attention = attention
        layer.num_queries = num_queries
        # A sliding window has dropped the first keys; a static cache has room behind the last.
        return layer.first_query, 0 if cross or not self.is_generating else max(
            0, layer.first_query + num_queries - num_keys
        )

    def check_applied(self) -> None:
        """What was not there to be taken out is an error: the model ran as it is."""
        for name, layer in self.layers.items():
            if not layer.has_run:
                attend = list(dict.fromkeys(self.other_layers))
                raise InputError(f"knock_out: {name!r} did not attend to anything"
                                 f"{suggest_name(name, attend, 'What did')}")  # fmt: skip
            for number, edge in enumerate(layer.edges):
                if number not in layer.matched_edges:
                    raise InputError(
                        f"knock_out: {name} has no edge {edge[1:]}: its queries and keys never went that far"
                    )


def _is_masked(scores: Tensor) -> Tensor:
    """Where scores are masked: the lowest number of a type, too, is how models write -inf."""
    return scores <= torch.finfo(scores.dtype).min / 2


@dataclass(frozen=True, eq=False)
class _CallAblation:
    """What is taken out of one call. Edges are numbered: (head · Q + query) · K + key."""

    heads: Tensor
    query_rows: Tensor  # the queries that lose an edge
    shared_edges: Tensor  # edges of all heads, without the head in the number
    head_edges: Tensor  # those of one
    num_queries: int
    num_keys: int

    @classmethod
    def from_edges(
        cls, heads: set[int], edges: list[tuple[int | None, int, int]], num_queries: int, num_keys: int
    ) -> _CallAblation:
        rows = sorted({query for _, query, _ in edges})
        numbers = [query * num_keys + key for head, query, key in edges if head is None]
        single = [
            (head * num_queries + query) * num_keys + key for head, query, key in edges if head is not None
        ]
        lists = (sorted(heads), rows, numbers, single)
        a, b, c, d = (torch.tensor(x, dtype=torch.long) for x in lists)
        return cls(a, b, c, d, num_queries, num_keys)

    def contains(self, h: Tensor, q: Tensor, k: Tensor, include_heads: bool = True) -> Tensor:
        """Whether the places are taken out; the indices broadcast."""
        number = q * self.num_keys + k
        out = torch.isin(number, self.shared_edges.to(k.device))
        if len(self.head_edges):
            out = out | torch.isin(
                h * (self.num_queries * self.num_keys) + number, self.head_edges.to(k.device)
            )
        return out | torch.isin(h, self.heads.to(h.device)) if include_heads else out


def _parse_ablation(name: str, targets: Any) -> _LayerAblation:
    """Heads and edges as they were given."""
    layer = _LayerAblation()
    single = isinstance(targets, int) or (
        isinstance(targets, tuple) and len(targets) in (2, 3) and all(isinstance(x, int) for x in targets)
    )
    if not single and (isinstance(targets, str) or not isinstance(targets, Iterable)):
        targets = [targets]
    for one in [targets] if single else targets:
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
