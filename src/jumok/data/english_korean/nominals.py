"""Noun phrases: names, pronouns, nouns with all that may stand before and behind them::

    English  determiner · number · adjective · NOUN · relative clause
    Korean   relative clause · determiner · adjective · NOUN · number and counter

Korean has no articles, and says that there are several only where it matters: of people and animals (학생들),
and of things behind *these* and *those*.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from jumok.data.english_korean import lexicon
from jumok.data.english_korean.dice import Dice
from jumok.data.english_korean.english import Agreement, article
from jumok.data.english_korean.korean import AND, OBJECT, OF, OR, SUBJECT, Ending, Particle, Tense, conjugate
from jumok.data.english_korean.lexicon import Noun, Verb
from jumok.data.english_korean.phrases import Phrase, arrange, led, marked, row, said, trailed, unsaid
from jumok.data.english_korean.predicates import Form, Mood, verbal

__all__ = [
    "ANY",
    "A_KIND",
    "KNOWN",
    "NEW",
    "PREDICATE",
    "SOMEONES",
    "UNDESCRIBED",
    "Nominal",
    "Nominals",
    "Which",
]

T = TypeVar("T", bound=Hashable)


class Determiner(enum.Enum):
    """What tells which one is meant."""

    NONE = enum.auto()
    A = enum.auto()
    THE = enum.auto()
    THIS = enum.auto()
    WHOSE = enum.auto()
    NUMBER = enum.auto()


D = Determiner
Shares = Mapping[Determiner, float]


@dataclass(frozen=True, eq=False)
class Which:
    """How often a noun has which determiner: where it is one, where it is many, where it is not counted.

    ``predicate``: it tells what somebody is, and Korean does not say that there are several of them.
    ``described``: it may have an adjective.
    """

    one: Shares
    many: Shares
    mass: Shares
    predicate: bool = False
    described: bool = True


ANY = Which(
    one={D.THE: 0.5, D.A: 0.22, D.WHOSE: 0.14, D.THIS: 0.11, D.NUMBER: 0.03},
    many={D.THE: 0.34, D.NONE: 0.3, D.NUMBER: 0.14, D.WHOSE: 0.12, D.THIS: 0.1},
    mass={D.NONE: 0.5, D.THE: 0.25, D.WHOSE: 0.15, D.THIS: 0.1},
)
KNOWN = Which(
    one={D.THE: 0.65, D.WHOSE: 0.2, D.THIS: 0.15},
    many={D.THE: 0.45, D.NONE: 0.25, D.WHOSE: 0.15, D.THIS: 0.15},
    mass={D.THE: 0.4, D.NONE: 0.2, D.WHOSE: 0.2, D.THIS: 0.2},
)
UNDESCRIBED = replace(KNOWN, described=False)
NEW = Which(one={D.A: 0.9, D.NUMBER: 0.1}, many={D.NUMBER: 0.6, D.NONE: 0.4}, mass={D.NONE: 1})
PREDICATE = Which(
    one={D.A: 0.6, D.WHOSE: 0.4},
    many={D.NONE: 0.6, D.WHOSE: 0.4},
    mass={D.NONE: 0.6, D.WHOSE: 0.4},
    predicate=True,
)
A_KIND = Which(one={D.A: 1}, many={D.NONE: 1}, mass={D.NONE: 1}, predicate=True)
SOMEONES = Which(one={D.WHOSE: 1}, many={D.WHOSE: 1}, mass={D.WHOSE: 1}, predicate=True)


@dataclass(frozen=True)
class Nominal:
    """A noun phrase without its particle. ``known``: whoever listens knows which one is meant."""

    phrase: Phrase
    agreement: Agreement
    many: bool = False
    known: bool = True


class Nominals:
    """Draws noun phrases for one sentence, no two of them about the same noun, name or person."""

    def __init__(self, dice: Dice) -> None:
        self.dice = dice
        self._used: set[Hashable] = set()

    def any_of(
        self, nouns: tuple[Noun, ...], which: Which = ANY, *, subject: bool = False, relative: bool = False
    ) -> Nominal:
        """One of the nouns, or, if that is a person, anybody: a name, a pronoun."""
        people, things, described = _sorted(nouns)
        if relative and described:
            return self.noun(self.fresh(described), which, relative=True)
        if not self.dice.chance(len(people) / len(nouns)):
            return self.noun(self.fresh(things), which)
        if self.dice.chance(0.5):
            return self.noun(self.fresh(people), which)
        return self.name() if self.dice.chance(0.55) else self.pronoun(subject=subject)

    def name(self) -> Nominal:
        """minsu: 민수."""
        return Nominal(said(*self.fresh(lexicon.NAMES)), Agreement.SINGULAR)

    def pronoun(self, *, subject: bool) -> Nominal:
        """he or him: 그."""
        one = self.fresh(lexicon.PRONOUNS)
        if one in lexicon.FIRST_PERSONS:  # i do not meet us
            self.keep_from(lexicon.FIRST_PERSONS)
        return Nominal(said(one.subject if subject else one.object, one.korean), one.agreement, one.many)

    def noun(
        self, noun: Noun, which: Which = ANY, *, plural: bool | None = None, relative: bool = False
    ) -> Nominal:
        """A noun with its company; it is one or many by chance, if ``plural`` does not say."""
        if plural is None:
            plural = self.dice.chance(0.3)
        plural = plural and bool(noun.plural)
        shares = which.many if plural else which.one if noun.plural else which.mass
        determiner = D.THE if relative else _fitting(self.dice.weigh(shares), noun)
        agreement = Agreement.PLURAL if plural else Agreement.SINGULAR
        several = plural and not which.predicate and _says_several(noun, determiner)
        head = said(noun.plural if plural else noun.english, noun.korean + "들" * several)
        adjective = self._adjective(noun) if which.described else None
        before = self._before(noun, determiner, plural, (adjective or head).english[0], which)
        behind = self._relative(noun, agreement) if relative else None
        ours = [adjective, head, before] if determiner is D.NUMBER else [before, adjective, head]
        phrase = arrange([before, adjective, head, behind], [behind, *ours])
        return Nominal(phrase, agreement, plural, determiner not in (D.A, D.NUMBER))

    def several(self, nouns: tuple[Noun, ...], *, either: bool = False) -> Nominal:
        """Two or three of a kind: A and B, A와 B; or ``either`` of two: A or B, A나 B."""
        alike = self.dice.pick(_of_a_kind(nouns))
        count = 3 if len(alike) > 3 and not either and self.dice.chance(0.2) else 2
        parts = [self._for_a_list(alike, ANY) for _ in range(count)]
        joined = _list(parts, OR, "or") if either else _list(parts, AND, "and")
        return Nominal(joined, Agreement.PLURAL, many=True)

    def pair(self) -> Nominal:
        """Two people as one subject."""
        parts = [self._for_a_list(lexicon.PEOPLE, KNOWN, plural=False) for _ in range(2)]
        return Nominal(_list(parts, AND, "and"), Agreement.PLURAL, many=True)

    def fresh(self, options: Sequence[T]) -> T:
        """One that the sentence has not spoken of yet, as long as there is one."""
        for _ in range(20):
            if (one := self.dice.pick(options)) not in self._used:
                break
        self._used.add(one)
        return one

    def keep_from(self, taboo: Iterable[Hashable]) -> None:
        """From here on, these are not spoken of."""
        self._used |= set(taboo)

    def _for_a_list(self, nouns: Sequence[Noun], which: Which, *, plural: bool | None = None) -> Phrase:
        if nouns[0].is_person and self.dice.chance(0.5):
            return self.name().phrase
        return self.noun(self.fresh(nouns), which, plural=plural).phrase

    def _before(
        self, noun: Noun, determiner: Determiner, plural: bool, first: str, which: Which
    ) -> Phrase | None:
        """What stands before a noun; ``first`` is the English word that it stands before."""
        match determiner:
            case D.A:
                return unsaid(article(first))
            case D.THE:
                return unsaid("the")
            case D.THIS:
                near, far = ("these", "those") if plural else ("this", "that")
                return said(near, "이") if self.dice.chance(0.6) else said(far, "저")
            case D.NUMBER:
                number, word = self.dice.pick(lexicon.NUMBERS[1:] if plural else lexicon.NUMBERS[:1])
                return said(number, f"{word} {noun.counter}")
            case D.WHOSE:
                return self._whose(another=which is SOMEONES)
        return None

    def _whose(self, *, another: bool) -> Phrase:
        """my, minsu's, the teacher's; ``another``: of nobody who has been spoken of (i am *your* friend)."""
        if self.dice.chance(0.6):
            owner = self.fresh(lexicon.PRONOUNS) if another else self.dice.pick(lexicon.PRONOUNS)
            return marked(said(owner.possessive, owner.korean), OF)
        if self.dice.chance(0.6):
            name, written = self.fresh(lexicon.NAMES)
            return marked(said(f"{name}'s", written), OF)
        person = self.fresh(lexicon.PERSONS)
        return row([unsaid("the"), marked(said(f"{person.english}'s", person.korean), OF)])

    def _adjective(self, noun: Noun) -> Phrase | None:
        options = lexicon.ADJECTIVES_OF[noun]
        if not options or not self.dice.chance(0.15):
            return None
        one = self.fresh(options)
        return said(one.english, conjugate(one.stem, Tense.PRESENT, Ending.NOUN))

    def _relative(self, noun: Noun, agreement: Agreement) -> Phrase:
        """who reads a book: 책을 읽는; that minsu bought: 민수가 산."""
        does, suffers = lexicon.VERBS_OF[noun], lexicon.VERBS_TO[noun]
        if does and (not suffers or self.dice.chance(0.6)):
            verb = self.fresh(does)
            doing = self._before_noun(verb, agreement)
            what = marked(self.any_of(verb.objects).phrase, OBJECT) if verb.objects else None
            return led("who" if noun.is_person else "that", arrange([doing, what], [what, doing]))
        who = self.any_of(lexicon.PEOPLE, subject=True)
        doing = self._before_noun(self.fresh(suffers), who.agreement)
        other = "whom" if noun.is_person else "which"
        word = other if who.phrase.english[0] == "that" or self.dice.chance(0.3) else "that"
        return led(word, row([marked(who.phrase, SUBJECT), doing]))

    def _before_noun(self, verb: Verb, agreement: Agreement) -> Phrase:
        tense = self.dice.weigh({Tense.PAST: 0.5, Tense.PRESENT: 0.35, Tense.FUTURE: 0.15})
        lasting = verb.goes_on and tense is not Tense.FUTURE
        mood = self.dice.weigh({Mood.SIMPLE: 0.8, Mood.NOT: 0.1, Mood.GOING_ON: 0.1 * lasting})
        if mood is Mood.SIMPLE and tense is Tense.PRESENT and not verb.tells_tense(agreement):
            tense = Tense.PAST
        return verbal(verb, mood, Form(agreement, tense, Ending.NOUN))


@functools.cache
def _sorted(nouns: tuple[Noun, ...]) -> tuple[Sequence[Noun], Sequence[Noun], Sequence[Noun]]:
    """Those that are people, those that are not, and those that a relative clause may stand behind."""
    people = [noun for noun in nouns if noun.is_person]
    things = [noun for noun in nouns if not noun.is_person]
    return people, things, [noun for noun in nouns if noun.kind != "kin" and not noun.bare]


@functools.cache
def _of_a_kind(nouns: tuple[Noun, ...]) -> Sequence[tuple[Noun, ...]]:
    """The kinds of which there are at least two; all of them as one, if there are none."""
    names = dict.fromkeys(noun.kind for noun in nouns)
    kinds = [tuple(noun for noun in nouns if noun.kind == name) for name in names]
    return [kind for kind in kinds if len(kind) > 1] or [nouns]


def _fitting(determiner: Determiner, noun: Noun) -> Determiner:
    """Soccer has no article, somebody's mother is always somebody's, and nobody owns a mountain."""
    if noun.bare:
        return D.NONE
    if noun.kind == "kin":
        return D.WHOSE
    return D.THE if determiner is D.WHOSE and not noun.owned else determiner


def _says_several(noun: Noun, determiner: Determiner) -> bool:
    return determiner is D.THIS or (noun.lives and determiner is not D.NUMBER)


def _list(parts: Sequence[Phrase], particle: Particle, word: str) -> Phrase:
    return row([*(trailed(marked(part, particle), word) for part in parts[:-1]), parts[-1]])
