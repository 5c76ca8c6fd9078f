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

Sentences have 3 to ``max_words`` words, most of them 5 to 20; the long ones are clauses joined by *and*,
*but*, *because*, *when* and *if*. There are far more of them than anybody can learn by heart.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jumok.data.builtin.english_korean.grammar import draw_sentence
from jumok.data.builtin.english_korean.phrases import Link
from jumok.data.builtin.english_korean.portable_random import PortableRandom
from jumok.errors import InputError

__all__ = [
    "MAX_WORDS",
    "SentencePair",
    "SentencePairs",
    "SentenceSplit",
    "SentenceSplits",
    "assign_split",
    "generate_pairs",
    "make_splits",
]

MIN_WORDS, MAX_WORDS = 3, 50  # English words
MAX_MISSED_DRAWS = 20_000  # draws without a new sentence, after which there are none left


@dataclass(frozen=True)
class SentencePair:
    """A sentence and its translation; words are what blanks part, counted from 0.

    ``sure_links`` are the sure ones, (English word, Korean word): every Korean word has one, and nearly
    always just one. ``possible_links`` ones come besides: prepositions, helping verbs and conjunctions with
    the Korean word whose particle or ending says them. Articles have neither, nor has a subject that Korean
    says once.
    """

    english: str
    korean: str
    sure_links: tuple[Link, ...]
    possible_links: tuple[Link, ...] = ()


class SentenceSplit(enum.Enum):
    """What a sentence is for. The sentence itself decides, not the seed: see :func:`assign_split`."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


def assign_split(english: str) -> SentenceSplit:
    """The split of a sentence, one for good: no seed and no size puts a test sentence into a training set.

    One in sixteen is for validation, one in sixteen for testing.
    """
    number = hashlib.sha256(english.encode()).digest()[0]
    return SentenceSplit.TEST if number < 16 else SentenceSplit.VALID if number < 32 else SentenceSplit.TRAIN


@dataclass(frozen=True)
class SentencePairs:
    """``count`` pairs of one split, drawn anew, and alike, each time they are walked over.

    In a training set a few short sentences come twice, as none is kept in memory; elsewhere none does.
    """

    split: SentenceSplit
    seed: int
    count: int
    max_words: int = MAX_WORDS

    def __post_init__(self) -> None:
        _check_sizes(self.count, self.max_words)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[SentencePair]:
        drawn = _generate_endlessly(f"{self.split.value} {self.seed}", self.max_words)
        seen: set[str] = set()
        found = missed = 0
        while found < self.count:
            pair = next(drawn)
            if assign_split(pair.english) is not self.split or pair.english in seen:
                missed += 1
                if missed > MAX_MISSED_DRAWS:
                    raise InputError(
                        f"{self.split.value} is {self.count}, but only {found} different sentences of up to "
                        f"{self.max_words} words were found; ask for fewer, or for a larger longest"
                    )
                continue
            if self.split is not SentenceSplit.TRAIN:
                seen.add(pair.english)
            found, missed = found + 1, 0
            yield pair


class SentenceSplits(NamedTuple):
    """What to learn from, to choose by, and to be measured on."""

    train: SentencePairs
    valid: SentencePairs
    test: SentencePairs


def make_splits(
    seed: int = 0, *, train: int = 100_000, valid: int = 1_000, test: int = 1_000, max_words: int = MAX_WORDS
) -> SentenceSplits:
    """Three sets, of which no two have a sentence in common.

    >>> data = make_splits(train=5, valid=2, test=3)
    >>> len(data.train), [assign_split(pair.english) for pair in data.valid]
    (5, [<SentenceSplit.VALID: 'valid'>, <SentenceSplit.VALID: 'valid'>])
    """
    return SentenceSplits(
        SentencePairs(SentenceSplit.TRAIN, seed, train, max_words),
        SentencePairs(SentenceSplit.VALID, seed, valid, max_words),
        SentencePairs(SentenceSplit.TEST, seed, test, max_words),
    )


def generate_pairs(seed: int, count: int, *, max_words: int = MAX_WORDS) -> Iterator[SentencePair]:
    """``count`` pairs of any split, one by one; the same on every machine."""
    _check_sizes(count, max_words)
    drawn = _generate_endlessly(str(seed), max_words)
    return (next(drawn) for _ in range(count))


def _generate_endlessly(seed: str, max_words: int) -> Iterator[SentencePair]:
    # A digest, so that streams of different names and of neighbouring seeds have nothing in common.
    dice = PortableRandom(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    while True:
        phrase = draw_sentence(dice)
        if MIN_WORDS <= len(phrase.english) <= max_words:
            yield SentencePair(
                " ".join(phrase.english),
                " ".join(phrase.korean),
                tuple(sorted(phrase.sure_links)),
                tuple(sorted(phrase.possible_links)),
            )


def _check_sizes(count: int, max_words: int) -> None:
    if count < 0:
        raise InputError(f"count is {count}; it is a number of sentences, 0 or more")
    if max_words < MIN_WORDS:
        raise InputError(
            f"longest is {max_words}; the shortest sentences have {MIN_WORDS} words, so give {MIN_WORDS} or "
            "more"
        )
