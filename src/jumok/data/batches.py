"""Which examples are learned from together, and in what order.

The order is a pure function of seed and epoch: a run that was stopped finds its place by counting batches.
The examples are shuffled, cut into windows, and within a window

- *padded*: sorted by length, so that a batch has examples of like length and little padding; the batches
  are shuffled again afterwards;
- *packed*: left in the order of chance. Sequences lie end to end and need no like lengths.

A batch takes as many examples as its budget allows: neither side has more than ``tokens`` places, padding,
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

from jumok.batch import BOS, EOS, IGNORE, PAD, Pairs, Tokens, rounded
from jumok.data.store import Column, Store
from jumok.errors import InputError

__all__ = [
    "LEAST",
    "Batches",
    "Lengths",
    "Numbers",
    "PairData",
    "batches",
    "divide",
    "filled",
    "fingerprint",
    "in_a_row",
    "in_rows",
    "stepped",
    "taken",
]

Numbers = NDArray[np.integer[Any]]
Lengths = NDArray[np.int32]
Flat = tuple[
    NDArray[np.int64], NDArray[np.int64]
]  # the ids of many sequences end to end, and the length of each
LEAST = 64  # tokens: a block of queries or keys, for the kernels of attention
WINDOW = 1 << 17  # examples that are sorted together: enough for like lengths, few enough for chance


@dataclass(frozen=True, eq=False)
class Batches(Sequence[Numbers]):
    """The batches of one epoch, each an array of example numbers, cut from the order only when asked for."""

    order: Numbers  # all examples
    bounds: NDArray[np.int64]  # where batches begin in it, and the end
    turn: Numbers  # the batches in the order in which they come

    def __len__(self) -> int:
        return len(self.turn)

    @overload
    def __getitem__(self, number: int) -> Numbers: ...
    @overload
    def __getitem__(self, number: slice) -> list[Numbers]: ...
    def __getitem__(self, number: int | slice) -> Numbers | list[Numbers]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        batch = int(self.turn[number])
        return self.order[self.bounds[batch] : self.bounds[batch + 1]]


def fingerprint(*arrays: NDArray[Any]) -> str:
    """Of all that is learned from and of its order: another one where anything differs."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def batches(
    source: Lengths, target: Lengths, *, tokens: int, seed: int, epoch: int, packed: bool = False
) -> Batches:
    """All examples, each in one batch, by the lengths of their two sides.

    >>> lengths = np.array([3, 9, 4, 8, 3], np.int32)
    >>> sorted(sorted(batch.tolist()) for batch in batches(lengths, lengths, tokens=20, seed=1, epoch=0))
    [[0, 2, 4], [1, 3]]
    """
    if tokens < 1:
        raise InputError(f"tokens={tokens}: a batch needs a budget of at least one token")
    if source.shape != target.shape or source.ndim != 1:
        raise InputError(
            f"lengths of {source.shape} sources and {target.shape} targets: they must be as many"
        )
    chance = np.random.default_rng([seed, epoch])
    order: Numbers = np.arange(len(source), dtype=np.uint32 if len(source) < 1 << 32 else np.uint64)
    chance.shuffle(order)
    begins: list[int] = []
    for begin in range(0, len(order), WINDOW):
        window = order[begin : begin + WINDOW]
        if packed:
            cuts = list(_packed(source[window], target[window], tokens))
        else:
            by_length, cuts = _sorted(source[window], target[window], tokens)
            window[:] = window[by_length]
        begins += (begin + cut for cut in cuts)
    turn: Numbers = np.arange(len(begins), dtype=np.uint32)
    if not packed:
        chance.shuffle(turn)
    return Batches(order, np.array([*begins, len(order)], np.int64), turn)


def _sorted(source: Lengths, target: Lengths, tokens: int) -> tuple[NDArray[np.intp], list[int]]:
    """An order by length, and where batches begin in it: of two orders the one with less padding.

    One is by target length, and within one such length by source length, up in the one, down in the next: so
    the source does not jump where the target grows by one. The other, better if a batch spans many lengths,
    is by the longer side.
    """
    longer, shorter = np.maximum(source, target), np.minimum(source, target)
    up_and_down = np.where(target % 2, source, -source)
    tried = []
    for order in (np.lexsort((up_and_down, target)), np.lexsort((shorter, longer))):
        cuts = list(_padded(longer[order], tokens))
        rows = np.diff([*cuts, len(order)])
        places = sum(int((np.maximum.reduceat(side[order], cuts) * rows).sum()) for side in (source, target))
        tried.append((places, order, cuts))
    _, order, cuts = min(tried, key=lambda one: one[0])
    return order, cuts


