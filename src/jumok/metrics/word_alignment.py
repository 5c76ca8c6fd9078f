"""Word alignment: links from attention weights, and their alignment error rate.

A map ``(Q, K)`` has a row for each target word and a column for each source word. A link is a pair (source
word, target word) of indices from 0, as in the Pharaoh format: ``0-0 1-2``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from jumok.data.readers.word_alignments import AlignmentLinks, GoldAlignment
from jumok.errors import InputError


def pool_to_words(
    weights: Tensor, target_word_ids: Sequence[int | None], source_word_ids: Sequence[int | None]
) -> Tensor:
    """Pool the map ``(…, Q, K)`` of pieces to a map of words.

    ``target_word_ids`` and ``source_word_ids`` give the index of the word of each piece, or None if it
    belongs to no word (EOS), like ``word_ids`` of a tokenizer.

    The weights of the pieces of a source word are **summed**: a row is a distribution over source pieces, and
    attention to any piece of a word is attention to the word. The rows of the pieces of a target word are
    **averaged**: each piece is a decoding step with its own distribution, and the mean of distributions is a
    distribution. (Which piece is the most informative differs between models; the mean includes all.) Rows
    therefore still sum to 1, minus the weight of pieces of no word.

    >>> import torch
    >>> from jumok.metrics.word_alignment import pool_to_words
    >>> weights = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
    >>> pool_to_words(weights, target_word_ids=[0, 0], source_word_ids=[0, 0, 1])
    tensor([[0.5000, 0.5000]])
    """
    if weights.shape[-2:] != (len(target_word_ids), len(source_word_ids)):
        raise InputError(
            f"the weights have shape {tuple(weights.shape)}, and there are {len(target_word_ids)} target "
            f"and {len(source_word_ids)} source pieces; expected one row per target piece and one column "
            "per source piece"
        )
    rows, columns = _word_membership(target_word_ids, weights), _word_membership(source_word_ids, weights)
    rows = rows / rows.sum(0).clamp(min=1)  # zeros for a word without pieces
    return rows.T @ weights @ columns


def argmax_links(weights: Tensor, *, min_weight: float = 0.0) -> AlignmentLinks:
    """Link each target word to the source word with the largest weight, if that is at least ``min_weight``.

    The first of several equal weights counts. A row of zeros has no link.

    >>> import torch
    >>> from jumok.metrics.word_alignment import argmax_links
    >>> sorted(argmax_links(torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.0, 0.0]])))
    [(0, 0), (1, 1)]
    """
    _check_map(weights)
    if not weights.shape[1]:
        return frozenset()
    max_weights, sources = (x.tolist() for x in weights.max(dim=1))
    return frozenset(
        (source, target)
        for target, (source, weight) in enumerate(zip(sources, max_weights, strict=True))
        if weight > 0 and weight >= min_weight
    )


def mutual_argmax_links(weights: Tensor) -> AlignmentLinks:
    """Link pairs with the largest weight of both the row and the column: few, but precise.

    For two models, one per direction, use ``argmax_links(forward) & swap_links(argmax_links(backward))``.
    """
    _check_map(weights)
    return argmax_links(weights) & swap_links(argmax_links(weights.T))


def swap_links(links: AlignmentLinks) -> AlignmentLinks:
    """Swap source and target."""
    return frozenset((target, source) for source, target in links)


def format_links(links: AlignmentLinks) -> str:
    """Format links in the Pharaoh format, sorted by source word.

    >>> format_links(frozenset({(1, 2), (0, 0)}))
    '0-0 1-2'
    """
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


@dataclass(frozen=True)
class AlignmentScore:
    """Scores of links against gold links, over a whole test set (Och & Ney 2003)."""

    error_rate: float
    precision: float
    recall: float
    f1: float
    num_links: int  # predicted
    num_sure_links: int  # gold


def score_alignment(predicted: Iterable[AlignmentLinks], gold: Iterable[GoldAlignment]) -> AlignmentScore:
    """Score the links A of each sentence against sure gold links S and possible gold links P ⊇ S::

        precision = |A ∩ P| / |A|        error rate = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)
        recall    = |A ∩ S| / |S|        F1 = 2 · precision · recall / (precision + recall)

    Counts are summed over all sentences first. Precision is 1 if no link is predicted, and recall is 1 if
    there are no sure links.
    """
    predicted, gold = list(predicted), list(gold)
    if len(predicted) != len(gold) or not predicted:
        raise InputError(
            f"there are links of {len(predicted)} sentences and gold links of {len(gold)}; expected the "
            "same number of both, and at least one"
        )
    pairs = list(zip(predicted, gold, strict=True))
    a = sum(len(links) for links, _ in pairs)
    s = sum(len(alignment.sure) for _, alignment in pairs)
    a_and_s = sum(len(links & alignment.sure) for links, alignment in pairs)
    a_and_p = sum(len(links & alignment.possible) for links, alignment in pairs)
    precision = a_and_p / a if a else 1.0
    recall = a_and_s / s if s else 1.0
    return AlignmentScore(
        error_rate=1 - (a_and_s + a_and_p) / (a + s) if a + s else 0.0,
        precision=precision,
        recall=recall,
        f1=2 * precision * recall / (precision + recall) if precision + recall else 0.0,
        num_links=a,
        num_sure_links=s,
    )


def _word_membership(word_ids: Sequence[int | None], like: Tensor) -> Tensor:
    """``(pieces, words)``: 1 where a piece belongs to a word."""
    words = [word for word in word_ids if word is not None]
    if min(words, default=0) < 0:
        raise InputError(f"a word id is {min(words)}; expected 0 or more")
    membership = like.new_zeros(len(word_ids), max(words, default=-1) + 1)
    membership[[piece for piece, word in enumerate(word_ids) if word is not None], words] = 1
    return membership


def _check_map(weights: Tensor) -> None:
    if weights.dim() != 2:
        raise InputError(
            f"the weights have shape {tuple(weights.shape)}; expected one map, (target words, source words)"
        )
