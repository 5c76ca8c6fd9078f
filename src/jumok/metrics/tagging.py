"""Metrics of sequence tagging: precision, recall and F1 of entities, as computed by the script ``conlleval``.

An *entity* is a span of words with a type. It is correct only if its first word, its last word and its type
are all correct. For the relation between tags and entities see :mod:`jumok.data.readers.tagging`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jumok.data.readers.tagging import convert_to_iob2, extract_entities
from jumok.errors import InputError


@dataclass(frozen=True)
class EntityScore:
    """Scores of all entities, or of those of one type. 0 / 0 counts as 0."""

    num_correct: int
    num_predicted: int
    num_gold: int

    @property
    def precision(self) -> float:
        """The share of predicted entities that are correct."""
        return self.num_correct / self.num_predicted if self.num_predicted else 0.0

    @property
    def recall(self) -> float:
        """The share of gold entities that were found."""
        return self.num_correct / self.num_gold if self.num_gold else 0.0

    @property
    def f1(self) -> float:
        total = self.num_predicted + self.num_gold
        return 2 * self.num_correct / total if total else 0.0


@dataclass(frozen=True)
class TaggingScore:
    """Scores over all sentences."""

    overall: EntityScore
    by_type: dict[str, EntityScore]
    accuracy: float  # of the tags of words


def score_tags(targets: Iterable[Sequence[str]], predictions: Iterable[Sequence[str]]) -> TaggingScore:
    """Score the predicted tags of each sentence.

    >>> score = score_tags([["B-PER", "I-PER", "O"]], [["B-PER", "O", "B-LOC"]])
    >>> score.overall, round(score.accuracy, 2)
    (EntityScore(num_correct=0, num_predicted=2, num_gold=1), 0.33)
    """
    num_correct, num_predicted, num_gold = Counter[str](), Counter[str](), Counter[str]()
    num_words = num_correct_tags = 0
    for number, (target, prediction) in enumerate(zip(targets, predictions, strict=True), 1):
        if len(target) != len(prediction):
            raise InputError(
                f"sentence {number} has {len(target)} words and {len(prediction)} predicted tags; expected "
                "one tag for each word"
            )
        gold, predicted = set(extract_entities(target)), set(extract_entities(prediction))
        num_correct.update(entity.type for entity in gold & predicted)
        num_predicted.update(entity.type for entity in predicted)
        num_gold.update(entity.type for entity in gold)
        num_words += len(target)
        num_correct_tags += sum(map(operator.eq, convert_to_iob2(target), convert_to_iob2(prediction)))
    by_type = {
        name: EntityScore(num_correct[name], num_predicted[name], num_gold[name])
        for name in sorted(num_predicted.keys() | num_gold.keys())
    }
    overall = EntityScore(num_correct.total(), num_predicted.total(), num_gold.total())
    return TaggingScore(overall, by_type, num_correct_tags / num_words if num_words else 0.0)
