"""Sequences of unlike length, read and attended to without computing padding.

Recurrent layers go through all sequences at once, a step at a time. Sorted by length, the sequences that are
not over yet are always the first, so that they lie end to end, step by step (PyTorch's ``PackedSequence``)::

    sequences    a a a a      steps    a b c │ a b c │ a b │ a
                 b b b
                 c c

Attention wants each sequence in a row of its own. Sequences of like length share a *shelf*, whose rows are
filled up: so a single long one does not make all others as long as itself. ::

    shelves      a a a a      c c
                 b b b ·

Where everything lies is worked out on the host, which knows the lengths, and goes to the device in one piece.

Shapes: ``B`` sequences, ``T`` their words in all, ``P`` the places of all shelves.
"""

from __future__ import annotations

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

__all__ = ["PackedSteps", "RaggedBucket", "RaggedLayout"]

Int64Array = NDArray[np.int64]
# A further shelf is a dozen launches more. It must save so many places to be worth it.
MIN_SAVED_POSITIONS, MIN_SAVED_POSITIONS_ON_GPU = 1 << 11, 1 << 17


class PackedSteps(NamedTuple):
    """Where the words of the steps lie."""

    batch_sizes: Tensor  # (steps,), on the host: how many sequences have a word at each step
    # (steps + sequences,) int32, on the device: which is a step's first word; how many words a sequence has
    offsets_and_lengths: Tensor
    num_sequences: int

    @classmethod
    def from_batch_sizes(cls, batch_sizes: Tensor, device: torch.device | str) -> PackedSteps:
        """From the sizes alone."""
        each = batch_sizes.numpy()
        sequences = int(each.max(initial=0))
        lengths = np.searchsorted(-each, -np.arange(sequences), side="left")
        return cls(
            batch_sizes, _move_to_device(np.concatenate([np.cumsum(each) - each, lengths]), device), sequences
        )


@dataclass(frozen=True, eq=False)
class RaggedBucket:
    """Sequences of like length, from the ``first_rank``-th longest on, in rows as long as the first of them."""

    first_rank: int
    num_rows: int
    length: int
    mask: Mask | None  # for attention from anywhere to them; None: all rows are full


