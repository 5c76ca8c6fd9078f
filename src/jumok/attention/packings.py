"""The masks of packed sequences, which lie end to end in one row: each token sees its own sequence.

One is told by the number of each token's sequence, the other by where the sequences begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jumok.attention.kinds import At, Band, Banded, Mask, aligned, check_leading, moved
from jumok.errors import InputError


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Packed sequences. A band when every document's keys are in one piece."""

    ids: Tensor  # (*leading, K), on the host
    contiguous: bool
    padded: bool  # some id is negative
    queries: Tensor | None = None  # (*leading, Q), on the host; None: the queries are the last of the keys
    matched: bool = True  # every query's document has a key, and every key's a query

    @property
    def rank(self) -> int:
        return self.ids.dim() - 1

    @property
    def among_themselves(self) -> bool:
        """Whether the queries are the last of the keys, so that each finds itself."""
        return self.queries is None

    def band(self, at: At) -> Band | None:
        if not self.contiguous:
            return None

        def make() -> Band:
            begin, end = _document_edges(self.ids)
            mine = self._mine(self.ids, at)
            if self.queries is None:
                begin, end = (edge[..., at.keys - at.queries :] for edge in (begin, end))
                real = mine >= 0
            else:
                some_key, found = _places(self.ids, mine)
                begin, end = begin.gather(-1, some_key), end.gather(-1, some_key)
                real = found & (mine >= 0)
            edges = torch.where(real, begin, 0), torch.where(real, end, -1)  # nothing: the empty band 0 … −1
            return Band(*(aligned(moved(x, at.device), self.rank, at.leading) for x in edges))

        return self.remember(("band", at), make)

    def block(self, at: At, rows: slice) -> Tensor:
        ids = self.remember(at.device, lambda: moved(self.ids, at.device))
        mine = self._mine(ids, at)[..., rows]
        same = (mine[..., :, None] == ids[..., None, :]) & (mine >= 0)[..., :, None]
        return aligned(same, self.rank, at.leading)

    def _mine(self, ids: Tensor, at: At) -> Tensor:
        """The document of each query, ``(*leading, Q)``, where ``ids`` are."""
        queries = self.queries
        if queries is None:
            return ids[..., at.keys - at.queries :]
        return self.remember(("queries", ids.device), lambda: moved(queries, ids.device))

    def check(self, leading: Sequence[int], at: At) -> None:
        if self.queries is not None and self.queries.shape[-1] != at.queries:
            raise InputError(
                f"documents(ids, queries) has the ids of {self.queries.shape[-1]} queries, but there are "
                f"{at.queries}; give one id for every query"
            )
        if self.ids.shape[-1] != at.keys or (self.queries is None and at.queries > at.keys):
            raise InputError(
                f"documents(ids) has {self.ids.shape[-1]} ids, but there are {at.queries} queries and "
                f"{at.keys} keys; give one id for every key (the queries are the last of them, unless "
                "documents(ids, queries) says otherwise)"
            )
        check_leading("documents(ids)", self.ids.shape[:-1], leading)

    def no_row_is_empty(self, at: At) -> bool:
        return not self.padded and self.matched

    def no_key_is_dead(self, at: At) -> bool:
        everyone = at.queries == at.keys if self.queries is None else self.matched
        return not self.padded and everyone

    def sees_itself(self) -> bool:
        return self.among_themselves

    def __repr__(self) -> str:
        asked = "" if self.queries is None else f", queries=<{tuple(self.queries.shape)} ids>"
        return f"documents(<{tuple(self.ids.shape)} ids>{asked})"


@dataclass(frozen=True, eq=False)
class Packed(Banded):
    """Packed sequences, told by where each begins: as FlashAttention takes them.

    All numbers that differ from batch to batch are in tensors, on any device. What is known on the host is
    enough to launch kernels: so a CUDA graph that was recorded with one packing serves another.
    """

    edges: Tensor  # (N + 1,), where the keys of each begin, and the end of all
    longest: int  # of them, or more
    queries: Tensor | None = None  # the edges of the queries; None: the queries are the last of the keys
    longest_query: int = 0
    # Each query belongs to a sequence that has keys, and each key to one with queries. None: the numbers are
    # on a device, where nobody looked.
    matched: bool | None = True

    @property
    def rank(self) -> int:
        return 0

    @property
    def among_themselves(self) -> bool:
        """Whether the queries are the last of the keys, so that each finds itself."""
        return self.queries is None

    def band(self, at: At) -> Band:
        def make() -> Band:
            edges = moved(self.edges, at.device).long()
            place = torch.arange(at.queries, device=at.device)
            if self.queries is None:
                own, place = edges, place + (at.keys - at.queries)
            else:
                own = moved(self.queries, at.device).long()
            mine = torch.searchsorted(own[1:], place, right=True)  # empty sequences are passed over
            edges = torch.cat([edges, edges.new_zeros(1)])  # behind the last: from its end to −1, nothing
            return Band(*(aligned(x, 0, at.leading) for x in (edges[mine], edges[mine + 1] - 1)))

        return self.remember(("band", at), make)

    def check(self, leading: Sequence[int], at: At) -> None:
        for name, edges, tokens in (("keys", self.edges, at.keys), ("queries", self.queries, at.queries)):
            if edges is not None and edges.device.type == "cpu" and edges[-1] != tokens:
                end = int(edges[-1])
                raise InputError(f"the packed sequences end at {end}, and there are {tokens} {name}")

    def no_row_is_empty(self, at: At) -> bool:
        return self.matched is True

    def no_key_is_dead(self, at: At) -> bool:
        # Where nobody looked it is taken for true: else every call would copy its keys and values to be safe.
        return self.matched is not False and (not self.among_themselves or at.queries == at.keys)

    def sees_itself(self) -> bool:
        return self.among_themselves

    def __repr__(self) -> str:
        asked = "" if self.queries is None else f", queries=<{self.queries.numel() - 1} sequences>"
        return f"packed(<{self.edges.numel() - 1} sequences>{asked})"


def _places(ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Some place in ``ids`` (…, K) where each of ``wanted`` (…, Q) stands, and whether it does at all."""
    if ids.shape[-1] == 0:
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    ordered, order = ids.sort(-1)
    at = torch.searchsorted(ordered, wanted).clamp_max(ids.shape[-1] - 1)
    return order.gather(-1, at), ordered.gather(-1, at) == wanted


def _document_edges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """For every token the place of the first and of the last token of its run of equal ids."""
    place = torch.arange(ids.shape[-1]).expand(ids.shape)
    edge = ids[..., 1:] != ids[..., :-1]
    new = torch.ones_like(ids, dtype=torch.bool)
    new[..., 1:] = edge
    begin = torch.where(new, place, 0).cummax(-1).values
    over = torch.ones_like(ids, dtype=torch.bool)
    over[..., :-1] = edge
    end = torch.where(over, place, ids.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
    return begin, end
