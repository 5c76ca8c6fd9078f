"""Links of two directions made one: what both found, what either found, and what lies between.

A model that says the target has a map with a row for each target word, and links it to one source word; one
that says the source has the opposite. Neither can be right where a word belongs to several.

:func:`product_links` makes one of the two maps: where one model is in doubt, the other may know. The classical
ways know only the links of each, (source word, target word), and none of the doubt::

    forth        back         intersection  grow-diag    union
    ■ · · · ■    ■ · · · ·    ■ · · · ·     ■ · · · ·    ■ · · · ■
    · · ■ · ·    · ■ ■ · ·    · · ■ · ·     · ■ ■ · ·    · ■ ■ · ·

Rows are source words here. Growing takes in the link that stands beside one that both found and gives a
target word its first link; the one at the right has no neighbour.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from jumok.data.readers.word_alignments import AlignmentLinks
from jumok.metrics.word_alignment import argmax_links, mutual_argmax_links, swap_links

__all__ = [
    "LINK_HEURISTICS",
    "SYMMETRIZATIONS",
    "Symmetrization",
    "grow_diag",
    "grow_diag_final_and",
    "intersection",
    "product_links",
    "union",
]

# Makes links of two maps: target words by source words, and source words by target words.
Symmetrization = Callable[[Tensor, Tensor], AlignmentLinks]

# Beside, above and below first, then across the corners, as Koehn lists them: it decides who comes first.
NEIGHBORS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def product_links(forward: Tensor, backward: Tensor) -> AlignmentLinks:
    """The pairs that are the strongest both ways in the product of the two maps.

    ``forward`` is ``(target words, source words)``, ``backward`` the opposite.

    >>> import torch
    >>> from jumok.metrics.symmetrization import product_links
    >>> forth = torch.tensor([[0.6, 0.4], [0.6, 0.4]])  # both target words rather look at the first
    >>> back = torch.tensor([[0.9, 0.1], [0.1, 0.9]])  # the other model knows better
    >>> sorted(product_links(forth, back))
    [(0, 0), (1, 1)]
    """
    return mutual_argmax_links(forward * backward.T)


def intersection(forward: AlignmentLinks, backward: AlignmentLinks) -> AlignmentLinks:
    """The links that both found: few but sure."""
    return forward & backward


def union(forward: AlignmentLinks, backward: AlignmentLinks) -> AlignmentLinks:
    """The links that either found: many, not all of them right."""
    return forward | backward


def grow_diag(forward: AlignmentLinks, backward: AlignmentLinks) -> AlignmentLinks:
    """What both found, and from there neighbours that one found, as long as they link a word without links.

    A neighbour is one word on in either sentence or in both (Och & Ney 2003; Koehn's procedure, in his order:
    links are gone through by source word, then target word, again and again until none is added).

    >>> sorted(grow_diag(frozenset({(0, 0), (1, 1), (2, 1)}), frozenset({(0, 0), (1, 1)})))
    [(0, 0), (1, 1), (2, 1)]
    """
    either = forward | backward
    links = set(forward & backward)
    sources, targets = {source for source, _ in links}, {target for _, target in links}
    order = sorted(either)  # all that can ever be a link
    grown = True
    while grown:
        grown = False
        for source, target in order:
            if (source, target) not in links:
                continue
            for down, right in NEIGHBORS:
                one, other = near = (source + down, target + right)
                if near in either and near not in links and (one not in sources or other not in targets):
                    links.add(near)
                    sources.add(one)
                    targets.add(other)
                    grown = True
    return frozenset(links)


def grow_diag_final_and(forward: AlignmentLinks, backward: AlignmentLinks) -> AlignmentLinks:
    """The same, and then every link that one of the two found between words that both have none yet.

    >>> sorted(grow_diag_final_and(frozenset({(0, 0), (2, 5)}), frozenset({(0, 0), (2, 7)})))
    [(0, 0), (2, 5)]
    """
    links = set(grow_diag(forward, backward))
    sources, targets = {source for source, _ in links}, {target for _, target in links}
    for found in (forward, backward):
        for source, target in sorted(found):
            if source not in sources and target not in targets:
                links.add((source, target))
                sources.add(source)
                targets.add(target)
    return frozenset(links)


def _from_link_heuristic(
    combine: Callable[[AlignmentLinks, AlignmentLinks], AlignmentLinks],
) -> Symmetrization:
    return lambda forth, back: combine(argmax_links(forth), swap_links(argmax_links(back)))


LINK_HEURISTICS: dict[str, Callable[[AlignmentLinks, AlignmentLinks], AlignmentLinks]] = {
    "grow-diag": grow_diag,
    "grow-diag-final-and": grow_diag_final_and,
    "intersection": intersection,
    "union": union,
}
SYMMETRIZATIONS: dict[str, Symmetrization] = {
    "product": product_links,
    **{name: _from_link_heuristic(combine) for name, combine in LINK_HEURISTICS.items()},
    "none": lambda forth, _: argmax_links(forth),
}
