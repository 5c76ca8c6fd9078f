"""Rules of Korean word forms: particles of nouns, and endings of verbs and adjectives.

A Hangul syllable consists of an initial consonant, a vowel and an optional final consonant. Particles and
endings depend on that final consonant: 책은 but 사과는, 먹는다 but 간다. All functions here are pure
functions of the syllables and the conjugation class of the lexicon.

>>> append_particle("책", TOPIC), append_particle("사과", TOPIC), append_particle("서울", BY)
('책은', '사과는', '서울로')
>>> eat, help = Stem("먹"), Stem("돕", irregular="ㅂ")
>>> [conjugate(eat, tense, Ending.PLAIN) for tense in (Tense.PRESENT, Tense.PAST)]
['먹는다', '먹었다']
>>> [conjugate(help, tense, Ending.NOUN) for tense in Tense]
['도운', '돕는', '도울']
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

# The order of the parts of a syllable in Unicode.
INITIALS = "ㄱㄲㄴㄷㄸㄹㅁㅂㅃㅅㅆㅇㅈㅉㅊㅋㅌㅍㅎ"
VOWELS = "ㅏㅐㅑㅒㅓㅔㅕㅖㅗㅘㅙㅚㅛㅜㅝㅞㅟㅠㅡㅢㅣ"
FINALS = ("", *"ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ")
FIRST_SYLLABLE = ord("가")


def _decompose(syllable: str) -> tuple[str, str, str]:
    """Initial, vowel, final: 한 → ㅎ, ㅏ, ㄴ."""
    number = ord(syllable) - FIRST_SYLLABLE
    per_vowel = len(FINALS)
    per_initial = len(VOWELS) * per_vowel
    initial, rest = divmod(number, per_initial)
    return INITIALS[initial], VOWELS[rest // per_vowel], FINALS[rest % per_vowel]


def _compose(initial: str, vowel: str, final_consonant: str = "") -> str:
    number = (INITIALS.index(initial) * len(VOWELS) + VOWELS.index(vowel)) * len(FINALS) + FINALS.index(final_consonant)
    return chr(FIRST_SYLLABLE + number)


def final_consonant(word: str) -> str:
    """The final consonant of the last syllable; empty after a vowel."""
    return _decompose(word[-1])[2]


def _replace_final(word: str, final_consonant: str) -> str:
    initial, vowel, _ = _decompose(word[-1])
    return word[:-1] + _compose(initial, vowel, final_consonant)


def _replace_vowel(word: str, vowel: str) -> str:
    """Replace the vowel of the last syllable, and remove its final consonant."""
    return word[:-1] + _compose(_decompose(word[-1])[0], vowel)


@dataclass(frozen=True)
class Particle:
    """The forms of a particle, by the last sound of the noun."""

    consonant: str
    vowel: str
    liquid: str  # after ㄹ


TOPIC = Particle("은", "는", "은")
SUBJECT = Particle("이", "가", "이")
OBJECT = Particle("을", "를", "을")
AND = Particle("과", "와", "과")
OR = Particle("이나", "나", "이나")
BY = Particle("으로", "로", "로")  # by means of, or towards
AT = Particle("에", "에", "에")  # where something is or goes to
IN = Particle("에서", "에서", "에서")  # where something is done
TO = Particle("에게", "에게", "에게")  # to somebody
OF = Particle("의", "의", "의")


@functools.cache
def append_particle(noun: str, particle: Particle) -> str:
    """The noun with its particle, written as one word."""
    if particle == SUBJECT and noun in ("나", "너"):
        return {"나": "내가", "너": "네가"}[noun]
    last = final_consonant(noun)
    return noun + (particle.liquid if last == "ㄹ" else particle.consonant if last else particle.vowel)


class PredicateGroup(enum.Enum):
    """Groups of predicates, by their present, and their present and past before a noun."""

    ACTION = "먹는다, 먹는, 먹은"
    FEELING = "안다, 아는, 알았던"
    STATE = "크다, 큰, 컸던"
    EXISTENCE = "있다, 있는, 있던"
    COPULA = "이다, 인, 이었던"


VERB_GROUPS = (PredicateGroup.ACTION, PredicateGroup.FEELING)


class Tense(enum.Enum):
    """The tense of a predicate."""

    PAST = enum.auto()
    PRESENT = enum.auto()
    FUTURE = enum.auto()


class Ending(enum.Enum):
    """The ending of a predicate: final, or connecting."""

    PLAIN = "다"
    AND = "고"
    BUT = "지만"
    BECAUSE = "기"  # before 때문에
    WHEN = "ㄹ"  # before 때
    IF = "면"
    NOUN = "ㄴ"  # before the noun that it modifies


@dataclass(frozen=True)
class Stem:
    """A predicate without its ending. ``irregular`` names the conjugation class: ㅂ ㄷ ㅅ ㅎ 르, or none.

    Regular cases have no class: ㅡ and ㄹ that are dropped (크다 → 컸다, 살다 → 산다), and 하다.
    """

    text: str
    group: PredicateGroup = PredicateGroup.ACTION
    irregular: str = ""


@functools.cache
def conjugate(stem: Stem, tense: Tense, ending: Ending) -> str:
    """The written form. The future has its own form only before a noun: 갈; otherwise it is 갈 것이다."""
    if ending is Ending.NOUN:
        return _conjugate_before_noun(stem, tense)
    if tense is Tense.FUTURE:
        raise ValueError(f"the future of {stem.text}다 is 것이다 after its form before a noun")
    if tense is Tense.PAST:
        stem = make_past_stem(stem)
    if ending is Ending.PLAIN and stem.group in VERB_GROUPS:
        return _append_with_eu(stem, "ㄴ") + "다" if final_consonant(stem.text) in ("", "ㄹ") else stem.text + "는다"
    if ending in (Ending.WHEN, Ending.IF):
        return _append_with_eu(stem, ending.value)
    return f"{stem.text}{ending.value}"


def _conjugate_before_noun(stem: Stem, tense: Tense) -> str:
    if tense is Tense.FUTURE:
        return _append_with_eu(stem, "ㄹ")
    if tense is Tense.PAST and stem.group is not PredicateGroup.ACTION:
        return (stem if stem.group is PredicateGroup.EXISTENCE else make_past_stem(stem)).text + "던"
    if tense is Tense.PRESENT and stem.group in (*VERB_GROUPS, PredicateGroup.EXISTENCE):
        return (_replace_final(stem.text, "") if final_consonant(stem.text) == "ㄹ" else stem.text) + "는"
    return _append_with_eu(stem, "ㄴ")


def _append_with_eu(stem: Stem, ending: str) -> str:
    """Append ㄴ, ㄹ or 면, with 으 after a consonant."""
    text, last = stem.text, final_consonant(stem.text)
    if stem.irregular == "ㅂ":
        text, last = _replace_final(text, "") + "우", ""
    elif stem.irregular == "ㄷ":
        text = _replace_final(text, "ㄹ")
    elif stem.irregular == "ㅅ":
        text = _replace_final(text, "")
    elif stem.irregular == "ㅎ":
        text, last = _replace_final(text, ""), ""
    if last not in ("", "ㄹ"):
        return text + {"ㄴ": "은", "ㄹ": "을"}.get(ending, "으" + ending)
    return _replace_final(text, ending) if ending in FINALS else text + ending


@functools.cache
def make_infinitive(stem: Stem) -> str:
    """The stem with 아 or 어, contracted as in writing: 먹어, 가, 마셔, 써, 해, 도와, 들어, 불러, 보아."""
    text = stem.text
    initial, vowel, last = _decompose(text[-1])
    previous = _decompose(text[-2])[1:] if len(text) > 1 else ("", "")
    infinitive_vowel = "ㅏ" if vowel in "ㅏㅗ" else "ㅓ"
    if stem.group is PredicateGroup.COPULA:
        # 학생이어, but 의사여; and 아니어.
        return text + "어" if previous[1] or text.endswith("아니") else text[:-1] + "여"
    if stem.irregular == "르":
        text, infinitive_vowel = _replace_final(text[:-1], "ㄹ"), "ㅏ" if previous[0] in "ㅏㅗ" else "ㅓ"
        return text + _compose("ㄹ", infinitive_vowel)
    if stem.irregular == "ㅂ":
        return _replace_final(text, "") + ("와" if text == "돕" else "워")
    if stem.irregular == "ㅎ":
        return _replace_vowel(text, {"ㅏ": "ㅐ", "ㅑ": "ㅒ"}[vowel])
    if stem.irregular == "ㄷ":
        text = _replace_final(text, "ㄹ")
    if stem.irregular == "ㅅ":
        text = _replace_final(text, "")
    if last:
        return text + _compose("ㅇ", infinitive_vowel)
    if text[-1] == "하":
        return text[:-1] + "해"
    if vowel == "ㅡ":
        return _replace_vowel(text, "ㅏ" if previous[0] in ("ㅏ", "ㅗ") else "ㅓ")
    if vowel in "ㅏㅓㅕㅐㅔ":
        return text
    if vowel == "ㅣ":
        return _replace_vowel(text, "ㅕ")
    if vowel in "ㅗㅜ" and initial == "ㅇ":  # 와, 배워; but 보아, 주어, which may be contracted in speech
        return _replace_vowel(text, {"ㅗ": "ㅘ", "ㅜ": "ㅝ"}[vowel])
    return text + _compose("ㅇ", infinitive_vowel)


def make_past_stem(stem: Stem) -> Stem:
    """먹 → 먹었, a stem for further endings."""
    return Stem(_replace_final(make_infinitive(stem), "ㅆ"), PredicateGroup.STATE)


def make_negative_stem(stem: Stem) -> Stem:
    """않 in the group of this predicate: 먹지 않는다, but 크지 않다."""
    return Stem("않", stem.group if stem.group in VERB_GROUPS else PredicateGroup.STATE)
