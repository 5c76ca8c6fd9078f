"""What is said of a subject, in both languages: verbs in all their moods, adjectives, *be*.

English puts its helpers before the verb, Korean behind it, so that most of these are mirror images::

    will  not  read        did not  eat        is   not  sleeping      cannot   go

    읽지  않을  것이다       먹지 않았다          자고  있지  않다         갈  수 없다

>>> from jumok.data.english_korean import lexicon
>>> read = next(verb for verb in lexicon.TRANSITIVES if verb.base == "read")
>>> will_not_read = verbal(read, Mood.NOT, Form(Agreement.SINGULAR, Tense.FUTURE))
>>> will_not_read.korean, will_not_read.sure
(('읽지', '않을', '것이다'), ((0, 2), (1, 1), (2, 0)))
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from jumok.data.english_korean import english, korean
from jumok.data.english_korean.english import Agreement
from jumok.data.english_korean.korean import Ending, Group, Stem, Tense, conjugate
from jumok.data.english_korean.lexicon import Adjective, Verb
from jumok.data.english_korean.phrases import Phrase, arrange, ended, led, marked, row, said, trailed

__all__ = ["Form", "Mood", "adjectival", "bare", "being_there", "chained", "copular", "verbal", "willing"]

BE_THERE = Stem("있", Group.EXISTENCE)
NOT_BE_THERE = Stem("없", Group.EXISTENCE)
NOT_BE = Stem("아니", Group.COPULA)
THING = Stem("것이", Group.COPULA)
DO, BECOME = Stem("하"), Stem("되")


class Mood(enum.Enum):
    """How a verb is meant."""

    SIMPLE = "reads"
    NOT = "does not read"
    GOING_ON = "is reading"
    NOT_GOING_ON = "is not reading"
    CAN = "can read"
    CANNOT = "cannot read"
    MUST = "must read"
    MUST_NOT = "must not read"


@dataclass(frozen=True)
class Form:
    """What a predicate agrees with, when it happens, and how Korean goes on after it."""

    agreement: Agreement
    tense: Tense
    ending: Ending = Ending.PLAIN


def verbal(verb: Verb, mood: Mood, form: Form) -> Phrase:
    """A verb, without its objects. Simple and negated ones have a future, and *must not* has no past."""
    match mood:
        case Mood.SIMPLE:
            shape = verb.base if form.tense is Tense.FUTURE else _inflected(verb, form)
            return _in_time(lambda word: _say(verb, shape, word), verb.stem, form)
        case Mood.NOT if verb.opposite:
            not_ = _in_time(lambda word: said(f"not {verb.base}", word), verb.opposite, form)
            return not_ if form.tense is Tense.FUTURE else led(english.do(form.agreement, form.tense), not_)
        case Mood.NOT:
            main = _say(verb, verb.base, verb.stem.text + "지")
            return _negated(english.do(form.agreement, form.tense), main, verb.denial, form)
        case Mood.GOING_ON:
            main = _say(verb, verb.ing, verb.stem.text + "고")
            helper = said(
                english.be(form.agreement, form.tense), conjugate(BE_THERE, form.tense, form.ending)
            )
        case Mood.NOT_GOING_ON:
            main = _say(verb, verb.ing, verb.stem.text + "고")
            not_ = said("not", conjugate(korean.negative(BE_THERE), form.tense, form.ending))
            helper = row([said(english.be(form.agreement, form.tense), BE_THERE.text + "지"), not_])
        case Mood.CAN:
            main = _say(verb, verb.base, conjugate(verb.stem, Tense.FUTURE, Ending.NOUN))
            word = "could" if form.tense is Tense.PAST else "can"
            helper = said(word, f"수 {conjugate(BE_THERE, form.tense, form.ending)}")
        case Mood.CANNOT:
            main = _say(verb, verb.base, conjugate(verb.stem, Tense.FUTURE, Ending.NOUN))
            word = "could not" if form.tense is Tense.PAST else "cannot"
            helper = said(word, f"수 {conjugate(NOT_BE_THERE, form.tense, form.ending)}")
        case Mood.MUST:
            main = _say(verb, verb.base, korean.infinitive(verb.stem) + "야")
            done = conjugate(DO, form.tense, form.ending)
            helper = trailed(said("had", done), "to") if form.tense is Tense.PAST else said("must", done)
        case Mood.MUST_NOT:
            main = _say(verb, verb.base, conjugate(verb.stem, Tense.PRESENT, Ending.IF))
            must, not_ = said("must", conjugate(BECOME, form.tense, form.ending)), said("not", "안")
            helper = arrange([must, not_], [not_, must])
    return arrange([helper, main], [main, helper])


def adjectival(adjective: Adjective, degree: Phrase | None, negative: bool, form: Form) -> Phrase:
    """is (very) big: (매우) 크다. *will be*: 클 것이다."""
    be = "be" if form.tense is Tense.FUTURE else english.be(form.agreement, form.tense)
    if negative:
        main = said(adjective.english, adjective.stem.text + "지")
        main = led("be", main) if form.tense is Tense.FUTURE else main
        return _negated(be, main, korean.negative(adjective.stem), form)
    return _in_time(lambda word: led(be, row([degree, said(adjective.english, word)])), adjective.stem, form)


def copular(what: Phrase, negative: bool, form: Form) -> Phrase:
    """is a student: 학생이다; is not a student: 학생이 아니다."""
    be = english.be(form.agreement, form.tense)
    if negative:
        not_ = led(be, said("not", conjugate(NOT_BE, form.tense, form.ending)))
        what = marked(what, korean.SUBJECT)
        return arrange([not_, what], [what, not_])
    return led(
        be, ended(what, lambda word: conjugate(Stem(word + "이", Group.COPULA), form.tense, form.ending))
    )


def being_there(negative: bool, form: Form) -> Phrase:
    """is, of a place: 있다; is not: 없다. Negated, it has no future."""
    be = "be" if form.tense is Tense.FUTURE else english.be(form.agreement, form.tense)
    if negative:
        return led(be, said("not", conjugate(NOT_BE_THERE, form.tense, form.ending)))
    return _in_time(lambda word: said(be, word), BE_THERE, form)


def chained(verb: Verb, form: Form) -> Phrase:
    """A verb that another one follows: *ate* bread and slept, 빵을 먹고 잤다. The last tells the tense."""
    shape = verb.base if form.tense is Tense.FUTURE else _inflected(verb, form)
    return _say(verb, shape, conjugate(verb.stem, Tense.PRESENT, Ending.AND))


def bare(verb: Verb) -> Phrase:
    """The last verb of a chain that *will* stands before."""
    return _say(verb, verb.base, conjugate(verb.stem, Tense.FUTURE, Ending.NOUN))


def willing(what: Phrase, ending: Ending) -> Phrase:
    """will …: … 것이다."""
    if ending is Ending.NOUN:  # the form before a noun is the future by itself: 읽을 책
        return led("will", what)
    will = said("will", conjugate(THING, Tense.PRESENT, ending))
    return arrange([will, what], [what, will])


def _inflected(verb: Verb, form: Form) -> str:
    if form.tense is Tense.PAST:
        return verb.past
    return verb.third if form.agreement is Agreement.SINGULAR else verb.base


def _say(verb: Verb, shape: str, word: str) -> Phrase:
    phrase = said(shape, f"{verb.lead} {word}")
    return trailed(phrase, verb.particle) if verb.particle else phrase


def _in_time(say: Callable[[str], Phrase], stem: Stem, form: Form) -> Phrase:
    if form.tense is Tense.FUTURE:
        return willing(say(conjugate(stem, Tense.FUTURE, Ending.NOUN)), form.ending)
    return say(conjugate(stem, form.tense, form.ending))


def _negated(helper: str, main: Phrase, denial: Stem, form: Form) -> Phrase:
    """did not eat: 먹지 않았다. The helper leans on *not*; in the future there is none."""
    not_ = _in_time(lambda word: said("not", word), denial, form)
    if form.tense is not Tense.FUTURE:
        not_ = led(helper, not_)
    return arrange([not_, main], [main, not_])
