"""Bilingual phrases and their combination.

A phrase consists of English words, Korean words, and the links between them. Phrases are combined by giving
their order in each language. The links follow, and are correct by construction:

>>> eat, apples = align_words("eat", "먹는다"), add_particle(align_words("apples", "사과"), korean.OBJECT)
>>> eat_apples = arrange([eat, apples], [apples, eat])
>>> eat_apples.english, eat_apples.korean, eat_apples.sure_links
(('eat', 'apples'), ('사과를', '먹는다'), ((0, 1), (1, 0)))

A link is *sure* between words with the same meaning. It is *possible* between an English word without a
Korean equivalent and the Korean word whose particle or ending expresses it: *at* and 학교에서, *did* and
않았다. An article has no link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jumok.data.builtin.english_korean import korean
from jumok.data.builtin.english_korean.korean import Particle

Link = tuple[int, int]  # (index of an English word, index of a Korean word)


class Phrase(NamedTuple):
    """Words of both languages, and the links between them."""

    english: tuple[str, ...]
    korean: tuple[str, ...]
    sure_links: tuple[Link, ...] = ()
    possible_links: tuple[Link, ...] = ()


def align_words(english: str, korean: str) -> Phrase:
    """A word or an idiom. Equally many words are linked in order; otherwise, all with all."""
    english_words, korean_words = tuple(english.split()), tuple(korean.split())
    if len(english_words) == len(korean_words):
        return Phrase(english_words, korean_words, tuple((i, i) for i in range(len(english_words))))
    return Phrase(
        english_words,
        korean_words,
        tuple((i, j) for i in range(len(english_words)) for j in range(len(korean_words))),
    )


def make_unaligned(english: str) -> Phrase:
    """English words without a Korean equivalent: an article, or a subject that Korean omits."""
    return Phrase(tuple(english.split()), ())


def arrange(english: Sequence[Phrase | None], korean: Sequence[Phrase | None]) -> Phrase:
    """The same phrases in the order of each language. None is ignored; Korean may omit unaligned phrases."""
    korean_words: list[str] = []
    starts = {}
    for part in korean:
        if part:
            starts[id(part)] = len(korean_words)
            korean_words += part.korean
    english_words: list[str] = []
    sure: list[Link] = []
    possible: list[Link] = []
    for part in english:
        if part:
            i, j = len(english_words), starts.get(id(part), 0)
            sure += [(i + a, j + b) for a, b in part.sure_links]
            possible += [(i + a, j + b) for a, b in part.possible_links]
            english_words += part.english
    return Phrase(tuple(english_words), tuple(korean_words), tuple(sure), tuple(possible))


def concatenate(parts: Sequence[Phrase | None]) -> Phrase:
    """Combine phrases in the same order in both languages."""
    return arrange(parts, parts)


def prepend_english(words: str, phrase: Phrase) -> Phrase:
    """Prepend English words that the last Korean word of the phrase expresses."""
    english_words = words.split()
    last = len(phrase.korean) - 1
    prefix = Phrase(tuple(english_words), (), possible_links=tuple((i, last) for i in range(len(english_words))))
    return arrange([prefix, phrase], [phrase])


def append_english(phrase: Phrase, words: str) -> Phrase:
    """Append English words that the last Korean word of the phrase expresses."""
    english_words = words.split()
    last = len(phrase.korean) - 1
    suffix = Phrase(tuple(english_words), (), possible_links=tuple((i, last) for i in range(len(english_words))))
    return arrange([phrase, suffix], [phrase])


def change_last_korean(phrase: Phrase, change: Callable[[str], str]) -> Phrase:
    """Change the last Korean word."""
    return phrase._replace(korean=(*phrase.korean[:-1], change(phrase.korean[-1])))


def add_particle(phrase: Phrase, particle: Particle) -> Phrase:
    """Add a particle to the last Korean word."""
    return change_last_korean(phrase, lambda word: korean.append_particle(word, particle))
