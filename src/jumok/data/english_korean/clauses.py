"""Clauses: somebody does something, is something, is somewhere.

The order of a clause, as far as it has these parts::

    English  time · subject · often · VERB · object · to · manner · tool · company · place · time
    Korean   time · subject · time · often · company · place · tool · to · object · manner · VERB

A subject that is known is the topic of its clause (은/는); one that is new (*a student*, *two students*), or
that stands in a clause within another, is not (이/가).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jumok.data.english_korean import lexicon
from jumok.data.english_korean.dice import Dice
from jumok.data.english_korean.english import Agreement
from jumok.data.english_korean.korean import (
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
from jumok.data.english_korean.lexicon import Adjective, Place, Verb
from jumok.data.english_korean.nominals import (
    A_KIND,
    ANY,
    KNOWN,
    NEW,
    PREDICATE,
    SOMEONES,
    UNDESCRIBED,
    Nominal,
    Nominals,
)
from jumok.data.english_korean.phrases import Phrase, arrange, led, marked, row, said, unsaid
from jumok.data.english_korean.predicates import Form, Mood, adjectival, being_there, copular, verbal

__all__ = ["Clause", "Clauses", "Scope"]

MOODS = {
    Mood.SIMPLE: 0.62,
    Mood.NOT: 0.14,
    Mood.GOING_ON: 0.1,
    Mood.NOT_GOING_ON: 0.02,
    Mood.CAN: 0.04,
    Mood.CANNOT: 0.03,
    Mood.MUST: 0.04,
    Mood.MUST_NOT: 0.01,
}
STATED = (Mood.SIMPLE, Mood.NOT)
LASTING = (Mood.GOING_ON, Mood.NOT_GOING_ON)
# Alone, they stand for a thing that one points at.
POINTING = {
    Agreement.SINGULAR: [("this", "이것"), ("that", "저것"), ("it", "그것")],
    Agreement.PLURAL: [("these", "이것들"), ("those", "저것들")],
}


@dataclass(frozen=True)
class Scope:
    """Where a clause stands, and what it may hold there.

    ``lists``: noun phrases joined by and; ``relative``: a relative clause at its end; ``new``: a subject that
    is spoken of for the first time; ``timed``: it may say when; ``event``: it tells what happens, and not how
    things are, or, if it is one of ``feeling`` too, how somebody feels; ``embedded``: within another clause.
    """

    tense: Tense
    ending: Ending = Ending.PLAIN
    lists: bool = False
    relative: bool = False
    new: bool = False
    timed: bool = True
    event: bool = False
    feeling: bool = False
    embedded: bool = False

    def form(self, agreement: Agreement) -> Form:
        """How its predicate is said."""
        return Form(agreement, self.tense, self.ending)


@dataclass(frozen=True)
class Clause:
    """When, who, and what is said of them: in this order in both languages."""

    when: Phrase | None
    subject: Phrase | None
    predicate: Phrase

    @property
    def phrase(self) -> Phrase:
        """All of it."""
        return row([self.when, self.subject, self.predicate])


@dataclass(frozen=True)
class Parts:
    """A verb and what stands around it."""

    verb: Phrase
    object: Phrase | None = None
    to: Phrase | None = None
    manner: Phrase | None = None
    tool: Phrase | None = None
    company: Phrase | None = None
    place: Phrase | None = None
    often: Phrase | None = None
    time: Phrase | None = None

    @property
    def phrase(self) -> Phrase:
        """All of it, in the order of each language."""
        p = self
        english = [p.often, p.verb, p.object, p.to, p.manner, p.tool, p.company, p.place, p.time]
        korean = [p.time, p.often, p.company, p.place, p.tool, p.to, p.object, p.manner, p.verb]
        return arrange(english, korean)


@dataclass(frozen=True)
class Act:
    """What somebody does. ``closed``: it ends in a relative clause, and nothing may follow."""

    verb: Verb
    mood: Mood
    parts: Parts
    closed: bool = False


class Clauses:
    """Draws the clauses of one sentence."""

    def __init__(self, dice: Dice) -> None:
        self.dice = dice
        self.nominals = Nominals(dice)

    def draw(self, scope: Scope, subject: Nominal | None = None) -> Clause:
        """A clause of any kind; one about a person, if the ``subject`` is given."""
        if subject:
            feels = scope.feeling and self.dice.chance(0.5)
            return self._feeling(scope, subject) if feels else self._doing(scope, subject)
        if scope.event:
            kinds = {
                self._doing: 0.7,
                self._animal: 0.04,
                self._weather: 0.1 * scope.embedded,
                self._feeling: 0.2 * scope.feeling,
                self._whereabouts: 0.04,
            }
            return self.dice.weigh(kinds)(scope)
        at_hand = scope.tense is not Tense.FUTURE
        kinds = {
            self._doing: 0.6,
            self._animal: 0.05,
            self._weather: 0.02,
            self._quality: 0.12,
            self._identity: 0.13 * (at_hand and scope.ending is Ending.PLAIN),
            self._becoming: 0.03 * (scope.tense is not Tense.PRESENT),
            self._whereabouts: 0.04,
            self._position: 0.05 * at_hand,
        }
        return self.dice.weigh(kinds)(scope)

    def subject(self, scope: Scope) -> Nominal:
        """Somebody who does something."""
        if scope.lists and self.dice.chance(0.1):
            return self.nominals.pair()
        which = ANY if scope.new else KNOWN
        relative = not scope.embedded and self.dice.chance(0.08)
        return self.nominals.any_of(lexicon.PEOPLE, which, subject=True, relative=relative)

    def verb(self, verbs: Sequence[Verb], form: Form) -> Verb:
        """One of the verbs, such that it tells its tense."""
        while True:
            verb = self.nominals.fresh(verbs)
            told = form.tense is not Tense.PRESENT or verb.tells_tense(form.agreement)
            if told and not (verb.feels and form.ending is Ending.WHEN):
                return verb

    def around(self, verb: Verb, said_verb: Phrase) -> Phrase:
        """A verb with its object, and perhaps an adverb."""
        return Parts(said_verb, self._object(verb), manner=self._manner(verb)).phrase

    def time(self, tense: Tense) -> Phrase:
        """yesterday, on monday."""
        return self.dice.pick(lexicon.TIMES[tense])

    # What somebody does

    def _doing(self, scope: Scope, subject: Nominal | None = None) -> Clause:
        """minsu reads a book: 민수는 책을 읽는다."""
        subject = subject or self.subject(scope)
        kinds = {self._plainly: 0.73, self._going: 0.15, self._giving: 0.12}
        act = self.dice.weigh(kinds)(scope, scope.form(subject.agreement))
        if not act.closed and not act.verb.feels:
            act = self._with_adverbs(act, scope, subject.agreement)
        return self._at_a_time(act, scope, subject)

    def _plainly(self, scope: Scope, form: Form) -> Act:
        """reads a book: 책을 읽는다; sleeps: 잔다."""
        verb = self.verb(lexicon.TRANSITIVES if self.dice.chance(0.82) else lexicon.INTRANSITIVES, form)
        mood = self._mood(verb, form)
        closed = scope.relative and bool(verb.objects) and self.dice.chance(0.12)
        what = self._object(verb, lists=scope.lists, relative=closed)
        return Act(verb, mood, Parts(verbal(verb, mood, form), what), closed)

    def _going(self, scope: Scope, form: Form) -> Act:
        """goes to the school: 학교에 간다."""
        goals = [goal for goal in lexicon.GOALS if not (goal.verb.feels and form.ending is Ending.WHEN)]
        goal = self.nominals.fresh(goals)
        mood = self._mood(goal.verb, form)
        to = self._place(self.dice.pick(goal.places), goal.particle, towards=goal.towards)
        rides = goal.particle is AT and not goal.verb.feels  # 버스로 학교에: one 로 is enough
        by = self.dice.pick(lexicon.RIDES) if rides and self.dice.chance(0.25) else None
        return Act(goal.verb, mood, Parts(verbal(goal.verb, mood, form), to=to, tool=by))

    def _giving(self, scope: Scope, form: Form) -> Act:
        """gives a book to minsu: 민수에게 책을 준다."""
        verb = self.nominals.fresh(lexicon.DATIVES)
        mood = self._mood(verb, form)
        closed = scope.relative and self.dice.chance(0.12)
        what = self._object(verb)
        to = self.nominals.any_of(lexicon.PEOPLE, relative=closed).phrase
        return Act(verb, mood, Parts(verbal(verb, mood, form), what, led("to", marked(to, TO))), closed)

    def _with_adverbs(self, act: Act, scope: Scope, agreement: Agreement) -> Act:
        """How, with what, with whom, where, and how often."""
        verb, parts = act.verb, replace(act.parts, manner=self._manner(act.verb))
        if verb.base in lexicon.TOOLS and self.dice.chance(0.15):
            tool = self.nominals.noun(self.nominals.fresh(lexicon.TOOLS[verb.base]), plural=False).phrase
            parts = replace(parts, tool=led("with", marked(tool, BY)))
        elif verb.goes_on and not verb.is_done_to_people and parts.tool is None and self.dice.chance(0.07):
            friend, together = marked(self.nominals.any_of(lexicon.PEOPLE).phrase, AND), said("with", "함께")
            parts = replace(parts, company=arrange([together, friend], [friend, together]))
        if parts.to is None and self.dice.chance(0.15):
            parts = replace(parts, place=self._place(self.dice.pick(lexicon.PLACES), IN))
        told = act.mood is Mood.SIMPLE and scope.tense is not Tense.FUTURE and verb.tells_tense(agreement)
        if told and not scope.embedded and self.dice.chance(0.1):
            parts = replace(parts, often=self.dice.pick(lexicon.FREQUENCIES))
        return replace(act, parts=parts)

    def _at_a_time(self, act: Act, scope: Scope, subject: Nominal) -> Clause:
        """With a time at the beginning or the end, or without."""
        time = None
        if scope.timed and not act.verb.feels and not act.parts.often and self.dice.chance(0.25):
            now = scope.tense is Tense.PRESENT
            if act.mood is Mood.GOING_ON and now:
                time = lexicon.NOW
            elif act.mood in (Mood.SIMPLE, Mood.MUST) or (act.mood is Mood.NOT and not now):
                time = self.time(scope.tense)
        if act.closed or self.dice.chance(0.35):
            return Clause(time, _marked(subject, scope), act.parts.phrase)
        return Clause(None, _marked(subject, scope), replace(act.parts, time=time).phrase)

    def _animal(self, scope: Scope) -> Clause:
        """the dog eats meat: 개는 고기를 먹는다."""
        verb, animals = self.dice.pick(lexicon.ANIMALS)
        subject = self.nominals.any_of(animals, ANY if scope.new else KNOWN)
        form = scope.form(subject.agreement)
        mood = self._mood(verb, form, free=False)
        act = Act(verb, mood, Parts(verbal(verb, mood, form), self._object(verb)))
        return self._at_a_time(act, scope, subject)

    def _weather(self, scope: Scope) -> Clause:
        """it rains: 비가 온다."""
        verb, form = self.dice.pick(lexicon.WEATHER), scope.form(Agreement.SINGULAR)
        mood = self._mood(verb, form, free=False)
        act = Act(verb, mood, Parts(verbal(verb, mood, form)))
        return self._at_a_time(act, scope, IT)

    # What somebody or something is

    def _quality(self, scope: Scope) -> Clause:
        """the house is big: 집은 크다."""
        adjective = self.nominals.fresh(lexicon.ADJECTIVES)
        subject = self.nominals.any_of(adjective.nouns, UNDESCRIBED, subject=True)
        return self._being(adjective, subject, scope)

    def _feeling(self, scope: Scope, subject: Nominal | None = None) -> Clause:
        """i am tired: 나는 피곤하다."""
        adjective = self.nominals.fresh(lexicon.FEELINGS)
        return self._being(adjective, subject or self.subject(scope), scope)

    def _being(self, adjective: Adjective, subject: Nominal, scope: Scope) -> Clause:
        negative = self.dice.chance(0.2)
        degree = self.dice.pick(lexicon.DEGREES) if not negative and self.dice.chance(0.25) else None
        predicate = adjectival(adjective, degree, negative, scope.form(subject.agreement))
        passing = adjective in lexicon.FEELINGS and scope.tense is not Tense.PRESENT and scope.timed
        time = self.time(scope.tense) if passing and self.dice.chance(0.25) else None
        return Clause(None, _marked(subject, scope), Parts(predicate, time=time).phrase)

    def _identity(self, scope: Scope) -> Clause:
        """that is a book: 저것은 책이다; minsu is a doctor: 민수는 의사이다."""
        if self.dice.chance(0.55):
            noun = self.nominals.fresh(lexicon.SHOWN)
            plural = bool(noun.plural) and self.dice.chance(0.25)
            agreement = Agreement.PLURAL if plural else Agreement.SINGULAR
            subject = Nominal(said(*self.dice.pick(POINTING[agreement])), agreement, plural)
            relative = scope.relative and self.dice.chance(0.15)
            what = self.nominals.noun(noun, PREDICATE, plural=plural, relative=relative).phrase
        else:
            subject = self.nominals.any_of(lexicon.FOLK, KNOWN, subject=True)
            what = self._calling(subject, own=self.dice.chance(0.35))
        negative = self.dice.chance(0.2)
        return Clause(None, _marked(subject, scope), copular(what, negative, scope.form(subject.agreement)))

    def _becoming(self, scope: Scope) -> Clause:
        """minsu became a doctor: 민수는 의사가 되었다."""
        subject = self.nominals.any_of(lexicon.FOLK, KNOWN, subject=True)
        mood = Mood.NOT if self.dice.chance(0.15) else Mood.SIMPLE
        what = marked(self._calling(subject, own=False), SUBJECT)
        became = verbal(lexicon.BECOME, mood, scope.form(subject.agreement))
        time = self.time(scope.tense) if mood is Mood.SIMPLE and self.dice.chance(0.2) else None
        return Clause(None, _marked(subject, scope), Parts(became, what, time=time).phrase)

    def _calling(self, subject: Nominal, *, own: bool) -> Phrase:
        """What a person is, or is to somebody: a doctor, my friend."""
        noun = self.nominals.fresh(lexicon.RELATIONS if own else lexicon.PROFESSIONS)
        return self.nominals.noun(noun, SOMEONES if own else A_KIND, plural=subject.many).phrase

    # Where somebody or something is

    def _whereabouts(self, scope: Scope) -> Clause:
        """minsu is in the library: 민수는 도서관에 있다."""
        subject = self.nominals.any_of(lexicon.PEOPLE, KNOWN, subject=True)
        place = self._place(self.dice.pick([*lexicon.PLACES, *lexicon.PROPER_PLACES]), AT)
        negative = scope.tense is not Tense.FUTURE and self.dice.chance(0.15)
        there = being_there(negative, scope.form(subject.agreement))
        timed = scope.timed and not negative and scope.tense is not Tense.PRESENT and self.dice.chance(0.25)
        time = self.time(scope.tense) if timed else None
        return Clause(None, _marked(subject, scope), Parts(there, to=place, time=time).phrase)

    def _position(self, scope: Scope) -> Clause:
        """the cup is on the table: 컵은 탁자 위에 있다; there is a cup on the table: 탁자 위에 컵이 있다."""
        position, grounds = self.dice.pick(lexicon.POSITIONS)
        ground = self.nominals.noun(self.nominals.fresh(grounds), KNOWN, plural=False).phrase
        where = arrange([position, ground], [ground, position])
        if self.dice.chance(0.5):
            thing = self.nominals.any_of(lexicon.LYING, KNOWN)
            there = being_there(self.dice.chance(0.15), scope.form(thing.agreement))
            return Clause(None, _marked(thing, scope), arrange([there, where], [where, there]))
        thing = self.nominals.any_of(lexicon.LYING, NEW)
        there = led("there", being_there(False, scope.form(thing.agreement)))
        what = marked(thing.phrase, SUBJECT)
        return Clause(None, None, arrange([there, what, where], [where, what, there]))

    # Parts of clauses

    def _mood(self, verb: Verb, form: Form, *, free: bool = True) -> Mood:
        """A mood of this verb; ``free``: of somebody who can and must."""
        moods = {
            mood: MOODS[mood] for mood in STATED if form.ending is not Ending.WHEN or mood is Mood.SIMPLE
        }
        if not (form.tense is Tense.FUTURE or verb.feels or form.ending is Ending.IF):
            if verb.goes_on:
                moods |= {mood: MOODS[mood] for mood in LASTING}
            if free and form.ending is not Ending.WHEN:
                moods |= {mood: MOODS[mood] for mood in (Mood.CAN, Mood.CANNOT, Mood.MUST)}
                if form.tense is Tense.PRESENT:
                    moods[Mood.MUST_NOT] = MOODS[Mood.MUST_NOT]
        return self.dice.weigh(moods)

    def _object(self, verb: Verb, *, lists: bool = False, relative: bool = False) -> Phrase | None:
        if not verb.objects:
            return None
        if lists and not relative and len(verb.objects) > 1 and self.dice.chance(0.12):
            what = self.nominals.several(verb.objects, either=self.dice.chance(0.2))
        else:
            what = self.nominals.any_of(verb.objects, relative=relative)
        return marked(what.phrase, OBJECT)

    def _manner(self, verb: Verb) -> Phrase | None:
        return self.dice.pick(verb.manners) if verb.manners and self.dice.chance(0.12) else None

    def _place(self, place: Place, particle: Particle, *, towards: bool = False) -> Phrase:
        """in the library: 도서관에서; to the library: 도서관에."""
        what = place.what
        where = what if isinstance(what, Phrase) else self.nominals.noun(what, KNOWN, plural=False).phrase
        return led(place.towards if towards else place.preposition, marked(where, particle))


IT = Nominal(unsaid("it"), Agreement.SINGULAR)  # of the weather


def _marked(subject: Nominal, scope: Scope) -> Phrase:
    if subject is IT:
        return subject.phrase
    return marked(subject.phrase, TOPIC if subject.known and not scope.embedded else SUBJECT)
