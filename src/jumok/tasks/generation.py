"""Text generation: the search that the options of a task select, and attention maps of whole words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jumok import decoding
from jumok.batches.tokens import Tokens
from jumok.decoding import CoverageScorer, Hypothesis, LengthLimit
from jumok.metrics import word_alignment
from jumok.tasks.options import GenerationOptions


def generate(
    model: Any,
    source: Tokens,
    options: GenerationOptions,
    *,
    beam_size: int,
    length_penalty: float,
    max_length: LengthLimit,
    generator: torch.Generator,
    coverage: CoverageScorer | None = None,
) -> list[list[Hypothesis]]:
    """Search for the best hypotheses of each source, or sample one.

    ``beam_size`` is that of the recipe; ``options`` may override it.
    """
    if options.sample:
        samples = decoding.sample(
            model,
            source,
            temperature=options.temperature,
            top_k=options.top_k or None,
            top_p=options.top_p if options.top_p < 1 else None,
            generator=generator,
            max_length=max_length,
        )
        return [[hypothesis] for hypothesis in samples]
    beam_size = beam_size if options.beam_size is None else options.beam_size
    if beam_size == 1 and options.n_best == 1:
        greedy = decoding.greedy_search(model, source, max_length=max_length)
        return [[hypothesis] for hypothesis in greedy]
    return decoding.beam_search(
        model,
        source,
        beam_size=max(beam_size, options.n_best),
        n_best=options.n_best,
        length_penalty=length_penalty,
        coverage=coverage,
        max_length=max_length,
    )


def merge_to_words(weights: Tensor, row_words: Sequence[int], column_words: Sequence[int]) -> Tensor:
    """Merge an attention map ``(Q, K)`` of tokens into one of words.

    ``row_words`` and ``column_words`` are the word of each token; -1 is a token that belongs to no word.
    """
    rows, columns = ([None if word < 0 else word for word in words] for words in (row_words, column_words))
    return word_alignment.pool_to_words(weights, rows, columns)
