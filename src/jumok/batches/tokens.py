"""What goes into a model, and what comes out of one: the types that data makes and models take.

Sequences come in one of two layouts. *Padded*: a row each, filled up at the right. *Packed*: all of them end
to end in a single row, so that no token is computed for padding. A model need not care: it asks the tokens
for masks and positions, and these say the same in both::

    padded                      packed

    a a a ·                     a a a b b c c c c
    b b · ·
    c c c c

Shapes: ``B`` sequences, ``L`` tokens of the longest; a packed row has ``(1, T)``, T all tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from jumok.attention import masks
from jumok.attention.masks import Mask

__all__ = [
    "BOS",
    "EOS",
    "IGNORE",
    "PAD",
    "SPECIAL_TOKENS",
    "UNK",
    "LayerAttention",
    "Loss",
    "Seq2SeqBatch",
    "Tokens",
    "round_up_size",
]

# Every vocabulary of ours begins with these.
SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>")
PAD, UNK, BOS, EOS = range(len(SPECIAL_TOKENS))
IGNORE = -100  # a label that does not count: what ``F.cross_entropy`` takes for one


@dataclass(frozen=True, eq=False)
class Tokens:
    """Several sequences of token ids, padded or packed.

    ``ids`` is ``(B, L)``, or ``(1, T)`` if packed; ``lengths`` (on the host) has one number a sequence, in
    this order.

    >>> Tokens.padded([[7, 8, 9], [5]]).ids
    tensor([[7, 8, 9],
            [5, 0, 0]])
    >>> packed = Tokens.pack([[7, 8, 9], [5]])
    >>> packed.ids, packed.positions, packed.edges
    (tensor([[7, 8, 9, 5]]), tensor([[0, 1, 2, 0]]), tensor([0, 3, 4], dtype=torch.int32))

    Tokens are *alike* if their :attr:`graph_key` is the same. Then a model launches the same kernels for them, and
    what differs lies in tensors: packed tokens have ``cu_seqlens`` and ``positions``, and padded ones may have
    their lengths as ``device_lengths``. So a CUDA graph recorded with the ones serves the others.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    packed: bool = False
    # Of packed tokens:
    cu_seqlens: Tensor | None = None  # (sequences + 1,), where each begins, and the end
    positions: Tensor | None = None  # (1, T), where each token stands in its own sequence
    max_length: int = 0  # the length of the longest, or more
    # Of padded tokens that are alike to others:
    device_lengths: Tensor | None = (
        None  # (B,), the lengths once more, on the device of the ids; all are at least 1
    )

    @classmethod
    def pad(cls, sequences: Sequence[Sequence[int]], min_length: int = 0, fill: int = PAD) -> Tokens:
        """One row a sequence, filled up at the right to the longest one, or ``to``."""
        lengths = tuple(map(len, sequences))
        ids = torch.full((len(sequences), max(min_length, *lengths, 0)), fill)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.as_tensor(sequence)
        return cls(ids, lengths)

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int]], min_tokens: int = 0, fill: int = PAD) -> Tokens:
        """All in one row. If they fall short of ``to`` tokens, one more sequence of ``fill`` fills it."""
        lengths = [len(sequence) for sequence in sequences]
        missing = max(0, min_tokens - sum(lengths))
        ids = torch.tensor([*itertools.chain.from_iterable(sequences), *[fill] * missing])
        return cls.from_packed_ids(ids, [*lengths, missing] if missing else lengths)

    @classmethod
    def from_packed_ids(cls, ids: Tensor, lengths: Sequence[int], max_length: int = 0) -> Tokens:
        """Packed tokens from their ids ``(T,)``; ``max_length`` is the most that a sequence has, or more."""
        ends = np.cumsum(lengths)
        begins = ends - lengths
        positions = torch.from_numpy(np.arange(len(ids)) - np.repeat(begins, lengths))
        edges = torch.from_numpy(np.append(begins, len(ids)).astype(np.int32))
        most = max(max_length, *lengths, 0)
        return cls(ids[None], tuple(lengths), True, edges, positions[None], most)

    def to(self, device: torch.device | str) -> Tokens:
        there = [
            x if x is None else _move_to_device(x, device)
            for x in (self.cu_seqlens, self.positions, self.device_lengths)
        ]
        edges, positions, counts = there
        ids = _move_to_device(self.ids, device)
        return replace(self, ids=ids, cu_seqlens=edges, positions=positions, device_lengths=counts)

    def with_static_shapes(self) -> Tokens:
        """The same tokens with a :attr:`graph_key`, in which no length of a single sequence counts."""
        if self.packed:
            return self
        return replace(self, device_lengths=_move_to_device(torch.tensor(self.lengths), self.ids.device))

    @property
    def graph_key(self) -> Hashable | None:
        """All that decides which kernels a model launches. None: the length of every single sequence does."""
        if self.cu_seqlens is not None:
            return self.ids.shape, len(self.cu_seqlens), self.max_length
        if self.device_lengths is None and self.mask is not None:
            return None
        return self.ids.shape, self.mask is None

    @functools.cached_property
    @torch.inference_mode(False)  # what is first asked for in inference may be used in training
    def valid_mask(self) -> Tensor:
        """``(B, L)``, True where a token belongs to a sequence; a packed row is full."""
        if self.packed:
            return torch.ones(self.ids.shape, dtype=torch.bool, device=self.ids.device)
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        return places < self.lengths_tensor[:, None]

    @functools.cached_property
    @torch.inference_mode(False)
    def lengths_tensor(self) -> Tensor:
        """The lengths on the device, ``(B,)``."""
        return (
            _move_to_device(torch.tensor(self.lengths), self.ids.device)
            if self.device_lengths is None
            else self.device_lengths
        )

    @functools.cached_property
    def mask(self) -> Mask | None:
        """For attention among these tokens, or, if padded, from anywhere to them. None: nothing is barred."""
        if self.cu_seqlens is not None:
            return masks.packed(self.cu_seqlens, self.max_length)
        if self.device_lengths is not None:
            return masks.padding(self.device_lengths, bounds=(1, self.ids.shape[1]))
        return None if min(self.lengths, default=0) == self.ids.shape[1] else masks.padding(self.lengths)

    @functools.cached_property
    def causal_mask(self) -> Mask:
        """For attention among these tokens, each to itself and what came before it."""
        # Padding is at the right, where no real token looks; what padding itself sees, nobody reads.
        return self.mask & masks.causal() if self.packed and self.mask is not None else masks.causal()

    def cross_attention_mask(self, queries: Tokens) -> Mask | None:
        """For attention of other tokens to these: each sequence to the one of the same number."""
        if self.cu_seqlens is None:
            return self.mask
        asking = queries.cu_seqlens, queries.max_length
        return masks.packed(self.cu_seqlens, self.max_length, cu_seqlens_q=asking[0], max_seqlen_q=asking[1])


