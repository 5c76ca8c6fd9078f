"""Which examples are learned from together, and in what order.

The order is a pure function of seed and epoch: a run that was stopped finds its place by counting batches.
The examples are shuffled, cut into windows, and within a window

- *padded*: sorted by length, so that a batch has examples of like length and little padding; the batches
  are shuffled again afterwards;
- *packed*: left in the order of chance. Sequences lie end to end and need no like lengths.

A batch takes as many examples as its budget allows: neither side has more than ``max_tokens`` places, padding,
begin and end of sentence included. Only an example that is longer all by itself makes a larger batch.

Memory: 4 bytes an example for the order and 8 for its lengths, 1.2 GB at 100 million, whatever their length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.batches.tokens import BOS, EOS, IGNORE, PAD, Seq2SeqBatch, Tokens, round_up_size
from jumok.data.caches.token_store import TokenColumn, TokenStore
from jumok.errors import InputError

__all__ = [
    "KERNEL_BLOCK",
    "BatchPlan",
    "IndexArray",
    "LengthArray",
    "TranslationBatcher",
    "divide_batch",
    "fingerprint_arrays",
    "gather_sequences",
    "pack_sequences",
    "pad_array",
    "pad_sequences",
    "plan_batches",
    "round_up_lengths",
]

IndexArray = NDArray[np.integer[Any]]
LengthArray = NDArray[np.int32]
FlatSequences = tuple[
    NDArray[np.int64], NDArray[np.int64]
]  # the ids of many sequences end to end, and the length of each
KERNEL_BLOCK = 64  # tokens: a block of queries or keys, for the kernels of attention
SORT_WINDOW = 1 << 17  # examples that are sorted together: enough for like lengths, few enough for chance


@dataclass(frozen=True, eq=False)
class BatchPlan(Sequence[IndexArray]):
    """The batches of one epoch, each an array of example numbers, cut from the order only when asked for."""

    order: IndexArray  # all examples
    bounds: NDArray[np.int64]  # where batches begin in it, and the end
    batch_order: IndexArray  # the batches in the order in which they come

    def __len__(self) -> int:
        return len(self.batch_order)

    @overload
    def __getitem__(self, position: int) -> IndexArray: ...
    @overload
    def __getitem__(self, position: slice) -> list[IndexArray]: ...
    def __getitem__(self, position: int | slice) -> IndexArray | list[IndexArray]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        batch = int(self.batch_order[position])
        return self.order[self.bounds[batch] : self.bounds[batch + 1]]


def fingerprint_arrays(*arrays: NDArray[Any]) -> str:
    """Of all that is learned from and of its order: another one where anything differs."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def plan_batches(
    source_lengths: LengthArray,
    target_lengths: LengthArray,
    *,
    max_tokens: int,
    seed: int,
    epoch: int,
    packed: bool = False,
) -> BatchPlan:
    """All examples, each in one batch, by the lengths of their two sides.

    >>> lengths = np.array([3, 9, 4, 8, 3], np.int32)
    >>> sorted(sorted(batch.tolist()) for batch in plan_batches(lengths, lengths, max_tokens=20, seed=1, epoch=0))
    [[0, 2, 4], [1, 3]]
    """
    if max_tokens < 1:
        raise InputError(f"tokens={max_tokens}: a batch needs a budget of at least one token")
    if source_lengths.shape != target_lengths.shape or source_lengths.ndim != 1:
        raise InputError(
            f"lengths of {source_lengths.shape} sources and {target_lengths.shape} targets: they must be as many"
        )
    chance = np.random.default_rng([seed, epoch])
    order: IndexArray = np.arange(
        len(source_lengths), dtype=np.uint32 if len(source_lengths) < 1 << 32 else np.uint64
    )
    chance.shuffle(order)
    begins: list[int] = []
    for begin in range(0, len(order), SORT_WINDOW):
        window = order[begin : begin + SORT_WINDOW]
        if packed:
            cuts = list(_cut_packed(source_lengths[window], target_lengths[window], max_tokens))
        else:
            by_length, cuts = _sort_by_length(source_lengths[window], target_lengths[window], max_tokens)
            window[:] = window[by_length]
        begins += (begin + cut for cut in cuts)
    turn: IndexArray = np.arange(len(begins), dtype=np.uint32)
    if not packed:
        chance.shuffle(turn)
    return BatchPlan(order, np.array([*begins, len(order)], np.int64), turn)


