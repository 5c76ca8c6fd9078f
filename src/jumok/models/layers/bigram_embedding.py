"""Vectors for pairs of words that often stand together: "not good" is not what "not" and "good" are.

A recurrent layer could work that out from the two words. But from some ten thousand texts it hardly does, and
a linear model of pairs is then the better one (Wang 2012). So a word is read as the sum of its own vector and
that of the pair that it ends (Joulin 2017), where that pair is one of the most frequent ones::

    it was not good        →      it    was + (it was)    not    good + (not good)

A token and its pair travel as one number: so whoever lays out tokens anew needs to know nothing of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from jumok.batches.tokens import UNK, Tokens
from jumok.models.layers.word_dropout import drop_words

__all__ = ["BigramEmbedding"]

NO_BIGRAM, RARE_BIGRAM = 0, UNK  # the numbers of no pair (at a beginning), and of all pairs that are too rare
FIRST_BIGRAM = 2  # the number of the first pair
MIN_COUNT = 3  # times that a pair was seen, or it is too rare
EMPTY_SLOT = torch.iinfo(torch.int64).max  # behind all pairs that there can be


class BigramEmbedding(nn.Module):
    """As many pairs as ``num_bigrams``, once they are :meth:`learned <fit>`.

    >>> bigrams = Bigrams(most=3, vocabulary=10, width=4)
    >>> bigrams.learn([[4, 5, 6], [4, 5, 7], [4, 5, 6, 5, 6]])
    2
    >>> numbers = bigrams.joined(Tokens.padded([[4, 5, 6], [6, 4]])).ids
    >>> bigrams.parted(numbers)  # the words as they were; (4, 5) is the 3rd pair, (6, 4) is rare
    (tensor([[4, 5, 6],
            [6, 4, 0]]), tensor([[0, 2, 3],
            [0, 1, 0]]))
    """

    bigram_codes: Tensor  # (most,), rising: each pair as first · vocabulary + second

    def __init__(self, num_bigrams: int, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("bigram_codes", torch.full((num_bigrams,), EMPTY_SLOT))
        self.embedding = nn.Embedding(FIRST_BIGRAM + num_bigrams, width, padding_idx=NO_BIGRAM)
        # Small beside those of words: a pair begins as what its words are.
        nn.init.normal_(self.embedding.weight, std=0.1 * width**-0.5)
        with torch.no_grad():
            self.embedding.weight[NO_BIGRAM] = 0

    def fit(self, texts: Iterable[Sequence[int]]) -> int:
        """Take the most frequent pairs of these texts, in token ids; how many there are."""
        texts = list(texts)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        ids = np.fromiter(chain.from_iterable(texts), np.int64, int(lengths.sum()))
        within = np.ones(len(ids), bool)
        within[(np.cumsum(lengths) - lengths)[lengths > 0]] = False  # the first word of a text ends no pair
        both = (ids[:-1] * self.vocab_size + ids[1:])[within[1:]]
        found, counts = np.unique(both, return_counts=True)
        frequent = np.flatnonzero(counts >= MIN_COUNT)
        kept = frequent[np.argsort(-counts[frequent], kind="stable")][: len(self.bigram_codes)]
        self.bigram_codes.fill_(EMPTY_SLOT)
        self.bigram_codes[: len(kept)] = torch.from_numpy(np.sort(found[kept]))
        return len(kept)

    def combine_ids(self, tokens: Tokens) -> Tokens:
        """The same tokens, each as one number with its pair."""
        ids = tokens.ids
        both = ids.roll(1, -1) * self.vocab_size + ids
        at = torch.searchsorted(self.bigram_codes, both).clamp(max=len(self.bigram_codes) - 1)
        number = torch.where(self.bigram_codes[at] == both, at + FIRST_BIGRAM, RARE_BIGRAM)
        places = (
            torch.arange(ids.shape[1], device=ids.device) if tokens.positions is None else tokens.positions
        )
        begins = (places == 0) if tokens.packed else (places == 0) | ~tokens.valid_mask
        return replace(tokens, ids=ids + self.vocab_size * number.masked_fill(begins, NO_BIGRAM))

    def split_ids(self, combined_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids, and numbers of pairs."""
        return combined_ids % self.vocab_size, combined_ids // self.vocab_size

    def forward(self, bigram_ids: Tensor, word_dropout: float) -> Tensor:
        """The vectors ``(…, width)`` of numbers of pairs ``(…)``, of which a ``word_dropout`` is made rare."""
        bigram_ids = torch.where(bigram_ids == NO_BIGRAM, NO_BIGRAM, drop_words(bigram_ids, word_dropout))
        return self.embedding(bigram_ids)  # type: ignore[no-any-return]