@dataclass(frozen=True, eq=False)
class Seq2SeqBatch:
    """Source and target sequences, to learn from.

    ``target`` is what a decoder is given, ``labels`` (of the same shape) what it should say at each place::

        source   w1 … wn </s>
        target   <s>  v1 … vm
        labels    v1 … vm </s>       IGNORE where the target is padding
    """

    source: Tokens
    target: Tokens
    labels: Tensor
    count: int  # labels that count
    example_indices: tuple[int, ...] = ()  # the numbers of the examples in their data set

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
        """From plain token ids, without special tokens; ``to`` as in ``pad`` and ``pack``, a side each.

        >>> pairs = Pairs.of([[7, 8]], [[9]])
        >>> pairs.source.ids, pairs.target.ids, pairs.labels
        (tensor([[7, 8, 3]]), tensor([[2, 9]]), tensor([[9, 3]]))
        """
        make = Tokens.pack if packed else Tokens.pad
        filled = [[*source, EOS] for source in sources], [[*target, EOS] for target in targets]
        if packed and any(
            min_lengths
        ):  # a sequence that fills up is on both sides or on none, so that they match
            min_lengths = (
                max(min_lengths[0], sum(map(len, filled[0])) + 1),
                max(min_lengths[1], sum(map(len, filled[1])) + 1),
            )
        return cls(
            source=make(filled[0], min_lengths[0]),
            target=make([[BOS, *target] for target in targets], min_lengths[1]),
            labels=make(filled[1], min_lengths[1], fill=IGNORE).ids,
            count=sum(len(target) + 1 for target in targets),
            example_indices=tuple(example_indices),
        )

    @property
    def graph_key(self) -> Hashable | None:
        """As that of :class:`Tokens`, of both sides."""
        forms = self.source.graph_key, self.target.graph_key
        return None if None in forms else forms

    def with_static_shapes(self) -> Seq2SeqBatch:
        """The same pairs with a :attr:`graph_key`."""
        return replace(self, source=self.source.with_static_shapes(), target=self.target.with_static_shapes())

    def to(self, device: torch.device | str) -> Seq2SeqBatch:
        return replace(
            self,
            source=self.source.to(device),
            target=self.target.to(device),
            labels=_move_to_device(self.labels, device),
        )


@dataclass(frozen=True, eq=False)
class Loss:
    """What training makes smaller: the sum over ``count`` places. ``parts`` are further sums, to be told."""

    total: Tensor  # a number, with its graph
    count: int
    parts: dict[str, Tensor] = field(default_factory=dict)  # without graph


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Where one attention of a model looked: weights ``(B, H, Q, K)``, the rows of each sequence padded.

    Row t belongs to the step that says label t. ``name`` is the module's, as in ``named_modules()``.
    """

    name: str
    weights: Tensor


def round_up_size(value: int, min_size: int) -> int:
    """The smallest of ``min_size`` · 1, 1½, 2, 3, 4, 6, 8, … that is not below the number.

    >>> [rounded(number, 32) for number in (1, 32, 33, 49, 65, 97)]
    [32, 32, 48, 64, 96, 128]
    """
    size = min_size
    while size < value:
        if (between := size * 3 // 2) >= value:
            return between
        size *= 2
    return size


def _move_to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """On the device; to a GPU without waiting."""
    return x.to(device, non_blocking=torch.device(device).type == "cuda")
