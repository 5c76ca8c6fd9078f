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

from jumok.batches.text import PretrainingBatch
from jumok.batches.tokens import IGNORE, Tokens
from jumok.data.batching import length_batching
from jumok.data.batching.length_batching import (
    KERNEL_BLOCK,
    BatchPlan,
    IndexArray,
    pack_sequences,
    pad_array,
    pad_sequences,
    round_up_lengths,
)
from jumok.data.caches.document_store import DocumentStore
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError

__all__ = [
    "CounterRng",
    "MaskingConfig",
    "PretrainingBatcher",
    "SegmentPairs",
    "choose_masked_tokens",
    "make_segment_pairs",
]

IntArray = NDArray[np.int64]
BitArray = NDArray[np.uint64]
EPOCH_STRIDE = 1 << 40  # the number of a pair is epoch · EPOCH + its first sentence
LAYOUT_WINDOW = 1 << 18  # sentences that are looked at together when an epoch is laid out
NUM_SPECIAL_TOKENS = 3  # [CLS], [SEP] and [SEP]
MAX_MASKED_SHARE = 0.16  # of a batch's tokens there is room for as many labels: 15 %, and what rounding adds
# What is drawn for a pair, and for each of its tokens.
(
    STREAM_SHORT,
    STREAM_SHORT_LENGTH,
    STREAM_RANDOM_SECOND,
    STREAM_CUT,
    STREAM_DOCUMENT,
    STREAM_SENTENCE,
    STREAM_TRIM_FIRST,
    STREAM_TRIM_SECOND,
    STREAM_MASK_ORDER,
    STREAM_MASK_KIND,
    STREAM_RANDOM_WORD,
) = range(11)


@dataclass(frozen=True)
class MaskingConfig:
    """How pairs are made and words are hidden."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    sequence_length: int = 128  # tokens of a sequence, special ones included
    short_sequence_probability: float = (
        0.1  # the share of sequences that are to be shorter, so that a model knows such, too
    )
    mask_probability: float = 0.15  # the share of tokens that are to be said
    whole_word_masking: bool = False  # all pieces of a word are hidden, or none

    def __post_init__(self) -> None:
        if self.sequence_length < NUM_SPECIAL_TOKENS + 2:
            raise ValueError(
                f"sequence_length={self.sequence_length}: {NUM_SPECIAL_TOKENS + 2} or more is expected, for two words"
            )
        for name in ("short_sequence_probability", "mask_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to 1 is expected")


# --------------------------------------------------------------------------------------------------- chance


@dataclass(frozen=True)
class CounterRng:
    """Random numbers that are a function of what they are drawn for, in any order.

    >>> chance = CounterRng(seed=1, epoch=0)
    >>> bool((chance(np.arange(9), STREAM_RANDOM_WORD)[5:] == chance(np.arange(5, 9), STREAM_RANDOM_WORD)).all())
    True
    """

    seed: int
    epoch: int

    def random_bits(self, counters: NDArray[Any], stream: int) -> BitArray:
        """64 random bits for each number."""
        key = np.random.SeedSequence((self.seed, self.epoch, stream)).generate_state(1, np.uint64)
        return _mix_bits(counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)

    def __call__(self, counters: NDArray[Any], stream: int) -> NDArray[np.float64]:
        """A random number from 0 to below 1 for each number."""
        return _to_unit_interval(self.random_bits(counters, stream))


def _mix_bits(x: BitArray) -> BitArray:
    """Every bit of the outcome depends on every bit of x (the last steps of SplitMix64)."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _to_unit_interval(bits: BitArray) -> NDArray[np.float64]:
    return (bits >> np.uint64(11)) * np.float64(2.0**-53)


def _scale_to_integers(fractions: NDArray[np.float64], limits: NDArray[np.int64] | int) -> IntArray:
    """Whole numbers from 0 to below the ends."""
    return (fractions * limits).astype(np.int64)


# ---------------------------------------------------------------------------------------------------- pairs


