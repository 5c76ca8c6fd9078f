"""Clauses: actions, states and locations.

The order of the parts of a clause::

    English  time · subject · frequency · VERB · object · recipient · manner · tool · companion · place · time
    Korean   time · subject · time · frequency · companion · place · tool · recipient · object · manner · VERB

A known subject is the topic of its clause (은/는). A new subject (*a student*, *two students*) is not, and
neither is the subject of an embedded clause (이/가).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jumok.data.builtin.english_korean import lexicon
from jumok.data.builtin.english_korean.english import SubjectAgreement
from jumok.data.builtin.english_korean.korean import (
    AND,
    AT,
    BY,
    IN,
    OBJECT,
    SUBJECT,
    TO,
    TOPIC,
    Ending,
    Particle,
    Tense,
)
from jumok.data.builtin.english_korean.lexicon import Adjective, PlacePhrase, Verb
from jumok.data.builtin.english_korean.nominals import (
    ANY_NOUN,
    INDEFINITE_PREDICATE,
    KNOWN_NOUN,
    KNOWN_WITHOUT_ADJECTIVE,
    NEW_NOUN,
    POSSESSED_PREDICATE,
    PREDICATE_NOUN,
    Nominal,
    NominalSampler,
)
from jumok.data.builtin.english_korean.phrases import (
    Phrase,
    add_particle,
    align_words,
    arrange,
    concatenate,
    make_unaligned,
    prepend_english,
)
from jumok.data.builtin.english_korean.portable_random import PortableRandom
from jumok.data.builtin.english_korean.predicates import (
    Mood,
    PredicateForm,
    make_adjective_phrase,
    make_copula_phrase,
    make_existence_phrase,
    make_verb_phrase,
)

MOOD_WEIGHTS = {
    Mood.SIMPLE: 0.62,
    Mood.NOT: 0.14,
    Mood.GOING_ON: 0.1,
    Mood.NOT_GOING_ON: 0.02,
    Mood.CAN: 0.04,
    Mood.CANNOT: 0.03,
    Mood.MUST: 0.04,
    Mood.MUST_NOT: 0.01,
}
STATED_MOODS = (Mood.SIMPLE, Mood.NOT)
PROGRESSIVE_MOODS = (Mood.GOING_ON, Mood.NOT_GOING_ON)
# Demonstrative pronouns.
DEMONSTRATIVES = {
    SubjectAgreement.SINGULAR: [("this", "이것"), ("that", "저것"), ("it", "그것")],
    SubjectAgreement.PLURAL: [("these", "이것들"), ("those", "저것들")],
}


@dataclass(frozen=True)
class ClauseScope:
    """The tense and the ending of a clause, and what it may contain.

    ``allow_lists``: noun phrases joined by *and*. ``allow_relative``: a relative clause at the end.
    ``allow_new_subject``: a subject that is mentioned for the first time. ``allow_time``: a time adverb.
    ``is_event``: only events; with ``allow_feeling``, also feelings. ``is_embedded``: the clause is inside
    another.
    """

    tense: Tense
    ending: Ending = Ending.PLAIN
    allow_lists: bool = False
    allow_relative: bool = False
    allow_new_subject: bool = False
    allow_time: bool = True
    is_event: bool = False
    allow_feeling: bool = False
    is_embedded: bool = False

    def form(self, agreement: SubjectAgreement) -> PredicateForm:
        """The form of the predicate."""
        return PredicateForm(agreement, self.tense, self.ending)


@dataclass(frozen=True)
class Clause:
    """Time, subject and predicate, in this order in both languages."""

    time: Phrase | None
    subject: Phrase | None
    predicate: Phrase

    @property
    def phrase(self) -> Phrase:
        """The complete clause."""
        return concatenate([self.time, self.subject, self.predicate])


@dataclass(frozen=True)
class VerbArguments:
    """A verb with its arguments and adverbs."""

    verb: Phrase
    object: Phrase | None = None
    recipient: Phrase | None = None
    manner: Phrase | None = None
    tool: Phrase | None = None
    companion: Phrase | None = None
    place: Phrase | None = None
    frequency: Phrase | None = None
    time: Phrase | None = None

    @property
    def phrase(self) -> Phrase:
        """All parts, in the order of each language."""
        p = self
        english = [p.frequency, p.verb, p.object, p.recipient, p.manner, p.tool, p.companion, p.place, p.time]
        korean = [p.time, p.frequency, p.companion, p.place, p.tool, p.recipient, p.object, p.manner, p.verb]
        return arrange(english, korean)


@dataclass(frozen=True)
class VerbAction:
    """An action. ``is_closed``: it ends with a relative clause, and nothing may follow."""

    verb: Verb
    mood: Mood
    arguments: VerbArguments
    is_closed: bool = False


class ClauseSampler:
    """Draws the clauses of one sentence."""

    def __init__(self, rng: PortableRandom) -> None:
        self.rng = rng
        self.nominals = NominalSampler(rng)

    def draw_clause(self, scope: ClauseScope, subject: Nominal | None = None) -> Clause:
        """A clause of any kind. If ``subject`` is given, an action or a feeling."""
        if subject:
            is_feeling = scope.allow_feeling and self.rng.bernoulli(0.5)
            return self._draw_feeling_clause(scope, subject) if is_feeling else self._draw_action_clause(scope, subject)
        if scope.is_event:
            kinds = {
                self._draw_action_clause: 0.7,
                self._draw_animal_clause: 0.04,
                self._draw_weather_clause: 0.1 * scope.is_embedded,
                self._draw_feeling_clause: 0.2 * scope.allow_feeling,
                self._draw_location_clause: 0.04,
            }
            return self.rng.weighted_choice(kinds)(scope)
        is_not_future = scope.tense is not Tense.FUTURE
        kinds = {
            self._draw_action_clause: 0.6,
            self._draw_animal_clause: 0.05,
            self._draw_weather_clause: 0.02,
            self._draw_quality_clause: 0.12,
            self._draw_identity_clause: 0.13 * (is_not_future and scope.ending is Ending.PLAIN),
            self._draw_becoming_clause: 0.03 * (scope.tense is not Tense.PRESENT),
            self._draw_location_clause: 0.04,
            self._draw_position_clause: 0.05 * is_not_future,
        }
        return self.rng.weighted_choice(kinds)(scope)

    def draw_subject(self, scope: ClauseScope) -> Nominal:
        """The subject of an action."""
        if scope.allow_lists and self.rng.bernoulli(0.1):
            return self.nominals.draw_pair()
        weights = ANY_NOUN if scope.allow_new_subject else KNOWN_NOUN
        relative = not scope.is_embedded and self.rng.bernoulli(0.08)
        return self.nominals.draw_any(lexicon.PEOPLE, weights, subject=True, relative=relative)

    def draw_verb(self, verbs: Sequence[Verb], form: PredicateForm) -> Verb:
        """One of the verbs whose form shows the tense."""
        while True:
            verb = self.nominals.draw_unused(verbs)
            shows_tense = form.tense is not Tense.PRESENT or verb.distinguishes_tense(form.agreement)
            if shows_tense and not (verb.is_stative and form.ending is Ending.WHEN):
                return verb

    def add_object(self, verb: Verb, verb_phrase: Phrase) -> Phrase:
        """A verb with its object, and optionally an adverb."""
        return VerbArguments(verb_phrase, self._draw_object(verb), manner=self._draw_manner(verb)).phrase

    def draw_time(self, tense: Tense) -> Phrase:
        """yesterday, on monday."""
        return self.rng.choice(lexicon.TIMES[tense])

    # Actions

    def _draw_action_clause(self, scope: ClauseScope, subject: Nominal | None = None) -> Clause:
        """minsu reads a book: 민수는 책을 읽는다."""
        subject = subject or self.draw_subject(scope)
        kinds = {self._draw_plain_action: 0.73, self._draw_motion: 0.15, self._draw_transfer: 0.12}
        action = self.rng.weighted_choice(kinds)(scope, scope.form(subject.agreement))
        if not action.is_closed and not action.verb.is_stative:
            action = self._add_adverbs(action, scope, subject.agreement)
        return self._add_time(action, scope, subject)

    def _draw_plain_action(self, scope: ClauseScope, form: PredicateForm) -> VerbAction:
        """reads a book: 책을 읽는다; sleeps: 잔다."""
        verb = self.draw_verb(lexicon.TRANSITIVES if self.rng.bernoulli(0.82) else lexicon.INTRANSITIVES, form)
        mood = self._draw_mood(verb, form)
        is_closed = scope.allow_relative and bool(verb.objects) and self.rng.bernoulli(0.12)
        object_phrase = self._draw_object(verb, allow_lists=scope.allow_lists, relative=is_closed)
        return VerbAction(verb, mood, VerbArguments(make_verb_phrase(verb, mood, form), object_phrase), is_closed)

    def _draw_motion(self, scope: ClauseScope, form: PredicateForm) -> VerbAction:
        """goes to the school: 학교에 간다."""
        options = [
            motion for motion in lexicon.MOTION_VERBS if not (motion.verb.is_stative and form.ending is Ending.WHEN)
        ]
        motion = self.nominals.draw_unused(options)
        mood = self._draw_mood(motion.verb, form)
        destination = self._make_place(
            self.rng.choice(motion.places), motion.particle, is_directional=motion.is_directional
        )
        allows_transport = motion.particle is AT and not motion.verb.is_stative  # 버스로 학교에, but not twice 로
        transport = (
            self.rng.choice(lexicon.TRANSPORT_PHRASES) if allows_transport and self.rng.bernoulli(0.25) else None
        )
        return VerbAction(
            motion.verb,
            mood,
            VerbArguments(make_verb_phrase(motion.verb, mood, form), recipient=destination, tool=transport),
        )

    def _draw_transfer(self, scope: ClauseScope, form: PredicateForm) -> VerbAction:
        """gives a book to minsu: 민수에게 책을 준다."""
        verb = self.nominals.draw_unused(lexicon.DATIVES)
        mood = self._draw_mood(verb, form)
        is_closed = scope.allow_relative and self.rng.bernoulli(0.12)
        object_phrase = self._draw_object(verb)
        recipient = self.nominals.draw_any(lexicon.PEOPLE, relative=is_closed).phrase
        return VerbAction(
            verb,
            mood,
            VerbArguments(
                make_verb_phrase(verb, mood, form),
                object_phrase,
                prepend_english("to", add_particle(recipient, TO)),
            ),
            is_closed,
        )

    def _add_adverbs(self, act: VerbAction, scope: ClauseScope, agreement: SubjectAgreement) -> VerbAction:
        """Add manner, tool, companion, place and frequency."""
        verb, arguments = act.verb, replace(act.arguments, manner=self._draw_manner(act.verb))
        if verb.base in lexicon.TOOLS and self.rng.bernoulli(0.15):
            tool = self.nominals.make_noun_phrase(
                self.nominals.draw_unused(lexicon.TOOLS[verb.base]), plural=False
            ).phrase
            arguments = replace(arguments, tool=prepend_english("with", add_particle(tool, BY)))
        elif verb.allows_progressive and not verb.takes_people and arguments.tool is None and self.rng.bernoulli(0.07):
            companion, together = (
                add_particle(self.nominals.draw_any(lexicon.PEOPLE).phrase, AND),
                align_words("with", "함께"),
            )
            arguments = replace(arguments, companion=arrange([together, companion], [companion, together]))
        if arguments.recipient is None and self.rng.bernoulli(0.15):
            arguments = replace(arguments, place=self._make_place(self.rng.choice(lexicon.PLACES), IN))
        allows_frequency = (
            act.mood is Mood.SIMPLE and scope.tense is not Tense.FUTURE and verb.distinguishes_tense(agreement)
        )
        if allows_frequency and not scope.is_embedded and self.rng.bernoulli(0.1):
            arguments = replace(arguments, frequency=self.rng.choice(lexicon.FREQUENCIES))
        return replace(act, arguments=arguments)

    def _add_time(self, act: VerbAction, scope: ClauseScope, subject: Nominal) -> Clause:
        """A clause with an optional time at the beginning or the end."""
        time = None
        if scope.allow_time and not act.verb.is_stative and not act.arguments.frequency and self.rng.bernoulli(0.25):
            is_present = scope.tense is Tense.PRESENT
            if act.mood is Mood.GOING_ON and is_present:
                time = lexicon.NOW
            elif act.mood in (Mood.SIMPLE, Mood.MUST) or (act.mood is Mood.NOT and not is_present):
                time = self.draw_time(scope.tense)
        if act.is_closed or self.rng.bernoulli(0.35):
            return Clause(time, _mark_subject(subject, scope), act.arguments.phrase)
        return Clause(None, _mark_subject(subject, scope), replace(act.arguments, time=time).phrase)

    def _draw_animal_clause(self, scope: ClauseScope) -> Clause:
        """the dog eats meat: 개는 고기를 먹는다."""
        verb, animals = self.rng.choice(lexicon.ANIMAL_VERBS)
        subject = self.nominals.draw_any(animals, ANY_NOUN if scope.allow_new_subject else KNOWN_NOUN)
        form = scope.form(subject.agreement)
        mood = self._draw_mood(verb, form, has_agency=False)
        action = VerbAction(verb, mood, VerbArguments(make_verb_phrase(verb, mood, form), self._draw_object(verb)))
        return self._add_time(action, scope, subject)

    def _draw_weather_clause(self, scope: ClauseScope) -> Clause:
        """it rains: 비가 온다."""
        verb, form = self.rng.choice(lexicon.WEATHER), scope.form(SubjectAgreement.SINGULAR)
        mood = self._draw_mood(verb, form, has_agency=False)
        action = VerbAction(verb, mood, VerbArguments(make_verb_phrase(verb, mood, form)))
        return self._add_time(action, scope, WEATHER_SUBJECT)

    # States

    def _draw_quality_clause(self, scope: ClauseScope) -> Clause:
        """the house is big: 집은 크다."""
        adjective = self.nominals.draw_unused(lexicon.ADJECTIVES)
        subject = self.nominals.draw_any(adjective.nouns, KNOWN_WITHOUT_ADJECTIVE, subject=True)
        return self._make_adjective_clause(adjective, subject, scope)

    def _draw_feeling_clause(self, scope: ClauseScope, subject: Nominal | None = None) -> Clause:
        """i am tired: 나는 피곤하다."""
        adjective = self.nominals.draw_unused(lexicon.FEELING_ADJECTIVES)
        return self._make_adjective_clause(adjective, subject or self.draw_subject(scope), scope)

    def _make_adjective_clause(self, adjective: Adjective, subject: Nominal, scope: ClauseScope) -> Clause:
        is_negative = self.rng.bernoulli(0.2)
        degree = self.rng.choice(lexicon.DEGREES) if not is_negative and self.rng.bernoulli(0.25) else None
        predicate = make_adjective_phrase(adjective, degree, is_negative, scope.form(subject.agreement))
        allows_time = adjective in lexicon.FEELING_ADJECTIVES and scope.tense is not Tense.PRESENT and scope.allow_time
        time = self.draw_time(scope.tense) if allows_time and self.rng.bernoulli(0.25) else None
        return Clause(None, _mark_subject(subject, scope), VerbArguments(predicate, time=time).phrase)

    def _draw_identity_clause(self, scope: ClauseScope) -> Clause:
        """that is a book: 저것은 책이다; minsu is a doctor: 민수는 의사이다."""
        if self.rng.bernoulli(0.55):
            noun = self.nominals.draw_unused(lexicon.POINTABLE_NOUNS)
            plural = bool(noun.plural) and self.rng.bernoulli(0.25)
            agreement = SubjectAgreement.PLURAL if plural else SubjectAgreement.SINGULAR
            subject = Nominal(align_words(*self.rng.choice(DEMONSTRATIVES[agreement])), agreement, plural)
            relative = scope.allow_relative and self.rng.bernoulli(0.15)
            complement = self.nominals.make_noun_phrase(noun, PREDICATE_NOUN, plural=plural, relative=relative).phrase
        else:
            subject = self.nominals.draw_any(lexicon.IDENTIFIABLE_PEOPLE, KNOWN_NOUN, subject=True)
            complement = self._draw_role(subject, possessed=self.rng.bernoulli(0.35))
        is_negative = self.rng.bernoulli(0.2)
        return Clause(
            None,
            _mark_subject(subject, scope),
            make_copula_phrase(complement, is_negative, scope.form(subject.agreement)),
        )

    def _draw_becoming_clause(self, scope: ClauseScope) -> Clause:
        """minsu became a doctor: 민수는 의사가 되었다."""
        subject = self.nominals.draw_any(lexicon.IDENTIFIABLE_PEOPLE, KNOWN_NOUN, subject=True)
        mood = Mood.NOT if self.rng.bernoulli(0.15) else Mood.SIMPLE
        complement = add_particle(self._draw_role(subject, possessed=False), SUBJECT)
        verb_phrase = make_verb_phrase(lexicon.BECOME, mood, scope.form(subject.agreement))
        time = self.draw_time(scope.tense) if mood is Mood.SIMPLE and self.rng.bernoulli(0.2) else None
        return Clause(None, _mark_subject(subject, scope), VerbArguments(verb_phrase, complement, time=time).phrase)

    def _draw_role(self, subject: Nominal, *, possessed: bool) -> Phrase:
        """A profession or a relation of a person: a doctor, my friend."""
        noun = self.nominals.draw_unused(lexicon.RELATIONS if possessed else lexicon.PROFESSIONS)
        return self.nominals.make_noun_phrase(
            noun, POSSESSED_PREDICATE if possessed else INDEFINITE_PREDICATE, plural=subject.is_plural
        ).phrase

    # Locations

    def _draw_location_clause(self, scope: ClauseScope) -> Clause:
        """minsu is in the library: 민수는 도서관에 있다."""
        subject = self.nominals.draw_any(lexicon.PEOPLE, KNOWN_NOUN, subject=True)
        place = self._make_place(self.rng.choice([*lexicon.PLACES, *lexicon.PROPER_PLACES]), AT)
        is_negative = scope.tense is not Tense.FUTURE and self.rng.bernoulli(0.15)
        existence = make_existence_phrase(is_negative, scope.form(subject.agreement))
        has_time = (
            scope.allow_time and not is_negative and scope.tense is not Tense.PRESENT and self.rng.bernoulli(0.25)
        )
        time = self.draw_time(scope.tense) if has_time else None
        return Clause(None, _mark_subject(subject, scope), VerbArguments(existence, recipient=place, time=time).phrase)

    def _draw_position_clause(self, scope: ClauseScope) -> Clause:
        """the cup is on the table: 컵은 탁자 위에 있다; there is a cup on the table: 탁자 위에 컵이 있다."""
        position, grounds = self.rng.choice(lexicon.POSITIONS)
        ground = self.nominals.make_noun_phrase(self.nominals.draw_unused(grounds), KNOWN_NOUN, plural=False).phrase
        location = arrange([position, ground], [ground, position])
        if self.rng.bernoulli(0.5):
            nominal = self.nominals.draw_any(lexicon.MOVABLE_NOUNS, KNOWN_NOUN)
            existence = make_existence_phrase(self.rng.bernoulli(0.15), scope.form(nominal.agreement))
            return Clause(None, _mark_subject(nominal, scope), arrange([existence, location], [location, existence]))
        nominal = self.nominals.draw_any(lexicon.MOVABLE_NOUNS, NEW_NOUN)
        existence = prepend_english("there", make_existence_phrase(False, scope.form(nominal.agreement)))
        subject_phrase = add_particle(nominal.phrase, SUBJECT)
        return Clause(None, None, arrange([existence, subject_phrase, location], [location, subject_phrase, existence]))

    # Parts of clauses

    def _draw_mood(self, verb: Verb, form: PredicateForm, *, has_agency: bool = True) -> Mood:
        """A mood of this verb. ``has_agency``: the subject allows *can* and *must*."""
        moods = {
            mood: MOOD_WEIGHTS[mood] for mood in STATED_MOODS if form.ending is not Ending.WHEN or mood is Mood.SIMPLE
        }
        if not (form.tense is Tense.FUTURE or verb.is_stative or form.ending is Ending.IF):
            if verb.allows_progressive:
                moods |= {mood: MOOD_WEIGHTS[mood] for mood in PROGRESSIVE_MOODS}
            if has_agency and form.ending is not Ending.WHEN:
                moods |= {mood: MOOD_WEIGHTS[mood] for mood in (Mood.CAN, Mood.CANNOT, Mood.MUST)}
                if form.tense is Tense.PRESENT:
                    moods[Mood.MUST_NOT] = MOOD_WEIGHTS[Mood.MUST_NOT]
        return self.rng.weighted_choice(moods)

    def _draw_object(self, verb: Verb, *, allow_lists: bool = False, relative: bool = False) -> Phrase | None:
        if not verb.objects:
            return None
        if allow_lists and not relative and len(verb.objects) > 1 and self.rng.bernoulli(0.12):
            nominal = self.nominals.draw_list(verb.objects, either=self.rng.bernoulli(0.2))
        else:
            nominal = self.nominals.draw_any(verb.objects, relative=relative)
        return add_particle(nominal.phrase, OBJECT)

    def _draw_manner(self, verb: Verb) -> Phrase | None:
        return self.rng.choice(verb.manners) if verb.manners and self.rng.bernoulli(0.12) else None

    def _make_place(self, place: PlacePhrase, particle: Particle, *, is_directional: bool = False) -> Phrase:
        """in the library: 도서관에서; to the library: 도서관에."""
        noun = place.noun
        noun_phrase = (
            noun if isinstance(noun, Phrase) else self.nominals.make_noun_phrase(noun, KNOWN_NOUN, plural=False).phrase
        )
        return prepend_english(
            place.direction_preposition if is_directional else place.preposition,
            add_particle(noun_phrase, particle),
        )


WEATHER_SUBJECT = Nominal(make_unaligned("it"), SubjectAgreement.SINGULAR)  # of the weather


def _mark_subject(subject: Nominal, scope: ClauseScope) -> Phrase:
    if subject is WEATHER_SUBJECT:
        return subject.phrase
    return add_particle(subject.phrase, TOPIC if subject.is_known and not scope.is_embedded else SUBJECT)
