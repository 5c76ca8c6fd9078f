"""Whether one system is better than another, or only luckier on this test set.

The test set is drawn anew many times, sentence by sentence with replacement, and every system gets the same
draws (paired bootstrap, Koehn 2004). Scores are made from sums over sentences, so only sums are drawn anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jumok.errors import InputError
from jumok.metrics.translation import DEFAULT_BLEU, TranslationMetric, TranslationScore

__all__ = ["SystemComparison", "bootstrap_translations"]


@dataclass(frozen=True)
class SystemComparison:
    """One system: its score, the interval that holds 95 % of the scores of the redrawn test sets, and p.

    ``p`` is how often a difference to the first system as large as the one found would come by chance, were
    the two equally good, in either direction; None for the first one itself.
    """

    name: str
    score: TranslationScore
    low: float
    high: float
    p_value: float | None


def bootstrap_translations(
    system_outputs: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    metric: TranslationMetric = DEFAULT_BLEU,
    num_samples: int = 1000,
    seed: int = 12345,
) -> list[SystemComparison]:
    """Compare the outputs of systems, by name, with those of the first.

    The differences on the redrawn test sets are shifted to mean 0, as if the systems were equally good; p is
    the share of them at least as far from 0 as the difference found, (1 + number) / (1 + samples). It is
    two-sided, and 1 for the same outputs twice. (sacreBLEU's own paired bootstrap counts one side: about half
    as much where systems differ, and 0.001 for the same outputs twice.)
    """
    if not system_outputs:
        raise InputError("no systems came; expected at least one: {name: its translations}")
    if num_samples < 1:
        raise InputError(f"samples={num_samples} came; expected at least 1 (1000 is usual)")
    statistics = {
        name: metric.sentence_statistics(outputs, references) for name, outputs in system_outputs.items()
    }
    scores = {name: metric.score(outputs, references) for name, outputs in system_outputs.items()}

    side_by_side = np.concatenate(list(statistics.values()), axis=1)
    widths = np.cumsum([rows.shape[1] for rows in statistics.values()])[:-1]
    random, sentences = np.random.default_rng(seed), len(references)
    # How often each sentence is in a draw is all that matters: a row of numbers that add up to the test set.
    draws = (random.multinomial(sentences, np.full(sentences, 1 / sentences)) for _ in range(num_samples))
    sums = np.stack([draw @ side_by_side for draw in draws])
    redrawn = dict(
        zip(system_outputs, map(metric.scores_from_sums, np.split(sums, widths, axis=1)), strict=True)
    )

    first = next(iter(system_outputs))
    compared = []
    for name, values in redrawn.items():
        p = None
        if name != first:
            difference = values - redrawn[first]
            found = abs(scores[name].value - scores[first].value)
            beyond = np.abs(difference - difference.mean()) >= found - 1e-9
            p = (1 + int(beyond.sum())) / (1 + num_samples)
        low, high = np.percentile(values, [2.5, 97.5]).tolist()
        compared.append(SystemComparison(name, scores[name], low, high, p))
    return compared
