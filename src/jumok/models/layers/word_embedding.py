"""Word dropout, and embeddings of frequent bigrams.

The meaning of "not good" is not that of "not" and "good". A recurrent layer could learn this from single
words, but hardly does from some ten thousand texts, where a linear model of bigrams is better (Wang 2012). So
a word is represented by the sum of its own vector and that of the bigram that ends with it (Joulin 2017), if
the bigram is one of the most frequent ones::

    it was not good        →      it    was + (it was)    not    good + (not good)

A token id and its bigram id are combined in one number, so that code that rearranges tokens need not know
about bigrams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from jumok.batches.tokens import UNK, Tokens

NO_BIGRAM, RARE_BIGRAM = 0, UNK  # ids of no bigram (at the start of a text), and of all rare bigrams
FIRST_BIGRAM = 2  # id of the first frequent bigram
MIN_COUNT = 3  # minimum count of a frequent bigram
EMPTY_SLOT = torch.iinfo(torch.int64).max  # larger than the code of any bigram


def drop_words(ids: Tensor, p: float) -> Tensor:
    """Replace a random fraction ``p`` of the token ids by ``UNK``."""
    return torch.where(torch.rand(ids.shape, device=ids.device) < p, UNK, ids) if p else ids


class BigramEmbedding(nn.Module):
    """Embeddings of up to ``num_bigrams`` frequent bigrams, which :meth:`fit` selects.

    >>> bigrams = BigramEmbedding(num_bigrams=3, vocab_size=10, width=4)
    >>> bigrams.fit([[4, 5, 6], [4, 5, 7], [4, 5, 6, 5, 6]])
    2
    >>> combined = bigrams.combine_ids(Tokens.pad([[4, 5, 6], [6, 4]])).ids
    >>> bigrams.split_ids(combined)  # token ids, and bigram ids: (4, 5) has id 2, and (6, 4) is rare
    (tensor([[4, 5, 6],
            [6, 4, 0]]), tensor([[0, 2, 3],
            [0, 1, 0]]))
    """

    bigram_codes: Tensor  # (num_bigrams,), sorted: each bigram as first · vocab_size + second

    def __init__(self, num_bigrams: int, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("bigram_codes", torch.full((num_bigrams,), EMPTY_SLOT))
        self.embedding = nn.Embedding(FIRST_BIGRAM + num_bigrams, width, padding_idx=NO_BIGRAM)
        # Small compared with those of words, so that a bigram initially means little more than its words.
        nn.init.normal_(self.embedding.weight, std=0.1 * width**-0.5)
        with torch.no_grad():
            self.embedding.weight[NO_BIGRAM] = 0

    def fit(self, texts: Iterable[Sequence[int]]) -> int:
        """Select the most frequent bigrams of texts, given as token ids. Return their number."""
        texts = list(texts)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        ids = np.fromiter(chain.from_iterable(texts), np.int64, int(lengths.sum()))
        ends_bigram = np.ones(len(ids), bool)
        ends_bigram[(np.cumsum(lengths) - lengths)[lengths > 0]] = False  # the first word of a text does not
        text_codes = (ids[:-1] * self.vocab_size + ids[1:])[ends_bigram[1:]]
        codes, counts = np.unique(text_codes, return_counts=True)
        frequent = np.flatnonzero(counts >= MIN_COUNT)
        selected = frequent[np.argsort(-counts[frequent], kind="stable")][: len(self.bigram_codes)]
        self.bigram_codes.fill_(EMPTY_SLOT)
        self.bigram_codes[: len(selected)] = torch.from_numpy(np.sort(codes[selected]))
        return len(selected)

    def combine_ids(self, tokens: Tokens) -> Tokens:
        """Combine each token id and the id of the bigram that ends with it in one number."""
        ids = tokens.ids
        codes = ids.roll(1, -1) * self.vocab_size + ids
        index = torch.searchsorted(self.bigram_codes, codes).clamp(max=len(self.bigram_codes) - 1)
        bigram_ids = torch.where(self.bigram_codes[index] == codes, index + FIRST_BIGRAM, RARE_BIGRAM)
        positions = torch.arange(ids.shape[1], device=ids.device) if tokens.positions is None else tokens.positions
        has_none = (positions == 0) if tokens.packed else (positions == 0) | ~tokens.valid_mask
        return replace(tokens, ids=ids + self.vocab_size * bigram_ids.masked_fill(has_none, NO_BIGRAM))

    def split_ids(self, combined_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Split combined ids into token ids and bigram ids."""
        return combined_ids % self.vocab_size, combined_ids // self.vocab_size

    def forward(self, bigram_ids: Tensor, word_dropout: float) -> Tensor:
        """Vectors ``(…, width)`` of bigram ids ``(…)``. A fraction ``word_dropout`` becomes rare."""
        bigram_ids = torch.where(bigram_ids == NO_BIGRAM, NO_BIGRAM, drop_words(bigram_ids, word_dropout))
        return self.embedding(bigram_ids)  # type: ignore[no-any-return]
