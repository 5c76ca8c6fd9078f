"""Random pairs of sentences whose lengths and words are like those of real ones.

The lengths of both sides are uniform, and go together as those of translations do, by a Gaussian copula of
correlation 0.9 (the rank correlation of numbers of words is 0.85 in Multi30k and 0.95 in Europarl). They
count the </s>. Words are drawn by Zipf's law: were all equally likely, the gradients of embeddings would be
too easy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jumok.batches.tokens import SPECIAL_TOKENS

CORRELATION = 0.9
Sides = tuple[list[list[int]], list[list[int]]]  # sources and targets, without special tokens


@dataclass(frozen=True)
class Text:
    """What to draw."""

    pairs: int  # in a batch
    shortest: int  # tokens of a sentence
    longest: int
    vocabulary: int

    def draw(self, batches: int) -> list[Sides]:
        """Batches of like size: the pairs are dealt out by length, back and forth."""
        chance = torch.Generator().manual_seed(0)
        one, other = torch.randn(2, batches * self.pairs, generator=chance)
        both = torch.stack([one, CORRELATION * one + (1 - CORRELATION**2) ** 0.5 * other])
        uniform = torch.special.ndtr(both)  # each side on its own: uniform from 0 to 1
        kinds = self.longest - self.shortest + 1
        lengths = self.shortest - 1 + (uniform * kinds).long().clamp(max=kinds - 1)
        turn = torch.arange(len(one)) % (2 * batches)
        dealt = torch.minimum(turn, 2 * batches - 1 - turn)
        order = lengths.sum(0).argsort(descending=True, stable=True)
        rarity = 1 / (torch.arange(self.vocabulary - len(SPECIAL_TOKENS)) + 2.7)

        def said(length: int) -> list[int]:
            words = torch.multinomial(rarity, length, replacement=True, generator=chance)
            found: list[int] = (words + len(SPECIAL_TOKENS)).tolist()
            return found

        parts = (lengths[:, order[dealt == number]].tolist() for number in range(batches))
        return [([said(n) for n in source], [said(n) for n in target]) for source, target in parts]
