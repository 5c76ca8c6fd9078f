"""Random pairs of sentences with lengths and words like those of translations.

The lengths of both sides are uniform and correlated, by a Gaussian copula of correlation 0.9 (the rank correlation
of word counts is 0.85 in Multi30k and 0.95 in Europarl). Lengths include </s>. Words follow Zipf's law: with equally
probable words, the gradients of embeddings would be too cheap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jumok.batches.tokens import SPECIAL_TOKENS

CORRELATION = 0.9
Sides = tuple[list[list[int]], list[list[int]]]  # sources and targets, without special tokens


@dataclass(frozen=True)
class Text:
    """Number of pairs, lengths and vocabulary of random sentences."""

    pairs: int  # in a batch
    shortest: int  # tokens of a sentence
    longest: int
    vocab_size: int

    def draw(self, batches: int) -> list[Sides]:
        """Draw batches of similar size: sorted by length, pairs go to the batches back and forth."""
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(2, batches * self.pairs, generator=generator)
        normal = torch.stack([x, CORRELATION * x + (1 - CORRELATION**2) ** 0.5 * y])
        uniform = torch.special.ndtr(normal)  # each side by itself is uniform from 0 to 1
        num_lengths = self.longest - self.shortest + 1
        lengths = self.shortest - 1 + (uniform * num_lengths).long().clamp(max=num_lengths - 1)
        turn = torch.arange(len(x)) % (2 * batches)
        batch_of = torch.minimum(turn, 2 * batches - 1 - turn)
        order = lengths.sum(0).argsort(descending=True, stable=True)
        frequencies = 1 / (torch.arange(self.vocab_size - len(SPECIAL_TOKENS)) + 2.7)

        def draw_sentence(length: int) -> list[int]:
            words = torch.multinomial(frequencies, length, replacement=True, generator=generator)
            ids: list[int] = (words + len(SPECIAL_TOKENS)).tolist()
            return ids

        parts = (lengths[:, order[batch_of == number]].tolist() for number in range(batches))
        return [([draw_sentence(n) for n in source], [draw_sentence(n) for n in target]) for source, target in parts]