def _sort_by_length(
    source_lengths: LengthArray, target_lengths: LengthArray, max_tokens: int
) -> tuple[NDArray[np.intp], list[int]]:
    """An order by length, and where batches begin in it: of two orders the one with less padding.

    One is by target length, and within one such length by source length, up in the one, down in the next: so
    the source does not jump where the target grows by one. The other, better if a batch spans many lengths,
    is by the longer side.
    """
    longer, shorter = np.maximum(source_lengths, target_lengths), np.minimum(source_lengths, target_lengths)
    up_and_down = np.where(target_lengths % 2, source_lengths, -source_lengths)
    tried = []
    for order in (np.lexsort((up_and_down, target_lengths)), np.lexsort((shorter, longer))):
        cuts = list(_cut_padded(longer[order], max_tokens))
        rows = np.diff([*cuts, len(order)])
        places = sum(
            int((np.maximum.reduceat(side[order], cuts) * rows).sum())
            for side in (source_lengths, target_lengths)
        )
        tried.append((places, order, cuts))
    _, order, cuts = min(tried, key=lambda one: one[0])
    return order, cuts


def _cut_padded(longer_lengths: LengthArray, max_tokens: int) -> Iterator[int]:
    """Where batches begin, if every row takes as many places as the longest."""
    begin = 0
    while begin < len(longer_lengths):
        yield begin
        ahead = longer_lengths[begin : begin + max_tokens].astype(np.int64)
        places = np.maximum.accumulate(ahead) * np.arange(1, len(ahead) + 1)
        begin += max(1, int(np.searchsorted(places, max_tokens, side="right")))


def _cut_packed(source_lengths: LengthArray, target_lengths: LengthArray, max_tokens: int) -> Iterator[int]:
    """Where batches begin, if all rows lie end to end."""
    ends = [np.cumsum(side, dtype=np.int64) for side in (source_lengths, target_lengths)]
    begin, before = 0, [0, 0]
    while begin < len(source_lengths):
        yield begin
        fits = min(
            int(np.searchsorted(end, taken + max_tokens, side="right"))
            for end, taken in zip(ends, before, strict=True)
        )
        begin = max(begin + 1, fits)
        before = [int(end[begin - 1]) for end in ends]


def divide_batch(
    index: IndexArray, source_lengths: LengthArray, target_lengths: LengthArray, num_parts: int
) -> list[IndexArray]:
    """A batch in so many parts of like work, for as many processes and steps of accumulation.

    The numbers of examples differ by one at most, and the tokens by no more than the longest example has. If
    there are fewer examples than parts, the last parts are empty.

    >>> lengths = np.array([7, 2, 5, 4], np.int32)
    >>> [part.tolist() for part in divide_batch(np.arange(4, dtype=np.uint32), lengths, lengths, 2)]
    [[0, 1], [2, 3]]
    """
    if num_parts < 1:
        raise InputError(f"a batch cannot be divided into {num_parts} parts")
    # Dealt out by length, the longest first, back and forth: 0 1 2 2 1 0 0 1 2 …
    longest_first = index[np.argsort(-(source_lengths[index] + target_lengths[index]), kind="stable")]
    turn = np.arange(len(index)) % (2 * num_parts)
    dealt = np.minimum(turn, 2 * num_parts - 1 - turn)
    return [longest_first[dealt == part] for part in range(num_parts)]


