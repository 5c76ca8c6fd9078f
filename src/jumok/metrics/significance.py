"""Whether one system is better than another, or only luckier on this test set.

The test set is drawn anew many times, sentence by sentence with replacement, and every system gets the same
draws (paired bootstrap, Koehn 2004). Scores are made from sums over sentences, so only sums are drawn anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jumok.errors import InputError
from jumok.metrics.translation import PLAIN_BLEU, Metric, Score

__all__ = ["Compared", "paired_bootstrap"]


@dataclass(frozen=True)
class Compared:
    """One system: its score, the interval that holds 95 % of the scores of the redrawn test sets, and p.

    ``p`` is how often a difference to the first system as large as the one found would come by chance, were
    the two equally good, in either direction; None for the first one itself.
    """

    name: str
    score: Score
    low: float
    high: float
    p: float | None


def paired_bootstrap(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    metric: Metric = PLAIN_BLEU,
    samples: int = 1000,
    seed: int = 12345,
) -> list[Compared]:
    """Compare the outputs of systems, by name, with those of the first.

    The differences on the redrawn test sets are shifted to mean 0, as if the systems were equally good; p is
    the share of them at least as far from 0 as the difference found, (1 + number) / (1 + samples). It is
    two-sided, and 1 for the same outputs twice. (sacreBLEU's own paired bootstrap counts one side: about half
    as much where systems differ, and 0.001 for the same outputs twice.)
    """
    if not systems:
        raise InputError("no systems came; expected at least one: {name: its translations}")
    if samples < 1:
        raise InputError(f"samples={samples} came; expected at least 1 (1000 is usual)")
    statistics = {name: metric.statistics(outputs, references) for name, outputs in systems.items()}
    scores = {name: metric.score(outputs, references) for name, outputs in systems.items()}

    side_by_side = np.concatenate(list(statistics.values()), axis=1)
    widths = np.cumsum([rows.shape[1] for rows in statistics.values()])[:-1]
    random, sentences = np.random.default_rng(seed), len(references)
    # How often each sentence is in a draw is all that matters: a row of numbers that add up to the test set.
    draws = (random.multinomial(sentences, np.full(sentences, 1 / sentences)) for _ in range(samples))
    sums = np.stack([draw @ side_by_side for draw in draws])
    redrawn = dict(zip(systems, map(metric.values, np.split(sums, widths, axis=1)), strict=True))

    first = next(iter(systems))
    compared = []
    for name, values in redrawn.items():
        p = None
        if name != first:
            difference = values - redrawn[first]
            found = abs(scores[name].value - scores[first].value)
            beyond = np.abs(difference - difference.mean()) >= found - 1e-9
            p = (1 + int(beyond.sum())) / (1 + samples)
        low, high = np.percentile(values, [2.5, 97.5]).tolist()
        compared.append(Compared(name, scores[name], low, high, p))
    return compared