@dataclass(frozen=True, eq=False)
class RaggedLayout:
    """How sequences lie when they are read, and when they are attended to.

    >>> ragged = Ragged.of(Tokens.pack([[5], [7, 8, 9], [], [4, 6]]))
    >>> ragged.places, ragged.packing.sizes
    (tensor([1, 4, 0, 2, 5, 3], dtype=torch.int32), tensor([3, 2, 1]))
    >>> words = torch.tensor([7.0, 4.0, 5.0, 8.0, 6.0, 9.0])[:, None]
    >>> [shelf[..., 0] for shelf in ragged.shelved(words)]
    [tensor([[7., 8., 9.],
            [4., 6., 6.],
            [5., 5., 5.]])]
    """

    token_indices: Tensor  # (T,): where the words are in the flattened ids, in the order of the steps
    packed_steps: PackedSteps  # of the words in that order
    buckets: Sequence[RaggedBucket]
    ranks: Tensor  # (B,): how many sequences are longer; empty ones come last
    num_empty: int  # sequences without a word, which lie on no shelf
    _bucket_sources: Tensor  # (P,): which word, in the order of the steps, lies at each place of the shelves
    _bucket_positions: Tensor  # (T,): and at which of these places each word lies

    @classmethod
    @torch.inference_mode(False)
    def from_tokens(cls, tokens: Tokens) -> RaggedLayout:
        """From the lengths that the host knows."""
        if is_capturing_cuda_graph():
            raise RuntimeError(
                "the lengths of these sequences would be recorded in a CUDA graph; give padded tokens that "
                "are alike(), or record nothing"
            )
        device = tokens.ids.device
        lengths = np.array(tokens.lengths, np.int64)
        order = np.argsort(-lengths, kind="stable")
        falling = lengths[order]
        full = int(np.count_nonzero(falling))
        falling = falling[:full]
        longest = int(falling.max(initial=0))
        sizes = np.searchsorted(-falling, -np.arange(longest), side="left")
        firsts = np.cumsum(sizes) - sizes  # where each step begins
        # Of each word, in the order of the steps: the step, and how many sequences are longer than its own.
        step = np.repeat(np.arange(longest), sizes)
        rank = np.arange(len(step)) - np.repeat(firsts, sizes)
        begins = (
            np.cumsum(lengths) - lengths if tokens.packed else np.arange(len(order)) * tokens.ids.shape[1]
        )

        cuts = _find_bucket_starts(
            falling, MIN_SAVED_POSITIONS_ON_GPU if device.type == "cuda" else MIN_SAVED_POSITIONS
        )
        shapes = [(begin, end - begin, int(falling[begin])) for begin, end in itertools.pairwise(cuts)]
        wide = np.repeat([length for *_, length in shapes], [rows for _, rows, _ in shapes]).astype(np.int64)
        row_begins = np.cumsum(wide) - wide
        # A row is filled up with its own last word, which attention does not see twice.
        onto = [
            firsts[np.minimum(np.arange(length), falling[begin : begin + rows, None] - 1)]
            + np.arange(begin, begin + rows)[:, None]
            for begin, rows, length in shapes
        ]
        numbers = (
            firsts,  # first, so that kernels find the packing at an aligned address
            falling,
            begins[order][rank] + step,
            np.argsort(order),
            row_begins[rank] + step,
            *(x.ravel() for x in onto),
        )
        parts = [longest + full, len(step), len(order), len(step), int(wide.sum())]
        packed, places, ranks, off, where = _move_to_device(np.concatenate(numbers), device).split(parts)
        packing, counts = PackedSteps(torch.from_numpy(sizes), packed, full), packed[longest:]

        def mask(begin: int, rows: int, length: int) -> Mask | None:
            shortest = int(falling[begin + rows - 1])
            if shortest == length:
                return None
            padding = masks.padding(counts[begin : begin + rows], bounds=(shortest, length))
            # What fills a row up holds nothing that the row does not hold itself: no need to clear it.
            return replace(cast(PaddingMask, padding), padding_is_zero=True)

        shelves = [RaggedBucket(*shape, mask(*shape)) for shape in shapes]
        return cls(places, packing, shelves, ranks, len(order) - full, where, off)

    def to_buckets(self, x: Tensor) -> list[Tensor]:
        """Something of each word, ``(T, D)`` in the order of the steps, in rows ``(num_rows, length, D)``."""
        laid: Tensor = _GatherRowsFunction.apply(x, self._bucket_sources, self._bucket_positions)  # type: ignore[no-untyped-call]
        parts = laid.split([shelf.num_rows * shelf.length for shelf in self.buckets])
        return [
            part.unflatten(0, (shelf.num_rows, shelf.length))
            for part, shelf in zip(parts, self.buckets, strict=True)
        ]

    def from_buckets(self, bucket_rows: Sequence[Tensor]) -> Tensor:
        """Something of each row of the shelves, ``(num_rows, D)`` each, as the sequences came: ``(B, D)``.

        Empty sequences get zeros.
        """
        made = torch.cat([*bucket_rows])
        if self.num_empty:
            made = F.pad(made, (0, 0, 0, self.num_empty))
        return made.index_select(0, self.ranks)


def _move_to_device(values: Int64Array, device: torch.device | str) -> Tensor:
    """As int32 on the device, without a wait."""
    device, whole = torch.device(device), torch.from_numpy(values.astype(np.int32))
    # From other memory, a large copy waits until the GPU is through.
    return move_to_device(whole.pin_memory() if device.type == "cuda" else whole, device)


def _find_bucket_starts(descending_lengths: Int64Array, min_saved: int) -> list[int]:
    """Where shelves begin among sequences of falling length, and the end.

    Where the length has fallen to two thirds, if it saves places enough.
    """
    cuts = [0] if len(descending_lengths) else []
    while cuts:
        longest = descending_lengths[cuts[-1]]
        cut = int(np.searchsorted(-descending_lengths, -(longest * 2 // 3), side="left"))
        saved = (len(descending_lengths) - cut) * (
            longest - descending_lengths[min(cut, len(descending_lengths) - 1)]
        )
        if cut <= cuts[-1] or saved < min_saved:
            break
        cuts.append(cut)
    return [*cuts, len(descending_lengths)]


class _GatherRowsFunction(torch.autograd.Function):
    """``x[sources]``, in which each row of x comes at ``positions``; what else is there passes no gradient on.

    The gradient is a copy, too. For PyTorch's own it would be a sum over all places with the same row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return x.index_select(0, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (off,) = ctx.saved_tensors
        return gradient.index_select(0, off), None, None
