"""Token sequences, source–target batches, losses and attention maps: the types that models take and return.

Sequences have one of two layouts. *Padded*: one row per sequence, padded on the right. *Packed*: all
sequences concatenated in a single row, so that nothing is computed for padding. Models work with either,
because they get masks and positions from the tokens::

    padded                      packed

    a a a ·                     a a a b b c c c c
    b b · ·
    c c c c

Shapes: ``B`` sequences, ``L`` tokens of the longest; a packed row is ``(1, T)`` with T tokens in total.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from jumok.attention import masks
from jumok.attention.masks import Mask

# Every vocabulary of jumok begins with these.
SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>")
PAD, UNK, BOS, EOS = range(len(SPECIAL_TOKENS))
IGNORE = -100  # label that does not count: the default ``ignore_index`` of ``F.cross_entropy``
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """Base class of dataclasses of tensors. Their fields may be tensor groups, too."""

    def to(self, device: torch.device | str) -> Self:
        """Copy all tensors to a device, asynchronously if it is a GPU."""
        moved: dict[str, Any] = {name: _move_to_device(x, device) for name, x in self._select_fields(Tensor).items()}
        moved |= {name: group.to(device) for name, group in self._select_fields(TensorGroup).items()}
        return replace(self, **moved)

    def with_static_shapes(self) -> Self:
        """The same batch with a ``graph_key``."""
        groups = self._select_fields(TensorGroup)
        static: dict[str, Any] = {name: group.with_static_shapes() for name, group in groups.items()}
        return replace(self, **static)

    def _select_fields(self, field_type: type[T]) -> dict[str, T]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, field_type)}


@dataclass(frozen=True, eq=False)
class Tokens(TensorGroup):
    """Sequences of token ids, padded or packed.

    ``ids`` is ``(B, L)``, or ``(1, T)`` if packed. ``lengths`` (on the host) has one number per sequence, in
    the same order.

    >>> Tokens.pad([[7, 8, 9], [5]]).ids
    tensor([[7, 8, 9],
            [5, 0, 0]])
    >>> packed = Tokens.pack([[7, 8, 9], [5]])
    >>> packed.ids, packed.positions, packed.cu_seqlens
    (tensor([[7, 8, 9, 5]]), tensor([[0, 1, 2, 0]]), tensor([0, 3, 4], dtype=torch.int32))

    A model launches the same kernels for all tokens with the same :attr:`graph_key`: they differ only in the
    contents of tensors (``cu_seqlens`` and ``positions`` of packed tokens, ``device_lengths`` of padded
    ones). A CUDA graph recorded with one batch can therefore be replayed with another.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    packed: bool = False
    # Packed tokens only:
    cu_seqlens: Tensor | None = None  # (sequences + 1,): start of each sequence, then the end of the last
    positions: Tensor | None = None  # (1, T): position of each token in its own sequence
    max_length: int = 0  # upper bound of the lengths
    # Padded tokens with static shapes only:
    device_lengths: Tensor | None = None  # (B,): the lengths on the device of the ids, all at least 1

    @classmethod
    def pad(cls, sequences: Sequence[Sequence[int]], min_length: int = 0, fill: int = PAD) -> Tokens:
        """Pad each sequence on the right to the longest one, or to ``min_length`` if that is longer."""
        lengths = tuple(map(len, sequences))
        ids = torch.full((len(sequences), max(min_length, *lengths, 0)), fill)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.as_tensor(sequence)
        return cls(ids, lengths)

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int]], min_tokens: int = 0, fill: int = PAD) -> Tokens:
        """Concatenate all sequences, and append one of ``fill`` if they have fewer than ``min_tokens``."""
        lengths = [len(sequence) for sequence in sequences]
        missing = max(0, min_tokens - sum(lengths))
        ids = torch.tensor([*itertools.chain.from_iterable(sequences), *[fill] * missing])
        return cls.from_packed_ids(ids, [*lengths, missing] if missing else lengths)

    @classmethod
    def from_packed_ids(cls, ids: Tensor, lengths: Sequence[int], max_length: int = 0) -> Tokens:
        """Build packed tokens from concatenated ids ``(T,)``. ``max_length`` may exceed all lengths."""
        ends = np.cumsum(lengths)
        starts = ends - lengths
        positions = torch.from_numpy(np.arange(len(ids)) - np.repeat(starts, lengths))
        cu_seqlens = torch.from_numpy(np.append(starts, len(ids)).astype(np.int32))
        max_length = max(max_length, *lengths, 0)
        return cls(ids[None], tuple(lengths), True, cu_seqlens, positions[None], max_length)

    def with_static_shapes(self) -> Self:
        """The same tokens with a :attr:`graph_key` that does not depend on single lengths."""
        if self.packed:
            return self
        return replace(self, device_lengths=_move_to_device(torch.tensor(self.lengths), self.ids.device))

    @property
    def graph_key(self) -> Hashable | None:
        """What determines the kernels that a model launches. None if every single length does."""
        if self.cu_seqlens is not None:
            return self.ids.shape, len(self.cu_seqlens), self.max_length
        if self.device_lengths is None and self.mask is not None:
            return None
        return self.ids.shape, self.mask is None

    @functools.cached_property
    @torch.inference_mode(False)  # the cached value may be used in training later
    def valid_mask(self) -> Tensor:
        """``(B, L)``, False at padding. All True for a packed row."""
        if self.packed:
            return torch.ones(self.ids.shape, dtype=torch.bool, device=self.ids.device)
        positions = torch.arange(self.ids.shape[1], device=self.ids.device)
        return positions < self.lengths_tensor[:, None]

    @functools.cached_property
    @torch.inference_mode(False)
    def lengths_tensor(self) -> Tensor:
        """Lengths ``(B,)`` on the device of the ids."""
        if self.device_lengths is not None:
            return self.device_lengths
        return _move_to_device(torch.tensor(self.lengths), self.ids.device)

    @functools.cached_property
    def mask(self) -> Mask | None:
        """Mask for self-attention, or if padded for attention from any queries. None if there is none."""
        if self.cu_seqlens is not None:
            return masks.packed(self.cu_seqlens, self.max_length)
        if self.device_lengths is not None:
            return masks.padding(self.device_lengths, bounds=(1, self.ids.shape[1]))
        return None if min(self.lengths, default=0) == self.ids.shape[1] else masks.padding(self.lengths)

    @functools.cached_property
    def causal_mask(self) -> Mask:
        """Mask for causal self-attention: each token attends to itself and to earlier tokens."""
        # Padding is on the right, where no valid token attends. Outputs at padding are never used.
        return self.mask & masks.causal() if self.packed and self.mask is not None else masks.causal()

    def cross_attention_mask(self, queries: Tokens) -> Mask | None:
        """Mask for attention from ``queries`` to these tokens: sequence n attends to sequence n."""
        if self.cu_seqlens is None:
            return self.mask
        return masks.packed(
            self.cu_seqlens,
            self.max_length,
            cu_seqlens_q=queries.cu_seqlens,
            max_seqlen_q=queries.max_length,
        )


