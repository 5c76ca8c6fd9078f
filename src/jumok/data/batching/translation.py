"""Batches of sentence pairs, read from a :class:`~jumok.data.caches.token_store.TokenStore`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jumok.batches.tokens import BOS, EOS, IGNORE, Seq2SeqBatch
from jumok.data.batching.length_batching import (
    FlatSequences,
    IndexArray,
    IntArray,
    LengthBatcher,
    SequenceLayout,
    expand_ranges,
)
from jumok.data.caches.token_store import TokenColumn, TokenStore
from jumok.errors import InputError


class TranslationBatcher(LengthBatcher[Seq2SeqBatch]):
    """Sentence pairs in batches of up to ``max_tokens`` tokens per side, padded or packed.

    See :class:`~jumok.data.batching.length_batching.SequenceLayout` for ``packed`` and ``fixed_shapes``. A
    packed row has equally many fillers on both sides.

    >>> batcher = TranslationBatcher(store, max_tokens=4096, seed=1)  # doctest: +SKIP
    >>> for index in batcher.batches(epoch=0):                        # doctest: +SKIP
    ...     batch = batcher.collate(index)
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
            raise InputError(f"max_tokens={max_tokens}: a batch needs a budget of at least two tokens")
        # In a batch, each sequence has a BOS or an EOS.
        lengths = (side.lengths + np.int32(1) for side in (store.source, store.target))
        super().__init__(SequenceLayout(max_tokens, packed, fixed_shapes), *lengths, seed=seed)
        self.store = store

    @property
    def fingerprint(self) -> str:
        """Identifies the corpus and the tokenizers."""
        return self.store.fingerprint

    def collate(self, index: Sequence[int] | IndexArray) -> Seq2SeqBatch:
        """Build the batch of these pairs: like ``Seq2SeqBatch.from_sequences``, but faster."""
        indices = np.asarray(index, np.int64)
        source_ids, target_ids = (_gather(side, indices) for side in (self.store.source, self.store.target))
        source, target, labels = _append_eos(*source_ids), _prepend_bos(*target_ids), _append_eos(*target_ids)
        layout = self.layout
        source_width, target_width = (layout.width(lengths) for _, lengths in (source, target))
        num_rows = layout.num_rows(len(indices), max(source_width, target_width))
        target_tokens = layout.arrange(*target, (num_rows, target_width), filler_id=BOS)
        return Seq2SeqBatch(
            layout.arrange(*source, (num_rows, source_width), filler_id=EOS),
            target_tokens,
            layout.arrange_like(target_tokens, *labels, IGNORE),
            int(labels[1].sum()),
            example_indices=tuple(indices.tolist()),
        )


def _gather(column: TokenColumn, indices: IntArray) -> FlatSequences:
    """The token ids and the lengths of some sequences of a store."""
    starts = column.offsets[indices].astype(np.int64)
    lengths = column.offsets[indices + 1].astype(np.int64) - starts
    return column.ids[expand_ranges(starts, lengths)].astype(np.int64), lengths


def _append_eos(ids: IntArray, lengths: IntArray) -> FlatSequences:
    return np.insert(ids, np.cumsum(lengths), EOS), lengths + 1


def _prepend_bos(ids: IntArray, lengths: IntArray) -> FlatSequences:
    return np.insert(ids, np.cumsum(lengths) - lengths, BOS), lengths + 1
