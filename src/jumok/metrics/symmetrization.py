"""Symmetrization: combine the word alignments of two translation directions.

The attention map of a model has one row for each target word and links it to one source word. A model of the
opposite direction does the reverse. Neither can be right where a word belongs to several words.

:func:`product_links` multiplies the two maps, so that one model decides where the other is uncertain. The
classical heuristics only use the links (source word, target word) of each direction::

    forward      backward     intersection  grow-diag    union
    ■ · · · ■    ■ · · · ·    ■ · · · ·     ■ · · · ·    ■ · · · ■
    · · ■ · ·    · ■ ■ · ·    · · ■ · ·     · ■ ■ · ·    · ■ ■ · ·

Rows are source words here. grow-diag adds a link that is adjacent to a link of both directions and gives a
target word its first link. The link at the right has no neighbour.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from jumok.data.readers.word_alignments import AlignmentLinks
from jumok.metrics.word_alignment import argmax_links, mutual_argmax_links, swap_links

# Derives links from two maps: (target words, source words) and (source words, target words).
Symmetrization = Callable[[Tensor, Tensor], AlignmentLinks]

# Horizontal and vertical neighbours first, then diagonal ones, as listed by Koehn. The order affects the
# result.
NEIGHBORS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def product_links(forward: Tensor, backward: Tensor) -> AlignmentLinks:
    """The pairs with the largest product of both maps, for the source word and for the target word.

    ``forward`` is ``(target words, source words)``; ``backward`` is ``(source words, target words)``.

    >>> import torch
    >>> from jumok.metrics.symmetrization import product_links
    >>> forward = torch.tensor([[0.6, 0.4], [0.6, 0.4]])  # both target words prefer the first source word
    >>> backward = torch.tensor([[0.9, 0.1], [0.1, 0.9]])  # the other model is more certain
    >>> sorted(product_links(forward, backward))
    [(0, 0), (1, 1)]
    """
    return mutual_argmax_links(forward * backward.T)


def intersection(forward: AlignmentLinks, backward: AlignmentLinks) -> AlignmentLinks:
    """The links of both directions: few, but precise."""
    return forward & backward


def union(forward: AlignmentLinks, backward: AlignmentLinks) -> AlignmentLinks:
    """The links of either direction: many, but less precise."""
    return forward | backward


def grow_diag(forward: AlignmentLinks, backward: AlignmentLinks) -> AlignmentLinks:
    """The intersection, extended by neighbouring links of either direction that link an unlinked word.

    A neighbour is one word away in either sentence or in both (Och & Ney 2003). As in Koehn's procedure,
    links are visited by source word and then by target word, repeatedly, until none is added.

    >>> sorted(grow_diag(frozenset({(0, 0), (1, 1), (2, 1)}), frozenset({(0, 0), (1, 1)})))
    [(0, 0), (1, 1), (2, 1)]
    """
    candidates = forward | backward
    links = set(forward & backward)
    sources, targets = {source for source, _ in links}, {target for _, target in links}
    has_grown = True
    while has_grown:
        has_grown = False
        for source, target in sorted(candidates):
            if (source, target) not in links:
                continue
            for source_step, target_step in NEIGHBORS:
                neighbor = near_source, near_target = source + source_step, target + target_step
                is_unlinked = near_source not in sources or near_target not in targets
                if neighbor in candidates and neighbor not in links and is_unlinked:
                    links.add(neighbor)
                    sources.add(near_source)
                    targets.add(near_target)
                    has_grown = True
    return frozenset(links)


def grow_diag_final_and(forward: AlignmentLinks, backward: AlignmentLinks) -> AlignmentLinks:
    """:func:`grow_diag`, then all links of either direction between two words that are both unlinked.

    >>> sorted(grow_diag_final_and(frozenset({(0, 0), (2, 5)}), frozenset({(0, 0), (2, 7)})))
    [(0, 0), (2, 5)]
    """
    links = set(grow_diag(forward, backward))
    sources, targets = {source for source, _ in links}, {target for _, target in links}
    for candidates in (forward, backward):
        for source, target in sorted(candidates):
            if source not in sources and target not in targets:
                links.add((source, target))
                sources.add(source)
                targets.add(target)
    return frozenset(links)


def _from_link_heuristic(
    combine: Callable[[AlignmentLinks, AlignmentLinks], AlignmentLinks],
) -> Symmetrization:
    return lambda forward, backward: combine(argmax_links(forward), swap_links(argmax_links(backward)))


LINK_HEURISTICS: dict[str, Callable[[AlignmentLinks, AlignmentLinks], AlignmentLinks]] = {
    "grow-diag": grow_diag,
    "grow-diag-final-and": grow_diag_final_and,
    "intersection": intersection,
    "union": union,
}
SYMMETRIZATIONS: dict[str, Symmetrization] = {
    "product": product_links,
    **{name: _from_link_heuristic(combine) for name, combine in LINK_HEURISTICS.items()},
    "none": lambda forward, _: argmax_links(forward),
}
