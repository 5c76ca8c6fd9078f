"""English–Korean sentence pairs with gold word alignments, generated from a seed.

>>> for pair in generate_pairs(seed=13, count=2):
...     print(pair.english, "→", pair.korean)
the boys were in the kitchen → 소년들은 부엌에 있었다
the man gave the flower to jisu → 남자는 지수에게 꽃을 주었다
>>> pair.sure_links, pair.possible_links
(((1, 0), (2, 3), (4, 2), (6, 1)), ((5, 1),))

A synchronous grammar generates both sides together (see ``grammar``), so that the Korean is correct, an
English sentence has only one translation, and the links are known. English is in lower case without
punctuation, so that every word has one form. Words are separated by spaces in both languages. Korean is in
the plain written style (-다), with a particle on each noun.

Sentences have 3 to ``max_words`` words, most of them 5 to 20; the long ones are clauses joined by *and*,
*but*, *because*, *when* and *if*. There are far too many sentences to memorize.
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
MAX_MISSED_DRAWS = 20_000  # draws without a new sentence, after which none is expected


@dataclass(frozen=True)
class SentencePair:
    """A sentence, its translation, and links (English word, Korean word) between their words.

    Every Korean word has a sure link, and nearly always just one. Possible links are between prepositions,
    auxiliary verbs or conjunctions and the Korean word whose particle or ending expresses them. Articles have
    no link, and neither has a repeated subject that Korean omits.
    """

    english: str
    korean: str
    sure_links: tuple[Link, ...]
    possible_links: tuple[Link, ...] = ()


class SentenceSplit(enum.Enum):
    """The split of a sentence. It depends on the sentence, not on the seed: see :func:`assign_split`."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


def assign_split(english: str) -> SentenceSplit:
    """The split of a sentence. It is fixed: with no seed or size is a test sentence in a training set.

    One sixteenth of the sentences is for validation, and one sixteenth for test.
    """
    first_byte = hashlib.sha256(english.encode()).digest()[0]
    return SentenceSplit.TEST if first_byte < 16 else SentenceSplit.VALID if first_byte < 32 else SentenceSplit.TRAIN


@dataclass(frozen=True)
class SentencePairs:
    """``count`` pairs of one split. Each iteration generates the same pairs again.

    A training set may contain a few short sentences twice, because none is kept in memory. The others do not.
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
        pairs = _generate_endlessly(f"{self.split.value} {self.seed}", self.max_words)
        seen: set[str] = set()
        num_found = num_missed = 0
        while num_found < self.count:
            pair = next(pairs)
            if assign_split(pair.english) is not self.split or pair.english in seen:
                num_missed += 1
                if num_missed > MAX_MISSED_DRAWS:
                    raise InputError(
                        f"{self.split.value} is {self.count}, but only {num_found} different sentences of "
                        f"up to {self.max_words} words were found; use fewer sentences or a larger max_words"
                    )
                continue
            if self.split is not SentenceSplit.TRAIN:
                seen.add(pair.english)
            num_found, num_missed = num_found + 1, 0
            yield pair


class SentenceSplits(NamedTuple):
    """Training, validation and test pairs."""

    train: SentencePairs
    valid: SentencePairs
    test: SentencePairs


def make_splits(
    seed: int = 0, *, train: int = 100_000, valid: int = 1_000, test: int = 1_000, max_words: int = MAX_WORDS
) -> SentenceSplits:
    """Three disjoint sets of pairs.

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
    """Generate ``count`` pairs of any split. They are the same on every machine."""
    _check_sizes(count, max_words)
    pairs = _generate_endlessly(str(seed), max_words)
    return (next(pairs) for _ in range(count))


def _generate_endlessly(seed: str, max_words: int) -> Iterator[SentencePair]:
    # A digest makes streams of different names and neighbouring seeds independent.
    rng = PortableRandom(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    while True:
        phrase = draw_sentence(rng)
        if MIN_WORDS <= len(phrase.english) <= max_words:
            yield SentencePair(
                " ".join(phrase.english),
                " ".join(phrase.korean),
                tuple(sorted(phrase.sure_links)),
                tuple(sorted(phrase.possible_links)),
            )


def _check_sizes(count: int, max_words: int) -> None:
    if count < 0:
        raise InputError(f"count={count}: expected 0 or more sentences")
    if max_words < MIN_WORDS:
        raise InputError(f"max_words={max_words}: expected {MIN_WORDS} or more, the length of the shortest sentences")
