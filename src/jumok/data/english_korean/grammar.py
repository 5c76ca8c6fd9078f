"""The grammar: draws a sentence at random, in English and in Korean at once.

Every rule puts phrases together in the order of each language. So that one English sentence has one
translation, the rules keep away from what English leaves open: behind a relative clause at the end nothing
stands that might belong to either clause, *they read* is always the past, and where *and* joins clauses it
joins no noun phrases.

>>> phrase = sentence(Dice(9))
>>> " ".join(phrase.english)
"this was not eunji's small tree"
>>> " ".join(phrase.korean)
'이것은 은지의 작은 나무가 아니었다'
"""

from __future__ import annotations

from jumok.data.english_korean import lexicon
from jumok.data.english_korean.clauses import Clause, Clauses, Scope
from jumok.data.english_korean.dice import Dice
from jumok.data.english_korean.korean import TOPIC, Ending, Tense
from jumok.data.english_korean.phrases import Phrase, arrange, led, marked, row, said, trailed, unsaid
from jumok.data.english_korean.predicates import Mood, bare, chained, verbal, willing

__all__ = ["sentence"]

TENSES = {Tense.PAST: 0.5, Tense.PRESENT: 0.3, Tense.FUTURE: 0.2}
CLAUSES = {1: 0.8, 2: 0.11, 3: 0.04, 4: 0.025, 5: 0.015, 6: 0.01}
VERBS = [verb for verb in (*lexicon.TRANSITIVES, *lexicon.INTRANSITIVES) if not verb.feels]
LASTING = [verb for verb in VERBS if verb.goes_on]


def sentence(dice: Dice) -> Phrase:
    """Draws a sentence."""
    tense = dice.weigh(TENSES)
    clauses = Clauses(dice)
    if (count := dice.weigh(CLAUSES)) > 1:
        return _joined(clauses, tense, count)
    kinds = {_single: 0.66, _chain: 0.1, _contrast: 0.04, _subordinate: 0.2}
    return dice.weigh(kinds)(clauses, tense)


def _single(clauses: Clauses, tense: Tense) -> Phrase:
    return clauses.draw(Scope(tense, lists=True, relative=True, new=True)).phrase


def _joined(clauses: Clauses, tense: Tense, count: int) -> Phrase:
    """Clauses joined by and, one of them perhaps by but; the last one may have a clause of its own."""
    dice = clauses.dice
    turn = dice.pick(range(1, count)) if dice.chance(0.4) else 0
    parts = []
    for number in range(1, count):
        ending, word = (Ending.BUT, "but") if number == turn else (Ending.AND, "and")
        parts.append(trailed(clauses.draw(Scope(tense, ending, relative=True)).phrase, word))
    if dice.chance(0.2):
        return row([*parts, _subordinate(clauses, tense)])
    return row([*parts, clauses.draw(Scope(tense, relative=True)).phrase])


def _subordinate(clauses: Clauses, tense: Tense) -> Phrase:
    """A clause, and why, when or if: in Korean, that comes first."""
    dice = clauses.dice
    ending = dice.weigh({Ending.BECAUSE: 0.5, Ending.WHEN: 0.3, Ending.IF: 0.9 * (tense is Tense.FUTURE)})
    subject = clauses.nominals.pronoun(subject=True) if dice.chance(0.35) else None
    feeling = dice.chance(0.5)
    scope = Scope(tense, timed=ending is not Ending.WHEN, event=True, feeling=feeling)
    main = clauses.draw(scope, subject)
    if subject is None:  # else *he* would be taken for the one whom the first clause is about
        clauses.nominals.keep_from(lexicon.THIRD_PERSONS)
    earlier = Tense.PAST if tense is Tense.PAST else Tense.PRESENT
    within = Scope(earlier, ending, new=True, timed=False, event=True, feeling=not feeling, embedded=True)
    other = clauses.draw(within, subject)
    if subject is None:
        why, what = _because(ending, other.phrase), main.phrase
        return arrange([what, why], [why, what])
    # Of the same person, the subject is said once: i slept because i was tired, 나는 피곤했기 때문에 잤다.
    why = _because(ending, row([unsaid(" ".join(subject.phrase.english)), other.predicate]))
    who = row([main.when, main.subject])
    return arrange([who, main.predicate, why], [who, why, main.predicate])


def _because(ending: Ending, clause: Phrase) -> Phrase:
    if ending is Ending.IF:
        return led("if", clause)
    word = said("because", "때문에") if ending is Ending.BECAUSE else said("when", "때")
    return arrange([word, clause], [clause, word])


def _chain(clauses: Clauses, tense: Tense) -> Phrase:
    """One thing after the other: ate bread and slept, 빵을 먹고 잤다."""
    dice = clauses.dice
    subject = clauses.subject(Scope(tense, lists=True))
    form = Scope(tense).form(subject.agreement)
    parts = []
    for _ in range(2 if dice.chance(0.25) else 1):
        verb = clauses.verb(LASTING, form)
        parts.append(trailed(clauses.around(verb, chained(verb, form)), "and"))
    verb = clauses.verb(VERBS, form)
    if tense is Tense.FUTURE:
        predicate = willing(row([*parts, clauses.around(verb, bare(verb))]), Ending.PLAIN)
    else:
        predicate = row([*parts, clauses.around(verb, verbal(verb, Mood.SIMPLE, form))])
    when = clauses.time(tense) if dice.chance(0.25) else None
    return Clause(when, marked(subject.phrase, TOPIC), predicate).phrase


def _contrast(clauses: Clauses, tense: Tense) -> Phrase:
    """ate bread but did not drink water: 빵을 먹었지만 물을 마시지 않았다."""
    subject = clauses.subject(Scope(tense, lists=True))
    moods = (Mood.SIMPLE, Mood.NOT) if clauses.dice.chance(0.6) else (Mood.NOT, Mood.SIMPLE)
    parts = []
    for mood, ending in zip(moods, (Ending.BUT, Ending.PLAIN), strict=True):
        form = Scope(tense, ending).form(subject.agreement)
        verb = clauses.verb(lexicon.TRANSITIVES, form)
        parts.append(clauses.around(verb, verbal(verb, mood, form)))
    return row([marked(subject.phrase, TOPIC), trailed(parts[0], "but"), parts[1]])
