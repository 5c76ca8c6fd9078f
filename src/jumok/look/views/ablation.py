"""Attention knockout: run a model without some attention heads, or without some query-key edges."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.adapters import attach_observer
from jumok.look.capture.capture_store import is_continuation, is_same_tensor
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.captures import suggest_name
from jumok.look.capture.module_stack import infer_kind_from_name, looks_like_attention
from jumok.look.capture.module_wrappers import require_uncompiled
from jumok.look.capture.observer import FusedLayerInputs, ObservedCall, Observer

AttentionEdge = tuple[int, int] | tuple[int, int, int]  # (query, key), or (head, query, key)


@contextmanager
def knock_out(
    model: nn.Module, targets: Mapping[str, int | AttentionEdge | Sequence[int | AttentionEdge]]
) -> Iterator[None]:
    """Run the model without these heads and edges inside the with block. Meant for analysis, not training.

    The same kernels run: the output of a head is set to zero after them, and the rows that lose an edge are
    computed again without it. Only PyTorch's fused layers get a mask.

    Args:
        model: As for :func:`jumok.watch`, which may be active at the same time and then captures the modified
            attention.
        targets: For each layer, by its name as in ``captures.names``, a list of heads, which are numbers, and
            edges, ``(query, key)`` in all heads or ``(head, query, key)``. Positions are those in the tensors
            of a forward, and in ``generate`` those in the whole sequence. A query without any key left gets
            zeros.

    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> with knock_out(model, {"MultiheadAttention": [0, (1, 4, 2)]}):
    ...     out, weights = model(x, x, x, average_attn_weights=False)
    >>> weights[0, 0].sum().item(), weights[0, 1, 4, 2].item()
    (0.0, 0.0)
    """
    observer = AblationObserver(require_uncompiled(model, "knock_out"), targets)
    with attach_observer(observer):
        yield
    observer.check_applied()


@dataclass
class _LayerAblation:
    """The ablation of one layer, and the position of its last call."""

    heads: set[int] = field(default_factory=set)
    edges: list[tuple[int | None, int, int]] = field(default_factory=list)  # head or all, query, key
    matched_edges: set[int] = field(default_factory=set)  # indices of edges
    has_run: bool = False
    forward_index: int = 0
    forward_start: int = 0  # the position at which this forward began
    first_query: int = 0  # the position of the first query of the last call …
    num_queries: int = 0  # … and its number of queries
    last_attention: CapturedAttention | None = None


class AblationObserver(Observer):
    """Removes heads and edges."""

    def __init__(self, model: nn.Module, targets: Mapping[str, Any]) -> None:
        super().__init__(model)
        if not isinstance(targets, Mapping) or not targets:
            raise InputError(
                f"knock_out: {targets!r} is invalid; a mapping from layers to their heads and edges is expected, "
                'as in {"layers.0": [1, (8, 2)]}'
            )
        names = list(self.module_stack.names.values())
        attention_names = [
            self.module_stack.names[id(module)] for module in model.modules() if looks_like_attention(module)
        ]
        self.layers: dict[str, _LayerAblation] = {}
        self.other_layers: list[str] = []  # other layers that computed attention
        for name, layer_targets in targets.items():
            if name not in names:
                raise InputError(
                    f"the model has no layer {name!r}{suggest_name(name, attention_names or names, 'Its layers')}"
                )
            self.layers[name] = _parse_ablation(name, layer_targets)

    def on_attention(self, name: str, call: ObservedCall) -> None:
        if name in self.layers and not call.is_bhqk:
            raise InputError(
                f"knock_out: the axes of {name}'s scores are not batch, heads, queries, keys in this order, "
                "and no other order can be modified; bring the scores into this order before the softmax"
            )
        if name not in self.layers:
            self.other_layers.append(name)

    def on_generation_start(self, model: nn.Module) -> None:
        for layer in self.layers.values():
            layer.forward_index = layer.first_query = layer.num_queries = 0

    # ------------------------------------------------------------------------------ modifications

    def modify_attention(self, name: str, attention: CapturedAttention) -> CapturedAttention:
        ablation = self._select_ablation(name, attention.shape, attention)
        # Weights have been modified already.
        has_weights = attention.has_only_scores and attention.lse is not None
        if ablation is None or has_weights:
            return attention
        score_mod = attention.score_mod

        def modify_scores(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if score_mod is not None:
                scores = score_mod(scores, b, h, q, k)
            removed = ablation.contains(h, q, k)
            if attention.has_only_scores:  # masked scores are removed, too
                removed = removed | (_is_masked(scores) & removed.any(-1, keepdim=True))
            return scores.masked_fill(removed, -torch.inf)

        return replace(attention, score_mod=modify_scores, lse=None)  # the kernel's lse is no longer valid

    def modify_output(self, name: str, attention: CapturedAttention, value: Tensor | None, out: Tensor) -> Tensor:
        ablation = self._select_ablation(name, attention.shape, attention)
        if ablation is None:
            return out
        modified, out = self.modify_attention(name, attention), out.clone()
        if len(ablation.query_rows):
            rows, (batch_size, num_heads, _, num_keys) = ablation.query_rows.to(out.device), attention.shape
            for batch_index in range(batch_size):
                weights = modified.compute_weights(
                    batch_index, slice(0, num_heads), rows, slice(0, num_keys)
                )  # (H, rows, K)
                if value is not None:
                    values = value[batch_index].repeat_interleave(num_heads // value.shape[1], 0).to(weights.dtype)
                    weights = weights @ values.where(values.isfinite(), 0)
                out[batch_index, :, rows] = weights.to(out.dtype)
        if len(ablation.heads):
            out[:, ablation.heads.to(out.device)] = 0
        return out

    def modifies(self, name: str) -> bool:
        return name in self.layers

    def run_softmax(self, name: str, softmax: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        ablation = self._select_ablation(name, tuple(scores.shape))
        if ablation is None:
            return softmax(scores)
        h, q, k = (torch.arange(n, device=scores.device) for n in scores.shape[1:])
        blocked = ablation.contains(h[:, None, None], q[:, None], k)
        # The softmax of a row without keys is undefined; its weights are set to zero afterwards.
        empty_rows = (_is_masked(scores) | blocked).all(-1, keepdim=True) & blocked.any(-1, keepdim=True)
        weights = softmax(scores.masked_fill(blocked, -torch.inf).masked_fill(empty_rows, 0.0))
        return weights.masked_fill(empty_rows, 0.0)

    def modify_fused_inputs(
        self, name: str, inputs: FusedLayerInputs, attention: CapturedAttention
    ) -> FusedLayerInputs:
        ablation = self._select_ablation(name, attention.shape, attention)
        if ablation is None:
            return inputs
        output_weight, blocked = inputs.output_weight, inputs.blocked_mask
        if len(ablation.heads):
            output_weight = output_weight.detach().clone()
            output_weight.unflatten(1, (attention.shape[1], -1))[:, ablation.heads.to(output_weight.device)] = 0
        if len(ablation.query_rows):
            h, q, k = (torch.arange(n, device=output_weight.device) for n in attention.shape[1:])
            edges = ablation.contains(h[:, None, None], q[:, None], k, include_heads=False)
            blocked = edges if blocked is None else blocked | edges
            if bool(blocked.expand(attention.shape).all(-1).any()):
                raise InputError(
                    f"knock_out: a token of {name} is left with nothing to attend to, and PyTorch's fused "
                    "layer returns NaN for it; use torch.backends.mha.set_fastpath_enabled(False)"
                )
        return FusedLayerInputs(blocked, output_weight)

    # ---------------------------------------------------------------------------------- positions

    def _select_ablation(
        self, name: str, shape: tuple[int, ...], attention: CapturedAttention | None = None
    ) -> _CallAblation | None:
        """Return the ablation of this call, or None."""
        layer = self.layers.get(name)
        if layer is None:
            return None
        layer.has_run |= attention is not None  # scores may be no attention, which their use will show
        _, num_heads, num_queries, num_keys = shape
        invalid = [
            h for h in (*layer.heads, *(h for h, _, _ in layer.edges if h is not None)) if not 0 <= h < num_heads
        ]
        if invalid:
            raise InputError(
                f"knock_out: {name} has {num_heads} heads, 0 to {num_heads - 1}, not head {invalid[0]}; "
                f"the nearest is {min(max(invalid[0], 0), num_heads - 1)}"
            )
        row, column = self._locate_call(name, layer, num_queries, num_keys, attention)
        call_edges = []
        for i, (head, query, key) in enumerate(layer.edges):
            if row <= query < row + num_queries and column <= key < column + num_keys:
                layer.matched_edges.add(i)
                call_edges.append((head, query - row, key - column))
        return (
            _CallAblation.from_edges(layer.heads, call_edges, num_queries, num_keys)
            if layer.heads or call_edges
            else None
        )

    def _locate_call(
        self,
        name: str,
        layer: _LayerAblation,
        num_queries: int,
        num_keys: int,
        attention: CapturedAttention | None,
    ) -> tuple[int, int]:
        """Return the position in the sequence of the first query and of the first key of a call."""
        frame = self.module_stack.current_frame
        is_cross = infer_kind_from_name(name, None if frame is None else frame.module) == "cross"
        if layer.forward_index != self.module_stack.forward_index:  # the next step of a generation, or a new run
            is_whole = not self.is_generating or (not is_cross and num_queries == num_keys)
            layer.forward_start = layer.first_query = 0 if is_whole else layer.first_query + layer.num_queries
            layer.forward_index, layer.last_attention = self.module_stack.forward_index, attention
        elif (
            attention is not None
            and layer.last_attention is not None
            and not is_same_tensor(attention.query, layer.last_attention.query)
        ):
            # The next step of a loop over the same keys; or another attention, which starts again.
            layer.first_query = (
                layer.first_query + layer.num_queries
                if is_continuation(layer.last_attention, attention)
                else layer.forward_start
            )
            layer.last_attention = attention
        layer.num_queries = num_queries
        # A sliding window has dropped the first keys; a static cache has unused space after the last.
        return layer.first_query, 0 if is_cross or not self.is_generating else max(
            0, layer.first_query + num_queries - num_keys
        )

    def check_applied(self) -> None:
        """Raise an error for a target that did not occur: the model ran without this ablation."""
        for name, layer in self.layers.items():
            if not layer.has_run:
                attended = list(dict.fromkeys(self.other_layers))
                raise InputError(
                    f"knock_out: {name!r} computed no attention{suggest_name(name, attended, 'These did')}"
                )
            for i, edge in enumerate(layer.edges):
                if i not in layer.matched_edges:
                    raise InputError(f"knock_out: {name} has no edge {edge[1:]}: it lies outside its queries and keys")


def _is_masked(scores: Tensor) -> Tensor:
    """Return where scores are masked: models also write the lowest number of a type for -inf."""
    return scores <= torch.finfo(scores.dtype).min / 2


@dataclass(frozen=True, eq=False)
class _CallAblation:
    """The ablation of one call. Edges are numbered: (head · Q + query) · K + key."""

    heads: Tensor
    query_rows: Tensor  # queries that lose an edge
    shared_edges: Tensor  # numbers of edges of all heads, without the head
    head_edges: Tensor  # numbers of edges of one head
    num_queries: int
    num_keys: int

    @classmethod
    def from_edges(
        cls, heads: set[int], edges: list[tuple[int | None, int, int]], num_queries: int, num_keys: int
    ) -> _CallAblation:
        rows = sorted({query for _, query, _ in edges})
        shared = [query * num_keys + key for head, query, key in edges if head is None]
        per_head = [(head * num_queries + query) * num_keys + key for head, query, key in edges if head is not None]
        lists = (sorted(heads), rows, shared, per_head)
        a, b, c, d = (torch.tensor(x, dtype=torch.long) for x in lists)
        return cls(a, b, c, d, num_queries, num_keys)

    def contains(self, h: Tensor, q: Tensor, k: Tensor, include_heads: bool = True) -> Tensor:
        """Return which positions are removed; the indices broadcast."""
        number = q * self.num_keys + k
        removed = torch.isin(number, self.shared_edges.to(k.device))
        if len(self.head_edges):
            removed = removed | torch.isin(
                h * (self.num_queries * self.num_keys) + number, self.head_edges.to(k.device)
            )
        return removed | torch.isin(h, self.heads.to(h.device)) if include_heads else removed


def _parse_ablation(name: str, targets: Any) -> _LayerAblation:
    """Parse the heads and edges of a layer."""
    layer = _LayerAblation()
    is_single = isinstance(targets, int) or (
        isinstance(targets, tuple) and len(targets) in (2, 3) and all(isinstance(x, int) for x in targets)
    )
    if not is_single and (isinstance(targets, str) or not isinstance(targets, Iterable)):
        targets = [targets]
    for target in [targets] if is_single else targets:
        try:
            if isinstance(target, bool) or (isinstance(target, tuple | list) and any(type(x) is bool for x in target)):
                raise TypeError
            if isinstance(target, tuple | list):
                *head, query, key = (operator.index(x) for x in target)
                if len(head) > 1 or min(query, key) < 0:
                    raise ValueError
                layer.edges.append((head[0] if head else None, query, key))
            else:
                layer.heads.add(operator.index(target))
        except (TypeError, ValueError):
            raise InputError(
                f"knock_out: {target!r} given for {name}; the number of a head is expected, or an edge: "
                "(query, key) or (head, query, key), integers from 0"
            ) from None
    if not layer.heads and not layer.edges:
        raise InputError(f"knock_out: nothing given for {name}; give heads, or edges as (query, key)")
    return layer