def _padded(longer: Lengths, tokens: int) -> Iterator[int]:
    """Where batches begin, if every row takes as many places as the longest."""
    begin = 0
    while begin < len(longer):
        yield begin
        ahead = longer[begin : begin + tokens].astype(np.int64)
        places = np.maximum.accumulate(ahead) * np.arange(1, len(ahead) + 1)
        begin += max(1, int(np.searchsorted(places, tokens, side="right")))


def _packed(source: Lengths, target: Lengths, tokens: int) -> Iterator[int]:
    """Where batches begin, if all rows lie end to end."""
    ends = [np.cumsum(side, dtype=np.int64) for side in (source, target)]
    begin, before = 0, [0, 0]
    while begin < len(source):
        yield begin
        fits = min(
            int(np.searchsorted(end, taken + tokens, side="right"))
            for end, taken in zip(ends, before, strict=True)
        )
        begin = max(begin + 1, fits)
        before = [int(end[begin - 1]) for end in ends]


def divide(index: Numbers, source: Lengths, target: Lengths, parts: int) -> list[Numbers]:
    """A batch in so many parts of like work, for as many processes and steps of accumulation.

    The numbers of examples differ by one at most, and the tokens by no more than the longest example has. If
    there are fewer examples than parts, the last parts are empty.

    >>> lengths = np.array([7, 2, 5, 4], np.int32)
    >>> [part.tolist() for part in divide(np.arange(4, dtype=np.uint32), lengths, lengths, 2)]
    [[0, 1], [2, 3]]
    """
    if parts < 1:
        raise InputError(f"a batch cannot be divided into {parts} parts")
    # Dealt out by length, the longest first, back and forth: 0 1 2 2 1 0 0 1 2 …
    longest_first = index[np.argsort(-(source[index] + target[index]), kind="stable")]
    turn = np.arange(len(index)) % (2 * parts)
    dealt = np.minimum(turn, 2 * parts - 1 - turn)
    return [longest_first[dealt == part] for part in range(parts)]