@dataclass(frozen=True, eq=False)
class Seq2SeqBatch(TensorGroup):
    """Source and target sequences.

    ``target`` is the decoder's input and ``labels``, of the same shape, its expected output::

        source   w1 … wn </s>
        target   <s>  v1 … vm
        labels    v1 … vm </s>       IGNORE at padding
    """

    source: Tokens
    target: Tokens
    labels: Tensor
    count: int  # number of labels that are not IGNORE
    example_indices: tuple[int, ...] = ()  # indices of the examples in their data set

    @classmethod
    def from_sequences(
        cls,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        example_indices: Sequence[int] = (),
        *,
        packed: bool = False,
        min_lengths: tuple[int, int] = (0, 0),
    ) -> Seq2SeqBatch:
        """Build a batch from token ids without special tokens.

        ``min_lengths`` are the ``min_length`` of :meth:`Tokens.pad`, or the ``min_tokens`` of
        :meth:`Tokens.pack`, of the source and of the target.

        >>> batch = Seq2SeqBatch.from_sequences([[7, 8]], [[9]])
        >>> batch.source.ids, batch.target.ids, batch.labels
        (tensor([[7, 8, 3]]), tensor([[2, 9]]), tensor([[9, 3]]))
        """
        lay_out = Tokens.pack if packed else Tokens.pad
        source_rows = [[*source, EOS] for source in sources]
        label_rows = [[*target, EOS] for target in targets]
        if packed and any(min_lengths):  # both sides get a filling sequence, or neither, so that they match
            min_lengths = (
                max(min_lengths[0], sum(map(len, source_rows)) + 1),
                max(min_lengths[1], sum(map(len, label_rows)) + 1),
            )
        return cls(
            source=lay_out(source_rows, min_lengths[0]),
            target=lay_out([[BOS, *target] for target in targets], min_lengths[1]),
            labels=lay_out(label_rows, min_lengths[1], fill=IGNORE).ids,
            count=sum(len(target) + 1 for target in targets),
            example_indices=tuple(example_indices),
        )

    @property
    def graph_key(self) -> Hashable | None:
        """The :attr:`Tokens.graph_key` of both sides."""
        keys = self.source.graph_key, self.target.graph_key
        return None if None in keys else keys


@dataclass(frozen=True, eq=False)
class Loss:
    """The training loss, summed over ``count`` labels. ``parts`` are further sums for the metrics log."""

    total: Tensor  # scalar with a graph
    count: int
    parts: dict[str, Tensor] = field(default_factory=dict)  # scalars without a graph


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Attention weights ``(B, H, Q, K)`` of one layer for padded sequences.

    Query t is the step that predicts label t. ``name`` is the layer's name in ``named_modules()``.
    """

    name: str
    weights: Tensor


def round_up_size(value: int, min_size: int) -> int:
    """Return the smallest of ``min_size`` · 1, 1½, 2, 3, 4, 6, 8, … that is at least ``value``.

    >>> [round_up_size(value, 32) for value in (1, 32, 33, 49, 65, 97)]
    [32, 32, 48, 64, 96, 128]
    """
    size = min_size
    while size < value:
        if (between := size * 3 // 2) >= value:
            return between
        size *= 2
    return size


def _move_to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Move ``x`` to the device, asynchronously if it is a GPU."""
    return x.to(device, non_blocking=torch.device(device).type == "cuda")
