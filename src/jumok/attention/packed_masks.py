"""The masks of packed sequences, which lie end to end in one row: each token sees its own sequence.

One is told by the number of each token's sequence, the other by where the sequences begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jumok.attention.mask_types import (
    AttentionShape,
    Band,
    BandMask,
    Mask,
    align_leading_dims,
    check_leading_shape,
    move_to_device,
)
from jumok.errors import InputError


@dataclass(frozen=True, eq=False)
class DocumentMask(Mask):
    """Packed sequences. A band when every document's keys are in one piece."""

    ids: Tensor  # (*leading, K), on the host
    contiguous: bool
    has_padding: bool  # some id is negative
    query_ids: Tensor | None = None  # (*leading, Q), on the host; None: the queries are the last of the keys
    queries_match_keys: bool = True  # every query's document has a key, and every key's a query

    @property
    def num_leading_dims(self) -> int:
        return self.ids.dim() - 1

    @property
    def is_self_attention(self) -> bool:
        """Whether the queries are the last of the keys, so that each finds itself."""
        return self.query_ids is None

    def to_band(self, shape: AttentionShape) -> Band | None:
        if not self.contiguous:
            return None

        def make() -> Band:
            begin, end = _find_document_bounds(self.ids)
            mine = self._get_query_ids(self.ids, shape)
            if self.query_ids is None:
                begin, end = (edge[..., shape.num_keys - shape.num_queries :] for edge in (begin, end))
                real = mine >= 0
            else:
                some_key, found = _locate_ids(self.ids, mine)
                begin, end = begin.gather(-1, some_key), end.gather(-1, some_key)
                real = found & (mine >= 0)
            edges = torch.where(real, begin, 0), torch.where(real, end, -1)  # nothing: the empty band 0 … −1
            return Band(
                *(
                    align_leading_dims(
                        move_to_device(x, shape.device), self.num_leading_dims, shape.num_leading_dims
                    )
                    for x in edges
                )
            )

        return self.get_or_compute(("band", shape), make)

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        ids = self.get_or_compute(shape.device, lambda: move_to_device(self.ids, shape.device))
        mine = self._get_query_ids(ids, shape)[..., rows]
        same = (mine[..., :, None] == ids[..., None, :]) & (mine >= 0)[..., :, None]
        return align_leading_dims(same, self.num_leading_dims, shape.num_leading_dims)

    def _get_query_ids(self, ids: Tensor, shape: AttentionShape) -> Tensor:
        """The document of each query, ``(*leading_shape, Q)``, where ``ids`` are."""
        queries = self.query_ids
        if queries is None:
            return ids[..., shape.num_keys - shape.num_queries :]
        return self.get_or_compute(("queries", ids.device), lambda: move_to_device(queries, ids.device))

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        if self.query_ids is not None and self.query_ids.shape[-1] != shape.num_queries:
            raise InputError(
                f"documents(ids, queries) has the ids of {self.query_ids.shape[-1]} queries, but there are "
                f"{shape.num_queries}; give one id for every query"
            )
        if self.ids.shape[-1] != shape.num_keys or (
            self.query_ids is None and shape.num_queries > shape.num_keys
        ):
            raise InputError(
                f"documents(ids) has {self.ids.shape[-1]} ids, but there are {shape.num_queries} queries and "
                f"{shape.num_keys} keys; give one id for every key (the queries are the last of them, unless "
                "documents(ids, queries) says otherwise)"
            )
        check_leading_shape("documents(ids)", self.ids.shape[:-1], leading_shape)

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return not self.has_padding and self.queries_match_keys

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        everyone = shape.num_queries == shape.num_keys if self.query_ids is None else self.queries_match_keys
        return not self.has_padding and everyone

    def includes_diagonal(self) -> bool:
        return self.is_self_attention

    def __repr__(self) -> str:
        asked = "" if self.query_ids is None else f", queries=<{tuple(self.query_ids.shape)} ids>"
        return f"documents(<{tuple(self.ids.shape)} ids>{asked})"


@dataclass(frozen=True, eq=False)
class PackedMask(BandMask):
    """Packed sequences, told by where each begins: as FlashAttention takes them.

    All numbers that differ from batch to batch are in tensors, on any device. What is known on the host is
    enough to launch kernels: so a CUDA graph that was recorded with one packing serves another.
    """

    cu_seqlens: Tensor  # (N + 1,), where the keys of each begin, and the end of all
    max_seqlen: int  # of them, or more
    cu_seqlens_q: Tensor | None = None  # the edges of the queries; None: the queries are the last of the keys
    max_seqlen_q: int = 0
    # Each query belongs to a sequence that has keys, and each key to one with queries. None: the numbers are
    # on a device, where nobody looked.
    queries_match_keys: bool | None = True

    @property
    def num_leading_dims(self) -> int:
        return 0

    @property
    def is_self_attention(self) -> bool:
        """Whether the queries are the last of the keys, so that each finds itself."""
        return self.cu_seqlens_q is None

    def to_band(self, shape: AttentionShape) -> Band:
        def make() -> Band:
            edges = move_to_device(self.cu_seqlens, shape.device).long()
            place = torch.arange(shape.num_queries, device=shape.device)
            if self.cu_seqlens_q is None:
                own, place = edges, place + (shape.num_keys - shape.num_queries)
            else:
                own = move_to_device(self.cu_seqlens_q, shape.device).long()
            mine = torch.searchsorted(own[1:], place, right=True)  # empty sequences are passed over
            edges = torch.cat([edges, edges.new_zeros(1)])  # behind the last: from its end to −1, nothing
            return Band(
                *(
                    align_leading_dims(x, 0, shape.num_leading_dims)
                    for x in (edges[mine], edges[mine + 1] - 1)
                )
            )

        return self.get_or_compute(("band", shape), make)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        for name, edges, tokens in (
            ("keys", self.cu_seqlens, shape.num_keys),
            ("queries", self.cu_seqlens_q, shape.num_queries),
        ):
            if edges is not None and edges.device.type == "cpu" and edges[-1] != tokens:
                end = int(edges[-1])
                raise InputError(f"the packed sequences end at {end}, and there are {tokens} {name}")

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return self.queries_match_keys is True

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        # Where nobody looked it is taken for true: else every call would copy its keys and values to be safe.
        return self.queries_match_keys is not False and (
            not self.is_self_attention or shape.num_queries == shape.num_keys
        )

    def includes_diagonal(self) -> bool:
        return self.is_self_attention

    def __repr__(self) -> str:
        asked = "" if self.cu_seqlens_q is None else f", queries=<{self.cu_seqlens_q.numel() - 1} sequences>"
        return f"packed(<{self.cu_seqlens.numel() - 1} sequences>{asked})"


def _locate_ids(ids: Tensor, wanted_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Some place in ``ids`` (…, K) where each of ``wanted_ids`` (…, Q) stands, and whether it does at all."""
    if ids.shape[-1] == 0:
        return torch.zeros_like(wanted_ids), torch.zeros_like(wanted_ids, dtype=torch.bool)
    ordered, order = ids.sort(-1)
    at = torch.searchsorted(ordered, wanted_ids).clamp_max(ids.shape[-1] - 1)
    return order.gather(-1, at), ordered.gather(-1, at) == wanted_ids


def _find_document_bounds(ids: Tensor) -> tuple[Tensor, Tensor]:
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
