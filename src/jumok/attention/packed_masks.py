"""Masks of packed sequences, which are concatenated in one row. Each token sees its own sequence only.

``DocumentMask`` is defined by the document id of each token, ``PackedMask`` by the sequence boundaries.
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
    """Packed sequences, defined by document ids. A band if the keys of every document are contiguous."""

    ids: Tensor  # (*leading, K), on the host
    contiguous: bool
    has_padding: bool  # whether any id is negative
    query_ids: Tensor | None = None  # (*leading, Q), on the host; None: the queries are the last of the keys
    queries_match_keys: bool = True  # the document of every query has a key, and that of every key a query

    @property
    def num_leading_dims(self) -> int:
        return self.ids.dim() - 1

    @property
    def is_self_attention(self) -> bool:
        """Whether the queries are the last of the keys."""
        return self.query_ids is None

    def to_band(self, shape: AttentionShape) -> Band | None:
        if not self.contiguous:
            return None

        def compute() -> Band:
            first, last = _find_document_bounds(self.ids)
            query_ids = self._get_query_ids(self.ids, shape)
            if self.query_ids is None:
                first, last = (x[..., shape.num_keys - shape.num_queries :] for x in (first, last))
                has_keys = query_ids >= 0
            else:
                key_index, is_present = _locate_ids(self.ids, query_ids)
                first, last = first.gather(-1, key_index), last.gather(-1, key_index)
                has_keys = is_present & (query_ids >= 0)
            band = torch.where(has_keys, first, 0), torch.where(has_keys, last, -1)  # 0 … −1 is empty
            on_device = (move_to_device(x, shape.device) for x in band)
            return Band(*(align_leading_dims(x, self.num_leading_dims, shape.num_leading_dims) for x in on_device))

        return self.get_or_compute(("band", shape), compute)

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        ids = self.get_or_compute(shape.device, lambda: move_to_device(self.ids, shape.device))
        query_ids = self._get_query_ids(ids, shape)[..., rows]
        dense = (query_ids[..., :, None] == ids[..., None, :]) & (query_ids >= 0)[..., :, None]
        return align_leading_dims(dense, self.num_leading_dims, shape.num_leading_dims)

    def _get_query_ids(self, ids: Tensor, shape: AttentionShape) -> Tensor:
        """Return the document id of each query, ``(*leading, Q)``, on the device of ``ids``."""
        query_ids = self.query_ids
        if query_ids is None:
            return ids[..., shape.num_keys - shape.num_queries :]
        return self.get_or_compute(("queries", ids.device), lambda: move_to_device(query_ids, ids.device))

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        if self.query_ids is not None and self.query_ids.shape[-1] != shape.num_queries:
            raise InputError(
                f"documents(ids, query_ids) has the ids of {self.query_ids.shape[-1]} queries, but there are "
                f"{shape.num_queries}; give one id for every query"
            )
        if self.ids.shape[-1] != shape.num_keys or (self.query_ids is None and shape.num_queries > shape.num_keys):
            raise InputError(
                f"documents(ids) has {self.ids.shape[-1]} ids, but there are {shape.num_queries} queries and "
                f"{shape.num_keys} keys; give one id for every key (without query_ids, the queries are the "
                "last of the keys)"
            )
        check_leading_shape("documents(ids)", self.ids.shape[:-1], leading_shape)

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return not self.has_padding and self.queries_match_keys

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        all_seen = shape.num_queries == shape.num_keys if self.query_ids is None else self.queries_match_keys
        return not self.has_padding and all_seen

    def includes_diagonal(self) -> bool:
        return self.is_self_attention

    def has_same_order(self) -> bool:
        """Return whether queries and keys contain the same documents in the same order, each contiguous."""
        if self.query_ids is None:
            return self.contiguous
        keys, queries = (ids.reshape(-1).unique_consecutive() for ids in (self.ids, self.query_ids))
        return self.contiguous and torch.equal(keys, queries)

    def to_packed(self, device: torch.device) -> PackedMask:
        """Return the same mask as sequence boundaries on a device. Every document must be contiguous."""

        def find_boundaries(ids: Tensor) -> tuple[Tensor, int]:
            starts = _mark_run_starts(ids.reshape(-1)).nonzero()[:, 0]
            cu_seqlens = torch.cat([torch.tensor([0]), starts[1:], torch.tensor([ids.numel()])])
            return cu_seqlens.to(device=device, dtype=torch.int32), int(cu_seqlens.diff().max())

        queries = (None, 0) if self.query_ids is None else find_boundaries(self.query_ids)
        return PackedMask(*find_boundaries(self.ids), *queries)

    def __repr__(self) -> str:
        queries = "" if self.query_ids is None else f", query_ids=<{tuple(self.query_ids.shape)} ids>"
        return f"documents(<{tuple(self.ids.shape)} ids>{queries})"


@dataclass(frozen=True, eq=False)
class PackedMask(BandMask):
    """Packed sequences, defined by their boundaries as FlashAttention takes them.

    Values that change from batch to batch are in tensors, on any device. The values on the host suffice to
    launch kernels, so a CUDA graph that was captured with one packing serves another.
    """

    cu_seqlens: Tensor  # (N + 1,), where the keys of each sequence start, and the end of the last
    max_seqlen: int  # an upper bound of their lengths
    cu_seqlens_q: Tensor | None = None  # the same for the queries; None: they are the last of the keys
    max_seqlen_q: int = 0
    # Every query belongs to a sequence with keys, and every key to one with queries. None: not known, since
    # the boundaries are on a device.
    queries_match_keys: bool | None = True

    @property
    def num_leading_dims(self) -> int:
        return 0

    @property
    def is_self_attention(self) -> bool:
        """Whether the queries are the last of the keys."""
        return self.cu_seqlens_q is None

    def to_band(self, shape: AttentionShape) -> Band:
        def compute() -> Band:
            cu_seqlens = move_to_device(self.cu_seqlens, shape.device).long()
            positions = torch.arange(shape.num_queries, device=shape.device)
            if self.cu_seqlens_q is None:
                query_ends, positions = cu_seqlens[1:], positions + (shape.num_keys - shape.num_queries)
            else:
                query_ends = move_to_device(self.cu_seqlens_q, shape.device).long()[1:]
            sequence = torch.searchsorted(query_ends, positions, right=True)  # skips empty sequences
            # A query after the last sequence sees nothing: its band ends at −1.
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_zeros(1)])
            band = cu_seqlens[sequence], cu_seqlens[sequence + 1] - 1
            return Band(*(align_leading_dims(x, 0, shape.num_leading_dims) for x in band))

        return self.get_or_compute(("band", shape), compute)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        for name, cu_seqlens, length in (
            ("keys", self.cu_seqlens, shape.num_keys),
            ("queries", self.cu_seqlens_q, shape.num_queries),
        ):
            if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and cu_seqlens[-1] != length:
                end = int(cu_seqlens[-1])
                raise InputError(f"the packed sequences end at {end}, and there are {length} {name}")

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return self.queries_match_keys is True

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        # Assumed if not known: otherwise every call would have to copy its keys and values.
        return self.queries_match_keys is not False and (
            not self.is_self_attention or shape.num_queries == shape.num_keys
        )

    def includes_diagonal(self) -> bool:
        return self.is_self_attention

    def __repr__(self) -> str:
        queries = "" if self.cu_seqlens_q is None else f", cu_seqlens_q=<{self.cu_seqlens_q.numel() - 1} sequences>"
        return f"packed(<{self.cu_seqlens.numel() - 1} sequences>{queries})"


def _locate_ids(ids: Tensor, wanted_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return an index into ``ids`` (…, K) of each of ``wanted_ids`` (…, Q), and whether it occurs at all."""
    if ids.shape[-1] == 0:
        return torch.zeros_like(wanted_ids), torch.zeros_like(wanted_ids, dtype=torch.bool)
    sorted_ids, order = ids.sort(-1)
    index = torch.searchsorted(sorted_ids, wanted_ids).clamp_max(ids.shape[-1] - 1)
    return order.gather(-1, index), sorted_ids.gather(-1, index) == wanted_ids


def _mark_run_starts(ids: Tensor) -> Tensor:
    """Return which tokens start a run of equal ids, ``(…, T)``."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return starts


def find_run_starts(ids: Tensor) -> Tensor:
    """Return for every token the index of the first token of its run of equal ids, ``(…, T)``."""
    positions = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
    return positions.where(_mark_run_starts(ids), 0).cummax(-1).values


def are_documents_contiguous(ids: Tensor) -> bool:
    """Return whether the tokens of every document are adjacent: as many runs as there are distinct ids."""
    num_runs, num_ids = (_mark_run_starts(x).sum(-1) for x in (ids, ids.sort(-1).values))
    return bool((num_runs == num_ids).all())


def _find_document_bounds(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return for every token the index of the first and of the last token of its run of equal ids."""
    last = ids.shape[-1] - 1 - find_run_starts(ids.flip(-1)).flip(-1)
    return find_run_starts(ids), last
