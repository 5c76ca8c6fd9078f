"""Layouts of sequences of different lengths, for recurrent layers and attention without padding.

Recurrent layers process all sequences together, one step at a time. Sorted by falling length, the sequences
that have not ended come first, and the words of a step are contiguous (PyTorch's ``PackedSequence``)::

    sequences    a a a a      steps    a b c │ a b c │ a b │ a
                 b b b
                 c c

Attention needs one row per sequence. Sequences of similar length share a *bucket* of padded rows, so that a
single long sequence does not lengthen all others::

    buckets      a a a a      c c
                 b b b ·

Both are computed on the host, which knows the lengths, and moved to the device in one copy each. The buckets
are computed when they are first used.

Shapes: ``B`` sequences, ``T`` words in total, ``P`` positions of all buckets.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from jumok.attention import masks
from jumok.attention.caching import is_capturing_cuda_graph
from jumok.attention.mask_types import PaddingMask, move_to_device
from jumok.attention.masks import Mask
from jumok.batches.tokens import Tokens

Int64Array = NDArray[np.int64]
# Each bucket costs a dozen kernel launches. It must save this many positions to be worth it.
MIN_SAVED_POSITIONS, MIN_SAVED_POSITIONS_ON_GPU = 1 << 11, 1 << 17


class PackedSteps(NamedTuple):
    """The layout of words in the order of steps."""

    batch_sizes: Tensor  # (steps,), on the host: number of sequences that have a word at each step
    # (steps + sequences,) int32, on the device: index of each step's first word, then length of each sequence
    offsets_and_lengths: Tensor
    num_sequences: int

    @classmethod
    def from_batch_sizes(cls, batch_sizes: Tensor, device: torch.device | str) -> PackedSteps:
        """Build the layout from the batch sizes."""
        sizes = batch_sizes.numpy()
        sequences = int(sizes.max(initial=0))
        lengths = np.searchsorted(-sizes, -np.arange(sequences), side="left")
        offsets_and_lengths = np.concatenate([np.cumsum(sizes) - sizes, lengths])
        return cls(batch_sizes, _move_to_device(offsets_and_lengths, device), sequences)


@dataclass(frozen=True, eq=False)
class RaggedBucket:
    """Padded rows of sequences of similar length: ``num_rows`` of them, from rank ``first_rank`` on."""

    first_rank: int
    num_rows: int
    length: int  # of the longest sequence
    mask: Mask | None  # for attention to these rows; None if there is no padding


class _BucketLayout(NamedTuple):
    """The layout of words in buckets."""

    buckets: Sequence[RaggedBucket]
    sources: Tensor  # (P,): for each bucket position, the index of its word in the order of steps
    positions: Tensor  # (T,): for each word, its bucket position


@dataclass(frozen=True, eq=False)
class RaggedLayout:
    """The layouts of sequences for recurrent layers and for attention.

    >>> layout = RaggedLayout.from_tokens(Tokens.pack([[5], [7, 8, 9], [], [4, 6]]))
    >>> layout.token_indices, layout.packed_steps.batch_sizes
    (tensor([1, 4, 0, 2, 5, 3], dtype=torch.int32), tensor([3, 2, 1]))
    >>> words = torch.tensor([7.0, 4.0, 5.0, 8.0, 6.0, 9.0])[:, None]
    >>> [rows[..., 0] for rows in layout.to_buckets(words)]
    [tensor([[7., 8., 9.],
            [4., 6., 6.],
            [5., 5., 5.]])]
    """

    token_indices: Tensor  # (T,): indices of the words in the flattened ids, in the order of steps
    packed_steps: PackedSteps  # of the words in that order
    ranks: Tensor  # (B,): rank of each sequence by falling length; empty ones come last
    num_empty: int  # sequences without words, which are in no bucket
    _lengths: Int64Array  # of the sequences with words, falling
    _offsets: Int64Array  # (steps,): index of the first word of each step
    _words: tuple[Int64Array, Int64Array]  # (T,): for each word, its step, and the rank of its sequence

    @classmethod
    @torch.inference_mode(False)
    def from_tokens(cls, tokens: Tokens) -> RaggedLayout:
        """Build the layouts of tokens whose lengths are on the host."""
        if is_capturing_cuda_graph():
            raise RuntimeError(
                "the lengths of these sequences would become part of a CUDA graph; use padded tokens "
                "with_static_shapes(), or do not capture a graph"
            )
        lengths = np.array(tokens.lengths, np.int64)
        order = np.argsort(-lengths, kind="stable")
        falling = lengths[order]
        num_filled = int(np.count_nonzero(falling))
        falling = falling[:num_filled]
        max_length = int(falling.max(initial=0))
        # The steps: how many words each has, and the index of its first word.
        sizes = np.searchsorted(-falling, -np.arange(max_length), side="left")
        offsets = np.cumsum(sizes) - sizes
        # For each word, in the order of steps: its step, and the rank of its sequence.
        step = np.repeat(np.arange(max_length), sizes)
        rank = np.arange(len(step)) - np.repeat(offsets, sizes)
        starts = np.cumsum(lengths) - lengths if tokens.packed else np.arange(len(order)) * tokens.ids.shape[1]

        arrays = (
            offsets,  # first, so that kernels find offsets and lengths at an aligned address
            falling,
            starts[order][rank] + step,
            np.argsort(order),
        )
        parts = [max_length + num_filled, len(step), len(order)]
        moved = _move_to_device(np.concatenate(arrays), tokens.ids.device).split(parts)
        offsets_and_lengths, token_indices, ranks = moved
        return cls(
            token_indices=token_indices,
            packed_steps=PackedSteps(torch.from_numpy(sizes), offsets_and_lengths, num_filled),
            ranks=ranks,
            num_empty=len(order) - num_filled,
            _lengths=falling,
            _offsets=offsets,
            _words=(step, rank),
        )

    @property
    def buckets(self) -> Sequence[RaggedBucket]:
        """The buckets, the longest sequences first."""
        return self._bucket_layout.buckets

    @functools.cached_property
    @torch.inference_mode(False)
    def _bucket_layout(self) -> _BucketLayout:
        device, lengths = self.token_indices.device, self._lengths
        min_saved = MIN_SAVED_POSITIONS_ON_GPU if device.type == "cuda" else MIN_SAVED_POSITIONS
        bucket_starts = _find_bucket_starts(lengths, min_saved)
        shapes = [(first, end - first, int(lengths[first])) for first, end in itertools.pairwise(bucket_starts)]
        row_lengths = np.repeat([length for *_, length in shapes], [rows for _, rows, _ in shapes]).astype(np.int64)
        row_starts = np.cumsum(row_lengths) - row_lengths
        # A row is padded with its own last word, which attention masks.
        bucket_sources = [
            self._offsets[np.minimum(np.arange(length), lengths[first : first + rows, None] - 1)]
            + np.arange(first, first + rows)[:, None]
            for first, rows, length in shapes
        ]
        step, rank = self._words
        arrays = *(x.ravel() for x in bucket_sources), row_starts[rank] + step
        parts = [int(row_lengths.sum()), len(step)]
        sources, positions = _move_to_device(np.concatenate(arrays), device).split(parts)
        device_lengths = self.packed_steps.offsets_and_lengths[len(self._offsets) :]

        def build_mask(first: int, rows: int, length: int) -> Mask | None:
            shortest = int(lengths[first + rows - 1])
            if shortest == length:
                return None
            padding = masks.padding(device_lengths[first : first + rows], bounds=(shortest, length))
            # Padding repeats a word of the same row. It is finite if the row is, and need not be cleared.
            return replace(cast(PaddingMask, padding), padding_is_zero=True)

        return _BucketLayout([RaggedBucket(*shape, build_mask(*shape)) for shape in shapes], sources, positions)

    def to_buckets(self, x: Tensor) -> list[Tensor]:
        """Vectors of words ``(T, D)``, in the order of steps, as ``(num_rows, length, D)`` per bucket."""
        rows: Tensor = _GatherRowsFunction.apply(x, *self._bucket_layout[1:])  # type: ignore[no-untyped-call]
        parts = rows.split([bucket.num_rows * bucket.length for bucket in self.buckets])
        return [
            part.unflatten(0, (bucket.num_rows, bucket.length))
            for part, bucket in zip(parts, self.buckets, strict=True)
        ]

    def from_buckets(self, bucket_rows: Sequence[Tensor]) -> Tensor:
        """Vectors ``(num_rows, D)`` of each bucket as ``(B, D)``, in the order of the sequences.

        Empty sequences get zeros.
        """
        vectors = torch.cat([*bucket_rows])
        if self.num_empty:
            vectors = F.pad(vectors, (0, 0, 0, self.num_empty))
        return vectors.index_select(0, self.ranks)


def _move_to_device(values: Int64Array, device: torch.device | str) -> Tensor:
    """Move an array to the device as int32, without waiting."""
    device, tensor = torch.device(device), torch.from_numpy(values.astype(np.int32))
    # A large copy from unpinned memory waits for the GPU.
    return move_to_device(tensor.pin_memory() if device.type == "cuda" else tensor, device)


def _find_bucket_starts(descending_lengths: Int64Array, min_saved: int) -> list[int]:
    """Find the rank of the first sequence of each bucket, followed by the number of sequences.

    A bucket begins where the length has fallen to two thirds, if this saves enough positions.
    """
    starts = [0] if len(descending_lengths) else []
    while starts:
        longest = descending_lengths[starts[-1]]
        start = int(np.searchsorted(-descending_lengths, -(longest * 2 // 3), side="left"))
        saved = (len(descending_lengths) - start) * (
            longest - descending_lengths[min(start, len(descending_lengths) - 1)]
        )
        if start <= starts[-1] or saved < min_saved:
            break
        starts.append(start)
    return [*starts, len(descending_lengths)]


class _GatherRowsFunction(torch.autograd.Function):
    """``x[sources]``, where row n of x is at ``positions[n]``. Other copies of a row get no gradient.

    So the gradient is a gather too. That of PyTorch's indexing is a sum over all copies of a row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return x.index_select(0, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return gradient.index_select(0, positions), None, None
