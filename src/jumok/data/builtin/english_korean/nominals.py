"""Noun phrases: names, pronouns, and nouns with their modifiers::

    English  determiner · number · adjective · NOUN · relative clause
    Korean   relative clause · determiner · adjective · NOUN · number and counter

Korean has no articles, and marks the plural only of people and animals (학생들), and of things after *these*
and *those*.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from jumok.data.builtin.english_korean import lexicon
from jumok.data.builtin.english_korean.english import SubjectAgreement, choose_article
from jumok.data.builtin.english_korean.korean import (
    AND,
    OBJECT,
    OF,
    OR,
    SUBJECT,
    Ending,
    Particle,
    Tense,
    conjugate,
)
from jumok.data.builtin.english_korean.lexicon import Noun, Verb
from jumok.data.builtin.english_korean.phrases import (
    Phrase,
    add_particle,
    align_words,
    append_english,
    arrange,
    concatenate,
    make_unaligned,
    prepend_english,
)
from jumok.data.builtin.english_korean.portable_random import PortableRandom
from jumok.data.builtin.english_korean.predicates import Mood, PredicateForm, make_verb_phrase

T = TypeVar("T", bound=Hashable)


class Determiner(enum.Enum):
    """The determiner of a noun."""

    NONE = enum.auto()
    A = enum.auto()
    THE = enum.auto()
    THIS = enum.auto()
    WHOSE = enum.auto()
    NUMBER = enum.auto()


D = Determiner
DeterminerShares = Mapping[Determiner, float]


@dataclass(frozen=True, eq=False)
class DeterminerWeights:
    """Weights of the determiners of a noun: singular, plural and mass nouns.

    ``is_predicate``: the noun is a predicate, and Korean does not mark its plural. ``allow_adjective``: the
    noun may have an adjective.
    """

    singular: DeterminerShares
    plural: DeterminerShares
    mass: DeterminerShares
    is_predicate: bool = False
    allow_adjective: bool = True


ANY_NOUN = DeterminerWeights(
    singular={D.THE: 0.5, D.A: 0.22, D.WHOSE: 0.14, D.THIS: 0.11, D.NUMBER: 0.03},
    plural={D.THE: 0.34, D.NONE: 0.3, D.NUMBER: 0.14, D.WHOSE: 0.12, D.THIS: 0.1},
    mass={D.NONE: 0.5, D.THE: 0.25, D.WHOSE: 0.15, D.THIS: 0.1},
)
KNOWN_NOUN = DeterminerWeights(
    singular={D.THE: 0.65, D.WHOSE: 0.2, D.THIS: 0.15},
    plural={D.THE: 0.45, D.NONE: 0.25, D.WHOSE: 0.15, D.THIS: 0.15},
    mass={D.THE: 0.4, D.NONE: 0.2, D.WHOSE: 0.2, D.THIS: 0.2},
)
KNOWN_WITHOUT_ADJECTIVE = replace(KNOWN_NOUN, allow_adjective=False)
NEW_NOUN = DeterminerWeights(singular={D.A: 0.9, D.NUMBER: 0.1}, plural={D.NUMBER: 0.6, D.NONE: 0.4}, mass={D.NONE: 1})
PREDICATE_NOUN = DeterminerWeights(
    singular={D.A: 0.6, D.WHOSE: 0.4},
    plural={D.NONE: 0.6, D.WHOSE: 0.4},
    mass={D.NONE: 0.6, D.WHOSE: 0.4},
    is_predicate=True,
)
INDEFINITE_PREDICATE = DeterminerWeights(singular={D.A: 1}, plural={D.NONE: 1}, mass={D.NONE: 1}, is_predicate=True)
POSSESSED_PREDICATE = DeterminerWeights(
    singular={D.WHOSE: 1}, plural={D.WHOSE: 1}, mass={D.WHOSE: 1}, is_predicate=True
)


@dataclass(frozen=True)
class Nominal:
    """A noun phrase without its particle. ``is_known``: it is definite."""

    phrase: Phrase
    agreement: SubjectAgreement
    is_plural: bool = False
    is_known: bool = True


class NominalSampler:
    """Draws the noun phrases of one sentence, without repeating a noun, a name or a person."""

    def __init__(self, rng: PortableRandom) -> None:
        self.rng = rng
        self._used: set[Hashable] = set()

    def draw_any(
        self,
        nouns: tuple[Noun, ...],
        weights: DeterminerWeights = ANY_NOUN,
        *,
        subject: bool = False,
        relative: bool = False,
    ) -> Nominal:
        """One of the nouns; instead of a person, also a name or a pronoun."""
        people, things, relativizable = _sort_nouns(nouns)
        if relative and relativizable:
            return self.make_noun_phrase(self.draw_unused(relativizable), weights, relative=True)
        if not self.rng.bernoulli(len(people) / len(nouns)):
            return self.make_noun_phrase(self.draw_unused(things), weights)
        if self.rng.bernoulli(0.5):
            return self.make_noun_phrase(self.draw_unused(people), weights)
        return self.draw_name() if self.rng.bernoulli(0.55) else self.draw_pronoun(as_subject=subject)

    def draw_name(self) -> Nominal:
        """minsu: 민수."""
        return Nominal(align_words(*self.draw_unused(lexicon.NAMES)), SubjectAgreement.SINGULAR)

    def draw_pronoun(self, *, as_subject: bool) -> Nominal:
        """he or him: 그."""
        pronoun = self.draw_unused(lexicon.PRONOUNS)
        if pronoun in lexicon.FIRST_PERSONS:  # i do not meet us
            self.exclude(lexicon.FIRST_PERSONS)
        return Nominal(
            align_words(pronoun.subject if as_subject else pronoun.object, pronoun.korean),
            pronoun.agreement,
            pronoun.is_plural,
        )

    def make_noun_phrase(
        self,
        noun: Noun,
        weights: DeterminerWeights = ANY_NOUN,
        *,
        plural: bool | None = None,
        relative: bool = False,
    ) -> Nominal:
        """A noun with its modifiers. ``plural``: None chooses randomly."""
        if plural is None:
            plural = self.rng.bernoulli(0.3)
        plural = plural and bool(noun.plural)
        shares = weights.plural if plural else weights.singular if noun.plural else weights.mass
        determiner = D.THE if relative else _fit_determiner(self.rng.weighted_choice(shares), noun)
        agreement = SubjectAgreement.PLURAL if plural else SubjectAgreement.SINGULAR
        has_plural_marker = plural and not weights.is_predicate and _needs_plural_marker(noun, determiner)
        head = align_words(noun.plural if plural else noun.english, noun.korean + "들" * has_plural_marker)
        adjective = self._draw_adjective(noun) if weights.allow_adjective else None
        determiner_phrase = self._make_determiner(noun, determiner, plural, (adjective or head).english[0], weights)
        relative_clause = self._draw_relative_clause(noun, agreement) if relative else None
        korean_order = (
            [adjective, head, determiner_phrase] if determiner is D.NUMBER else [determiner_phrase, adjective, head]
        )
        phrase = arrange([determiner_phrase, adjective, head, relative_clause], [relative_clause, *korean_order])
        return Nominal(phrase, agreement, plural, determiner not in (D.A, D.NUMBER))

    def draw_list(self, nouns: tuple[Noun, ...], *, either: bool = False) -> Nominal:
        """Two or three of a kind: A and B, A와 B; or ``either`` of two: A or B, A나 B."""
        category_nouns = self.rng.choice(_group_by_category(nouns))
        count = 3 if len(category_nouns) > 3 and not either and self.rng.bernoulli(0.2) else 2
        parts = [self._draw_list_item(category_nouns, ANY_NOUN) for _ in range(count)]
        joined = _join_list(parts, OR, "or") if either else _join_list(parts, AND, "and")
        return Nominal(joined, SubjectAgreement.PLURAL, is_plural=True)

    def draw_pair(self) -> Nominal:
        """Two people as one subject."""
        parts = [self._draw_list_item(lexicon.PEOPLE, KNOWN_NOUN, plural=False) for _ in range(2)]
        return Nominal(_join_list(parts, AND, "and"), SubjectAgreement.PLURAL, is_plural=True)

    def draw_unused(self, options: Sequence[T]) -> T:
        """An option that the sentence has not used yet, if there is one."""
        for _ in range(20):
            if (option := self.rng.choice(options)) not in self._used:
                break
        self._used.add(option)
        return option

    def exclude(self, items: Iterable[Hashable]) -> None:
        """Do not use these items in the rest of the sentence."""
        self._used |= set(items)

    def _draw_list_item(
        self, nouns: Sequence[Noun], weights: DeterminerWeights, *, plural: bool | None = None
    ) -> Phrase:
        if nouns[0].is_person and self.rng.bernoulli(0.5):
            return self.draw_name().phrase
        return self.make_noun_phrase(self.draw_unused(nouns), weights, plural=plural).phrase

    def _make_determiner(
        self, noun: Noun, determiner: Determiner, plural: bool, next_word: str, weights: DeterminerWeights
    ) -> Phrase | None:
        """The determiner of a noun; ``next_word`` is the English word after it."""
        match determiner:
            case D.A:
                return make_unaligned(choose_article(next_word))
            case D.THE:
                return make_unaligned("the")
            case D.THIS:
                near, far = ("these", "those") if plural else ("this", "that")
                return align_words(near, "이") if self.rng.bernoulli(0.6) else align_words(far, "저")
            case D.NUMBER:
                number, word = self.rng.choice(lexicon.NUMBERS[1:] if plural else lexicon.NUMBERS[:1])
                return align_words(number, f"{word} {noun.counter}")
            case D.WHOSE:
                return self._draw_possessive(unused_owner=weights is POSSESSED_PREDICATE)
        return None

    def _draw_possessive(self, *, unused_owner: bool) -> Phrase:
        """my, minsu's, the teacher's; ``unused_owner``: an owner not mentioned yet (i am *your* friend)."""
        if self.rng.bernoulli(0.6):
            owner = self.draw_unused(lexicon.PRONOUNS) if unused_owner else self.rng.choice(lexicon.PRONOUNS)
            return add_particle(align_words(owner.possessive, owner.korean), OF)
        if self.rng.bernoulli(0.6):
            name, korean_name = self.draw_unused(lexicon.NAMES)
            return add_particle(align_words(f"{name}'s", korean_name), OF)
        person = self.draw_unused(lexicon.PERSONS)
        return concatenate([make_unaligned("the"), add_particle(align_words(f"{person.english}'s", person.korean), OF)])

    def _draw_adjective(self, noun: Noun) -> Phrase | None:
        options = lexicon.ADJECTIVES_BY_NOUN[noun]
        if not options or not self.rng.bernoulli(0.15):
            return None
        adjective = self.draw_unused(options)
        return align_words(adjective.english, conjugate(adjective.stem, Tense.PRESENT, Ending.NOUN))

    def _draw_relative_clause(self, noun: Noun, agreement: SubjectAgreement) -> Phrase:
        """who reads a book: 책을 읽는; that minsu bought: 민수가 산."""
        active_verbs, passive_verbs = lexicon.VERBS_BY_SUBJECT[noun], lexicon.VERBS_BY_OBJECT[noun]
        if active_verbs and (not passive_verbs or self.rng.bernoulli(0.6)):
            verb = self.draw_unused(active_verbs)
            verb_phrase = self._draw_attributive_verb(verb, agreement)
            object_phrase = add_particle(self.draw_any(verb.objects).phrase, OBJECT) if verb.objects else None
            return prepend_english(
                "who" if noun.is_person else "that",
                arrange([verb_phrase, object_phrase], [object_phrase, verb_phrase]),
            )
        agent = self.draw_any(lexicon.PEOPLE, subject=True)
        verb_phrase = self._draw_attributive_verb(self.draw_unused(passive_verbs), agent.agreement)
        alternative = "whom" if noun.is_person else "which"
        word = alternative if agent.phrase.english[0] == "that" or self.rng.bernoulli(0.3) else "that"
        return prepend_english(word, concatenate([add_particle(agent.phrase, SUBJECT), verb_phrase]))

    def _draw_attributive_verb(self, verb: Verb, agreement: SubjectAgreement) -> Phrase:
        tense = self.rng.weighted_choice({Tense.PAST: 0.5, Tense.PRESENT: 0.35, Tense.FUTURE: 0.15})
        allows_progressive = verb.allows_progressive and tense is not Tense.FUTURE
        mood = self.rng.weighted_choice({Mood.SIMPLE: 0.8, Mood.NOT: 0.1, Mood.GOING_ON: 0.1 * allows_progressive})
        if mood is Mood.SIMPLE and tense is Tense.PRESENT and not verb.distinguishes_tense(agreement):
            tense = Tense.PAST
        return make_verb_phrase(verb, mood, PredicateForm(agreement, tense, Ending.NOUN))


@functools.cache
def _sort_nouns(nouns: tuple[Noun, ...]) -> tuple[Sequence[Noun], Sequence[Noun], Sequence[Noun]]:
    """The nouns that are people, those that are not, and those that may have a relative clause."""
    people = [noun for noun in nouns if noun.is_person]
    things = [noun for noun in nouns if not noun.is_person]
    return people, things, [noun for noun in nouns if noun.category != "kin" and not noun.takes_no_article]


@functools.cache
def _group_by_category(nouns: tuple[Noun, ...]) -> Sequence[tuple[Noun, ...]]:
    """The categories with at least two nouns; if there are none, all nouns as one group."""
    categories = dict.fromkeys(noun.category for noun in nouns)
    groups = [tuple(noun for noun in nouns if noun.category == category) for category in categories]
    return [group for group in groups if len(group) > 1] or [nouns]


def _fit_determiner(determiner: Determiner, noun: Noun) -> Determiner:
    """Adapt a determiner to a noun: soccer has no article, kin have an owner, and mountains have none."""
    if noun.takes_no_article:
        return D.NONE
    if noun.category == "kin":
        return D.WHOSE
    return D.THE if determiner is D.WHOSE and not noun.can_be_owned else determiner


def _needs_plural_marker(noun: Noun, determiner: Determiner) -> bool:
    return determiner is D.THIS or (noun.is_animate and determiner is not D.NUMBER)


def _join_list(parts: Sequence[Phrase], particle: Particle, word: str) -> Phrase:
    return concatenate([*(append_english(add_particle(part, particle), word) for part in parts[:-1]), parts[-1]])