class SegmentPairs(NamedTuple):
    """Pairs of segments, each a stretch of the token ids of all documents. All are ``(N,)``."""

    first_start: IntArray  # where the first segment begins
    first_length: IntArray
    second_start: IntArray
    second_length: IntArray
    is_random: NDArray[np.bool_]  # the second is from another document

    @property
    def lengths(self) -> IntArray:
        return self.first_length + self.second_length + NUM_SPECIAL_TOKENS


class _SegmentPlan(NamedTuple):
    """Of pairs that begin at some sentences, what concerns their own document."""

    document: IntArray  # of the document
    target_length: IntArray  # the tokens that the pair is to have
    cut: IntArray  # the sentence behind the first segment
    end: IntArray  # the sentence behind the second, if that is the next one
    is_random: NDArray[np.bool_]
    next_start: IntArray  # the sentence at which the next pair begins


def _plan_segments(
    store: DocumentStore, starts: IntArray, rng: CounterRng, config: MaskingConfig
) -> _SegmentPlan:
    offsets, documents = _sentence_offsets(store), store.documents
    most = config.sequence_length - NUM_SPECIAL_TOKENS
    shorter = 2 + _scale_to_integers(rng(starts, STREAM_SHORT_LENGTH), most - 1)
    room = np.where(rng(starts, STREAM_SHORT) < config.short_sequence_probability, shorter, most)
    number = np.searchsorted(documents, starts, side="right") - 1
    last = documents[number + 1]
    end = np.searchsorted(offsets, offsets[starts] + room)
    end = np.minimum(np.maximum(end, starts + 2), last)
    end = np.where(last - end == 1, last, end)  # no sentence is left alone, for nothing would be next to it
    cut = starts + 1 + _scale_to_integers(rng(starts, STREAM_CUT), end - starts - 1)
    other = rng(starts, STREAM_RANDOM_SECOND) < 0.5
    cut = np.where(other & (last - cut == 1), last, cut)
    return _SegmentPlan(number, room, cut, end, other, np.where(other, cut, end))


