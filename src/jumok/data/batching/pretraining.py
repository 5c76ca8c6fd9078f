"""Batches for pretraining BERT: segment pairs with masked words, drawn anew every epoch.

A pair consists of consecutive sentences of a document, as many as fill a sequence (sometimes a shorter one)::

    document    s0 s1 s2 s3 s4 s5 s6 …
                └── one pair ─┘

    half of the pairs    [CLS] s0 s1 [SEP] s2 s3 s4 [SEP]    cut between any two sentences
    the other half       [CLS] s0 s1 [SEP] r5 r6 r7 [SEP]    second segment from another document; the next
                                                             pair starts at s2
    segments               0   0  0    0   1  1  1    1

A pair that is too long is trimmed at both ends, the longer segment first. Then 15 % of the tokens are
selected for prediction: 80 % of them become [MASK], 10 % a random word, and 10 % stay as they are.

All random numbers are a function of the seed, the epoch, the first sentence of the pair, and what they are
drawn for (:class:`~jumok.data.counter_rng.CounterRng`). Any pair can therefore be built at any time, in any
process, with the same result. The index of a pair is epoch · EPOCH_STRIDE + its first sentence.

Shapes: ``N`` pairs, ``T`` tokens of all pairs concatenated, ``M`` masked positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from jumok.batches.text import PretrainingBatch
from jumok.batches.tokens import IGNORE
from jumok.config import Config
from jumok.data.batching.length_batching import (
    EPOCH_STRIDE,
    KERNEL_BLOCK,
    EpochLengths,
    IndexArray,
    IntArray,
    LengthArray,
    LengthBatcher,
    SequenceLayout,
    pad_array,
)
from jumok.data.caches.document_store import DocumentStore
from jumok.data.counter_rng import BitArray, CounterRng
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError

LAYOUT_WINDOW = 1 << 18  # sentences processed together when an epoch is planned
NUM_SPECIAL_TOKENS = 3  # [CLS], [SEP] and [SEP]
MAX_MASKED_SHARE = 0.16  # share of the tokens for which there is room for labels: 15 %, plus rounding
# The streams of random numbers, per pair and per token.
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
class MaskingConfig(Config):
    """How pairs are built and words are masked."""

    sequence_length: int = 128  # tokens per sequence, including special tokens
    short_sequence_probability: float = 0.1  # share of shorter sequences, so that the model learns from some
    mask_probability: float = 0.15  # share of tokens to predict
    whole_word_masking: bool = False  # mask all pieces of a word or none

    def __post_init__(self) -> None:
        if self.sequence_length < NUM_SPECIAL_TOKENS + 2:
            raise ValueError(
                f"sequence_length={self.sequence_length}: expected {NUM_SPECIAL_TOKENS + 2} or more, for two words"
            )
        for name in ("short_sequence_probability", "mask_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a probability from 0 to 1")


# ---------------------------------------------------------------------------------------------- segment pairs


class SegmentPairs(NamedTuple):
    """Pairs of segments. A segment is a range of the token ids of all documents. All are ``(N,)``."""

    first_start: IntArray
    first_length: IntArray
    second_start: IntArray
    second_length: IntArray
    is_random: NDArray[np.bool_]  # the second segment is from another document

    @property
    def lengths(self) -> IntArray:
        """The number of tokens, including special tokens."""
        return self.first_length + self.second_length + NUM_SPECIAL_TOKENS


class _SegmentPlan(NamedTuple):
    """Where pairs that start at some sentences are cut and end. All are ``(N,)``."""

    document: IntArray  # index of the document
    target_length: IntArray  # number of tokens to aim at
    cut: IntArray  # the sentence after the first segment
    end: IntArray  # the sentence after the second segment, if that follows the first
    is_random: NDArray[np.bool_]
    next_start: IntArray  # the sentence at which the next pair starts


def _plan_segments(store: DocumentStore, starts: IntArray, rng: CounterRng, config: MaskingConfig) -> _SegmentPlan:
    offsets, documents = _sentence_offsets(store), store.documents
    max_length = config.sequence_length - NUM_SPECIAL_TOKENS
    short_length = 2 + rng.integers(starts, STREAM_SHORT_LENGTH, max_length - 1)
    is_short = rng(starts, STREAM_SHORT) < config.short_sequence_probability
    target_length = np.where(is_short, short_length, max_length)
    document = np.searchsorted(documents, starts, side="right") - 1
    document_end = documents[document + 1]
    end = np.searchsorted(offsets, offsets[starts] + target_length)
    end = np.minimum(np.maximum(end, starts + 2), document_end)
    # Leave no single sentence at the end of a document: none could follow it.
    end = np.where(document_end - end == 1, document_end, end)
    cut = starts + 1 + rng.integers(starts, STREAM_CUT, end - starts - 1)
    is_random = rng(starts, STREAM_RANDOM_SECOND) < 0.5
    cut = np.where(is_random & (document_end - cut == 1), document_end, cut)
    return _SegmentPlan(document, target_length, cut, end, is_random, np.where(is_random, cut, end))


def make_segment_pairs(store: DocumentStore, starts: IntArray, rng: CounterRng, config: MaskingConfig) -> SegmentPairs:
    """The pairs that start at these sentences."""
    offsets, documents = _sentence_offsets(store), store.documents
    plan = _plan_segments(store, starts, rng, config)
    first, middle = offsets[starts], offsets[plan.cut]
    # A random second segment: from a random sentence of another document until there are enough tokens.
    other = rng.integers(starts, STREAM_DOCUMENT, len(store) - 1)
    other += other >= plan.document
    num_sentences = documents[other + 1] - documents[other]
    begin = documents[other] + rng.integers(starts, STREAM_SENTENCE, num_sentences)
    end = np.searchsorted(offsets, offsets[begin] + plan.target_length - (middle - first))
    end = np.minimum(np.maximum(end, begin + 1), documents[other + 1])
    second = np.where(plan.is_random, offsets[begin], middle)
    lengths = middle - first, np.where(plan.is_random, offsets[end], offsets[plan.end]) - second
    max_length = config.sequence_length - NUM_SPECIAL_TOKENS
    trimmed = (  # trim the longer segment until both fit; of two equally long ones, the second
        np.minimum(lengths[0], np.maximum(max_length - lengths[1], max_length - max_length // 2)),
        np.minimum(lengths[1], np.maximum(max_length - lengths[0], max_length // 2)),
    )
    first_shift, second_shift = (  # how much of the trimmed part is at the front
        rng.integers(starts, stream, before - after + 1)
        for stream, before, after in zip((STREAM_TRIM_FIRST, STREAM_TRIM_SECOND), lengths, trimmed, strict=True)
    )
    return SegmentPairs(first + first_shift, trimmed[0], second + second_shift, trimmed[1], plan.is_random)


def _find_pair_starts(store: DocumentStore, rng: CounterRng, config: MaskingConfig) -> IntArray:
    """The sentences at which the pairs of an epoch start: each pair determines the start of the next."""
    starts: list[int] = []
    start, num_sentences = 0, int(store.documents[-1])
    for begin in range(0, num_sentences, LAYOUT_WINDOW):
        window = np.arange(begin, min(begin + LAYOUT_WINDOW, num_sentences))
        next_starts = _plan_segments(store, window, rng, config).next_start.tolist()
        while start < begin + len(next_starts):
            starts.append(start)
            start = next_starts[start - begin]
    return np.array(starts, np.int64)


def _sentence_offsets(store: DocumentStore) -> IntArray:
    return store.sentences.offsets.view(np.int64)


# ---------------------------------------------------------------------------------------------------- masking


def choose_masked_tokens(
    bits: BitArray,
    lengths: IntArray,
    num_masked: IntArray,
    is_maskable: NDArray[np.bool_],
    starts_word: NDArray[np.bool_] | None = None,
) -> IntArray:
    """Choose the tokens to predict, as sorted positions among ``T``.

    Args:
        bits: ``(T,)``: random bits. The words with the lowest are chosen.
        lengths: ``(N,)``: lengths of the concatenated sequences.
        num_masked: ``(N,)``: number of tokens to choose in each sequence.
        is_maskable: ``(T,)``: tokens that may be chosen.
        starts_word: ``(T,)``: tokens that start a word. A word is chosen completely, or not at all if it has
            more tokens than are still to be chosen. None: each token is a word.
    """
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    words = np.flatnonzero(is_maskable if starts_word is None else is_maskable & starts_word)
    # Sort the words by sequence, and randomly within a sequence.
    order = words[np.argsort(_make_sort_keys(sequence[words], bits[words]))]
    word_sequence = sequence[order]
    if starts_word is None:
        rank = np.arange(len(order)) - np.searchsorted(word_sequence, word_sequence)
        return np.sort(order[rank < num_masked[word_sequence]])
    ends = np.append(np.flatnonzero(starts_word | ~is_maskable), len(is_maskable))
    sizes = ends[np.searchsorted(ends, order, side="right")] - order
    remaining, is_chosen = num_masked.copy(), np.zeros(len(order), bool)
    while (candidates := np.flatnonzero(~is_chosen & (sizes <= remaining[word_sequence]))).size:
        # Choose words in order as long as all fit. After the first that does not, smaller ones are tried
        # again.
        total = np.cumsum(sizes[candidates])
        first = np.searchsorted(word_sequence[candidates], word_sequence[candidates])
        total_before = np.where(first > 0, total[first - 1], 0)
        fitting = candidates[total - total_before <= remaining[word_sequence[candidates]]]
        is_chosen[fitting] = True
        np.subtract.at(remaining, word_sequence[fitting], sizes[fitting])
    chosen, chosen_sizes = order[is_chosen], sizes[is_chosen]
    inside = np.arange(chosen_sizes.sum()) - np.repeat(np.cumsum(chosen_sizes) - chosen_sizes, chosen_sizes)
    return np.sort(np.repeat(chosen, chosen_sizes) + inside)


def _make_sort_keys(sequence_ids: IntArray, bits: BitArray) -> BitArray:
    """Sort keys: the sequence in the high bits, and as many random bits as there is room for below."""
    num_bits = max(1, 63 - int(sequence_ids.max(initial=1)).bit_length())
    return (sequence_ids.astype(np.uint64) << np.uint64(num_bits)) | (bits >> np.uint64(64 - num_bits))


# ---------------------------------------------------------------------------------------------------- batches


class _FlatPairs(NamedTuple):
    """Concatenated pairs."""

    lengths: IntArray  # (N,)
    ids: IntArray  # (T,)
    segments: IntArray  # (T,)

    @property
    def offsets(self) -> IntArray:
        return np.cumsum(self.lengths) - self.lengths


class PretrainingBatcher(LengthBatcher[PretrainingBatch]):
    """Segment pairs of tokenized documents, with masked words, padded or packed.

    See :class:`~jumok.data.batching.length_batching.SequenceLayout` for ``packed`` and ``fixed_shapes``. With
    either, the number of masked positions is rounded up, too, with labels that do not count.
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
                "there is only one document, and so none to take a random second segment from; separate "
                "documents by empty lines"
            )
        if max_tokens < 2 * config.sequence_length:
            raise InputError(
                f"train.batch_tokens={max_tokens}: expected room for two sequences of {config.sequence_length} or more"
            )
        super().__init__(SequenceLayout(max_tokens, packed, fixed_shapes, config.sequence_length), seed=seed)
        self.store, self.config, self.tokenizer = store, config, tokenizer
        self.is_continuation = tokenizer.is_continuation
        self.replacement_ids = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)

    def __len__(self) -> int:
        return len(self.store)

    @property
    def fingerprint(self) -> str:
        """Identifies the documents and the tokenizer."""
        return self.store.fingerprint

    def epoch_lengths(self, epoch: int) -> EpochLengths:
        rng = CounterRng(self.seed, epoch)
        starts = _find_pair_starts(self.store, rng, self.config)
        lengths = self.layout.round_up(self._pair_lengths(starts, rng))
        return EpochLengths(lengths, lengths, starts + epoch * EPOCH_STRIDE)

    def example_lengths(self, index: IndexArray) -> tuple[LengthArray, LengthArray]:
        lengths = self._pair_lengths(*self._decode_index(index))
        return lengths, lengths

    def collate(self, index: Sequence[int] | IndexArray) -> PretrainingBatch:
        """Build these pairs and mask some of their words."""
        starts, rng = self._decode_index(index)
        segment_pairs = make_segment_pairs(self.store, starts, rng, self.config)
        pairs = self._concatenate_pairs(segment_pairs)
        positions = self._choose_positions(pairs, starts, rng)
        labels = pairs.ids[positions]
        masked_ids = self._mask_tokens(pairs, positions, starts, rng)
        pad_id = self.tokenizer.pad_id
        tokens = self.layout.arrange(masked_ids, pairs.lengths, pad_id=pad_id, filler_id=pad_id)
        if not self.layout.packed:  # rows are wider than their sequences
            row = np.searchsorted(pairs.offsets, positions, side="right") - 1
            positions = row * tokens.ids.shape[1] + positions - pairs.offsets[row]
        next_sentence_labels, count = segment_pairs.is_random.astype(np.int64), len(labels)
        if self.layout.packed or self.layout.fixed_shapes:
            num_blocks = int(np.ceil(max(MAX_MASKED_SHARE * tokens.ids.numel(), count) / KERNEL_BLOCK))
            positions = pad_array(positions, num_blocks * KERNEL_BLOCK, 0)
            labels = pad_array(labels, num_blocks * KERNEL_BLOCK, IGNORE)
            next_sentence_labels = pad_array(next_sentence_labels, len(tokens.lengths), IGNORE)
        return PretrainingBatch(
            tokens=tokens,
            segments=self.layout.arrange_like(tokens, pairs.segments, pairs.lengths, 0),
            masked_indices=torch.from_numpy(positions),
            labels=torch.from_numpy(labels),
            next_sentence_labels=torch.from_numpy(next_sentence_labels),
            count=count,
            example_indices=tuple(np.asarray(index).tolist()),
        )

    def _decode_index(self, index: Sequence[int] | IndexArray) -> tuple[IntArray, CounterRng]:
        """The first sentences of pairs of one epoch, and the random numbers of that epoch."""
        indices = np.asarray(index, np.int64)
        epoch = int(indices[0]) // EPOCH_STRIDE if len(indices) else 0
        return indices - epoch * EPOCH_STRIDE, CounterRng(self.seed, epoch)

    def _pair_lengths(self, starts: IntArray, rng: CounterRng) -> LengthArray:
        return make_segment_pairs(self.store, starts, rng, self.config).lengths.astype(np.int32)

    def _concatenate_pairs(self, segment_pairs: SegmentPairs) -> _FlatPairs:
        """[CLS] first [SEP] second [SEP], one pair after the other."""
        lengths = segment_pairs.lengths
        ends = np.cumsum(lengths)
        starts = ends - lengths
        position = np.arange(ends[-1]) - np.repeat(starts, lengths)
        first_sep = np.repeat(segment_pairs.first_length + 1, lengths)
        is_second = position > first_sep
        # Special tokens read a neighbour here and are overwritten below.
        base = np.where(
            is_second,
            np.repeat(segment_pairs.second_start, lengths) - first_sep - 1,
            np.repeat(segment_pairs.first_start, lengths) - 1,
        )
        stored = self.store.sentences.ids
        ids = stored[np.clip(base + position, 0, len(stored) - 1)].astype(np.int64)
        ids[starts] = self.tokenizer.cls_id
        ids[starts + segment_pairs.first_length + 1] = self.tokenizer.sep_id
        ids[ends - 1] = self.tokenizer.sep_id
        return _FlatPairs(lengths, ids, is_second.astype(np.int64))

    def _token_counters(self, pairs: _FlatPairs, starts: IntArray) -> IntArray:
        """A unique counter for each token, from its pair and its position."""
        position = np.arange(len(pairs.ids)) - np.repeat(pairs.offsets, pairs.lengths)
        return np.repeat(starts * self.config.sequence_length, pairs.lengths) + position

    def _choose_positions(self, pairs: _FlatPairs, starts: IntArray, rng: CounterRng) -> IntArray:
        """The positions of the tokens to predict."""
        ids, sep_id = pairs.ids, self.tokenizer.sep_id
        num_masked = np.maximum(1, np.rint(pairs.lengths * self.config.mask_probability)).astype(np.int64)
        is_maskable = ids != sep_id
        is_maskable[pairs.offsets] = False  # [CLS]
        starts_word = None
        if self.config.whole_word_masking:
            starts_word = ~self.is_continuation[ids]
            # A segment that was trimmed at the front may begin inside a word.
            starts_word[pairs.offsets + 1] = True
            starts_word[np.flatnonzero(ids[:-1] == sep_id) + 1] = True
        bits = rng.random_bits(self._token_counters(pairs, starts), STREAM_MASK_ORDER)
        return choose_masked_tokens(bits, pairs.lengths, num_masked, is_maskable, starts_word)

    def _mask_tokens(self, pairs: _FlatPairs, positions: IntArray, starts: IntArray, rng: CounterRng) -> IntArray:
        """The ids with these positions masked: 80 % [MASK], 10 % a random word, 10 % unchanged."""
        counters = self._token_counters(pairs, starts)[positions]
        kind = rng(counters, STREAM_MASK_KIND)
        random_word = self.replacement_ids[rng.integers(counters, STREAM_RANDOM_WORD, len(self.replacement_ids))]
        masked = pairs.ids.copy()
        masked[positions] = np.where(
            kind < 0.8, self.tokenizer.mask_id, np.where(kind < 0.9, random_word, pairs.ids[positions])
        )
        return masked
