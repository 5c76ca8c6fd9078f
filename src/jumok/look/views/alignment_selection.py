"""Which attention tells word links best: a layer, its heads, and the step to ask, chosen without gold links.

While a decoder says a target sentence, every layer and head has a map of its own, and a *view* is one way to
read links from them. Which view is best differs from model to model. Two things tell it, and no gold links:

- With a model of each direction, their **agreement**: the two were trained apart and err apart, so links that
  both find are seldom wrong, and views that look at anything but the translation seldom agree.
- With one model, the **consistency** of its links: a word is translated by few others, so the word that is
  linked should tell the other one. A view that is a step off links neighbours, which tell little.

Shifted links (Chen 2020, arXiv 2004.14837) ask the step after a word, at which the decoder has read it, and
not the step that says it, at which it can only expect it. ::

    step        0     1     2       3
    it reads    <s>   das   Haus    …
    it says     das   Haus  …              plain: "das" looks where step 0 does; shifted: where step 1 does
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.data.readers.word_alignments import AlignmentLinks
from jumok.metrics.word_alignment import pool_to_words

__all__ = [
    "AlignmentView",
    "SentencePairAttention",
    "build_links",
    "compute_agreement",
    "compute_consistency",
    "list_alignment_views",
]

PRIOR_COUNT = 1.0  # so many links are made up of each source word to target words as frequent as they are


@dataclass(frozen=True)
class AlignmentView:
    """One way to read links: of a layer, by one head or by all of them averaged, plain or shifted."""

    layer: int
    head: int | None = None  # None: their mean
    shift: bool = False

    def __str__(self) -> str:
        heads = "mean of heads" if self.head is None else f"head {self.head}"
        return f"layer {self.layer}, {heads}, {'shifted' if self.shift else 'plain'}"


@dataclass(frozen=True, eq=False)
class SentencePairAttention:
    """Where a model looked while it said a sentence.

    ``weights`` is ``(L, H, Q + 1, K)``: layers, heads, a row for each step (Q pieces and the end), a column
    for each piece of the source. ``target_word_ids`` and ``source_word_ids`` tell the number of each piece's word, and
    ``num_words`` how many words there are, of the target and of the source.
    """

    weights: Tensor
    target_word_ids: Sequence[int]
    source_word_ids: Sequence[int]
    num_words: tuple[int, int]

    def compute_word_map(self, view: AlignmentView) -> Tensor:
        """Target words by source words, as the view has them."""
        layer = self.weights[view.layer]
        return self._merge_into_words(layer.mean(0) if view.head is None else layer[view.head], view.shift)

    def pick_source_words(self) -> Tensor:
        """``(list_alignment_views, target_word_ids num_words)``: the source word with the most weight in each of :func:`list_alignment_views`, or -1."""
        weights = torch.cat([self.weights.mean(1, keepdim=True), self.weights], 1)
        most, where = torch.stack([self._merge_into_words(weights, shift) for shift in (False, True)]).max(-1)
        return torch.where(most > 0, where, -1).flatten(0, 2)

    def _merge_into_words(self, weights: Tensor, shift: bool) -> Tensor:
        """``(…, Q + 1, K)`` as ``(…, target_word_ids num_words, source_word_ids num_words)``; words without pieces have zeros."""
        rows = weights[..., int(shift) : int(shift) + len(self.target_word_ids), :]
        found = pool_to_words(rows, self.target_word_ids, self.source_word_ids)
        missing = [self.num_words[0] - found.shape[-2], self.num_words[1] - found.shape[-1]]
        return F.pad(found, (0, missing[1], 0, missing[0]))


def list_alignment_views(num_layers: int, num_heads: int) -> list[AlignmentView]:
    """All of a model, in the order of :meth:`SentencePairAttention.pick_source_words`.

    >>> [str(view) for view in views(1, 1)][:2]
    ['layer 0, mean of heads, plain', 'layer 0, head 0, plain']
    """
    return [
        AlignmentView(layer, head, shift)
        for shift in (False, True)
        for layer in range(num_layers)
        for head in (None, *range(num_heads))
    ]


def build_links(picks: Tensor) -> AlignmentLinks:
    """The links that one view picked, ``(target_word_ids num_words,)``."""
    return frozenset((source, target) for target, source in enumerate(picks.tolist()) if source >= 0)


def compute_agreement(forward_picks: Sequence[Tensor], backward_picks: Sequence[Tensor]) -> Tensor:
    """How far the views of two directions find the same links, ``(V, W)``, from 0 to 1.

    For each pair of sentences there come the picks of V views, ``(V, Q)``, and those of W views of the other
    direction, ``(W, K)``. It is the F1 of the ones' links against the others'.

    >>> agreement([torch.tensor([[0, 1], [1, 1]])], [torch.tensor([[0, 1]])])
    tensor([[1.0000],
            [0.5000]])
    """
    both = torch.zeros(len(forward_picks[0]), len(backward_picks[0]))
    found = torch.zeros(len(forward_picks[0]), 1), torch.zeros(1, len(backward_picks[0]))
    for one, other in zip(forward_picks, backward_picks, strict=True):
        returned = other[:, one.clamp(min=0)] == torch.arange(one.shape[1])  # (W, V, Q)
        both += (returned & (one >= 0)).sum(-1).T
        found[0][:, 0] += (one >= 0).sum(-1)
        found[1][0] += (other >= 0).sum(-1)
    return 2 * both / (found[0] + found[1]).clamp(min=1)


def compute_consistency(
    picks: Iterable[Tensor], texts: Iterable[tuple[Sequence[str], Sequence[str]]]
) -> Tensor:
    """How much the linked source words tell about the target words, ``(V,)``, in nats a word.

    ``pick_source_words`` are ``(V, Q)`` for each pair of sentences, ``texts`` their words, source and target. Of each
    link it is the logarithm of p(target | source) / p(target), counted over all links but this one: a link
    that no other supports counts against a view, however rare its words.
    """
    sources: dict[str, int] = {}
    targets: dict[str, int] = {}
    linked: list[Tensor] = []  # (V, Q), the source words' numbers; the last, -1, is none
    said: list[int] = []
    for one, (source, target) in zip(picks, texts, strict=True):
        numbers = torch.tensor([sources.setdefault(word, len(sources)) for word in source] + [-1])
        linked.append(numbers[one])
        said += (targets.setdefault(word, len(targets)) for word in target)
    return torch.tensor([_compute_information(view.tolist(), said) for view in torch.cat(linked, 1)])


def _compute_information(sources: Sequence[int], targets: Sequence[int]) -> float:
    """The same of one view: a source word, or -1, for each target word."""
    linked = Counter(zip(sources, targets, strict=True))
    of_source, of_target = Counter(sources), Counter(targets)
    total = 0.0
    for (source, target), count in linked.items():
        if source >= 0:
            chance = of_target[target] / len(targets)
            likely = (count - 1 + PRIOR_COUNT * chance) / (of_source[source] - 1 + PRIOR_COUNT)
            total += count * math.log(likely / chance)
    return total / max(1, len(targets))
