"""Two directions' links made one, by hand and against the procedure as Koehn writes it down."""

import random

import pytest
import torch

from jumok.data.readers.word_alignments import AlignmentLinks
from jumok.metrics.symmetrization import (
    LINK_HEURISTICS,
    SYMMETRIZATIONS,
    grow_diag,
    grow_diag_final_and,
    intersection,
    product_links,
    union,
)
from jumok.metrics.word_alignment import argmax_links, swap_links


def drawn(picture: str) -> AlignmentLinks:
    """A row a source word, a column a target word, # a link."""
    rows = picture.split()
    return frozenset((i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell == "#")


def test_intersection_and_union() -> None:
    forth, back = drawn("#.. ..# #.."), drawn("#.. .## ...")
    assert intersection(forth, back) == drawn("#.. ..# ...")
    assert union(forth, back) == drawn("#.. .## #..")


@pytest.mark.parametrize(
    ("forth", "back", "grown"),
    [
        # The picture of the module: a neighbour with a new target word comes in, a link far off does not.
        ("#...# ..#..", "#.... .##..", "#.... .##.."),
        # Across a corner.
        ("#.. .#. ...", "#.. ... ...", "#.. .#. ..."),
        # One that was added has neighbours of its own, whether it stands behind its neighbour or before.
        ("#... .#.. ..#. ...#", "#... .... .... ....", "#... .#.. ..#. ...#"),
        ("#... .#.. ..#. ...#", ".... .... .... ...#", "#... .#.. ..#. ...#"),
        # Both its words have links already: it stays out, though it is a neighbour.
        ("## ##", "#. .#", "#. .#"),
        # Nothing in common: nothing to grow from.
        ("#. ..", ".. .#", ".. .."),
    ],
)
def test_links_grow_from_the_intersection(forth: str, back: str, grown: str) -> None:
    assert grow_diag(drawn(forth), drawn(back)) == drawn(grown)


def test_the_first_neighbour_in_order_wins() -> None:
    # Source word 1 has no link, and could get one to target word 0 (below) or 2 (below, across).
    assert grow_diag(drawn("##.. #.#."), drawn("#... ....")) == drawn("##.. #.#.")
    assert grow_diag(drawn(".#. #.#"), drawn(".#. ...")) == drawn(".#. #.#")  # both: each has a new target
    assert grow_diag(drawn("### #.#"), drawn("### ...")) == drawn("### #..")


def test_final_and_links_words_unlinked_on_both_sides() -> None:
    forth, back = drawn("#.... ..... ..#.. ....."), drawn("#.... ..... ...#. ....#")
    assert grow_diag(forth, back) == drawn("#.... ..... ..... .....")
    # The first direction goes first, so (2, 2) shuts out (2, 3); (3, 4) has two new words.
    assert grow_diag_final_and(forth, back) == drawn("#.... ..... ..#.. ....#")
    assert grow_diag_final_and(back, forth) == drawn("#.... ..... ...#. ....#")


def literal(forth: AlignmentLinks, back: AlignmentLinks, sizes: tuple[int, int], *, final: bool) -> AlignmentLinks:
    """Koehn's pseudo-code of grow-diag(-final-and), cell by cell over the whole grid."""
    e, f = sizes
    alignment = {(i, j) for i in range(e) for j in range(f) if (i, j) in forth and (i, j) in back}

    def aligned_e(i: int) -> bool:
        return any((i, j) in alignment for j in range(f))

    def aligned_f(j: int) -> bool:
        return any((i, j) in alignment for i in range(e))

    while True:
        before = len(alignment)
        for i in range(e):
            for j in range(f):
                if (i, j) not in alignment:
                    continue
                for a, b in ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)):
                    new = (i + a, j + b)
                    if not (0 <= new[0] < e and 0 <= new[1] < f):
                        continue
                    if (not aligned_e(new[0]) or not aligned_f(new[1])) and (new in forth or new in back):
                        alignment.add(new)
        if len(alignment) == before:
            break
    for links in (forth, back) if final else ():
        for i in range(e):
            for j in range(f):
                if not aligned_e(i) and not aligned_f(j) and (i, j) in links:
                    alignment.add((i, j))
    return frozenset(alignment)


def test_grow_diag_equals_its_pseudocode() -> None:
    chance = random.Random(7)
    differ = 0
    for _ in range(400):
        sizes = chance.choice([(3, 5), (5, 3), (7, 7), (1, 4), (11, 13)])
        cells = [(i, j) for i in range(sizes[0]) for j in range(sizes[1])]
        forth, back = (frozenset(chance.sample(cells, chance.randint(0, len(cells) // 2))) for _ in range(2))
        grown, final = grow_diag(forth, back), grow_diag_final_and(forth, back)
        assert grown == literal(forth, back, sizes, final=False)
        assert final == literal(forth, back, sizes, final=True)
        assert forth & back <= grown <= final <= forth | back
        differ += len({forth & back, grown, final, forth | back}) == 4
    assert differ > 20  # the cases tell the four apart


def test_symmetrized_maps_resolve_ambiguities() -> None:
    # Three target words, two source words. Forth is in doubt about word 1, and back knows it.
    forth = torch.tensor([[0.9, 0.1], [0.5, 0.4], [0.4, 0.4]])
    back = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    assert argmax_links(forth) == {(0, 0), (0, 1), (0, 2)}
    assert product_links(forth, back) == {(0, 0), (1, 1)}
    # One that is sure outweighs one that is not: 0.9 · 0.3 < 0.1 · 3 · 0.9 …
    assert product_links(torch.tensor([[0.6, 0.4]]), torch.tensor([[0.2], [0.9]])) == {(1, 0)}
    # … and where one says never, it is never.
    assert product_links(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0], [0.0]])) == frozenset()


def test_all_methods_by_name() -> None:
    torch.manual_seed(2)
    forth, back = torch.rand(7, 5), torch.rand(5, 7)
    one, other = argmax_links(forth), swap_links(argmax_links(back))
    assert set(SYMMETRIZATIONS) == {"product", "none", *LINK_HEURISTICS}
    for name, combine in LINK_HEURISTICS.items():
        assert SYMMETRIZATIONS[name](forth, back) == combine(one, other)
    assert SYMMETRIZATIONS["none"](forth, back) == one
    assert (
        SYMMETRIZATIONS["product"](forth, back) == product_links(forth, back) == swap_links(product_links(back, forth))
    )
    same = torch.eye(4)
    for symmetry in SYMMETRIZATIONS.values():
        assert symmetry(same, same) == drawn("#... .#.. ..#. ...#")
        assert symmetry(torch.zeros(0, 3), torch.zeros(3, 0)) == frozenset()
