"""Phrases of two languages at once, and the ways to put them together.

A phrase knows its English words, its Korean words, and which come from which. To put phrases together is to
say in which order each language has them; the links follow, and are right by construction:

>>> eat, apples = said("eat", "먹는다"), marked(said("apples", "사과"), korean.OBJECT)
>>> eat_apples = arrange([eat, apples], [apples, eat])
>>> eat_apples.english, eat_apples.korean, eat_apples.sure
(('eat', 'apples'), ('사과를', '먹는다'), ((0, 1), (1, 0)))

A link is *sure* between words that mean the same, and *possible* between a word that has no Korean word of
its own and the one whose particle or ending says it: *at* and 학교에서, *did* and
않았다. An article has no link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jumok.data.builtin.english_korean import korean
from jumok.data.builtin.english_korean.korean import Particle

__all__ = [
    "Link",
    "Phrase",
    "add_particle",
    "align_words",
    "append_english",
    "arrange",
    "change_last_korean",
    "concatenate",
    "make_unaligned",
    "prepend_english",
]

Link = tuple[int, int]  # the number of an English word, the number of a Korean word


class Phrase(NamedTuple):
    """Words of both languages, and the links between them."""

    english: tuple[str, ...]
    korean: tuple[str, ...]
    sure_links: tuple[Link, ...] = ()
    possible_links: tuple[Link, ...] = ()


def align_words(english: str, korean: str) -> Phrase:
    """A word, or an idiom: as many words in both go together one by one, else each goes with all."""
    ours, theirs = tuple(english.split()), tuple(korean.split())
    if len(ours) == len(theirs):
        return Phrase(ours, theirs, tuple((i, i) for i in range(len(ours))))
    return Phrase(ours, theirs, tuple((i, j) for i in range(len(ours)) for j in range(len(theirs))))


def make_unaligned(english: str) -> Phrase:
    """What Korean does not say: an article, a subject that goes without saying."""
    return Phrase(tuple(english.split()), ())


def arrange(english: Sequence[Phrase | None], korean: Sequence[Phrase | None]) -> Phrase:
    """The same phrases in the order of each language. None is skipped; Korean may leave out the unsaid."""
    theirs: list[str] = []
    starts = {}
    for part in korean:
        if part:
            starts[id(part)] = len(theirs)
            theirs += part.korean
    ours: list[str] = []
    sure: list[Link] = []
    possible: list[Link] = []
    for part in english:
        if part:
            i, j = len(ours), starts.get(id(part), 0)
            sure += [(i + a, j + b) for a, b in part.sure_links]
            possible += [(i + a, j + b) for a, b in part.possible_links]
            ours += part.english
    return Phrase(tuple(ours), tuple(theirs), tuple(sure), tuple(possible))


def concatenate(parts: Sequence[Phrase | None]) -> Phrase:
    """In the same order in both languages."""
    return arrange(parts, parts)


def prepend_english(words: str, phrase: Phrase) -> Phrase:
    """With English words before it, which Korean says in the last word of the phrase."""
    more = words.split()
    last = len(phrase.korean) - 1
    before = Phrase(tuple(more), (), possible_links=tuple((i, last) for i in range(len(more))))
    return arrange([before, phrase], [phrase])


def append_english(phrase: Phrase, words: str) -> Phrase:
    """With English words behind it, which Korean says in the last word of the phrase."""
    more = words.split()
    last = len(phrase.korean) - 1
    behind = Phrase(tuple(more), (), possible_links=tuple((i, last) for i in range(len(more))))
    return arrange([phrase, behind], [phrase])


def change_last_korean(phrase: Phrase, change: Callable[[str], str]) -> Phrase:
    """With its last Korean word changed."""
    return phrase._replace(korean=(*phrase.korean[:-1], change(phrase.korean[-1])))


def add_particle(phrase: Phrase, particle: Particle) -> Phrase:
    """With a particle on its last Korean word."""
    return change_last_korean(phrase, lambda word: korean.append_particle(word, particle))
