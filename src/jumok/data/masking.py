"""What BERT is pretrained on: pairs of segments, some of their words hidden; all drawn anew every epoch.

A pair is made of a document's next sentences, as many as fill a sequence (now and then a shorter one)::

    document    s0 s1 s2 s3 s4 s5 s6 …
                └─── enough ──┘

    half of them    [CLS] s0 s1 [SEP] s2 s3 s4 [SEP]    cut anywhere between sentences: the second is next
    the others      [CLS] s0 s1 [SEP] r5 r6 r7 [SEP]    the second is from another document; s2 is taken up
                                                        again by the pair to follow
    segments          0   0  0    0   1  1  1    1

What is too long is shortened, the longer segment first, at its begin and end. Then 15 % of the tokens are to
be said by the model: 80 % of these are hidden by [MASK], 10 % by a word at random, 10 % stay as they are.

All chance is a function of (seed, epoch, the sentence at which a pair begins, what is drawn): so any pair can
be made at any time, in any process, and comes out the same. The number of a pair says its epoch and sentence.

Shapes: ``N`` pairs, ``T`` tokens of all of them end to end, ``M`` masked places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.annotated import Masked
from jumok.batch import IGNORE, Tokens
from jumok.data import batches
from jumok.data.batches import LEAST, Batches, Numbers, filled, in_a_row, in_rows, stepped
from jumok.data.tokenised import Tokenised
from jumok.data.wordpiece import WordPieces
from jumok.errors import InputError

__all__ = ["Chance", "MaskedData", "MaskingConfig", "Pairs", "hidden_words", "pairs"]

Ints = NDArray[np.int64]
Bits = NDArray[np.uint64]
EPOCH = 1 << 40  # the number of a pair is epoch · EPOCH + its first sentence
WINDOW = 1 << 18  # sentences that are looked at together when an epoch is laid out
SPECIAL = 3  # [CLS], [SEP] and [SEP]
MASKED = 0.16  # of a batch's tokens there is room for as many labels: 15 %, and what rounding adds
# What is drawn for a pair, and for each of its tokens.
SHORT, SHORTER, OTHER, CUT, DOCUMENT, SENTENCE, FRONT_A, FRONT_B, ORDER, HIDE, WORD = range(11)


@dataclass(frozen=True)
class MaskingConfig:
    """How pairs are made and words are hidden."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    length: int = 128  # tokens of a sequence, special ones included
    short: float = 0.1  # the share of sequences that are to be shorter, so that a model knows such, too
    masked: float = 0.15  # the share of tokens that are to be said
    whole_words: bool = False  # all pieces of a word are hidden, or none

    def __post_init__(self) -> None:
        if self.length < SPECIAL + 2:
            raise ValueError(f"length={self.length}: {SPECIAL + 2} or more is expected, for two words")
        for name in ("short", "masked"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to 1 is expected")


# --------------------------------------------------------------------------------------------------- chance


@dataclass(frozen=True)
class Chance:
    """Random numbers that are a function of what they are drawn for, in any order.

    >>> chance = Chance(seed=1, epoch=0)
    >>> bool((chance(np.arange(9), WORD)[5:] == chance(np.arange(5, 9), WORD)).all())
    True
    """

    seed: int
    epoch: int

    def bits(self, numbers: NDArray[Any], what: int) -> Bits:
        """64 random bits for each number."""
        key = np.random.SeedSequence((self.seed, self.epoch, what)).generate_state(1, np.uint64)
        return _mixed(numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)

    def __call__(self, numbers: NDArray[Any], what: int) -> NDArray[np.float64]:
        """A random number from 0 to below 1 for each number."""
        return _share(self.bits(numbers, what))


def _mixed(x: Bits) -> Bits:
    """Every bit of the outcome depends on every bit of x (the last steps of SplitMix64)."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _share(bits: Bits) -> NDArray[np.float64]:
    return (bits >> np.uint64(11)) * np.float64(2.0**-53)


def _up_to(shares: NDArray[np.float64], ends: NDArray[np.int64] | int) -> Ints:
    """Whole numbers from 0 to below the ends."""
    return (shares * ends).astype(np.int64)


# ---------------------------------------------------------------------------------------------------- pairs


class Pairs(NamedTuple):
    """Pairs of segments, each a stretch of the token ids of all documents. All are ``(N,)``."""

    first: Ints  # where the first segment begins
    first_length: Ints
    second: Ints
    second_length: Ints
    other: NDArray[np.bool_]  # the second is from another document

    @property
    def lengths(self) -> Ints:
        return self.first_length + self.second_length + SPECIAL


class _Own(NamedTuple):
    """Of pairs that begin at some sentences, what concerns their own document."""

    number: Ints  # of the document
    room: Ints  # the tokens that the pair is to have
    cut: Ints  # the sentence behind the first segment
    end: Ints  # the sentence behind the second, if that is the next one
    other: NDArray[np.bool_]
    following: Ints  # the sentence at which the next pair begins


def _own(store: Tokenised, starts: Ints, chance: Chance, config: MaskingConfig) -> _Own:
    offsets, documents = _offsets(store), store.documents
    most = config.length - SPECIAL
    shorter = 2 + _up_to(chance(starts, SHORTER), most - 1)
    room = np.where(chance(starts, SHORT) < config.short, shorter, most)
    number = np.searchsorted(documents, starts, side="right") - 1
    last = documents[number + 1]
    end = np.searchsorted(offsets, offsets[starts] + room)
    end = np.minimum(np.maximum(end, starts + 2), last)
    end = np.where(last - end == 1, last, end)  # no sentence is left alone, for nothing would be next to it
    cut = starts + 1 + _up_to(chance(starts, CUT), end - starts - 1)
    other = chance(starts, OTHER) < 0.5
    cut = np.where(other & (last - cut == 1), last, cut)
    return _Own(number, room, cut, end, other, np.where(other, cut, end))


def pairs(store: Tokenised, starts: Ints, chance: Chance, config: MaskingConfig) -> Pairs:
    """The pairs that begin at these sentences."""
    offsets, documents = _offsets(store), store.documents
    own = _own(store, starts, chance, config)
    first, middle = offsets[starts], offsets[own.cut]
    # Any other document, any of its sentences, and what follows it there until there is enough.
    number = _up_to(chance(starts, DOCUMENT), len(store) - 1)
    number += number >= own.number
    many = documents[number + 1] - documents[number]
    begin = documents[number] + _up_to(chance(starts, SENTENCE), many)
    end = np.searchsorted(offsets, offsets[begin] + own.room - (middle - first))
    end = np.minimum(np.maximum(end, begin + 1), documents[number + 1])
    second = np.where(own.other, offsets[begin], middle)
    lengths = middle - first, np.where(own.other, offsets[end], offsets[own.end]) - second
    most = config.length - SPECIAL
    kept = (  # the longer one is shortened until both fit; of equal ones, the second
        np.minimum(lengths[0], np.maximum(most - lengths[1], most - most // 2)),
        np.minimum(lengths[1], np.maximum(most - lengths[0], most // 2)),
    )
    fronts = (
        _up_to(chance(starts, what), was - now + 1)
        for what, was, now in zip((FRONT_A, FRONT_B), lengths, kept, strict=True)
    )
    return Pairs(first + next(fronts), kept[0], second + next(fronts), kept[1], own.other)


def _starts(store: Tokenised, chance: Chance, config: MaskingConfig) -> Ints:
    """Where the pairs of an epoch begin: each says where the next one does."""
    found: list[int] = []
    start, count = 0, int(store.documents[-1])
    for begin in range(0, count, WINDOW):
        window = np.arange(begin, min(begin + WINDOW, count))
        following = _own(store, window, chance, config).following.tolist()
        while start < begin + len(following):
            found.append(start)
            start = following[start - begin]
    return np.array(found, np.int64)


def _offsets(store: Tokenised) -> Ints:
    return store.sentences.offsets.view(np.int64)


# ------------------------------------------------------------------------------------------- hidden words


def hidden_words(
    bits: Bits, lengths: Ints, wanted: Ints, can: NDArray[np.bool_], begins: NDArray[np.bool_] | None = None
) -> Ints:
    """Which tokens are to be said: places among ``T``, in order.

    Args:
        bits: ``(T,)``, chance: the words with the lowest are taken.
        lengths: ``(N,)``, of the sequences that lie end to end.
        wanted: ``(N,)``, how many tokens to take of each.
        can: ``(T,)``, which may be taken.
        begins: ``(T,)``, which tokens begin a word; None: each is one. A word is taken as a whole, or, if it
            has more tokens than are still wanted, not at all.
    """
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    words = np.flatnonzero(can if begins is None else can & begins)
    # Sorted by sequence, and within it by chance.
    order = words[np.argsort(_in_sequence(sequence[words], bits[words]))]
    of = sequence[order]
    if begins is None:
        rank = np.arange(len(order)) - np.searchsorted(of, of)
        return np.sort(order[rank < wanted[of]])
    ends = np.append(np.flatnonzero(begins | ~can), len(can))
    sizes = ends[np.searchsorted(ends, order, side="right")] - order
    left, taken = wanted.copy(), np.zeros(len(order), bool)
    while (open_ := np.flatnonzero(~taken & (sizes <= left[of]))).size:
        # In their order, as long as all fit; behind the first that does not, smaller ones get another turn.
        total = np.cumsum(sizes[open_])
        before = np.searchsorted(of[open_], of[open_])
        fits = open_[total - np.where(before > 0, total[before - 1], 0) <= left[of[open_]]]
        taken[fits] = True
        np.subtract.at(left, of[fits], sizes[fits])
    chosen, many = order[taken], sizes[taken]
    inside = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
    return np.sort(np.repeat(chosen, many) + inside)


def _in_sequence(sequence: Ints, bits: Bits) -> Bits:
    """Numbers to sort by: the sequence above, and below it as many random bits as there is room for."""
    room = max(1, 63 - int(sequence.max(initial=1)).bit_length())
    return (sequence.astype(np.uint64) << np.uint64(room)) | (bits >> np.uint64(64 - room))


# --------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True, eq=False)
class _Epoch(Sequence[Numbers]):
    """The batches of an epoch, in the numbers of pairs."""

    batches: Batches
    numbers: Ints

    def __len__(self) -> int:
        return len(self.batches)

    @overload
    def __getitem__(self, number: int) -> Numbers: ...
    @overload
    def __getitem__(self, number: slice) -> list[Numbers]: ...
    def __getitem__(self, number: int | slice) -> Numbers | list[Numbers]:
        if isinstance(number, slice):
            return [self.numbers[one] for one in self.batches[number]]
        return self.numbers[self.batches[number]]


class _Laid(NamedTuple):
    """Sequences end to end: for each the length; for each token its id, its segment, its place in its own."""

    lengths: Ints
    ids: Ints
    segments: Ints


class MaskedData:
    """Tokenised documents as batches to learn from: what the training loop asks for.

    ``packed`` and ``alike`` as for :class:`jumok.data.batches.PairData`: the same sizes come again and again.
    Tokens, sequences and masked places are filled up to round numbers, with what does not count.
    """

    unit = Masked.unit

    def __init__(
        self,
        store: Tokenised,
        pieces: WordPieces,
        config: MaskingConfig,
        *,
        tokens: int,
        seed: int,
        packed: bool = False,
        alike: bool = False,
    ) -> None:
        if len(store) < 2:
            raise InputError(
                "there is one document only, and so no other one for a second segment that does not follow; "
                "an empty line separates documents"
            )
        if tokens < 2 * config.length:
            raise InputError(f"train.tokens={tokens}: a batch has two sequences of {config.length} or more")
        self.store, self.config, self.seed, self.tokens = store, config, seed, tokens
        self.packed, self.alike = packed, alike
        self.pad, self.cls, self.sep, self.mask = pieces.pad, pieces.cls, pieces.sep, pieces.mask
        self.inside = pieces.inside
        self.words = np.setdiff1d(np.arange(pieces.size), pieces.special)
        self.multiple = max(LEAST, tokens // 32)
        self.fillers = self.multiple // config.length + 2  # sequences; so none is too long
        self._latest: tuple[int, _Epoch] | None = None

    def batches(self, epoch: int) -> _Epoch:
        """The batches of an epoch, in order; each an array of the numbers of pairs."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            chance = Chance(self.seed, epoch)
            starts = _starts(self.store, chance, self.config)
            lengths = self._lengths(starts, chance)
            if self.alike and not self.packed:
                lengths = stepped(lengths)
            budget = self.tokens - self.fillers if self.packed else self.tokens
            made = batches.batches(
                lengths, lengths, tokens=budget, seed=self.seed, epoch=epoch, packed=self.packed
            )
            latest = self._latest = (epoch, _Epoch(made, starts + epoch * EPOCH))
        return latest[1]

    def divide(self, index: Numbers, parts: int) -> list[Numbers]:
        """A batch in parts of like work."""
        starts, chance = self._told(index)
        lengths = self._lengths(starts, chance)
        return [index[part] for part in batches.divide(np.arange(len(index)), lengths, lengths, parts)]

    def collate(self, index: Sequence[int] | Numbers) -> Masked:
        """The pairs of these numbers, with some words hidden."""
        starts, chance = self._told(index)
        chosen = pairs(self.store, starts, chance, self.config)
        laid = self._laid(chosen)
        places, labels, ids = self._hidden(laid, starts, chance)
        tokens, segments = self._layout(laid._replace(ids=ids))
        if not self.packed:  # a row is wider than its text
            begins = np.cumsum(laid.lengths) - laid.lengths
            row = np.searchsorted(begins, places, side="right") - 1
            places = row * tokens.ids.shape[1] + places - begins[row]
        following, count = chosen.other.astype(np.int64), len(labels)
        if self.packed or self.alike:
            room = int(np.ceil(max(MASKED * tokens.ids.numel(), count) / LEAST)) * LEAST
            places, labels = filled(places, room, 0), filled(labels, room, IGNORE)
            following = filled(following, len(tokens.lengths), IGNORE)
        return Masked(
            tokens=tokens,
            segments=segments,
            places=torch.from_numpy(places),
            labels=torch.from_numpy(labels),
            next=torch.from_numpy(following),
            count=count,
            index=tuple(np.asarray(index).tolist()),
        )

    def _told(self, index: Sequence[int] | Numbers) -> tuple[Ints, Chance]:
        """The first sentences of pairs, and the chance of their epoch; all are of the same one."""
        numbers = np.asarray(index, np.int64)
        epoch = int(numbers[0]) // EPOCH if len(numbers) else 0
        return numbers - epoch * EPOCH, Chance(self.seed, epoch)

    def _lengths(self, starts: Ints, chance: Chance) -> NDArray[np.int32]:
        return pairs(self.store, starts, chance, self.config).lengths.astype(np.int32)

    def _laid(self, chosen: Pairs) -> _Laid:
        """[CLS] first [SEP] second [SEP], one pair behind the other."""
        lengths = chosen.lengths
        ends = np.cumsum(lengths)
        begins = ends - lengths
        place = np.arange(ends[-1]) - np.repeat(begins, lengths)
        middle = np.repeat(chosen.first_length + 1, lengths)  # the first [SEP]
        segments = place > middle
        # Special tokens read some neighbour here, and are put in afterwards.
        base = np.where(
            segments, np.repeat(chosen.second, lengths) - middle - 1, np.repeat(chosen.first, lengths) - 1
        )
        stored = self.store.sentences.ids
        ids = stored[np.clip(base + place, 0, len(stored) - 1)].astype(np.int64)
        ids[begins] = self.cls
        ids[begins + chosen.first_length + 1] = self.sep
        ids[ends - 1] = self.sep
        return _Laid(lengths, ids, segments.astype(np.int64))

    def _hidden(self, laid: _Laid, starts: Ints, chance: Chance) -> tuple[Ints, Ints, Ints]:
        """The places of hidden words, the words, and the ids with them hidden."""
        lengths, ids = laid.lengths, laid.ids
        begins = np.cumsum(lengths) - lengths
        # A number for each token that is its own: of the pair above, of the place below.
        place = np.arange(len(ids)) - np.repeat(begins, lengths)
        token = np.repeat(starts * self.config.length, lengths) + place
        wanted = np.maximum(1, np.rint(lengths * self.config.masked)).astype(np.int64)
        can = np.ones(len(ids), bool)
        can[begins] = False
        can[(ids == self.sep)] = False
        word_begins = ~self.inside[ids] if self.config.whole_words else None
        if word_begins is not None:
            # A segment that was shortened at its front may begin inside a word.
            word_begins[begins + 1] = True
            word_begins[np.flatnonzero(ids[:-1] == self.sep) + 1] = True
        at = hidden_words(chance.bits(token, ORDER), lengths, wanted, can, word_begins)
        labels = ids[at]
        drawn = chance(token[at], HIDE)
        any_word = self.words[_up_to(chance(token[at], WORD), len(self.words))]
        shown = ids.copy()
        shown[at] = np.where(drawn < 0.8, self.mask, np.where(drawn < 0.9, any_word, labels))
        return at, labels, shown

    def _layout(self, laid: _Laid) -> tuple[Tokens, Tensor]:
        """The tokens and their segments, packed or padded, and filled up if batches are to be alike."""
        lengths = laid.lengths
        if self.packed:
            tokens = in_a_row(laid.ids, lengths, self.multiple, self.fillers)
            return tokens, torch.from_numpy(filled(laid.segments, tokens.ids.shape[1], 0))[None]
        rows, width = len(lengths), int(lengths.max())
        if self.alike:
            width = int(stepped(np.array(width)))
            rows = max(rows, self.tokens // width)
        tokens = in_rows(laid.ids, lengths, (rows, width), self.pad, self.pad)
        segments = in_rows(laid.segments, lengths, (rows, width), 0, 0).ids
        return tokens.alike() if self.alike else tokens, segments
