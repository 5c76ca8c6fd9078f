"""The words of the tables as values: what they are in both languages, and what goes with what.

An English word has one Korean counterpart, except where the words beside it decide: *play the piano* is
연주하다, *play soccer* 하다, *play* 놀다. Verbs and adjectives name the nouns that they are said with, so
that people read books and not rivers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from jumok.data.english_korean import korean, words
from jumok.data.english_korean.english import Agreement, add_ed, add_ing, add_s
from jumok.data.english_korean.korean import Group, Particle, Stem, Tense
from jumok.data.english_korean.phrases import Phrase, led, marked, said, trailed

__all__ = [
    "ADJECTIVES", "ADJECTIVES_OF", "ANIMALS", "BECOME", "DATIVES", "DEGREES", "FEELINGS", "FIRST_PERSONS",
    "FOLK", "FREQUENCIES", "GOALS", "INTRANSITIVES", "LYING", "NAMES", "NOUNS", "NOW", "NUMBERS",
    "PEOPLE", "PERSONS", "PLACES", "POSITIONS", "PROFESSIONS", "PRONOUNS", "PROPER_PLACES", "RELATIONS",
    "RIDES", "SHOWN", "THIRD_PERSONS", "TIMES", "TOOLS", "TOWNS", "TRANSITIVES", "VERBS_OF", "VERBS_TO",
    "WEATHER",
    "Adjective", "Goal", "Noun", "Place", "Pronoun", "Verb", "nouns",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Noun:
    """``plural`` and ``counter`` (책 두 권) are empty where one does not count: water.

    ``bare``: it has no article either (soccer). ``owned``: it may be mine.
    """

    english: str
    plural: str
    korean: str
    counter: str
    kind: str
    bare: bool
    owned: bool

    @property
    def is_person(self) -> bool:
        return self.kind in ("person", "kin")

    @property
    def lives(self) -> bool:
        return self.is_person or self.kind == "animal"


@dataclass(frozen=True, eq=False)
class Pronoun:
    """i, me, my, 나."""

    subject: str
    object: str
    possessive: str
    korean: str
    agreement: Agreement
    many: bool


@dataclass(frozen=True, eq=False)
class Place:
    """Where one is (``preposition``: in, at) or goes to (``towards``: to, or nothing): a noun or a name."""

    preposition: str
    towards: str
    what: Noun | Phrase


@dataclass(frozen=True, eq=False)
class Verb:
    """A verb, and what it may be said with.

    ``particle`` follows it in English (wait *for*), ``lead`` comes before it in Korean (*have*: 가지고 있다),
    ``denial`` negates it (먹지 않다, 찾지 못하다), or ``opposite`` says its negation in one word (*not know*
    is 모르다). ``goes_on``: it takes a while, so that one can be doing it, or do it and then something else.
    ``feels``: a lasting state, that nobody can or must be in.
    """

    base: str
    past: str
    ing: str
    particle: str
    lead: str
    stem: Stem
    denial: Stem
    opposite: Stem | None
    goes_on: bool
    feels: bool
    manners: tuple[Phrase, ...]
    objects: tuple[Noun, ...]

    @property
    def third(self) -> str:
        """The form after he, she and it."""
        return "has" if self.base == "have" else add_s(self.base)

    @property
    def is_done_to_people(self) -> bool:
        return any(noun.is_person for noun in self.objects)

    def tells_tense(self, agreement: Agreement) -> bool:
        """False where present and past are written alike: *they read*."""
        return self.base != self.past or agreement is Agreement.SINGULAR


@dataclass(frozen=True, eq=False)
class Goal:
    """A verb that names a place: where one goes to (``towards``) or is, with the particle of the place."""

    verb: Verb
    towards: bool
    particle: Particle
    places: list[Place]


@dataclass(frozen=True, eq=False)
class Adjective:
    """An adjective, and the nouns that it may be said of."""

    english: str
    stem: Stem
    nouns: tuple[Noun, ...]


def _spaced(entry: str) -> str:
    return entry.replace("_", " ")


def _rows(table: str) -> list[list[str]]:
    """The lines of a table, split at blanks."""
    return [line.split() for line in table.strip().splitlines()]


def _pairs(table: str) -> list[tuple[str, str]]:
    """A table that is English and Korean in turn."""
    entries = [_spaced(entry) for entry in table.split()]
    return list(zip(entries[::2], entries[1::2], strict=True))


def _read_nouns() -> dict[str, Noun]:
    found = {}
    not_owned = words.NOT_OWNED.replace("\n", "").split("+")
    for kind, counter, *entries in _rows(words.NOUNS):
        counted = counter not in ("-", "=")
        for forms, counterpart in _pairs(" ".join(entries)):
            english, _, plural = forms.partition("/")
            found[english] = Noun(
                english=english,
                plural=(plural or add_s(english)) if counted else "",
                korean=counterpart,
                counter=counter if counted else "",
                kind=kind,
                bare=counter == "=",
                owned=english not in not_owned and kind not in not_owned,
            )
    return found


NOUNS: Final = _read_nouns()


def nouns(entry: str) -> tuple[Noun, ...]:
    """The nouns of some kinds, groups of kinds, or single ones: ``nouns("people+animal+ball")``."""
    found: dict[str, Noun] = {}
    for part in entry.split("+"):
        kinds = words.GROUPS.get(part, part).split()
        some = [noun for noun in NOUNS.values() if noun.kind in kinds] or [NOUNS[_spaced(part)]]
        found |= {noun.english: noun for noun in some}
    return tuple(found.values())


def _stem(entry: str, group: Group) -> Stem:
    form, _, irregular = entry.partition("/")
    return Stem(form.removesuffix("다"), Group.EXISTENCE if form.endswith("있다") else group, irregular)


def _verb(forms: str, entry: str, nature: str = ".", manners: str = "-", objects: str = "-") -> Verb:
    base, past, ing = (*forms.split("/"), "", "")[:3]
    base, _, particle = base.partition("_")
    entry, _, negation = entry.partition("|")
    lead, _, form = entry.rpartition("_")
    group = Group.FEELING if nature == "=" else Group.ACTION
    stem = _stem(form, group)
    return Verb(
        base=base,
        past=past or add_ed(base),
        ing=ing or add_ing(base),
        particle=particle,
        lead=lead,
        stem=stem,
        denial=Stem("못하", group) if negation == "-지_못하다" else korean.negative(stem),
        opposite=_stem(negation, group) if negation and not negation.startswith("-") else None,
        goes_on=nature == "+",
        feels=nature == "=",
        manners=tuple(said(*words.MANNERS[letter]) for letter in manners.strip("-")),
        objects=nouns(objects) if objects != "-" else (),
    )


def _time(english: str, counterpart: str) -> Phrase:
    function, _, content = _spaced(english).rpartition("|")
    phrase = said(content, _spaced(counterpart))
    return led(function, phrase) if function else phrase


def _position(english: str, counterpart: str) -> Phrase:
    """*in front of*: 앞에 says *front*, and holds the others."""
    parts = english.split("|")
    if len(parts) == 3:
        return trailed(led(parts[0], said(parts[1], counterpart)), parts[2])
    return trailed(said(parts[0], counterpart), " ".join(parts[1:]))


PEOPLE: Final = nouns("people")
PERSONS: Final = nouns("person")
PROFESSIONS: Final = nouns(words.PROFESSIONS)
RELATIONS: Final = nouns(words.RELATIONS)
FOLK: Final = nouns(words.FOLK)
SHOWN: Final = nouns(words.SHOWN)
LYING: Final = nouns(words.LYING)
NAMES: Final = _pairs(words.NAMES)
PRONOUNS: Final = [
    Pronoun(subject, object_, possessive, counterpart, Agreement[agreement], number == "many")
    for subject, object_, possessive, counterpart, agreement, number in _rows(words.PRONOUNS)
]
FIRST_PERSONS: Final = [one for one in PRONOUNS if one.subject in ("i", "we")]
THIRD_PERSONS: Final = [one for one in PRONOUNS if one.subject in ("he", "she", "they")]
NUMBERS: Final = _pairs(words.NUMBERS)

TRANSITIVES: Final = [_verb(*row) for row in _rows(words.TRANSITIVES)]
INTRANSITIVES: Final = [_verb(*row) for row in _rows(words.INTRANSITIVES)]
DATIVES: Final = [
    _verb(forms, entry, nature, objects=objects) for forms, entry, nature, objects in _rows(words.DATIVES)
]
WEATHER: Final = [_verb("rain", "비가_오다", "+"), _verb("snow", "눈이_오다", "+")]
BECOME: Final = _verb("become/became", "되다")
TOOLS: Final = {verb: nouns(entry) for verb, entry in words.TOOLS.items()}
RIDES: Final = [led("by", marked(said(*pair), korean.BY)) for pair in _pairs(words.RIDES)]
ANIMALS: Final = [
    (replace(verb, objects=nouns(objects) if objects != "-" else ()), nouns(subjects))
    for base, objects, subjects in _rows(words.ANIMALS)
    for verb in (TRANSITIVES if objects != "-" else INTRANSITIVES)
    if verb.base == base
]

ADJECTIVES: Final = [
    Adjective(english, _stem(form, Group.STATE), nouns(entry))
    for english, form, entry in _rows(words.ADJECTIVES)
]
FEELINGS: Final = [one for one in ADJECTIVES if one.english in words.FEELINGS.split()]
# What can be said of a noun: before it, with it as the subject, with it as the object.
ADJECTIVES_OF: Final = {noun: [one for one in ADJECTIVES if noun in one.nouns] for noun in NOUNS.values()}
VERBS_OF: Final = {
    noun: TRANSITIVES if noun.is_person else [verb for verb, subjects in ANIMALS if noun in subjects]
    for noun in NOUNS.values()
}
VERBS_TO: Final = {noun: [verb for verb in TRANSITIVES if noun in verb.objects] for noun in NOUNS.values()}

PLACES: Final = [Place(row[0], "to", noun) for row in _rows(words.PLACES) for noun in nouns(row[1])]
PROPER_PLACES: Final = [
    Place(preposition, towards.strip("-"), said(english, counterpart))
    for preposition, towards, english, counterpart in _rows(words.PROPER_PLACES)
]
TOWNS: Final = [place for place in PROPER_PLACES if place.towards]
GOALS: Final = [
    Goal(
        verb=_verb(*row[:4]),
        towards=row[4] == "to",
        particle={"에": korean.AT, "로": korean.BY}[row[5]],
        places=TOWNS if row[6] == "towns" else [*PLACES, *PROPER_PLACES],
    )
    for row in _rows(words.GOALS)
]
POSITIONS: Final = [(_position(*row[:2]), nouns(row[2])) for row in _rows(words.POSITIONS)]

TIMES: Final = {
    tense: [_time(*row[1:]) for row in _rows(words.TIMES) if tense.name in row[0].split(",")]
    for tense in Tense
}
DEGREES: Final = [said(*pair) for pair in _pairs(words.DEGREES)]
FREQUENCIES: Final = [said(*pair) for pair in _pairs(words.FREQUENCIES)]
NOW: Final = said("now", "지금")
