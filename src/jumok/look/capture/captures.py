"""Captured attention of a model: a sequence with one item for each layer and forward pass."""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Sequence
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.axis_tokens import TokenLookup, decode_tokens, match_lookups
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.views import rollout, statistics
from jumok.look.views.row_chunks import IndexChoice, IndexSpan

NUM_CAUSAL_SAMPLES = 64  # rows that are checked to decide whether an attention is causal


class CaptureSource(Protocol):
    """The data of a captured layer."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    @property
    def attention(self) -> CapturedAttention: ...

    @property
    def query_ids(self) -> Tensor | None:
        """The tokens of the queries ``(B, Q)``, if this source knows them."""
        ...


class CapturedLayer:
    """One attention layer in one forward pass of a model. All numbers are computed on request.

    - ``name``: as in the model's ``named_modules()``; ``kind``: "self", "cross", or "channel" if it weights
      channels and not positions; ``is_causal``; ``shape``: (B, H, Q, K).
    - ``query_tokens``, ``key_tokens``: the texts of the tokens along the two axes, for each sequence of the
      batch; None if they are unknown. ``query_ids``, ``key_ids``: the token ids.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        source: CaptureSource,
        lookups: Sequence[TokenLookup],
        tokenizer: Any,
        forward_index: int = 0,
        call_index: int = 0,
    ) -> None:
        self.name, self.kind = name, kind
        self.forward_index, self.call_index = forward_index, call_index  # of the model, and of this layer
        self._source, self._lookups, self._tokenizer = source, lookups, tokenizer
        self._token_texts: dict[tuple[int, ...], list[list[str]]] = {}  # by axis and shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        return self._source.shape

    @property
    def attention(self) -> CapturedAttention:
        """The attention that all results are computed from."""
        return self._source.attention

    @functools.cached_property
    def is_causal(self) -> bool:
        """Whether no query attends to later keys."""
        _, _, num_queries, num_keys = self.shape
        if self.kind != "self":
            return False
        if self.attention.diagonal is not None:
            return self.attention.diagonal <= max(0, num_keys - num_queries)
        last = num_queries - 1 if num_keys >= num_queries else num_keys - 1  # the next key would be past the end
        if last < 1:
            return False
        rows = torch.linspace(0, last - 1, min(last, NUM_CAUSAL_SAMPLES)).long()
        later = rows + max(0, num_keys - num_queries) + 1
        return not bool(self.attention.compute_weights(0, slice(0, 1), rows, later)[0].diagonal().any())

    @property
    def query_ids(self) -> Tensor | None:
        """The token ids of the queries ``(B, Q)``."""
        return self._get_ids(0)

    @property
    def key_ids(self) -> Tensor | None:
        """The token ids of the keys ``(B, K)``."""
        return self._get_ids(1)

    @property
    def query_tokens(self) -> list[list[str]] | None:
        """The token texts of the queries, for each sequence of the batch."""
        return self._get_tokens(0)

    @property
    def key_tokens(self) -> list[list[str]] | None:
        """The token texts of the keys, for each sequence of the batch."""
        return self._get_tokens(1)

    def weights(
        self,
        *,
        batch: IndexChoice = None,
        head: IndexChoice = None,
        rows: IndexChoice = None,
        cols: IndexChoice = None,
    ) -> Tensor:
        """Return the weights, or a part of them; ``rows=(0, 4)`` selects the rows 0 and 4.

        See :func:`jumok.look.views.statistics.compute_weights`.
        """
        return statistics.compute_weights(self.attention, batch=batch, head=head, rows=rows, cols=cols)

    def pooled_map(
        self,
        *,
        batch: IndexChoice = 0,
        head: IndexChoice = 0,
        rows: IndexSpan = None,
        cols: IndexSpan = None,
        size: int | tuple[int, int] = 512,
    ) -> Tensor:
        """Return a rectangle pooled to at most ``size`` cells each way.

        ``rows=(0, 4)`` selects the rows from 0 to 3. See
        :func:`jumok.look.views.statistics.compute_pooled_map`.
        """
        return statistics.compute_pooled_map(self.attention, batch=batch, head=head, rows=rows, cols=cols, size=size)

    def statistics(
        self, *, num_top: int = 8, batch: IndexChoice = 0, head: IndexChoice = None
    ) -> statistics.AttentionStatistics:
        """Return all of the following in one pass.

        See :func:`jumok.look.views.statistics.compute_statistics`.
        """
        return statistics.compute_statistics(self.attention, num_top=num_top, batch=batch, head=head)

    def received_weight(self, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
        """See :func:`jumok.look.views.statistics.compute_received_weight`."""
        return statistics.compute_received_weight(self.attention, batch=batch, head=head)

    def entropy(self, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
        """See :func:`jumok.look.views.statistics.compute_entropy`."""
        return statistics.compute_entropy(self.attention, batch=batch, head=head)

    def top_keys(self, k: int, *, batch: IndexChoice = 0, head: IndexChoice = None) -> tuple[Tensor, Tensor]:
        """See :func:`jumok.look.views.statistics.find_top_keys`."""
        return statistics.find_top_keys(self.attention, k, batch=batch, head=head)

    def distance_profile(self, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
        """See :func:`jumok.look.views.statistics.compute_distance_profile`."""
        return statistics.compute_distance_profile(self.attention, batch=batch, head=head)

    def sink_share(self, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
        """See :func:`jumok.look.views.statistics.compute_sink_share`."""
        return statistics.compute_sink_share(self.attention, batch=batch, head=head)

    def _find_lookup(self, axis: int) -> TokenLookup | None:
        query_ids = self._source.query_ids
        if query_ids is None:
            return match_lookups(self._lookups, self.name, self.shape, self.kind)[axis]
        if axis == 0 or (self.kind == "self" and self.shape[2] == self.shape[3]):
            return TokenLookup("", self.name, query_ids)
        return match_lookups([*self._lookups, TokenLookup("", self.name, query_ids)], self.name, self.shape, self.kind)[
            axis
        ]

    def _get_ids(self, axis: int) -> Tensor | None:
        lookup = self._find_lookup(axis)
        return None if lookup is None else lookup.ids.repeat_interleave(self.shape[0] // len(lookup.ids), 0)

    def _get_tokens(self, axis: int) -> list[list[str]] | None:
        lookup = self._find_lookup(axis)
        if lookup is None or self._tokenizer is None:
            return None
        key = (axis, *self.shape)
        if key not in self._token_texts:
            self._token_texts[key] = decode_tokens(self._tokenizer, lookup, self.shape[0])
        return self._token_texts[key]

    def __repr__(self) -> str:
        return f"<{self.name}: {self.kind}, {' × '.join(map(str, self.shape))}>"


class Captures(Sequence[CapturedLayer]):
    """Captured layers, in the order of their computation.

    ``captures[0]``, ``captures[-1]``, ``captures[2:5]``; ``captures["encoder.layer.3.attention.self"]`` is
    the only layer of that name, ``captures.find_layers("…")`` are all of them. The steps of one
    generation are merged into one item per layer.

    Attributes:
        calls: Every single call, including the steps of a generation.
        missed_layers: Names of layers whose attention could not be captured, with the reason.
    """

    def __init__(self) -> None:
        self.layers: list[CapturedLayer] = []
        self.calls: list[CapturedLayer] = []
        self.missed_layers: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.layers)

    @overload
    def __getitem__(self, key: int | str) -> CapturedLayer: ...
    @overload
    def __getitem__(self, key: slice) -> list[CapturedLayer]: ...
    def __getitem__(self, key: int | str | slice) -> CapturedLayer | list[CapturedLayer]:
        if not isinstance(key, str):
            return self.layers[key]
        matches = self.find_layers(key)
        if len(matches) > 1:
            indices = [i for i, layer in enumerate(self.layers) if layer.name == key]
            raise InputError(
                f"{key!r} was captured {len(matches)} times, at {indices}: the model ran several times, or "
                "the layer did in one run; select one by its index, or get all with captures.find_layers(…)"
            )
        return matches[0]

    def find_layers(self, name: str) -> list[CapturedLayer]:
        """Return all layers of that name; * matches anything."""
        matches = [layer for layer in self.layers if matches_pattern(layer.name, name)]
        if not matches:
            reason = self.missed_layers.get(name)
            detail = f": {reason}" if reason else suggest_name(name, self.names, "the captured layers")
            raise InputError(f"{name!r} was not captured{detail}")
        return matches

    def show(self, *, batch: int = 0, title: str = "") -> Any:
        """Return the viewer as the output of a notebook cell."""
        from jumok.look.viewer.viewer_data import ViewerData
        from jumok.look.viewer.widget import ViewerWidget

        return ViewerWidget(ViewerData.from_captures(self, batch=batch, title=title))

    @property
    def names(self) -> list[str]:
        """The names of the layers, without repetitions."""
        return list(dict.fromkeys(layer.name for layer in self.layers))

    def rollout(
        self,
        *,
        layers: str | None = None,
        batch: int = 0,
        rows: IndexSpan = None,
        size: int | tuple[int, int] | None = None,
        residual: float = 0.5,
    ) -> Tensor:
        """Return the attention rollout through all self-attention layers.

        See :func:`jumok.look.views.rollout.compute_rollout`. A layer that one forward runs several times
        (as in ALBERT) counts as often, in that order. ``layers`` selects layers by name: "encoder.*".
        """
        selected = [
            layer
            for layer in self.layers
            if layer.kind == "self" and (layers is None or matches_pattern(layer.name, layers))
        ]
        is_one_forward = len({layer.forward_index for layer in selected}) == 1
        is_unique = len({(layer.name, layer.call_index if is_one_forward else 0) for layer in selected}) == len(
            selected
        )
        if len({layer.shape for layer in selected}) > 1 or not is_unique:
            sizes = ", ".join(f"{layer.name} {layer.shape}" for layer in selected)
            raise InputError(
                "a rollout needs the layers of one stack, each once, and these belong to several: "
                f"{sizes}; select with layers='encoder.*', or run the model once inside the with block"
            )
        if not selected:
            raise InputError(f"no self-attention was captured that matches layers={layers!r}")
        return rollout.compute_rollout(
            [layer.attention for layer in selected], batch=batch, rows=rows, size=size, residual=residual
        )

    def __repr__(self) -> str:
        lines = [
            f"{len(self)} attention{'s' * (len(self) != 1)}:",
            *(f"  {n:3} {layer!r}" for n, layer in enumerate(self.layers)),
        ]
        missed = (f"  missed: {name} ({reason})" for name, reason in self.missed_layers.items())
        return "\n".join([*lines, *missed])


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether the name matches the pattern, in which * and ? are wildcards."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def suggest_name(name: str, names: Sequence[str], label: str) -> str:
    """Return the end of an error message about an unknown name."""
    close = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"; did you mean {close[0]!r}? {label}: {listed}" if close else ""
