"""How good tags of words are, by the entities that they make: as the script ``conlleval`` counts.

An *entity* is a run of words with a kind. It counts as found only if its first word, its last word and its
kind are all right: half an entity is none. How tags tell entities is said in :mod:`jumok.data.tagged`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jumok.data.readers.tagging import convert_to_iob2, extract_entities
from jumok.errors import InputError

__all__ = ["EntityScore", "TaggingScore", "score_tags"]


@dataclass(frozen=True)
class EntityScore:
    """Of entities, all or those of one kind. What would be 0 / 0 is 0."""

    num_correct: int
    num_predicted: int
    num_gold: int

    @property
    def precision(self) -> float:
        """Of the entities said, how many are right."""
        return self.num_correct / self.num_predicted if self.num_predicted else 0.0

    @property
    def recall(self) -> float:
        """Of the entities that there are, how many were found."""
        return self.num_correct / self.num_gold if self.num_gold else 0.0

    @property
    def f1(self) -> float:
        both = self.num_predicted + self.num_gold
        return 2 * self.num_correct / both if both else 0.0


@dataclass(frozen=True)
class TaggingScore:
    """Of all sentences together."""

    overall: EntityScore
    by_type: dict[str, EntityScore]
    accuracy: float  # of the tags of single words


def score_tags(targets: Iterable[Sequence[str]], predictions: Iterable[Sequence[str]]) -> TaggingScore:
    """From the tags of each sentence.

    >>> found = score_tags([["B-PER", "I-PER", "O"]], [["B-PER", "O", "B-LOC"]])
    >>> found.overall, round(found.accuracy, 2)
    (EntityScore(num_correct=0, num_predicted=2, num_gold=1), 0.33)
    """
    right, given, true = Counter[str](), Counter[str](), Counter[str]()
    words = alike = 0
    for number, (is_, says) in enumerate(zip(targets, predictions, strict=True), 1):
        if len(is_) != len(says):
            raise InputError(f"sentence {number} has {len(is_)} words, and {len(says)} tags were given")
        wanted, found = set(extract_entities(is_)), set(extract_entities(says))
        right.update(one.type for one in wanted & found)
        given.update(one.type for one in found)
        true.update(one.type for one in wanted)
        words += len(is_)
        alike += sum(
            one == other for one, other in zip(convert_to_iob2(is_), convert_to_iob2(says), strict=True)
        )
    kinds = {
        kind: EntityScore(right[kind], given[kind], true[kind]) for kind in sorted(given.keys() | true.keys())
    }
    whole = EntityScore(right.total(), given.total(), true.total())
    return TaggingScore(whole, kinds, alike / words if words else 0.0)
