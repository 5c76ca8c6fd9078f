"""Choice of the attention with the best word links: layer, heads and decoding step, without gold links.

While a decoder processes a target sentence, every layer and head has its own map. A *view* is one way to read
links from them. Which view is best differs between models. Two criteria choose it without gold links:

- With a model for each direction, their **agreement**: the two were trained independently and make
  independent errors, so links that both find are rarely wrong, and views that attend to anything but the
  translation rarely agree.
- With one model, the **consistency** of its links: a word has few translations, so the linked word should
  predict the other one. A view that is off by one step links neighbours, which predict little.

Shifted links (Chen 2020, arXiv 2004.14837) use the step after a word, at which the decoder has read it,
rather than the step that outputs it, at which the decoder can only predict it. ::

    step        0     1     2       3
    input       <s>   das   Haus    …
    output      das   Haus  …              "das" is aligned by step 0 (plain) or by step 1 (shifted)
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

PRIOR_COUNT = 1.0  # pseudocount of links from each source word to target words, by their frequency


@dataclass(frozen=True)
class AlignmentView:
    """One way to read links: a layer, one head or the mean of all heads, plain or shifted."""

    layer: int
    head: int | None = None  # None: the mean of all heads
    shift: bool = False

    def __str__(self) -> str:
        heads = "mean of heads" if self.head is None else f"head {self.head}"
        return f"layer {self.layer}, {heads}, {'shifted' if self.shift else 'plain'}"


@dataclass(frozen=True, eq=False)
class SentencePairAttention:
    """The attention of a model while it decodes a given sentence.

    ``weights`` is ``(L, H, Q + 1, K)``: layers, heads, a row for each step (Q tokens and the end), a column
    for each source token. ``target_word_ids`` and ``source_word_ids`` hold the index of each token's word,
    and ``num_words`` the numbers of words of the target and of the source.
    """

    weights: Tensor
    target_word_ids: Sequence[int]
    source_word_ids: Sequence[int]
    num_words: tuple[int, int]

    def compute_word_map(self, view: AlignmentView) -> Tensor:
        """Return the map of a view, target words by source words."""
        layer = self.weights[view.layer]
        return self._merge_into_words(layer.mean(0) if view.head is None else layer[view.head], view.shift)

    def pick_source_words(self) -> Tensor:
        """Return the source word with the highest weight for each target word, or -1.

        The result is ``(views, target words)``, in the order of :func:`list_alignment_views`.
        """
        weights = torch.cat([self.weights.mean(1, keepdim=True), self.weights], 1)
        max_weights, word_ids = torch.stack([self._merge_into_words(weights, shift) for shift in (False, True)]).max(-1)
        return torch.where(max_weights > 0, word_ids, -1).flatten(0, 2)

    def _merge_into_words(self, weights: Tensor, shift: bool) -> Tensor:
        """Return ``(…, Q + 1, K)`` as ``(…, target words, source words)``; zeros for words without tokens."""
        rows = weights[..., int(shift) : int(shift) + len(self.target_word_ids), :]
        pooled = pool_to_words(rows, self.target_word_ids, self.source_word_ids)
        missing = [self.num_words[0] - pooled.shape[-2], self.num_words[1] - pooled.shape[-1]]
        return F.pad(pooled, (0, missing[1], 0, missing[0]))


def list_alignment_views(num_layers: int, num_heads: int) -> list[AlignmentView]:
    """Return all views of a model, in the order of :meth:`SentencePairAttention.pick_source_words`.

    >>> [str(view) for view in list_alignment_views(1, 1)][:2]
    ['layer 0, mean of heads, plain', 'layer 0, head 0, plain']
    """
    return [
        AlignmentView(layer, head, shift)
        for shift in (False, True)
        for layer in range(num_layers)
        for head in (None, *range(num_heads))
    ]


def build_links(picks: Tensor) -> AlignmentLinks:
    """Return the links that one view picked, ``(target words,)``."""
    return frozenset((source, target) for target, source in enumerate(picks.tolist()) if source >= 0)


def compute_agreement(forward_picks: Sequence[Tensor], backward_picks: Sequence[Tensor]) -> Tensor:
    """Return how far the views of two directions find the same links, ``(V, W)``, from 0 to 1.

    For each sentence pair, the arguments hold the picks of V views, ``(V, Q)``, and those of W views of the
    other direction, ``(W, K)``. The result is the F1 between the links of both directions.

    >>> compute_agreement([torch.tensor([[0, 1], [1, 1]])], [torch.tensor([[0, 1]])])
    tensor([[1.0000],
            [0.5000]])
    """
    num_common = torch.zeros(len(forward_picks[0]), len(backward_picks[0]))
    num_links = torch.zeros(len(forward_picks[0]), 1), torch.zeros(1, len(backward_picks[0]))
    for forward, backward in zip(forward_picks, backward_picks, strict=True):
        is_mutual = backward[:, forward.clamp(min=0)] == torch.arange(forward.shape[1])  # (W, V, Q)
        num_common += (is_mutual & (forward >= 0)).sum(-1).T
        num_links[0][:, 0] += (forward >= 0).sum(-1)
        num_links[1][0] += (backward >= 0).sum(-1)
    return 2 * num_common / (num_links[0] + num_links[1]).clamp(min=1)


def compute_consistency(picks: Iterable[Tensor], texts: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Tensor:
    """Return how much the linked source words tell about the target words, ``(V,)``, in nats per word.

    ``picks`` are ``(V, Q)`` for each sentence pair, ``texts`` their words, source and target. Each link
    contributes the logarithm of p(target | source) / p(target), counted over all other links: a link that no
    other link supports counts against a view, however rare its words are.
    """
    sources: dict[str, int] = {}
    targets: dict[str, int] = {}
    linked: list[Tensor] = []  # (V, Q), indices of source words; -1: none
    target_ids: list[int] = []
    for sentence_picks, (source, target) in zip(picks, texts, strict=True):
        source_ids = torch.tensor([sources.setdefault(word, len(sources)) for word in source] + [-1])
        linked.append(source_ids[sentence_picks])
        target_ids += (targets.setdefault(word, len(targets)) for word in target)
    return torch.tensor([_compute_information(view.tolist(), target_ids) for view in torch.cat(linked, 1)])


def _compute_information(sources: Sequence[int], targets: Sequence[int]) -> float:
    """Return the information of one view: a source word, or -1, for each target word."""
    linked = Counter(zip(sources, targets, strict=True))
    source_counts, target_counts = Counter(sources), Counter(targets)
    total = 0.0
    for (source, target), count in linked.items():
        if source >= 0:
            prior = target_counts[target] / len(targets)
            posterior = (count - 1 + PRIOR_COUNT * prior) / (source_counts[source] - 1 + PRIOR_COUNT)
            total += count * math.log(posterior / prior)
    return total / max(1, len(targets))
