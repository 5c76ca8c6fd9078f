"""Does attention find what decides? For texts whose decisive words are known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError

__all__ = ["attention_hit_rates"]

DocumentAttention = tuple[NDArray[np.float32], Sequence[int], Sequence[int]]


def attention_hit_rates(documents: Sequence[DocumentAttention]) -> dict[str, float]:
    """How often the words that got most weight are decisive ones, and what blind choice would reach.

    A document is the weights of its words ``(n,)``, the numbers of those that decide, and the words at which
    its sentences begin and the last one ends. Of as many words as decide, those with most weight:

    - ``attention_hits``: the share of documents in which at least one of them decides;
    - ``attention_precision``: the share of them that decide;
    - ``sentence_hits``: the share of documents in which the sentence with most weight has a decisive word.

    >>> rates = attention_hit_rates([(np.array([0.1, 0.2, 0.6, 0.1], np.float32), [2], [0, 2, 4])])
    >>> rates["attention_hits"], rates["attention_hits_by_chance"], rates["sentence_hits_by_chance"]
    (1.0, 0.25, 0.5)
    """
    if not documents:
        raise InputError("no documents came; hits are a share of some")
    rows = np.array([_document_hits(*one) for one in documents])
    names = ("attention_hits", "attention_precision", "sentence_hits")
    rates = dict(zip((*names, *(f"{name}_by_chance" for name in names)), rows.mean(0).tolist(), strict=True))
    return {name: rates[name] for each in names for name in (each, f"{each}_by_chance")}


def _document_hits(
    weights: NDArray[np.float32], decisive: Sequence[int], sentence_bounds: Sequence[int]
) -> tuple[float, ...]:
    count, deciding = len(weights), set(decisive)
    if not deciding or max(deciding) >= count:
        raise InputError(f"{sorted(deciding)} came as decisive words of {count}; expected some of these")
    top = set(np.argsort(-weights, kind="stable")[: len(deciding)].tolist())
    sums = np.add.reduceat(weights, list(sentence_bounds[:-1]))
    held = [any(begin <= at < end for at in deciding) for begin, end in pairwise(sentence_bounds)]
    missed = comb(count - len(deciding), len(deciding)) / comb(count, len(deciding))
    return (
        float(bool(top & deciding)),
        len(top & deciding) / len(deciding),
        float(held[int(sums.argmax())]),
        1 - missed,
        len(deciding) / count,
        sum(held) / len(held),
    )
