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

from jumok.batch import UNK, Tokens
from jumok.models.unknown import some_unknown

__all__ = ["Bigrams"]

NONE, OTHER = 0, UNK  # the numbers of no pair (at a beginning), and of all pairs that are too rare
FIRST = 2  # the number of the first pair
LEAST = 3  # times that a pair was seen, or it is too rare
UNFILLED = torch.iinfo(torch.int64).max  # behind all pairs that there can be


class Bigrams(nn.Module):
    """As many pairs as ``most``, once they are :meth:`learned <learn>`.

    >>> bigrams = Bigrams(most=3, vocabulary=10, width=4)
    >>> bigrams.learn([[4, 5, 6], [4, 5, 7], [4, 5, 6, 5, 6]])
    2
    >>> numbers = bigrams.joined(Tokens.padded([[4, 5, 6], [6, 4]])).ids
    >>> bigrams.parted(numbers)  # the words as they were; (4, 5) is the 3rd pair, (6, 4) is rare
    (tensor([[4, 5, 6],
            [6, 4, 0]]), tensor([[0, 2, 3],
            [0, 1, 0]]))
    """

    pairs: Tensor  # (most,), rising: each pair as first · vocabulary + second

    def __init__(self, most: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.register_buffer("pairs", torch.full((most,), UNFILLED))
        self.embedding = nn.Embedding(FIRST + most, width, padding_idx=NONE)
        # Small beside those of words: a pair begins as what its words are.
        nn.init.normal_(self.embedding.weight, std=0.1 * width**-0.5)
        with torch.no_grad():
            self.embedding.weight[NONE] = 0

    def learn(self, texts: Iterable[Sequence[int]]) -> int:
        """Take the most frequent pairs of these texts, in token ids; how many there are."""
        texts = list(texts)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        ids = np.fromiter(chain.from_iterable(texts), np.int64, int(lengths.sum()))
        within = np.ones(len(ids), bool)
        within[(np.cumsum(lengths) - lengths)[lengths > 0]] = False  # the first word of a text ends no pair
        both = (ids[:-1] * self.vocabulary + ids[1:])[within[1:]]
        found, counts = np.unique(both, return_counts=True)
        frequent = np.flatnonzero(counts >= LEAST)
        kept = frequent[np.argsort(-counts[frequent], kind="stable")][: len(self.pairs)]
        self.pairs.fill_(UNFILLED)
        self.pairs[: len(kept)] = torch.from_numpy(np.sort(found[kept]))
        return len(kept)

    def joined(self, tokens: Tokens) -> Tokens:
        """The same tokens, each as one number with its pair."""
        ids = tokens.ids
        both = ids.roll(1, -1) * self.vocabulary + ids
        at = torch.searchsorted(self.pairs, both).clamp(max=len(self.pairs) - 1)
        number = torch.where(self.pairs[at] == both, at + FIRST, OTHER)
        places = (
            torch.arange(ids.shape[1], device=ids.device) if tokens.positions is None else tokens.positions
        )
        begins = (places == 0) if tokens.packed else (places == 0) | ~tokens.real
        return replace(tokens, ids=ids + self.vocabulary * number.masked_fill(begins, NONE))

    def parted(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids, and numbers of pairs."""
        return numbers % self.vocabulary, numbers // self.vocabulary

    def forward(self, numbers: Tensor, share: float) -> Tensor:
        """The vectors ``(…, width)`` of numbers of pairs ``(…)``, of which a ``share`` is made rare."""
        return self.embedding(torch.where(numbers == NONE, NONE, some_unknown(numbers, share)))  # type: ignore[no-any-return]
