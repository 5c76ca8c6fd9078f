"""English→Korean sentence pairs with gold word links, made on the spot from a seed: the built-in data set.

>>> for pair in generate(seed=13, count=2):
...     print(pair.english, "→", pair.korean)
the boys were in the kitchen → 소년들은 부엌에 있었다
the man gave the flower to jisu → 남자는 지수에게 꽃을 주었다
>>> pair.links, pair.possible
(((1, 0), (2, 3), (4, 2), (6, 1)), ((5, 1),))

A synchronous grammar of ours draws both sides at once (see ``grammar``), so that the Korean is right, one
English sentence has one translation, and the links are known. English is in lower case and without
punctuation, so that every word has one form; words are what blanks part, in both languages. Korean is in the
plain written style (-다), each noun with its particle.

Sentences have 3 to ``longest`` words, most of them 5 to 20; the long ones are clauses joined by *and*, *but*,
*because*, *when* and *if*. There are far more of them than anybody can learn by heart.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jumok.data.english_korean.dice import Dice
from jumok.data.english_korean.grammar import sentence
from jumok.data.english_korean.phrases import Link
from jumok.errors import InputError

__all__ = ["LONGEST", "Pair", "Sentences", "Split", "Splits", "generate", "split_of", "splits"]

SHORTEST, LONGEST = 3, 50  # English words
PATIENCE = 20_000  # draws without a new sentence, after which there are none left


@dataclass(frozen=True)
class Pair:
    """A sentence and its translation; words are what blanks part, counted from 0.

    ``links`` are the sure ones, (English word, Korean word): every Korean word has one, and nearly always
    just one. ``possible`` ones come besides: prepositions, helping verbs and conjunctions with the Korean
    word whose particle or ending says them. Articles have neither, nor has a subject that Korean says once.
    """

    english: str
    korean: str
    links: tuple[Link, ...]
    possible: tuple[Link, ...] = ()


class Split(enum.Enum):
    """What a sentence is for. The sentence itself decides, not the seed: see :func:`split_of`."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


def split_of(english: str) -> Split:
    """The split of a sentence, one for good: no seed and no size puts a test sentence into a training set.

    One in sixteen is for validation, one in sixteen for testing.
    """
    number = hashlib.sha256(english.encode()).digest()[0]
    return Split.TEST if number < 16 else Split.VALID if number < 32 else Split.TRAIN


@dataclass(frozen=True)
class Sentences:
    """``count`` pairs of one split, drawn anew, and alike, each time they are walked over.

    In a training set a few short sentences come twice, as none is kept in memory; elsewhere none does.
    """

    split: Split
    seed: int
    count: int
    longest: int = LONGEST

    def __post_init__(self) -> None:
        _check(self.count, self.longest)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Pair]:
        drawn = _endless(f"{self.split.value} {self.seed}", self.longest)
        seen: set[str] = set()
        found = missed = 0
        while found < self.count:
            pair = next(drawn)
            if split_of(pair.english) is not self.split or pair.english in seen:
                missed += 1
                if missed > PATIENCE:
                    raise InputError(
                        f"{self.split.value} is {self.count}, but only {found} different sentences of up to "
                        f"{self.longest} words were found; ask for fewer, or for a larger longest"
                    )
                continue
            if self.split is not Split.TRAIN:
                seen.add(pair.english)
            found, missed = found + 1, 0
            yield pair


class Splits(NamedTuple):
    """What to learn from, to choose by, and to be measured on."""

    train: Sentences
    valid: Sentences
    test: Sentences


def splits(
    seed: int = 0, *, train: int = 100_000, valid: int = 1_000, test: int = 1_000, longest: int = LONGEST
) -> Splits:
    """Three sets, of which no two have a sentence in common.

    >>> data = splits(train=5, valid=2, test=3)
    >>> len(data.train), [split_of(pair.english) for pair in data.valid]
    (5, [<Split.VALID: 'valid'>, <Split.VALID: 'valid'>])
    """
    return Splits(
        Sentences(Split.TRAIN, seed, train, longest),
        Sentences(Split.VALID, seed, valid, longest),
        Sentences(Split.TEST, seed, test, longest),
    )


def generate(seed: int, count: int, *, longest: int = LONGEST) -> Iterator[Pair]:
    """``count`` pairs of any split, one by one; the same on every machine."""
    _check(count, longest)
    drawn = _endless(str(seed), longest)
    return (next(drawn) for _ in range(count))


def _endless(seed: str, longest: int) -> Iterator[Pair]:
    # A digest, so that streams of different names and of neighbouring seeds have nothing in common.
    dice = Dice(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    while True:
        phrase = sentence(dice)
        if SHORTEST <= len(phrase.english) <= longest:
            yield Pair(
                " ".join(phrase.english),
                " ".join(phrase.korean),
                tuple(sorted(phrase.sure)),
                tuple(sorted(phrase.possible)),
            )


def _check(count: int, longest: int) -> None:
    if count < 0:
        raise InputError(f"count is {count}; it is a number of sentences, 0 or more")
    if longest < SHORTEST:
        raise InputError(
            f"longest is {longest}; the shortest sentences have {SHORTEST} words, so give {SHORTEST} or more"
        )
