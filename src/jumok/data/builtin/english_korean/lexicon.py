"""The lexicon: the parsed word tables, with both languages and selectional restrictions.

An English word has one Korean equivalent, unless it depends on adjacent words: *play the piano* is 연주하다,
*play soccer* is 하다, and *play* is 놀다. Verbs and adjectives list the nouns that they occur with, so that
people read books and not rivers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from jumok.data.builtin.english_korean import korean, word_tables
from jumok.data.builtin.english_korean.english import SubjectAgreement, add_ed, add_ing, add_s
from jumok.data.builtin.english_korean.korean import Particle, PredicateGroup, Stem, Tense
from jumok.data.builtin.english_korean.phrases import (
    Phrase,
    add_particle,
    align_words,
    append_english,
    prepend_english,
)


@dataclass(frozen=True, eq=False)
class Noun:
    """A noun. ``plural`` and ``counter`` (책 두 권) are empty for mass nouns (water).

    ``takes_no_article``: it has no article either (soccer). ``can_be_owned``: it may have a possessive.
    """

    english: str
    plural: str
    korean: str
    counter: str
    category: str
    takes_no_article: bool
    can_be_owned: bool

    @property
    def is_person(self) -> bool:
        return self.category in ("person", "kin")

    @property
    def is_animate(self) -> bool:
        return self.is_person or self.category == "animal"


@dataclass(frozen=True, eq=False)
class Pronoun:
    """i, me, my, 나."""

    subject: str
    object: str
    possessive: str
    korean: str
    agreement: SubjectAgreement
    is_plural: bool


@dataclass(frozen=True, eq=False)
class PlacePhrase:
    """A place, with the prepositions of location (in, at) and of direction (to, or none)."""

    preposition: str
    direction_preposition: str
    noun: Noun | Phrase


@dataclass(frozen=True, eq=False)
class Verb:
    """A verb, and how it may be used.

    ``particle`` follows it in English (wait *for*), and ``korean_prefix`` precedes it in Korean (*have* is
    가지고 있다). ``negation_stem`` negates it (먹지 않다, 찾지 못하다), or ``opposite_stem`` is its negation
    in one word (*not know* is 모르다). ``allows_progressive``: an activity with a duration, which can be
    ongoing or followed by another one. ``is_stative``: a state, for which *can* and *must* are not used.
    """

    base: str
    past: str
    present_participle: str
    particle: str
    korean_prefix: str
    stem: Stem
    negation_stem: Stem
    opposite_stem: Stem | None
    allows_progressive: bool
    is_stative: bool
    manners: tuple[Phrase, ...]
    objects: tuple[Noun, ...]

    @property
    def third_person(self) -> str:
        """The third person singular."""
        return "has" if self.base == "have" else add_s(self.base)

    @property
    def takes_people(self) -> bool:
        return any(noun.is_person for noun in self.objects)

    def distinguishes_tense(self, agreement: SubjectAgreement) -> bool:
        """Whether present and past have different forms, unlike *they read*."""
        return self.base != self.past or agreement is SubjectAgreement.SINGULAR


@dataclass(frozen=True, eq=False)
class MotionVerb:
    """A verb with a place of direction (``is_directional``) or location, and the particle of the place."""

    verb: Verb
    is_directional: bool
    particle: Particle
    places: list[PlacePhrase]


@dataclass(frozen=True, eq=False)
class Adjective:
    """An adjective, and the nouns that it may modify."""

    english: str
    stem: Stem
    nouns: tuple[Noun, ...]


def _replace_underscores(entry: str) -> str:
    return entry.replace("_", " ")


def _split_rows(table: str) -> list[list[str]]:
    """The lines of a table, split at spaces."""
    return [line.split() for line in table.strip().splitlines()]


def _split_pairs(table: str) -> list[tuple[str, str]]:
    """A table of English and Korean words in turn."""
    entries = [_replace_underscores(entry) for entry in table.split()]
    return list(zip(entries[::2], entries[1::2], strict=True))


def _read_nouns() -> dict[str, Noun]:
    nouns = {}
    not_owned = word_tables.NOT_OWNED.replace("\n", "").split("+")
    for category, counter, *entries in _split_rows(word_tables.NOUNS):
        is_counted = counter not in ("-", "=")
        for forms, counterpart in _split_pairs(" ".join(entries)):
            english, _, plural = forms.partition("/")
            nouns[english] = Noun(
                english=english,
                plural=(plural or add_s(english)) if is_counted else "",
                korean=counterpart,
                counter=counter if is_counted else "",
                category=category,
                takes_no_article=counter == "=",
                can_be_owned=english not in not_owned and category not in not_owned,
            )
    return nouns


NOUNS: Final = _read_nouns()


def find_nouns(entry: str) -> tuple[Noun, ...]:
    """The nouns of categories, groups of categories, or single nouns: ``"people+animal+ball"``."""
    nouns: dict[str, Noun] = {}
    for part in entry.split("+"):
        categories = word_tables.NOUN_GROUPS.get(part, part).split()
        matches = [noun for noun in NOUNS.values() if noun.category in categories] or [
            NOUNS[_replace_underscores(part)]
        ]
        nouns |= {noun.english: noun for noun in matches}
    return tuple(nouns.values())


def _parse_stem(entry: str, group: PredicateGroup) -> Stem:
    form, _, irregular = entry.partition("/")
    return Stem(form.removesuffix("다"), PredicateGroup.EXISTENCE if form.endswith("있다") else group, irregular)


def _parse_verb(forms: str, entry: str, nature: str = ".", manners: str = "-", objects: str = "-") -> Verb:
    base, past, ing = (*forms.split("/"), "", "")[:3]
    base, _, particle = base.partition("_")
    entry, _, negation = entry.partition("|")
    korean_prefix, _, form = entry.rpartition("_")
    group = PredicateGroup.FEELING if nature == "=" else PredicateGroup.ACTION
    stem = _parse_stem(form, group)
    return Verb(
        base=base,
        past=past or add_ed(base),
        present_participle=ing or add_ing(base),
        particle=particle,
        korean_prefix=korean_prefix,
        stem=stem,
        negation_stem=Stem("못하", group) if negation == "-지_못하다" else korean.make_negative_stem(stem),
        opposite_stem=_parse_stem(negation, group) if negation and not negation.startswith("-") else None,
        allows_progressive=nature == "+",
        is_stative=nature == "=",
        manners=tuple(align_words(*word_tables.MANNERS[letter]) for letter in manners.strip("-")),
        objects=find_nouns(objects) if objects != "-" else (),
    )


def _parse_time(english: str, counterpart: str) -> Phrase:
    function, _, content = _replace_underscores(english).rpartition("|")
    phrase = align_words(content, _replace_underscores(counterpart))
    return prepend_english(function, phrase) if function else phrase


def _parse_position(english: str, counterpart: str) -> Phrase:
    """*in front of*: 앞에 has a sure link to *front* and possible links to the others."""
    parts = english.split("|")
    if len(parts) == 3:
        return append_english(prepend_english(parts[0], align_words(parts[1], counterpart)), parts[2])
    return append_english(align_words(parts[0], counterpart), " ".join(parts[1:]))


PEOPLE: Final = find_nouns("people")
PERSONS: Final = find_nouns("person")
PROFESSIONS: Final = find_nouns(word_tables.PROFESSIONS)
RELATIONS: Final = find_nouns(word_tables.RELATIONS)
IDENTIFIABLE_PEOPLE: Final = find_nouns(word_tables.IDENTIFIABLE_PEOPLE)
POINTABLE_NOUNS: Final = find_nouns(word_tables.POINTABLE_NOUNS)
MOVABLE_NOUNS: Final = find_nouns(word_tables.MOVABLE_NOUNS)
NAMES: Final = _split_pairs(word_tables.NAMES)
PRONOUNS: Final = [
    Pronoun(subject, object_, possessive, counterpart, SubjectAgreement[agreement], number == "many")
    for subject, object_, possessive, counterpart, agreement, number in _split_rows(word_tables.PRONOUNS)
]
FIRST_PERSONS: Final = [pronoun for pronoun in PRONOUNS if pronoun.subject in ("i", "we")]
THIRD_PERSONS: Final = [pronoun for pronoun in PRONOUNS if pronoun.subject in ("he", "she", "they")]
NUMBERS: Final = _split_pairs(word_tables.NUMBERS)

TRANSITIVES: Final = [_parse_verb(*row) for row in _split_rows(word_tables.TRANSITIVES)]
INTRANSITIVES: Final = [_parse_verb(*row) for row in _split_rows(word_tables.INTRANSITIVES)]
DATIVES: Final = [
    _parse_verb(forms, entry, nature, objects=objects)
    for forms, entry, nature, objects in _split_rows(word_tables.DATIVES)
]
WEATHER: Final = [_parse_verb("rain", "비가_오다", "+"), _parse_verb("snow", "눈이_오다", "+")]
BECOME: Final = _parse_verb("become/became", "되다")
TOOLS: Final = {verb: find_nouns(entry) for verb, entry in word_tables.TOOLS.items()}
TRANSPORT_PHRASES: Final = [
    prepend_english("by", add_particle(align_words(*pair), korean.BY))
    for pair in _split_pairs(word_tables.TRANSPORT_NOUNS)
]
ANIMAL_VERBS: Final = [
    (replace(verb, objects=find_nouns(objects) if objects != "-" else ()), find_nouns(subjects))
    for base, objects, subjects in _split_rows(word_tables.ANIMAL_VERBS)
    for verb in (TRANSITIVES if objects != "-" else INTRANSITIVES)
    if verb.base == base
]

ADJECTIVES: Final = [
    Adjective(english, _parse_stem(form, PredicateGroup.STATE), find_nouns(entry))
    for english, form, entry in _split_rows(word_tables.ADJECTIVES)
]
FEELING_ADJECTIVES: Final = [
    adjective for adjective in ADJECTIVES if adjective.english in word_tables.FEELING_ADJECTIVES.split()
]
# The adjectives of a noun, and the verbs that take it as their subject or their object.
ADJECTIVES_BY_NOUN: Final = {
    noun: [adjective for adjective in ADJECTIVES if noun in adjective.nouns] for noun in NOUNS.values()
}
VERBS_BY_SUBJECT: Final = {
    noun: TRANSITIVES if noun.is_person else [verb for verb, subjects in ANIMAL_VERBS if noun in subjects]
    for noun in NOUNS.values()
}
VERBS_BY_OBJECT: Final = {noun: [verb for verb in TRANSITIVES if noun in verb.objects] for noun in NOUNS.values()}

PLACES: Final = [
    PlacePhrase(row[0], "to", noun) for row in _split_rows(word_tables.PLACES) for noun in find_nouns(row[1])
]
PROPER_PLACES: Final = [
    PlacePhrase(preposition, towards.strip("-"), align_words(english, counterpart))
    for preposition, towards, english, counterpart in _split_rows(word_tables.PROPER_PLACES)
]
TOWNS: Final = [place for place in PROPER_PLACES if place.direction_preposition]
MOTION_VERBS: Final = [
    MotionVerb(
        verb=_parse_verb(*row[:4]),
        is_directional=row[4] == "to",
        particle={"에": korean.AT, "로": korean.BY}[row[5]],
        places=TOWNS if row[6] == "towns" else [*PLACES, *PROPER_PLACES],
    )
    for row in _split_rows(word_tables.MOTION_VERBS)
]
POSITIONS: Final = [(_parse_position(*row[:2]), find_nouns(row[2])) for row in _split_rows(word_tables.POSITIONS)]

TIMES: Final = {
    tense: [_parse_time(*row[1:]) for row in _split_rows(word_tables.TIMES) if tense.name in row[0].split(",")]
    for tense in Tense
}
DEGREES: Final = [align_words(*pair) for pair in _split_pairs(word_tables.DEGREES)]
FREQUENCIES: Final = [align_words(*pair) for pair in _split_pairs(word_tables.FREQUENCIES)]
NOW: Final = align_words("now", "지금")
