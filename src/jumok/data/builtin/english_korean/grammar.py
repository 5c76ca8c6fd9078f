"""The synchronous grammar: draws a random sentence in English and Korean.

Every rule combines phrases in the order of each language. The rules avoid ambiguous English, so that a
sentence has only one translation: nothing follows a relative clause at the end that might belong to either
clause, *they read* is always past tense, and if *and* joins clauses, it joins no noun phrases.

>>> phrase = draw_sentence(PortableRandom(9))
>>> " ".join(phrase.english)
"this was not eunji's small tree"
>>> " ".join(phrase.korean)
'이것은 은지의 작은 나무가 아니었다'
"""

from __future__ import annotations

from jumok.data.builtin.english_korean import lexicon
from jumok.data.builtin.english_korean.clauses import Clause, ClauseSampler, ClauseScope
from jumok.data.builtin.english_korean.korean import TOPIC, Ending, Tense
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
from jumok.data.builtin.english_korean.predicates import (
    Mood,
    make_bare_verb,
    make_chained_verb,
    make_future_phrase,
    make_verb_phrase,
)

TENSE_WEIGHTS = {Tense.PAST: 0.5, Tense.PRESENT: 0.3, Tense.FUTURE: 0.2}
CLAUSE_COUNT_WEIGHTS = {1: 0.8, 2: 0.11, 3: 0.04, 4: 0.025, 5: 0.015, 6: 0.01}
ACTION_VERBS = [verb for verb in (*lexicon.TRANSITIVES, *lexicon.INTRANSITIVES) if not verb.is_stative]
PROGRESSIVE_VERBS = [verb for verb in ACTION_VERBS if verb.allows_progressive]


def draw_sentence(rng: PortableRandom) -> Phrase:
    """Draw a sentence."""
    tense = rng.weighted_choice(TENSE_WEIGHTS)
    clauses = ClauseSampler(rng)
    if (count := rng.weighted_choice(CLAUSE_COUNT_WEIGHTS)) > 1:
        return _draw_joined(clauses, tense, count)
    kinds = {_draw_single: 0.66, _draw_chain: 0.1, _draw_contrast: 0.04, _draw_subordinate: 0.2}
    return rng.weighted_choice(kinds)(clauses, tense)


def _draw_single(clauses: ClauseSampler, tense: Tense) -> Phrase:
    return clauses.draw_clause(ClauseScope(tense, allow_lists=True, allow_relative=True, allow_new_subject=True)).phrase


def _draw_joined(clauses: ClauseSampler, tense: Tense, count: int) -> Phrase:
    """Clauses joined by *and*, and optionally one *but*. The last one may have a subordinate clause."""
    rng = clauses.rng
    but_position = rng.choice(range(1, count)) if rng.bernoulli(0.4) else 0
    parts = []
    for position in range(1, count):
        ending, word = (Ending.BUT, "but") if position == but_position else (Ending.AND, "and")
        parts.append(append_english(clauses.draw_clause(ClauseScope(tense, ending, allow_relative=True)).phrase, word))
    if rng.bernoulli(0.2):
        return concatenate([*parts, _draw_subordinate(clauses, tense)])
    return concatenate([*parts, clauses.draw_clause(ClauseScope(tense, allow_relative=True)).phrase])


def _draw_subordinate(clauses: ClauseSampler, tense: Tense) -> Phrase:
    """A clause with *because*, *when* or *if*. In Korean, the subordinate clause comes first."""
    rng = clauses.rng
    ending = rng.weighted_choice({Ending.BECAUSE: 0.5, Ending.WHEN: 0.3, Ending.IF: 0.9 * (tense is Tense.FUTURE)})
    subject = clauses.nominals.draw_pronoun(as_subject=True) if rng.bernoulli(0.35) else None
    has_feeling = rng.bernoulli(0.5)
    scope = ClauseScope(tense, allow_time=ending is not Ending.WHEN, is_event=True, allow_feeling=has_feeling)
    main = clauses.draw_clause(scope, subject)
    if subject is None:  # otherwise *he* would refer to the subject of the first clause
        clauses.nominals.exclude(lexicon.THIRD_PERSONS)
    subordinate_tense = Tense.PAST if tense is Tense.PAST else Tense.PRESENT
    subordinate_scope = ClauseScope(
        subordinate_tense,
        ending,
        allow_new_subject=True,
        allow_time=False,
        is_event=True,
        allow_feeling=not has_feeling,
        is_embedded=True,
    )
    subordinate = clauses.draw_clause(subordinate_scope, subject)
    if subject is None:
        reason, consequence = _add_conjunction(ending, subordinate.phrase), main.phrase
        return arrange([consequence, reason], [reason, consequence])
    # Korean omits the repeated subject: i slept because i was tired, 나는 피곤했기 때문에 잤다.
    reason = _add_conjunction(
        ending, concatenate([make_unaligned(" ".join(subject.phrase.english)), subordinate.predicate])
    )
    subject_phrase = concatenate([main.time, main.subject])
    return arrange([subject_phrase, main.predicate, reason], [subject_phrase, reason, main.predicate])


def _add_conjunction(ending: Ending, clause: Phrase) -> Phrase:
    if ending is Ending.IF:
        return prepend_english("if", clause)
    word = align_words("because", "때문에") if ending is Ending.BECAUSE else align_words("when", "때")
    return arrange([word, clause], [clause, word])


def _draw_chain(clauses: ClauseSampler, tense: Tense) -> Phrase:
    """A sequence of actions: ate bread and slept, 빵을 먹고 잤다."""
    rng = clauses.rng
    subject = clauses.draw_subject(ClauseScope(tense, allow_lists=True))
    form = ClauseScope(tense).form(subject.agreement)
    parts = []
    for _ in range(2 if rng.bernoulli(0.25) else 1):
        verb = clauses.draw_verb(PROGRESSIVE_VERBS, form)
        parts.append(append_english(clauses.add_object(verb, make_chained_verb(verb, form)), "and"))
    verb = clauses.draw_verb(ACTION_VERBS, form)
    if tense is Tense.FUTURE:
        predicate = make_future_phrase(
            concatenate([*parts, clauses.add_object(verb, make_bare_verb(verb))]), Ending.PLAIN
        )
    else:
        predicate = concatenate([*parts, clauses.add_object(verb, make_verb_phrase(verb, Mood.SIMPLE, form))])
    time = clauses.draw_time(tense) if rng.bernoulli(0.25) else None
    return Clause(time, add_particle(subject.phrase, TOPIC), predicate).phrase


def _draw_contrast(clauses: ClauseSampler, tense: Tense) -> Phrase:
    """ate bread but did not drink water: 빵을 먹었지만 물을 마시지 않았다."""
    subject = clauses.draw_subject(ClauseScope(tense, allow_lists=True))
    moods = (Mood.SIMPLE, Mood.NOT) if clauses.rng.bernoulli(0.6) else (Mood.NOT, Mood.SIMPLE)
    parts = []
    for mood, ending in zip(moods, (Ending.BUT, Ending.PLAIN), strict=True):
        form = ClauseScope(tense, ending).form(subject.agreement)
        verb = clauses.draw_verb(lexicon.TRANSITIVES, form)
        parts.append(clauses.add_object(verb, make_verb_phrase(verb, mood, form)))
    return concatenate([add_particle(subject.phrase, TOPIC), append_english(parts[0], "but"), parts[1]])
