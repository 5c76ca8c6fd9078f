"""Faithfulness of attention: remove the most attended words, or as many random words, and compare.

A highlighted text suggests that some words decided the prediction. Two measures test that (DeYoung et al.
2020,
"ERASER"). Both look at the probability of the class that was predicted for the complete text::

    the film was so boring that …         bad 0.95

    comprehensiveness, words removed:     the film was so that …   0.41    drops by 0.54: they were needed
    sufficiency, only these words kept:   boring                   0.91    drops by 0.04: they are sufficient

Any text loses information when words are removed. Each drop is therefore compared with the drop for the same
number of random words: *attended − random* should be above 0 for comprehensiveness and below 0 for
sufficiency. All of this is measured at several shares of the words. The mean over the shares is the "area
over the perturbation curve" (AOPC; the sum in the paper includes the share 0, where nothing drops, and so
divides by one more).

If a model is very confident, its probability hardly changes while its logits change a lot: 0.99999 to 0.999.
The drop is therefore also measured in log-odds, log(p / (1 − p)): in this example it is 4.6.

Words are removed by position: the same word elsewhere in the text stays. At least one word is removed and one
is kept, because the prediction for an empty text is meaningless. Texts of fewer than two words are skipped
and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jumok.errors import InputError
from jumok.metrics.bootstrap import bootstrap_models

TextSentences = Sequence[Sequence[str]]  # a text: sentences of words
PredictProbabilities = Callable[[Sequence[TextSentences]], NDArray[np.float64]]  # (N, C) of N texts

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # as in the paper
VERDICT_SHARE = 0.1  # the share that the verdict refers to
NUM_DRAWS = 5  # random draws of words for each text
TEXTS_PER_CHUNK = 32  # texts whose versions are predicted together
PROBABILITY_EPSILON = 1e-6  # probabilities are clipped to this distance from 0 and 1: log-odds of at most 13.8
CONFIDENT_PROBABILITY = 0.99
MIN_TEXTS = 20  # number of texts that a verdict needs
MIN_DIFFERENCE, MIN_LOG_ODDS_DIFFERENCE = 0.05, 0.5  # smaller differences are negligible


@dataclass(frozen=True)
class AttendedContrast:
    """Mean drops over the texts, and their difference with its 95 % confidence interval (bootstrap)."""

    attended: float
    random: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class PredictionDrop:
    """The drop of the predicted class."""

    probability: AttendedContrast
    log_odds: AttendedContrast


@dataclass(frozen=True)
class FaithfulnessAtShare:
    """The drops for this share of the words, which is ``mean_words`` words on average."""

    share: float
    mean_words: float
    comprehensiveness: PredictionDrop
    sufficiency: PredictionDrop


@dataclass(frozen=True)
class Faithfulness:
    """The result of :func:`measure_faithfulness`. The two drops of this class are means over the shares."""

    num_texts: int
    num_skipped: int  # texts of fewer than two words
    num_draws: int
    probability: float  # of the class predicted for the complete text: the mean
    confident_share: float  # the share of texts for which it is above 0.99
    comprehensiveness: PredictionDrop
    sufficiency: PredictionDrop
    shares: tuple[FaithfulnessAtShare, ...]

    @property
    def verdict(self) -> str:
        """Whether the highlight is faithful, in a few sentences."""
        result = min(self.shares, key=lambda at_share: abs(at_share.share - VERDICT_SHARE))
        removed, log_odds = result.comprehensiveness.probability, result.comprehensiveness.log_odds
        sufficiency = result.sufficiency.probability
        digits = 2 if max(abs(removed.attended), abs(removed.random)) >= 0.095 else 3
        verdict = (
            f"Removing the {100 * result.share:g} % most attended words lowers the probability by "
            f"{removed.attended:.{digits}f}, random words by {removed.random:.{digits}f}: "
            f"{_interpret(self.num_texts, removed, log_odds)}."
        )
        if abs(removed.difference) < MIN_DIFFERENCE and self.confident_share > 0.5:
            verdict += (
                f" The model is very confident (above {CONFIDENT_PROBABILITY} for "
                f"{100 * self.confident_share:.0f} % of the texts), which hides the effect of words; the "
                f"log-odds drop by {log_odds.attended:.2f} and {log_odds.random:.2f}."
            )
        return (
            f"{verdict} If only these words are kept, the probability is "
            f"{self.probability - sufficiency.attended:.2f} instead of {self.probability:.2f}; for random words it "
            f"is {self.probability - sufficiency.random:.2f}."
        )


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
    """Remove words from texts, and measure the probability of the class predicted for the complete text.

    Args:
        texts: Texts as sentences of words.
        weights: The attention weights of all words of each text, ``(n,)``, or ``(hops, n)``, which are
            averaged. Words of equal weight are ordered randomly: the order of the text would favour its
            beginning.
        predict: Returns the probabilities ``(N, C)`` of N texts. It never gets an empty text or sentence.
        shares: Shares of the words to remove or to keep.
        num_draws: Random draws of words for each text.
        seed: The same seed gives the same result.
        on_progress: Called with the number of finished texts.

    >>> def bag(texts):  # each "good" is worth 0.2
    ...     good = np.array([sum(text, []).count("good") for text in texts])
    ...     return np.stack([0.5 - 0.2 * good, 0.5 + 0.2 * good], axis=1)
    >>> result = measure_faithfulness([[["a", "good", "film"]]], [[0.1, 0.8, 0.1]], bag, shares=[0.1])
    >>> drop = result.shares[0].comprehensiveness.probability
    >>> round(drop.attended, 2), drop.random < 0.2
    (0.2, True)
    """
    if len(texts) != len(weights):
        raise InputError(f"there are {len(texts)} texts and weights of {len(weights)}; expected weights for each text")
    if not shares or not all(0 < share < 1 for share in shares) or num_draws < 1:
        raise InputError(
            f"shares={list(shares)}, num_draws={num_draws}: expected shares between 0 and 1, and at least one draw"
        )
    perturbed = [
        _PerturbedText(index, text, text_weights, num_draws, seed)
        for index, (text, text_weights) in enumerate(zip(texts, weights, strict=True))
    ]
    usable = [text for text in perturbed if text.length > 1]
    if not usable:
        raise InputError(f"none of {len(texts)} texts has two words, so no words can be removed")
    predictions = []
    for start in range(0, len(usable), TEXTS_PER_CHUNK):
        predictions += _predict_versions(usable[start : start + TEXTS_PER_CHUNK], predict, shares)
        if on_progress is not None:
            on_progress(min(start + TEXTS_PER_CHUNK, len(usable)))
    complete = np.array([before for before, _ in predictions])  # (N,)
    after = np.array([versions for _, versions in predictions])  # (N, 2, shares, 1 + draws)
    before = complete[:, None, None, None]
    scales = before - after, _log_odds(before) - _log_odds(after)  # in probability and in log-odds
    at_shares = []
    for number, share in enumerate(shares):
        mean_words = float(np.mean([_count_words(text.length, share) for text in usable]))
        kinds = (_make_drop([drops[:, kind, number] for drops in scales]) for kind in (0, 1))
        at_shares.append(FaithfulnessAtShare(float(share), mean_words, *kinds))
    return Faithfulness(
        num_texts=len(usable),
        num_skipped=len(perturbed) - len(usable),
        num_draws=num_draws,
        probability=float(complete.mean()),
        confident_share=float((complete > CONFIDENT_PROBABILITY).mean()),
        comprehensiveness=_make_drop([drops[:, 0].mean(1) for drops in scales]),
        sufficiency=_make_drop([drops[:, 1].mean(1) for drops in scales]),
        shares=tuple(at_shares),
    )


class _PerturbedText:
    """A text, and the orders in which its words are removed: by weight, and random ones."""

    def __init__(self, index: int, words: TextSentences, weights: ArrayLike, num_draws: int, seed: int) -> None:
        if isinstance(words, str) or any(isinstance(sentence, str) for sentence in words):
            raise InputError(f"text {index + 1} is not a list of sentences, each a list of words")
        self.sentences = [list(sentence) for sentence in words if len(sentence)]
        self.length = sum(map(len, self.sentences))
        hops = np.atleast_2d(np.asarray(weights, np.float64))
        if hops.ndim != 2 or not len(hops) or hops.shape[1] != self.length or not np.isfinite(hops).all():
            raise InputError(
                f"text {index + 1} has {self.length} words, and weights of shape {np.shape(weights)}; "
                "expected one finite weight for each word, or one row of them for each hop"
            )
        random = np.random.default_rng([seed, index]).random((1 + num_draws, self.length))
        attended = np.lexsort((random[0], -hops.mean(0)))
        self.orders = [attended, *np.argsort(random[1:], axis=1)]

    def keep_words(self, keep_mask: NDArray[np.bool_]) -> list[list[str]]:
        """The text with only these words. Sentences that become empty are removed."""
        flags = iter(keep_mask.tolist())
        sentences = [list(compress(words, islice(flags, len(words)))) for words in self.sentences]
        return [words for words in sentences if words]

    def versions(self, shares: Sequence[float]) -> Iterator[NDArray[np.bool_]]:
        """Masks of the words to keep, 2 × shares × orders: all but the selected words, then only these."""
        for keep_selected in (False, True):
            for share in shares:
                for order in self.orders:
                    keep_mask = np.full(self.length, not keep_selected)
                    keep_mask[order[: _count_words(self.length, share)]] = keep_selected
                    yield keep_mask


def _predict_versions(
    texts: Sequence[_PerturbedText], predict: PredictProbabilities, shares: Sequence[float]
) -> list[tuple[float, NDArray[np.float64]]]:
    """The probability of the class predicted for each text, and of the same class for all its versions."""
    inputs: list[list[list[str]]] = []
    # Of each text and its versions; a short text has equal versions, which are predicted once.
    input_rows = []
    for text in texts:
        rows_by_mask: dict[bytes, int] = {}
        rows = []
        for keep_mask in (np.ones(text.length, np.bool_), *text.versions(shares)):
            key = keep_mask.tobytes()
            if key not in rows_by_mask:
                rows_by_mask[key] = len(inputs)
                inputs.append(text.keep_words(keep_mask))
            rows.append(rows_by_mask[key])
        input_rows.append(rows)
    probabilities = _check_probabilities(np.asarray(predict(inputs), np.float64), len(inputs))
    results = []
    for text, (complete, *versions) in zip(texts, input_rows, strict=True):
        predicted = int(probabilities[complete].argmax())
        after = probabilities[versions, predicted].reshape(2, len(shares), len(text.orders))
        results.append((float(probabilities[complete, predicted]), after))
    return results


def _make_drop(scales: Sequence[NDArray[np.float64]]) -> PredictionDrop:
    """Summarize the drops of each text, ``(N, 1 + num_draws)``, in probability and in log-odds."""
    return PredictionDrop(*map(_make_contrast, scales))


def _make_contrast(drops: NDArray[np.float64]) -> AttendedContrast:
    attended, random = drops[:, 0], drops[:, 1:].mean(1)
    difference = attended - random
    [result] = bootstrap_models({"": lambda indices: float(difference[indices].mean())}, len(difference))
    return AttendedContrast(float(attended.mean()), float(random.mean()), result.value, result.low, result.high)


def _interpret(num_texts: int, probability: AttendedContrast, log_odds: AttendedContrast) -> str:
    if num_texts < MIN_TEXTS:
        return f"too few texts ({num_texts}) for a verdict"
    if probability.low > 0 and probability.difference >= MIN_DIFFERENCE:
        return "the highlight is meaningful"
    if log_odds.low > 0 and log_odds.difference >= MIN_LOG_ODDS_DIFFERENCE:
        return "little, but the log-odds drop far more than for random words: the highlight is meaningful"
    if probability.low > 0 or log_odds.low > 0:
        return "slightly more than random words: the highlight is a hint at best"
    if probability.high < 0:
        return "less than random words: the highlight is misleading"
    if probability.high >= MIN_DIFFERENCE:
        return f"the difference is between {probability.low:.2f} and {probability.high:.2f}: use more texts"
    return "no more than random words: do not trust the highlight"


def _count_words(length: int, share: float) -> int:
    """The number of words in a share: at least one, but never all."""
    return min(max(1, int(share * length + 0.5)), length - 1)


def _log_odds(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(probability, PROBABILITY_EPSILON, 1 - PROBABILITY_EPSILON)
    return np.asarray(np.log(clipped) - np.log1p(-clipped))


def _check_probabilities(probabilities: NDArray[np.float64], num_texts: int) -> NDArray[np.float64]:
    if probabilities.ndim != 2 or len(probabilities) != num_texts or probabilities.shape[1] < 2:
        raise InputError(
            f"predict returned shape {probabilities.shape} for {num_texts} texts; expected (texts, classes)"
        )
    if not (
        np.isfinite(probabilities).all()
        and (probabilities >= 0).all()
        and np.allclose(probabilities.sum(1), 1, atol=1e-3)
    ):
        raise InputError("predict returned no probabilities: those of each text must be at least 0 and add up to 1")
    return probabilities