class TranslationBatcher:
    """A store as batches to learn from: what the training loop asks for.

    >>> data = TranslationBatcher(store, max_tokens=4096, seed=1)             # doctest: +SKIP
    >>> for index in data.batches(epoch=0):                     # doctest: +SKIP
    ...     pairs = data.collate(index)

    The same sizes come again and again, so that what was compiled or recorded for one batch serves others:

    ``packed``: a batch is one row of sequences end to end, and its length a multiple of 1/32 of ``max_tokens``.
    What is missing is filled by sequences that do not count, equally many on both sides.

    ``fixed_shapes``: padded sentences have one of a few lengths (:func:`round_up_lengths`), and a batch as many rows as its
    budget allows; some of them may be empty sentences that do not count.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        max_tokens: int,
        seed: int,
        packed: bool = False,
        fixed_shapes: bool = False,
    ) -> None:
        if max_tokens < 2:
            raise InputError(f"tokens={max_tokens}: a batch needs a budget of at least two tokens")
        self.store, self.max_tokens, self.seed, self.packed, self.fixed_shapes = (
            store,
            max_tokens,
            seed,
            packed,
            fixed_shapes,
        )
        # As they will be in a batch, with an end or a begin of sentence.
        self.source_lengths: LengthArray = store.source.lengths + np.int32(1)
        self.target_lengths: LengthArray = store.target.lengths + np.int32(1)
        self.length_multiple = max(KERNEL_BLOCK, max_tokens // 32)
        self.num_fillers = self.length_multiple // KERNEL_BLOCK + 2  # so that none is longer than LEAST
        self._latest_epoch: tuple[int, BatchPlan] | None = (
            None  # asked for again, the same need not be made again
        )

    def __len__(self) -> int:
        return len(self.store)

    @property
    def fingerprint(self) -> str:
        """Identifies the examples."""
        return self.store.fingerprint

    def batches(self, epoch: int) -> BatchPlan:
        """The batches of an epoch, in order."""
        latest = self._latest_epoch
        if latest is None or latest[0] != epoch:
            budget = max(1, self.max_tokens - self.num_fillers) if self.packed else self.max_tokens
            source, target = self.source_lengths, self.target_lengths
            if self.fixed_shapes and not self.packed:
                source, target = round_up_lengths(source), round_up_lengths(target)
            made = plan_batches(
                source, target, max_tokens=budget, seed=self.seed, epoch=epoch, packed=self.packed
            )
            latest = self._latest_epoch = (epoch, made)
        return latest[1]

    def divide(self, index: IndexArray, num_parts: int) -> list[IndexArray]:
        """A batch in parts of like work; see :func:`divide_batch`."""
        return divide_batch(index, self.source_lengths, self.target_lengths, num_parts)

    def collate(self, index: Sequence[int] | IndexArray) -> Seq2SeqBatch:
        """The examples of these numbers as a model takes them: what ``Seq2SeqBatch.of`` makes, only faster."""
        numbers = np.asarray(index, np.int64)
        source, target = (gather_sequences(side, numbers) for side in (self.store.source, self.store.target))
        sides = _append_eos(*source), _prepend_bos(*target), _append_eos(*target)
        make = self._collate_packed if self.packed else self._collate_padded
        given, told, labels = make(*sides)
        count = int(sides[2][1].sum())
        return Seq2SeqBatch(given, told, labels, count, example_indices=tuple(numbers.tolist()))

    def _collate_packed(
        self, source: FlatSequences, target: FlatSequences, labels: FlatSequences
    ) -> tuple[Tokens, Tokens, Tensor]:
        """Source and target in a row each, and the labels of the second."""
        given, told = (
            pack_sequences(*side, self.length_multiple, self.num_fillers) for side in (source, target)
        )
        return given, told, torch.from_numpy(pad_array(labels[0], told.ids.shape[1], IGNORE))[None]

    def _collate_padded(
        self, source: FlatSequences, target: FlatSequences, labels: FlatSequences
    ) -> tuple[Tokens, Tokens, Tensor]:
        """The same in as many rows as there are sentences, or more."""
        widths = [int(lengths.max(initial=0)) for _, lengths in (source, target)]
        rows = len(source[1])
        if self.fixed_shapes:
            widths = [int(round_up_lengths(np.array(width))) for width in widths]
            rows = max(rows, self.max_tokens // max(widths))

        def square(sequences: FlatSequences, width: int, fill: int, filler: int) -> Tokens:
            tokens = pad_sequences(*sequences, (rows, width), fill, filler)
            return tokens.with_static_shapes() if self.fixed_shapes else tokens

        given, told = square(source, widths[0], PAD, EOS), square(target, widths[1], PAD, BOS)
        return given, told, square(labels, widths[1], IGNORE, IGNORE).ids


def pack_sequences(
    ids: NDArray[np.int64], lengths: NDArray[np.int64], multiple: int, num_fillers: int
) -> Tokens:
    """Sequences end to end, and behind them so many that do not count, up to a multiple of a length.

    Empty ones make the number of sequences one of a few, too.
    """
    whole = -(-(len(ids) + num_fillers) // multiple) * multiple
    cuts = np.linspace(len(ids), whole, num_fillers + 1).astype(np.int64)
    sequences = len(lengths) + num_fillers
    empty = np.zeros(round_up_size(sequences, KERNEL_BLOCK) - sequences, np.int64)
    every = np.concatenate([lengths, np.diff(cuts), empty])
    longest = round_up_size(int(lengths.max(initial=0)), KERNEL_BLOCK)
    return Tokens.from_packed_ids(torch.from_numpy(pad_array(ids, whole, PAD)), every.tolist(), longest)


def pad_sequences(
    ids: NDArray[np.int64], lengths: NDArray[np.int64], shape: tuple[int, int], pad_value: int, filler_id: int
) -> Tokens:
    """Sequences in rows, filled up at the right; rows that are left over hold one ``filler_id`` each."""
    rows, width = shape
    more = rows - len(lengths)
    lengths = np.concatenate([lengths, np.ones(more, np.int64)])
    square = np.full(shape, pad_value)
    square[np.arange(width) < lengths[:, None]] = np.concatenate([ids, np.full(more, filler_id)])
    return Tokens(torch.from_numpy(square), tuple(lengths.tolist()))


def round_up_lengths(lengths: Any) -> Any:
    """Lengths, or one, rounded up to one of 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, …

    >>> round_up_lengths(np.array([1, 4, 13, 33, 65]))
    array([ 4,  4, 16, 40, 80])
    """
    lengths = np.asarray(lengths)
    octave = np.exp2(np.ceil(np.log2(np.maximum(lengths, 1))))
    step = np.maximum(4, octave / 8).astype(lengths.dtype)
    return -(-lengths // step) * step


def pad_array(values: NDArray[np.int64], length: int, pad_value: int) -> NDArray[np.int64]:
    """The same numbers, and so many more that there are ``to`` of them."""
    return np.concatenate([values, np.full(length - len(values), pad_value)])


def gather_sequences(column: TokenColumn, indices: NDArray[np.int64]) -> FlatSequences:
    """The token ids of some examples."""
    begins = column.offsets[indices].astype(np.int64)
    lengths = column.offsets[indices + 1].astype(np.int64) - begins
    before = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) + np.repeat(begins - before, lengths)
    return column.ids[places].astype(np.int64), lengths


def _append_eos(ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> FlatSequences:
    """The same sequences, each with EOS behind it."""
    return np.insert(ids, np.cumsum(lengths), EOS), lengths + 1


def _prepend_bos(ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> FlatSequences:
    """The same sequences, each with BOS before it."""
    return np.insert(ids, np.cumsum(lengths) - lengths, BOS), lengths + 1
