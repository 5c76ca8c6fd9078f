"""What was seen of a model's attention: a sequence, one entry for each layer and forward."""

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
from jumok.look.views import statistics
from jumok.look.views.row_chunks import IndexChoice, IndexSpan

NUM_CAUSAL_SAMPLES = 64  # rows at which it is looked whether an attention is causal


class CaptureSource(Protocol):
    """Where an entry's numbers come from."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    @property
    def attention(self) -> CapturedAttention: ...

    @property
    def query_ids(self) -> Tensor | None:
        """The tokens of the queries ``(B, Q)``, if this source knows them by itself."""
        ...


class CapturedLayer:
    """One attention layer in one forward of the model. All numbers are computed when they are asked for.

    - ``name``: as in the model's ``named_modules()``; ``kind``: "self", "cross", or "channel" if it
      weighs channels and not positions; ``is_causal``; ``shape``: (B, H, Q, K).
    - ``query_tokens``, ``key_tokens``: for each sequence of the batch, the texts of its tokens along the two axes; None
      where they are not known. ``query_ids``, ``key_ids``: the tokens themselves.
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
        self._token_texts: dict[tuple[int, ...], list[list[str]]] = {}  # texts, by axis and shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        return self._source.shape

    @property
    def attention(self) -> CapturedAttention:
        """What all answers are computed from."""
        return self._source.attention

    @functools.cached_property
    def is_causal(self) -> bool:
        """Whether nobody attends to what comes later."""
        _, _, queries, keys = self.shape
        if self.kind != "self":
            return False
        if self.attention.diagonal is not None:
            return self.attention.diagonal <= max(0, keys - queries)
        last = queries - 1 if keys >= queries else keys - 1  # its next key would be beyond the end
        if last < 1:
            return False
        rows = torch.linspace(0, last - 1, min(last, NUM_CAUSAL_SAMPLES)).long()
        later = rows + max(0, keys - queries) + 1
        return not bool(self.attention.compute_weights(0, slice(0, 1), rows, later)[0].diagonal().any())

    @property
    def query_ids(self) -> Tensor | None:
        """The tokens of the queries ``(B, Q)``."""
        return self._get_ids(0)

    @property
    def key_ids(self) -> Tensor | None:
        """The tokens of the keys ``(B, K)``."""
        return self._get_ids(1)

    @property
    def query_tokens(self) -> list[list[str]] | None:
        """The texts of the queries' tokens, for each sequence of the batch."""
        return self._get_tokens(0)

    @property
    def key_tokens(self) -> list[list[str]] | None:
        """The texts of the keys' tokens, for each sequence of the batch."""
        return self._get_tokens(1)

    def weights(
        self,
        *,
        batch: IndexChoice = None,
        head: IndexChoice = None,
        rows: IndexChoice = None,
        cols: IndexChoice = None,
    ) -> Tensor:
        """The weights, or a part of them; ``query_tokens=(0, 4)`` are the rows 0 and 4.

        See :func:`jumok.look.statistics.weights`.
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
        """A rectangle pooled to ``size`` cells each way; of fewer tokens, to a cell for each.

        ``query_tokens=(0, 4)`` are the rows from 0 to 3. See :func:`jumok.look.statistics.pooled_map`.
        """
        return statistics.compute_pooled_map(
            self.attention, batch=batch, head=head, rows=rows, cols=cols, size=size
        )

    def received_weight(self, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
        """See :func:`jumok.look.statistics.received_weight`."""
        return statistics.compute_received_weight(self.attention, batch=batch, head=head)

    def entropy(self, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
        """See :func:`jumok.look.statistics.entropy`."""
        return statistics.compute_entropy(self.attention, batch=batch, head=head)

    def top_keys(self, k: int, *, batch: IndexChoice = 0, head: IndexChoice = None) -> tuple[Tensor, Tensor]:
        """See :func:`jumok.look.statistics.top_keys`."""
        return statistics.find_top_keys(self.attention, k, batch=batch, head=head)

    def distance_profile(self, *, batch: IndexChoice = 0, head: IndexChoice = None) -> Tensor:
        """See :func:`jumok.look.statistics.distance_profile`."""
        return statistics.compute_distance_profile(self.attention, batch=batch, head=head)

    def _find_lookup(self, axis: int) -> TokenLookup | None:
        told = self._source.query_ids
        if told is None:
            return match_lookups(self._lookups, self.name, self.shape, self.kind)[axis]
        if axis == 0 or (self.kind == "self" and self.shape[2] == self.shape[3]):
            return TokenLookup("", self.name, told)
        return match_lookups(
            [*self._lookups, TokenLookup("", self.name, told)], self.name, self.shape, self.kind
        )[axis]

    def _get_ids(self, axis: int) -> Tensor | None:
        read = self._find_lookup(axis)
        return None if read is None else read.ids.repeat_interleave(self.shape[0] // len(read.ids), 0)

    def _get_tokens(self, axis: int) -> list[list[str]] | None:
        read = self._find_lookup(axis)
        if read is None or self._tokenizer is None:
            return None
        at = (axis, *self.shape)
        if at not in self._token_texts:
            self._token_texts[at] = decode_tokens(self._tokenizer, read, self.shape[0])
        return self._token_texts[at]

    def __repr__(self) -> str:
        return f"<{self.name}: {self.kind}, {' × '.join(map(str, self.shape))}>"


class Captures(Sequence[CapturedLayer]):
    """What was seen, in the order in which it was computed.

    ``seen[0]``, ``seen[-1]``, ``seen[2:5]``; ``seen["encoder.layer.3.attention.self"]``, the only entry of
    that name; ``seen.find_layers("…")``, all of them. The steps of one generation are one entry a layer.

    Attributes:
        calls: every call by itself, the steps of a generation too.
        unseen: names of layers whose attention cannot be seen, and why.
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
        found = self.find_layers(key)
        if len(found) > 1:
            places = [number for number, entry in enumerate(self.layers) if entry.name == key]
            raise InputError(
                f"{key!r} was seen {len(found)} times, at {places}: the model ran several times, or the layer "
                "does so in one run; choose one by its number, or take them all with seen.named(…)"
            )
        return found[0]

    def find_layers(self, name: str) -> list[CapturedLayer]:
        """All entries of that name; in it, * stands for anything."""
        found = [entry for entry in self.layers if matches_pattern(entry.name, name)]
        if not found:
            reason = self.missed_layers.get(name)
            why = f": {reason}" if reason else suggest_name(name, self.names, "the layers that were seen")
            raise InputError(f"{name!r} was not seen{why}")
        return found

    def show(self, *, batch: int = 0, title: str = "") -> Any:
        """The viewer, as the output of a notebook's cell."""
        from jumok.look.viewer.viewer_data import ViewerData
        from jumok.look.viewer.widget import ViewerWidget

        return ViewerWidget(ViewerData.from_captures(self, batch=batch, title=title))

    @property
    def names(self) -> list[str]:
        """The names of the layers, each once."""
        return list(dict.fromkeys(entry.name for entry in self.layers))

    def rollout(
        self,
        *,
        layers: str | None = None,
        batch: int = 0,
        rows: IndexSpan = None,
        size: int | tuple[int, int] | None = None,
        residual: float = 0.5,
    ) -> Tensor:
        """What reaches each position through all self-attentions; see :func:`jumok.look.statistics.rollout`.

        A layer that one forward runs several times (ALBERT's) is passed through as often, in that order.
        ``layers`` chooses them by their names: "encoder.*".
        """
        some = [
            entry
            for entry in self.layers
            if entry.kind == "self" and (layers is None or matches_pattern(entry.name, layers))
        ]
        one_turn = len({entry.forward_index for entry in some}) == 1
        once = len({(entry.name, entry.call_index if one_turn else 0) for entry in some}) == len(some)
        if len({entry.shape for entry in some}) > 1 or not once:
            sizes = ", ".join(f"{entry.name} {entry.shape}" for entry in some)
            raise InputError(
                "a rollout goes through the layers of one stack, each once, and these are of several: "
                f"{sizes}; choose with layers='encoder.*', or run the model once inside the with block"
            )
        if not some:
            raise InputError(f"no self-attention was seen that layers={layers!r} would fit")
        return statistics.compute_rollout(
            [entry.attention for entry in some], batch=batch, rows=rows, size=size, residual=residual
        )

    def __repr__(self) -> str:
        lines = [
            f"{len(self)} attention{'s' * (len(self) != 1)}:",
            *(f"  {n:3} {entry!r}" for n, entry in enumerate(self.layers)),
        ]
        return "\n".join([*lines, *(f"  unseen: {name} ({why})" for name, why in self.missed_layers.items())])


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether the pattern, in which * and ? stand for anything, is the name."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def suggest_name(name: str, names: Sequence[str], label: str) -> str:
    """The end of a message about a name that is not known."""
    close = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"; did you mean {close[0]!r}? {label}: {shown}" if close else ""
