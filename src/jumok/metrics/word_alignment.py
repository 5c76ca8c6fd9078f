"""Which word belongs to which: from attention weights to links, and how good these are.

A map has a row for each target word and a column for each source word, ``(Q, K)``. A link is a pair (source
word, target word), both counted from 0, the way the Pharaoh format writes them: ``0-0 1-2``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from jumok.data.readers.word_alignments import AlignmentLinks, GoldAlignment
from jumok.errors import InputError

__all__ = [
    "AlignmentLinks",
    "AlignmentScore",
    "argmax_links",
    "format_links",
    "mutual_argmax_links",
    "pool_to_words",
    "score_alignment",
    "swap_links",
    "threshold_links",
]


def pool_to_words(
    weights: Tensor, target_word_ids: Sequence[int | None], source_word_ids: Sequence[int | None]
) -> Tensor:
    """The map ``(…, Q, K)`` of pieces as a map of words.

    ``target_word_ids`` and ``source_word_ids`` tell of each piece the number of its word, None if it belongs to none (EOS), as
    ``word_ids`` of a tokeniser does.

    The pieces of a source word are **added up**: a row is a distribution over source pieces, and what goes to
    any piece of a word goes to the word. The pieces of a target word are **averaged**: each is a step of its
    own with a distribution of its own, and the mean of distributions is one again. (The first piece alone
    decides much of the word, but which piece tells most differs from model to model; the mean leaves none
    out.) So rows still add up to 1, less what went to pieces of no word.

    >>> import torch
    >>> from jumok.metrics.word_alignment import pool_to_words
    >>> weights = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
    >>> pool_to_words(weights, target_word_ids=[0, 0], source_word_ids=[0, 0, 1])
    tensor([[0.5000, 0.5000]])
    """
    if weights.shape[-2:] != (len(target_word_ids), len(source_word_ids)):
        raise InputError(
            f"weights of shape {tuple(weights.shape)} came with {len(target_word_ids)} target and {len(source_word_ids)} "
            "source pieces; expected a row for each of the former and a column for each of the latter"
        )
    rows, columns = _word_membership(target_word_ids, weights), _word_membership(source_word_ids, weights)
    rows = rows / rows.sum(0).clamp(min=1)  # a word without pieces gets zeros
    return rows.T @ weights @ columns


def argmax_links(weights: Tensor, *, min_weight: float = 0.0) -> AlignmentLinks:
    """For each target word the source word with the most weight, if that is ``min_weight`` so much.

    Of equals, it is the first; a row of zeros has none.

    >>> import torch
    >>> from jumok.metrics.word_alignment import argmax_links
    >>> sorted(argmax_links(torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.0, 0.0]])))
    [(0, 0), (1, 1)]
    """
    _check_map(weights)
    if not weights.shape[1]:
        return frozenset()
    most, where = (x.tolist() for x in weights.max(dim=1))
    return frozenset(
        (source, target)
        for target, (source, weight) in enumerate(zip(where, most, strict=True))
        if weight > 0 and weight >= min_weight
    )


def threshold_links(weights: Tensor, threshold: float) -> AlignmentLinks:
    """Every pair with a weight of at least ``threshold``: a word may have several links, or none."""
    _check_map(weights)
    return frozenset((source, target) for target, source in (weights >= threshold).nonzero().tolist())


def mutual_argmax_links(weights: Tensor) -> AlignmentLinks:
    """The pairs that are the strongest both ways: for the target word, and for the source word. Few but sure.

    For two models, one a direction: ``argmax_links(forth) & swap_links(argmax_links(back))``.
    """
    _check_map(weights)
    return argmax_links(weights) & swap_links(argmax_links(weights.T))


def swap_links(links: AlignmentLinks) -> AlignmentLinks:
    """The same links, told from the other side."""
    return frozenset((target, source) for source, target in links)


def format_links(links: AlignmentLinks) -> str:
    """In the Pharaoh format, by source word.

    >>> format_links(frozenset({(1, 2), (0, 0)}))
    '0-0 1-2'
    """
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


@dataclass(frozen=True)
class AlignmentScore:
    """How links compare with gold ones, over a whole test set (Och & Ney 2003)."""

    error_rate: float
    precision: float
    recall: float
    f1: float
    num_links: int  # links
    num_sure_links: int  # gold links


def score_alignment(predicted: Iterable[AlignmentLinks], gold: Iterable[GoldAlignment]) -> AlignmentScore:
    """Of links A, sentence by sentence, against sure links S and possible ones P (S among them)::

        precision = |A ∩ P| / |A|        error rate = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)
        recall    = |A ∩ S| / |S|        F1 = 2 · precision · recall / (precision + recall)

    Numbers are summed over all sentences first. Where there is nothing to divide by, nothing is wrong:
    precision is 1 if no link was found, recall 1 if there was none to find.
    """
    predicted, gold = list(predicted), list(gold)
    if len(predicted) != len(gold) or not predicted:
        raise InputError(
            f"links of {len(predicted)} sentences and gold links of {len(gold)} came; expected as many "
            "of the one as of the other, and at least one"
        )
    pairs = list(zip(predicted, gold, strict=True))
    a = sum(len(links) for links, _ in pairs)
    s = sum(len(right.sure) for _, right in pairs)
    a_and_s = sum(len(links & right.sure) for links, right in pairs)
    a_and_p = sum(len(links & right.possible) for links, right in pairs)
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
    """``(pieces, word_ids)``, 1 where a piece belongs to a word."""
    numbers = [word for word in word_ids if word is not None]
    if min(numbers, default=0) < 0:
        raise InputError(f"words are counted from 0; {min(numbers)} came")
    members = like.new_zeros(len(word_ids), max(numbers, default=-1) + 1)
    members[[piece for piece, word in enumerate(word_ids) if word is not None], numbers] = 1
    return members


def _check_map(weights: Tensor) -> None:
    if weights.dim() != 2:
        raise InputError(
            f"weights of shape {tuple(weights.shape)} came; expected (target words, source words), one map"
        )
