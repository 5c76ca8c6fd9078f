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
from jumok.look import views
from jumok.look.kept import Kept
from jumok.look.strips import Choice, Span
from jumok.look.tokens import Read, along, texts

SAMPLE = 64  # rows at which it is looked whether an attention is causal


class Source(Protocol):
    """Where an entry's numbers come from."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    @property
    def kept(self) -> Kept: ...

    @property
    def row_ids(self) -> Tensor | None:
        """The tokens of the queries ``(B, Q)``, if this source knows them by itself."""
        ...


class Entry:
    """One attention layer in one forward of the model. All numbers are computed when they are asked for.

    - ``name``: as in the model's ``named_modules()``; ``kind``: "self", "cross", or "channel" if it
      weighs channels and not positions; ``causal``; ``shape``: (B, H, Q, K).
    - ``rows``, ``cols``: for each sequence of the batch, the texts of its tokens along the two axes; None
      where they are not known. ``row_ids``, ``col_ids``: the tokens themselves.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        source: Source,
        reads: Sequence[Read],
        tokenizer: Any,
        turn: int = 0,
        run: int = 0,
    ) -> None:
        self.name, self.kind = name, kind
        self.turn, self.run = turn, run  # of the model, and of this layer
        self._source, self._reads, self._tokenizer = source, reads, tokenizer
        self._written: dict[tuple[int, ...], list[list[str]]] = {}  # texts, by axis and shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        return self._source.shape

    @property
    def kept(self) -> Kept:
        """What all answers are computed from."""
        return self._source.kept

    @functools.cached_property
    def causal(self) -> bool:
        """Whether nobody attends to what comes later."""
        _, _, queries, keys = self.shape
        if self.kind != "self":
            return False
        if self.kept.diagonal is not None:
            return self.kept.diagonal <= max(0, keys - queries)
        last = queries - 1 if keys >= queries else keys - 1  # its next key would be beyond the end
        if last < 1:
            return False
        rows = torch.linspace(0, last - 1, min(last, SAMPLE)).long()
        later = rows + max(0, keys - queries) + 1
        return not bool(self.kept.weights(0, slice(0, 1), rows, later)[0].diagonal().any())

    @property
    def row_ids(self) -> Tensor | None:
        """The tokens of the queries ``(B, Q)``."""
        return self._ids(0)

    @property
    def col_ids(self) -> Tensor | None:
        """The tokens of the keys ``(B, K)``."""
        return self._ids(1)

    @property
    def rows(self) -> list[list[str]] | None:
        """The texts of the queries' tokens, for each sequence of the batch."""
        return self._texts(0)

    @property
    def cols(self) -> list[list[str]] | None:
        """The texts of the keys' tokens, for each sequence of the batch."""
        return self._texts(1)

    def weights(
        self, *, batch: Choice = None, head: Choice = None, rows: Choice = None, cols: Choice = None
    ) -> Tensor:
        """The weights, or a part of them; ``rows=(0, 4)`` are the rows 0 and 4.

        See :func:`jumok.look.views.weights`.
        """
        return views.weights(self.kept, batch=batch, head=head, rows=rows, cols=cols)

    def map(
        self,
        *,
        batch: Choice = 0,
        head: Choice = 0,
        rows: Span = None,
        cols: Span = None,
        size: int | tuple[int, int] = 512,
    ) -> Tensor:
        """A rectangle pooled to ``size`` cells each way; of fewer tokens, to a cell for each.

        ``rows=(0, 4)`` are the rows from 0 to 3. See :func:`jumok.look.views.map`.
        """
        return views.map(self.kept, batch=batch, head=head, rows=rows, cols=cols, size=size)

    def received(self, *, batch: Choice = 0, head: Choice = None) -> Tensor:
        """See :func:`jumok.look.views.received`."""
        return views.received(self.kept, batch=batch, head=head)

    def entropy(self, *, batch: Choice = 0, head: Choice = None) -> Tensor:
        """See :func:`jumok.look.views.entropy`."""
        return views.entropy(self.kept, batch=batch, head=head)

    def top(self, k: int, *, batch: Choice = 0, head: Choice = None) -> tuple[Tensor, Tensor]:
        """See :func:`jumok.look.views.top`."""
        return views.top(self.kept, k, batch=batch, head=head)

    def distance(self, *, batch: Choice = 0, head: Choice = None) -> Tensor:
        """See :func:`jumok.look.views.distance`."""
        return views.distance(self.kept, batch=batch, head=head)

    def _read(self, axis: int) -> Read | None:
        told = self._source.row_ids
        if told is None:
            return along(self._reads, self.name, self.shape, self.kind)[axis]
        if axis == 0 or (self.kind == "self" and self.shape[2] == self.shape[3]):
            return Read("", self.name, told)
        return along([*self._reads, Read("", self.name, told)], self.name, self.shape, self.kind)[axis]

    def _ids(self, axis: int) -> Tensor | None:
        read = self._read(axis)
        return None if read is None else read.ids.repeat_interleave(self.shape[0] // len(read.ids), 0)

    def _texts(self, axis: int) -> list[list[str]] | None:
        read = self._read(axis)
        if read is None or self._tokenizer is None:
            return None
        at = (axis, *self.shape)
        if at not in self._written:
            self._written[at] = texts(self._tokenizer, read, self.shape[0])
        return self._written[at]

    def __repr__(self) -> str:
        return f"<{self.name}: {self.kind}, {' × '.join(map(str, self.shape))}>"


class Seen(Sequence[Entry]):
    """What was seen, in the order in which it was computed.

    ``seen[0]``, ``seen[-1]``, ``seen[2:5]``; ``seen["encoder.layer.3.attention.self"]``, the only entry of
    that name; ``seen.named("…")``, all of them. The steps of one generation are one entry a layer.

    Attributes:
        calls: every call by itself, the steps of a generation too.
        unseen: names of layers whose attention cannot be seen, and why.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.calls: list[Entry] = []
        self.unseen: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, at: int | str) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> list[Entry]: ...
    def __getitem__(self, at: int | str | slice) -> Entry | list[Entry]:
        if not isinstance(at, str):
            return self.entries[at]
        found = self.named(at)
        if len(found) > 1:
            places = [number for number, entry in enumerate(self.entries) if entry.name == at]
            raise InputError(
                f"{at!r} was seen {len(found)} times, at {places}: the model ran several times, or the layer "
                "does so in one run; choose one by its number, or take them all with seen.named(…)"
            )
        return found[0]

    def named(self, name: str) -> list[Entry]:
        """All entries of that name; in it, * stands for anything."""
        found = [entry for entry in self.entries if matches(entry.name, name)]
        if not found:
            reason = self.unseen.get(name)
            why = f": {reason}" if reason else nearest(name, self.names, "the layers that were seen")
            raise InputError(f"{name!r} was not seen{why}")
        return found

    def show(self, *, batch: int = 0, title: str = "") -> Any:
        """The viewer, as the output of a notebook's cell."""
        from jumok.look.scene import Scene
        from jumok.look.widget import Viewer

        return Viewer(Scene.of(self, batch=batch, title=title))

    @property
    def names(self) -> list[str]:
        """The names of the layers, each once."""
        return list(dict.fromkeys(entry.name for entry in self.entries))

    def rollout(
        self,
        *,
        layers: str | None = None,
        batch: int = 0,
        rows: Span = None,
        size: int | tuple[int, int] | None = None,
        residual: float = 0.5,
    ) -> Tensor:
        """What reaches each position through all self-attentions; see :func:`jumok.look.views.rollout`.

        A layer that one forward runs several times (ALBERT's) is passed through as often, in that order.
        ``layers`` chooses them by their names: "encoder.*".
        """
        some = [
            entry
            for entry in self.entries
            if entry.kind == "self" and (layers is None or matches(entry.name, layers))
        ]
        one_turn = len({entry.turn for entry in some}) == 1
        once = len({(entry.name, entry.run if one_turn else 0) for entry in some}) == len(some)
        if len({entry.shape for entry in some}) > 1 or not once:
            sizes = ", ".join(f"{entry.name} {entry.shape}" for entry in some)
            raise InputError(
                "a rollout goes through the layers of one stack, each once, and these are of several: "
                f"{sizes}; choose with layers='encoder.*', or run the model once inside the with block"
            )
        if not some:
            raise InputError(f"no self-attention was seen that layers={layers!r} would fit")
        return views.rollout(
            [entry.kept for entry in some], batch=batch, rows=rows, size=size, residual=residual
        )

    def __repr__(self) -> str:
        lines = [
            f"{len(self)} attention{'s' * (len(self) != 1)}:",
            *(f"  {n:3} {entry!r}" for n, entry in enumerate(self.entries)),
        ]
        return "\n".join([*lines, *(f"  unseen: {name} ({why})" for name, why in self.unseen.items())])


def matches(name: str, pattern: str) -> bool:
    """Whether the pattern, in which * and ? stand for anything, is the name."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def nearest(name: str, known: Sequence[str], what: str) -> str:
    """The end of a message about a name that is not known."""
    close = difflib.get_close_matches(name, known, 1, cutoff=0.0)
    shown = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
    return f"; did you mean {close[0]!r}? {what}: {shown}" if close else ""
