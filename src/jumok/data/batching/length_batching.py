"""Batches of examples of similar length, in an order that depends only on the seed and the epoch.

A run that was interrupted therefore finds its place again by counting batches; no other state is saved. The
examples of an epoch are shuffled and divided into windows. Within a window

- *padded* batches are cut from the examples sorted by length, so that there is little padding. Then the
  batches are shuffled again;
- *packed* batches are cut from the examples in shuffled order. Sequences are concatenated, so their lengths
  need not be similar.

A batch contains as many examples as its budget allows: neither side has more than ``max_tokens`` tokens,
including padding, BOS and EOS. Only a single example that is longer by itself exceeds the budget.

:class:`LengthBatcher` implements this once. A subclass supplies the lengths of its examples and collates
them.

Memory: 4 bytes per example for the order and 8 for its lengths, which is 1.2 GB for 100 million examples.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from jumok.batches.tokens import IGNORE, PAD, Tokens, round_up_size
from jumok.errors import InputError

IndexArray = NDArray[np.integer[Any]]
LengthArray = NDArray[np.int32]
IntArray = NDArray[np.int64]
FlatSequences = tuple[IntArray, IntArray]  # the ids of many sequences, concatenated, and the length of each
B = TypeVar("B")
KERNEL_BLOCK = 64  # tokens: the block size of the attention kernels
SORT_WINDOW = 1 << 17  # examples sorted together: enough for similar lengths, few enough to stay random
EPOCH_STRIDE = 1 << 40  # where examples differ between epochs, their index is epoch · EPOCH_STRIDE + index


# ------------------------------------------------------------------------------------------ order of examples


@dataclass(frozen=True, eq=False)
class BatchPlan(Sequence[IndexArray]):
    """The batches of one epoch. Each is an array of example indices, cut from the order on access."""

    order: IndexArray  # all examples
    bounds: NDArray[np.int64]  # start of each batch in ``order``, then the end of the last
    batch_order: IndexArray  # the order in which the batches come

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


def plan_batches(
    source_lengths: LengthArray,
    target_lengths: LengthArray,
    *,
    max_tokens: int,
    seed: int,
    epoch: int,
    packed: bool = False,
) -> BatchPlan:
    """Divide all examples into batches, by the lengths of their two sides.

    >>> lengths = np.array([3, 9, 4, 8, 3], np.int32)
    >>> plan = plan_batches(lengths, lengths, max_tokens=20, seed=1, epoch=0)
    >>> sorted(sorted(batch.tolist()) for batch in plan)
    [[0, 2, 4], [1, 3]]
    """
    if max_tokens < 1:
        raise InputError(f"max_tokens={max_tokens}: a batch needs a budget of at least one token")
    if source_lengths.shape != target_lengths.shape or source_lengths.ndim != 1:
        raise InputError(
            f"there are lengths of {source_lengths.shape} sources and {target_lengths.shape} targets; "
            "expected the same number of both"
        )
    rng = np.random.default_rng([seed, epoch])
    order: IndexArray = np.arange(len(source_lengths), dtype=np.uint32 if len(source_lengths) < 1 << 32 else np.uint64)
    rng.shuffle(order)
    starts: list[int] = []
    for window_start in range(0, len(order), SORT_WINDOW):
        window = order[window_start : window_start + SORT_WINDOW]
        if packed:
            cuts = list(_cut_packed(source_lengths[window], target_lengths[window], max_tokens))
        else:
            by_length, cuts = _sort_by_length(source_lengths[window], target_lengths[window], max_tokens)
            window[:] = window[by_length]
        starts += (window_start + cut for cut in cuts)
    batch_order: IndexArray = np.arange(len(starts), dtype=np.uint32)
    if not packed:
        rng.shuffle(batch_order)
    return BatchPlan(order, np.array([*starts, len(order)], np.int64), batch_order)


def _sort_by_length(
    source_lengths: LengthArray, target_lengths: LengthArray, max_tokens: int
) -> tuple[NDArray[np.intp], list[int]]:
    """Sort examples by length and cut batches: of two sort orders, the one with less padding.

    The first order is by target length and then by source length, ascending for one target length and
    descending for the next, so that the source length does not jump where the target length grows by one. The
    second order is by the longer side. It is better if a batch spans many lengths.
    """
    longer, shorter = np.maximum(source_lengths, target_lengths), np.minimum(source_lengths, target_lengths)
    up_and_down = np.where(target_lengths % 2, source_lengths, -source_lengths)
    candidates = []
    for order in (np.lexsort((up_and_down, target_lengths)), np.lexsort((shorter, longer))):
        cuts = list(_cut_padded(longer[order], max_tokens))
        num_rows = np.diff([*cuts, len(order)])
        padded_size = sum(
            int((np.maximum.reduceat(side[order], cuts) * num_rows).sum()) for side in (source_lengths, target_lengths)
        )
        candidates.append((padded_size, order, cuts))
    _, order, cuts = min(candidates, key=lambda candidate: candidate[0])
    return order, cuts


def _cut_padded(longer_lengths: LengthArray, max_tokens: int) -> Iterator[int]:
    """Where batches start if every row is padded to the longest."""
    start = 0
    while start < len(longer_lengths):
        yield start
        lengths = longer_lengths[start : start + max_tokens].astype(np.int64)
        padded_sizes = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
        start += max(1, int(np.searchsorted(padded_sizes, max_tokens, side="right")))


def _cut_packed(source_lengths: LengthArray, target_lengths: LengthArray, max_tokens: int) -> Iterator[int]:
    """Where batches start if all sequences are concatenated."""
    ends = [np.cumsum(side, dtype=np.int64) for side in (source_lengths, target_lengths)]
    start, before = 0, [0, 0]
    while start < len(source_lengths):
        yield start
        stop = min(
            int(np.searchsorted(end, num_before + max_tokens, side="right"))
            for end, num_before in zip(ends, before, strict=True)
        )
        start = max(start + 1, stop)
        before = [int(end[start - 1]) for end in ends]


def divide_batch(
    index: IndexArray, source_lengths: LengthArray, target_lengths: LengthArray, num_parts: int
) -> list[IndexArray]:
    """Divide a batch into parts of similar cost, for several processes and accumulation steps.

    The numbers of examples differ by at most one, and the numbers of tokens by at most the longest example.
    If there are fewer examples than parts, the last parts are empty.

    >>> lengths = np.array([7, 2, 5, 4], np.int32)
    >>> [part.tolist() for part in divide_batch(np.arange(4, dtype=np.uint32), lengths, lengths, 2)]
    [[0, 1], [2, 3]]
    """
    if num_parts < 1:
        raise InputError(f"num_parts={num_parts}: expected 1 or more parts of a batch")
    # Deal the examples out, the longest first, back and forth: 0 1 2 2 1 0 0 1 2 …
    longest_first = index[np.argsort(-(source_lengths[index] + target_lengths[index]), kind="stable")]
    turn = np.arange(len(index)) % (2 * num_parts)
    part_of_example = np.minimum(turn, 2 * num_parts - 1 - turn)
    return [longest_first[part_of_example == part] for part in range(num_parts)]


# ------------------------------------------------------------------------------------------ layout of a batch


@dataclass(frozen=True)
class SequenceLayout:
    """How the sequences of a batch become tensors, and how many of them fit.

    Both kinds make the same shapes recur, so that what was compiled or recorded for one batch serves others:

    ``packed``: a batch is a single row of concatenated sequences. Its length is a multiple of 1/32 of
    ``max_tokens``, filled up with sequences that do not count, none longer than ``filler_length``.

    ``fixed_shapes``: padded sequences have one of a few lengths (:func:`round_up_lengths`), and a batch has
    as many rows as its budget allows. Some rows may be fillers that do not count.
    """

    max_tokens: int
    packed: bool = False
    fixed_shapes: bool = False
    filler_length: int = KERNEL_BLOCK

    @property
    def length_multiple(self) -> int:
        """The length of a packed row is a multiple of this."""
        return max(KERNEL_BLOCK, self.max_tokens // 32)

    @property
    def num_fillers(self) -> int:
        """The number of fillers of a packed row: enough that none is longer than ``filler_length``."""
        return self.length_multiple // self.filler_length + 2

    @property
    def budget(self) -> int:
        """The tokens that are left for examples."""
        return max(1, self.max_tokens - self.num_fillers) if self.packed else self.max_tokens

    def round_up(self, lengths: LengthArray) -> LengthArray:
        """The lengths that count for the budget."""
        rounded: LengthArray = round_up_lengths(lengths) if self.fixed_shapes and not self.packed else lengths
        return rounded

    def width(self, lengths: IntArray) -> int:
        """The width of the rows that hold sequences of these lengths."""
        longest = int(lengths.max(initial=0))
        return int(round_up_lengths(np.array(longest))) if self.fixed_shapes else longest

    def num_rows(self, num_examples: int, width: int) -> int:
        """The number of rows of this width, fillers included."""
        if not self.fixed_shapes or self.packed:
            return num_examples
        return max(num_examples, self.max_tokens // width)

    def shape(self, lengths: IntArray) -> tuple[int, int]:
        """The rows and the width of a padded batch of sequences of these lengths."""
        width = self.width(lengths)
        return self.num_rows(len(lengths), width), width

    def arrange(
        self,
        ids: IntArray,
        lengths: IntArray,
        shape: tuple[int, int] | None = None,
        pad_id: int = PAD,
        filler_id: int = PAD,
    ) -> Tokens:
        """Sequences as one packed row, or as padded rows of ``shape`` (by default that of :meth:`shape`)."""
        if self.packed:
            return pack_sequences(ids, lengths, self.length_multiple, self.num_fillers)
        tokens = pad_sequences(ids, lengths, shape or self.shape(lengths), pad_id, filler_id)
        return tokens.with_static_shapes() if self.fixed_shapes else tokens

    def arrange_like(self, tokens: Tokens, values: IntArray, lengths: IntArray, pad_value: int) -> Tensor:
        """One value per token, in the same arrangement as the tokens."""
        rows, width = tokens.ids.shape
        if self.packed:
            return torch.from_numpy(pad_array(values, width, pad_value))[None]
        return pad_sequences(values, lengths, (rows, width), pad_value, pad_value).ids


def pack_sequences(ids: IntArray, lengths: IntArray, multiple: int, num_fillers: int) -> Tokens:
    """Concatenate sequences, and append fillers up to a multiple of a length.

    Empty sequences at the end make the number of sequences one of a few, too.
    """
    total = -(-(len(ids) + num_fillers) // multiple) * multiple
    cuts = np.linspace(len(ids), total, num_fillers + 1).astype(np.int64)
    num_sequences = len(lengths) + num_fillers
    empty = np.zeros(round_up_size(num_sequences, KERNEL_BLOCK) - num_sequences, np.int64)
    all_lengths = np.concatenate([lengths, np.diff(cuts), empty])
    max_length = round_up_size(int(lengths.max(initial=0)), KERNEL_BLOCK)
    return Tokens.from_packed_ids(torch.from_numpy(pad_array(ids, total, PAD)), all_lengths.tolist(), max_length)


def pad_sequences(ids: IntArray, lengths: IntArray, shape: tuple[int, int], pad_value: int, filler_id: int) -> Tokens:
    """Put each sequence into a row, padded on the right. Each remaining row holds one ``filler_id``."""
    num_rows, width = shape
    num_fillers = num_rows - len(lengths)
    lengths = np.concatenate([lengths, np.ones(num_fillers, np.int64)])
    padded = np.full(shape, pad_value)
    padded[np.arange(width) < lengths[:, None]] = np.concatenate([ids, np.full(num_fillers, filler_id)])
    return Tokens(torch.from_numpy(padded), tuple(lengths.tolist()))


def round_up_lengths(lengths: Any) -> Any:
    """Round lengths up to one of 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, …

    >>> round_up_lengths(np.array([1, 4, 13, 33, 65]))
    array([ 4,  4, 16, 40, 80])
    """
    lengths = np.asarray(lengths)
    octave = np.exp2(np.ceil(np.log2(np.maximum(lengths, 1))))
    step = np.maximum(4, octave / 8).astype(lengths.dtype)
    return -(-lengths // step) * step


def pad_array(values: NDArray[Any], length: int, pad_value: float) -> NDArray[Any]:
    """Append ``pad_value`` until there are ``length`` values."""
    return np.concatenate([values, np.full(length - len(values), pad_value, values.dtype)])


def pad_labels(labels: NDArray[Any], length: int) -> Tensor:
    """Append labels that do not count: NaN to numbers, IGNORE to classes."""
    return torch.from_numpy(pad_array(labels, length, np.nan if labels.dtype.kind == "f" else IGNORE))


def convert_labels(labels: Sequence[int] | Sequence[float]) -> NDArray[Any]:
    """Class indices as int64, or numbers as float32."""
    values = np.asarray(labels)
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int64)


def expand_ranges(starts: IndexArray, lengths: IndexArray) -> IndexArray:
    """The numbers of several ranges, one range after the other.

    >>> expand_ranges(np.array([7, 2]), np.array([3, 2]))
    array([7, 8, 9, 2, 3])
    """
    before: IndexArray = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)


class ConcatenatedSequences:
    """Sequences of numbers, concatenated in memory."""

    def __init__(
        self, sequences: Sequence[Sequence[int]], dtype: DTypeLike, length_dtype: DTypeLike = np.int32
    ) -> None:
        self.lengths: NDArray[Any] = np.fromiter(map(len, sequences), length_dtype)
        self.ids: NDArray[Any] = np.fromiter(chain.from_iterable(sequences), dtype)
        self.offsets: IntArray = np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def positions(self, indices: IndexArray) -> IndexArray:
        """Where the numbers of some sequences are in ``ids``."""
        return expand_ranges(self.offsets[indices], self.lengths[indices])

    def take(self, indices: IndexArray) -> FlatSequences:
        """The ids and the lengths of some sequences."""
        return self.ids[self.positions(indices)].astype(np.int64), self.lengths[indices].astype(np.int64)


# ------------------------------------------------------------------------------------------------ the batcher


class EpochLengths(NamedTuple):
    """The lengths of all examples of an epoch, as they count for the budget. All are ``(N,)``."""

    source: LengthArray
    target: LengthArray
    indices: IndexArray | None = None  # the indices that ``collate`` gets; None: 0 … N - 1


class LengthBatcher(ABC, Generic[B]):
    """Batches of examples of similar length, as the training loop takes them.

    >>> for index in batcher.batches(epoch=0):                  # doctest: +SKIP
    ...     batch = batcher.collate(index)
    """

    unit: str = "tokens"  # what the ``count`` of a batch counts

    def __init__(self, layout: SequenceLayout, *lengths: LengthArray, seed: int) -> None:
        """``lengths``: those of the source and the target of each example; one array if both are the same."""
        self.layout, self.side_lengths, self.seed = layout, lengths, seed
        self._latest_plan: tuple[int, BatchPlan] | None = None  # with its epoch

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.side_lengths[0])

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identifies the examples: a run resumes only with the same ones."""

    def epoch_lengths(self, epoch: int) -> EpochLengths:
        """The lengths by which the examples of an epoch are divided into batches."""
        rounded = [self.layout.round_up(lengths) for lengths in self.side_lengths]
        return EpochLengths(rounded[0], rounded[-1])

    def example_lengths(self, index: IndexArray) -> tuple[LengthArray, LengthArray]:
        """The lengths of some examples, source and target, by which :meth:`divide` balances the cost."""
        return self.side_lengths[0][index], self.side_lengths[-1][index]

    @abstractmethod
    def collate(self, index: Sequence[int] | IndexArray) -> B:
        """Build the batch of these examples."""

    def batches(self, epoch: int) -> BatchPlan:
        """The batches of an epoch, in order. The plan of the latest epoch is cached."""
        if self._latest_plan is None or self._latest_plan[0] != epoch:
            self._latest_plan = (epoch, self._plan_epoch(epoch))
        return self._latest_plan[1]

    def _plan_epoch(self, epoch: int) -> BatchPlan:
        source, target, indices = self.epoch_lengths(epoch)
        plan = plan_batches(
            source,
            target,
            max_tokens=self.layout.budget,
            seed=self.seed,
            epoch=epoch,
            packed=self.layout.packed,
        )
        return plan if indices is None else replace(plan, order=indices[plan.order])

    def divide(self, index: IndexArray, num_parts: int) -> list[IndexArray]:
        """Divide a batch into parts of similar cost; see :func:`divide_batch`."""
        source, target = self.example_lengths(index)
        return [index[part] for part in divide_batch(np.arange(len(index)), source, target, num_parts)]


def fingerprint_arrays(*arrays: NDArray[Any]) -> str:
    """A hash of the contents, dtypes and shapes of arrays, in this order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
