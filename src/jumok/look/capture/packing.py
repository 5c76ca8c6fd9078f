"""Sequences of different lengths in one attention call, as one batch entry each.

Kernels take such sequences packed into one row of tokens, in pages of a cache, or in rows that are partly used::

    packed   a a a b b c c c c      batch   a a a · ·     a dot is padding: its row of the map is zero,
                                            b b · · ·     and no query attends to it
                                            c c c c ·
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention, ScoreMod


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Where each of ``N`` sequences is in a row of tokens."""

    starts: Tensor  # (N,) int64 on the CPU, like the lengths
    lengths: Tensor

    @classmethod
    def from_cumulative(cls, cu_seqlens: Tensor, lengths: Tensor | None = None) -> PackedSequences:
        """Return the sequences between the positions ``cu_seqlens`` ``(N + 1,)``, or their first ``lengths`` tokens."""
        positions = to_lengths(cu_seqlens)
        return cls(positions[:-1], positions.diff() if lengths is None else to_lengths(lengths))

    @property
    def max_length(self) -> int:
        return int(self.lengths.max()) if len(self.lengths) else 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens up to the end of the last sequence."""
        return int((self.starts + self.lengths).max()) if len(self.lengths) else 0

    def unpack(self, x: Tensor) -> Tensor:
        """Return ``(N, max_length, …)`` of ``(tokens, …)``; zeros where a sequence is shorter."""
        num_sequences, length = len(self.lengths), self.max_length
        expected = self.starts[:1] + torch.arange(num_sequences) * length
        if num_sequences and length and bool((self.lengths == length).all()) and torch.equal(self.starts, expected):
            first = int(self.starts[0])
            rows: Tensor = x[first : first + num_sequences * length].unflatten(0, (num_sequences, length))
            return rows  # not a copy
        positions, is_token = self._locate_tokens(x.device)
        unpacked = x[positions]
        return unpacked.masked_fill(~is_token.reshape(*is_token.shape, *(1,) * (x.dim() - 1)), 0)

    def pack(self, unpacked: Tensor, packed: Tensor) -> Tensor:
        """Return a copy of ``packed`` ``(tokens, …)`` with the tokens of ``unpacked`` ``(N, max_length, …)``."""
        positions, is_token = self._locate_tokens(packed.device)
        packed = packed.clone()
        packed[positions[is_token]] = unpacked[is_token].to(packed.dtype)
        return packed

    def _locate_tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the position of each token ``(N, max_length)``, and whether there is one."""
        offsets = torch.arange(self.max_length)
        is_token = offsets < self.lengths[:, None]
        positions = (self.starts[:, None] + offsets).where(is_token, 0)
        return positions.to(device), is_token.to(device)


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """The mask and bias that a kernel computes from the positions in each sequence of a batch.

    Query ``i`` is at the position ``p = i``, or ``p = i + num_keys - num_queries`` if the ends are aligned. It
    sees the keys from ``p - left`` to ``p + right``; None: all of them.
    """

    num_queries: Tensor  # (B,) int64 on the CPU
    num_keys: Tensor  # (B,)
    left: int | None = None
    right: int | None = None
    is_aligned_at_end: bool = True
    first_key: Tensor | None = None  # (B,): earlier keys are padding
    chunk_size: int | None = None  # a query sees only keys of its own chunk of positions
    alibi_slopes: Tensor | None = None  # (H,) or (B, H): -slope · |p - j| is added to the score of key j

    def apply_to(self, query: Tensor, key: Tensor, scale: float, softcap: float | None = None) -> CapturedAttention:
        """Capture the attention of queries ``(B, H, Q, D)`` to keys ``(B, G, K, D)``."""
        batch, num_heads, query_length, _ = query.shape
        key_length = key.shape[2]
        for name, lengths in (("queries", self.num_queries), ("keys", self.num_keys)):
            if lengths.shape != (batch,):
                raise InputError(f"there are {tuple(lengths.shape)} lengths of {name} for {batch} sequences")
        if self.alibi_slopes is not None and self.alibi_slopes.shape[-1] != num_heads:
            raise InputError(f"{tuple(self.alibi_slopes.shape)} ALiBi slopes for {num_heads} heads")
        has_all_queries = bool((self.num_queries == query_length).all())
        has_all_keys = bool((self.num_keys == key_length).all()) and self.first_key is None
        if self.chunk_size is None and self.alibi_slopes is None:
            if has_all_queries and has_all_keys:
                diagonal, window = self._to_diagonal(query_length, key_length)
                return CapturedAttention(query, key, scale, softcap, diagonal=diagonal, window=window)
            if has_all_queries and self.left is None and self.right is None:
                mask = self._find_keys(torch.arange(key_length), torch.arange(batch)[:, None])
                return CapturedAttention(query, key, scale, softcap, mask[:, None, None].to(query.device))
        return CapturedAttention(query, key, scale, softcap, score_mod=self._build_score_mod())

    def _to_diagonal(self, query_length: int, key_length: int) -> tuple[int | None, int | None]:
        if self.left is None and self.right is None:
            return None, None
        right = key_length if self.right is None else self.right
        offset = key_length - query_length if self.is_aligned_at_end else 0
        return offset + right, None if self.left is None else self.left + right + 1

    def _find_keys(self, k: Tensor, b: Tensor) -> Tensor:
        """Return which keys ``k`` of the batch entries ``b`` are not padding."""
        is_key = k < self.num_keys.to(b.device)[b]
        return is_key if self.first_key is None else is_key & (k >= self.first_key.to(b.device)[b])

    def _build_score_mod(self) -> ScoreMod:
        def modify_scores(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            num_queries, num_keys = (lengths.to(b.device)[b] for lengths in (self.num_queries, self.num_keys))
            position = q + num_keys - num_queries if self.is_aligned_at_end else q
            visible = (q < num_queries) & self._find_keys(k, b)
            if self.left is not None:
                visible = visible & (k >= position - self.left)
            if self.right is not None:
                visible = visible & (k <= position + self.right)
            if self.chunk_size is not None:
                visible = visible & (k // self.chunk_size == position // self.chunk_size)
            if self.alibi_slopes is not None:
                slopes = self.alibi_slopes.to(scores)
                slopes = slopes[h] if slopes.dim() == 1 else slopes[b, h]
                scores = scores - slopes * (position - k).abs()
            return scores.masked_fill(~visible, -torch.inf)

        return modify_scores


def to_lengths(lengths: Tensor) -> Tensor:
    """Return integers of a kernel as a copy of type int64 on the CPU: the model may overwrite its own."""
    return lengths.detach().to("cpu", torch.int64, copy=True)


def fill_lengths(x: Tensor) -> Tensor:
    """Return the lengths ``(B,)`` of sequences ``(B, L, …)`` that are used as a whole."""
    return torch.full((len(x),), x.shape[1])


def gather_pages(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """Return ``(B, length, G, D)`` from pages ``(pages, page size, G, D)`` and their numbers ``(B, …)``."""
    num_pages = -(-length // pages.shape[1])
    numbers = table[:, :num_pages].long().clamp(0, len(pages) - 1)  # those behind a sequence are undefined
    return pages[numbers].flatten(1, 2)[:, :length]
