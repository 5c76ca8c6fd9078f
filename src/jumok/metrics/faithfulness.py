"""Does the highlight mean anything? Take the most attended words away, and as many random ones, and see.

A picture of attention suggests that some words decided. Two questions put that to the test (DeYoung et al.
2020, "ERASER"), each about the probability of the class that was said of the whole text::

    the film was so boring that …      bad 0.95

    comprehensiveness, without them:   the film was so that …   0.41    falls by 0.54: they were needed
    sufficiency, only they:            boring                   0.91    falls by 0.04: they are enough

Any text says less when words are missing. So each stands beside the same number of words drawn at random:
what counts is *attended − random*, above 0 when words are taken away, below 0 when only they are kept. All of
it is asked at several shares of the words, and the mean over these is the "area over the perturbation curve"
(AOPC; the paper's sum also counts the share 0, where nothing falls, and so divides by one more).

Where a model is very sure, a probability hardly moves while much changes behind it: 0.99999 to 0.999. So the
fall is told in log-odds, log(p / (1 − p)), too: there it is 4.6.

A *place* in the text is taken away: the same word elsewhere stays. At least one word is taken and one left,
as nobody knows what a model ought to say of nothing; texts of less than two words are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jumok.errors import InputError
from jumok.metrics.bootstrap import bootstrap_models

__all__ = [
    "AttendedContrast",
    "Faithfulness",
    "FaithfulnessAtShare",
    "PredictionDrop",
    "measure_faithfulness",
]

TextSentences = Sequence[Sequence[str]]  # a text: its sentences, each of words
PredictProbabilities = Callable[[Sequence[TextSentences]], NDArray[np.float64]]  # (N, C) of N texts

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # as in the paper
VERDICT_SHARE = 0.1  # the share that the verdict speaks of
NUM_DRAWS = 5  # of random words, for each text
TEXTS_PER_CHUNK = 32  # texts whose versions are read in one go
PROBABILITY_EPSILON = (
    1e-6  # probabilities are moved so far from 0 and 1 before log-odds are taken: 13.8 at most
)
CONFIDENT_PROBABILITY = 0.99
MIN_TEXTS = 20  # texts that a verdict is given on
MIN_DIFFERENCE, MIN_LOG_ODDS_DIFFERENCE = (
    0.05,
    0.5,
)  # a smaller difference, of probability and log-odds, is of no use


@dataclass(frozen=True)
class AttendedContrast:
    """Means over the texts; and the interval of 95 % of their difference, by redrawn texts."""

    attended: float
    random: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class PredictionDrop:
    """How far the class that was said falls."""

    probability: AttendedContrast
    log_odds: AttendedContrast


@dataclass(frozen=True)
class FaithfulnessAtShare:
    """With this share of the words, ``mean_words`` of them on average, taken away and kept alone."""

    share: float
    mean_words: float
    comprehensiveness: PredictionDrop
    sufficiency: PredictionDrop


@dataclass(frozen=True)
class Faithfulness:
    """What taking words away came to; the two ``PredictionDrop`` here are the means over the shares."""

    num_texts: int
    num_skipped: int  # of less than two words
    num_draws: int
    probability: float  # of the class said of the whole text: the mean
    confident_share: float  # the share of texts of which it is above 0.99
    comprehensiveness: PredictionDrop
    sufficiency: PredictionDrop
    shares: tuple[FaithfulnessAtShare, ...]

    @property
    def verdict(self) -> str:
        """Whether to trust the picture, in a sentence or two."""
        told = min(self.shares, key=lambda one: abs(one.share - VERDICT_SHARE))
        gone, odds = told.comprehensiveness.probability, told.comprehensiveness.log_odds
        alone = told.sufficiency.probability
        digits = 2 if max(abs(gone.attended), abs(gone.random)) >= 0.095 else 3
        said = (
            f"Removing the {100 * told.share:g} % most attended words costs {gone.attended:.{digits}f} of "
            f"the probability, random ones {gone.random:.{digits}f}: {_interpret(self.num_texts, gone, odds)}."
        )
        if abs(gone.difference) < MIN_DIFFERENCE and self.confident_share > 0.5:
            said += (
                f" The model is sure of itself (above {CONFIDENT_PROBABILITY} for {100 * self.confident_share:.0f} % of the texts), and "
                f"that hides what words do; in log-odds it is {odds.attended:.2f} and {odds.random:.2f}."
            )
        left = self.probability - alone.attended, self.probability - alone.random
        return f"{said} Alone, they leave {left[0]:.2f} of {self.probability:.2f}, random ones {left[1]:.2f}."


def measure_faithfulness(
    texts: Sequence[TextSentences],
    weights: Sequence[ArrayLike],
    predict: PredictProbabilities,
    *,
    shares: Sequence[float] = SHARES,
    num_draws: int = NUM_DRAWS,
    seed: int = 1,
    on_progress: Callable[[int], object] | None = None,
) -> Faithfulness:
    """Take words away from texts, and see what becomes of the class that ``predict`` gives most to.

    ``weights[i]`` are those of all words of text i, ``(n,)``, or ``(hops, n)``, of which the mean counts. Of
    words with equal weight, chance decides which come first: their order would favour how a text begins.
    Chance depends on the seed and on the number of a text, so that the same call gives the same result.
    ``predict`` never gets an empty text or sentence. ``on_progress`` is told how many texts were seen to.

    >>> def bag(texts):  # each "good" is worth 0.2
    ...     good = np.array([sum(text, []).count("good") for text in texts])
    ...     return np.stack([0.5 - 0.2 * good, 0.5 + 0.2 * good], axis=1)
    >>> found = measure_faithfulness([[["a", "good", "film"]]], [[0.1, 0.8, 0.1]], bag, shares=[0.1])
    >>> drop = found.shares[0].comprehensiveness.probability
    >>> round(drop.attended, 2), drop.random < 0.2
    (0.2, True)
    """
    if len(texts) != len(weights):
        raise InputError(f"{len(texts)} texts came with weights of {len(weights)}; each needs its own")
    if not shares or not all(0 < share < 1 for share in shares) or num_draws < 1:
        raise InputError(
            f"shares={list(shares)}, draws={num_draws}: shares lie between 0 and 1, and there is a draw"
        )
    given = [
        _PerturbedText(number, *pair, num_draws, seed)
        for number, pair in enumerate(zip(texts, weights, strict=True))
    ]
    usable = [text for text in given if text.length > 1]
    if not usable:
        raise InputError(f"of {len(texts)} texts, none has two words: there is nothing to take away")
    found = []
    for begin in range(0, len(usable), TEXTS_PER_CHUNK):
        found += _predict_versions(usable[begin : begin + TEXTS_PER_CHUNK], predict, shares)
        if on_progress is not None:
            on_progress(min(begin + TEXTS_PER_CHUNK, len(usable)))
    whole = np.array([before for before, _ in found])  # (N,)
    after = np.array([rest for _, rest in found])  # (N, 2, shares, 1 + draws)
    before = whole[:, None, None, None]
    drops = before - after, _log_odds(before) - _log_odds(after)
    words = [float(np.mean([_count_words(text.length, share) for text in usable])) for share in shares]
    return Faithfulness(
        len(usable),
        len(given) - len(usable),
        num_draws,
        float(whole.mean()),
        float((whole > CONFIDENT_PROBABILITY).mean()),
        _make_drop([one[:, 0].mean(1) for one in drops]),
        _make_drop([one[:, 1].mean(1) for one in drops]),
        tuple(
            FaithfulnessAtShare(
                float(share), words[at], *(_make_drop([one[:, kind, at] for one in drops]) for kind in (0, 1))
            )
            for at, share in enumerate(shares)
        ),
    )


class _PerturbedText:
    """One text, and the orders in which its words go: by their weight, and by chance."""

    def __init__(
        self, index: int, words: TextSentences, weights: ArrayLike, num_draws: int, seed: int
    ) -> None:
        if isinstance(words, str) or any(isinstance(one, str) for one in words):
            raise InputError(f"text {index + 1} is no list of sentences, each a list of words")
        self.sentences = [list(one) for one in words if len(one)]
        self.length = sum(map(len, self.sentences))
        each = np.atleast_2d(np.asarray(weights, np.float64))
        if each.ndim != 2 or not len(each) or each.shape[1] != self.length or not np.isfinite(each).all():
            raise InputError(
                f"text {index + 1} has {self.length} words, and weights of shape {np.shape(weights)}; "
                "expected a finite one for each word, or a row of these for each hop"
            )
        chance = np.random.default_rng([seed, index]).random((1 + num_draws, self.length))
        attended = np.lexsort((chance[0], -each.mean(0)))
        self.orders = [attended, *np.argsort(chance[1:], axis=1)]

    def keep_words(self, keep_mask: NDArray[np.bool_]) -> list[list[str]]:
        """The text with these words; sentences of which nothing is left are not there."""
        flags = iter(keep_mask.tolist())
        cut = [list(compress(one, islice(flags, len(one)))) for one in self.sentences]
        return [one for one in cut if one]

    def versions(self, shares: Sequence[float]) -> Iterator[NDArray[np.bool_]]:
        """Which words are kept, 2 × shares × orders times: without some words first, then only these."""
        for alone in (False, True):
            for share in shares:
                for order in self.orders:
                    kept = np.full(self.length, not alone)
                    kept[order[: _count_words(self.length, share)]] = alone
                    yield kept


def _predict_versions(
    texts: Sequence[_PerturbedText], predict: PredictProbabilities, shares: Sequence[float]
) -> list[tuple[float, NDArray[np.float64]]]:
    """The probability of the class said of each text, and of the same class for all its versions."""
    asked: list[list[list[str]]] = []
    places = []  # of each text and its versions; of a short text, many are the same and read once
    for text in texts:
        seen: dict[bytes, int] = {}
        mine = []
        for kept in (np.ones(text.length, np.bool_), *text.versions(shares)):
            key = kept.tobytes()
            if key not in seen:
                seen[key] = len(asked)
                asked.append(text.keep_words(kept))
            mine.append(seen[key])
        places.append(mine)
    told = _check_probabilities(np.asarray(predict(asked), np.float64), len(asked))
    found = []
    for text, (whole, *rest) in zip(texts, places, strict=True):
        said = int(told[whole].argmax())
        found.append((float(told[whole, said]), told[rest, said].reshape(2, len(shares), len(text.orders))))
    return found


def _make_drop(scales: Sequence[NDArray[np.float64]]) -> PredictionDrop:
    """From what each text lost, ``(N, 1 + num_draws)``, in probability and in log-odds."""
    return PredictionDrop(*map(_make_contrast, scales))


def _make_contrast(drops: NDArray[np.float64]) -> AttendedContrast:
    attended, random = drops[:, 0], drops[:, 1:].mean(1)
    apart = attended - random
    [found] = bootstrap_models({"": lambda some: float(apart[some].mean())}, len(apart))
    return AttendedContrast(float(attended.mean()), float(random.mean()), found.value, found.low, found.high)


def _interpret(num_texts: int, probability: AttendedContrast, log_odds: AttendedContrast) -> str:
    if num_texts < MIN_TEXTS:
        return f"too few texts ({num_texts}) to tell"
    if probability.low > 0 and probability.difference >= MIN_DIFFERENCE:
        return "the highlight means something"
    if log_odds.low > 0 and log_odds.difference >= MIN_LOG_ODDS_DIFFERENCE:
        return "little, but the log-odds fall far more than by chance: the highlight means something"
    if probability.low > 0 or log_odds.low > 0:
        return "more than random ones, but hardly: the picture is a hint at best"
    if probability.high < 0:
        return "less than random ones: the picture misleads"
    if probability.high >= MIN_DIFFERENCE:
        return f"the difference may be anything from {probability.low:.2f} to {probability.high:.2f}: take more texts"
    return "no more than random ones: do not trust the picture"


def _count_words(length: int, share: float) -> int:
    """How many words are meant: one at least, and never all."""
    return min(max(1, int(share * length + 0.5)), length - 1)


def _log_odds(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    inside = np.clip(probability, PROBABILITY_EPSILON, 1 - PROBABILITY_EPSILON)
    return np.asarray(np.log(inside) - np.log1p(-inside))


def _check_probabilities(probabilities: NDArray[np.float64], num_texts: int) -> NDArray[np.float64]:
    if probabilities.ndim != 2 or len(probabilities) != num_texts or probabilities.shape[1] < 2:
        raise InputError(
            f"probabilities of shape {probabilities.shape} came for {num_texts} texts; expected (texts, classes)"
        )
    if not (
        np.isfinite(probabilities).all()
        and (probabilities >= 0).all()
        and np.allclose(probabilities.sum(1), 1, atol=1e-3)
    ):
        raise InputError(
            "what came are no probabilities: the classes of each text have to add up to 1, none below 0"
        )
    return probabilities
