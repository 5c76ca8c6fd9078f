"""How often attention finds the decisive words of a document, where these are known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from jumok.errors import InputError

# The attention weights of all words (n,), the indices of the decisive words, and the start of each sentence,
# followed by the end of the last.
DocumentAttention = tuple[NDArray[np.float32], Sequence[int], Sequence[int]]


def attention_hit_rates(documents: Sequence[DocumentAttention]) -> dict[str, float]:
    """How often the words with the most weight are decisive, and how often random words would be.

    The top words of a document are the words with the most weight, as many as are decisive.

    - ``attention_hits``: the share of documents in which at least one top word is decisive;
    - ``attention_precision``: the share of top words that are decisive;
    - ``sentence_hits``: the share of documents whose sentence with the most weight has a decisive word.

    >>> rates = attention_hit_rates([(np.array([0.1, 0.2, 0.6, 0.1], np.float32), [2], [0, 2, 4])])
    >>> rates["attention_hits"], rates["attention_hits_by_chance"], rates["sentence_hits_by_chance"]
    (1.0, 0.25, 0.5)
    """
    if not documents:
        raise InputError("there are no documents; expected at least one")
    rows = np.array([_document_hits(*document) for document in documents])
    names = ("attention_hits", "attention_precision", "sentence_hits")
    rates = dict(zip((*names, *(f"{name}_by_chance" for name in names)), rows.mean(0).tolist(), strict=True))
    return {key: rates[key] for name in names for key in (name, f"{name}_by_chance")}


def _document_hits(
    weights: NDArray[np.float32], decisive: Sequence[int], sentence_bounds: Sequence[int]
) -> tuple[float, ...]:
    num_words, decisive_words = len(weights), set(decisive)
    if not decisive_words or max(decisive_words) >= num_words:
        raise InputError(
            f"the decisive words are {sorted(decisive_words)}; expected one or more below {num_words}, the "
            "number of words"
        )
    num_decisive = len(decisive_words)
    top_words = set(np.argsort(-weights, kind="stable")[:num_decisive].tolist())
    sentence_weights = np.add.reduceat(weights, list(sentence_bounds[:-1]))
    is_decisive = [any(start <= word < end for word in decisive_words) for start, end in pairwise(sentence_bounds)]
    random_miss = comb(num_words - num_decisive, num_decisive) / comb(num_words, num_decisive)
    return (
        float(bool(top_words & decisive_words)),
        len(top_words & decisive_words) / num_decisive,
        float(is_decisive[int(sentence_weights.argmax())]),
        1 - random_miss,
        num_decisive / num_words,
        sum(is_decisive) / len(is_decisive),
    )
