"""Predicates in both languages: verbs in all moods, adjectives, and *be*.

English auxiliaries precede the verb, and Korean ones follow it, so that most predicates are mirror images::

    will  not  read        did not  eat        is   not  sleeping      cannot   go

    읽지  않을  것이다       먹지 않았다          자고  있지  않다         갈  수 없다

>>> from jumok.data.builtin.english_korean import lexicon
>>> read = next(verb for verb in lexicon.TRANSITIVES if verb.base == "read")
>>> form = PredicateForm(SubjectAgreement.SINGULAR, Tense.FUTURE)
>>> will_not_read = make_verb_phrase(read, Mood.NOT, form)
>>> will_not_read.korean, will_not_read.sure_links
(('읽지', '않을', '것이다'), ((0, 2), (1, 1), (2, 0)))
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from jumok.data.builtin.english_korean import english, korean
from jumok.data.builtin.english_korean.english import SubjectAgreement
from jumok.data.builtin.english_korean.korean import Ending, PredicateGroup, Stem, Tense, conjugate
from jumok.data.builtin.english_korean.lexicon import Adjective, Verb
from jumok.data.builtin.english_korean.phrases import (
    Phrase,
    add_particle,
    align_words,
    append_english,
    arrange,
    change_last_korean,
    concatenate,
    prepend_english,
)

EXIST_STEM = Stem("있", PredicateGroup.EXISTENCE)
NOT_EXIST_STEM = Stem("없", PredicateGroup.EXISTENCE)
NOT_BE_STEM = Stem("아니", PredicateGroup.COPULA)
THING_STEM = Stem("것이", PredicateGroup.COPULA)
DO_STEM, BECOME_STEM = Stem("하"), Stem("되")


class Mood(enum.Enum):
    """The mood of a verb."""

    SIMPLE = "reads"
    NOT = "does not read"
    GOING_ON = "is reading"
    NOT_GOING_ON = "is not reading"
    CAN = "can read"
    CANNOT = "cannot read"
    MUST = "must read"
    MUST_NOT = "must not read"


@dataclass(frozen=True)
class PredicateForm:
    """Agreement, tense and Korean ending of a predicate."""

    agreement: SubjectAgreement
    tense: Tense
    ending: Ending = Ending.PLAIN


def make_verb_phrase(verb: Verb, mood: Mood, form: PredicateForm) -> Phrase:
    """A verb without its objects. Only simple and negated verbs have a future, and *must not* has no past."""
    match mood:
        case Mood.SIMPLE:
            english_form = verb.base if form.tense is Tense.FUTURE else _inflect_english(verb, form)
            return _apply_tense(lambda word: _make_verb(verb, english_form, word), verb.stem, form)
        case Mood.NOT if verb.opposite_stem:
            negation = _apply_tense(lambda word: align_words(f"not {verb.base}", word), verb.opposite_stem, form)
            return (
                negation
                if form.tense is Tense.FUTURE
                else prepend_english(english.conjugate_do(form.agreement, form.tense), negation)
            )
        case Mood.NOT:
            main = _make_verb(verb, verb.base, verb.stem.text + "지")
            return _negate(english.conjugate_do(form.agreement, form.tense), main, verb.negation_stem, form)
        case Mood.GOING_ON:
            main = _make_verb(verb, verb.present_participle, verb.stem.text + "고")
            auxiliary = align_words(
                english.conjugate_be(form.agreement, form.tense),
                conjugate(EXIST_STEM, form.tense, form.ending),
            )
        case Mood.NOT_GOING_ON:
            main = _make_verb(verb, verb.present_participle, verb.stem.text + "고")
            negation = align_words("not", conjugate(korean.make_negative_stem(EXIST_STEM), form.tense, form.ending))
            auxiliary = concatenate(
                [
                    align_words(english.conjugate_be(form.agreement, form.tense), EXIST_STEM.text + "지"),
                    negation,
                ]
            )
        case Mood.CAN:
            main = _make_verb(verb, verb.base, conjugate(verb.stem, Tense.FUTURE, Ending.NOUN))
            word = "could" if form.tense is Tense.PAST else "can"
            auxiliary = align_words(word, f"수 {conjugate(EXIST_STEM, form.tense, form.ending)}")
        case Mood.CANNOT:
            main = _make_verb(verb, verb.base, conjugate(verb.stem, Tense.FUTURE, Ending.NOUN))
            word = "could not" if form.tense is Tense.PAST else "cannot"
            auxiliary = align_words(word, f"수 {conjugate(NOT_EXIST_STEM, form.tense, form.ending)}")
        case Mood.MUST:
            main = _make_verb(verb, verb.base, korean.make_infinitive(verb.stem) + "야")
            korean_form = conjugate(DO_STEM, form.tense, form.ending)
            auxiliary = (
                append_english(align_words("had", korean_form), "to")
                if form.tense is Tense.PAST
                else align_words("must", korean_form)
            )
        case Mood.MUST_NOT:
            main = _make_verb(verb, verb.base, conjugate(verb.stem, Tense.PRESENT, Ending.IF))
            must, negation = (
                align_words("must", conjugate(BECOME_STEM, form.tense, form.ending)),
                align_words("not", "안"),
            )
            auxiliary = arrange([must, negation], [negation, must])
    return arrange([auxiliary, main], [main, auxiliary])


def make_adjective_phrase(adjective: Adjective, degree: Phrase | None, negative: bool, form: PredicateForm) -> Phrase:
    """is (very) big: (매우) 크다. *will be*: 클 것이다."""
    be = "be" if form.tense is Tense.FUTURE else english.conjugate_be(form.agreement, form.tense)
    if negative:
        main = align_words(adjective.english, adjective.stem.text + "지")
        main = prepend_english("be", main) if form.tense is Tense.FUTURE else main
        return _negate(be, main, korean.make_negative_stem(adjective.stem), form)
    return _apply_tense(
        lambda word: prepend_english(be, concatenate([degree, align_words(adjective.english, word)])),
        adjective.stem,
        form,
    )


def make_copula_phrase(complement: Phrase, negative: bool, form: PredicateForm) -> Phrase:
    """is a student: 학생이다; is not a student: 학생이 아니다."""
    be = english.conjugate_be(form.agreement, form.tense)
    if negative:
        negation = prepend_english(be, align_words("not", conjugate(NOT_BE_STEM, form.tense, form.ending)))
        complement = add_particle(complement, korean.SUBJECT)
        return arrange([negation, complement], [complement, negation])
    return prepend_english(
        be,
        change_last_korean(
            complement,
            lambda word: conjugate(Stem(word + "이", PredicateGroup.COPULA), form.tense, form.ending),
        ),
    )


def make_existence_phrase(negative: bool, form: PredicateForm) -> Phrase:
    """*is* at a place: 있다; *is not*: 없다. The negation has no future."""
    be = "be" if form.tense is Tense.FUTURE else english.conjugate_be(form.agreement, form.tense)
    if negative:
        return prepend_english(be, align_words("not", conjugate(NOT_EXIST_STEM, form.tense, form.ending)))
    return _apply_tense(lambda word: align_words(be, word), EXIST_STEM, form)


def make_chained_verb(verb: Verb, form: PredicateForm) -> Phrase:
    """A verb before another one: *ate* bread and slept, 빵을 먹고 잤다. In Korean, it has no tense."""
    english_form = verb.base if form.tense is Tense.FUTURE else _inflect_english(verb, form)
    return _make_verb(verb, english_form, conjugate(verb.stem, Tense.PRESENT, Ending.AND))


def make_bare_verb(verb: Verb) -> Phrase:
    """The last verb of a chain after *will*."""
    return _make_verb(verb, verb.base, conjugate(verb.stem, Tense.FUTURE, Ending.NOUN))


def make_future_phrase(phrase: Phrase, ending: Ending) -> Phrase:
    """will …: … 것이다."""
    if ending is Ending.NOUN:  # the form before a noun is the future by itself: 읽을 책
        return prepend_english("will", phrase)
    will = align_words("will", conjugate(THING_STEM, Tense.PRESENT, ending))
    return arrange([will, phrase], [phrase, will])


def _inflect_english(verb: Verb, form: PredicateForm) -> str:
    if form.tense is Tense.PAST:
        return verb.past
    return verb.third_person if form.agreement is SubjectAgreement.SINGULAR else verb.base


def _make_verb(verb: Verb, english_form: str, korean_form: str) -> Phrase:
    phrase = align_words(english_form, f"{verb.korean_prefix} {korean_form}")
    return append_english(phrase, verb.particle) if verb.particle else phrase


def _apply_tense(make_phrase: Callable[[str], Phrase], stem: Stem, form: PredicateForm) -> Phrase:
    if form.tense is Tense.FUTURE:
        return make_future_phrase(make_phrase(conjugate(stem, Tense.FUTURE, Ending.NOUN)), form.ending)
    return make_phrase(conjugate(stem, form.tense, form.ending))


def _negate(helper: str, main: Phrase, negation_stem: Stem, form: PredicateForm) -> Phrase:
    """did not eat: 먹지 않았다. The auxiliary is linked like *not*; the future has none."""
    negation = _apply_tense(lambda word: align_words("not", word), negation_stem, form)
    if form.tense is not Tense.FUTURE:
        negation = prepend_english(helper, negation)
    return arrange([negation, main], [main, negation])