class PairData:
    """A store as batches to learn from: what the training loop asks for.

    >>> data = PairData(store, tokens=4096, seed=1)             # doctest: +SKIP
    >>> for index in data.batches(epoch=0):                     # doctest: +SKIP
    ...     pairs = data.collate(index)

    The same sizes come again and again, so that what was compiled or recorded for one batch serves others:

    ``packed``: a batch is one row of sequences end to end, and its length a multiple of 1/32 of ``tokens``.
    What is missing is filled by sequences that do not count, equally many on both sides.

    ``alike``: padded sentences have one of a few lengths (:func:`stepped`), and a batch as many rows as its
    budget allows; some of them may be empty sentences that do not count.
    """

    def __init__(
        self, store: Store, *, tokens: int, seed: int, packed: bool = False, alike: bool = False
    ) -> None:
        if tokens < 2:
            raise InputError(f"tokens={tokens}: a batch needs a budget of at least two tokens")
        self.store, self.tokens, self.seed, self.packed, self.alike = store, tokens, seed, packed, alike
        # As they will be in a batch, with an end or a begin of sentence.
        self.source_lengths: Lengths = store.source.lengths + np.int32(1)
        self.target_lengths: Lengths = store.target.lengths + np.int32(1)
        self.multiple = max(LEAST, tokens // 32)
        self.fillers = self.multiple // LEAST + 2  # so that none is longer than LEAST
        self._latest: tuple[int, Batches] | None = None  # asked for again, the same need not be made again

    def __len__(self) -> int:
        return len(self.store)

    def batches(self, epoch: int) -> Batches:
        """The batches of an epoch, in order."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            budget = max(1, self.tokens - self.fillers) if self.packed else self.tokens
            source, target = self.source_lengths, self.target_lengths
            if self.alike and not self.packed:
                source, target = stepped(source), stepped(target)
            made = batches(source, target, tokens=budget, seed=self.seed, epoch=epoch, packed=self.packed)
            latest = self._latest = (epoch, made)
        return latest[1]

    def divide(self, index: Numbers, parts: int) -> list[Numbers]:
        """A batch in parts of like work; see :func:`divide`."""
        return divide(index, self.source_lengths, self.target_lengths, parts)

    def collate(self, index: Sequence[int] | Numbers) -> Pairs:
        """The examples of these numbers as a model takes them: what ``Pairs.of`` makes, only faster."""
        numbers = np.asarray(index, np.int64)
        source, target = (taken(side, numbers) for side in (self.store.source, self.store.target))
        sides = _ended(*source), _begun(*target), _ended(*target)
        make = self._packed if self.packed else self._padded
        given, told, labels = make(*sides)
        count = int(sides[2][1].sum())
        return Pairs(given, told, labels, count, index=tuple(numbers.tolist()))

    def _packed(self, source: Flat, target: Flat, labels: Flat) -> tuple[Tokens, Tokens, Tensor]:
        """Source and target in a row each, and the labels of the second."""
        given, told = (in_a_row(*side, self.multiple, self.fillers) for side in (source, target))
        return given, told, torch.from_numpy(filled(labels[0], told.ids.shape[1], IGNORE))[None]

    def _padded(self, source: Flat, target: Flat, labels: Flat) -> tuple[Tokens, Tokens, Tensor]:
        """The same in as many rows as there are sentences, or more."""
        widths = [int(lengths.max(initial=0)) for _, lengths in (source, target)]
        rows = len(source[1])
        if self.alike:
            widths = [int(stepped(np.array(width))) for width in widths]
            rows = max(rows, self.tokens // max(widths))

        def square(sequences: Flat, width: int, fill: int, filler: int) -> Tokens:
            tokens = in_rows(*sequences, (rows, width), fill, filler)
            return tokens.alike() if self.alike else tokens

        given, told = square(source, widths[0], PAD, EOS), square(target, widths[1], PAD, BOS)
        return given, told, square(labels, widths[1], IGNORE, IGNORE).ids


def in_a_row(ids: NDArray[np.int64], lengths: NDArray[np.int64], multiple: int, fillers: int) -> Tokens:
    """Sequences end to end, and behind them so many that do not count, up to a multiple of a length.

    Empty ones make the number of sequences one of a few, too.
    """
    whole = -(-(len(ids) + fillers) // multiple) * multiple
    cuts = np.linspace(len(ids), whole, fillers + 1).astype(np.int64)
    sequences = len(lengths) + fillers
    empty = np.zeros(rounded(sequences, LEAST) - sequences, np.int64)
    every = np.concatenate([lengths, np.diff(cuts), empty])
    longest = rounded(int(lengths.max(initial=0)), LEAST)
    return Tokens.row(torch.from_numpy(filled(ids, whole, PAD)), every.tolist(), longest)


def in_rows(
    ids: NDArray[np.int64], lengths: NDArray[np.int64], shape: tuple[int, int], fill: int, filler: int
) -> Tokens:
    """Sequences in rows, filled up at the right; rows that are left over hold one ``filler`` each."""
    rows, width = shape
    more = rows - len(lengths)
    lengths = np.concatenate([lengths, np.ones(more, np.int64)])
    square = np.full(shape, fill)
    square[np.arange(width) < lengths[:, None]] = np.concatenate([ids, np.full(more, filler)])
    return Tokens(torch.from_numpy(square), tuple(lengths.tolist()))


def stepped(lengths: Any) -> Any:
    """Lengths, or one, rounded up to one of 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, …

    >>> stepped(np.array([1, 4, 13, 33, 65]))
    array([ 4,  4, 16, 40, 80])
    """
    lengths = np.asarray(lengths)
    octave = np.exp2(np.ceil(np.log2(np.maximum(lengths, 1))))
    step = np.maximum(4, octave / 8).astype(lengths.dtype)
    return -(-lengths // step) * step


def filled(ids: NDArray[np.int64], to: int, fill: int) -> NDArray[np.int64]:
    """The same numbers, and so many more that there are ``to`` of them."""
    return np.concatenate([ids, np.full(to - len(ids), fill)])


def taken(column: Column, numbers: NDArray[np.int64]) -> Flat:
    """The token ids of some examples."""
    begins = column.offsets[numbers].astype(np.int64)
    lengths = column.offsets[numbers + 1].astype(np.int64) - begins
    before = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) + np.repeat(begins - before, lengths)
    return column.ids[places].astype(np.int64), lengths


def _ended(ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> Flat:
    """The same sequences, each with EOS behind it."""
    return np.insert(ids, np.cumsum(lengths), EOS), lengths + 1


def _begun(ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> Flat:
    """The same sequences, each with BOS before it."""
    return np.insert(ids, np.cumsum(lengths) - lengths, BOS), lengths + 1