def make_segment_pairs(
    store: DocumentStore, starts: IntArray, rng: CounterRng, config: MaskingConfig
) -> SegmentPairs:
    """The pairs that begin at these sentences."""
    offsets, documents = _sentence_offsets(store), store.documents
    own = _plan_segments(store, starts, rng, config)
    first, middle = offsets[starts], offsets[own.cut]
    # Any other document, any of its sentences, and what follows it there until there is enough.
    number = _scale_to_integers(rng(starts, STREAM_DOCUMENT), len(store) - 1)
    number += number >= own.document
    many = documents[number + 1] - documents[number]
    begin = documents[number] + _scale_to_integers(rng(starts, STREAM_SENTENCE), many)
    end = np.searchsorted(offsets, offsets[begin] + own.target_length - (middle - first))
    end = np.minimum(np.maximum(end, begin + 1), documents[number + 1])
    second = np.where(own.is_random, offsets[begin], middle)
    lengths = middle - first, np.where(own.is_random, offsets[end], offsets[own.end]) - second
    most = config.sequence_length - NUM_SPECIAL_TOKENS
    kept = (  # the longer one is shortened until both fit; of equal ones, the second
        np.minimum(lengths[0], np.maximum(most - lengths[1], most - most // 2)),
        np.minimum(lengths[1], np.maximum(most - lengths[0], most // 2)),
    )
    fronts = (
        _scale_to_integers(rng(starts, what), was - now + 1)
        for what, was, now in zip((STREAM_TRIM_FIRST, STREAM_TRIM_SECOND), lengths, kept, strict=True)
    )
    return SegmentPairs(first + next(fronts), kept[0], second + next(fronts), kept[1], own.is_random)


def _find_pair_starts(store: DocumentStore, rng: CounterRng, config: MaskingConfig) -> IntArray:
    """Where the pairs of an epoch begin: each says where the next one does."""
    found: list[int] = []
    start, count = 0, int(store.documents[-1])
    for begin in range(0, count, LAYOUT_WINDOW):
        window = np.arange(begin, min(begin + LAYOUT_WINDOW, count))
        following = _plan_segments(store, window, rng, config).next_start.tolist()
        while start < begin + len(following):
            found.append(start)
            start = following[start - begin]
    return np.array(found, np.int64)


def _sentence_offsets(store: DocumentStore) -> IntArray:
    return store.sentences.offsets.view(np.int64)


# ------------------------------------------------------------------------------------------- hidden words


def choose_masked_tokens(
    bits: BitArray,
    lengths: IntArray,
    num_masked: IntArray,
    is_maskable: NDArray[np.bool_],
    starts_word: NDArray[np.bool_] | None = None,
) -> IntArray:
    """Which tokens are to be said: places among ``T``, in order.

    Args:
        bits: ``(T,)``, chance: the words with the lowest are taken.
        lengths: ``(N,)``, of the sequences that lie end to end.
        num_masked: ``(N,)``, how many tokens to take of each.
        is_maskable: ``(T,)``, which may be taken.
        starts_word: ``(T,)``, which tokens begin a word; None: each is one. A word is taken as a whole, or, if it
            has more tokens than are still wanted, not at all.
    """
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    words = np.flatnonzero(is_maskable if starts_word is None else is_maskable & starts_word)
    # Sorted by sequence, and within it by chance.
    order = words[np.argsort(_make_sort_keys(sequence[words], bits[words]))]
    of = sequence[order]
    if starts_word is None:
        rank = np.arange(len(order)) - np.searchsorted(of, of)
        return np.sort(order[rank < num_masked[of]])
    ends = np.append(np.flatnonzero(starts_word | ~is_maskable), len(is_maskable))
    sizes = ends[np.searchsorted(ends, order, side="right")] - order
    left, taken = num_masked.copy(), np.zeros(len(order), bool)
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


def _make_sort_keys(sequence_ids: IntArray, bits: BitArray) -> BitArray:
    """Numbers to sort by: the sequence above, and below it as many random bits as there is room for."""
    room = max(1, 63 - int(sequence_ids.max(initial=1)).bit_length())
    return (sequence_ids.astype(np.uint64) << np.uint64(room)) | (bits >> np.uint64(64 - room))


# --------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True, eq=False)
class _PretrainingEpochBatches(Sequence[IndexArray]):
    """The batches of an epoch, in the numbers of pairs."""

    plan: BatchPlan
    pair_ids: IntArray

    def __len__(self) -> int:
        return len(self.plan)

    @overload
    def __getitem__(self, position: int) -> IndexArray: ...
    @overload
    def __getitem__(self, position: slice) -> list[IndexArray]: ...
    def __getitem__(self, position: int | slice) -> IndexArray | list[IndexArray]:
        if isinstance(position, slice):
            return [self.pair_ids[one] for one in self.plan[position]]
        return self.pair_ids[self.plan[position]]


class _FlatPairs(NamedTuple):
    """Sequences end to end: for each the length; for each token its id, its segment, its place in its own."""

    lengths: IntArray
    ids: IntArray
    segments: IntArray


class PretrainingBatcher:
    """Tokenised documents as batches to learn from: what the training loop asks for.

    ``packed`` and ``fixed_shapes`` as for :class:`jumok.data.length_batching.PairData`: the same sizes come again and again.
    Tokens, sequences and masked places are filled up to round numbers, with what does not count.
    """

    unit = PretrainingBatch.unit

    def __init__(
        self,
        store: DocumentStore,
        tokenizer: WordPieceTokenizer,
        config: MaskingConfig,
        *,
        max_tokens: int,
        seed: int,
        packed: bool = False,
        fixed_shapes: bool = False,
    ) -> None:
        if len(store) < 2:
            raise InputError(
                "there is one document only, and so no other one for a second segment that does not follow; "
                "an empty line separates documents"
            )
        if max_tokens < 2 * config.sequence_length:
            raise InputError(
                f"train.batch_tokens={max_tokens}: a batch has two sequences of {config.sequence_length} or more"
            )
        self.store, self.config, self.seed, self.max_tokens = store, config, seed, max_tokens
        self.packed, self.fixed_shapes = packed, fixed_shapes
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = (
            tokenizer.pad_id,
            tokenizer.cls_id,
            tokenizer.sep_id,
            tokenizer.mask_id,
        )
        self.is_continuation = tokenizer.is_continuation
        self.replacement_ids = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
        self.length_multiple = max(KERNEL_BLOCK, max_tokens // 32)
        self.num_fillers = (
            self.length_multiple // config.sequence_length + 2
        )  # sequences; so none is too long
        self._latest_epoch: tuple[int, _PretrainingEpochBatches] | None = None

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.store)

    @property
    def fingerprint(self) -> str:
        """Identifies the documents."""
        return self.store.fingerprint

    def batches(self, epoch: int) -> _PretrainingEpochBatches:
        """The batches of an epoch, in order; each an array of the numbers of pairs."""
        latest = self._latest_epoch
        if latest is None or latest[0] != epoch:
            chance = CounterRng(self.seed, epoch)
            starts = _find_pair_starts(self.store, chance, self.config)
            lengths = self._pair_lengths(starts, chance)
            if self.fixed_shapes and not self.packed:
                lengths = round_up_lengths(lengths)
            budget = self.max_tokens - self.num_fillers if self.packed else self.max_tokens
            made = length_batching.plan_batches(
                lengths, lengths, max_tokens=budget, seed=self.seed, epoch=epoch, packed=self.packed
            )
            latest = self._latest_epoch = (
                epoch,
                _PretrainingEpochBatches(made, starts + epoch * EPOCH_STRIDE),
            )
        return latest[1]

    def divide(self, index: IndexArray, num_parts: int) -> list[IndexArray]:
        """A batch in parts of like work."""
        starts, chance = self._decode_index(index)
        lengths = self._pair_lengths(starts, chance)
        return [
            index[part]
            for part in length_batching.divide_batch(np.arange(len(index)), lengths, lengths, num_parts)
        ]

    def collate(self, index: Sequence[int] | IndexArray) -> PretrainingBatch:
        """The pairs of these numbers, with some words hidden."""
        starts, chance = self._decode_index(index)
        chosen = make_segment_pairs(self.store, starts, chance, self.config)
        laid = self._concatenate_pairs(chosen)
        places, labels, ids = self._mask_tokens(laid, starts, chance)
        tokens, segments = self._lay_out(laid._replace(ids=ids))
        if not self.packed:  # a row is wider than its text
            begins = np.cumsum(laid.lengths) - laid.lengths
            row = np.searchsorted(begins, places, side="right") - 1
            places = row * tokens.ids.shape[1] + places - begins[row]
        following, count = chosen.is_random.astype(np.int64), len(labels)
        if self.packed or self.fixed_shapes:
            room = (
                int(np.ceil(max(MAX_MASKED_SHARE * tokens.ids.numel(), count) / KERNEL_BLOCK)) * KERNEL_BLOCK
            )
            places, labels = pad_array(places, room, 0), pad_array(labels, room, IGNORE)
            following = pad_array(following, len(tokens.lengths), IGNORE)
        return PretrainingBatch(
            tokens=tokens,
            segments=segments,
            masked_indices=torch.from_numpy(places),
            labels=torch.from_numpy(labels),
            next_sentence_labels=torch.from_numpy(following),
            count=count,
            example_indices=tuple(np.asarray(index).tolist()),
        )

    def _decode_index(self, index: Sequence[int] | IndexArray) -> tuple[IntArray, CounterRng]:
        """The first sentences of pairs, and the chance of their epoch; all are of the same one."""
        numbers = np.asarray(index, np.int64)
        epoch = int(numbers[0]) // EPOCH_STRIDE if len(numbers) else 0
        return numbers - epoch * EPOCH_STRIDE, CounterRng(self.seed, epoch)

    def _pair_lengths(self, starts: IntArray, rng: CounterRng) -> NDArray[np.int32]:
        return make_segment_pairs(self.store, starts, rng, self.config).lengths.astype(np.int32)

    def _concatenate_pairs(self, segment_pairs: SegmentPairs) -> _FlatPairs:
        """[CLS] first [SEP] second [SEP], one pair behind the other."""
        lengths = segment_pairs.lengths
        ends = np.cumsum(lengths)
        begins = ends - lengths
        place = np.arange(ends[-1]) - np.repeat(begins, lengths)
        middle = np.repeat(segment_pairs.first_length + 1, lengths)  # the first [SEP]
        segments = place > middle
        # Special tokens read some neighbour here, and are put in afterwards.
        base = np.where(
            segments,
            np.repeat(segment_pairs.second_start, lengths) - middle - 1,
            np.repeat(segment_pairs.first_start, lengths) - 1,
        )
        stored = self.store.sentences.ids
        ids = stored[np.clip(base + place, 0, len(stored) - 1)].astype(np.int64)
        ids[begins] = self.cls_id
        ids[begins + segment_pairs.first_length + 1] = self.sep_id
        ids[ends - 1] = self.sep_id
        return _FlatPairs(lengths, ids, segments.astype(np.int64))

    def _mask_tokens(
        self, flat_pairs: _FlatPairs, starts: IntArray, rng: CounterRng
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The places of hidden words, the words, and the ids with them hidden."""
        lengths, ids = flat_pairs.lengths, flat_pairs.ids
        begins = np.cumsum(lengths) - lengths
        # A number for each token that is its own: of the pair above, of the place below.
        place = np.arange(len(ids)) - np.repeat(begins, lengths)
        token = np.repeat(starts * self.config.sequence_length, lengths) + place
        wanted = np.maximum(1, np.rint(lengths * self.config.mask_probability)).astype(np.int64)
        can = np.ones(len(ids), bool)
        can[begins] = False
        can[(ids == self.sep_id)] = False
        word_begins = ~self.is_continuation[ids] if self.config.whole_word_masking else None
        if word_begins is not None:
            # A segment that was shortened at its front may begin inside a word.
            word_begins[begins + 1] = True
            word_begins[np.flatnonzero(ids[:-1] == self.sep_id) + 1] = True
        at = choose_masked_tokens(
            rng.random_bits(token, STREAM_MASK_ORDER), lengths, wanted, can, word_begins
        )
        labels = ids[at]
        drawn = rng(token[at], STREAM_MASK_KIND)
        any_word = self.replacement_ids[
            _scale_to_integers(rng(token[at], STREAM_RANDOM_WORD), len(self.replacement_ids))
        ]
        shown = ids.copy()
        shown[at] = np.where(drawn < 0.8, self.mask_id, np.where(drawn < 0.9, any_word, labels))
        return at, labels, shown

    def _lay_out(self, flat_pairs: _FlatPairs) -> tuple[Tokens, Tensor]:
        """The tokens and their segments, packed or padded, and filled up if batches are to be alike."""
        lengths = flat_pairs.lengths
        if self.packed:
            tokens = pack_sequences(flat_pairs.ids, lengths, self.length_multiple, self.num_fillers)
            return tokens, torch.from_numpy(pad_array(flat_pairs.segments, tokens.ids.shape[1], 0))[None]
        rows, width = len(lengths), int(lengths.max())
        if self.fixed_shapes:
            width = int(round_up_lengths(np.array(width)))
            rows = max(rows, self.max_tokens // width)
        tokens = pad_sequences(flat_pairs.ids, lengths, (rows, width), self.pad_id, self.pad_id)
        segments = pad_sequences(flat_pairs.segments, lengths, (rows, width), 0, 0).ids
        return tokens.with_static_shapes() if self.fixed_shapes else tokens, segments
